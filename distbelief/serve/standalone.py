"""A standing parameter server in the foreground: what `distbelief serve` does.

    DIRECTORY/            0700
      request.json  0600  what is served; a run's secret too, so that its address lasts
      initial.safetensors parameters of the first life
      snapshots/          to go on from
      *.log               of the supervisor and every shard
      lock                held while it runs
      aside-N/            what it held before it began anew (--from-scratch)

The same directory again means: go on. Then the parameters come from its snapshots, the
address is the one before (if its port is), and what is served must be the same.
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
from distbelief.transport.address import ANYWHERE, Endpoint, own_number
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner


TELL_SECONDS: Final = 30.0
"""Between two lines of progress, if anything has changed."""

Tell = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the user wants served.

    Attributes:
        model: Whose present parameters are the initial ones.
        rule: How shards apply a push.
        shards: Into how many slices the parameters are cut.
        shard_copies: How many processes keep each.
        shared_memory: Whether workers of this machine share memory with them.
        snapshot_every: Seconds between snapshots.
        reach: From where the server can be reached.
    """

    model: torch.nn.Module
    rule: UpdateRule
    shards: int
    shard_copies: int
    shared_memory: bool
    snapshot_every: float
    reach: ListenConfig


def run_server(
    wanted: ServeOptions, directory: Path, *, tell: Tell, from_scratch: bool = False
) -> str | None:
    """Serve until Ctrl+C or SIGTERM; return what went wrong, if anything did.

    Args:
        wanted: What.
        directory: Where it is kept.
        tell: Tells the user.
        from_scratch: Whether to begin anew, and put aside what the directory holds.

    Raises:
        JobError: what is wanted cannot be, or is not what this directory holds.
        StorageError: a server runs there already, or the disk does not take it.
        TransportError: the address cannot be had.
    """
    wanted.reach.check()
    if wanted.reach.keys is not None:
        wanted.reach.keys.guard(log=lambda _level, _text: None)  # can it be made?
    with _taken(directory) as run:
        request = _request(wanted, run, tell=tell, from_scratch=from_scratch)
        return serve(request, _Terminal(request, tell=tell).watch, tell=tell)


def _taken(directory: Path) -> RunDirectory:
    """Return the directory, which is this process's as long as it is open."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir()}
        if "request.json" not in names and names - {"lock", "initial.safetensors"}:
            raise JobError(
                f"{directory} holds something else than a parameter server: name a new "
                "directory (--directory), or one that `distbelief serve` made"
            )
        directory.chmod(0o700)
    except OSError as error:
        raise files.explained(error, directory, doing="make") from error
    return RunDirectory.take(directory)


def _request(
    wanted: ServeOptions, run: RunDirectory, *, tell: Tell, from_scratch: bool
) -> ServerRequest:
    """Return what is to be served: as before, if there was anything before."""
    parameters = list(wanted.model.parameters())
    specs = tuple(parameter_specs(parameters))
    initial = run.path.absolute() / "initial.safetensors"
    request = ServerRequest(
        tensors=specs,
        initial_file=str(initial),
        rule=wanted.rule,
        n_shards=wanted.shards,
        shard_copies=wanted.shard_copies,
        shared_memory=wanted.shared_memory,
        snapshot_every=wanted.snapshot_every,
        directory=str(run.path.absolute()),
        run=secrets.token_hex(16),
        reach=wanted.reach.pinned(),
    )
    file = run.path / "request.json"
    is_first = not file.is_file()
    if from_scratch and not is_first:
        place = run.put_aside(initial, run.snapshots)
        tell(f"begins anew; what was saved before is in {place}")
        is_first = True  # with a token of its own: nobody goes on with what was
    if not is_first:
        before = _read(file)
        _check_same(request, before, directory=run.path)
        request = _gone_on(request, before)
        tell(f"going on with what {run.path} holds")
    else:
        values = {
            spec.name: parameter.detach().contiguous().clone()
            for spec, parameter in zip(specs, parameters, strict=True)
        }
        files.write_by(initial, lambda path: save_file(values, path))
    files.write_private(file, msgspec.json.encode(request))  # a secret may be in it
    return request


def _gone_on(request: ServerRequest, before: ServerRequest) -> ServerRequest:
    """Return what is to be served, under the name and by the secret from before."""
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
            f"{file} is damaged ({error}): the snapshots beside it are whole "
            "all the same; begin in a new directory"
        ) from None


def _check_same(now: ServerRequest, before: ServerRequest, *, directory: Path) -> None:
    for what, was, wanted in (
        ("model", _shapes(before), _shapes(now)),
        ("rule", before.rule, now.rule),
        ("number of shards", before.n_shards, now.n_shards),
    ):
        if was != wanted:
            raise JobError(
                f"{directory} is of another {what}: it was {was!s:.300}, and now is "
                f"{wanted!s:.300}. Leave it as it was, or name a new directory "
                "(--directory)"
            )


def _shapes(request: ServerRequest) -> list[tuple[int, ...]]:
    return [tuple(spec.shape) for spec in request.tensors]


@final
class _Terminal:
    """Says where the server is and how it goes, and ends it at Ctrl+C."""

    def __init__(self, request: ServerRequest, *, tell: Tell) -> None:
        self._request = request
        self._screen = Writer("screen", tell=tell)
        self._say = tell
        self._told = 0  # number of the last message
        self._told_at = time.monotonic()
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
            self._tell(f"ended; {self._request.directory} holds what was trained")

    def _tell(self, text: str) -> None:
        """Say it, in a thread: nobody may be reading the terminal."""
        self._screen.write(partial(self._say, text))

    def _tick(self, supervisor: Supervisor, ready: ServerReady) -> None:
        now = time.monotonic()
        view = supervisor.view(now)
        supervisor.take_records()
        if not self._is_ready and view.phase == "training":
            self._is_ready = True
            for line in self._lines(ready):
                self._tell(line)
        for message in view.messages:
            if message.number > self._told:
                self._told = message.number
                self._tell(message.text)
        if now - self._told_at >= TELL_SECONDS and view.pushes_applied != self._n_pushes:
            self._told_at, self._n_pushes = now, view.pushes_applied
            pushes = formatting.count(view.pushes_applied)
            self._tell(f"{_workers(view)}, {pushes} pushes applied")

    def _lines(self, ready: ServerReady) -> list[str]:
        """Return what a user needs to know to begin."""
        place = Endpoint.parse(ready.endpoint)
        is_anywhere = place.host == ANYWHERE
        request = self._request
        address = ServerAddress(
            endpoint=place.seen_from(own_number()).endpoint,
            run=ready.run,
            key="" if request.reach.secret else place.key,
            secret=request.reach.secret,
            n_shards=request.n_shards,
            shard_copies=request.shard_copies,
            memory="",
        )
        lines = []
        if not request.reach.is_local:
            lines = [f"workers on other machines: {address}"]
            if is_anywhere:
                lines.append("(any other address of this machine will do as well)")
        here = msgspec.structs.replace(address, memory=ready.memory)
        lines.append(f"workers on this machine: {here}")
        if request.reach.is_open:
            lines.append(
                "NOT SECURE: whoever has this line can read all that is trained, and "
                "change it. Use keys: distbelief keys new"
            )
        elif request.reach.secret:
            lines.append("whoever knows this line can push: keep it to yourself")
        return lines


def _workers(view: JobView) -> str:
    """Return how many there are now: who is silent for long is away."""
    heard = [role for role in view.roles if role.last_heartbeat_age is not None]
    n = sum(role.name.startswith("worker-") for role in heard)
    return "1 worker" if n == 1 else f"{n} workers"
