"""Division of a batch into mini-batches, and of mini-batches into chunks.

    batch          positions 10 ... 33 of the order of the data; 24 examples
    mini-batches   of 4, computed at once  [10 14) [14 18) [18 22) [22 26) [26 30) [30 34)
    chunks         of 2, pushed at once    [10 ... 18)     [18 ... 26)     [26 ... 34)

The division depends on the batch alone, not on the workers: so the sum of a chunk, and that
of the batch, has the same bits on every worker.
"""

from dataclasses import dataclass
from typing import Final, final

from distbelief.roles.role import Address


COORDINATOR: Final = Address("coordinator")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
    """Sizes of chunks, fixed for a job."""

    mini_batch_size: int  # examples of a mini-batch; the last of a batch may have fewer
    mini_batches_per_chunk: int = 1  # mini-batches that are summed before they are pushed

    def __post_init__(self) -> None:
        for name in ("mini_batch_size", "mini_batches_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")

    @property
    def chunk_size(self) -> int:
        """Examples of a chunk; the last of a batch may have fewer."""
        return self.mini_batch_size * self.mini_batches_per_chunk

    def n_chunks(self, n_examples: int) -> int:
        return -(-n_examples // self.chunk_size)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """A batch: `n_examples` consecutive positions of the order of the data, from `first`."""

    first: int
    n_examples: int

    def chunk_bounds(self, chunk_index: int, chunk_sizes: ChunkSizes) -> tuple[int, int]:
        """Return the positions [start, stop) of a chunk."""
        start = chunk_index * chunk_sizes.chunk_size
        if not 0 <= start < self.n_examples:
            raise ValueError(
                f"chunk {chunk_index} of a batch of {self.n_examples} examples, which has "
                f"{chunk_sizes.n_chunks(self.n_examples)}"
            )
        stop = min(start + chunk_sizes.chunk_size, self.n_examples)
        return self.first + start, self.first + stop
