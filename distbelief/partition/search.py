"""Simulated plans, estimates, and local search on simulated time.

The solver's model has no overlap of phases; a real step has. So the search changes one node at a
time, cheapest in the model first, simulates the plan, and keeps it if it is faster. There is no
randomness and no clock: equal problems end in equal plans.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from distbelief.graph.graph import LayerGraph
from distbelief.partition.cost_model import Variance
from distbelief.partition.problem import Decoder, build
from distbelief.partition.solvers.problem import Choice, Problem, Solution
from distbelief.partition.solvers.solve import solve
from distbelief.program.cluster import Cluster
from distbelief.program.compiler import CompilerCache, compile_plan
from distbelief.program.placement import Placement
from distbelief.program.step_cost import Costs, StepCost, step_cost


# --- simulated plans ---


@final
@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """A simulated plan."""

    method: str  # solver, baseline or search that found it
    placements: Mapping[str, Placement]  # of every layer except inputs
    cost: StepCost
    seconds: tuple[float, float, float]  # of a step; quantiles 10 %, 50 % and 90 %
    overrun: float  # share by which the fullest machine exceeds its memory; 0 if none does
    # Cost in the solver's model; None if it is not a choice there.
    model_seconds: float | None = None

    @property
    def micro_batches(self) -> int:
        return self.cost.micro_batches

    @property
    def penalised(self) -> float:
        # Minimised by the search: the median, much longer if memory is short.
        return self.seconds[1] * (1.0 + 1e3 * self.overrun)

    @property
    def rank(self) -> tuple[float, float]:
        # Plans are sorted by this, the best first.
        return (self.overrun, self.seconds[1])


@final
class PlanSimulator:
    """Simulates plans of one graph; what they share is computed once.

    All plans have the same draws of variance.

    Args:
        graph: With its loss, for training.
        cluster: All machines.
        batch: Samples of a step.
        costs: Of computing.
        costs_for: Costs with this number of samples, for micro-batches.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        *,
        batch: int,
        costs: Costs,
        costs_for: Callable[[int], Costs] | None = None,
    ) -> None:
        self._graph = graph
        self._cluster = cluster
        self._batch = batch
        self._costs = {1: costs}
        self._costs_for = costs_for
        self._caches: dict[int, CompilerCache] = {}
        self._variance = Variance(graph, cluster)

    def cost(
        self, placements: Mapping[str, Placement], *, n_machines: int, micro_batches: int = 1
    ) -> StepCost:
        """Return the cost of a plan on the first `n_machines` machines."""
        if micro_batches not in self._costs:
            assert self._costs_for is not None
            self._costs[micro_batches] = self._costs_for(self._batch // micro_batches)
        if micro_batches not in self._caches:
            # With micro-batches there is one plan each and no search: a small cache is enough.
            self._caches[micro_batches] = CompilerCache(
                self._graph, n_plans=4 if micro_batches == 1 else 1
            )
        compiled = compile_plan(
            self._graph,
            placements,
            batch=self._batch // micro_batches,
            n_machines=n_machines,
            cache=self._caches[micro_batches],
        )
        return step_cost(
            compiled,
            self._cluster.first(n_machines),
            self._costs[micro_batches],
            micro_batches=micro_batches,
        )

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
        caps = [machine.memory for machine in self._cluster.machines[:n_machines]]
        return SimulatedPlan(
            method=method,
            placements=placements,
            cost=done,
            seconds=(p10, p50, p90),
            overrun=overrun(done, caps),
        )


def overrun(done: StepCost, caps: Sequence[float]) -> float:
    """Return by what share the fullest machine exceeds its memory; 0 if all fit."""
    used = zip(done.memory_bytes, caps, strict=True)
    return max(0.0, *(n_bytes / cap - 1.0 for n_bytes, cap in used))


# --- estimates ---


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the step time, averaged over the machines used; they sum to 1."""

    compute: float  # layers
    communication: float  # sends or receives states and gradients, and computes nothing
    sync: float  # sends or receives only replicated parameters or their gradients
    wait: float  # idle


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """The estimate of the best plan for one number of machines."""

    n_machines: int  # that it may use
    used: tuple[int, ...]  # machines that it uses
    placements: Mapping[str, Placement]
    method: str  # solver, baseline or search that found it
    seconds: tuple[float, float, float]  # of a step; quantiles 10 %, 50 % and 90 %
    one_machine_seconds: float  # median of a step on the first machine alone
    shares: TimeShares
    memory: tuple[float, ...]  # bytes of each machine
    offenders: tuple[int, ...]  # machines whose memory is too small
    link_bytes: Mapping[tuple[int, int], int]  # of a step, by (sender, receiver)
    # Cost in the solver's model, without overlap of phases; None if it is not a choice there.
    model_seconds: float | None
    model_bound: float  # lower bound for plans of the candidates, in that model
    lower_bound: float  # for every plan: by the total work, and by the longest chain of layers
    micro_batches: int = 1

    @property
    def median(self) -> float:
        return self.seconds[1]

    @property
    def speed_up(self) -> float:
        return self.one_machine_seconds / self.median

    @property
    def efficiency(self) -> float:
        return self.speed_up / len(self.used)

    @property
    def gap(self) -> float | None:
        # How far the plan is above the bound in the solver's model, as a share of the bound.
        if self.model_seconds is None or self.model_bound <= 0:
            return None
        return max(0.0, self.model_seconds / self.model_bound - 1.0)

    @property
    def fits(self) -> bool:
        return not self.offenders


def estimate_of(
    way: SimulatedPlan, cluster: Cluster, *, alone: float, model_bound: float, lower_bound: float
) -> PlanEstimate:
    """Return the estimate of a simulated plan.

    Args:
        way: The plan.
        cluster: The machines that it may use.
        alone: Seconds of a step on the first machine alone.
        model_bound: Lower bound for plans of the candidates, in the solver's model.
        lower_bound: Lower bound for every plan.
    """
    done = way.cost
    used = tuple(sorted(done.compiled.order))
    # Shares are averages over the machines used.
    step = max(done.step_seconds, 1e-300) * len(used)
    rows = [done.seconds[machine] for machine in used]
    return PlanEstimate(
        n_machines=len(cluster),
        used=used,
        placements=way.placements,
        method=way.method,
        seconds=way.seconds,
        one_machine_seconds=alone,
        shares=TimeShares(
            compute=sum(row.compute for row in rows) / step,
            communication=sum(row.communication for row in rows) / step,
            sync=sum(row.sync for row in rows) / step,
            wait=sum(row.wait for row in rows) / step,
        ),
        memory=tuple(map(float, done.memory_bytes)),
        offenders=tuple(
            index
            for index, machine in enumerate(cluster.machines)
            if done.memory_bytes[index] > machine.memory
        ),
        link_bytes=done.link_bytes,
        micro_batches=way.micro_batches,
        model_seconds=way.model_seconds,
        model_bound=model_bound,
        lower_bound=lower_bound,
    )


# --- planning request ---

SOLVER_SECONDS: Final = 10.0

Notify = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """What to plan: graph, machines, costs and constraints."""

    graph: LayerGraph  # with its loss, for training
    cluster: Cluster  # fastest machine first
    batch: int  # samples of a step
    costs: Costs  # of computing, on those machines
    pins: Mapping[str, str]  # by layer, a required split: "rows:4"
    # Costs with this number of samples; None: no micro-batches.
    costs_for: Callable[[int], Costs] | None = None
    exactly: bool = False  # use all machines allowed, even if fewer were faster
    search: bool = True  # search on simulated time after the solver
    solver_seconds: float = SOLVER_SECONDS  # for each number of machines


def simulator_of(request: PlanningRequest) -> PlanSimulator:
    return PlanSimulator(
        request.graph,
        request.cluster,
        batch=request.batch,
        costs=request.costs,
        costs_for=request.costs_for,
    )


# --- local search ---

TRIES_MAX: Final = 300  # simulated plans of one search

_MOVES_PER_NODE: Final = 6


def improve(
    problem: Problem,
    choice: Choice,
    seconds_of: Callable[[Choice], float],
    *,
    tries: int = TRIES_MAX,
) -> tuple[Choice, float]:
    """Return a choice that is not slower in simulation, and its seconds.

    Args:
        problem: Its candidates are tried.
        choice: The start.
        seconds_of: Simulated seconds of a choice, infinite if it does not fit; called at most
            `tries` + 1 times.
        tries: The number of plans to try.
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
            if seconds < best_seconds * (1 - 1e-9):  # rounding is no progress
                best, best_seconds, moved = other, seconds, True
        if not moved:
            return best, best_seconds


def _moves(problem: Problem, choice: Choice) -> list[tuple[int, int]]:
    # Changes of one node, those first that cost least in the model.
    found: list[tuple[float, int, int]] = []
    for node, costs in enumerate(problem.costs):
        if len(costs) == 1:
            continue
        totals = np.array(costs)
        for neighbour, table in problem.neighbours[node]:
            totals = totals + table[:, choice[neighbour]]
        deltas = totals - totals[choice[node]]
        order = np.argsort(deltas, kind="stable")
        cheapest = [int(k) for k in order if k != choice[node]][:_MOVES_PER_NODE]
        found += [(float(deltas[k]), node, k) for k in cheapest]
    found.sort()
    return [(node, k) for delta, node, k in found if np.isfinite(delta)]


_EVENTS_MAX: Final = 250_000  # tasks and messages that one search simulates: a second or two

_LAYERS_MAX: Final = 8_000  # layers of all plans that one search compiles: some seconds

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

    Args:
        request: The planning request.
        cluster: The machines that a plan may use.
        machines: All of them, in the order in which they are used.
        others: Plans whose cuts become candidates.
        simulator: Simulates plans.
        notify: Called with a line of progress.
    """
    count = len(cluster)
    notify(f"{count} machines: what each split of a layer costs")
    others = [way for way in others if way.micro_batches == 1]
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
    solution = solve(problem, seconds=request.solver_seconds)
    solved = {solution.choice: solution.solver}
    if problem.caps is not None:
        # The best choice without caps may fit in the simulation, or after the search.
        free = replace(problem, memory=None, caps=None)
        unbound = solve(free, seconds=request.solver_seconds)
        solved.setdefault(unbound.choice, unbound.solver)
    ways = {
        choice: simulator.way(solver, decoder(choice), n_machines=count)
        for choice, solver in solved.items()
    }
    for way in others:
        known = decoder.choice(way.placements)
        if known is not None:
            ways.setdefault(known, way)
    return SolvedProblem(
        problem=problem,
        decoder=decoder,
        solution=solution,
        ways={
            choice: replace(way, model_seconds=problem.cost(choice)) for choice, way in ways.items()
        },
    )


def search(
    solved: SolvedProblem, cluster: Cluster, *, simulator: PlanSimulator, notify: Notify
) -> SimulatedPlan | None:
    """Improve the best plan by local search; None if nothing better was found.

    It minimises the median with variance, by which plans are ranked. With variances of 0.05 and 0.3
    it ends in the same plans as without (AlexNet, VGG-16, MobileNet on 2, 4 and 8 machines), so one
    measure is enough.

    Args:
        solved: The problem and the plans to begin with.
        cluster: The machines that a plan may use.
        simulator: Simulates plans.
        notify: Called with a line of progress.
    """
    count = len(cluster)
    start, first = min(solved.ways.items(), key=lambda item: item[1].rank)
    compiled = first.cost.compiled
    tries = min(
        TRIES_MAX,
        _EVENTS_MAX // (len(compiled.tasks) + compiled.n_messages),
        _LAYERS_MAX // len(compiled.graph.layers),
    )
    if not tries or count == 1:
        return None
    method = f"{first.method.removesuffix(_SEARCHED)}{_SEARCHED}"
    n_played = 0

    def way_of(choice: Choice) -> SimulatedPlan:
        return solved.ways.get(choice) or simulator.way(
            method, solved.decoder(choice), n_machines=count
        )

    def seconds_of(choice: Choice) -> float:
        nonlocal n_played
        if n_played % _NOTIFY_EVERY == 0:
            notify(f"{count} machines: search, {n_played} of {tries} plans")
        n_played += 1
        return way_of(choice).penalised

    better, _ = improve(solved.problem, start, seconds_of, tries=tries)
    if better == start:
        return None
    # Simulated again: keeping all simulated plans takes too much memory.
    cost = solved.problem.cost(better)
    return replace(way_of(better), method=method, model_seconds=cost)
