"""Lanes: threads that do a role's work, one piece at a time in each, side by side."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from distbelief.roles import Compute, Computed, Event, Lane, Seconds


Task = Callable[[], Event]  # does the work; raises nothing


class Lanes:
    """The threads of one role. Only `start` starts them."""

    def __init__(self, name: str, *, now: Callable[[], Seconds], wake: Callable[[], None]) -> None:
        self._now = now
        self._wake = wake  # called, in a lane's thread, whenever an answer is there
        self._answers: deque[Event] = deque()
        self._busy_with: dict[Lane, str] = {}
        self._ending = False
        self._tasks: dict[Lane, queue.SimpleQueue[tuple[str, Task] | None]] = {
            lane: queue.SimpleQueue() for lane in Lane
        }
        # Daemons: an endless user function must not keep the process from exiting.
        self._threads = {
            lane: threading.Thread(
                target=self._work, args=(lane,), name=f"{name}-{lane.value}", daemon=True
            )
            for lane in Lane
        }

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads.values():
            thread.start()

    def add(self, lane: Lane, name: str, task: Task) -> None:
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

    def _work(self, lane: Lane) -> None:
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
