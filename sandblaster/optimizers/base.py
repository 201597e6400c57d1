"""Requests of optimizers to the process that runs them, Gram matrices, and the objective.

An optimizer is a generator: it yields requests about vectors that it knows by name only,
receives scalars, and returns a `Result` (reverse communication, as in scipy's L-BFGS-B).

    optimizer                       driver (a coordinator, or a test)
      | VectorOps ---------------->  |   execute these commands on every shard
      | <----------------- scalars   |   what they measured
      | Evaluate ----------------->  |   loss and gradient at that vector
      | <-------------- Evaluation   |   the loss; the gradient is in a vector
      | Rounds ------------------->  |   tasks of a program (`sandblaster.strads`)
      | <----------------- reports   |   of all tasks, in their order
      | IterationDone ------------>  |   a point was accepted; a run may resume here
      | <-------------------- bool   |   whether to stop
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, cast, final

from distbelief.protocol.vector_commands import Axpy, Command, Dot, Pull, Scalars, VectorName
from sandblaster.optimizers.termination import Reason


N_BYTES_MAX: Final = 1_000_000
"""Of the content of a task, of its report, and of all tasks or reports in one message."""

Entries = tuple[tuple[VectorName, VectorName, float], ...]
Combination = dict[VectorName, float]


@final
class GramMatrix:
    """Dot products, `gram[x, y]` = x.y: all that L-BFGS needs (Chen, Wang & Zhou 2014)."""

    def __init__(self, entries: Entries = ()) -> None:
        self._products = {_key(x, y): product for x, y, product in entries}

    def __getitem__(self, pair: tuple[VectorName, VectorName]) -> float:
        return self._products[_key(*pair)]

    def put(
        self, rows: Sequence[VectorName], columns: Sequence[VectorName], products: Scalars
    ) -> None:
        """Enter the scalars that `Gram(rows, columns)` measured."""
        pairs = [(row, column) for row in rows for column in columns]
        for (row, column), product in zip(pairs, products, strict=True):
            self._products[_key(row, column)] = product

    def entries(self) -> Entries:
        return tuple((x, y, product) for (x, y), product in self._products.items())

    def restrict(self, names: Sequence[VectorName]) -> None:
        self._products = {
            (x, y): product
            for (x, y), product in self._products.items()
            if x in names and y in names
        }

    def rename(self, old: VectorName, new: VectorName) -> None:
        """Let `new` be what `old` was; drop the former `new`."""
        self._products = {
            _key(new if x == old else x, new if y == old else y): product
            for (x, y), product in self._products.items()
            if new not in (x, y)
        }

    def dot(self, combination: Mapping[VectorName, float], x: VectorName) -> float:
        return math.fsum(a * self[name, x] for name, a in combination.items())


def _key(x: VectorName, y: VectorName) -> tuple[VectorName, VectorName]:
    return (x, y) if x <= y else (y, x)


# --- requests ---


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOps:
    """Execute these commands; the reply is what they measured, flat."""

    commands: tuple[Command, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Compute the objective, and its gradient, at a point; the reply is an `Evaluation`."""

    point: VectorName  # the vector to evaluate at
    gradient: VectorName  # the vector that receives the gradient
    before: tuple[Command, ...] = ()  # commands to execute first; they may form the point
    after: tuple[Command, ...] = ()  # commands to execute once the gradient is there


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of `Evaluate`: loss and gradient are means over all examples.

    Both may be NaN or infinite: a line search then shortens its step.
    """

    loss: float
    scalars: Scalars  # measured by `before`, then by `after`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Have workers compute the tasks of these rounds; the reply are their reports.

    Each is committed when all its tasks are computed, and those of the rounds before. A task takes
    rows as they are after all rounds but the last `staleness` before its own, or at the beginning.
    """

    rounds: Iterator[tuple[tuple[int, bytes], ...]]  # block and content of each task; one per block
    pulls: Mapping[str, Pull]
    may_move: bool  # whether another worker may have a block than in the last round
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationDone:
    """A point was accepted, and "parameters" holds it; the reply is whether to stop."""

    iteration: int  # points accepted so far
    n_evaluations: int  # evaluations so far
    loss: float  # at the point, regularization included
    gradient_norm: float  # largest absolute element of its gradient
    step_length: float  # of the step to it; 0 at the start
    state: str  # what the optimizer needs to resume here, as text; "": it cannot
    vectors: tuple[VectorName, ...]  # vectors that the shards must keep for that
    n_updates: int = 0  # of single variables


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result(IterationDone):
    """How a run ended, and its best accepted point, which "parameters" holds."""

    reason: Reason


class Runnable(Protocol):
    def steps(self, state: str | None = None) -> "Steps[Result]": ...


Request = VectorOps | Evaluate | Rounds | IterationDone
Reply = Scalars | Evaluation | tuple[bytes, ...] | bool

T = TypeVar("T")
Steps = Generator[Request, Reply, T]


def perform(*commands: Command) -> Steps[Scalars]:
    reply = yield VectorOps(commands=commands)
    assert isinstance(reply, tuple)
    return cast("Scalars", reply)


def stop_requested(done: IterationDone) -> Steps[bool]:
    reply = yield done
    assert isinstance(reply, bool)
    return reply


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """F(w) = loss(w) + l2 / 2 |w|^2."""

    l2: float = 0.0

    def at(
        self,
        point: VectorName,
        *,
        gradient: VectorName,
        before: tuple[Command, ...] = (),
        after: tuple[Command, ...] = (),
    ) -> Steps[tuple[float, Scalars]]:
        """Return F at a vector, and what `after` measures; commands `before` measure none."""
        # The penalty needs no request of its own: its commands go with the evaluation.
        penalty: tuple[Command, ...] = ()
        if self.l2:
            penalty = (Dot(x=point, y=point), Axpy(target=gradient, a=self.l2, x=point))
        evaluation = yield Evaluate(
            point=point, gradient=gradient, before=before, after=penalty + after
        )
        assert isinstance(evaluation, Evaluation)
        if not self.l2:
            return evaluation.loss, evaluation.scalars
        square, *measured = evaluation.scalars
        return evaluation.loss + 0.5 * self.l2 * square, tuple(measured)
