"""Turns: a thread that does the same again and again, until it is told to end.

So hands are moved and messages passed on while the job runs. What fails in a turn ends
them, and is raised where they are ended: it must not pass for a job that nobody broke.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, final

from distbelief.roles import Seconds


AWAITED_SECONDS_MAX: Final = 10.0


def _nothing() -> None:
    pass


@final
class Turns:
    """Calls `turn`, over and over. A context manager: within it, a thread does so.

    Args:
        turn: What is done in each.
        every: Seconds between two of them; 0 if a turn waits by itself.
        at_end: What is done after the last, whatever has happened.
    """

    def __init__(
        self,
        turn: Callable[[], None],
        *,
        every: Seconds = 0.0,
        at_end: Callable[[], None] = _nothing,
    ) -> None:
        self._turn = turn
        self._every = every
        self._at_end = at_end
        self._n_taken = 0
        self._taken = threading.Condition()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        """Take turns from now on."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take no more; raise what went wrong in one, unless something worse has."""
        self._ended.set()
        self._thread.join()
        self._at_end()
        if self._error is not None and error is None:
            raise self._error

    def await_next(self) -> None:
        """Return after a turn that began later than this call.

        Raises:
            TimeoutError: there is none.
        """
        with self._taken:
            n = self._n_taken + 2  # one may be under way
            if not self._taken.wait_for(lambda: self._n_taken >= n, AWAITED_SECONDS_MAX):
                raise TimeoutError(f"no turn within {AWAITED_SECONDS_MAX:g} s")

    def _work(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 -- raised at the end
                self._error = error
                return
            with self._taken:
                self._n_taken += 1
                self._taken.notify_all()
