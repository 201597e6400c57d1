"""The process of a parameter server without a job: a supervisor and its shards.

    python -m distbelief.serve.server_process REQUEST_FILE

`ParameterServer` starts this program. It prints one line of JSON (`ServerReady`), and ends
with its shards when its standard input is closed, so it never outlives its parent. `distbelief
serve` calls `run_server` in its own process. If the directory has checkpoints, the server
continues from them, with new incarnations of all roles.
"""

import gc
import os
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, final

import msgspec
import torch
from safetensors.torch import save_file

from distbelief.config import job as jobs, tables, toml
from distbelief.core import files, formatting
from distbelief.core.errors import DistBeliefError, JobError
from distbelief.core.signals import REASONS, caught_signals
from distbelief.job.launch.local import IMPORT_SECONDS_MAX, LocalLauncher
from distbelief.job.launch.role_process import RoleSpec
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.resume import PreviousRun, read_previous_run
from distbelief.job.run_log import RunLog
from distbelief.parameter_server.layout import Layout, TensorSpec, first_difference
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard_config import copy_names
from distbelief.protocol.role import SUPERVISOR
from distbelief.serve.address import ServerAddress
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView
from distbelief.task.task import DataSpec, ModelSpec
from distbelief.transport.address import LOOPBACK, Endpoint, is_anywhere, own_address
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.downpour_settings import DownpourSettings


TICK_SECONDS: Final = 0.05  # between two looks at the parent process
PROGRESS_SECONDS: Final = 30.0  # between two lines of progress, if there were pushes


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    tensors: tuple[TensorSpec, ...]
    rule: UpdateRule
    exchange: ExchangePolicy = DOWNPOUR
    preset: str = ""  # that chose it
    names: tuple[str, ...] = ()  # of the tensors; (): unknown
    n_shards: int
    shard_copies: int
    shared_memory: bool = True  # with workers on this host
    snapshot_every: float  # seconds between checkpoints
    start_seconds_max: float = 60.0  # for a shard, until its first message
    directory: str = ""  # for checkpoints, logs and the initial values
    keeps: bool = True  # False: remove the directory at the end
    run: str = ""  # name of the run; "": a random one
    reach: ListenConfig = ListenConfig()

    @property
    def initial_file(self) -> Path:
        return Path(self.directory) / "initial.safetensors"

    @property
    def file(self) -> Path:
        return Path(self.directory) / "request.json"

    @property
    def has_checkpoints(self) -> bool:
        return any((Path(self.directory) / "snapshots").rglob("*.safetensors"))

    def prepare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Write what the server process reads.

        Where another server has left checkpoints, this one continues from them; JobError if it had
        other parameters, shards, or another rule.
        """
        if not self.has_checkpoints:
            self.write_initial(parameters)
        elif self.file.is_file():
            _check_same(self, read_request(self.file), directory=Path(self.directory))
        else:
            raise JobError(
                f"{self.directory} holds the checkpoints of something else, not of a "
                "ParameterServer: use another directory"
            )
        files.write_private(self.file, msgspec.json.encode(self))  # it may contain a secret

    def settings(self) -> DownpourSettings:
        """Return what shards are told; they need the settings of a job."""
        return DownpourSettings(
            loss="mse",
            batch_size=1,
            rule=self.rule,
            # What workers send does not matter to shards.
            exchange=msgspec.structs.replace(self.exchange, send="gradient", every=1),
        )

    def check(self, user: str) -> None:
        """Raise JobError if the processes of the server would refuse it."""
        try:
            plain = msgspec.json.decode(msgspec.json.encode(self))
            tables.convert(plain, ServerRequest, user=user).settings()
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise JobError(f"{user}: {error}") from None

    def write_initial(self, parameters: Iterable[torch.Tensor]) -> None:
        values = {
            spec.name: parameter.detach().to(torch.float32, copy=True).contiguous()
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
            exchange=self.exchange,
            preset=self.preset,
            n_buffers=sum(spec.kind != "parameter" for spec in self.tensors),
            names=self.names,
        )


class ServerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The line of output: where the server listens, or why it could not start."""

    address: str = ""
    error: str | None = None

    def print(self) -> None:
        sys.stdout.write(msgspec.json.encode(self).decode() + "\n")
        sys.stdout.flush()


Tell = Callable[[str], None]
Watch = Callable[[RoleRunner, Supervisor, ServerAddress, RunLog], None]


def serve(request: ServerRequest, watch: Watch, *, tell: Tell, forks: bool = False) -> str | None:
    """Run a parameter server for as long as `watch` runs its node; return its error, if any.

    `forks`: as of a `LocalLauncher`.
    """
    FileMemory.sweep()
    memory = FileMemory.make()  # its directory also contains the sockets
    try:
        # Before there are other threads: those of sockets, for one.
        with LocalLauncher(forks=forks) as launcher:
            return _serve(request, memory.directory, watch, tell, launcher)
    finally:
        memory.remove_all()


def _serve(
    request: ServerRequest, private: Path, watch: Watch, tell: Tell, launcher: LocalLauncher
) -> str | None:
    directory = Path(request.directory)
    run = request.run or secrets.token_hex(16)
    reach = request.reach.within(private)
    memory = str(private) if request.shared_memory else ""

    def log_of(name: str) -> Path:
        return directory / f"{name}.log"

    log = RunLog(log_of(SUPERVISOR), SUPERVISOR, tell=tell)
    previous = _previous_run(request, log.warn_user)
    links = reach.transport(
        name=SUPERVISOR, incarnation=previous.incarnation, run=run, log=log.log, port=reach.port
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
            import_seconds_max=IMPORT_SECONDS_MAX,
            start_seconds_max=request.start_seconds_max,
            first_incarnation=previous.incarnation,
            first_label=previous.label,
            before=previous.before,
        )
        supervisor = Supervisor(config)
        launcher.serve(spec=spec, log_of=log_of)
        node = RoleRunner(supervisor, transport=links, log=log.log, launcher=launcher)
        with log.in_threads():
            watch(node, supervisor, address, log)
    return _outcome(node, supervisor, directory)


def _outcome(node: RoleRunner, supervisor: Supervisor, directory: Path) -> str | None:
    kept = f"{directory} has the state of the last checkpoint"
    if supervisor.shutdown.interrupted:
        return f"ended at once: {kept}"
    if supervisor.shutdown.error is None and node.error is not None:
        return f"{node.error}: {kept}"
    return supervisor.shutdown.error


def _previous_run(request: ServerRequest, warn: Callable[[str], None]) -> PreviousRun:
    run = RunDirectory(Path(request.directory), lock=None)
    store = CheckpointStore(run.snapshots, report=warn)
    previous = read_previous_run(run, store, n_shards=request.n_shards)
    # The other totals are those of replicas, which a server has not.
    return replace(previous, before=PreviousTotals(clocks=previous.before.clocks))


def _role_spec(request: ServerRequest, supervisor: str, memory: str) -> bytes:
    # The shards' processes need a job: this one has no data and no replicas.
    layout = Layout.of(request.tensors, n_shards=request.n_shards)
    nothing = "none:none"  # a shard builds neither model nor data
    job = jobs.Job(
        model=ModelSpec(factory=nothing),
        data=jobs.DataTables(train=DataSpec(factory=nothing)),
        algorithm_name="downpour",
        algorithm=request.settings(),
        cluster=jobs.ClusterTable(shards=request.n_shards, shard_copies=request.shard_copies),
        evaluation=jobs.EvaluationTable(),
        stop=jobs.StopTable(samples=1),
        output=jobs.OutputTable(directory=request.directory),
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
        initial_file=str(request.initial_file),
        reach=request.reach,
    )
    return msgspec.json.encode(spec)


def _tell_on_stderr(text: str) -> None:
    sys.stderr.write(f"parameter server: {text}\n")  # standard output is for the line of JSON


def main(path: str) -> int:
    """Run the server that the request file describes; return the exit status."""
    gc.freeze()  # what is imported stays: the collector need not visit it at the end
    # A terminal sends these to all its processes; here only the parent decides when to end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    request = msgspec.json.decode(Path(path).read_bytes(), type=ServerRequest)
    if request.has_checkpoints:
        _tell_on_stderr(f"continuing from the checkpoints in {request.directory}")
    try:
        error = serve(request, _watched_by_parent, tell=_tell_on_stderr, forks=True)
    except DistBeliefError as problem:
        ServerReady(error=str(problem)).print()
        return 1
    finally:
        if not request.keeps:  # the parent may have been killed before it could remove it
            shutil.rmtree(request.directory, ignore_errors=True)
    if error is not None:
        ServerReady(error=error).print()
    return 0


def _watched_by_parent(
    node: RoleRunner, supervisor: Supervisor, address: ServerAddress, _log: RunLog
) -> None:
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
            node.stop("the server was closed")

    node.run(tick, tick_seconds=TICK_SECONDS)


def run_server(
    request: ServerRequest,
    parameters: Sequence[torch.Tensor],
    directory: Path,
    *,
    tell: Tell,
    from_scratch: bool = False,
) -> str | None:
    """Run a server until Ctrl+C or SIGTERM; return its error, if any.

        DIRECTORY/            0700
          request.json  0600  the configuration, with the run's secret: its address stays the same
          initial.safetensors the initial parameters
          snapshots/          checkpoints
          *.log               of the supervisor and each shard
          lock                held while the server runs
          aside-N/            earlier files, moved there by --from-scratch

    A server in the same directory continues from its checkpoints, with the same address if it has
    the same port. Model, rule and number of shards must be the same. The directory and the name of
    the run in `request` are set here.
    """
    request.check("serve")
    request.reach.check()
    if request.reach.keys is not None:
        # Read the keys now, so that an error in them comes before any file is written.
        request.reach.keys.guard(log=lambda _level, _text: None)
    with _open_directory(directory) as run:
        request = _resolved(request, parameters, run, tell=tell, from_scratch=from_scratch)
        return serve(request, _Terminal(request).watch, tell=tell)


def _open_directory(directory: Path) -> RunDirectory:
    with files.explaining(directory, doing="make"):
        files.make_directory(directory)
        names = {path.name for path in directory.iterdir()}
        if "request.json" not in names and names - {"lock", "initial.safetensors"}:
            raise JobError(
                f"{directory} is not the directory of a server: name a new one (--directory)"
            )
        directory.chmod(0o700)
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
    file = request.file
    is_first = not file.is_file()
    if from_scratch and not is_first:
        place = run.put_aside(request.initial_file, run.snapshots)
        tell(f"starting from scratch; earlier files are in {place}")
        is_first = True  # a new name of the run: workers of the earlier server cannot push
    if is_first:
        request.write_initial(parameters)
    else:
        before = read_request(file)
        _check_same(request, before, directory=run.path)
        reach = request.reach
        if reach.secret and before.reach.secret:
            reach = msgspec.structs.replace(reach, secret=before.reach.secret)
        request = msgspec.structs.replace(request, run=before.run or request.run, reach=reach)
        tell(f"continuing from the checkpoints in {run.path}")
    files.write_private(file, msgspec.json.encode(request))  # it may contain a secret
    return request


def read_request(file: Path) -> ServerRequest:
    """Return what the server in this directory serves; JobError if the file is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ServerRequest)
    except OSError as error:
        raise files.explained(error, file, doing="read") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JobError(
            f"{file} is damaged ({error}): use a new directory; the checkpoints are not affected"
        ) from None


def _check_same(now: ServerRequest, before: ServerRequest, *, directory: Path) -> None:
    knows_names = before.names and now.names
    names = first_difference(before.names, now.names) if knows_names else ""
    differing = {
        "model": first_difference(before.tensors, now.tensors) or names,
        "rule": ", ".join(_differences(before.rule, now.rule)),
        "exchange": ", ".join(_differences(before.exchange, now.exchange)),
        "number of shards": ", ".join(_differences(before.n_shards, now.n_shards)),
    }
    for what, difference in differing.items():
        if difference:
            raise JobError(
                f"{directory} has another {what}: {difference}: use the same, or a new directory"
            )


def _differences(there: object, here: object, key: str = "") -> Iterator[str]:
    if isinstance(there, msgspec.Struct):
        there, here = msgspec.to_builtins((there, here))
    if not (isinstance(there, dict) and isinstance(here, dict)):
        if there != here:
            yield f"{key} {toml.excerpt(there)}, not {toml.excerpt(here)}".lstrip()
        return
    keys = ("name",) if there.get("name") != here.get("name") else there | here
    for each in keys:
        yield from _differences(there.get(each), here.get(each), f"{key}.{each}".lstrip("."))


@final
class _Terminal:
    """The terminal of a standalone server: address, progress, Ctrl+C."""

    def __init__(self, request: ServerRequest) -> None:
        self._request = request
        self._n_reported = 0  # number of the last message printed
        self._reported_at = time.monotonic()
        self._n_pushes = 0
        self._is_ready = False

    def watch(
        self, node: RoleRunner, supervisor: Supervisor, address: ServerAddress, log: RunLog
    ) -> None:
        """Run the node until it ends."""
        with caught_signals() as caught:
            caught.tell = lambda number: node.stop(REASONS[number])
            error = node.run(lambda: self._tick(supervisor, address, log.print))
        if not (error or supervisor.shutdown.error or supervisor.shutdown.interrupted):
            log.print(f"ended; the parameters are saved in {self._request.directory}")

    def _tick(self, supervisor: Supervisor, address: ServerAddress, tell: Tell) -> None:
        now = time.monotonic()
        view = supervisor.view(now)
        supervisor.take_records()
        if not self._is_ready and view.phase == "training":
            self._is_ready = True
            for line in self._address_lines(address):
                tell(line)
        for message in view.messages:
            if message.number > self._n_reported:
                self._n_reported = message.number
                tell(message.text)
        if now - self._reported_at >= PROGRESS_SECONDS and view.pushes_applied != self._n_pushes:
            self._reported_at, self._n_pushes = now, view.pushes_applied
            tell(f"{_workers(view)}, {formatting.count(view.pushes_applied)} pushes applied")

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
            if is_anywhere(place.host):
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
