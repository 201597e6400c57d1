"""BLAS-1 commands on named vectors (Dean et al. 2012, section 4.2).

The coordinator names vectors and never holds one. Every shard runs the same batch of
commands on its own elements. `Dot`, `Gram` and `Norm` measure: each shard answers partial
results, one flat tuple for the batch, and `combine` adds those of all shards in shard
order, so that the bits do not depend on the order of arrival. A command cannot use what
another command of its batch measures, because no single shard has the complete result.

    command              target becomes                          measures
    Copy                 x
    Fill                 a everywhere
    Axpy                 target + a x
    LinearCombination    sum of a x over its terms
    Pointwise            function(x, y, a), element by element
    Dot                                                          x.y
    Gram                                                         r.c, row by row, of all
                                                                 elements or of some
    Norm                                                         |x|_1, |x|_2, |x|_inf

`Copy`, `Fill`, `LinearCombination` and `Pointwise` create a missing target. All other
commands need every vector that they name.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, assert_never

import msgspec

from distbelief.core.errors import RemoteProtocolError


VectorName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.\-]{1,64}\Z")]
Names = Annotated[tuple[VectorName, ...], msgspec.Meta(min_length=1, max_length=256)]
Scalars = Annotated[tuple[float, ...], msgspec.Meta(max_length=16384)]
Order = Literal["1", "2", "inf"]

Function = Literal[
    "align",  # x where x y > 0, else 0
    "oppose",  # x where x y < 0, else 0
    "orthant",  # sign of x; where that is 0, sign of -y
    "pseudo_gradient",  # of f + a |w|_1 at w = x, where y is the gradient of f
    "max",  # the larger of x and y
    "min",  # the smaller one
    "share",  # x / y where x y > 0, else 0
    "only",  # 1 where x = 0 and y != 0, else 0
    "unless",  # x where y = 0, else 0
]
"""The functions of `Pointwise`; each maps x = y = 0 to 0, so that padding stays 0."""


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all commands: immutable, tagged by class name on the wire."""


class Copy(_Command, frozen=True):
    """Target <- x."""

    target: VectorName
    x: VectorName


class Fill(_Command, frozen=True):
    """Target <- a in every element of a tensor (padding stays 0)."""

    target: VectorName
    a: float


class Axpy(_Command, frozen=True):
    """Target <- target + a x."""

    target: VectorName
    a: float
    x: VectorName


class Term(msgspec.Struct, frozen=True):
    """One summand a x."""

    a: float
    x: VectorName


Terms = Annotated[tuple[Term, ...], msgspec.Meta(min_length=1, max_length=256)]


class LinearCombination(_Command, frozen=True):
    """Target <- sum of its terms, rounded once; the target may be among them."""

    target: VectorName
    terms: Terms


class Pointwise(_Command, frozen=True):
    """Target <- function(x, y, a), element by element; the target may be x or y."""

    target: VectorName
    function: Function
    x: VectorName
    y: VectorName
    a: float = 0.0


class Dot(_Command, frozen=True):
    """Measure x.y."""

    x: VectorName
    y: VectorName


class Gram(_Command, frozen=True):
    """Measure the dot product of every row with every column, row by row."""

    rows: Names
    columns: Names
    without: VectorName | None = None  # not 0 where elements do not count


class Norm(_Command, frozen=True):
    """Measure a norm of x."""

    x: VectorName
    order: Order


class Pull(msgspec.Struct, frozen=True):
    """How new rows of a table follow from old ones and from the sums of what was added."""

    # "add": rows + sums; "divide": of sums (s, t) the row (s / (t + a), t + a)
    function: Literal["add", "divide"] = "add"
    a: float = 0.0


Command = Copy | Fill | Axpy | LinearCombination | Pointwise | Dot | Gram | Norm
Batch = Annotated[tuple[Command, ...], msgspec.Meta(max_length=1024)]

SCALARS_MAX = 16384
"""Numbers in one answer; a batch that would measure more is refused before it runs."""


def reads(command: Command) -> tuple[VectorName, ...]:
    """Return the vectors that must exist before `command` runs."""
    names: tuple[VectorName, ...]
    match command:
        case Copy() | Norm():
            names = (command.x,)
        case Axpy():
            names = (command.target, command.x)
        case LinearCombination():
            names = tuple(term.x for term in command.terms)
        case Pointwise() | Dot():
            names = (command.x, command.y)
        case Gram(rows=rows, columns=columns, without=without):
            names = (*rows, *columns) if without is None else (*rows, *columns, without)
        case Fill():
            names = ()
        case _:
            assert_never(command)
    return names


def writes(command: Command) -> tuple[VectorName, ...]:
    return () if isinstance(command, Dot | Gram | Norm) else (command.target,)


def n_scalars(batch: Sequence[Command]) -> int:
    """Return how many numbers a shard answers this batch with."""
    return sum(map(len, map(_combinations, batch)))


def combine(batch: Sequence[Command], answers: Sequence[Scalars]) -> Scalars:
    """Return what the batch measured over all shards.

    `answers` are in shard order. RemoteProtocolError if an answer does not fit the batch.
    """
    combinations = [one for command in batch for one in _combinations(command)]
    for k, answer in enumerate(answers):
        if len(answer) != len(combinations):
            raise RemoteProtocolError(
                f"shard {k} measured {len(answer)} numbers, not {len(combinations)}"
            )
    return tuple(
        combined(partials)
        for combined, partials in zip(combinations, zip(*answers, strict=True), strict=True)
    )


def _sum(partials: Sequence[float]) -> float:
    return sum(partials, 0.0)


def _root(partials: Sequence[float]) -> float:
    total = _sum(partials)
    return math.sqrt(total) if total >= 0.0 else math.nan


def _largest(partials: Sequence[float]) -> float:
    # `max` alone may lose a NaN.
    return math.nan if any(map(math.isnan, partials)) else max(partials)


_Combined = Callable[[Sequence[float]], float]
_OF_NORMS: dict[Order, _Combined] = {"1": _sum, "2": _root, "inf": _largest}


def _combinations(command: Command) -> Sequence[_Combined]:
    # How each number that the command measures follows from the partial results.
    match command:
        case Dot():
            return [_sum]
        case Gram():
            return [_sum] * (len(command.rows) * len(command.columns))
        case Norm():
            return [_OF_NORMS[command.order]]
        case _:
            return []
