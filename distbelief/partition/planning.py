"""The best plan for each number of machines, and what it is expected to do.

    candidates --> solver --> compiled, played through --> local search --> forecast
    baselines, the best plan for fewer machines ----^

The solver is exact in a simpler model; what is printed is the simulation. So the
baselines and the best plan for fewer machines are played through as well; their cuts
are candidates too, and search begins from the best of all. So more machines are never
expected to be slower, and no baseline is faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from distbelief.graph.layer import INPUT, GraphError
from distbelief.partition.arrangements import arrangements
from distbelief.partition.baselines import even, whole_layers
from distbelief.partition.building import Decoder
from distbelief.partition.forecast import Forecast, forecast_of
from distbelief.partition.lower_bound import lower_bound
from distbelief.partition.order import Order, Told, player_of
from distbelief.partition.pins import check_pins
from distbelief.partition.playing import Way
from distbelief.partition.posing import pose, search
from distbelief.partition.solvers.problem import Problem, Solution
from distbelief.program.cluster import Cluster
from distbelief.program.placement import Placement
from distbelief.program.pricing import Price
from distbelief.program.schedule import statistics_of


__all__ = ["Order", "Planned", "Told", "each_plan", "plan", "played", "player_of"]

_FEWER: Final = (1, 2, 4, 8, 16)
"""Numbers of machines that are planned whether or not anybody asks for them."""


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


def plan(order: Order, counts: Sequence[int], *, tell: Told = lambda _: None) -> list[Planned]:
    """Return the best plan for each number of machines, ascending.

    Args:
        order: What is to be planned.
        counts: Numbers of machines: the first ones of the cluster.
        tell: Told what is being done, for people who wait.

    Raises:
        GraphError: no such number of machines, or an impossible pin.
    """
    return list(each_plan(order, counts, tell=tell))


def each_plan(
    order: Order, counts: Sequence[int], *, tell: Told = lambda _: None
) -> Iterator[Planned]:
    """Yield what `plan` returns, each plan as soon as it is found."""
    counts = list(counts)
    for count in counts:
        order.cluster.first(count)  # says what is wrong before anything takes long
    if not counts:
        raise GraphError("no number of machines is given: use 1 or more")
    check_pins(order.graph, order.pins, order.cluster.first(max(counts)))
    planner = _Planner(order, tell=tell)
    for count in _all_counts(counts, order):
        try:
            done = planner.plan_for(count)
        except GraphError:
            if order.pins and count < max(counts):
                continue  # a pin wants more machines
            raise
        if count in counts:
            yield done


def _all_counts(counts: Sequence[int], order: Order) -> list[int]:
    """Return what is planned: so that a row does not depend on which others there are.

    What fewer machines are best at, more may do as well.
    """
    most = max(counts)
    fewer = [] if order.exactly else [n for n in _FEWER if n < most]
    return sorted({*counts, *fewer})


def played(
    order: Order, placements: Mapping[str, Placement], *, n_machines: int, micro_batches: int = 1
) -> Price:
    """Return the price of one plan on the first machines."""
    return player_of(order).price(placements, n_machines=n_machines, micro_batches=micro_batches)


def divisors(batch: int, *, n_machines: int) -> list[int]:
    """Return into how many micro-batches it is worth trying to cut a batch."""
    most = min(batch, 4 * n_machines)
    return [n for n in (2**power for power in range(1, 8)) if n <= most and not batch % n]


@final
class _Planner:
    """Plans for one number of machines after the other, ascending."""

    def __init__(self, order: Order, *, tell: Told) -> None:
        self._order = order
        self._tell = tell
        self._player = player_of(order)
        self._best: Way | None = None
        whole = {
            layer.name: Placement.whole(len(layer.shape), 0)
            for layer in order.graph.layers
            if layer.kind != INPUT
        }
        self._alone = self._player.way("one machine", whole, n_machines=1).seconds[1]

    def plan_for(self, count: int) -> Planned:
        """Return the best plan for so many machines."""
        order, cluster = self._order, self._order.cluster.first(count)
        self._tell(f"{count} machine{'' if count == 1 else 's'}")
        baselines = [] if order.pins else self._baselines(cluster)
        others = [*baselines, *self._before(count)]
        in_orders = arrangements(cluster)
        posed = [
            pose(
                order,
                cluster,
                machines=machines,
                others=others,
                player=self._player,
                tell=self._tell,
            )
            for machines in in_orders
        ]
        found = [way for each in posed for way in each.ways.values()]
        # The first of equals: the solver's own, then the simplest.
        best = min(posed, key=lambda each: each.rank)
        better = (
            search(best, cluster, player=self._player, tell=self._tell) if order.search else None
        )
        ways = [*([better] if better else []), *found, *others]
        if not order.pins:
            ways += self._stages(cluster, in_orders)
        if order.exactly:
            ways = _of_most(ways, count)
        chosen = self._best = min(ways, key=lambda way: way.rank)
        return Planned(
            forecast=forecast_of(
                chosen,
                cluster,
                alone=self._alone,
                model_bound=min(each.solution.bound for each in posed),
                lower_bound=lower_bound(order.graph, cluster, order.costs),
            ),
            price=chosen.price,
            problem=best.problem,
            decoder=best.decoder,
            solution=best.solution,
            baselines={way.method: way.seconds[1] for way in baselines},
        )

    def _baselines(self, cluster: Cluster) -> list[Way]:
        order, count = self._order, len(cluster)
        layers = whole_layers(order.graph, cluster, costs=order.costs)
        return [
            self._player.way("even", even(order.graph, cluster), n_machines=count),
            self._player.way("whole layers", layers, n_machines=count),
        ]

    def _before(self, count: int) -> list[Way]:
        """Return the best plan for fewer machines, on these."""
        best = self._best
        if best is None or self._order.exactly:
            return []
        again = self._player.way(
            best.method, best.placements, n_machines=count, micro_batches=best.micro_batches
        )
        return [replace(again, model_seconds=best.model_seconds)]

    def _stages(self, cluster: Cluster, in_orders: Sequence[Sequence[int]]) -> list[Way]:
        """Return whole layers as a pipeline, the batch in several parts."""
        order, count = self._order, len(cluster)
        if order.costs_for is None or count == 1 or statistics_of(order.graph):
            return []
        # The last of another order than their own are those one can do without.
        fewer = {machines[:n] for machines in in_orders[1:] for n in (count - 1, count // 2)}
        lines = [tuple(in_orders[0]), *sorted(map(tuple, fewer))]
        return [
            self._player.way(f"stages, {n} parts", layers, n_machines=count, micro_batches=n)
            for line in lines
            for layers in [whole_layers(order.graph, cluster, costs=order.costs, machines=line)]
            for n in divisors(order.batch, n_machines=count)
        ]


def _of_most(ways: Sequence[Way], count: int) -> list[Way]:
    """Return the ways that use most machines.

    Raises:
        GraphError: that is not all.
    """
    most = max(len(way.price.compiled.order) for way in ways)
    if most < count:
        raise GraphError(
            f"no plan was found that uses exactly {count} machines, only {most}: ask "
            "for that many, or let machines be idle"
        )
    return [way for way in ways if len(way.price.compiled.order) == most]
