"""A parameter server without a job: shards that serve whoever joins, until told to end.

    python -m distbelief.serve.server_process REQUEST_FILE

The program behind `ParameterServer`. It writes one line, where workers find it, or what
went wrong, and ends, with its shards, when its standard input is closed: so it never
outlives the process that started it. `distbelief serve` does the same in a process of
its own (`standing`).

A directory that has snapshots is gone on with: every life of a role is a new one.
"""

import json
import os
import secrets
import select
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, cast

import msgspec

from distbelief.config.job import (
    ClusterTable,
    DataTables,
    EvaluationTable,
    Job,
    OutputTable,
    StopTable,
)
from distbelief.core import files
from distbelief.core.writer import Writer
from distbelief.errors import DistBeliefError
from distbelief.launch.local import LocalLauncher
from distbelief.launch.role_process import RoleSpec
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.parameter_server.replication import copy_names
from distbelief.protocol import Stop
from distbelief.roles.role import SUPERVISOR, USER, Received
from distbelief.run.checkpoints import CheckpointStore
from distbelief.run.directory import RunDirectory
from distbelief.run.resume import PreviousRun, read_previous_run
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.state import SupervisorConfig
from distbelief.supervisor.supervisor import Supervisor
from distbelief.task.task import DataSpec, ModelSpec
from distbelief.transport.address import LOOPBACK, Endpoint
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.config import DownpourSettings


TICK_SECONDS: Final = 0.05
END_SECONDS_MAX: Final = 3.0


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served.

    Attributes:
        tensors: Of the parameters.
        initial_file: Safetensors file with their initial values.
        rule: How shards apply a push.
        n_shards: How many of them.
        shard_copies: How many processes keep each.
        shared_memory: Whether workers of this host may share memory with them.
        snapshot_every: Seconds between snapshots.
        directory: For snapshots and logs.
        keeps: Whether the directory stays when the server has ended.
        run: Its name; drawn if it is "".
        reach: From where the server can be reached.
    """

    tensors: tuple[TensorSpec, ...]
    initial_file: str
    rule: UpdateRule
    n_shards: int
    shard_copies: int
    shared_memory: bool
    snapshot_every: float
    directory: str
    keeps: bool = True
    run: str = ""
    reach: ListenConfig = ListenConfig()


class ServerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of output: where the server is, or why there is none."""

    endpoint: str = ""
    run: str = ""
    memory: str = ""
    error: str | None = None


def main(path: str) -> int:
    """Serve what the request in this file asks for."""
    # The terminal tells everybody; when to end is our parent's business.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    request = msgspec.json.decode(Path(path).read_bytes(), type=ServerRequest)
    try:
        error = serve(request, _watched_by_parent)
    except DistBeliefError as problem:
        _say(ServerReady(error=str(problem)))
        return 1
    finally:
        if not request.keeps:  # its owner may have been killed
            shutil.rmtree(request.directory, ignore_errors=True)
    if error is not None:
        _say(ServerReady(error=error))
    return 0


def serve(
    request: ServerRequest,
    watch: Callable[[RoleRunner, Supervisor, ServerReady], None],
    *,
    tell: Callable[[str], None] | None = None,
) -> str | None:
    """Serve; return what went wrong, if anything did.

    Args:
        request: What.
        watch: Runs the node until the server is to end.
        tell: Tells the user of what is damaged in its directory.

    Raises:
        DistBeliefError: it cannot begin.
    """
    FileMemory.sweep()
    memory = FileMemory.make()  # sockets lie in its directory as well
    try:
        return _serve(request, memory.directory, watch, tell)
    finally:
        memory.remove_all()


def _serve(
    request: ServerRequest,
    private: Path,
    watch: Callable[[RoleRunner, Supervisor, ServerReady], None],
    tell: Callable[[str], None] | None,
) -> str | None:
    directory = Path(request.directory)
    run = request.run or secrets.token_hex(16)
    reach = request.reach.within(private)
    memory = str(private) if request.shared_memory else ""

    def log_of(name: str) -> Path:
        return directory / f"{name}.log"

    lines = files.LineFile(log_of("supervisor"), tell=_complain)

    disk = Writer("disk", tell=lambda text: log("warning", text))

    def log(level: str, text: str) -> None:
        disk.write(partial(lines.append, f"{level}: {text}"))

    def warn(text: str) -> None:
        log("warning", text)
        if tell is not None:
            tell(text)

    legacy = _legacy(request, warn)
    links = reach.transport(
        name=SUPERVISOR, incarnation=legacy.incarnation, run=run, log=log, port=reach.port
    )
    with links:
        spec = directory / "spec.json"
        told = msgspec.structs.replace(request, run=run, reach=reach)
        _write_private(spec, _spec(told, _own(links.endpoint), memory))
        config = SupervisorConfig(
            roster=tuple(
                (name, "shard")
                for k in range(request.n_shards)
                for name in copy_names(k, request.shard_copies)
            ),
            stop=None,
            admits_guests=True,
            snapshot_every=request.snapshot_every,
            first_incarnation=legacy.incarnation,
            first_label=legacy.label,
            before=legacy.before,
        )
        supervisor = Supervisor(config)
        with LocalLauncher(spec=spec, log_of=log_of) as launcher:
            node = RoleRunner(supervisor, transport=links, log=log, launcher=launcher)
            ready = ServerReady(endpoint=links.endpoint, run=run, memory=memory)
            with disk:
                watch(node, supervisor, ready)
    return _outcome(node, supervisor, directory)


def _outcome(node: RoleRunner, supervisor: Supervisor, directory: Path) -> str | None:
    """Return what went wrong, if anything did."""
    if supervisor.interrupted:
        return f"ended at once: {directory} is as its last snapshot has it"
    if supervisor.error is None and node.error is not None:
        return f"{node.error}: {directory} is as its last snapshot has it"
    return supervisor.error


def _write_private(path: Path, content: bytes) -> None:
    """Write a file for its user alone: whoever reads a run's secret could push."""
    try:
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_bytes(content)
    except OSError as error:
        raise files.explained(error, path, doing="write") from error


def _own(endpoint: str) -> str:
    """Return where the server's own processes find the supervisor."""
    return str(Endpoint.parse(endpoint).seen_from(LOOPBACK))


def _legacy(request: ServerRequest, warn: Callable[[str], None]) -> PreviousRun:
    """Return what earlier lives of this server left in its directory."""
    run = RunDirectory(Path(request.directory), lock=None)
    store = CheckpointStore(run.snapshots, report=warn)
    legacy = read_previous_run(run, store, n_shards=request.n_shards)
    # Figures of replicas: a server has none.
    return replace(legacy, before=PreviousTotals(clocks=legacy.before.clocks))


def _watched_by_parent(node: RoleRunner, supervisor: Supervisor, ready: ServerReady) -> None:
    _Parent(node, supervisor, ready).watch()


class _Parent:
    """Tells the process that started this one when to begin, and asks when to end."""

    def __init__(self, node: RoleRunner, supervisor: Supervisor, ready: ServerReady) -> None:
        self._node = node
        self._supervisor = supervisor
        self._ready: ServerReady | None = ready
        self._stopping = False

    def watch(self) -> None:
        self._node.run(self._tick, tick_seconds=TICK_SECONDS)

    def _tick(self) -> None:
        serving = self._supervisor.status()[0] == "training"
        if self._ready is not None and serving:
            _say(self._ready)
            self._ready = None
        readable, _, _ = select.select([sys.stdin], [], [], 0)
        if readable and not self._stopping and not os.read(sys.stdin.fileno(), 4096):
            self._stopping = True
            stop = Stop(reason="the server was closed")
            self._node.post(Received(sender=USER, incarnation=0, message=stop))


def _spec(request: ServerRequest, supervisor: str, memory: str) -> bytes:
    """Return what the shards' processes are told: a job with no data and no replica."""
    layout = Layout.of(request.tensors, n_shards=request.n_shards)
    nothing = "none:none"  # a shard builds neither model nor data
    job = Job(
        model=ModelSpec(factory=nothing),
        data=DataTables(train=DataSpec(factory=nothing)),
        algorithm_name="downpour",
        algorithm=DownpourSettings(loss="mse", batch_size=1, rule=request.rule),
        cluster=ClusterTable(shards=request.n_shards, shard_copies=request.shard_copies),
        evaluation=EvaluationTable(),
        stop=StopTable(samples=1),
        output=OutputTable(directory=request.directory),
        name="server",
        source="server.toml",
        import_paths=(),
    )
    spec = RoleSpec(
        job=msgspec.Raw(job.to_json()),
        run=request.run,
        supervisor=supervisor,
        memory=memory,
        snapshots=str(Path(request.directory) / "snapshots"),
        layout=layout.spec,
        initials={},
        initial_file=request.initial_file,
        reach=request.reach,
    )
    return msgspec.json.encode(spec)


def _complain(text: str) -> None:
    with suppress(OSError):  # standard output is for the one line
        sys.stderr.write(f"parameter server: {text}. It goes on without this log\n")


def _say(ready: ServerReady) -> None:
    text = json.dumps(cast("object", msgspec.to_builtins(ready)))
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
