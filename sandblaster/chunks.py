"""Division of a batch into mini-batches, and of mini-batches into chunks.

    batch          all examples, positions 0 ... 23
    mini-batches   of 4, computed at once  [0 4) [4 8) [8 12) [12 16) [16 20) [20 24)
    chunks         of 2, pushed at once    [0 ... 8)   [8  ...   16)   [16  ...   24)

The division depends on the batch alone, not on the workers: so the sum of a chunk, and that
of the batch, has the same bits on every worker.
"""

from dataclasses import dataclass
from typing import Final, final

from distbelief.protocol.role import Address


COORDINATOR: Final = Address("coordinator")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
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

    def chunk_bounds(self, chunk_index: int, n_examples: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a chunk of a batch of `n_examples`."""
        start = chunk_index * self.chunk_size
        if not 0 <= start < n_examples:
            raise ValueError(
                f"chunk {chunk_index} of a batch of {n_examples} examples, which has "
                f"{self.n_chunks(n_examples)}"
            )
        return start, min(start + self.chunk_size, n_examples)
