"""The standalone parameter server of `distbelief serve`.

    DIRECTORY/            0700
      request.json  0600  the configuration, with the run's secret: its address stays the same
      initial.safetensors the initial parameters
      snapshots/          checkpoints
      *.log               of the supervisor and each shard
      lock                held while the server runs
      aside-N/            earlier files, moved there by --from-scratch

A server in the same directory continues from its checkpoints, with the same address if it has
the same port. Model, rule and number of shards must be the same.
"""

import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, final

import msgspec
import torch
from safetensors.torch import save_file

from distbelief.core import files, formatting
from distbelief.core.signals import REASONS, caught_signals
from distbelief.core.writer import Writer
from distbelief.errors import JobError
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.protocol import Stop
from distbelief.roles.role import USER, Received
from distbelief.run.directory import RunDirectory
from distbelief.serve.server import ServerAddress, parameter_specs
from distbelief.serve.server_process import ServerReady, ServerRequest, serve
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.view import JobView
from distbelief.transport.address import ANYWHERE, Endpoint, own_address
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner


PROGRESS_SECONDS: Final = 30.0  # between two lines of progress, if there were pushes

Tell = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `distbelief serve`."""

    model: torch.nn.Module  # its parameters are the initial ones
    rule: UpdateRule
    shards: int
    shard_copies: int
    shared_memory: bool  # with workers on this host
    snapshot_every: float  # seconds between checkpoints
    reach: ListenConfig


def run_server(
    options: ServeOptions, directory: Path, *, tell: Tell, from_scratch: bool = False
) -> str | None:
    """Run a server until Ctrl+C or SIGTERM; return its error, if any.

    Args:
        options: The options.
        directory: For checkpoints and logs.
        tell: Prints a line for the user.
        from_scratch: Start again; earlier files are moved to a subdirectory.

    Raises:
        JobError: the options are not valid, or differ from those of the directory.
        StorageError: a server runs in the directory, or the disk cannot be written.
        TransportError: the address cannot be bound.
    """
    options.reach.check()
    if options.reach.keys is not None:
        # Read the keys now, so that an error in them comes before any file is written.
        options.reach.keys.guard(log=lambda _level, _text: None)
    with _open_directory(directory) as run:
        request = _request(options, run, tell=tell, from_scratch=from_scratch)
        return serve(request, _Terminal(request, tell=tell).watch, tell=tell)


def _open_directory(directory: Path) -> RunDirectory:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir()}
        if "request.json" not in names and names - {"lock", "initial.safetensors"}:
            raise JobError(
                f"{directory} is not the directory of a parameter server: name a new one "
                "(--directory), or one that `distbelief serve` made"
            )
        directory.chmod(0o700)
    except OSError as error:
        raise files.explained(error, directory, doing="make") from error
    return RunDirectory.take(directory)


def _request(
    options: ServeOptions, run: RunDirectory, *, tell: Tell, from_scratch: bool
) -> ServerRequest:
    # A new request, or the stored one of this directory.
    parameters = list(options.model.parameters())
    specs = tuple(parameter_specs(parameters))
    initial = run.path.absolute() / "initial.safetensors"
    request = ServerRequest(
        tensors=specs,
        initial_file=str(initial),
        rule=options.rule,
        n_shards=options.shards,
        shard_copies=options.shard_copies,
        shared_memory=options.shared_memory,
        snapshot_every=options.snapshot_every,
        directory=str(run.path.absolute()),
        run=secrets.token_hex(16),
        reach=options.reach.pinned(),
    )
    file = run.path / "request.json"
    is_first = not file.is_file()
    if from_scratch and not is_first:
        place = run.put_aside(initial, run.snapshots)
        tell(f"starting from scratch; earlier files are in {place}")
        is_first = True  # a new name of the run: workers of the earlier server cannot push
    if not is_first:
        before = _read(file)
        _check_same(request, before, directory=run.path)
        request = _continued(request, before)
        tell(f"continuing from the checkpoints in {run.path}")
    else:
        values = {
            spec.name: parameter.detach().contiguous().clone()
            for spec, parameter in zip(specs, parameters, strict=True)
        }
        files.write_by(initial, lambda path: save_file(values, path))
    files.write_private(file, msgspec.json.encode(request))  # it may contain a secret
    return request


def _continued(request: ServerRequest, before: ServerRequest) -> ServerRequest:
    # Name and secret of the run stay, so that the address of the server stays the same.
    reach, secret = request.reach, before.reach.secret
    if reach.secret and secret:
        reach = msgspec.structs.replace(reach, secret=secret)
    return msgspec.structs.replace(request, run=before.run or request.run, reach=reach)


def _read(file: Path) -> ServerRequest:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ServerRequest)
    except OSError as error:
        raise files.explained(error, file, doing="read") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JobError(
            f"{file} is damaged ({error}): use a new directory; the checkpoints beside the "
            "file are not affected"
        ) from None


def _check_same(now: ServerRequest, before: ServerRequest, *, directory: Path) -> None:
    for what, old, new in (
        ("model", _shapes(before), _shapes(now)),
        ("rule", before.rule, now.rule),
        ("number of shards", before.n_shards, now.n_shards),
    ):
        if old != new:
            raise JobError(
                f"{directory} has another {what}: {old!s:.300} instead of {new!s:.300}. "
                "Use the same, or name a new directory (--directory)"
            )


def _shapes(request: ServerRequest) -> list[tuple[int, ...]]:
    return [tuple(spec.shape) for spec in request.tensors]


@final
class _Terminal:
    """The terminal of a standalone server: address, progress, Ctrl+C."""

    def __init__(self, request: ServerRequest, *, tell: Tell) -> None:
        self._request = request
        self._screen = Writer("screen", tell=tell)
        self._print = tell
        self._n_reported = 0  # number of the last message printed
        self._reported_at = time.monotonic()
        self._n_pushes = 0
        self._is_ready = False

    def watch(self, node: RoleRunner, supervisor: Supervisor, ready: ServerReady) -> None:
        """Run the node until it ends."""
        with caught_signals() as caught:

            def stop(number: signal.Signals) -> None:
                message = Stop(reason=REASONS[number])
                node.post(Received(sender=USER, incarnation=0, message=message))

            caught.tell = stop
            with self._screen:
                error = node.run(lambda: self._tick(supervisor, ready))
        if not (error or supervisor.error or supervisor.interrupted):
            self._report(f"ended; the parameters are saved in {self._request.directory}")

    def _report(self, text: str) -> None:
        # In a thread: a terminal that nobody reads must not block the server.
        self._screen.write(partial(self._print, text))

    def _tick(self, supervisor: Supervisor, ready: ServerReady) -> None:
        now = time.monotonic()
        view = supervisor.view(now)
        supervisor.take_records()
        if not self._is_ready and view.phase == "training":
            self._is_ready = True
            for line in self._address_lines(ready):
                self._report(line)
        for message in view.messages:
            if message.number > self._n_reported:
                self._n_reported = message.number
                self._report(message.text)
        if now - self._reported_at >= PROGRESS_SECONDS and view.pushes_applied != self._n_pushes:
            self._reported_at, self._n_pushes = now, view.pushes_applied
            pushes = formatting.count(view.pushes_applied)
            self._report(f"{_workers(view)}, {pushes} pushes applied")

    def _address_lines(self, ready: ServerReady) -> list[str]:
        # The addresses, and a warning if they give access to strangers.
        place = Endpoint.parse(ready.endpoint)
        is_anywhere = place.host == ANYWHERE
        request = self._request
        address = ServerAddress(
            endpoint=place.seen_from(own_address()).endpoint,
            run=ready.run,
            key="" if request.reach.secret else place.key,
            secret=request.reach.secret,
            n_shards=request.n_shards,
            shard_copies=request.shard_copies,
            memory="",
        )
        lines = []
        if not request.reach.is_local:
            lines = [f"workers on other hosts: {address}"]
            if is_anywhere:
                lines.append("(other IP addresses of this host work too)")
        here = msgspec.structs.replace(address, memory=ready.memory)
        lines.append(f"workers on this host: {here}")
        if request.reach.is_open:
            lines.append(
                "NOT SECURE: anyone who has this address can read and change the parameters. "
                "Use keys instead: distbelief keys new"
            )
        elif request.reach.secret:
            lines.append("anyone who knows this address can push: keep it secret")
        return lines


def _workers(view: JobView) -> str:
    # Workers that have been silent for long have no heartbeat age.
    heard = [role for role in view.roles if role.last_heartbeat_age is not None]
    n = sum(role.name.startswith("worker-") for role in heard)
    return "1 worker" if n == 1 else f"{n} workers"
