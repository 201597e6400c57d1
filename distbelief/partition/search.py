"""What the solver is asked, what it says, and what search makes of the best of that."""

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
from distbelief.program.cost import Costs, StepCost, price
from distbelief.program.placement import Placement


# Plans played through: what each would come to, under the same luck for all.
#
# A planner looks at many plans that differ in a layer or two. What is alike in them is
# worked out once.


@final
@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to place all layers.

    Attributes:
        method: Who found it.
        placements: Of every layer but inputs.
        price: How it was played through.
        seconds: Of a step; quantiles over draws of the jitter.
        overrun: By what share the fullest machine exceeds its memory; 0 if none does.
        model_seconds: What it costs in the solver's model, if that knows it.
    """

    method: str
    placements: Mapping[str, Placement]
    price: StepCost
    seconds: tuple[float, float, float]
    overrun: float
    model_seconds: float | None = None

    @property
    def micro_batches(self) -> int:
        """Into how many parts the batch is cut."""
        return self.price.micro_batches

    @property
    def penalised(self) -> float:
        """The median, much longer if memory is short: what a search makes small."""
        return self.seconds[1] * (1.0 + 1e3 * self.overrun)

    @property
    def rank(self) -> tuple[float, float]:
        """What ways are sorted by, the best first."""
        return (self.overrun, self.seconds[1])


@final
class PlanSimulator:
    """Plays plans of one graph through.

    Args:
        graph: With its loss, if it is to be trained.
        cluster: All machines.
        batch: Samples of a step.
        costs: Of computing.
        costs_for: Costs with so many samples, for micro-batches.
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
        self._known: dict[int, CompilerCache] = {}
        self._jitter = Variance(graph, cluster)

    def price(
        self, placements: Mapping[str, Placement], *, n_machines: int, micro_batches: int = 1
    ) -> StepCost:
        """Return the price of a plan on the first machines."""
        if micro_batches not in self._costs:
            assert self._costs_for is not None
            self._costs[micro_batches] = self._costs_for(self._batch // micro_batches)
        if micro_batches not in self._known:
            # Nobody searches among plans in several parts: there is one of each.
            self._known[micro_batches] = CompilerCache(
                self._graph, n_plans=4 if micro_batches == 1 else 1
            )
        compiled = compile_plan(
            self._graph,
            placements,
            batch=self._batch // micro_batches,
            n_machines=n_machines,
            known=self._known[micro_batches],
        )
        return price(
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
    ) -> Way:
        """Return a plan played through on the first machines."""
        done = self.price(placements, n_machines=n_machines, micro_batches=micro_batches)
        p10, p50, p90 = self._jitter.quantiles(done)
        caps = [machine.memory for machine in self._cluster.machines[:n_machines]]
        return Way(
            method=method,
            placements=placements,
            price=done,
            seconds=(p10, p50, p90),
            overrun=overrun(done, caps),
        )


def overrun(done: StepCost, caps: Sequence[float]) -> float:
    """Return by what share the fullest machine exceeds its memory; 0 if it fits."""
    used = zip(done.memory_bytes, caps, strict=True)
    return max(0.0, *(n_bytes / cap - 1.0 for n_bytes, cap in used))


# What a plan is expected to do, and how much of that is proved.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where the time of a step goes, averaged over the machines used; sums to 1.

    Attributes:
        compute: Of layers.
        communication: Sending or receiving states and gradients, nothing to compute.
        sync: Likewise, of parameters that several machines use.
        wait: For others.
    """

    compute: float
    communication: float
    sync: float
    wait: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """The best plan found for so many machines.

    Attributes:
        n_machines: How many it may use.
        used: Those that it uses.
        placements: The plan itself, by layer.
        method: Who found it: a solver, a baseline, or the search.
        seconds: Of a step; quantiles 10 %, 50 % and 90 % over draws of the jitter.
        one_machine_seconds: Of a step on the first machine alone; the median too.
        shares: Where they go.
        memory: Bytes of each machine.
        offenders: Machines whose memory is too small.
        link_bytes: Per pair of sender and receiver, bytes of a step.
        model_seconds: Cost of the plan in the solver's model, in which phases follow
            each other; None for plans the solver does not know.
        model_bound: No plan of the candidates costs less there.
        lower_bound: No plan at all takes less: work over the speed of all machines,
            and the longest chain of layers.
        micro_batches: Into how many parts the batch is cut.
    """

    n_machines: int
    used: tuple[int, ...]
    placements: Mapping[str, Placement]
    method: str
    seconds: tuple[float, float, float]
    one_machine_seconds: float
    shares: Shares
    memory: tuple[float, ...]
    offenders: tuple[int, ...]
    link_bytes: Mapping[tuple[int, int], int]
    model_seconds: float | None
    model_bound: float
    lower_bound: float
    micro_batches: int = 1

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return self.seconds[1]

    @property
    def speed_up(self) -> float:
        """How many times faster than one machine."""
        return self.one_machine_seconds / self.median

    @property
    def efficiency(self) -> float:
        """Speed-up per machine used."""
        return self.speed_up / len(self.used)

    @property
    def gap(self) -> float | None:
        """How much more than the bound it costs in the solver's model, as a share."""
        if self.model_seconds is None or self.model_bound <= 0:
            return None
        return max(0.0, self.model_seconds / self.model_bound - 1.0)

    @property
    def fits(self) -> bool:
        """Whether every machine has memory enough."""
        return not self.offenders


def estimate_of(
    way: Way, cluster: Cluster, *, alone: float, model_bound: float, lower_bound: float
) -> PlanEstimate:
    """Return what is to be expected of a way.

    Args:
        way: Played through.
        cluster: The machines that there may be.
        alone: Seconds of a step on the first machine alone.
        model_bound: No plan of the candidates costs less in the solver's model.
        lower_bound: No plan at all takes less.
    """
    done = way.price
    used = tuple(sorted(done.compiled.order))
    step = max(done.step_seconds, 1e-300) * len(used)
    rows = [done.seconds[machine] for machine in used]
    return PlanEstimate(
        n_machines=len(cluster),
        used=used,
        placements=way.placements,
        method=way.method,
        seconds=way.seconds,
        one_machine_seconds=alone,
        shares=Shares(
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


# What is to be planned, and what plays plans of it through.

SOLVER_SECONDS: Final = 10.0

Told = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
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


def simulator_of(order: PlanningRequest) -> PlanSimulator:
    """Return what plays plans of this order through."""
    return PlanSimulator(
        order.graph, order.cluster, batch=order.batch, costs=order.costs, costs_for=order.costs_for
    )


# Local search on simulated time, from where the solver of the simpler model ends.
#
# The solver's model lets phases follow each other; a real step overlaps them. So moves
# that the model thinks cheap, one node at a time, are priced by the event simulation, and
# kept if they help. No chance and no clock: equal problems end in equal plans.

TRIES_MAX: Final = 300
"""Moves priced at the most."""

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
        problem: Whose candidates are tried.
        choice: To begin with.
        seconds_of: Prices a choice; called `tries` + 1 times at the most. Infinite for
            what does not fit.
        tries: Few, where a price takes long.
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
            if seconds < best_seconds * (1 - 1e-9):
                best, best_seconds, moved = other, seconds, True
        if not moved:
            return best, best_seconds


def _moves(problem: Problem, choice: Choice) -> list[tuple[int, int]]:
    """Return changes of one node, those first that cost the model least."""
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


_EVENTS_MAX: Final = 250_000
"""Tasks and messages that local search plays through; a second or two."""

_LAYERS_MAX: Final = 8_000
"""Layers of all plans that it compiles; some seconds."""

_TELL_EVERY: Final = 5  # plans
_SEARCHED: Final = " + search"


@final
@dataclass(frozen=True, kw_only=True)
class SolvedProblem:
    """What a solver was asked, with machines in one order, and what came of it.

    Attributes:
        problem: The question.
        decoder: What its choices mean.
        solution: The answer.
        ways: Those that are choices of the problem, played through.
    """

    problem: Problem
    decoder: Decoder
    solution: Solution
    ways: Mapping[Choice, Way]

    @property
    def rank(self) -> tuple[float, float]:
        """Of its best way."""
        return min(way.rank for way in self.ways.values())


def solve_problem(
    order: PlanningRequest,
    cluster: Cluster,
    *,
    machines: Sequence[int],
    others: Sequence[Way],
    player: PlanSimulator,
    tell: Told,
) -> SolvedProblem:
    """Return what the solver says, and which other ways it might have said.

    Args:
        order: What is to be planned.
        cluster: The machines that there may be.
        machines: In the order in which they are used.
        others: Ways whose cuts are candidates too.
        player: Plays ways through.
        tell: Told what is being done.
    """
    count = len(cluster)
    tell(f"{count} machines: what each split of a layer costs")
    others = [way for way in others if way.micro_batches == 1]
    problem, decoder = build(
        order.graph,
        cluster,
        batch=order.batch,
        costs=order.costs,
        pins=order.pins,
        machines=machines,
        also=[way.placements for way in others],
    )
    tell(f"{count} machines: the best choice among {sum(problem.sizes)} splits")
    solution = solve(problem, seconds=order.solver_seconds)
    solved = {solution.choice: solution.solver}
    if problem.caps is not None:
        # What is best without caps may fit, or come to fit by the search.
        free = replace(problem, memory=None, caps=None)
        unbound = solve(free, seconds=order.solver_seconds)
        solved.setdefault(unbound.choice, unbound.solver)
    ways = {
        choice: player.way(solver, decoder(choice), n_machines=count)
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
    posed: SolvedProblem, cluster: Cluster, *, player: PlanSimulator, tell: Told
) -> Way | None:
    """Return what local search makes of the best way; None if nothing better.

    It makes the jittered median small, by which plans are ranked and which is printed.
    With jitters of 0.05 and 0.3 it ends in the very plans that the step without jitter
    leads to (AlexNet, VGG-16, MobileNet; 2, 4 and 8 machines), so there is no reason to
    have two measures.

    Args:
        posed: Where it begins, and among what it searches.
        cluster: The machines that there may be.
        player: Plays ways through.
        tell: Told what is being done.
    """
    count = len(cluster)
    start, first = min(posed.ways.items(), key=lambda item: item[1].rank)
    compiled = first.price.compiled
    tries = min(
        TRIES_MAX,
        _EVENTS_MAX // (len(compiled.tasks) + compiled.n_messages),
        _LAYERS_MAX // len(compiled.graph.layers),
    )
    if not tries or count == 1:
        return None
    method = f"{first.method.removesuffix(_SEARCHED)}{_SEARCHED}"
    n_played = 0

    def way_of(choice: Choice) -> Way:
        return posed.ways.get(choice) or player.way(method, posed.decoder(choice), n_machines=count)

    def seconds_of(choice: Choice) -> float:
        nonlocal n_played
        if n_played % _TELL_EVERY == 0:
            tell(f"{count} machines: search, {n_played} of {tries} plans")
        n_played += 1
        return way_of(choice).penalised

    better, _ = improve(posed.problem, start, seconds_of, tries=tries)
    if better == start:
        return None
    # Played again: to keep all that were played takes too much memory.
    cost = posed.problem.cost(better)
    return replace(way_of(better), method=method, model_seconds=cost)
