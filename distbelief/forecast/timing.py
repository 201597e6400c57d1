"""Measured costs: times the work of roles, events and messages on this host, and stores them.

    replica  replica:step      seconds per floating point operation
             replica:push      seconds per byte
    shard    shard:apply       seconds per byte
    replica Computed apply     seconds per event of this kind, in the role's own thread
    message, work, timer       seconds of a core for each (`MessageCosts`)

The results are stored in ~/.cache/distbelief. On another machine, costs in operations scale
with its computing speed, and costs in bytes with its memory rate.
"""

import hashlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Final, Literal, final

import msgspec
import torch

from distbelief.config.job import Job
from distbelief.core import files
from distbelief.core.files import scratch
from distbelief.errors import StorageError
from distbelief.launch.role_process import import_from
from distbelief.partition.profiling.profile import Host, this_host
from distbelief.protocol import HeartbeatAck
from distbelief.roles.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Executor,
    Received,
    Seconds,
    Send,
    SetTimer,
    TimerFired,
)
from distbelief.simulation.cpu import EventCost, label_of
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.zmq_transport import ZmqTransport


# Messages, executors and timers are timed with real nodes whose roles do almost nothing. Core
# time is measured between pieces of work that flush the caches as the job's work does: with
# cold caches the same code takes several times as long.

N_EVENTS: Final = 200
N_WARM_EXCHANGES: Final = 30
N_SLEEPS: Final = 200
SLEEP_SECONDS: Final = 2e-3
WAIT_SECONDS_MAX: Final = 10.0
N_HANDED: Final = 200
CHILL_BYTES_MAX: Final = 3 << 20  # more than the private caches of a core
_MATRIX: Final = 1024
_SMALL_MATRIX: Final = 256


@final
class MessageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of messages, executors and timers; the first three in seconds of a core."""

    message: Seconds  # of a small message, both ends with their I/O threads
    work: Seconds  # of passing work to an executor and handling its result
    timer: Seconds
    latency: Seconds  # of a message, without the core time
    wake: Seconds  # until a sleeping thread gets a core while all are busy
    begins: Seconds  # until an executor begins its work, without core time
    answers: Seconds  # until a process handles the result, without core time


@final
class CacheFlush:
    """Work that flushes the caches of its core, by going through `n_bytes`."""

    def __init__(self, n_bytes: int) -> None:
        self.seconds: Seconds = 0.0  # core time so far
        side = math.isqrt(min(n_bytes, CHILL_BYTES_MAX) // 12)  # of three matrices
        self._matrix = torch.zeros(side, side)

    def __call__(self) -> None:
        torch.get_num_threads()  # makes the setting of the process effective in this thread
        begun = time.thread_time()
        torch.mm(self._matrix, self._matrix)
        self.seconds += time.thread_time() - begun


@final
class CountingRole:
    """A role that counts its events, and repeats the action `again` after each one."""

    accepts: Final = ALL_MESSAGES

    def __init__(
        self, again: Callable[[Seconds], Action], chill: Callable[[], None] | None = None
    ) -> None:
        self.n = 0
        self.n_wanted = 0
        self._again = again
        self._chill = chill

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        if not isinstance(event, Received | Computed | TimerFired):
            return ()
        chilled = isinstance(event, Computed) and event.name == "chill"
        if self._chill is not None and not chilled:
            return [Compute(name="chill", work=self._chill)]
        self.n += 1
        return [self._again(now)] if self.n < self.n_wanted else ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "counting", {}


@final
class WorkingRole:
    """A role with short work from time to time."""

    accepts: Final = ALL_MESSAGES

    def __init__(self) -> None:
        self.begun: list[Seconds] = []  # waiting times for the executor
        self.answered: list[Seconds] = []  # waiting times of results
        self._matrix = torch.zeros(_SMALL_MATRIX, _SMALL_MATRIX)
        self._asked_at = self._begun_at = self._done_at = 0.0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        if isinstance(event, Computed) and event.name == "work":
            self.begun.append(self._begun_at - self._asked_at)
            self.answered.append(time.perf_counter() - self._done_at)
            return [SetTimer(name="soon", at=now + SLEEP_SECONDS)]
        if isinstance(event, TimerFired | Computed):
            self._asked_at = time.perf_counter()
            return [Compute(name="work", work=self._work)]
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "handing", {}

    def _work(self) -> None:
        self._begun_at = time.perf_counter()
        torch.mm(self._matrix, self._matrix)
        self._done_at = time.perf_counter()


def measure_messages(n_bytes: int) -> MessageCosts:
    """Measure all message costs; `n_bytes` is the memory that a piece of work goes through."""
    chill = CacheFlush(n_bytes)
    with _one_thread():
        work, at_once = (_turns(partial(_work, each), each) for each in (chill, CacheFlush(0)))
        timer = _turns(_timer, chill, first=True)
        message, _ = _messages(chill)
        _, latency = _messages(None)
        begins, answers = _handing()
        return MessageCosts(
            message=max(0.0, message - work),
            work=work,
            begins=max(0.0, begins - at_once / 2.0),
            answers=max(0.0, answers - at_once / 2.0),
            timer=max(0.0, timer - work),
            latency=latency,
            wake=_wake(),
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    # `CacheFlush` measures the core time of its own thread only.
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _messages(chill: CacheFlush | None) -> tuple[Seconds, Seconds]:
    # Core time and latency of a message. With `chill`, the latency means nothing.
    with (
        scratch() as folder,
        _transport("one", folder) as one,
        _transport("other", folder) as other,
    ):
        one.connect("other", 1, other.endpoint)
        other.connect("one", 1, one.endpoint)
        roles = {
            name: CountingRole(_sending(to), chill)
            for name, to in (("one", "other"), ("other", "one"))
        }
        with (
            RoleRunner(roles["one"], transport=one, log=_silent) as here,
            RoleRunner(roles["other"], transport=other, log=_silent) as there,
        ):
            one.send("other", HeartbeatAck())
            _talk(here, there, roles, n_more=N_WARM_EXCHANGES)
            cores, clock = _cores_but(chill), time.perf_counter()
            _talk(here, there, roles, n_more=N_EVENTS)
            cores = (_cores_but(chill) - cores) / (2 * N_EVENTS)
            seconds = (time.perf_counter() - clock) / (2 * N_EVENTS)
    return cores, max(0.0, seconds - cores)


def _sending(to: str) -> Callable[[Seconds], Action]:
    return lambda _: Send(receiver=Address(to), message=HeartbeatAck())


def _cores_but(chill: CacheFlush | None) -> Seconds:
    return time.process_time() - (chill.seconds if chill is not None else 0.0)


def _talk(
    here: RoleRunner, there: RoleRunner, roles: Mapping[str, CountingRole], *, n_more: int
) -> None:
    one, other = roles["one"], roles["other"]
    one.n_wanted = other.n_wanted = 1 << 62
    for _ in range(n_more):
        for node, role in ((there, other), (here, one)):
            _await_event(node, role)


def _await_event(node: RoleRunner, role: CountingRole) -> None:
    n = role.n + 1
    node.pump(lambda: role.n >= n, timeout_seconds=WAIT_SECONDS_MAX)


def _work(chill: CacheFlush, now: Seconds) -> Action:
    del now
    return Compute(name="work", work=chill)


def _timer(now: Seconds) -> Action:
    return SetTimer(name="soon", at=now + 1e-5)


def _turns(
    again: Callable[[Seconds], Action], chill: CacheFlush, *, first: bool = False
) -> Seconds:
    # Core time of one action and its event, without that of `chill`. With `first`, `chill`
    # runs before each action, and passing it to the executor is included.
    role = CountingRole(again, chill if first else None)
    with (
        scratch() as folder,
        _transport("alone", folder) as transport,
        RoleRunner(role, transport=transport, log=_silent) as node,
    ):
        _turn(node, role, n_more=N_WARM_EXCHANGES)
        begun = _cores_but(chill)
        _turn(node, role, n_more=N_EVENTS)
        return (_cores_but(chill) - begun) / N_EVENTS


def _handing() -> tuple[Seconds, Seconds]:
    role = WorkingRole()
    with (
        scratch() as folder,
        _transport("handing", folder) as transport,
        RoleRunner(role, transport=transport, log=_silent) as node,
    ):
        node.tell(Computed(name="begin"))
        node.pump(lambda: len(role.answered) >= N_HANDED, timeout_seconds=WAIT_SECONDS_MAX)
    return fmean(role.begun or [0.0]), fmean(role.answered or [0.0])


def _turn(node: RoleRunner, role: CountingRole, *, n_more: int) -> None:
    role.n_wanted = role.n + n_more
    node.tell(Computed(name="begin"))
    node.pump(lambda: role.n >= role.n_wanted, timeout_seconds=WAIT_SECONDS_MAX)


def _wake() -> Seconds:
    # How late a thread wakes up while another thread of its process computes. All cores are
    # busy if as many processes do this as there are cores.
    ended = threading.Event()
    other = threading.Thread(target=_compute, args=(ended,), daemon=True)
    quiet = _lateness()
    other.start()
    try:
        crowded = _lateness()
    finally:
        ended.set()
        other.join()
    return max(0.0, crowded - quiet)


def _compute(ended: threading.Event) -> None:
    matrix = torch.zeros(_MATRIX, _MATRIX)  # large, so that Python takes little of the time
    while not ended.is_set():
        torch.mm(matrix, matrix)


def _lateness() -> Seconds:
    # How much longer than asked a sleep in a poll takes; nodes sleep in polls.
    one, other = socket.socketpair()
    one.settimeout(SLEEP_SECONDS)
    late = []
    with one, other:
        for _ in range(N_SLEEPS):
            begun = time.perf_counter()
            try:
                one.recv(1)
            except TimeoutError:
                late.append(time.perf_counter() - begun - SLEEP_SECONDS)
    return fmean(late)


def _transport(name: str, folder: Path) -> ZmqTransport:
    reach = ListenConfig(directory=str(folder))
    return reach.transport(name=name, incarnation=1, run="exchange", log=_silent)


def _silent(level: str, text: str) -> None:
    del level, text


def job_key(job: Job) -> str:
    """Return a hash of everything in a job that the cost of its work depends on.

    It includes the source of the modules that the job names: a factory may change.
    """
    task, cluster = job.task, job.cluster
    import_from(job)
    test = "" if task.test is None else task.test.factory
    named = [task.model.factory, task.train.factory, test, task.loss, task.metric or ""]
    what = (
        task,
        job.algorithm_name,
        job.batch_size,
        cluster.threads,
        cluster.shared_memory,
        (cluster.partitions, cluster.plan, cluster.device),
        os.cpu_count(),
        _sources(named),
    )
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]


def _sources(named: Iterable[str]) -> list[str]:
    modules = sorted({name.partition(":")[0] for name in named if ":" in name})
    return [_source(module) for module in modules]


def _source(module: str) -> str:
    with suppress(ImportError, ValueError, OSError):  # the check of the job reports it
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return ""


VERSION: Final = 9

Unit = Literal["flops", "bytes", "times"]


@final
class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """The measured cost of one kind of work."""

    unit: Unit
    seconds: Seconds  # per unit
    n: int  # pieces timed
    waiting: Seconds = 0.0  # per unit, in addition: no core is busy


@final
class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The measured costs of one job on one host."""

    work: Mapping[str, Rate]  # by "KIND NAME by UNIT": role kind, name of the work
    # Seconds per event, by "KIND LABEL" (`simulation.cpu.label_of`), and by KIND for others.
    handling: Mapping[str, Seconds]
    exchange: MessageCosts
    n_side_by_side: int = 1  # processes that measured at once
    share: float = 1.0  # of a core that each of them got
    date: str = ""  # ISO 8601
    version: int = VERSION

    def handling_of(self, kind: str) -> EventCost:
        """Return the cost of events for a process with this kind of role."""
        prefix = f"{kind} "
        seconds = {
            key.removeprefix(prefix): value + self._besides(key.removeprefix(prefix))
            for key, value in self.handling.items()
            if key.startswith(prefix)
        }
        usual = [value for key, value in self.handling.items() if " " not in key]
        other = self.handling.get(kind, fmean(usual) if usual else 0.0)
        found = self.exchange
        return EventCost(
            seconds=seconds, other=other + found.message, begins=found.begins, answers=found.answers
        )

    def _besides(self, label: str) -> Seconds:
        match label.partition(" ")[0]:
            case "Computed":
                return self.exchange.work
            case "TimerFired":
                return self.exchange.timer
            case _:
                return self.exchange.message

    def seconds_of(self, kind: str, asked: Compute) -> tuple[Unit, Seconds] | None:
        """Return the time of this work on this host, and the unit it depends on."""
        rate = self._rate_of(kind, asked)
        if rate is None:
            return None
        return rate.unit, rate.seconds * amount(asked.cost, rate.unit)

    def waiting_of(self, kind: str, asked: Compute) -> Seconds:
        """Return the time that this work waits in addition, on any machine."""
        rate = self._rate_of(kind, asked)
        return 0.0 if rate is None else rate.waiting * amount(asked.cost, rate.unit)

    def _rate_of(self, kind: str, asked: Compute) -> Rate | None:
        units: tuple[Unit, ...] = (unit_of(asked.cost), "times")
        keys = (key_of(kind, asked.name, unit) for unit in units)
        return next((self.work[key] for key in keys if key in self.work), None)


def mean_of(found: Sequence[Rates]) -> Rates:
    """Return the mean of several measurements of one job; work is weighted by its pieces."""
    work: dict[str, Rate] = {}
    for rates in found:
        for key, rate in rates.work.items():
            other = work.get(key, msgspec.structs.replace(rate, n=0))
            n = rate.n + other.n
            seconds = (rate.n * rate.seconds + other.n * other.seconds) / max(1, n)
            waiting = (rate.n * rate.waiting + other.n * other.waiting) / max(1, n)
            work[key] = Rate(unit=rate.unit, seconds=seconds, n=n, waiting=waiting)
    handling = {
        key: fmean(rates.handling[key] for rates in found if key in rates.handling)
        for rates in found
        for key in rates.handling
    }
    figures = [msgspec.structs.asdict(rates.exchange) for rates in found]
    exchange = {name: fmean(each[name] for each in figures) for name in figures[0]}
    return msgspec.structs.replace(
        found[-1],
        work=work,
        handling=handling,
        exchange=MessageCosts(**exchange),
        share=min(rates.share for rates in found),
    )


def key_of(kind: str, name: str, unit: Unit) -> str:
    """Return the key of a kind of work; digits in its name are ignored."""
    plain = "".join(letter for letter in name if not letter.isdigit())
    return f"{kind} {plain} by {unit}"


def unit_of(cost: Cost) -> Unit:
    if cost.flops > 0:
        return "flops"
    return "bytes" if cost.n_bytes > 0 else "times"


def amount(cost: Cost, unit: Unit) -> float:
    match unit:
        case "flops":
            return cost.flops
        case "bytes":
            return cost.n_bytes
        case "times":
            return 1.0


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- storage ---


def load_rates(job: Job) -> Rates | None:
    """Return the stored costs of such a job on this host, or None."""
    try:
        content = _path(job, this_host()).read_bytes()
        rates = msgspec.json.decode(content, type=Rates)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return rates if rates.version == VERSION else None


def save_rates(job: Job, rates: Rates) -> None:
    """Store costs. If that fails, the next run measures again."""
    path = _path(job, this_host())
    with suppress(StorageError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.format(msgspec.json.encode(rates)))


def _path(job: Job, host: Host) -> Path:
    what = f"{VERSION} {job_key(job)}"
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    # Roles use the threads that the job sets, not those of this process.
    host = msgspec.structs.replace(host, n_threads=job.cluster.threads)
    return host.path.with_name(f"rates-{digest}-{host.path.stem[-8:]}.json")


N_WARM: Final = 3  # first pieces of each kind that do not count; at least this share:
WARM_SHARE: Final = 0.25
LAG: Final = 5.0  # a piece that takes so many times the median is an outlier
# Of Linux: nanoseconds that this thread ran, and that it waited for a core.
QUEUE: Final = Path("/proc/thread-self/schedstat")
WAITING_SHARE_MIN: Final = 0.2  # of the time of a kind of work: less is noise of the clocks

Piece = tuple[Seconds, float]  # duration and units of a piece of work


def _never() -> Seconds:
    return 0.0


@final
class Stopwatch:
    """Times work and the handling of events.

    Args:
        clock: Thread time by default: time that other programs take must not count.
        idle: Total time for which this thread slept, which `clock` does not show. Data work
            may wait for a disk.
    """

    def __init__(
        self,
        clock: Callable[[], Seconds] = time.thread_time,
        *,
        idle: Callable[[], Seconds] = _never,
    ) -> None:
        self._clock = clock
        self._idle = idle
        self.work: dict[str, tuple[Unit, list[Piece]]] = {}
        self.waits: dict[str, list[Piece]] = {}
        self.handling: dict[str, tuple[Seconds, int]] = {}

    def adapt(self, kind: str, asked: Compute) -> Compute:
        """Return the same work, timed."""
        unit, reads = unit_of(asked.cost), asked.executor is Executor.DATA

        def work() -> object:
            part = 1.0 if asked.remaining is None else asked.remaining()
            idle = self._idle() if reads else 0.0
            begun = self._clock()
            result = asked.work()
            seconds = self._clock() - begun
            if part > 0:
                n = part * amount(asked.cost, unit)
                key = key_of(kind, asked.name, unit)
                _, pieces = self.work.setdefault(key, (unit, []))
                pieces.append((seconds, n))
                if reads:
                    self.waits.setdefault(key, []).append((self._idle() - idle, n))
            return result

        return msgspec.structs.replace(asked, work=work)

    def handled(
        self, kind: str, event: Event, handle: Callable[[], Sequence[Action]]
    ) -> Sequence[Action]:
        begun = self._clock()
        actions = handle()
        seconds = self._clock() - begun
        for key in (kind, f"{kind} {label_of(event)}"):
            total, n = self.handling.get(key, (0.0, 0))
            self.handling[key] = (total + seconds, n + 1)
        return actions


def warm(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces after the warm-up."""
    n_cold = max(N_WARM, round(WARM_SHARE * len(pieces)))
    return pieces[n_cold:] or pieces


def rate_of(pieces: Sequence[Piece]) -> Seconds:
    """Return the mean seconds per unit of all pieces, without outliers."""
    usual = median(seconds / n for seconds, n in pieces)
    kept = [(s, n) for s, n in pieces if s / n <= LAG * usual] or pieces
    return sum(seconds for seconds, _ in kept) / sum(n for _, n in kept)


def waiting_of(pieces: Sequence[Piece], *, besides: Seconds) -> Seconds:
    """Return the mean waiting seconds per unit; 0 if they are negligible beside `besides`."""
    seconds = sum(seconds for seconds, _ in pieces) / sum(n for _, n in pieces)
    return seconds if seconds > WAITING_SHARE_MIN * (seconds + besides) else 0.0


def idle() -> Seconds:
    """Return how long this thread has slept; only differences have a meaning.

    Sleep is time without computing and without waiting for a core; 0 where it is unknown.
    """
    with suppress(OSError):
        _, queued, _ = QUEUE.read_text().split()
        return time.perf_counter() - time.thread_time() - 1e-9 * int(queued)
    return 0.0
