"""A background thread that writes files and terminal output, so that roles never block on them.

    caller                   thread
      | write(job) ------->  |  runs the jobs in order
      | renew(key, job) -->  |  replaces a waiting job of the same key

* Before `start` and after `close`, the caller runs its job itself.
* At most `n_waiting_max` jobs wait. More are dropped and counted; the count is reported when
  the thread runs jobs again.
* `close` waits a limited time. A thread that hangs then continues when it can.
"""

import datetime as dt
import threading
import traceback
from collections.abc import Callable
from itertools import count
from typing import Final, Self, final

from distbelief.core import formatting


N_WAITING_MAX: Final = 10_000
CLOSE_SECONDS_MAX: Final = 5.0

Job = Callable[[], object]


def log_line(role: str, level: str, text: str) -> str:
    """Return a line of a log file, with the time of day."""
    now = dt.datetime.now().astimezone()
    at = f"{now:%Y-%m-%d %H:%M:%S}.{now.microsecond // 1000:03d}"
    return formatting.plain(f"{at} {role} {level}: {text}")


@final
class Writer:
    """A writer thread and its queue of jobs.

    `tell` is called in the thread with a message about dropped jobs, and about exceptions that a
    job has not handled itself.
    """

    def __init__(
        self, name: str, *, tell: Callable[[str], object], n_waiting_max: int = N_WAITING_MAX
    ) -> None:
        self._name = name
        self._tell = tell
        self._n_waiting_max = n_waiting_max
        self._changed = threading.Condition()
        self._waiting: dict[str | int, Job] = {}  # in the order in which they run
        self._numbers = count()
        self._n_dropped = 0
        self._n_raised = 0
        self._closing = False
        self._thread: threading.Thread | None = None  # None if it takes no jobs

    def start(self) -> None:
        """Start the thread; possible again after it has ended."""
        with self._changed:
            self._closing = False
            if self._thread is None:
                # A daemon thread: a write that hangs must not keep the process from exiting.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def write(self, job: Job) -> None:
        """Run this job after all earlier ones."""
        self.renew(next(self._numbers), job)

    def renew(self, key: str | int, job: Job) -> None:
        """Run this job; it replaces a waiting job of the same key."""
        with self._changed:
            has_thread = self._thread is not None
            if (
                has_thread
                and key not in self._waiting
                and len(self._waiting) >= self._n_waiting_max
            ):
                self._n_dropped += 1
            elif has_thread:
                self._waiting[key] = job
                self._changed.notify()
        if not has_thread:
            job()

    def close(self, *, seconds_max: float = CLOSE_SECONDS_MAX) -> bool:
        """Wait for all jobs; return whether they have all run."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify()
        if thread is not None:
            thread.join(seconds_max)
        return thread is None or not thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 -- a bug must not end all writing
                self._n_raised += 1
                # Report the 1st, 2nd, 4th, 8th, ... so that the log is not flooded.
                if self._n_raised & (self._n_raised - 1) == 0:
                    trace = traceback.format_exc()
                    self._tell(f"not written, {self._n_raised} so far: {trace}")
            del job
            self._report_dropped()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._waiting:
                if self._closing:
                    self._thread = None
                    return None
                self._changed.wait()
            return self._waiting.pop(next(iter(self._waiting)))

    def _report_dropped(self) -> None:
        with self._changed:
            n_dropped, self._n_dropped = self._n_dropped, 0
        if n_dropped:
            self._tell(f"lines dropped, as writing takes too long: {n_dropped:,}")
