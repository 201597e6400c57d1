"""Builds the placement problem: from a layer graph and a cluster to numbers for the solvers.

A node is a group of layers. The cost of a candidate:

    computing   forward and backward, of the machine that has most of it
    combining   partial sums sent and added up
    inside      messages between layers of the group: statistics
    sync        replicated parameters broadcast, their gradients reduced

The cost of an edge: transfers between two nodes, forward and back. A value that two nodes read
counts for both, even if one machine gets it once for both: costs, and the bound, are slightly too
high.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from distbelief.graph.graph import LayerGraph
from distbelief.partition.candidates import Candidate, candidates, check_pins, pinned
from distbelief.partition.cost_model import AnalyticCosts, single_sample
from distbelief.partition.cost_tables import Floats, Tables
from distbelief.partition.grouping import Group, groups
from distbelief.partition.solvers.problem import Problem
from distbelief.program.cluster import UNLIMITED, Cluster
from distbelief.program.placement import Placement
from distbelief.program.step_cost import Costs


@final
@dataclass(frozen=True, slots=True)
class Node:
    """A group that is placed together, and its candidates."""

    group: Group
    candidates: tuple[Candidate, ...]


@final
@dataclass(frozen=True)
class Decoder:
    """Converts choices of the problem to placements."""

    nodes: tuple[Node, ...]  # in the order of the problem's

    def __call__(self, choice: Sequence[int]) -> dict[str, Placement]:
        """Return the placement of every layer except inputs."""
        placed: dict[str, Placement] = {}
        for node, index in zip(self.nodes, choice, strict=True):
            placed |= node.group.placements(node.candidates[index].placement)
        return placed

    def choice(self, placements: Mapping[str, Placement]) -> tuple[int, ...] | None:
        """Return the choice that means this plan; None if there is none."""
        chosen: list[int] = []
        for node in self.nodes:
            placement = placements[node.group.root.name]
            options = [candidate.placement for candidate in node.candidates]
            if placement not in options:
                return None
            chosen.append(options.index(placement))
        # Followers may be placed differently in that plan: compare all layers.
        return tuple(chosen) if self(chosen) == placements else None


def build(
    graph: LayerGraph,
    cluster: Cluster,
    *,
    batch: int,
    costs: Costs | None = None,
    pins: Mapping[str, str] | None = None,
    machines: Sequence[int] | None = None,
    also: Sequence[Mapping[str, Placement]] = (),
) -> tuple[Problem, Decoder]:
    """Return the problem, and the decoder of its choices.

    Pins are per layer; `machines` is the order of use, and plans in `also` become candidates.

    Raises:
        GraphError: a pin is impossible.
    """
    pins = pins or {}
    check_pins(graph, pins)
    costs = costs or AnalyticCosts(cluster, batch=batch, single=single_sample(graph))
    found = groups(graph, pinned=pins)
    nodes = []
    for group in found:
        root = group.root
        if root.name in pins:
            options = [pinned(root, cluster, pins[root.name], machines=machines)]
        else:
            options = candidates(root, cluster, machines=machines)
            options += _missing(options, [plan[root.name] for plan in also])
        nodes.append(Node(group, tuple(options)))
    tables = Tables(graph, cluster, batch=batch, costs=costs)
    for node in nodes:
        tables.place(node.group, [option.placement for option in node.candidates])
    # Several values may go from one group to another: their costs add up.
    edges: dict[tuple[int, int], Floats] = {}
    for pair, table in tables.transfers(found):
        edges[pair] = edges[pair] + table if pair in edges else table
    caps = np.array([machine.memory for machine in cluster.machines])
    limited = bool((caps < UNLIMITED).any())
    # Without limits the problem has no memory: solvers then need no caps.
    return (
        Problem(
            costs=tuple(tables.costs(group) for group in found),
            edges=edges,
            memory=tuple(map(tables.memory, found)) if limited else None,
            caps=caps if limited else None,
        ),
        Decoder(tuple(nodes)),
    )


def _missing(options: Sequence[Candidate], placements: Sequence[Placement]) -> list[Candidate]:
    known = {candidate.placement for candidate in options}
    wanted = dict.fromkeys(p for p in placements if p not in known)
    return [Candidate(placement, str(placement)) for placement in wanted]
