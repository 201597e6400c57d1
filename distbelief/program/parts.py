"""Parts of compiled plans, kept: plans that differ in one layer have most in common.

Whoever compiles many plans of one graph, as a search does, hands the same store to all
of them. What has not been asked for longest is forgotten first.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final


_T = TypeVar("_T")


@final
class Parts(Generic[_T]):
    """Results by what they were made from.

    Args:
        n_max: How many are kept.
    """

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._kept: dict[Hashable, _T] = {}

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept under a key, made now if nothing is."""
        found = self._kept.pop(key) if key in self._kept else make()
        self._kept[key] = found  # now the last to be forgotten
        if len(self._kept) > self._n_max:
            del self._kept[next(iter(self._kept))]
        return found
