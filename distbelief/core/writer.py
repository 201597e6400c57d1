"""Writes in a thread of its own: whoever answers others must not wait for a file.

    who answers              the thread
      | write(job) ------->  |  job(), one after the other
      | renew(key, job) -->  |  of those of one key only the newest

A disk that hangs, or a terminal that nobody reads, holds up this thread alone. Rules:

* Before `start`, and once `close` is over, a job is done at once by who hands it over.
* At most `n_waiting_max` jobs wait. What comes beyond is dropped and counted, and the
  count is told as soon as jobs are done again.
* `close` waits for all that was handed over, but not for ever. If the thread hangs
  then, it goes on when it can, and takes what is handed over still later.
"""

import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, final


N_WAITING_MAX: Final = 10_000
CLOSE_SECONDS_MAX: Final = 5.0

Job = Callable[[], object]


@final
class Writer:
    """One thread, and what it is to write.

    Args:
        name: Of the thread.
        tell: Told, in the thread, what was dropped, and what a job has raised that
            should have told of it itself.
        n_waiting_max: Jobs that may wait.
    """

    def __init__(
        self, name: str, *, tell: Callable[[str], object], n_waiting_max: int = N_WAITING_MAX
    ) -> None:
        self._name = name
        self._tell = tell
        self._n_waiting_max = n_waiting_max
        self._changed = threading.Condition()
        self._waiting: dict[str | int, Job] = {}  # in the order in which they are done
        self._n_handed = 0
        self._n_dropped = 0
        self._n_raised = 0
        self._closing = False
        self._thread: threading.Thread | None = None  # as long as it takes jobs

    def start(self) -> None:
        """Start the thread; it may be started again once it has ended."""
        with self._changed:
            self._closing = False
            if self._thread is None:
                # A daemon: a write that hangs must not keep the process from exiting.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def write(self, job: Job) -> None:
        """Do this after all that was handed over before."""
        with self._changed:
            self._n_handed += 1
            if self._is_taken(self._n_handed, job):
                return
        job()

    def renew(self, key: str, job: Job) -> None:
        """Do this in place of the last one of this key, if that still waits."""
        with self._changed:
            if self._is_taken(key, job):
                return
        job()

    def close(self, *, seconds_max: float = CLOSE_SECONDS_MAX) -> bool:
        """Wait for all that was handed over; return whether it is done."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify()
        if thread is not None:
            thread.join(seconds_max)
        return thread is None or not thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _is_taken(self, key: str | int, job: Job) -> bool:
        """Let the job wait, or drop it; return False if there is no thread."""
        if self._thread is None:
            return False
        if key not in self._waiting and len(self._waiting) >= self._n_waiting_max:
            self._n_dropped += 1
        else:
            self._waiting[key] = job
            self._changed.notify()
        return True

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 -- a bug must not end all writing
                self._n_raised += 1
                if self._n_raised & (self._n_raised - 1) == 0:  # no flood
                    trace = traceback.format_exc()
                    self._tell(f"not written, {self._n_raised} so far: {trace}")
            del job
            self._tell_dropped()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._waiting:
                if self._closing:
                    self._thread = None
                    return None
                self._changed.wait()
            return self._waiting.pop(next(iter(self._waiting)))

    def _tell_dropped(self) -> None:
        with self._changed:
            n_dropped, self._n_dropped = self._n_dropped, 0
        if n_dropped:
            noun = "line was" if n_dropped == 1 else "lines were"
            self._tell(f"{n_dropped:,} {noun} dropped: writing has taken too long")
