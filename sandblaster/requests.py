"""What an algorithm asks of whoever runs it, and what it is answered.

An algorithm is a generator. It yields requests about vectors that it only knows by
name, receives scalars, and returns a `Result`. Who runs it may be one process (`local`)
or a coordinator with a hundred shards; in the words of scipy's L-BFGS-B this is reverse
communication.

    algorithm                    driver
      | Operations ------------->  |   perform these commands on every shard
      | <--------------- scalars   |   what they measured
      |                            |
      | Evaluate --------------->  |   loss and gradient at that vector
      | <------------ Evaluation   |   the loss; the gradient lies in a vector
      |                            |
      | Iterated --------------->  |   a point was accepted: a run may resume from here
      | <------------------ bool   |   whether to stop
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar, final

from distbelief.commands import Command, Scalars, VectorName
from sandblaster.reasons import Reason


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
class Operations:
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
class Iterated:
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
    state: str  # as in `Iterated`


Request = Operations | Evaluate | Iterated
Reply = Scalars | Evaluation | bool

T = TypeVar("T")
Steps = Generator[Request, Reply, T]


def perform(*commands: Command) -> Steps[Scalars]:
    """Return what the commands measured."""
    reply = yield Operations(commands=commands)
    assert isinstance(reply, tuple)
    return reply


def evaluate(request: Evaluate) -> Steps[Evaluation]:
    """Return what the evaluation found."""
    reply = yield request
    assert isinstance(reply, Evaluation)
    return reply


def told_to_stop(cut: Iterated) -> Steps[bool]:
    """Tell of a cut; return whether to stop there."""
    reply = yield cut
    assert isinstance(reply, bool)
    return reply
