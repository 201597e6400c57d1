"""A shard's values and its rule's state in pieces, to be sent while they change.

    elements        [0 .... E)[E .... 2E)[2E .... n_gradient .. shard_size)
    piece 1                    values[E:2E], then each vector of the state [E:2E)

Rules:

* A piece fits into one message. Whoever holds pieces [0, k) holds a prefix of the
  elements with all that belongs to them, and can apply pushes to it: rules work element
  by element.
* Cuts are multiples of `ALIGNMENT`, so that kernels round alike on the prefix and on
  the whole.
* Vectors of the state come in the order of their names, and end with the parameters.
"""

from collections.abc import Iterator
from typing import final

import numpy as np

from distbelief import vectors
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.rules.update_rules import State
from distbelief.vectors import ALIGNMENT, Vector


@final
class Pieces:
    """How these arrays are cut; it sees them, and writes into them."""

    def __init__(self, values: Vector, state: State) -> None:
        self._whole = [values, *(state[name] for name in sorted(state))]
        bytes_per_element = values.itemsize * len(self._whole)
        n_aligned = vectors.BLOCK_BYTES // (bytes_per_element * ALIGNMENT)
        self._n_elements = ALIGNMENT * max(1, n_aligned)

    def __len__(self) -> int:
        """How many there are; at least 1, so that every transfer has an end."""
        return max(1, -(-len(self._whole[0]) // self._n_elements))

    def n_elements(self, n_pieces: int) -> int:
        """Return how many elements the first pieces hold."""
        return min(n_pieces * self._n_elements, len(self._whole[0]))

    def pack(self, index: int) -> Vector:
        """Return a copy of one piece."""
        return np.concatenate(list(self._parts(index)))

    def unpack(self, index: int, packed: Vector) -> None:
        """Write one piece to where it belongs.

        Raises:
            RemoteProtocolError: it cannot be that piece.
        """
        if index >= len(self):
            raise RemoteProtocolError(f"there is no piece {index} of {len(self)}")
        parts = list(self._parts(index))
        n, dtype = sum(map(len, parts)), self._whole[0].dtype
        if packed.dtype != dtype or len(packed) != n:
            raise RemoteProtocolError(
                f"piece {index} has {len(packed)} elements of {packed.dtype}, not {n} "
                f"of {dtype}: both copies must use one layout and one rule"
            )
        start = 0
        for part in parts:
            part[:] = packed[start : start + len(part)]
            start += len(part)

    def _parts(self, index: int) -> Iterator[Vector]:
        start = index * self._n_elements
        for vector in self._whole:
            yield vector[start : start + self._n_elements]
