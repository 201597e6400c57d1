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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.core import files, formatting
from distbelief.core.signals import REASONS, caught_signals
from distbelief.core.writer import Writer
from distbelief.errors import JobError
from distbelief.protocol import Stop
from distbelief.roles.role import USER, Received
from distbelief.run.directory import RunDirectory
from distbelief.serve.address import ServerAddress
from distbelief.serve.server_process import ServerRequest, serve
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.view import JobView
from distbelief.transport.address import ANYWHERE, Endpoint, own_address
from distbelief.transport.node import RoleRunner


PROGRESS_SECONDS: Final = 30.0  # between two lines of progress, if there were pushes

Tell = Callable[[str], None]


def run_server(
    request: ServerRequest,
    parameters: Sequence[torch.Tensor],
    directory: Path,
    *,
    tell: Tell,
    from_scratch: bool = False,
) -> str | None:
    """Run a server until Ctrl+C or SIGTERM; return its error, if any.

    Args:
        request: What to serve; its directory and the name of its run are set here.
        parameters: The initial ones.
        directory: For checkpoints and logs.
        tell: Prints a line for the user.
        from_scratch: Start again; earlier files are moved to a subdirectory.

    Raises:
        JobError: the options are not valid, or differ from those of the directory.
        StorageError: a server runs in the directory, or the disk cannot be written.
        TransportError: the address cannot be bound.
    """
    request.reach.check()
    if request.reach.keys is not None:
        # Read the keys now, so that an error in them comes before any file is written.
        request.reach.keys.guard(log=lambda _level, _text: None)
    with _open_directory(directory) as run:
        request = _resolved(request, parameters, run, tell=tell, from_scratch=from_scratch)
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


def _resolved(
    request: ServerRequest,
    parameters: Sequence[torch.Tensor],
    run: RunDirectory,
    *,
    tell: Tell,
    from_scratch: bool,
) -> ServerRequest:
    # With the name and the secret of an earlier run, so that the server's address stays the same.
    request = msgspec.structs.replace(
        request,
        directory=str(run.path.absolute()),
        run=secrets.token_hex(16),
        reach=request.reach.pinned(),
    )
    file = run.path / "request.json"
    is_first = not file.is_file()
    if from_scratch and not is_first:
        place = run.put_aside(request.initial_file, run.snapshots)
        tell(f"starting from scratch; earlier files are in {place}")
        is_first = True  # a new name of the run: workers of the earlier server cannot push
    if is_first:
        request.write_initial(parameters)
    else:
        before = _read(file)
        _check_same(request, before, directory=run.path)
        reach = request.reach
        if reach.secret and before.reach.secret:
            reach = msgspec.structs.replace(reach, secret=before.reach.secret)
        request = msgspec.structs.replace(request, run=before.run or request.run, reach=reach)
        tell(f"continuing from the checkpoints in {run.path}")
    files.write_private(file, msgspec.json.encode(request))  # it may contain a secret
    return request


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
    old_shapes, new_shapes = ([spec.shape for spec in each.tensors] for each in (before, now))
    for what, old, new in (
        ("model", old_shapes, new_shapes),
        ("rule", before.rule, now.rule),
        ("number of shards", before.n_shards, now.n_shards),
    ):
        if old != new:
            raise JobError(
                f"{directory} has another {what}: {old!s:.300} instead of {new!s:.300}. "
                "Use the same, or name a new directory (--directory)"
            )


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

    def watch(self, node: RoleRunner, supervisor: Supervisor, address: ServerAddress) -> None:
        """Run the node until it ends."""
        with caught_signals() as caught:

            def stop(number: signal.Signals) -> None:
                message = Stop(reason=REASONS[number])
                node.post(Received(sender=USER, incarnation=0, message=message))

            caught.tell = stop
            with self._screen:
                error = node.run(lambda: self._tick(supervisor, address))
        if not (error or supervisor.error or supervisor.interrupted):
            self._report(f"ended; the parameters are saved in {self._request.directory}")

    def _report(self, text: str) -> None:
        # In a thread: a terminal that nobody reads must not block the server.
        self._screen.write(partial(self._print, text))

    def _tick(self, supervisor: Supervisor, address: ServerAddress) -> None:
        now = time.monotonic()
        view = supervisor.view(now)
        supervisor.take_records()
        if not self._is_ready and view.phase == "training":
            self._is_ready = True
            for line in self._address_lines(address):
                self._report(line)
        for message in view.messages:
            if message.number > self._n_reported:
                self._n_reported = message.number
                self._report(message.text)
        if now - self._reported_at >= PROGRESS_SECONDS and view.pushes_applied != self._n_pushes:
            self._reported_at, self._n_pushes = now, view.pushes_applied
            pushes = formatting.count(view.pushes_applied)
            self._report(f"{_workers(view)}, {pushes} pushes applied")

    def _address_lines(self, address: ServerAddress) -> list[str]:
        # The addresses, and a warning if they give access to strangers.
        place = Endpoint.parse(address.endpoint)
        endpoint = place.seen_from(own_address()).endpoint
        here = msgspec.structs.replace(address, endpoint=endpoint)
        reach = self._request.reach
        lines = []
        if not reach.is_local:
            elsewhere = msgspec.structs.replace(here, memory="")
            lines = [f"workers on other hosts: {elsewhere}"]
            if place.host == ANYWHERE:
                lines.append("(other IP addresses of this host work too)")
        lines.append(f"workers on this host: {here}")
        if reach.is_open:
            lines.append(
                "NOT SECURE: anyone with this address can read and change the parameters. "
                "Use keys instead: distbelief keys new"
            )
        elif reach.secret:
            lines.append("anyone who knows this address can push: keep it secret")
        return lines


def _workers(view: JobView) -> str:
    # Workers that have been silent for long have no heartbeat age.
    heard = [role for role in view.roles if role.last_heartbeat_age is not None]
    n = sum(role.name.startswith("worker-") for role in heard)
    return "1 worker" if n == 1 else f"{n} workers"
