"""The search for the best placement of a graph on a cluster, within the memory of its machines.

A node of the problem is a group of layers. The cost of a candidate: computing on the machine that
has most of it; combining partial sums; messages inside the group; parameters broadcast, gradients
reduced. The cost of an edge: transfers, forward and back. A value that two nodes read counts for
both, even if one machine gets it once: costs, and the bound, are slightly too high.

The solver's model has no overlap of phases; a real step has. So the search changes one node at a
time, cheapest in the model first, simulates the plan, and keeps it if it is faster. There is no
randomness and no clock: equal problems end in equal plans.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from distbelief.graph.graph import LayerGraph
from distbelief.plans.cluster import UNLIMITED, Cluster, FloatArray
from distbelief.plans.compiler import CompilerCache, compile_plan
from distbelief.plans.placement import Placement
from distbelief.plans.planner.candidates import Candidate, candidates, check_pins, pinned
from distbelief.plans.planner.cost_model import (
    AnalyticCosts,
    ProfiledCosts,
    Variance,
    single_sample,
)
from distbelief.plans.planner.cost_tables import Tables
from distbelief.plans.planner.grouping import Group, groups
from distbelief.plans.planner.solvers.problem import Choice, Problem, Solution
from distbelief.plans.planner.solvers.solve import solve
from distbelief.plans.step_cost import Costs, StepCost, step_cost
from distbelief.task.forward import Sample


SOLVER_SECONDS: Final = 10.0

Notify = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    graph: LayerGraph  # with its loss, for training
    sample: Sample | None = None  # of its inputs, those of the loss included
    model: str = ""  # import path of the function that makes it, or a name for it
    loss: str = ""  # its name; "" if there is none
    cluster: Cluster  # fastest machine first
    batch: int  # samples of a step
    costs: AnalyticCosts | ProfiledCosts  # of computing, on those machines
    pins: Mapping[str, str]  # by layer, a required split: "rows:4"
    micro_batches: bool = False  # also try pipelines of micro-batches
    exactly: bool = False  # use all machines allowed, even if fewer were faster
    search: bool = True  # search on simulated time after the solver
    solver_seconds: float = SOLVER_SECONDS  # for each number of machines


# --- placement problem ---


@final
@dataclass(frozen=True, slots=True)
class Node:
    group: Group
    candidates: tuple[Candidate, ...]
    placements: tuple[Mapping[str, Placement], ...]  # of all members, by candidate


@final
@dataclass(frozen=True)
class Decoder:
    """Converts choices of the problem to placements."""

    nodes: tuple[Node, ...]  # in the order of the problem's

    def __call__(self, choice: Sequence[int]) -> dict[str, Placement]:
        """Return the placement of every layer except inputs."""
        placed: dict[str, Placement] = {}
        for node, index in zip(self.nodes, choice, strict=True):
            placed |= node.placements[index]
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
    GraphError if a pin is impossible.
    """
    pins = pins or {}
    check_pins(graph, pins)
    costs = costs or AnalyticCosts(cluster, batch=batch, single=single_sample(graph))
    found = groups(graph, pinned=pins)
    tables = Tables(graph, cluster, batch=batch, costs=costs)
    nodes = []
    alike: dict[bytes, list[Candidate]] = {}
    for group in found:
        root = group.root
        if root.name in pins:
            options = [pinned(root, cluster, pins[root.name], machines=machines)]
        else:
            if root.signature not in alike:
                alike[root.signature] = candidates(root, cluster, machines=machines)
            options = list(alike[root.signature])
            known = {candidate.placement for candidate in options}
            others = dict.fromkeys(plan[root.name] for plan in also)
            options += [Candidate(other, str(other)) for other in others if other not in known]
        placed = tables.place(group, [option.placement for option in options])
        nodes.append(Node(group, tuple(options), placed))
    # Several values may go from one group to another: their costs add up.
    edges: dict[tuple[int, int], FloatArray] = {}
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


# --- simulated plans ---


@final
@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    method: str  # solver, baseline or search that found it
    cost: StepCost
    seconds: tuple[float, float, float]  # of a step; quantiles 10 %, 50 % and 90 %
    overrun: float  # share by which the fullest machine exceeds its memory; 0 if none does
    # Cost in the solver's model; None if it is not a choice there.
    model_seconds: float | None = None

    @property
    def placements(self) -> Mapping[str, Placement]:
        return self.cost.compiled.placements

    @property
    def rank(self) -> tuple[float, float]:
        # Plans are sorted by this, the best first.
        return (self.overrun, self.seconds[1])


@final
class PlanSimulator:
    """Simulates plans of one request; what they share, draws of variance too, is made once."""

    def __init__(self, request: PlanningRequest) -> None:
        self._request = request
        self._known: dict[int, tuple[Costs, CompilerCache]] = {}  # by number of micro-batches
        self._variance = Variance(request.graph, request.cluster)

    def cost(
        self, placements: Mapping[str, Placement], *, n_machines: int, micro_batches: int = 1
    ) -> StepCost:
        request, batch = self._request, self._request.batch // micro_batches
        if micro_batches not in self._known:
            is_one = micro_batches == 1
            self._known[micro_batches] = (
                request.costs if is_one else request.costs.with_batch(batch),
                # With micro-batches there is one plan each and no search: a small cache is enough.
                CompilerCache(request.graph, n_plans=4 if is_one else 1),
            )
        costs, cache = self._known[micro_batches]
        compiled = compile_plan(
            request.graph, placements, batch=batch, n_machines=n_machines, cache=cache
        )
        cluster = request.cluster.first(n_machines)
        return step_cost(compiled, cluster, costs, micro_batches=micro_batches)

    def way(
        self,
        method: str,
        placements: Mapping[str, Placement],
        *,
        n_machines: int,
        micro_batches: int = 1,
    ) -> SimulatedPlan:
        """Simulate a plan on the first `n_machines` machines."""
        done = self.cost(placements, n_machines=n_machines, micro_batches=micro_batches)
        p10, p50, p90 = self._variance.quantiles(done)
        used = zip(done.memory_bytes, self._request.cluster.machines, strict=False)
        overrun = max(0.0, *(n_bytes / machine.memory - 1.0 for n_bytes, machine in used))
        return SimulatedPlan(method=method, cost=done, seconds=(p10, p50, p90), overrun=overrun)


# --- local search ---

TRIES_MAX: Final = 300  # simulated plans of one search

_ROUNDING: Final = 1e-9
_MOVES_PER_NODE: Final = 6


def improve(
    problem: Problem,
    choice: Choice,
    seconds_of: Callable[[Choice], float],
    *,
    tries: int = TRIES_MAX,
) -> tuple[Choice, float]:
    """Return a choice that is not slower in simulation, and its seconds.

    `seconds_of` is infinite if a choice does not fit; it is called at most `tries` + 1 times.
    """
    best, best_seconds = choice, seconds_of(choice)
    tried = {choice}
    while True:
        moved = False
        for node, candidate in _moves(problem, best):
            other = (*best[:node], candidate, *best[node + 1 :])
            if other in tried:
                continue
            if len(tried) > tries:
                return best, best_seconds
            tried.add(other)
            seconds = seconds_of(other)
            if seconds < best_seconds * (1 - _ROUNDING):  # rounding is no progress
                best, best_seconds, moved = other, seconds, True
        if not moved:
            return best, best_seconds


def _moves(problem: Problem, choice: Choice) -> list[tuple[int, int]]:
    # Changes of one node, those first that cost least in the model.
    found: list[tuple[float, int, int]] = []
    for node in range(len(problem.costs)):
        totals = problem.around(node, choice)
        deltas = totals - totals[choice[node]]
        order = np.argsort(deltas, kind="stable")
        cheapest = [int(k) for k in order if k != choice[node]][:_MOVES_PER_NODE]
        found += [(float(deltas[k]), node, k) for k in cheapest]
    found.sort()
    return [(node, k) for _, node, k in found]


_EVENTS_MAX: Final = 250_000  # tasks and messages that one search simulates: a second or two
_LAYERS_MAX: Final = 8_000  # layers of all plans that one search compiles: some seconds
_LARGE: Final = 500  # layers; a search in larger graphs tries fewer plans still, and gains little
_NOTIFY_EVERY: Final = 5  # simulated plans
_SEARCHED: Final = " + search"


@final
@dataclass(frozen=True, kw_only=True)
class SolvedProblem:
    """A problem with machines in one order, and its solution."""

    problem: Problem
    decoder: Decoder
    solution: Solution
    ways: Mapping[Choice, SimulatedPlan]  # simulated plans, by choice of the problem

    @property
    def rank(self) -> tuple[float, float]:
        return min(way.rank for way in self.ways.values())


def solve_problem(
    request: PlanningRequest,
    cluster: Cluster,
    *,
    machines: Sequence[int],
    others: Sequence[SimulatedPlan],
    simulator: PlanSimulator,
    notify: Notify,
) -> SolvedProblem:
    """Build and solve the problem for one order of machines, and simulate its solution.

    Cuts of the plans in `others` become candidates too.
    """
    count = len(cluster)
    notify(f"{count} machines: what each split of a layer costs")
    others = [way for way in others if way.cost.micro_batches == 1]
    problem, decoder = build(
        request.graph,
        cluster,
        batch=request.batch,
        costs=request.costs,
        pins=request.pins,
        machines=machines,
        also=[way.placements for way in others],
    )
    notify(f"{count} machines: the best choice among {sum(problem.sizes)} splits")
    known: dict[Choice, SimulatedPlan] = {}
    for way in others:
        same = decoder.choice(way.placements)
        if same is not None:
            known.setdefault(same, way)
    # The best choice without caps may fit in the simulation, or after the search.
    free = replace(problem, memory=None, caps=None)
    unbound = solution = solve(free, known=list(known), seconds=request.solver_seconds)
    if not problem.fits(solution.choice):
        solution = solve(problem, known=list(known), seconds=request.solver_seconds)
    solved = {each.choice: each.solver for each in (unbound, solution)}
    ways = {
        choice: replace(known[choice], method=solver)
        if choice in known
        else simulator.way(solver, decoder(choice), n_machines=count)
        for choice, solver in solved.items()
    }
    return SolvedProblem(
        problem=problem,
        decoder=decoder,
        solution=solution,
        ways={
            choice: replace(way, model_seconds=problem.cost(choice))
            for choice, way in {**ways, **known, **ways}.items()
        },
    )


def search(
    solved: SolvedProblem, cluster: Cluster, *, simulator: PlanSimulator, notify: Notify
) -> SimulatedPlan | None:
    """Improve the best plan by local search; None if nothing better was found.

    It minimises the median with variance, by which plans are ranked.
    """
    count = len(cluster)
    start, first = min(solved.ways.items(), key=lambda item: item[1].rank)
    compiled, n_layers = first.cost.compiled, len(first.cost.compiled.graph.layers)
    tries = min(
        TRIES_MAX,
        _EVENTS_MAX // (len(compiled.tasks) + compiled.n_messages),
        _LAYERS_MAX * min(n_layers, _LARGE) // n_layers**2,
    )
    if not tries or count == 1:
        return None
    method = f"{first.method.removesuffix(_SEARCHED)}{_SEARCHED}"
    ways = dict(solved.ways)  # and all that are tried: they have at most `_EVENTS_MAX` events

    def seconds_of(choice: Choice) -> float:
        if choice not in ways:
            n_played = len(ways) - len(solved.ways)
            if n_played % _NOTIFY_EVERY == 0:
                notify(f"{count} machines: search, {n_played} of {tries} plans")
            ways[choice] = simulator.way(method, solved.decoder(choice), n_machines=count)
        # Much longer if memory is short.
        return ways[choice].seconds[1] * (1.0 + 1e3 * ways[choice].overrun)

    better, _ = improve(solved.problem, start, seconds_of, tries=tries)
    if better == start:
        return None
    cost = solved.problem.cost(better)
    return replace(ways[better], method=method, model_seconds=cost)
