"""What is to be planned, and what plays plans of it through."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

from distbelief.graph.layer import LayerGraph
from distbelief.partition.playing import Player
from distbelief.program.cluster import Cluster
from distbelief.program.pricing import Costs


SOLVER_SECONDS: Final = 10.0

Told = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be planned.

    Attributes:
        graph: With its loss, if it is to be trained.
        cluster: Machines, fastest first.
        batch: Samples of a step.
        costs: Of computing, on those machines.
        pins: Per layer how it must be split: "rows:4".
        costs_for: Costs with so many samples, for micro-batches; None to try none.
        exactly: Use as many machines as are allowed, even if fewer were faster.
        search: Whether to search on simulated time, beyond the solver's choice.
        solver_seconds: How long the solver may take for each number of machines.
    """

    graph: LayerGraph
    cluster: Cluster
    batch: int
    costs: Costs
    pins: Mapping[str, str]
    costs_for: Callable[[int], Costs] | None = None
    exactly: bool = False
    search: bool = True
    solver_seconds: float = SOLVER_SECONDS


def player_of(order: Order) -> Player:
    """Return what plays plans of this order through."""
    return Player(
        order.graph, order.cluster, batch=order.batch, costs=order.costs, costs_for=order.costs_for
    )
