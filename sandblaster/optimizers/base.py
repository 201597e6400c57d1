"""The function that is minimised: the loss over some data, and what is added to it.

What is added needs no request of its own: its commands ride on the evaluation.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from distbelief.protocol.vector_commands import Axpy, Command, Dot, Scalars, VectorName
from sandblaster.optimizers.termination import Reason


# The dot products of a few named vectors: all that a coordinator knows of them.
#
# L-BFGS needs nothing else of its history (Chen, Wang & Zhou 2014: "the Gram matrix of
# the 2m+1 vectors"). A linear combination of the vectors is a mapping from names to
# coefficients, and its dot product with one of them is a sum over the matrix.

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


# What an algorithm asks of whoever runs it, and what it is answered.
#
# An algorithm is a generator. It yields requests about vectors that it only knows by
# name, receives scalars, and returns a `Result`. Who runs it may be one process (`local`)
# or a coordinator with a hundred shards; in the words of scipy's L-BFGS-B this is reverse
# communication.
#
#     algorithm                    driver
#       | Operations ------------->  |   perform these commands on every shard
#       | <--------------- scalars   |   what they measured
#       |                            |
#       | Evaluate --------------->  |   loss and gradient at that vector
#       | <------------ Evaluation   |   the loss; the gradient lies in a vector
#       |                            |
#       | Iterated --------------->  |   a point was accepted: a run may resume from here
#       | <------------------ bool   |   whether to stop


@final
@dataclass(frozen=True, slots=True)
class Examples:
    """Positions [start, stop) in one endless, fixed order that goes round the data.

    With n examples, position p is the one at p mod n of that order.
    """

    start: int
    stop: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOps:
    """Perform these commands; answered by what they measured, flat."""

    commands: tuple[Command, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Compute the objective, and its gradient, at a point; answered by `Evaluation`.

    Attributes:
        point: The vector to evaluate at.
        gradient: The vector to leave the gradient in.
        before: Commands to perform first; they may make the point.
        after: Commands to perform once the gradient is there.
        examples: Which of the data; None: all.
    """

    point: VectorName
    gradient: VectorName
    before: tuple[Command, ...] = ()
    after: tuple[Command, ...] = ()
    examples: Examples | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `Evaluate` found; loss and gradient are means over the examples.

    Both may be NaN or infinite: a line search then shortens its step.
    """

    loss: float
    n_examples: int
    scalars: Scalars  # measured by `before`, then by `after`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IterationDone:
    """A point was accepted, and "parameters" holds it; answered by whether to stop.

    Attributes:
        iteration: Points accepted so far.
        n_evaluations: Evaluations so far.
        loss: At the point, regularisation included.
        gradient_norm: Largest element of its gradient, by size.
        step_length: That led to it; 0 at the start.
        state: What the algorithm needs to go on from here, as JSON.
        vectors: What it needs the shards to keep for that.
    """

    iteration: int
    n_evaluations: int
    loss: float
    gradient_norm: float
    step_length: float
    state: str
    vectors: tuple[VectorName, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended; "parameters" holds the best point that it accepted."""

    reason: Reason
    iteration: int
    n_evaluations: int
    loss: float
    gradient_norm: float
    state: str  # as in `IterationDone`


Request = VectorOps | Evaluate | IterationDone
Reply = Scalars | Evaluation | bool

T = TypeVar("T")
Steps = Generator[Request, Reply, T]


def perform(*commands: Command) -> Steps[Scalars]:
    """Return what the commands measured."""
    reply = yield VectorOps(commands=commands)
    assert isinstance(reply, tuple)
    return reply


def evaluate(request: Evaluate) -> Steps[Evaluation]:
    """Return what the evaluation found."""
    reply = yield request
    assert isinstance(reply, Evaluation)
    return reply


def stop_requested(cut: IterationDone) -> Steps[bool]:
    """Tell of a cut; return whether to stop there."""
    reply = yield cut
    assert isinstance(reply, bool)
    return reply


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """F(w) = loss(w) + l2 / 2 |w|^2."""

    l2: float = 0.0
    examples: Examples | None = None

    def at(
        self,
        point: VectorName,
        *,
        gradient: VectorName,
        before: tuple[Command, ...] = (),
        after: tuple[Command, ...] = (),
    ) -> Steps[tuple[float, Scalars]]:
        """Return F there, and what `after` measures; the gradient lies in `gradient`.

        Args:
            point: A vector.
            gradient: A vector.
            before: Commands to make the point with; they measure nothing.
            after: Commands to perform once the gradient is whole.
        """
        penalty: tuple[Command, ...] = ()
        if self.l2:
            penalty = (Dot(x=point, y=point), Axpy(target=gradient, a=self.l2, x=point))
        evaluation = yield from evaluate(
            Evaluate(
                point=point,
                gradient=gradient,
                before=before,
                after=penalty + after,
                examples=self.examples,
            )
        )
        if not self.l2:
            return evaluation.loss, evaluation.scalars
        square, *measured = evaluation.scalars
        return evaluation.loss + 0.5 * self.l2 * square, tuple(measured)
