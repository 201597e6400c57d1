"""Batches of which each shares its end with the next one's beginning.

batch        [ rest ................. | tail ]
next batch                            [ head | body ......... | tail ]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from distbelief.commands import Command, LinearCombination, Term, VectorName
from sandblaster.requests import Examples


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """Examples [start, start + size), the last n_tail of which come again."""

    start: int
    size: int
    n_tail: int

    @property
    def rest(self) -> Examples:
        """All but the tail."""
        return Examples(self.start, self.tail.start)

    @property
    def tail(self) -> Examples:
        """What the next batch begins with."""
        return Examples(self.start + self.size - self.n_tail, self.start + self.size)

    @property
    def body(self) -> Examples:
        """All but head and tail."""
        return Examples(self.start + self.n_tail, self.tail.start)

    def next(self) -> "Batch":
        """Return the batch whose head is this one's tail."""
        return Batch(self.tail.start, self.size, self.n_tail)


def mean_gradient(target: VectorName, parts: Sequence[tuple[Examples, VectorName]]) -> Command:
    """Return what makes the mean gradient of all parts from that of each."""
    n = sum(_n(examples) for examples, _ in parts)
    terms = tuple(Term(_n(examples) / n, name) for examples, name in parts)
    return LinearCombination(target=target, terms=terms)


def mean_loss(parts: Sequence[tuple[Examples, float]]) -> float:
    """Return the mean loss of all parts from that of each."""
    n = sum(_n(examples) for examples, _ in parts)
    return sum(_n(examples) / n * loss for examples, loss in parts)


def _n(examples: Examples) -> int:
    return examples.stop - examples.start
