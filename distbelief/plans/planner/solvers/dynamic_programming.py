"""Exact solver: eliminates one node after another (Bertele and Brioschi, 1972).

Once all costs that depend on a node are summed, a table over its neighbours replaces it: the least
that it costs for each of their choices. On a chain this is dynamic programming.

    a --- b --- c       without a:  t(b) = min over a of  cost_a + cost_ab

The order determines the size of the largest table. It is small for networks whose branches join
again soon: residual networks have treewidth 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import networkx as nx
import numpy as np
from networkx.algorithms.approximation import treewidth_min_degree

from distbelief.plans.planner.solvers.problem import Array, Problem, Solution, first_lowest


ENTRIES_MAX: Final = 20_000_000  # of the largest table
WORK_MAX: Final = 2_000_000_000  # entries of all tables: some seconds

_BLOCK: Final = 1 << 17  # entries computed together, so that they stay in cache


@final
@dataclass(frozen=True, slots=True)
class Order:
    nodes: tuple[int, ...]  # every node once
    entries: int  # of the largest table
    work: int  # entries of all tables

    @property
    def fits(self) -> bool:
        return self.entries <= ENTRIES_MAX and self.work <= WORK_MAX


@final
@dataclass(frozen=True, slots=True)
class _Table:
    nodes: tuple[int, ...]  # ascending, one per dimension
    costs: Array


def elimination_order(problem: Problem) -> Order:
    """Return the order in which the leaves of a tree decomposition are removed."""
    graph = nx.empty_graph(len(problem.sizes))
    # A node with one candidate adds no dimension: its edges are costs of the other node.
    graph.add_edges_from(pair for pair in sorted(problem.edges) if _open(problem, pair))
    _, tree = treewidth_min_degree(graph)
    root = next(iter(tree))
    parents = dict(nx.dfs_predecessors(tree, root))
    nodes: list[int] = []
    for bag in nx.dfs_postorder_nodes(tree, root):
        nodes.extend(sorted(bag - parents.get(bag, frozenset[int]())))
    neighbours = {node: set(graph[node]) for node in graph}
    entries = _table_sizes(neighbours, nodes, problem.sizes)
    return Order(tuple(nodes), max(entries), sum(entries))


def eliminate(problem: Problem, order: Order | None = None) -> Solution:
    """Return the cheapest choice without caps; it may not fit them.

    Its cost is then a bound on choices that fit. Ties are deterministic: at each node the first
    index that ties.
    """
    order = order or elimination_order(problem)
    place = {node: index for index, node in enumerate(order.nodes)}
    buckets: list[list[_Table]] = [[] for _ in order.nodes]
    for table in _tables(problem):
        buckets[min(place[node] for node in table.nodes)].append(table)
    for node, bucket in zip(order.nodes, buckets, strict=True):
        rest = _without(node, bucket)
        if rest.nodes:
            buckets[min(place[other] for other in rest.nodes)].append(rest)
    chosen: dict[int, int] = {}
    for node, bucket in zip(reversed(order.nodes), reversed(buckets), strict=True):
        costs = [_given(table, node, chosen) for table in bucket]
        chosen[node] = first_lowest(np.asarray(np.sum(costs, axis=0)))
    choice = tuple(chosen[node] for node in range(len(order.nodes)))
    fits = problem.fits(choice)
    return problem.solution(choice, bound=problem.cost(choice), solver="elimination", proven=fits)


def _tables(problem: Problem) -> list[_Table]:
    own = [np.array(values) for values in problem.costs]
    tables = []
    for (u, v), edge in problem.edges.items():
        if _open(problem, (u, v)):
            tables.append(_Table((u, v), edge))
        elif problem.sizes[v] == 1:
            own[u] += edge[:, 0]
        else:
            own[v] += edge[0]
    return [_Table((node,), values) for node, values in enumerate(own)] + tables


def _without(node: int, bucket: list[_Table]) -> _Table:
    # Sums the tables, and takes the minimum over the node's candidates.
    others = tuple(sorted({v for table in bucket for v in table.nodes} - {node}))
    scope = (node, *others)
    # Small tables first: only the last sums are as large as the result.
    aligned = sorted((_aligned(table, scope) for table in bucket), key=np.size)
    shape = np.broadcast_shapes(*(costs.shape for costs in aligned))
    least = np.full(shape[1:], math.inf)
    block = max(1, _BLOCK // max(1, least.size))
    for start in range(0, shape[0], block):
        total = aligned[0][start : start + block]
        for costs in aligned[1:]:
            total = total + costs[start : start + block]
        np.minimum(least, total.min(axis=0), out=least)
    return _Table(others, least)


def _aligned(table: _Table, scope: tuple[int, ...]) -> Array:
    # One dimension per node of the scope, in its order.
    present = [node for node in scope if node in table.nodes]
    costs = table.costs.transpose([table.nodes.index(node) for node in present])
    extents = iter(costs.shape)
    return costs.reshape([next(extents) if v in table.nodes else 1 for v in scope])


def _given(table: _Table, node: int, chosen: dict[int, int]) -> Array:
    # The table's costs of the node's candidates, all other nodes being chosen.
    key = tuple(slice(None) if v == node else chosen[v] for v in table.nodes)
    return np.asarray(table.costs[key])


def _open(problem: Problem, pair: tuple[int, int]) -> bool:
    return all(problem.sizes[node] > 1 for node in pair)


def _table_sizes(
    neighbours: dict[int, set[int]], order: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    # Entries of each elimination's table: it joins the neighbours of the node.
    entries = []
    for node in order:
        joined = neighbours.pop(node)
        entries.append(sizes[node] * math.prod(sizes[other] for other in joined))
        for other in joined:
            neighbours[other] |= joined
            neighbours[other] -= {node, other}
    return entries
