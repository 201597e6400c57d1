"""Vectors: flat arrays of numbers, and the blocks in which they are sent.

Only the five element types below may cross a process boundary; the codec rejects others.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


Element = np.float32 | np.float64 | np.uint16 | np.uint32 | np.int64
Vector = NDArray[Element]  # (size,): one dimension
VectorName = str

# In elements. Each segment of a shard's vector begins at a multiple of this, so that
# vectorized kernels round in the same way however a tensor is split over shards.
ALIGNMENT = 64

# Size of one block message. With much larger blocks page faults dominate the cost, with much
# smaller ones the overhead of each message.
BLOCK_BYTES = 1 << 20

ELEMENT_TYPES: dict[str, np.dtype[Element]] = {
    "f4": np.dtype(np.float32),
    "f8": np.dtype(np.float64),
    "b2": np.dtype(np.uint16),  # the bits of a bfloat16: numpy has no such type
    "u4": np.dtype(np.uint32),  # words of an encoded push
    "i8": np.dtype(np.int64),
}


def block_bounds(n_elements: int, *, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each block of a vector of `n_elements`."""
    # An empty vector has one empty block, so that every transfer has a last block.
    per_block = BLOCK_BYTES // itemsize
    for start in range(0, max(n_elements, 1), per_block):
        yield start, min(start + per_block, n_elements)


def n_blocks(n_elements: int, *, itemsize: int) -> int:
    return max(1, -(-n_elements // (BLOCK_BYTES // itemsize)))


def block_range(index: int, n_elements: int, *, itemsize: int) -> range:
    """Return which elements of a vector block `index` has; none beyond the last block."""
    per_block = BLOCK_BYTES // itemsize
    return range(n_elements)[index * per_block : (index + 1) * per_block]


def block_of(vector: Vector, index: int) -> Vector:
    """Return that block, a view."""
    elements = block_range(index, len(vector), itemsize=vector.itemsize)
    return vector[elements.start : elements.stop]


def padded(n_elements: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-n_elements // ALIGNMENT) * ALIGNMENT
