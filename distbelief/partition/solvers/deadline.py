"""How long a search may go on."""

import time
from collections.abc import Callable
from typing import final


@final
class Deadline:
    """A moment after which a search returns the best it has.

    Args:
        seconds: From now.
        clock: Monotonic, seconds; tests pass their own.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, 0 at least."""
        return max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self.left <= 0
