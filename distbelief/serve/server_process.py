"""The process of a parameter server without a job: a supervisor and its shards.

    python -m distbelief.serve.server_process REQUEST_FILE

`ParameterServer` starts this program. It prints one line of JSON (`ServerReady`), and ends
with its shards when its standard input is closed, so it never outlives its parent. `distbelief
serve` calls `serve` in its own process (`standalone`). If the directory has checkpoints, the
server continues from them, with new incarnations of all roles.
"""

import os
import secrets
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import save_file

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
from distbelief.serve.address import ServerAddress
from distbelief.supervisor.config import SupervisorConfig
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.supervisor import Supervisor
from distbelief.task.task import DataSpec, ModelSpec
from distbelief.transport.address import LOOPBACK, Endpoint
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.config import DownpourSettings


TICK_SECONDS: Final = 0.05


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a parameter server."""

    tensors: tuple[TensorSpec, ...]
    rule: UpdateRule
    n_shards: int
    shard_copies: int
    shared_memory: bool = True  # with workers on this host
    snapshot_every: float  # seconds between checkpoints
    directory: str = ""  # for checkpoints, logs and the initial values
    keeps: bool = True  # False: remove the directory at the end
    run: str = ""  # name of the run; "": a random one
    reach: ListenConfig = ListenConfig()

    @property
    def initial_file(self) -> Path:
        return Path(self.directory) / "initial.safetensors"

    def write_initial(self, parameters: Iterable[torch.Tensor]) -> None:
        """Write the initial values."""
        values = {
            spec.name: parameter.detach().contiguous().clone()
            for spec, parameter in zip(self.tensors, parameters, strict=True)
        }
        files.write_by(self.initial_file, lambda path: save_file(values, path))

    def address(self, endpoint: str, *, run: str, memory: str) -> ServerAddress:
        """Return the address of the server that listens at this endpoint."""
        place = Endpoint.parse(endpoint)
        return ServerAddress(
            endpoint=place.endpoint,
            run=run,
            key="" if self.reach.secret else place.key,
            secret=self.reach.secret,
            n_shards=self.n_shards,
            shard_copies=self.shard_copies,
            memory=memory,
        )


class ServerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The line of output: where the server listens, or why it could not start."""

    address: str = ""
    error: str | None = None

    def print(self) -> None:
        sys.stdout.write(msgspec.json.encode(self).decode() + "\n")
        sys.stdout.flush()


Watch = Callable[[RoleRunner, Supervisor, ServerAddress], None]


def main(path: str) -> int:
    """Run the server that the request file describes; return the exit status."""
    # A terminal sends these to all its processes; here only the parent decides when to end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    request = msgspec.json.decode(Path(path).read_bytes(), type=ServerRequest)
    try:
        error = serve(request, _watched_by_parent)
    except DistBeliefError as problem:
        ServerReady(error=str(problem)).print()
        return 1
    finally:
        if not request.keeps:  # the parent may have been killed before it could remove it
            shutil.rmtree(request.directory, ignore_errors=True)
    if error is not None:
        ServerReady(error=error).print()
    return 0


def serve(
    request: ServerRequest, watch: Watch, *, tell: Callable[[str], None] | None = None
) -> str | None:
    """Run a parameter server until it ends; return its error, if any.

    `watch` runs the node until the server should end; `tell` gets warnings about damaged files.

    Raises:
        DistBeliefError: the server cannot start.
    """
    FileMemory.sweep()
    memory = FileMemory.make()  # its directory also contains the sockets
    try:
        return _serve(request, memory.directory, watch, tell)
    finally:
        memory.remove_all()


def _serve(
    request: ServerRequest, private: Path, watch: Watch, tell: Callable[[str], None] | None
) -> str | None:
    directory = Path(request.directory)
    run = request.run or secrets.token_hex(16)
    reach = request.reach.within(private)
    memory = str(private) if request.shared_memory else ""

    def log_of(name: str) -> Path:
        return directory / f"{name}.log"

    lines = files.LineFile(log_of("supervisor"), tell=_warn_on_stderr)
    disk = Writer("disk", tell=lambda text: log("warning", text))

    def log(level: str, text: str) -> None:
        disk.write(partial(lines.append, f"{level}: {text}"))

    def warn(text: str) -> None:
        log("warning", text)
        if tell is not None:
            tell(text)

    previous = _previous_run(request, warn)
    links = reach.transport(
        name=SUPERVISOR, incarnation=previous.incarnation, run=run, log=log, port=reach.port
    )
    with links:
        spec = directory / "spec.json"
        address = request.address(links.endpoint, run=run, memory=memory)
        own = str(Endpoint.parse(links.endpoint).seen_from(LOOPBACK))
        resolved = msgspec.structs.replace(request, run=run, reach=reach)
        files.write_private(spec, _role_spec(resolved, own, memory))  # it may contain a secret
        config = SupervisorConfig(
            roster=tuple(
                (name, "shard")
                for k in range(request.n_shards)
                for name in copy_names(k, request.shard_copies)
            ),
            stop=None,
            admits_guests=True,
            snapshot_every=request.snapshot_every,
            first_incarnation=previous.incarnation,
            first_label=previous.label,
            before=previous.before,
        )
        supervisor = Supervisor(config)
        with LocalLauncher(spec=spec, log_of=log_of) as launcher:
            node = RoleRunner(supervisor, transport=links, log=log, launcher=launcher)
            with disk:
                watch(node, supervisor, address)
    return _outcome(node, supervisor, directory)


def _outcome(node: RoleRunner, supervisor: Supervisor, directory: Path) -> str | None:
    kept = f"{directory} has the state of the last checkpoint"
    if supervisor.interrupted:
        return f"ended at once: {kept}"
    if supervisor.error is None and node.error is not None:
        return f"{node.error}: {kept}"
    return supervisor.error


def _previous_run(request: ServerRequest, warn: Callable[[str], None]) -> PreviousRun:
    run = RunDirectory(Path(request.directory), lock=None)
    store = CheckpointStore(run.snapshots, report=warn)
    previous = read_previous_run(run, store, n_shards=request.n_shards)
    # The other totals are those of replicas, which a server has not.
    return replace(previous, before=PreviousTotals(clocks=previous.before.clocks))


def _watched_by_parent(node: RoleRunner, supervisor: Supervisor, address: ServerAddress) -> None:
    # Reports to the parent process that the server is ready, and ends when it closes the pipe.
    is_ready = is_stopping = False

    def tick() -> None:
        nonlocal is_ready, is_stopping
        if not is_ready and supervisor.status()[0] == "training":
            is_ready = True
            ServerReady(address=str(address)).print()
        readable, _, _ = select.select([sys.stdin], [], [], 0)
        if readable and not is_stopping and not os.read(sys.stdin.fileno(), 4096):
            is_stopping = True
            stop = Stop(reason="the server was closed")
            node.post(Received(sender=USER, incarnation=0, message=stop))

    node.run(tick, tick_seconds=TICK_SECONDS)


def _role_spec(request: ServerRequest, supervisor: str, memory: str) -> bytes:
    # The shards' processes need a job: this one has no data and no replicas.
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
        initial_file=str(request.initial_file),
        reach=request.reach,
    )
    return msgspec.json.encode(spec)


def _warn_on_stderr(text: str) -> None:
    with suppress(OSError):  # standard output is only for the line of JSON
        sys.stderr.write(f"parameter server: {text}. It continues without this log\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
