"""What the events of a process take of the processors of this host, role apart.

    message      a small one, from where it is sent to where it is handled: both ends,
                 their threads of input and output as well
    work         a piece of work handed to a lane, done, and answered
    timer        set, and fired
    latency      of a message: what it takes beside that, for threads have to wake up
    wake         until a thread that slept has a core again, while all are taken
    begins       from where work is handed to a lane to where the lane begins it
    answers      from where it has done that to where its process handles the answer

The last two are by the clock, less what they take of a core: two threads of a process
wake each other, and wait for the interpreter, each time.
Real nodes with roles that do next to nothing are timed; no job is. What is of a core is
timed between pieces of work that go through as much memory as the job's: these take
the caches, and code that finds nothing of its own there takes several times as long.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final, final

import msgspec
import torch

from distbelief.messages import Alive
from distbelief.node import Node
from distbelief.roles import (
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Received,
    Seconds,
    Send,
    SetTimer,
    TimerFired,
)
from distbelief.scratch import scratch
from distbelief.transport.reach import Reach
from distbelief.transport.zmq_transport import ZmqTransport


N_EVENTS: Final = 200
N_WARM: Final = 30
N_SLEEPS: Final = 200
SLEEP_SECONDS: Final = 2e-3
WAIT_SECONDS_MAX: Final = 10.0
N_HANDED: Final = 200
CHILL_BYTES_MAX: Final = 3 << 20  # more than a core has caches to itself
_MATRIX: Final = 1024
_SMALL_MATRIX: Final = 256


@final
class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """See above; the first three are seconds of a core."""

    message: Seconds
    work: Seconds
    timer: Seconds
    latency: Seconds
    wake: Seconds
    begins: Seconds
    answers: Seconds


@final
class Chill:
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
class Counting:
    """A role that counts its events, and does again what it was asked to do.

    Args:
        again: Returns that.
        chill: Done before each.
    """

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
class Handing:
    """A role that has short work done, now and then.

    Attributes:
        begun: How long each piece waited for its lane.
        answered: How long each waited to be handled.
    """

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


def exchange(n_bytes: int) -> Exchange:
    """Measure everything.

    Args:
        n_bytes: That a piece of the job's work goes through: its parameters.
    """
    chill = Chill(n_bytes)
    with _one_thread():
        work, at_once = (_turns(partial(_work, each), each) for each in (chill, Chill(0)))
        timer = _turns(_timer, chill, first=True)
        message, _ = _messages(chill)
        _, latency = _messages(None)
        begins, answers = _handing()
        return Exchange(
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
    """Let work take the core of its own thread only, which is what `Chill` sees."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _messages(chill: Chill | None) -> tuple[Seconds, Seconds]:
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
            name: Counting(_sending(to), chill) for name, to in (("one", "other"), ("other", "one"))
        }
        with (
            Node(roles["one"], transport=one, log=_silent) as here,
            Node(roles["other"], transport=other, log=_silent) as there,
        ):
            one.send("other", Alive())
            _talk(here, there, roles, n_more=N_WARM)
            cores, clock = _cores_but(chill), time.perf_counter()
            _talk(here, there, roles, n_more=N_EVENTS)
            cores = (_cores_but(chill) - cores) / (2 * N_EVENTS)
            seconds = (time.perf_counter() - clock) / (2 * N_EVENTS)
    return cores, max(0.0, seconds - cores)


def _sending(to: str) -> Callable[[Seconds], Action]:
    return lambda _: Send(receiver=Address(to), message=Alive())


def _cores_but(chill: Chill | None) -> Seconds:
    """Return what this process has taken of the cores, but for that work."""
    return time.process_time() - (chill.seconds if chill is not None else 0.0)


def _talk(here: Node, there: Node, roles: Mapping[str, Counting], *, n_more: int) -> None:
    """Let both answer each other so often."""
    one, other = roles["one"], roles["other"]
    one.n_wanted = other.n_wanted = 1 << 62
    for _ in range(n_more):
        for node, role in ((there, other), (here, one)):
            _await_event(node, role)


def _await_event(node: Node, role: Counting) -> None:
    n = role.n + 1
    node.pump(lambda: role.n >= n, timeout_seconds=WAIT_SECONDS_MAX)


def _work(chill: Chill, now: Seconds) -> Action:
    del now
    return Compute(name="work", work=chill)


def _timer(now: Seconds) -> Action:
    return SetTimer(name="soon", at=now + 1e-5)


def _turns(again: Callable[[Seconds], Action], chill: Chill, *, first: bool = False) -> Seconds:
    """Return what it takes of a core to be asked for something, and to answer.

    Args:
        again: Returns what is asked for.
        chill: What this takes is not counted.
        first: Whether it is done before each; then to hand it on is counted.
    """
    role = Counting(again, chill if first else None)
    with (
        scratch() as folder,
        _transport("alone", folder) as transport,
        Node(role, transport=transport, log=_silent) as node,
    ):
        _turn(node, role, n_more=N_WARM)
        begun = _cores_but(chill)
        _turn(node, role, n_more=N_EVENTS)
        return (_cores_but(chill) - begun) / N_EVENTS


def _handing() -> tuple[Seconds, Seconds]:
    """Return how long work waits for its lane, and its answer for the process."""
    role = Handing()
    with (
        scratch() as folder,
        _transport("handing", folder) as transport,
        Node(role, transport=transport, log=_silent) as node,
    ):
        node.tell(Computed(name="begin"))
        node.pump(lambda: len(role.answered) >= N_HANDED, timeout_seconds=WAIT_SECONDS_MAX)
    return fmean(role.begun or [0.0]), fmean(role.answered or [0.0])


def _turn(node: Node, role: Counting, *, n_more: int) -> None:
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
    reach = Reach(directory=str(folder))
    return reach.transport(name=name, incarnation=1, run="exchange", log=_silent)


def _silent(level: str, text: str) -> None:
    del level, text
