"""Times the work of roles, and how they handle events, piece by piece."""

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


# What the events of a process take of the processors of this host, role apart.
#
#     message      a small one, from where it is sent to where it is handled: both ends,
#                  their threads of input and output as well
#     work         a piece of work handed to a lane, done, and answered
#     timer        set, and fired
#     latency      of a message: what it takes beside that, for threads have to wake up
#     wake         until a thread that slept has a core again, while all are taken
#     begins       from where work is handed to a lane to where the lane begins it
#     answers      from where it has done that to where its process handles the answer
#
# The last two are by the clock, less what they take of a core: two threads of a process
# wake each other, and wait for the interpreter, each time.
# Real nodes with roles that do next to nothing are timed; no job is. What is of a core is
# timed between pieces of work that go through as much memory as the job's: these take
# the caches, and code that finds nothing of its own there takes several times as long.

N_EVENTS: Final = 200
N_WARM_EXCHANGES: Final = 30
N_SLEEPS: Final = 200
SLEEP_SECONDS: Final = 2e-3
WAIT_SECONDS_MAX: Final = 10.0
N_HANDED: Final = 200
CHILL_BYTES_MAX: Final = 3 << 20  # more than a core has caches to itself
_MATRIX: Final = 1024
_SMALL_MATRIX: Final = 256


@final
class MessageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """See above; the first three are seconds of a core."""

    message: Seconds
    work: Seconds
    timer: Seconds
    latency: Seconds
    wake: Seconds
    begins: Seconds
    answers: Seconds


@final
class CacheFlush:
    """Work that takes the caches of its core from others.

    Args:
        n_bytes: That it goes through, up to what leaves others nothing.

    Attributes:
        seconds: Of a core, that it has taken so far.
    """

    def __init__(self, n_bytes: int) -> None:
        self.seconds: Seconds = 0.0
        side = math.isqrt(min(n_bytes, CHILL_BYTES_MAX) // 12)  # of three matrices
        self._matrix = torch.zeros(side, side)

    def __call__(self) -> None:
        """Go through it once."""
        torch.get_num_threads()  # what is set for all is a thread's once it has asked
        begun = time.thread_time()
        torch.mm(self._matrix, self._matrix)
        self.seconds += time.thread_time() - begun


@final
class CountingRole:
    """A role that counts its events, and does again what it was asked to do.

    Args:
        again: Returns that.
        chill: Done before each.
    """

    accepts: Final = ALL_MESSAGES

    def __init__(
        self, again: Callable[[Seconds], Action], chill: Callable[[], None] | None = None
    ) -> None:
        self.n = 0
        self.n_wanted = 0
        self._again = again
        self._chill = chill

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Count, and do it again if more is wanted."""
        if not isinstance(event, Received | Computed | TimerFired):
            return ()
        chilled = isinstance(event, Computed) and event.name == "chill"
        if self._chill is not None and not chilled:
            return [Compute(name="chill", work=self._chill)]
        self.n += 1
        return [self._again(now)] if self.n < self.n_wanted else ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return nothing of interest."""
        return "counting", {}


@final
class WorkingRole:
    """A role that has short work done, now and then.

    Attributes:
        begun: How long each piece waited for its lane.
        answered: How long each waited to be handled.
    """

    accepts: Final = ALL_MESSAGES

    def __init__(self) -> None:
        self.begun: list[Seconds] = []
        self.answered: list[Seconds] = []
        self._matrix = torch.zeros(_SMALL_MATRIX, _SMALL_MATRIX)
        self._asked_at = self._begun_at = self._done_at = 0.0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Have it done; ask anew when both threads have slept."""
        if isinstance(event, Computed) and event.name == "work":
            self.begun.append(self._begun_at - self._asked_at)
            self.answered.append(time.perf_counter() - self._done_at)
            return [SetTimer(name="soon", at=now + SLEEP_SECONDS)]
        if isinstance(event, TimerFired | Computed):
            self._asked_at = time.perf_counter()
            return [Compute(name="work", work=self._work)]
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return nothing of interest."""
        return "handing", {}

    def _work(self) -> None:
        self._begun_at = time.perf_counter()
        torch.mm(self._matrix, self._matrix)
        self._done_at = time.perf_counter()


def measure_messages(n_bytes: int) -> MessageCosts:
    """Measure everything.

    Args:
        n_bytes: That a piece of the job's work goes through: its parameters.
    """
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
    """Let work take the core of its own thread only, which is what `CacheFlush` sees."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _messages(chill: CacheFlush | None) -> tuple[Seconds, Seconds]:
    """Return what a message takes of cores, and how long it is on its way besides.

    With `chill` it takes a piece of work as well, and how long it is tells nothing.
    """
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
    """Return what this process has taken of the cores, but for that work."""
    return time.process_time() - (chill.seconds if chill is not None else 0.0)


def _talk(
    here: RoleRunner, there: RoleRunner, roles: Mapping[str, CountingRole], *, n_more: int
) -> None:
    """Let both answer each other so often."""
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
    """Return what it takes of a core to be asked for something, and to answer.

    Args:
        again: Returns what is asked for.
        chill: What this takes is not counted.
        first: Whether it is done before each; then to hand it on is counted.
    """
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
    """Return how long work waits for its lane, and its answer for the process."""
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
    """Return how late a thread wakes up while another of its process computes.

    Every core computes if as many processes do this as there are cores.
    """
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
    matrix = torch.zeros(_MATRIX, _MATRIX)  # so large that little of it is Python's
    while not ended.is_set():
        torch.mm(matrix, matrix)


def _lateness() -> Seconds:
    """Return by how much a sleep is too long; of a poll, as nodes sleep."""
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


# Which jobs do the same work, so that what one was measured to take holds for another.
#
# Jobs are alike by what their files say, and by the source of what they name: the same
# factory may make another net today, or beside another job file.


def job_key(job: Job) -> str:
    """Return a hash of all that the time of a job's work depends on, but the host."""
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
    """Return a hash of the source of each module that "MODULE:NAME" names."""
    modules = sorted({name.partition(":")[0] for name in named if ":" in name})
    return [_source(module) for module in modules]


def _source(module: str) -> str:
    with suppress(ImportError, ValueError, OSError):  # trying the job out tells of it
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return ""


# How long the work of a job's roles takes on this host: measured, and kept.
#
#     replica  replica:step      seconds of each floating point operation asked for
#              replica:push      seconds of each byte
#     shard    shard:apply       seconds of each byte
#     replica Computed apply     seconds of each such event, of the role's own thread
#     message, work, timer       seconds of a core for each, role apart (`exchange`)
#
# What the parts of a job take is known best from doing them: the real roles run for a few
# seconds in virtual time, with their real work, and every piece is timed. As many
# processes as there are cores do so side by side, for a core computes faster, and memory
# is nearer, while the others idle. What comes of it is kept in ~/.cache/distbelief.
#
# On another machine work takes as many times as long as that one is slower: what was
# counted in operations by its speed, what was counted in bytes by its memory.

VERSION: Final = 9

Unit = Literal["flops", "bytes", "times"]


@final
class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How long one kind of work takes.

    Attributes:
        unit: What its cost is counted in.
        seconds: Of each unit.
        n: Pieces that were timed.
        waiting: Besides, of each unit: seconds in which no core was at work.
    """

    unit: Unit
    seconds: Seconds
    n: int
    waiting: Seconds = 0.0


@final
class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one job on one host.

    Attributes:
        work: By "KIND NAME by UNIT": of a role, of its work.
        handling: Seconds that a role takes for an event, by "KIND LABEL", and by KIND
            for those that never came; see `simulation.desk.label_of`.
        exchange: What its process takes besides.
        n_side_by_side: Processes that computed at once.
        share: Of a core, that each of them had when it wanted one.
        date: Of the measurement, ISO 8601.
        version: Of what is measured, and how.
    """

    work: Mapping[str, Rate]
    handling: Mapping[str, Seconds]
    exchange: MessageCosts
    n_side_by_side: int = 1
    share: float = 1.0
    date: str = ""
    version: int = VERSION

    def handling_of(self, kind: str) -> EventCost:
        """Return what events take of a process that has this kind of role."""
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
        """Return what this work takes here, and by what that would change."""
        rate = self._rate_of(kind, asked)
        if rate is None:
            return None
        return rate.unit, rate.seconds * amount(asked.cost, rate.unit)

    def waiting_of(self, kind: str, asked: Compute) -> Seconds:
        """Return for how long this work waits besides, on whatever machine."""
        rate = self._rate_of(kind, asked)
        return 0.0 if rate is None else rate.waiting * amount(asked.cost, rate.unit)

    def _rate_of(self, kind: str, asked: Compute) -> Rate | None:
        units: tuple[Unit, ...] = (unit_of(asked.cost), "times")
        keys = (key_of(kind, asked.name, unit) for unit in units)
        return next((self.work[key] for key in keys if key in self.work), None)


def mean_of(found: Sequence[Rates]) -> Rates:
    """Return measurements of one job as one: work by pieces, the rest by halves.

    Args:
        found: At least one; the date is that of the last.
    """
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
    """Return how a kind of work is called; numbers in names are of no account.

    Work of one name may be counted in operations now and in bytes then.
    """
    plain = "".join(letter for letter in name if not letter.isdigit())
    return f"{kind} {plain} by {unit}"


def unit_of(cost: Cost) -> Unit:
    """Return what a cost is best counted in."""
    if cost.flops > 0:
        return "flops"
    return "bytes" if cost.n_bytes > 0 else "times"


def amount(cost: Cost, unit: Unit) -> float:
    """Return how many of the unit it is."""
    match unit:
        case "flops":
            return cost.flops
        case "bytes":
            return cost.n_bytes
        case "times":
            return 1.0


def now() -> str:
    """Return the date, for what is measured now."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# ------------------------------------------------------------------------- keeping


def load_rates(job: Job) -> Rates | None:
    """Return what was measured of such a job on this host before, if anything was."""
    try:
        content = _path(job, this_host()).read_bytes()
        rates = msgspec.json.decode(content, type=Rates)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return rates if rates.version == VERSION else None


def save_rates(job: Job, rates: Rates) -> None:
    """Keep what was measured, where that can be; else it is measured again."""
    path = _path(job, this_host())
    with suppress(StorageError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.format(msgspec.json.encode(rates)))


def _path(job: Job, host: Host) -> Path:
    what = f"{VERSION} {job_key(job)}"
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    # Roles compute with as many threads as the job says, whatever this process does.
    host = msgspec.structs.replace(host, n_threads=job.cluster.threads)
    return host.path.with_name(f"rates-{digest}-{host.path.stem[-8:]}.json")


N_WARM: Final = 3
WARM_SHARE: Final = 0.25
"""Of the pieces of one kind, that are not counted: caches fill, memory is fetched."""

LAG: Final = 5.0
"""Times as long as usual: then it was no work that took the time."""

QUEUE: Final = Path("/proc/thread-self/schedstat")
"""Of Linux: nanoseconds that this thread ran, that it waited for a core; and more."""

WAITING_SHARE_MIN: Final = 0.2
"""Of the time that a kind of work takes: less is what two clocks differ by."""

Piece = tuple[Seconds, float]
"""How long a piece of work took, and how many units it was."""


def _never() -> Seconds:
    return 0.0


@final
class Stopwatch:
    """Times work and the handling of events.

    By processor time, where one thread computes: what others take of the processors is
    no property of the work. But a data set may wait for a disk, or for somebody else.

    Args:
        clock: By which work is timed.
        idle: For how long this thread has waited, of which that clock tells nothing.

    Attributes:
        work: Pieces by "KIND NAME by UNIT", and their unit.
        waits: Of the data lane, how long those pieces waited besides.
        handling: Seconds and number of events.
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
        """Return the same work, timed; unless it is in vain."""
        unit, reads = unit_of(asked.cost), asked.lane is Executor.DATA

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
        """Let a role handle an event, timed."""
        begun = self._clock()
        actions = handle()
        seconds = self._clock() - begun
        for key in (kind, f"{kind} {label_of(event)}"):
            total, n = self.handling.get(key, (0.0, 0))
            self.handling[key] = (total + seconds, n + 1)
        return actions


def warm(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces after the first ones, if there are any."""
    n_cold = max(N_WARM, round(WARM_SHARE * len(pieces)))
    return pieces[n_cold:] or pieces


def rate_of(pieces: Sequence[Piece]) -> Seconds:
    """Return the seconds of a unit: of all pieces together, save for a few that lag.

    Pieces of one kind may be of all sizes, and small ones take more for each unit.
    """
    usual = median(seconds / n for seconds, n in pieces)
    kept = [(s, n) for s, n in pieces if s / n <= LAG * usual] or pieces
    return sum(seconds for seconds, _ in kept) / sum(n for _, n in kept)


def waiting_of(pieces: Sequence[Piece], *, besides: Seconds) -> Seconds:
    """Return the seconds of a unit for which pieces have waited; 0 if that is nothing.

    Args:
        pieces: All of them: who waits now and then waits for a few only.
        besides: What a unit takes otherwise.
    """
    seconds = sum(seconds for seconds, _ in pieces) / sum(n for _, n in pieces)
    return seconds if seconds > WAITING_SHARE_MIN * (seconds + besides) else 0.0


def idle() -> Seconds:
    """Return for how long this thread has slept; only differences mean anything.

    That is the time in which it neither computed nor stood in a queue for a core. Where
    nobody tells of that queue no sleep is known of.
    """
    with suppress(OSError):
        _, queued, _ = QUEUE.read_text().split()
        return time.perf_counter() - time.thread_time() - 1e-9 * int(queued)
    return 0.0
