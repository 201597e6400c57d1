"""The process of one role: builds it, wraps it in a `JobMember`, and runs it.

The fork server runs `main` in a child. All settings come from one file, the `RoleSpec`; output goes
to the role's log.
"""

import os
import resource
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.config import algorithms
from distbelief.config.job import Job
from distbelief.config.load import job_from_json
from distbelief.core.errors import DistBeliefError, JobError
from distbelief.core.memory import KEPT_BYTES_MAX, Memory, PrivateMemory, keep_memory
from distbelief.core.pieces import Pieces
from distbelief.core.signals import ABANDONED
from distbelief.core.tensor_files import TensorFile
from distbelief.core.writer import Writer, log_line
from distbelief.job.launch.likeness import Likeness
from distbelief.job.launch.readers import ReaderProcesses
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.folders import absolute, folder_at
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, LayoutSpec
from distbelief.protocol import Failed, Heartbeat
from distbelief.protocol.role import SUPERVISOR, PeerLost, Role, Snapshot
from distbelief.task.data import Dataset
from distbelief.task.forward import Sample
from distbelief.task.imports import named
from distbelief.task.task import BuildContext, build_dataset
from distbelief.transport.address import Endpoint
from distbelief.transport.file_server import INITIAL, RemoteFolder
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.node import RoleRunner, in_threads
from distbelief.transport.shared_memory import FileMemory
from distbelief.transport.zmq_transport import Log, ZmqTransport
from distbelief.worker.computation import Computation, build_computing_rank
from distbelief.worker.group import EVALUATORS
from distbelief.worker.member import (
    HEARTBEAT_SECONDS,
    JobMember,
    JobMemberConfig,
    heartbeat_seconds,
)


def import_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Yield table and path of every function that this job names."""
    yield "model", job.model.factory
    for table, data in job.task.data.items():
        yield table, data.factory
        if data.collate is not None:
            yield table, data.collate
    for table, names in (("algorithm", (job.loss,)), ("evaluation", job.evaluation.metrics)):
        yield from ((table, name) for name in names if ":" in name)


def modules_of(job: Job) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path.partition(":")[0] for _, path in import_paths(job)))


def places_of(job: Job) -> tuple[str, ...]:
    """Return where hosts save for this job, beside the supervisor's host."""
    place = job.cluster.checkpoints
    return () if place is None else (absolute(place),)


def words_of_consent(job: Job) -> str:
    """Return the options with which a host agrees to what this job does there."""
    words = [f"--allow-import {shlex.quote(module)}" for module in modules_of(job)]
    words += [f"--allow-checkpoints {shlex.quote(place)}" for place in places_of(job)]
    return " ".join(words)


def check_allowed(job: Job, allowed: Sequence[str]) -> None:
    """Reject a job that names functions of modules that this host's user has not allowed.

    With --allow-import experiments.speech, experiments.speech.model:paper_net may be called, and
    not experiments.speech.data:os.system, which is a function of os.
    """
    paths = list(import_paths(job))
    for table, path in paths:  # check the text before anything is imported
        _check(path.partition(":")[0], path, table=table, allowed=allowed)
    for table, path in paths:
        found = named(path, table=table)
        module: object = getattr(found, "__module__", None)
        _check(str(module), path, table=table, allowed=allowed)


def _check(module: str, path: str, *, table: str, allowed: Sequence[str]) -> None:
    if not any(module == name or module.startswith(f"{name}.") for name in allowed):
        raise JobError(
            f"[{table}] {path!r} is a function of module {module!r}, which this host does not "
            f"allow (allowed: {', '.join(allowed) or 'none'}): use distbelief join ... "
            f"--allow-import {module}"
        )


SPEC_BYTES_MAX: Final = 1 << 26


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    job: msgspec.Raw  # the job as JSON (`Job.to_json`)
    run: str = ""  # id of the run, which is in every message
    supervisor: str = ""  # address of the supervisor
    memory: str = ""  # directory of shared memory; "" if none is shared
    # Folder or URL of checkpoints; "": those that the file server has
    snapshots: str = ""
    files: str = ""  # address of the file server of the supervisor's host; "" on that host
    layout: LayoutSpec  # of the model's tensors on the shards
    initials: dict[str, Initial] = {}  # how shards draw each tensor, if they do
    # File of the initial values, if they do not; with a file server, it has the file.
    initial_file: str | None = None
    # File of the plan for each number of ranks that a replica has; none if replicas are not split
    plans: dict[int, str] = {}
    ranks: int = 1  # of the group of this role
    slot: int = 0  # of this process, among those of its host that compute
    sample: Sample | None = None  # shapes and types of the data, for these plans
    n_train: int | None = None  # training samples
    pieces: Pieces | None = None  # of these, if they are in some
    num_workers: dict[str, int] = {}  # processes that read for a role, by table
    marks: tuple[float, ...] | None = None  # of some of them (`marks_of`), which hosts compare
    likeness: Likeness | None = None  # of the supervisor's host, if others may join
    reach: ListenConfig = ListenConfig()  # where these processes listen
    computation: Computation | None = None  # what ranks without shards compute
    # Packages and modules whose functions they may call; None for any
    allowed: tuple[str, ...] | None = None


def read_spec(path: str) -> RoleSpec:
    with Path(path).open("rb") as file:
        return msgspec.json.decode(file.read(SPEC_BYTES_MAX), type=RoleSpec)


def main(name: str, incarnation: int, path: str, *, ranks: int = 1, slot: int = 0) -> int:
    """Run the role `name`, of a group of so many ranks, until it ends; return the exit status."""
    spec = msgspec.structs.replace(read_spec(path), ranks=ranks, slot=slot)
    job = job_from_json(bytes(spec.job))
    import_from(job)
    torch.set_num_threads(job.cluster.threads if name.startswith("replica") else 1)
    # Gradients of each step reuse the memory of the last one, as do the vectors of a chunk on a
    # shard under a coordinator. A shard of Downpour needs no such memory.
    driven = name.startswith("shard") and algorithms.coordinator_of(job) is not None
    reuses = driven or name.startswith("replica")
    keep_memory(block_bytes_max=None if reuses else KEPT_BYTES_MAX)
    memory: Memory = FileMemory(Path(spec.memory)) if spec.memory else PrivateMemory(host="")
    readers = readers_of(name, spec, job)  # forked before there is any thread
    lines = Writer("log", tell=lambda text: report("warning", text))

    def report(level: str, text: str) -> None:
        # The time is taken now; a thread writes, because the log's disk may hang.
        lines.write(partial(_write, log_line(f"{name}#{incarnation}", level, text)))

    with lines, readers or nullcontext():
        report("info", f"process {os.getpid()} begins")
        if readers is not None:
            report("info", f"processes {', '.join(map(str, readers.pids))} read its samples")
        error = _run_role(
            spec, job, memory, readers, name=name, incarnation=incarnation, report=report
        )
        report("info" if error is None else "error", f"ends: {error or 'as planned'}")
    status = 0 if error is None else 1
    if not lines.close(seconds_max=0.0):
        os._exit(status)  # a normal exit would wait for that thread
    return status


def readers_of(name: str, spec: RoleSpec, job: Job) -> ReaderProcesses | None:
    """Start the processes that read samples for this role, if the job wants some."""
    table = "data.train" if name.startswith("replica") else "data.test"
    data = job.task.data.get(table)
    if not name.startswith(("replica", EVALUATORS)) or data is None:
        return None
    n_readers = spec.num_workers.get(table, data.num_workers)
    if not n_readers:
        return None
    if spec.computation is not None:  # its samples are in files
        return None

    def build() -> Dataset:
        if spec.allowed is not None:
            check_allowed(job, spec.allowed)
        index = name.removeprefix("replica-").partition(".")[0]
        # As `BuildContext.train_data`: replicas under a coordinator read all data.
        has_part = index.isdecimal() and algorithms.coordinator_of(job) is None
        part = (int(index), job.cluster.n_replicas) if has_part else (0, 1)
        return build_dataset(data, table=table, part=part)

    readers = ReaderProcesses(table)
    readers.fork(n_readers, build)
    return readers


def _run_role(
    spec: RoleSpec,
    job: Job,
    memory: Memory,
    readers: ReaderProcesses | None,
    *,
    name: str,
    incarnation: int,
    report: Log,
) -> str | None:
    transport = spec.reach.transport(name=name, incarnation=incarnation, run=spec.run, log=report)
    remote = _remote_folder(spec, report)
    with transport, closing(remote) if remote else nullcontext():
        transport.connect(SUPERVISOR, 0, spec.supervisor)
        config = JobMemberConfig(
            name=name,
            endpoint=transport.endpoint,
            host=memory.host,
            pid=os.getpid(),
            heartbeat_seconds=heartbeat_seconds(
                name, job.cluster.shard_copies, job.cluster.n_replicas
            ),
            patience_seconds=job.cluster.patience,
        )
        build = partial(_build, name, job, spec, memory, remote, readers)
        pressure = MemoryPressure()

        def counted() -> dict[str, float]:
            own = {"seconds_handling": node.seconds_handling} if name.startswith("shard") else {}
            return pressure.counters() | own

        member = JobMember(config, build=build, counted=counted)

        def warn(text: str) -> None:
            report("warning", text)
            member.warn(text)

        store = None
        policy = algorithms.facts_of(job).policy
        saves = policy is not None and policy.durable and name.startswith("replica")
        saves = saves or (name == EVALUATORS and job.output.keep == "best")
        if saves or name.startswith(("shard", "coordinator")):  # no other role saves anything
            folder = folder_at(spec.snapshots) if spec.snapshots or remote is None else remote
            elsewhere = job.cluster.checkpoints is not None
            checkpoints = CheckpointStore(folder, report=warn, elsewhere=elsewhere)
            store = _AliveStore(checkpoints, transport)
        node = RoleRunner(member, transport=transport, log=report, store=store)
        if threading.current_thread() is threading.main_thread():
            why = "the supervisor was killed"
            lost = PeerLost(peer=SUPERVISOR, incarnation=0, reason=why)
            signal.signal(ABANDONED, lambda _number, _frame: node.post(lost))
        error = node.run()
        if error is not None and not member.reported_failure:
            transport.send(SUPERVISOR, Failed(error=error[:8192], culprit_is_job=False))
    return error


@final
class MemoryPressure:
    """What this process has lost for want of memory, since this was made.

    `pages_read_again`: pages that it waited for (major faults), as far as they had been in memory
    before: so many refaults were there in its control group, or on its host without cgroup v2.
    `seconds_stalled_for_memory`: in which something there waited for memory ("some" of Linux's
    pressure stall information), which misses pages that are used once in a while.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._begun = self._before = self._now()
        self._again = 0.0

    def counters(self) -> dict[str, float]:
        if self._begun is None or self._before is None or (now := self._now()) is None:
            return {}
        self._again += max(min(now[0] - self._before[0], now[1] - self._before[1]), 0.0)
        self._before = now
        stalled = now[2] - self._begun[2]
        return {"pages_read_again": self._again, "seconds_stalled_for_memory": stalled}

    def _now(self) -> tuple[float, float, float] | None:
        # Faults, refaults, seconds; None if Linux does not count them.
        with suppress(OSError, ValueError, LookupError):
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
            group = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
            place = self._root / "sys/fs/cgroup" / group
            files = [place / "memory.stat", place / "memory.pressure"]
            if not all(file.exists() for file in files):
                files = [self._root / "proc/vmstat", self._root / "proc/pressure/memory"]
            words = files[0].read_text().split()
            refaults = sum(
                float(n) for name, n in pairwise(words) if name.startswith("workingset_refault_")
            )
            stalled = float(files[1].read_text().partition("total=")[2].split()[0]) / 1e6
            return resource.getrusage(resource.RUSAGE_SELF).ru_majflt, refaults, stalled
        return None


def _remote_folder(spec: RoleSpec, report: Log) -> RemoteFolder | None:
    if not spec.files:
        return None
    endpoint = Endpoint.parse(spec.files).seen_from(Endpoint.parse(spec.supervisor).host)
    return RemoteFolder(endpoint, reach=spec.reach, run=spec.run, log=report)


@final
@dataclass(frozen=True)
class _AliveStore:
    """A store of checkpoints that sends heartbeats while it reads the newest one."""

    store: CheckpointStore
    transport: ZmqTransport  # of the thread that calls `newest`

    def save(self, role: str, snapshot: Snapshot) -> None:
        self.store.save(role, snapshot)

    def newest(self, role: str) -> Snapshot | None:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(self.store.newest, role)
            while not wait([found], HEARTBEAT_SECONDS).done:
                self.transport.send(SUPERVISOR, Heartbeat(state="joining", counters={}))
            return found.result()


def import_from(job: Job) -> None:
    sys.path[:] = dict.fromkeys((*job.import_paths, *sys.path))


def log(name: str, incarnation: int, level: str, text: str) -> None:
    _write(log_line(f"{name}#{incarnation}", level, text))


def _write(line: str) -> None:
    with suppress(OSError):  # a full disk ends no role; the supervisor reports it
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def context_of(
    spec: RoleSpec, job: Job, memory: Memory, remote: RemoteFolder | None = None
) -> BuildContext:
    initial = None
    if spec.initial_file is not None:
        here = TensorFile.at(Path(spec.initial_file))
        initial = here if remote is None else TensorFile(remote, INITIAL)
    return BuildContext(
        task=job.task,
        layout=Layout(spec.layout),
        n_replicas=job.cluster.n_replicas,
        n_shards=job.cluster.shards,
        seed=job.evaluation.seed,
        memory=memory,
        initials=spec.initials,
        initial_file=initial,
        evaluation_subset=job.evaluation.subset,
        averaged=job.evaluation.averaged,
        keeps_best=job.output.keep == "best",
        shard_copies=job.cluster.shard_copies,
        plan=spec.plans.get(spec.ranks),
        sample=spec.sample,
        n_train=spec.n_train,
        pieces=spec.pieces,
        marks=None if spec.allowed is None else spec.marks,  # only hosts that join have other data
    )


def device_of(name: str, device: str, *, slot: int) -> str:
    """Return on what a role computes: the processes of a host take its GPUs in turn."""
    n_devices = torch.cuda.device_count() if device == "cuda" else 0
    if n_devices:
        return f"cuda:{slot % n_devices}"
    if device == "cuda" and name.startswith("replica"):
        raise JobError(f"[cluster] device is 'cuda', and the host of {name} has no GPU left")
    return "cpu"  # an evaluator needs no GPU


def _build(
    name: str,
    job: Job,
    spec: RoleSpec,
    memory: Memory,
    remote: RemoteFolder | None,
    readers: ReaderProcesses | None,
) -> Role:
    if spec.allowed is not None:  # here, since it imports: heartbeats are sent meanwhile
        check_allowed(job, spec.allowed)
    algorithm = algorithms.algorithm_of(job)
    context = replace(
        context_of(spec, job, memory, remote),
        together=in_threads,
        device=device_of(name, job.cluster.device, slot=spec.slot),
    )
    if readers is not None:
        context = replace(context, readers={readers.table: readers})
    try:
        if spec.computation is not None:
            return build_computing_rank(name, spec.computation, context)
        return algorithm.build(name, config=job.algorithm, context=context)
    except DistBeliefError:
        raise
    except MemoryError as error:
        raise DistBeliefError(f"out of memory while building {name}") from error
