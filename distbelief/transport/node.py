"""Drives one role over the real network; the only reader of the clock.

    messages, timers, work done, posted events, the launcher's
              |  one at a time
        role.handle(event, now)
              |
    messages, timers, work to do, log lines, the end

One thread, the caller's, polls, handles and sends. Work runs in a thread per lane,
started when the node is, so that a role whose gradient takes seconds still answers and
sends heartbeats. An error always has a way out: what a peer did wrong is logged and
dropped, what work raises goes to the role as `Computed.error`, and anything else ends
the role and is returned by `run`, never a silent hang.
"""

import heapq
import math
import queue
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import Protocol, Self, assert_never, final

from distbelief.errors import (
    DistBeliefError,
    LocalProtocolError,
    RemoteProtocolError,
    StorageError,
    TransportError,
)
from distbelief.protocol.codec import Envelope
from distbelief.roles.role import (
    Action,
    Address,
    AssignName,
    CancelTimer,
    Compute,
    Computed,
    Connect,
    Event,
    Executor,
    Exit,
    Launch,
    PeerLost,
    Persist,
    Persisted,
    Received,
    Report,
    Role,
    Seconds,
    Send,
    SetTimer,
    Snapshot,
    Started,
    Terminate,
    TimerFired,
    check_accepted,
)
from distbelief.transport.zmq_transport import Log, ZmqTransport


# An alarm: ends the wait of a poll, from any thread and from a signal handler.


@final
class Waker:
    """Two sockets: what is written to one ends a poll of the other."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> None:
        """Make the sockets; until then nothing can be rung."""
        ends = socket.socketpair()
        for end in ends:
            end.settimeout(0)
        self._ends = ends

    def ring(self) -> None:
        """End the poll, or the next one. Unlike a lock, safe in a signal handler."""
        if self._ends is not None:
            with suppress(OSError):  # full: it rings; closed: nobody is there to hear
                self._ends[1].send(b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable once it was rung, until `silence`."""
        assert self._ends is not None
        return self._ends[0].fileno()

    def silence(self) -> None:
        """It was heard."""
        assert self._ends is not None
        with suppress(BlockingIOError):
            self._ends[0].recv(4096)

    def close(self) -> None:
        """Close the sockets; it may be rung all the same."""
        for end in self._ends or ():
            end.close()


# Lanes: threads that do a role's work, one piece at a time in each, side by side.

Task = Callable[[], Event]  # does the work; raises nothing


class WorkExecutors:
    """The threads of one role. Only `start` starts them."""

    def __init__(self, name: str, *, now: Callable[[], Seconds], wake: Callable[[], None]) -> None:
        self._now = now
        self._wake = wake  # called, in a lane's thread, whenever an answer is there
        self._answers: deque[Event] = deque()
        self._busy_with: dict[Executor, str] = {}
        self._ending = False
        self._tasks: dict[Executor, queue.SimpleQueue[tuple[str, Task] | None]] = {
            lane: queue.SimpleQueue() for lane in Executor
        }
        # Daemons: an endless user function must not keep the process from exiting.
        self._threads = {
            lane: threading.Thread(
                target=self._work, args=(lane,), name=f"{name}-{lane.value}", daemon=True
            )
            for lane in Executor
        }

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads.values():
            thread.start()

    def add(self, lane: Executor, name: str, task: Task) -> None:
        """Do `task` after all that was added to this lane before."""
        self._tasks[lane].put((name, task))

    def compute(self, action: Compute) -> None:
        """Do what a role asks; what its work raises is part of the answer."""
        self.add(action.lane, action.name, partial(self._compute, action))

    def answers(self) -> Iterator[Event]:
        """Yield the answers that are here by now, and forget them."""
        for _ in range(len(self._answers)):
            yield self._answers.popleft()

    def close(self, *, seconds_max: Seconds) -> list[str]:
        """Do no more than what is under way; return what is, when the time is up."""
        self._ending = True
        for tasks in self._tasks.values():
            tasks.put(None)
        deadline = self._now() + seconds_max
        left_behind = []
        for lane, thread in self._threads.items():
            if thread.ident is not None:  # started
                thread.join(max(0.0, deadline - self._now()))
            work = self._busy_with.get(lane)
            if thread.is_alive() and work is not None:  # an idle one just ends later
                left_behind.append(f"{work} ({lane.value})")
        return left_behind

    def _work(self, lane: Executor) -> None:
        while (item := self._tasks[lane].get()) and not self._ending:
            self._busy_with[lane], task = item
            self._answers.append(task())
            # A waiting thread keeps nothing alive: work may hold a whole batch.
            del item, task, self._busy_with[lane]
            self._wake()

    def _compute(self, action: Compute) -> Computed:
        begun = self._now()
        result: object = None
        failed: BaseException | None = None
        try:
            result = action.work()
        except BaseException as error:  # noqa: BLE001 -- told to the role
            failed = error
        seconds = self._now() - begun
        return Computed(name=action.name, result=result, error=failed, seconds=seconds)


# Timers of one role, by name, soonest first; whoever asks says what time it is.


class Timers:
    """Named times. A name has one time: setting it again replaces it."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Seconds, int]] = {}
        self._heap: list[tuple[Seconds, int, str]] = []  # replaced entries included
        self._order = count()  # of two timers due at once, the one set first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next_at(self) -> Seconds:
        """When the next timer comes due; infinity if there is none."""
        while self._heap:
            at, order, name = self._heap[0]
            if self._entries.get(name) == (at, order):
                return at
            heapq.heappop(self._heap)
        return math.inf

    def set(self, name: str, at: Seconds) -> None:
        """Let `name` come due at `at`, and at no other time."""
        order = next(self._order)
        self._entries[name] = (at, order)
        heapq.heappush(self._heap, (at, order, name))
        # A watchdog is set at every message and hardly ever comes due.
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [(*entry, name) for name, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def cancel(self, name: str) -> None:
        """Forget the timer, if there is one."""
        self._entries.pop(name, None)

    def pop_due(self, now: Seconds) -> str | None:
        """Forget and return the first timer that is due; `None` if none is."""
        if self.next_at > now:
            return None
        name = heapq.heappop(self._heap)[-1]
        del self._entries[name]
        return name


POSTED_MAX = 1024
WAIT_SECONDS_MAX = 60.0  # of one poll; there is nothing to do when it passes
JOIN_SECONDS_MAX = 5.0  # how long the end waits for work that is under way


class CheckpointStorage(Protocol):
    """Where snapshots survive their role. Called from the compute lane's thread."""

    def save(self, role: Address, snapshot: Snapshot) -> None:
        """Save for good, or raise `DistBeliefError` or `OSError`."""
        ...

    def newest(self, role: Address) -> Snapshot | None:
        """Return the newest whole snapshot; `None` if there has never been one.

        Raises:
            StorageError: there are some, and none can be used.
        """
        ...


class Launcher(Protocol):
    """Starts and ends the processes of other roles, without waiting for them."""

    def launch(self, name: Address, incarnation: int) -> None:
        """Start a role; raise `DistBeliefError` if that is out of the question."""
        ...

    def terminate(self, name: Address) -> None:
        """End a role at once; nothing happens if it is gone already."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable while `events` has something."""
        ...

    def events(self) -> Sequence[Event]:
        """Return what happened since the last call: `PeerLost`, and posted news."""
        ...


class RoleRunner:
    """One role, its timers, its work and its links.

    Use `run` for a process that is the role, or `pump` for a role inside somebody
    else's loop; then `close`, or a `with` statement. The transport is the caller's to
    start and to close: closing it sends what the role said last.
    """

    def __init__(
        self,
        role: Role,
        *,
        transport: ZmqTransport,
        log: Log,
        store: CheckpointStorage | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._role = role
        self._transport = transport
        self._log = log
        self._store = store
        self._launcher = launcher
        self._name = Address(transport.name)
        self._timers = Timers()
        self._posted: deque[Event] = deque()
        self._n_posted_lost = 0
        self._n_refused = 0
        self._alarm = Waker()
        self._lanes = WorkExecutors(self._name, now=self._now, wake=self._alarm.ring)
        self._begun = False
        self._halted = False
        self._error: str | None = None

    # ----------------------------------------------------------------- for callers

    @property
    def halted(self) -> bool:
        """Whether the role has ended."""
        return self._halted

    @property
    def error(self) -> str | None:
        """Why the role ended, if not as planned."""
        return self._error

    def run(
        self, on_tick: Callable[[], None] | None = None, *, tick_seconds: Seconds = 0.25
    ) -> str | None:
        """Run the role until it ends; return what went wrong, if anything did.

        Args:
            on_tick: called now and then in this thread, for a display.
            tick_seconds: how often.
        """
        with self:
            self._begin()
            next_tick = self._now()
            while not self._halted:
                wait = WAIT_SECONDS_MAX
                if on_tick:
                    if next_tick <= self._now():
                        on_tick = self._tick(on_tick)
                        next_tick = self._now() + tick_seconds
                    wait = next_tick - self._now()
                self._turn(wait)
            if on_tick:
                self._tick(on_tick)  # so that a display shows the end
        return self._error

    def pump(self, until: Callable[[], bool], *, timeout_seconds: Seconds) -> bool:
        """Run the role in this thread until `until()` holds; return whether it does.

        Also returns when the time is up, or when the role has ended (see `error`).
        """
        self._begin()
        deadline = self._now() + timeout_seconds
        while not until():
            left = deadline - self._now()
            if self._halted or left <= 0:
                return False
            self._turn(left)
        return True

    def post(self, event: Event) -> bool:
        """Let the role handle `event` soon; for any thread, and signal handlers.

        Returns:
            Whether it was taken: a role too far behind drops what is posted.
        """
        if len(self._posted) >= POSTED_MAX:
            self._n_posted_lost += 1
            return False
        self._posted.append(event)
        self._alarm.ring()
        return True

    def tell(self, event: Event) -> bool:
        """Let the role handle `event` at once; for the thread that pumps.

        What has arrived is handled before it: a role that is told often, and never has
        to wait, hears of its peers all the same.

        Returns:
            Whether it could: a role that has ended handles nothing.
        """
        self._begin()
        if not self._halted:
            self._turn(0.0)
        self._deliver(event)
        return not self._halted

    def close(self) -> None:
        """End the lanes: wait for what they are doing, but not for long."""
        self._halted = True
        for work in self._lanes.close(seconds_max=JOIN_SECONDS_MAX):
            self._log(
                "warning",
                f"{self._name}: {work} is not done {JOIN_SECONDS_MAX} s after the end: left behind",
            )
        self._alarm.close()

    def __enter__(self) -> Self:
        """Do nothing: `run` and `pump` begin."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # -------------------------------------------------------------------- the loop

    @staticmethod
    def _now() -> Seconds:
        return time.monotonic()

    def _begin(self) -> None:
        if self._begun or self._halted:
            return
        self._begun = True
        self._alarm.start()
        self._lanes.start()
        restored, unrestored = None, None
        try:
            restored = self._store.newest(self._name) if self._store else None
        except StorageError as error:
            unrestored = str(error)
        except DistBeliefError as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        started = Started(
            incarnation=self._transport.incarnation, restored=restored, unrestored=unrestored
        )
        self._deliver(started)

    def _turn(self, seconds_max: Seconds) -> None:
        """Wait for something to happen, and handle what has; a bounded share of it."""
        wait = min(seconds_max, WAIT_SECONDS_MAX, self._timers.next_at - self._now())
        if self._posted:
            wait = 0.0
        fds = [self._alarm.fileno()]
        if self._launcher:
            fds.append(self._launcher.fileno())
        ready = self._transport.poll(wait, fds)
        if self._alarm.fileno() in ready:
            self._alarm.silence()
        self._deliver_due()
        self._deliver_all(self._lanes.answers())
        if self._launcher and self._launcher.fileno() in ready:
            self._deliver_all(self._launcher.events())
        self._deliver_all(self._take_posted())
        self._deliver_all(map(_received, self._transport.receive()))

    def _take_posted(self) -> list[Event]:
        if self._n_posted_lost:
            self._log("warning", f"{self._n_posted_lost} posted events were dropped")
            self._n_posted_lost = 0
        return [self._posted.popleft() for _ in range(len(self._posted))]

    def _deliver_due(self) -> None:
        now = self._now()
        for _ in range(len(self._timers)):  # one that sets itself anew waits its turn
            name = self._timers.pop_due(now)
            if name is None:
                return
            self._deliver(TimerFired(name=name))

    def _deliver_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._deliver(event)
            if self._halted:
                return

    def _deliver(self, event: Event) -> None:
        """Let the role handle one event, and do what it asks."""
        if self._halted:
            return
        try:
            check_accepted(self._role, event, name=self._name)
            for action in self._role.handle(event, self._now()):
                self._perform(action)
        except RemoteProtocolError as error:
            self._n_refused += 1
            if self._n_refused & (self._n_refused - 1) == 0:  # a flood fills no disk
                text = f"refused, {self._n_refused} so far: {error}"
                self._log("warning", text)
        except DistBeliefError as error:
            self._fail(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 -- a bug must not look like a hang
            self._fail(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _fail(self, error: str, trace: str = "") -> None:
        self._log("error", f"{self._name} cannot go on: {error}")
        if trace:
            self._log("error", trace)
        self._halted, self._error = True, error

    def _tick(self, on_tick: Callable[[], None]) -> Callable[[], None] | None:
        """Call it; return `None` if it is better not called again."""
        try:
            on_tick()
        except Exception:  # noqa: BLE001 -- a broken display must not end the job
            self._log("error", f"no further ticks:\n{traceback.format_exc()}")
            return None
        return on_tick

    # --------------------------------------------------------------------- actions

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                self._transport.send(action.receiver, action.message, lent=action.lent)
            case SetTimer():
                self._timers.set(action.name, action.at)
            case CancelTimer():
                self._timers.cancel(action.name)
            case Compute():
                self._lanes.compute(action)
            case Persist():
                task = partial(_persist, self._store, self._name, action.snapshot)
                self._lanes.add(Executor.COMPUTE, f"saving {action.snapshot.label}", task)
            case _:
                self._perform_rare(action)

    def _perform_rare(
        self, action: Report | Connect | Launch | AssignName | Terminate | Exit
    ) -> None:
        match action:
            case Report():
                self._log(action.level, action.text)
            case Connect():
                self._connect(action)
            case Launch():
                self._launch(action)
            case AssignName():
                self._transport.entrust(action.name, action.to)
            case Terminate():
                self._its_launcher().terminate(action.name)
            case Exit():
                self._halted, self._error = True, action.error
            case _:
                assert_never(action)

    def _connect(self, action: Connect) -> None:
        try:
            self._transport.connect(action.peer, action.incarnation, action.endpoint)
        except TransportError as error:
            self._log("error", str(error))  # whoever waits for this peer has a bound

    def _launch(self, action: Launch) -> None:
        try:
            self._its_launcher().launch(action.name, action.incarnation)
        except LocalProtocolError:
            raise
        except DistBeliefError as error:
            lost = PeerLost(peer=action.name, incarnation=action.incarnation, reason=str(error))
            self._posted.append(lost)

    def _its_launcher(self) -> Launcher:
        if self._launcher is None:
            raise LocalProtocolError(f"{self._name} has no launcher")
        return self._launcher


def _received(envelope: Envelope) -> Received:
    return Received(
        sender=Address(envelope.sender), incarnation=envelope.incarnation, message=envelope.message
    )


def _persist(store: CheckpointStorage | None, role: Address, snapshot: Snapshot) -> Persisted:
    if store is None:
        return Persisted(label=snapshot.label, error="there is no place for snapshots")
    try:
        store.save(role, snapshot)
    except Exception as error:  # noqa: BLE001 -- told to the role
        return Persisted(label=snapshot.label, error=f"{type(error).__name__}: {error}")
    return Persisted(label=snapshot.label)
