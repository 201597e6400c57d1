"""How a push counts: its share, and the sum of a round of pushes.

    pushes, by name     p0   p1   p2          each stays in its client's buffer
    total               w0 p0 + w1 p1 + w2 p2
    applied once        total / (w0 + w1 + w2), or the total where weight = "sum"

Pushes are added one by one in the order of their clients' names, whoever came first: so two copies
of a shard, and any number of shards, have equal bits. Of elements that only some clients push,
their weights alone count. Buffers are averaged always.
"""

from collections.abc import Callable
from typing import Final, final

import numpy as np

from distbelief.core.vectors import Element, Vector
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.slices import (
    IndexRanges,
    RangeCopier,
    ShardSlice,
    as_tensor,
    convert,
)


_PIECE: Final = 1 << 18  # elements added while they are in the cache


@final
class RoundSum:
    """The weighted sum of the pushes of one round, in the shard's own order of elements."""

    def __init__(
        self, n_elements: int, *, n_gradient: int, dtype: np.dtype[Element], policy: ExchangePolicy
    ) -> None:
        self._n_gradient = n_gradient
        self._divides = policy.weight != "sum"
        self._parts: list[IndexRanges] | None = []  # None: a push was of everything
        self._n_elements = n_elements
        self._weight = 0.0  # of pushes of everything
        self._weights: Vector | None = None  # (n_elements,) of the others
        self._is_empty = True
        self.total: Vector = np.zeros(n_elements, dtype)

    @property
    def touched(self) -> IndexRanges | None:
        """What the round changes; None: everything."""
        return None if self._parts is None else IndexRanges.union(self._parts)

    def add_work(
        self, pushed: Vector, *, shard_slice: ShardSlice, touched: ShardSlice, weight: float
    ) -> Callable[[], None]:
        """Return the work that adds one push, or its words: of `touched`, out of the client's."""
        if self._parts is not None and touched.ranges is not None:
            self._parts.append(touched.ranges)
        else:
            self._parts = None

        def work() -> None:
            numbers = pushed
            if pushed.dtype != self.total.dtype:
                numbers = np.empty(shard_slice.n_elements, self.total.dtype)
                convert(pushed, numbers, n_parameters=shard_slice.n_parameters)
            if touched.ranges is None:
                self._add(numbers, weight)
                self._weight += weight
                return
            compact = numbers
            if shard_slice.ranges is None:  # of a client that holds everything
                compact = np.empty(touched.n_elements, numbers.dtype)
                RangeCopier(touched.ranges).gather(as_tensor(numbers), as_tensor(compact))
            spread = np.zeros(self._n_elements, numbers.dtype)
            touched.scatter(compact, spread)
            self._add(spread, weight)
            if self._weights is None:
                self._weights = np.zeros_like(spread)
            touched.scatter(np.ones_like(compact), spread)
            np.add(self._weights, spread * spread.dtype.type(weight), out=self._weights)

        return work

    def _add(self, values: Vector, weight: float) -> None:
        is_first, self._is_empty = self._is_empty, False
        factor = values.dtype.type(weight)
        # Multiply, then add, each rounded by itself: no kernel fuses them for some elements only.
        for start in range(0, len(values), _PIECE):
            piece = slice(start, start + _PIECE)
            part = values[piece] if weight == 1.0 else values[piece] * factor
            self.total[piece] = part if is_first else self.total[piece] + part

    def finish(self) -> None:
        """Divide the sum by the weights. Runs as work, after the last push is added."""
        part = self.total[0 if self._divides else self._n_gradient :]
        weights = np.full_like(part, self._weight)
        if self._weights is not None:
            np.add(weights, self._weights[len(self.total) - len(part) :], out=weights)
        np.divide(part, weights, out=part, where=np.greater(weights, 0))
