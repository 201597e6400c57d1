"""A plan compiled: every task, every message, and one program per machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

from distbelief.graph.layer import INPUT, LayerGraph
from distbelief.program.demands import Demands, check, demands
from distbelief.program.gradients import with_gradient
from distbelief.program.instructions import Message, Program
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
        return write(
            self.graph, self.demands, self.kept, traffic=self.traffic, machine=machine
        )


def compile_plan(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    n_machines: int,
) -> Compiled:
    """Return who computes and sends what.

    Args:
        graph: What is computed.
        placements: Of every layer except inputs.
        batch: Samples of a step.
        n_machines: They are counted from 0.

    Raises:
        GraphError: a layer has no place, cannot be computed there, or is unknown.
    """
    check(graph, placements, n_machines=n_machines)
    order = _order(graph, placements)
    gradients = with_gradient(graph)
    needs = demands(graph, placements, batch=batch, gradients=gradients)
    kept = {
        name: pieces(
            # In the order of the plan, so that machines' numbers do not matter.
            {machine: users[machine] for machine in order if machine in users},
            n_dims=len(graph.tensors[name].shape),
        )
        for name, users in needs.tensors.items()
    }
    return Compiled(
        graph=graph,
        placements=placements,
        batch=batch,
        n_machines=n_machines,
        order=order,
        gradients=gradients,
        demands=needs,
        kept=kept,
        traffic=route(graph, placements, needs, kept, batch=batch, gradients=gradients),
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
