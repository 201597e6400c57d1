"""A plan compiled: every task, every message, and one program per machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import final

from distbelief.graph.kinds.normalisation import running_averages
from distbelief.graph.layer import INPUT, LayerGraph
from distbelief.graph.region import Region
from distbelief.program.demands import Demands, KnownDemands, check, demands
from distbelief.program.gradients import with_gradient
from distbelief.program.instructions import Message, Program
from distbelief.program.parts import Parts
from distbelief.program.placement import Placement
from distbelief.program.replication import pieces
from distbelief.program.routing import Kept, route
from distbelief.program.tasks import Task
from distbelief.program.traffic import Traffic
from distbelief.program.writing import write


@final
@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a plan comes to.

    Attributes:
        graph: What is computed.
        placements: Where.
        batch: Samples of a step.
        n_machines: Of the cluster; some may have nothing to do.
        order: Machines with something to do, as they first appear in the plan.
        gradients: Layers with a backward pass.
        demands: What machines do and need.
        kept: Per tensor who keeps which piece.
        traffic: All messages, by kind and name; the first are the most urgent.
    """

    graph: LayerGraph
    placements: Mapping[str, Placement]
    batch: int
    n_machines: int
    order: tuple[int, ...]
    gradients: frozenset[str]
    demands: Demands
    kept: Kept
    traffic: tuple[Traffic, ...]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All computations, in an order in which they can be done."""
        return (*self.demands.forward, *self.demands.backward)

    @property
    def n_messages(self) -> int:
        """How many messages a step has."""
        return sum(map(len, self.traffic))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All of them; slow if there are many."""
        return tuple(way.message(i) for way in self.traffic for i in range(len(way)))

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Of every machine; slow if there are many messages."""
        return tuple(map(self.program, range(self.n_machines)))

    def program(self, machine: int) -> Program:
        """Return what one machine does."""
        return write(self.graph, self.demands, self.kept, traffic=self.traffic, machine=machine)


@final
class Known:
    """What is alike in plans of one graph and batch, kept for whoever compiles many.

    Args:
        graph: Of all plans.
        n_plans: So many that have nothing in common can be kept.
    """

    def __init__(self, graph: LayerGraph, *, n_plans: int = 4) -> None:
        n_parts = n_plans * (2 * len(graph.layers) + len(graph.tensors))
        self.checked = Parts[None](n_parts)
        self.demands = KnownDemands(n_parts)
        self.pieces = Parts[list[tuple[int, Region]]](n_parts)
        self.traffic = Parts[Traffic](n_parts)
        self.gradients = with_gradient(graph)


def compile_plan(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    n_machines: int,
    known: Known | None = None,
) -> Compiled:
    """Return who computes and sends what.

    Args:
        graph: What is computed.
        placements: Of every layer except inputs.
        batch: Samples of a step.
        n_machines: They are counted from 0.
        known: Of other plans of this graph and batch.

    Raises:
        GraphError: a layer has no place, cannot be computed there, or is unknown.
    """
    known = known or Known(graph, n_plans=1)
    check(graph, placements, n_machines=n_machines, known=known.checked)
    order = _order(graph, placements)
    gradients = known.gradients
    needs = demands(graph, placements, batch=batch, gradients=gradients, known=known.demands)
    kept = {}
    averages = running_averages(graph)
    for name, by_machine in needs.tensors.items():
        if name in averages:  # who computes a new running statistic keeps it
            layer = graph[averages[name]]
            kept[name] = placements[layer.name].owners(layer)
            continue
        # In the order of the plan, so that machines' numbers do not matter.
        users = {m: by_machine[m] for m in order if m in by_machine}
        n_dims = len(graph.tensors[name].shape)
        kept[name] = known.pieces.get(
            (name, tuple(users.items())), partial(pieces, users, n_dims=n_dims)
        )
    return Compiled(
        graph=graph,
        placements=placements,
        batch=batch,
        n_machines=n_machines,
        order=order,
        gradients=gradients,
        demands=needs,
        kept=kept,
        traffic=route(
            graph, placements, needs, kept, batch=batch, gradients=gradients, known=known.traffic
        ),
    )


def _order(graph: LayerGraph, placements: Mapping[str, Placement]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for layer in graph.layers:
        if layer.kind != INPUT:
            placement = placements[layer.name]
            found |= dict.fromkeys(placement.machines)
            if placement.combine is not None:
                found |= dict.fromkeys(placement.combine.machines)
    return tuple(found)
