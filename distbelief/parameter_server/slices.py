"""What one client holds of a shard's vector: all elements, or some ranges of them."""

from collections.abc import Sequence
from typing import Final, final

import msgspec
import numpy as np

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Element, Vector, block_bounds
from distbelief.parameter_server.bfloat16 import WORD, as_tensor, word_count
from distbelief.parameter_server.ranges import IndexRanges, Indices, RangeCopier
from distbelief.parameter_server.tensor_copies import parts
from distbelief.protocol import push_fetch as pf


Bounds = Sequence[tuple[int, int]]  # (start, stop) of each block of a vector

_N_KNOWN_MAX = 1024


@final
class ShardSlice:
    """The elements of a shard's vector that one client reads and writes: all, or ranges.

        shard's vector   0 1 2 3 4 5 6 7 8 9 ...      pushed, and fetched by blocks:
        a client holds       ^^^     ^^^^^            the compact vector 2 3 6 7 8

    A rank of a model-parallel replica "needs to communicate with just the subset of parameter
    server shards that hold the model parameters relevant to its partition" (Dean et al. 2012,
    section 4).
    """

    def __init__(
        self,
        size: int,  # of the vector
        *,
        dtype: np.dtype[Element],
        ranges: IndexRanges | None = None,
        n_gradient: int | None = None,  # elements of the vector before its buffers; None: all
    ) -> None:
        # Of the compact vector.
        self.n_elements = n_elements = size if ranges is None else ranges.n_elements
        self.dtype = dtype  # of the shard's vector
        self.ranges = ranges  # of the shard's vector; None for all of it
        self._size = size
        self._n_gradient = size if n_gradient is None else n_gradient
        self.n_parameters = self.within(0, self._n_gradient).n_elements
        self.stripes = None if ranges is None else ranges.stripes()  # the ranges as on the wire
        # (start, stop) of each block of the compact vector.
        self.bounds: Bounds = tuple(block_bounds(n_elements, itemsize=dtype.itemsize))
        # Equal for equal parts; empty for everything.
        self.key = b"" if ranges is None else ranges.key
        # By block, for parameters and buffers.
        self._copiers: dict[int, tuple[RangeCopier, RangeCopier]] = {}
        self._copier: RangeCopier | None = None  # for all blocks at once

    @property
    def all_stripes(self) -> Indices:
        """The ranges as on the wire, of everything too."""
        return IndexRanges.whole(0, self._size).stripes() if self.stripes is None else self.stripes

    def within(self, start: int, stop: int) -> IndexRanges:
        if self.ranges is None:
            return IndexRanges.whole(start, stop)
        return self.ranges.clipped(start, stop)

    def positions_of(self, inner: IndexRanges) -> IndexRanges:
        return inner if self.ranges is None else self.ranges.positions_of(inner)

    def contains(self, other: "ShardSlice") -> bool:
        if self.ranges is None or other.ranges is None:
            return self.ranges is None
        return self.ranges.intersection(other.ranges).n_elements == other.n_elements

    def n_blocks_within(self, stop: int) -> int:
        """Return how many blocks lie in elements [0, stop) of the shard's vector."""
        n_elements = self.within(0, stop).n_elements
        return sum(end <= n_elements for _, end in self.bounds)

    def room(self, memory: Vector, *, words: bool) -> Vector:
        """Return a compact vector, or its words, in memory of at least `n_elements` numbers."""
        if words:
            return memory.view(WORD)[: word_count(self.n_elements, self.n_parameters)]
        return memory[: self.n_elements]

    def sent_bounds(self, index: int, dtype: np.dtype[Element]) -> tuple[int, int]:
        """Return the start and stop of a block in a compact vector of this type, or its words."""
        return self.sent_range(*self.bounds[index], dtype)

    def sent_range(self, start: int, stop: int, dtype: np.dtype[Element]) -> tuple[int, int]:
        """Return where elements [start, stop) are in a compact vector, or in its words."""
        if dtype != WORD:
            return start, stop
        n = self.n_parameters
        first, last = (end if end < n else word_count(end, n) for end in (start, stop))
        return first, last

    def n_parameters_within(self, start: int, stop: int) -> int:
        """Return how many of these elements of the compact vector are no buffers."""
        return min(max(self.n_parameters - start, 0), stop - start)

    def check_block(self, index: int, values: Vector, *, words: bool, sender: str) -> None:
        """Raise RemoteProtocolError unless these values, or words, are a block."""
        if index >= len(self.bounds):
            raise RemoteProtocolError(
                f"{sender} sent block {index} of a vector of {len(self.bounds)}: use one layout"
            )
        if words and self.dtype != np.float32:
            raise RemoteProtocolError(f"{sender} sent bfloat16 for a vector of {self.dtype}")
        dtype = WORD if words else self.dtype
        start, stop = self.sent_bounds(index, dtype)
        if values.dtype != dtype or values.size != stop - start:
            raise RemoteProtocolError(
                f"{sender} sent {values.size} elements of {values.dtype} as block {index}, which "
                f"has {stop - start} of {dtype}: use one layout"
            )

    def block(self, values: Vector, index: int) -> Vector:
        """Return block `index` of the compact vector of a shard's `values`, or of their words.

        It is a view if possible.
        """
        start, stop = self.sent_bounds(index, values.dtype)
        if self.ranges is None:
            return values[start:stop]
        if index not in self._copiers:
            ranges, n = self.ranges.part(*self.bounds[index]), self._n_gradient
            buffers = ranges.clipped(n, self._size).shifted(-n)
            self._copiers[index] = RangeCopier(ranges.clipped(0, n)), RangeCopier(buffers)
        block = np.zeros(stop - start, values.dtype)
        for copier, source, target in zip(
            self._copiers[index],
            parts(values, self._n_gradient),
            parts(block, self.n_parameters_within(*self.bounds[index])),
            strict=True,
        ):
            copier.gather(as_tensor(source), as_tensor(target))
        return block

    def scatter(self, compact: Vector, values: Vector) -> None:
        if self.ranges is None:
            values[:] = compact
            return
        self._copier = self._copier or RangeCopier(self.ranges)
        self._copier.scatter(as_tensor(compact), as_tensor(values))


NOTHING: Final = ShardSlice(0, dtype=np.dtype(np.float32))
"""The part of a client without an open session."""


@final
class SliceTable:
    """The slices of all clients of one shard; clients with equal parts share one object."""

    def __init__(
        self, size: int, *, dtype: np.dtype[Element], n_gradient: int | None = None
    ) -> None:
        self._n_gradient = n_gradient
        # The slice that is everything.
        self.whole = ShardSlice(size, dtype=dtype, n_gradient=n_gradient)
        self._known: dict[bytes, ShardSlice] = {}

    def get(self, stripes: Vector | None) -> ShardSlice:
        """Return the slice with these stripes, None for everything; RemoteProtocolError if none."""
        if stripes is None:
            return self.whole
        words = stripes.tobytes()
        known = self._known.get(words)
        if known is None:
            size, dtype = self.whole.n_elements, self.whole.dtype
            ranges = IndexRanges.from_wire(stripes, size=size)
            known = ShardSlice(size, dtype=dtype, ranges=ranges, n_gradient=self._n_gradient)
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()  # sessions keep their own references
            self._known[words] = known
        return known


def payload_of(values: Vector) -> pf.Payload:
    return "bfloat16" if values.dtype == WORD else msgspec.UNSET
