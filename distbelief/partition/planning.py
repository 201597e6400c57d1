"""The best plan for each number of machines, and what it is expected to do.

    candidates --> solver --> compiled, played through --> local search --> forecast
    baselines, the best plan for fewer machines -------------^

The solver is exact in a simpler model; what is printed is the simulation. So the
baselines and the best plan for fewer machines are played through as well, and the best
of all is kept: more machines are never expected to be slower.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from distbelief.graph.layer import INPUT, GraphError, LayerGraph
from distbelief.partition.baselines import even, whole_layers
from distbelief.partition.building import Decoder, build
from distbelief.partition.forecast import Forecast, Shares
from distbelief.partition.jitter import Jitter
from distbelief.partition.lower_bound import lower_bound
from distbelief.partition.problem import Choice, Problem, Solution
from distbelief.partition.search import TRIES_MAX, improve
from distbelief.partition.solving import solve
from distbelief.program.cluster import Cluster
from distbelief.program.compilation import compile_plan
from distbelief.program.placement import Placement
from distbelief.program.pricing import Costs, Price, price
from distbelief.program.schedule import statistics_of


SOLVER_SECONDS: Final = 10.0

_EVENTS_MAX: Final = 150_000
"""Tasks and messages that local search plays through; a second or two."""

_LAYERS_MAX: Final = 4_000
"""Layers that it compiles; some seconds."""

_FEWER: Final = (1, 2, 4, 8, 16)
"""Numbers of machines that are planned whether or not anybody asks for them."""

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


@final
@dataclass(frozen=True, kw_only=True)
class Planned:
    """One number of machines, planned.

    Attributes:
        forecast: What is expected of the best plan.
        price: How it was played through.
        problem: What the solver was given.
        decoder: What its choices mean.
        solution: What it returned.
        baselines: Seconds of a step of each, in simulation.
    """

    forecast: Forecast
    price: Price
    problem: Problem
    decoder: Decoder
    solution: Solution
    baselines: Mapping[str, float]


@final
@dataclass(frozen=True, kw_only=True)
class _Way:
    """One way to place all layers."""

    method: str
    placements: Mapping[str, Placement]
    price: Price
    seconds: tuple[float, float, float]  # quantiles of a step
    model_seconds: float | None = None

    @property
    def micro_batches(self) -> int:
        return self.price.micro_batches


def plan(
    order: Order, counts: Sequence[int], *, tell: Told = lambda _: None
) -> list[Planned]:
    """Return the best plan for each number of machines, ascending.

    Args:
        order: What is to be planned.
        counts: Numbers of machines: the first ones of the cluster.
        tell: Told what is being done, for people who wait.

    Raises:
        GraphError: no such number of machines, or an impossible pin.
    """
    counts = list(counts)
    for count in counts:
        order.cluster.first(count)  # says what is wrong before anything takes long
    if not counts:
        raise GraphError("no number of machines is given: use 1 or more")
    planner = _Planner(order)
    planned = []
    for count in _all_counts(counts, order):
        tell(f"{count} machines")
        try:
            done = planner.plan_for(count)
        except GraphError:
            if order.pins and count < max(counts):
                continue  # a pin wants more machines
            raise
        if count in counts:
            planned.append(done)
    return planned


def _all_counts(counts: Sequence[int], order: Order) -> list[int]:
    """Return what is planned: so that a row does not depend on which others there are.

    What fewer machines are best at, more may do as well.
    """
    most = max(counts)
    fewer = [] if order.exactly else [n for n in _FEWER if n < most]
    return sorted({*counts, *fewer})


def played(
    order: Order,
    placements: Mapping[str, Placement],
    *,
    n_machines: int,
    micro_batches: int = 1,
) -> Price:
    """Return the price of one plan on the first machines."""
    n_samples, costs = order.batch // micro_batches, order.costs
    if micro_batches > 1:
        assert order.costs_for is not None
        costs = order.costs_for(n_samples)
    compiled = compile_plan(
        order.graph, placements, batch=n_samples, n_machines=n_machines
    )
    cluster = order.cluster.first(n_machines)
    return price(compiled, cluster, costs, micro_batches=micro_batches)


def divisors(batch: int, *, n_machines: int) -> list[int]:
    """Return into how many micro-batches it is worth trying to cut a batch."""
    most = min(batch, 4 * n_machines)
    return [
        n for n in (2**power for power in range(1, 8)) if n <= most and not batch % n
    ]


@final
class _Planner:
    """Plans for one number of machines after the other, ascending."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._jitter = Jitter(order.graph, order.cluster)
        self._best: _Way | None = None
        whole = {
            layer.name: Placement.whole(len(layer.shape), 0)
            for layer in order.graph.layers
            if layer.kind != INPUT
        }
        self._alone = self._way("one machine", whole, n_machines=1).seconds[1]

    def plan_for(self, count: int) -> Planned:
        """Return the best plan for so many machines."""
        order, cluster = self._order, self._order.cluster.first(count)
        problem, decoder = build(
            order.graph, cluster, batch=order.batch, costs=order.costs, pins=order.pins
        )
        solution = solve(problem, seconds=order.solver_seconds)
        ways = [self._solved(cluster, problem, decoder, solution)]
        if problem.caps is not None:
            # What is best without caps may fit, or come to fit by the search.
            free = replace(problem, memory=None, caps=None)
            unbound = solve(free, seconds=order.solver_seconds)
            if unbound.choice != solution.choice:
                ways.append(self._solved(cluster, problem, decoder, unbound))
        baselines: dict[str, float] = {}
        if not order.pins:
            layers = whole_layers(order.graph, cluster, costs=order.costs)
            ways += [
                self._way("even", even(order.graph, cluster), n_machines=count),
                self._way("whole layers", layers, n_machines=count),
            ]
            baselines = {way.method: way.seconds[1] for way in ways[1:]}
            ways += self._stages(layers, count)
        if self._best is not None and not order.exactly:
            best = self._best
            again = self._way(
                best.method,
                best.placements,
                n_machines=count,
                micro_batches=best.micro_batches,
            )
            ways.append(replace(again, model_seconds=best.model_seconds))
        caps = [machine.memory for machine in cluster.machines]
        if order.exactly:
            most = max(len(way.price.compiled.order) for way in ways)
            ways = [way for way in ways if len(way.price.compiled.order) == most]
            if most < count:
                raise GraphError(
                    f"no plan was found that uses exactly {count} machines, only "
                    f"{most}: ask for that many, or let machines be idle"
                )
        # The first of equals: the solver's own, then the simplest.
        chosen = min(ways, key=lambda way: (_overrun(way.price, caps), way.seconds[1]))
        self._best = chosen
        return Planned(
            forecast=_forecast(order, cluster, chosen, solution, alone=self._alone),
            price=chosen.price,
            problem=problem,
            decoder=decoder,
            solution=solution,
            baselines=baselines,
        )

    def _stages(self, layers: Mapping[str, Placement], count: int) -> list[_Way]:
        """Return whole layers as a pipeline, the batch in several parts."""
        order = self._order
        if order.costs_for is None or count == 1 or statistics_of(order.graph):
            return []
        return [
            self._way(f"stages, {n} parts", layers, n_machines=count, micro_batches=n)
            for n in divisors(order.batch, n_machines=count)
        ]

    def _way(
        self,
        method: str,
        placements: Mapping[str, Placement],
        *,
        n_machines: int,
        micro_batches: int = 1,
    ) -> _Way:
        done = played(
            self._order,
            placements,
            n_machines=n_machines,
            micro_batches=micro_batches,
        )
        p10, p50, p90 = self._jitter.quantiles(done)
        return _Way(
            method=method, placements=placements, price=done, seconds=(p10, p50, p90)
        )

    def _solved(
        self,
        cluster: Cluster,
        problem: Problem,
        decoder: Decoder,
        solution: Solution,
    ) -> _Way:
        """Return the solver's choice, improved on simulated time."""
        caps = [machine.memory for machine in cluster.machines]

        def price_of(choice: Choice) -> Price:
            return played(self._order, decoder(choice), n_machines=len(cluster))

        def seconds_of(choice: Choice) -> float:
            done = price_of(choice)
            return done.step_seconds * (1.0 + 1e3 * _overrun(done, caps))

        choice, method = solution.choice, solution.solver
        first = price_of(choice).compiled
        tries = min(
            TRIES_MAX,
            _EVENTS_MAX // (len(first.tasks) + first.n_messages),
            _LAYERS_MAX // len(self._order.graph.layers),
        )
        if self._order.search and tries:
            better, _ = improve(problem, choice, seconds_of, tries=tries)
            if better != choice:
                choice, method = better, f"{method} + search"
        way = self._way(method, decoder(choice), n_machines=len(cluster))
        return replace(way, model_seconds=problem.cost(choice))


def _overrun(done: Price, caps: Sequence[float]) -> float:
    """Return by what share the fullest machine exceeds its memory; 0 if it fits."""
    used = zip(done.memory_bytes, caps, strict=True)
    return max(0.0, *(n_bytes / cap - 1.0 for n_bytes, cap in used))


def _forecast(
    order: Order, cluster: Cluster, way: _Way, solution: Solution, *, alone: float
) -> Forecast:
    done = way.price
    used = tuple(sorted(done.compiled.order))
    step = max(done.step_seconds, 1e-300) * len(used)
    rows = [done.seconds[machine] for machine in used]
    shares = Shares(
        compute=sum(row.compute for row in rows) / step,
        communication=sum(row.communication for row in rows) / step,
        sync=sum(row.sync for row in rows) / step,
        wait=sum(row.wait for row in rows) / step,
    )
    offenders = tuple(
        index
        for index, machine in enumerate(cluster.machines)
        if done.memory_bytes[index] > machine.memory
    )
    return Forecast(
        n_machines=len(cluster),
        used=used,
        placements=way.placements,
        method=way.method,
        seconds=way.seconds,
        one_machine_seconds=alone,
        shares=shares,
        memory=tuple(map(float, done.memory_bytes)),
        offenders=offenders,
        link_bytes=done.link_bytes,
        micro_batches=way.micro_batches,
        model_seconds=way.model_seconds,
        model_bound=solution.bound,
        lower_bound=lower_bound(order.graph, cluster, order.costs),
    )
