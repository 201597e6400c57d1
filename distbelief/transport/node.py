"""RoleRunner: runs one role over the network; the only reader of the clock.

    messages, timers, results, posted events, launcher events
              |  one at a time
        role.handle(event, now)
              |
    messages, timers, work to do, log lines, exit

One thread polls, handles and sends. Work runs in one thread per executor, so that a role whose
gradient takes seconds still answers and sends heartbeats. Errors never hang: a peer's is logged
and dropped, one of work goes to the role (`Computed.error`), any other ends the role.
"""

import math
import queue
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, Self, assert_never, final

from distbelief.core.errors import (
    DistBeliefError,
    FalseClaimError,
    RemoteProtocolError,
    StorageError,
    TransportError,
)
from distbelief.protocol import Stop, role as rl
from distbelief.transport.address import refuses
from distbelief.transport.zmq_transport import Log, ZmqTransport


@final
class Waker:
    """Ends the wait of a poll, from any thread and from a signal handler."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> None:
        ends = socket.socketpair()
        for end in ends:
            end.settimeout(0)
        self._ends = ends

    def wake(self) -> None:
        """End the poll, or the next one. Unlike a lock, safe in a signal handler."""
        if self._ends is not None:
            with suppress(OSError):  # full: the poll ends anyway; closed: nothing polls
                self._ends[1].send(b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable from `wake` until `clear`."""
        assert self._ends is not None
        return self._ends[0].fileno()

    def clear(self) -> None:
        assert self._ends is not None
        with suppress(BlockingIOError):
            self._ends[0].recv(4096)

    def close(self) -> None:
        for end in self._ends or ():
            end.close()


Task = Callable[[], rl.Event]  # raises nothing


class WorkExecutors:
    """The threads that do a role's work: one for each executor, one task at a time in each."""

    def __init__(self, name: str, *, wake: Callable[[], None]) -> None:
        self._wake = wake  # called in an executor's thread when a result is ready
        self._results: deque[rl.Event] = deque()
        self._running: dict[rl.Executor, str] = {}
        self._ending = False
        self._tasks: dict[rl.Executor, queue.SimpleQueue[tuple[str, Task] | None]] = {
            executor: queue.SimpleQueue() for executor in rl.Executor
        }
        # Daemon threads: a user function that never returns must not block the exit.
        self._threads = {
            executor: threading.Thread(
                target=self._work, args=(executor,), name=f"{name}-{executor.value}", daemon=True
            )
            for executor in rl.Executor
        }

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def add(self, executor: rl.Executor, name: str, task: Task) -> None:
        """Run `task` after all tasks added to this executor before."""
        self._tasks[executor].put((name, task))

    def note(self, event: rl.Event) -> None:
        """Add what a running task has to say."""
        self._results.append(event)
        self._wake()

    def results(self) -> list[rl.Event]:
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self, *, seconds_max: rl.Seconds) -> list[str]:
        """Drop waiting tasks; wait for running ones; return those that still run."""
        self._ending = True
        for tasks in self._tasks.values():
            tasks.put(None)
        deadline = time.monotonic() + seconds_max
        unfinished = []
        for executor, thread in self._threads.items():
            if thread.ident is not None:  # started
                thread.join(max(0.0, deadline - time.monotonic()))
            work = self._running.get(executor)
            if thread.is_alive() and work is not None:  # an idle thread ends soon
                unfinished.append(f"{work} ({executor.value})")
        return unfinished

    def _work(self, executor: rl.Executor) -> None:
        while (item := self._tasks[executor].get()) and not self._ending:
            self._running[executor], task = item
            self._results.append(task())
            # A waiting thread must keep nothing alive: a task may hold a whole batch.
            del item, task, self._running[executor]
            self._wake()


def in_threads(pieces: Sequence[Callable[[], object]]) -> None:
    """Run pieces of work at the same time, each in a thread of its own; wait for all."""
    caller = threading.current_thread().name
    threads = [
        threading.Thread(target=piece, name=f"{caller}-{i}", daemon=True)
        for i, piece in enumerate(pieces)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


POSTED_MAX = 1024
WAIT_SECONDS_MAX = 60.0  # of one poll
JOIN_SECONDS_MAX = 5.0  # how long `close` waits for running work


class CheckpointStorage(Protocol):
    """Stores a role's checkpoints. Called from the compute executor's thread."""

    def save(self, role: rl.Address, snapshot: rl.Snapshot) -> None:
        """Save durably, or raise `DistBeliefError` or `OSError`."""

    def newest(self, role: rl.Address) -> rl.Snapshot | None:
        """Return the newest complete checkpoint, if any; StorageError if none is usable."""


class Launcher(Protocol):
    """Starts and ends the processes of other roles without waiting for them."""

    def launch(self, name: rl.Address, incarnation: int, ranks: int) -> None:
        """Start a role, or raise `DistBeliefError` if it cannot be started."""

    def terminate(self, name: rl.Address) -> None:
        """End a role at once; no error if it has ended already."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `events` has some."""

    def events(self) -> Sequence[rl.Event]:
        """Return the events since the last call: `PeerLost` and posted events."""


class RoleRunner:
    """Runs one role with its timers, work and links.

    Use `run` for a process that is the role, `pump` for a role inside another loop; then `close`,
    or use it as a context manager. The caller starts and closes the transport; closing it sends the
    last messages.
    """

    def __init__(
        self,
        role: rl.Role,
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
        self._name = rl.Address(transport.name)
        # By name; of one time, the one that was set first fires first.
        self._timers: dict[str, rl.Seconds] = {}
        self._posted: deque[rl.Event] = deque()
        self._n_posted_dropped = 0
        self._n_rejected = 0
        self._waker = Waker()
        self._executors = WorkExecutors(self._name, wake=self._waker.wake)
        self._descriptors = frozenset[int]()  # that end a poll, beside messages
        self._started = False
        self.halted = False
        self.error: str | None = None  # why the role ended, if not as planned
        self.seconds_handling = 0.0  # events, their messages and what they call for

    def run(
        self, on_tick: Callable[[], None] | None = None, *, tick_seconds: rl.Seconds = 0.25
    ) -> str | None:
        """Run the role until it ends; return its error. Calls `on_tick` every `tick_seconds`."""
        with self:
            self._start()
            next_tick = time.monotonic()
            while not self.halted:
                wait = WAIT_SECONDS_MAX
                if on_tick:
                    if next_tick <= time.monotonic():
                        on_tick = self._tick(on_tick)
                        next_tick = time.monotonic() + tick_seconds
                    wait = next_tick - time.monotonic()
                self._poll_once(wait)
            if on_tick:
                self._tick(on_tick)  # the display shows the end
        return self.error

    def pump(
        self,
        until: Callable[[], bool],
        *,
        timeout_seconds: rl.Seconds,
        progress: Callable[[], object] = lambda: None,
    ) -> bool:
        """Run the role until `until()` holds, its end or the timeout; return whether it holds.

        The time begins anew whenever what `progress` returns has changed.
        """
        self._start()
        deadline, before = time.monotonic() + timeout_seconds, progress()
        while not until():
            if (found := progress()) != before:
                deadline, before = time.monotonic() + timeout_seconds, found
            left = deadline - time.monotonic()
            if self.halted or left <= 0:
                return False
            self._poll_once(left)
        return True

    def post(self, event: rl.Event) -> bool:
        """Queue an event, from any thread or signal handler; return False if `POSTED_MAX` wait."""
        if len(self._posted) >= POSTED_MAX:
            self._n_posted_dropped += 1
            return False
        self._posted.append(event)
        self.wake()
        return True

    def stop(self, reason: str) -> None:
        """Ask the role to end, as its user: at Ctrl+C, for example."""
        self.post(rl.Received(sender=rl.USER, incarnation=0, message=Stop(reason=reason)))

    def wake(self) -> None:
        """End the wait of `run` or `pump`, from any thread."""
        self._waker.wake()

    def fail(self, error: str, trace: str = "") -> None:
        self._log("error", f"{self._name} failed: {error}")
        if trace:
            self._log("error", trace)
        self.halted, self.error = True, error

    def tell(self, event: rl.Event) -> bool:
        """Let the role handle an event now; return False if the role has ended.

        Only in the thread that pumps. What has arrived is handled first, so that a caller that
        never waits still receives from peers.
        """
        self._start()
        if not self.halted:
            self._poll_once(0.0)
        self._deliver(event)
        return not self.halted

    def close(self) -> None:
        """Stop the executors; wait at most `JOIN_SECONDS_MAX` for running work."""
        self.halted = True
        for work in self._executors.close(seconds_max=JOIN_SECONDS_MAX):
            self._log(
                "warning",
                f"{self._name}: {work} still runs {JOIN_SECONDS_MAX:g} s after the end: abandoned",
            )
        self._waker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._started or self.halted:
            return
        self._started = True
        self._waker.start()
        self._executors.start()
        wakers = (self._waker, self._launcher) if self._launcher else (self._waker,)
        self._descriptors = frozenset(waker.fileno() for waker in wakers)
        restored, unrestored = None, None
        try:
            restored = self._store.newest(self._name) if self._store else None
        except StorageError as error:
            unrestored = str(error)
        except DistBeliefError as error:
            self.fail(f"{type(error).__name__}: {error}")
            return
        started = rl.Started(
            incarnation=self._transport.incarnation, restored=restored, unrestored=unrestored
        )
        self._deliver(started)

    def _poll_once(self, seconds_max: rl.Seconds) -> None:
        # Waits for something to happen, then handles a bounded share of it.
        timer_at = min(self._timers.values(), default=math.inf)
        wait = min(seconds_max, WAIT_SECONDS_MAX, timer_at - time.monotonic())
        ready = self._transport.poll(0.0 if self._posted else wait, self._descriptors)
        began = time.monotonic()
        if ready and self._waker.fileno() in ready:
            self._waker.clear()
        self._deliver_due()
        events = self._executors.results()
        if ready and self._launcher and self._launcher.fileno() in ready:
            events += self._launcher.events()
        if self._n_posted_dropped:
            self._log("warning", f"{self._n_posted_dropped} posted events were dropped")
            self._n_posted_dropped = 0
        events += [self._posted.popleft() for _ in range(len(self._posted))]
        for event in events:
            self._deliver(event)
        for peer, incarnation, endpoint in self._transport.ended():
            self._connect(
                rl.Probe(peer=rl.Address(peer), incarnation=incarnation, endpoint=endpoint)
            )
        for envelope in self._transport.receive():
            sender = rl.Address(envelope.sender)
            incarnation, message = envelope.incarnation, envelope.message
            self._deliver(rl.Received(sender=sender, incarnation=incarnation, message=message))
        self.seconds_handling += time.monotonic() - began

    def _deliver_due(self) -> None:
        now = time.monotonic()
        due = [name for name, at in self._timers.items() if at <= now]
        for name in sorted(due, key=self._timers.__getitem__):
            if self._timers.get(name, math.inf) <= now:  # not cancelled or set again by another
                del self._timers[name]
                self._deliver(rl.TimerFired(name=name))

    def _deliver(self, event: rl.Event) -> None:
        if self.halted:
            return
        try:
            rl.check_accepted(self._role, event, name=self._name)
            for action in self._role.handle(event, time.monotonic()):
                self._perform(action)
        except RemoteProtocolError as error:
            self._n_rejected += 1
            if self._n_rejected & (self._n_rejected - 1) == 0:  # a flood must not fill the disk
                text = f"rejected a message ({self._n_rejected} so far): {error}"
                self._log("warning", text)
            if isinstance(error, FalseClaimError) and isinstance(event, rl.Received):
                self._transport.reject_sender(str(error))
        except DistBeliefError as error:
            self.fail(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 -- a bug must not look like a hang
            self.fail(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _tick(self, on_tick: Callable[[], None]) -> Callable[[], None] | None:
        # Returns None after an error: then `on_tick` is not called again.
        try:
            on_tick()
        except Exception:  # noqa: BLE001 -- a broken display must not end the job
            self._log("error", f"the display failed and stays off:\n{traceback.format_exc()}")
            return None
        return on_tick

    def _perform(self, action: rl.Action) -> None:
        match action:
            case rl.Send():
                self._transport.send(action.receiver, action.message, lent=action.lent)
            case rl.SetTimer() | rl.CancelTimer():
                self._timers.pop(action.name, None)
                if isinstance(action, rl.SetTimer):
                    self._timers[action.name] = action.at
            case rl.Compute():
                self._executors.add(action.executor, action.name, self._task_of(action))
            case rl.Persist():
                task = partial(_persist, self._store, self._name, action.snapshot)
                self._executors.add(rl.Executor.COMPUTE, f"saving {action.snapshot.label}", task)
            case rl.Report():
                self._log(action.level, action.text)
            case rl.Connect() | rl.Probe():
                self._connect(action)
            case rl.Launch():
                self._launch(action)
            case rl.AssignName():
                self._transport.assign_name(action.name, action.to)
            case rl.Terminate():
                assert self._launcher is not None
                self._launcher.terminate(action.name)
            case rl.Exit():
                self.halted, self.error = True, action.error
            case _:
                assert_never(action)

    def _task_of(self, action: rl.Compute) -> Task:
        if action.notes is not None:
            action.notes.tell = partial(self._note, action.name)
        return partial(_compute, action)

    def _note(self, name: str, note: object, _share: float) -> None:
        self._executors.note(rl.Computed(name=name, result=note, is_note=True))

    def _connect(self, action: rl.Connect | rl.Probe) -> None:
        if isinstance(action, rl.Probe):  # it waits for an answer
            name = f"{self._name}-probe"
            threading.Thread(target=self._probe, args=(action,), name=name, daemon=True).start()
            return
        try:
            self._transport.connect(
                action.peer, action.incarnation, action.endpoint, watched=action.watched
            )
        except TransportError as error:  # the role limits how long it waits for a peer
            self._log("error", str(error))

    def _probe(self, action: rl.Probe) -> None:
        if refuses(action.endpoint):
            reason = "nothing listens there any more"
            peer, incarnation = action.peer, action.incarnation
            self.post(rl.PeerLost(peer=peer, incarnation=incarnation, reason=reason))

    def _launch(self, action: rl.Launch) -> None:
        assert self._launcher is not None
        try:
            self._launcher.launch(action.name, action.incarnation, action.ranks)
        except DistBeliefError as error:
            lost = rl.PeerLost(peer=action.name, incarnation=action.incarnation, reason=str(error))
            self._posted.append(lost)


@final
class BackgroundRunner:
    """Runs a role in a thread, except while another thread holds it.

        with background:    the thread waits; this one may `tell` and `pump`

    So one thread at a time handles events. The thread starts after the first hold and ends with the
    role, whose error is in `RoleRunner.error`. An interrupted hold leaves the thread waiting until
    the next one has ended.
    """

    def __init__(self, node: RoleRunner, *, name: str) -> None:
        self._node = node
        # A daemon: a loop that ends without `end` must not block the exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # `__enter__` clears the one and then reads the other, the thread the reverse: at least one
        # of them sees the other.
        self._is_free = threading.Event()  # nobody holds the role
        self._is_still = threading.Event()  # the thread does not run it
        self._is_still.set()
        self._last: Callable[[], None] | None = None

    @property
    def _is_gone(self) -> bool:
        # The thread has ended, or this is a forked child: there a lock that the thread held at the
        # fork, as of an event, is held for ever.
        return self._thread.ident is not None and not self._thread.is_alive()

    def __enter__(self) -> None:
        if self._is_gone:
            return
        self._is_free.clear()
        self._node.wake()
        if self._thread.is_alive():
            self._is_still.wait()

    def __exit__(self, *_error: object) -> None:
        if self._is_gone:
            return
        if self._thread.ident is None and not self._node.halted:
            self._thread.start()
        self._is_free.set()

    def end(self, last: Callable[[], None]) -> None:
        """Do `last`, which closes the role, while the thread waits; then end the thread."""
        if threading.current_thread() is self._thread:
            # The garbage collector runs in any thread, here amid an event: do it afterwards.
            self._last = last
            self._is_free.set()
            return
        try:
            with self:
                last()
        finally:
            if self._thread.ident is not None:
                self._thread.join()

    def _run(self) -> None:
        while not self._node.halted:
            self._is_free.wait()
            self._is_still.clear()
            try:
                self._node.pump(self._is_held, timeout_seconds=math.inf)
            except Exception as error:  # noqa: BLE001 -- the next hold finds it
                self._node.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
            finally:
                self._is_still.set()
            if self._last is not None:
                self._last()

    def _is_held(self) -> bool:
        return self._last is not None or not self._is_free.is_set()


def _compute(action: rl.Compute) -> rl.Computed:
    started_at = time.monotonic()
    result: object = None
    failed: BaseException | None = None
    try:
        result = action.work()
    except BaseException as error:  # noqa: BLE001 -- reported to the role
        failed = error
    seconds = time.monotonic() - started_at
    return rl.Computed(name=action.name, result=result, error=failed, seconds=seconds)


def _persist(
    store: CheckpointStorage | None, role: rl.Address, snapshot: rl.Snapshot
) -> rl.Persisted:
    if store is None:
        return rl.Persisted(label=snapshot.label, error="no checkpoint storage is configured")
    try:
        store.save(role, snapshot)
    except Exception as error:  # noqa: BLE001 -- reported to the role
        return rl.Persisted(label=snapshot.label, error=f"{type(error).__name__}: {error}")
    return rl.Persisted(label=snapshot.label)
