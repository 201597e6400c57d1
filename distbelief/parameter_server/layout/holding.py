"""What one client holds of one shard's vector: all of it, or ranges of it.

    shard's vector   0 1 2 3 4 5 6 7 8 9 ...      pushed, and fetched by blocks:
    a client holds       ^^^     ^^^^^            the compact vector 2 3 6 7 8

A machine of a model-parallel replica holds its partition only (Dean et al. 2012,
section 4: it "needs to communicate with just the subset of parameter server shards that
hold the model parameters relevant to its partition"). Whoever runs a whole model holds
everything, and its compact vector is the shard's.
"""

from typing import Final, final

import numpy as np

from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.layout.ranges import Copier, Ranges
from distbelief.parameter_server.layout.tensors import as_tensor
from distbelief.vectors import Element, Vector, block_bounds


_N_KNOWN_MAX = 1024


@final
class Holding:
    """One client's part of one shard's vector.

    Attributes:
        n_elements: Of the compact vector.
        dtype: Of the shard's vector.
        ranges: Of the shard's vector; None if it is all of it.
        stripes: The same, as on the wire.
        bounds: Of each block of the compact vector: (start, stop).
        key: Equal for those that hold the same; empty if that is everything.
    """

    def __init__(
        self,
        n_elements: int,
        *,
        dtype: np.dtype[Element],
        ranges: Ranges | None = None,
        stripes: Vector | None = None,
    ) -> None:
        self.n_elements = n_elements
        self.dtype = dtype
        self.ranges = ranges
        self.stripes = stripes
        self.bounds = tuple(block_bounds(n_elements, itemsize=dtype.itemsize))
        self.key = b"" if ranges is None else ranges.key
        self._copiers: dict[int, Copier] = {}  # by block
        self._copier: Copier | None = None  # of all blocks at once

    @classmethod
    def whole(cls, layout: Layout, k: int) -> "Holding":
        """Return what a client with a whole model holds of shard k."""
        return cls(layout.shard_size(k), dtype=layout.dtype)

    @classmethod
    def of(cls, ranges: Ranges, layout: Layout) -> "Holding":
        """Return these ranges of a shard's vector."""
        return cls(ranges.n_elements, dtype=layout.dtype, ranges=ranges, stripes=ranges.stripes())

    def within(self, start: int, stop: int) -> Ranges:
        """Return what of it lies in [start, stop) of the shard's vector."""
        if self.ranges is None:
            return Ranges.whole(start, stop)
        return self.ranges.clipped(start, stop)

    def places(self, inner: Ranges) -> Ranges:
        """Return where some of it lies in the compact vector."""
        return inner if self.ranges is None else self.ranges.places(inner)

    def block(self, values: Vector, index: int) -> Vector:
        """Return block `index` of the compact vector of a shard's `values`.

        It shares their memory if it can.
        """
        start, stop = self.bounds[index]
        if self.ranges is None:
            return values[start:stop]
        if index not in self._copiers:
            self._copiers[index] = Copier(self.ranges.part(start, stop))
        block = np.empty(stop - start, self.dtype)
        self._copiers[index].gather(as_tensor(values), as_tensor(block))
        return block

    def lay(self, compact: Vector, values: Vector) -> None:
        """Copy a compact vector to where it lies in a shard's `values`."""
        if self.ranges is None:
            values[:] = compact
            return
        if self._copier is None:
            self._copier = Copier(self.ranges)
        self._copier.scatter(as_tensor(compact), as_tensor(values))


NOTHING: Final = Holding(0, dtype=np.dtype(np.float32))
"""Of a client that has not said Hello to this life of the shard."""


@final
class Holdings:
    """What the clients of one shard hold; those who hold the same share one.

    Attributes:
        whole: What those hold who hold everything.
    """

    def __init__(self, layout: Layout, k: int) -> None:
        self._layout = layout
        self._size = layout.shard_size(k)
        self.whole = Holding.whole(layout, k)
        self._known: dict[bytes, Holding] = {}

    def get(self, stripes: Vector | None) -> Holding:
        """Return what a client holds that said so.

        Raises:
            RemoteProtocolError: it cannot be.
        """
        if stripes is None:
            return self.whole
        words = stripes.tobytes()
        known = self._known.get(words)
        if known is None:
            ranges = Ranges.read(stripes, size=self._size)
            known = Holding(
                ranges.n_elements, dtype=self._layout.dtype, ranges=ranges, stripes=stripes.copy()
            )
            if len(self._known) >= _N_KNOWN_MAX:
                self._known.clear()  # whoever uses one keeps it
            self._known[words] = known
        return known
