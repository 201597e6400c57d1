"""How a batch is cut: into portions, and portions into sets.

    batch     positions 10 ... 33 of the order of the data; 24 examples
    portions  of 4, computed at once  [10 14) [14 18) [18 22) [22 26) [26 30) [30 34)
    sets      of 2, pushed at once    [10 ... 18)     [18 ... 26)     [26 ... 34)

The cut depends on the batch alone, never on who is there to compute it: so the sum of a
set is the same whoever computes it, and the sum of the batch has the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from distbelief.roles.role import Address


# What the roles of Sandblaster are called.

COORDINATOR: Final = Address("coordinator")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
    """Sizes that are fixed for a job.

    Attributes:
        portion_size: Examples of a portion; the last of a batch may have fewer.
        portions_per_set: How many are summed before they are pushed.
    """

    portion_size: int
    portions_per_set: int = 1

    def __post_init__(self) -> None:
        for name in ("portion_size", "portions_per_set"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")

    @property
    def set_size(self) -> int:
        """Examples of a set; the last of a batch may have fewer."""
        return self.portion_size * self.portions_per_set

    def n_sets(self, n_examples: int) -> int:
        """Return how many sets a batch has."""
        return -(-n_examples // self.set_size)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """A batch: consecutive positions in the order of the data.

    Attributes:
        first: Of its positions.
        n_examples: How many.
    """

    first: int
    n_examples: int

    def set_bounds(self, set_index: int, cutting: ChunkSizes) -> tuple[int, int]:
        """Return the positions [start, stop) of a set.

        Raises:
            ValueError: the batch has no such set.
        """
        start = set_index * cutting.set_size
        if not 0 <= start < self.n_examples:
            raise ValueError(
                f"set {set_index} of a batch of {self.n_examples} examples, which has "
                f"{cutting.n_sets(self.n_examples)}"
            )
        stop = min(start + cutting.set_size, self.n_examples)
        return self.first + start, self.first + stop

    def portions(self, set_index: int, cutting: ChunkSizes) -> Iterator[tuple[int, int]]:
        """Yield the positions [start, stop) of each portion of a set."""
        start, stop = self.set_bounds(set_index, cutting)
        for begin in range(start, stop, cutting.portion_size):
            yield begin, min(begin + cutting.portion_size, stop)
