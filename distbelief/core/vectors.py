"""Vectors: one-dimensional arrays of numbers, whole or cut into blocks.

Four element types may cross a process boundary; anything else is refused when a
message is encoded, and again when it is decoded.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


Element = np.float32 | np.float64 | np.uint16 | np.int64
Vector = NDArray[Element]  # (size,): one dimension
VectorName = str

ALIGNMENT = 64
"""Elements. Every segment of a shard's vector begins at a multiple of this, so that
vectorised kernels round alike however a tensor is cut."""

BLOCK_BYTES = 1 << 20
"""Bytes of one block message. Far larger, and page faults dominate; far smaller, and
the cost of a message does."""

ELEMENT_TYPES: dict[str, np.dtype[Element]] = {
    "f4": np.dtype(np.float32),
    "f8": np.dtype(np.float64),
    "b2": np.dtype(np.uint16),  # bfloat16, as its bits: numpy has no such type
    "i8": np.dtype(np.int64),
}


def block_bounds(n_elements: int, *, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each block of a vector of `n_elements`.

    An empty vector has one empty block, so that every transfer has a last block.
    """
    per_block = BLOCK_BYTES // itemsize
    for start in range(0, max(n_elements, 1), per_block):
        yield start, min(start + per_block, n_elements)


def n_blocks(n_elements: int, *, itemsize: int) -> int:
    """Return how many blocks `block_bounds` yields."""
    return max(1, -(-n_elements // (BLOCK_BYTES // itemsize)))
