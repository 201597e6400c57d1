"""Calibration: measures what the work of a job costs on this host, and stores it.

    replica replica:step by flops    seconds per floating point operation
    shard shard:apply by bytes       seconds per byte

    python -m distbelief.simulation.forecast.calibration FOLDER INDEX N_PROCESSES

As many processes as there are cores measure at once: a single busy core would be faster than
the cores of a real job. Each runs the job in FOLDER/job.json with one replica in virtual time,
moves between cores as the roles would, times every piece of work, and writes FOLDER/INDEX.json.
The means are kept in ~/.cache/distbelief. On another machine, costs in operations scale with its
computing speed, and costs in bytes with its memory rate (`placed_cluster`).
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Final, Literal, final

import msgspec

from distbelief.config.algorithms import facts_of
from distbelief.config.job import Job, StopTable
from distbelief.config.load import job_from_json
from distbelief.core import files
from distbelief.core.errors import DistBeliefError, JobError, StorageError
from distbelief.core.files import scratch
from distbelief.core.memory import keep_memory
from distbelief.job.launch.role_process import import_from
from distbelief.plans.planner.profile import this_host
from distbelief.protocol import role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.forecast.prepare import Preparation, costed
from distbelief.simulation.machines import ClusterOptions


VERSION: Final = 15
# Core time of an event: both nodes, their threads of ZeroMQ, and the role that handles it, with
# caches as a job leaves them; 85 to 160 us were measured on an AMD EPYC. A message to a sleeping
# process takes no longer than that.
EVENT_SECONDS: Final = 1.2e-4
WAKE_SECONDS: Final = 3e-5  # until a sleeping thread continues
SECONDS: Final = 8.0  # of one measurement, with the warm-up
N_EVENTS_MAX: Final = 10**9
READY_SECONDS_MAX: Final = 120.0
POLL_SECONDS: Final = 0.02

Unit = Literal["flops", "bytes", "times"]
Piece = tuple[rl.Seconds, float]  # duration and units of a piece of work


@final
class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The measured cost of one kind of work."""

    unit: Unit
    seconds: rl.Seconds  # per unit
    n: int  # pieces timed
    waiting: rl.Seconds = 0.0  # per unit, in addition: no core is busy


@final
class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The measured costs of one job's work on one host."""

    work: Mapping[str, Rate]  # by `key_of`
    share: float = 1.0  # of a core that each measuring process got
    version: int = VERSION

    def rate_of(self, kind: str, asked: rl.Compute) -> Rate | None:
        """Return the rate of this work, or None if it was never measured."""
        units: tuple[Unit, ...] = (unit_of(asked.cost), "times")
        keys = (key_of(kind, asked.name, unit) for unit in units)
        return next((self.work[key] for key in keys if key in self.work), None)


def key_of(kind: str, name: str, unit: Unit) -> str:
    """Return the key of a kind of work; digits in its name are ignored."""
    plain = "".join(letter for letter in name if not letter.isdigit())
    return f"{kind} {plain} by {unit}"


def unit_of(cost: rl.Cost) -> Unit:
    if cost.flops > 0:
        return "flops"
    return "bytes" if cost.n_bytes > 0 else "times"


def amount(cost: rl.Cost, unit: Unit) -> float:
    return {"flops": cost.flops, "bytes": cost.n_bytes, "times": 1.0}[unit]


# --- storage ---


def load_rates(job: Job) -> Rates | None:
    """Return the stored costs of such a job on this host, or None."""
    try:
        rates = msgspec.json.decode(_path(job).read_bytes(), type=Rates)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return rates if rates.version == VERSION else None


def save_rates(job: Job, rates: Rates) -> None:
    """Store costs. If that fails, the next run measures again."""
    path = _path(job)
    with suppress(StorageError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.format(msgspec.json.encode(rates)))


def job_key(job: Job) -> str:
    """Return a hash of everything in a job that the cost of its work depends on.

    It includes the source of the modules that the job names: a factory may change.
    """
    task, cluster, facts = job.task, job.cluster, facts_of(job)
    import_from(job)
    test = "" if task.test is None else task.test.factory
    named = [task.model.factory, task.train.factory, test, task.loss, *task.metrics]
    what = (
        VERSION,
        task,
        job.algorithm_name,
        job.batch_size,
        cluster.threads,
        cluster.shared_memory,
        (cluster.partitions, cluster.plan, cluster.device),
        os.cpu_count(),
        # A local step costs what its optimizer costs.
        *filter(None, [facts.inner]),
        *([facts.n_small_batches] if facts.threads else []),
        [_source(module) for module in sorted({n.partition(":")[0] for n in named if ":" in n})],
    )
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]


def _source(module: str) -> str:
    with suppress(ImportError, ValueError, OSError):  # the check of the job reports it
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return ""


def _path(job: Job) -> Path:
    # Roles use the threads that the job sets, not those of this process.
    host = msgspec.structs.replace(this_host(), n_threads=job.cluster.threads)
    return host.path.with_name(f"rates-{job_key(job)}-{host.path.stem[-8:]}.json")


# --- work ---

N_WARM: Final = 3  # first pieces of each kind that do not count; at least this share:
WARM_SHARE: Final = 0.25
LAG: Final = 5.0  # a piece that takes so many times the median is an outlier
WAITING_SHARE_MIN: Final = 0.2  # of the time of a kind of work: less is noise of the clocks
# Of Linux: nanoseconds that this thread ran, and that it waited for a core.
QUEUE: Final = Path("/proc/thread-self/schedstat")


@final
class Stopwatch:
    """Times work.

    Args:
        clock: Thread time by default: time that other programs take must not count.
        idle: Total time for which this thread slept, which `clock` does not show. Data work
            may wait for a disk.
        move: Called before each piece of work with the kind of its role.
    """

    def __init__(
        self,
        clock: Callable[[], rl.Seconds] = time.thread_time,
        *,
        idle: Callable[[], rl.Seconds] = lambda: 0.0,
        move: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._idle = idle
        self._move = move
        self.work: dict[str, list[Piece]] = {}
        self.waits: dict[str, list[Piece]] = {}

    def adapt(self, kind: str, asked: rl.Compute) -> rl.Compute:
        """Return the same work, timed."""
        unit, reads = unit_of(asked.cost), asked.executor is rl.Executor.DATA

        def work() -> object:
            part = 1.0 if asked.remaining is None else asked.remaining()
            self._move(kind)
            idle = self._idle() if reads else 0.0
            begun = self._clock()
            result = asked.work()
            seconds = self._clock() - begun
            if part > 0:
                n = part * amount(asked.cost, unit)
                key = key_of(kind, asked.name, unit)
                self.work.setdefault(key, []).append((seconds, n))
                if reads:
                    self.waits.setdefault(key, []).append((self._idle() - idle, n))
            return result

        return msgspec.structs.replace(asked, work=work)


def warm(pieces: Sequence[Piece]) -> Sequence[Piece]:
    return pieces[max(N_WARM, round(WARM_SHARE * len(pieces))) :] or pieces


def rate_of(pieces: Sequence[Piece]) -> rl.Seconds:
    """Return the mean seconds per unit of all pieces, without outliers."""
    usual = median(seconds / n for seconds, n in pieces)
    kept = [(s, n) for s, n in pieces if s / n <= LAG * usual] or pieces
    return sum(seconds for seconds, _ in kept) / sum(n for _, n in kept)


def waiting_of(pieces: Sequence[Piece], *, besides: rl.Seconds) -> rl.Seconds:
    """Return the mean waiting seconds per unit; 0 if they are negligible beside `besides`."""
    seconds = sum(seconds for seconds, _ in pieces) / max(1.0, sum(n for _, n in pieces))
    return seconds if seconds > WAITING_SHARE_MIN * (seconds + besides) else 0.0


def idle() -> rl.Seconds:
    """Return how long this thread has slept; only differences have a meaning.

    Sleep is time without computing and without waiting for a core; 0 where it is unknown.
    """
    with suppress(OSError):
        _, queued, _ = QUEUE.read_text().split()
        return time.perf_counter() - time.thread_time() - 1e-9 * int(queued)
    return 0.0


def mover(index: int) -> Callable[[str], None]:
    """Return a function that moves this thread to the core of a kind of role.

    In a job, replicas and shards run on different cores, and reading a vector from the cache of
    another core takes a quarter longer, or more.
    """
    cores = sorted(os.sched_getaffinity(0))

    def move(kind: str) -> None:
        os.sched_setaffinity(0, {cores[(index + (kind != "replica")) % len(cores)]})

    return move


# --- measurement in several processes ---


@final
class _Found(msgspec.Struct, frozen=True, kw_only=True):
    work: dict[str, list[Piece]]
    waits: dict[str, list[Piece]]
    share: float


def measure(job: Job, *, n_processes: int) -> Rates:
    """Measure the costs of a job in `n_processes` processes at once; JobError if it cannot run."""
    with scratch() as path:
        (path / "job.json").write_bytes(_alone(job).to_json())
        command = [sys.executable, "-m", "distbelief.simulation.forecast.calibration", str(path)]
        # The processes are killed at the end; their temporary files are in this folder.
        environment = {**os.environ, "TMPDIR": str(path)}
        workers = [
            subprocess.Popen(  # noqa: S603 -- our own program
                [*command, str(index), str(n_processes)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for index in range(n_processes)
        ]
        try:
            outputs = [worker.communicate()[0].decode(errors="replace") for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return _together([_read(path / f"{i}.json", text) for i, text in enumerate(outputs)])


def _alone(job: Job) -> Job:
    # One replica of each kind, and no end: the measurement stops it.
    kinds = job.cluster.partitions_wanted
    parts = {"replicas": len(kinds), "partitions": kinds if len(kinds) > 1 else kinds[0]}
    return msgspec.structs.replace(
        job,
        cluster=msgspec.structs.replace(job.cluster, shard_copies=1, **parts),
        stop=StopTable(seconds=1e9),
        evaluation=msgspec.structs.replace(job.evaluation, every=1.0),
    )


def _read(path: Path, output: str) -> _Found:
    if not path.is_file():
        raise JobError(f"the cost of the job's work cannot be measured:\n{output[-2000:]}")
    return msgspec.json.decode(path.read_bytes(), type=_Found)


def _together(found: Sequence[_Found]) -> Rates:
    work: dict[str, Rate] = {}
    for key in sorted({key for each in found for key in each.work}):
        pieces = [p for each in found for p in warm(each.work.get(key, ()))]
        waited = [p for each in found for p in warm(each.waits.get(key, ()))]
        seconds = rate_of(pieces)
        waiting = waiting_of(waited, besides=seconds)
        unit: Unit = msgspec.convert(key.rpartition(" ")[2], type=Unit)
        work[key] = Rate(unit=unit, seconds=seconds, n=len(pieces), waiting=waiting)
    return Rates(work=work, share=min(each.share for each in found))


def main(folder: str, index: int, n_processes: int) -> int:
    path = Path(folder)
    job = job_from_json((path / "job.json").read_bytes())
    keep_memory()
    # With several threads only wall-clock time shows what work takes, and they use all cores.
    is_single = job.cluster.threads == 1
    watch = Stopwatch(idle=idle, move=mover(index)) if is_single else Stopwatch(time.perf_counter)
    try:
        with Preparation() as preparation:
            prepared = preparation.stage(job)
            builders = costed(prepared.builders(), prepared.kinds, adapt=watch.adapt)
            options = ClusterOptions(start=(rl.SUPERVISOR,))
            simulation = SimulatedCluster(builders, seed=0, options=options)
            simulation.run_until(lambda: begun_in(simulation), within=1e6)
            _meet(path, index, n_processes)
            begun, ran, slept = time.perf_counter(), time.thread_time(), idle()
            simulation.run_until(
                lambda: time.perf_counter() - begun > SECONDS or rl.SUPERVISOR in simulation.halted,
                within=1e6,
                max_events=N_EVENTS_MAX,
            )
            wanted = time.perf_counter() - begun - (idle() - slept)
            share = (time.thread_time() - ran) / wanted
    except DistBeliefError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    found = _Found(work=watch.work, waits=watch.waits, share=min(1.0, share))
    (path / f"{index}.json").write_bytes(msgspec.json.encode(found))
    return 0


def begun_in(simulation: SimulatedCluster) -> bool:
    return simulation.role(rl.SUPERVISOR).status()[1]["samples"] > 0


def _meet(path: Path, index: int, n_processes: int) -> None:
    # Wait until all processes are ready, but for a limited time: one may have failed.
    (path / f"{index}.ready").touch()
    deadline = time.perf_counter() + READY_SECONDS_MAX
    while time.perf_counter() < deadline and len(list(path.glob("*.ready"))) < n_processes:
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
