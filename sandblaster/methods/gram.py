"""The dot products of a few named vectors: all that a coordinator knows of them.

L-BFGS needs nothing else of its history (Chen, Wang & Zhou 2014: "the Gram matrix of
the 2m+1 vectors"). A linear combination of the vectors is a mapping from names to
coefficients, and its dot product with one of them is a sum over the matrix.
"""

import math
from collections.abc import Mapping, Sequence
from typing import final

from distbelief.commands import Scalars, VectorName


Entries = tuple[tuple[VectorName, VectorName, float], ...]
Combination = dict[VectorName, float]


@final
class GramMatrix:
    """Symmetric; `gram[x, y]` is x.y."""

    def __init__(self, entries: Entries = ()) -> None:
        self._products = {_key(x, y): product for x, y, product in entries}

    def __getitem__(self, pair: tuple[VectorName, VectorName]) -> float:
        return self._products[_key(*pair)]

    def put(
        self, rows: Sequence[VectorName], columns: Sequence[VectorName], products: Scalars
    ) -> None:
        """Enter what `Gram(rows, columns)` measured."""
        pairs = [(row, column) for row in rows for column in columns]
        for (row, column), product in zip(pairs, products, strict=True):
            self._products[_key(row, column)] = product

    def entries(self) -> Entries:
        """Return all of it as plain data."""
        return tuple((x, y, product) for (x, y), product in self._products.items())

    def restrict(self, names: Sequence[VectorName]) -> None:
        """Forget every vector but these."""
        self._products = {
            (x, y): product
            for (x, y), product in self._products.items()
            if x in names and y in names
        }

    def rename(self, old: VectorName, new: VectorName) -> None:
        """Let `new` be what `old` was; forget what `new` was."""
        self._products = {
            _key(new if x == old else x, new if y == old else y): product
            for (x, y), product in self._products.items()
            if new not in (x, y)
        }

    def dot(self, combination: Mapping[VectorName, float], x: VectorName) -> float:
        """Return the dot product of a linear combination with x."""
        return math.fsum(a * self[name, x] for name, a in combination.items())


def _key(x: VectorName, y: VectorName) -> tuple[VectorName, VectorName]:
    return (x, y) if x <= y else (y, x)
