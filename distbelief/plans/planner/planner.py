"""The planner: tries plans for each number of machines, also pipelines, and keeps the best.

    candidates --> solver --> compiled, simulated --> local search --> estimate
    baselines, the best plan for fewer machines ----^

The solver is exact in a simpler model; the estimate is the simulation. So the baselines and the
best plan for fewer machines are simulated too, their cuts are candidates, and the search begins
with the best of all. Hence more machines are never estimated slower, and no baseline faster.
"""

import copy
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, final

import numpy as np
from torch import nn

from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec
from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import operator_of
from distbelief.plans.cluster import Cluster, FloatArray
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.compiler import with_gradient
from distbelief.plans.placement import Placement
from distbelief.plans.planner.baselines import even, whole_layers
from distbelief.plans.planner.candidates import check_pins
from distbelief.plans.planner.cost_model import AnalyticCosts, ProfiledCosts, single_sample
from distbelief.plans.planner.profiling.layer_timer import profiled
from distbelief.plans.planner.profiling.this_host import HERE, here, recheck
from distbelief.plans.planner.search import (
    Notify,
    PlanningRequest,
    PlanSimulator,
    SimulatedPlan,
    SolvedProblem,
    search,
    solve_problem,
)
from distbelief.plans.step_cost import Costs, Seconds
from distbelief.plans.step_graph import statistics_of
from distbelief.task.forward import Entry, Sample
from distbelief.task.losses import OWN
from distbelief.task.task import forward_graph, graph_with_loss, loss_module, modules_of


# --- orders of machines ---

_TIE: Final = 1e-9


def machine_orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the orders of machines worth trying, that of the cluster first.

    Layers are cut over the first k machines of an order. In the second order, used if links or
    bandwidths differ, the machine most expensive for the others to talk to is last, and so on:

        0 --- 2 --- 3      1 is behind slow links: 0 2 3 1, so that three
         . . 1 . .         machines do without it
    """
    standing = tuple(range(len(cluster)))
    if not cluster.rates.ndim:
        return [standing]
    seconds = 1.0 / cluster.rates  # of a byte, to and from each other machine
    np.fill_diagonal(seconds, 0.0)
    slowness = np.array([1.0 / machine.flops for machine in cluster.machines])
    left = list(standing)
    last: list[int] = []
    while left:
        talking = seconds[np.ix_(left, left)].sum(axis=1)
        computing = slowness[left]
        # Both count the same: how much of each there will be is not known yet.
        costs = talking / max(np.median(talking), 1e-300)
        costs = costs + computing / np.median(computing)
        worst = np.flatnonzero(costs >= costs.max() * (1 - _TIE))[-1]
        last.append(left.pop(int(worst)))
    order = tuple(reversed(last))
    return [standing] if order == standing else [standing, order]


# --- lower bound ---


def lower_bound(graph: LayerGraph, cluster: Cluster, costs: Costs) -> float:
    """Return seconds that every plan takes at least.

    Communication and waiting are left out, and everything that can be split without loss counts as
    split over all machines. Machine p alone takes t[v, p] for layer v beyond an overhead o[p], and
    at least x t[v, p] for a share x of it. So for weights w >= 0 that sum to 1

        step >= sum_v ( min_p w[p] t[v, p]  +  min_p w[p] o[p] )

    and a single layer takes at least 1 / sum_p 1 / t[v, p]. This holds if the parts of a layer
    together cost no less than the whole: so they do by arithmetic; measured slices may be more
    efficient. The graph has its loss.
    """
    gradients = with_gradient(graph)
    layers = graph.computed
    overheads = np.array([machine.overhead for machine in cluster.machines])
    passes = {layer.name: 1 + (layer.name in gradients) for layer in layers}
    whole = {layer.name: _seconds(layer, cluster, costs, passes[layer.name]) for layer in layers}
    # Of a layer that was measured to take less than the machine's overhead, all is overhead.
    fixed = {name: np.minimum(passes[name] * overheads, whole[name]) for name in whole}
    # Seconds beyond the overhead, rounded down: it must stay a bound.
    beyond = {name: (whole[name] - fixed[name]) * (1 - 1e-12) for name in whole}
    chain = {layer.name: 0.0 for layer in graph.layers}
    for layer in layers:
        before = max((chain[name] for name in layer.inputs), default=0.0)
        alone = float(whole[layer.name].min())
        kind = operator_of(layer)
        if kind.cuts(layer) or kind.partial is not None:
            # What all machines together take for work that each alone does in these seconds.
            seconds = beyond[layer.name]
            together = float(1.0 / np.sum(1.0 / seconds)) if seconds.all() else 0.0
            alone = float(fixed[layer.name].min()) + together
        chain[layer.name] = before + alone * (1 - 1e-12)
    return max(_busy(beyond, fixed), *chain.values())


def _seconds(layer: Layer, cluster: Cluster, costs: Costs, passes: int) -> FloatArray:
    # What each machine takes for a whole layer: (n_machines,).
    each = (costs.passes(layer, layer.region, index) for index in range(len(cluster)))
    return np.array([sum(both[:passes]) for both in each])


def _busy(beyond: dict[str, FloatArray], fixed: dict[str, FloatArray]) -> float:
    # The bound by the total work, whatever its order.
    totals: FloatArray = np.sum(list(beyond.values()), axis=0)
    # A second of a faster machine counts more.
    weights = 1.0 / np.maximum(totals, 1e-300)
    weights /= weights.sum()
    parts = [*beyond.values(), *fixed.values()]
    return sum(float((weights * seconds).min()) for seconds in parts)


# --- planning request ---

# 1 PiB for one layer: above it, sums over layers and machines might overflow.
_N_BYTES_MAX: Final = 1 << 50


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    model: str  # import path of the function that makes it, or a name for it
    inputs: Sequence[InputSpec] | Mapping[str, InputSpec]  # of its forward, or by keyword
    batch: int  # samples of a step
    loss: str = ""  # as in a job file; "" to plan inference
    counts: Sequence[int]  # numbers of machines
    cluster: str | Path | Cluster = "rack-10g"  # name, path, or "here": machines like this one
    pins: Mapping[str, str] = field(default_factory=dict)  # by layer, a required split
    exactly: bool = False  # use all machines of each count
    profile: bool = False  # measure layers on this machine, for other clusters too


def planning_request(
    model: nn.Module, asked: Request, *, notify: Notify = lambda _: None
) -> PlanningRequest:
    """Return the planning request: the captured graph, the machines and the costs.

        cluster     profile    seconds of a layer
        "here"      any        as measured on this machine
        another     no         arithmetic with the figures of the cluster
        another     yes        the same, times measured / arithmetic on this machine

    The model may be on any device, and is not changed. GraphError if the model cannot be captured
    or split, there is no such cluster, or it has fewer machines.
    """
    cluster, batch, loss = asked.cluster, asked.batch, asked.loss
    most = max([1, *asked.counts])
    is_here = cluster == HERE
    # Errors in the cluster are reported before anything that takes long.
    machines: Cluster | None = None
    if not is_here:
        machines = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        machines.first(most)
    sample, graph = _captured(model, asked)
    layers = [layer for layer in graph.layers if layer.inputs]
    if len(layers) == 1 and layers[0].whole:
        raise GraphError(f"no layer of this model can be split: {layers[0].whole}")
    _check_sizes(graph, batch)
    measures = is_here or asked.profile
    slower = recheck(notify) if measures else 1.0
    if measures:
        notify("measuring this machine")
    machines = machines or here(most)
    single = single_sample(graph)
    arithmetic = AnalyticCosts(machines, batch=batch, single=single)
    costs: AnalyticCosts | ProfiledCosts = arithmetic
    if measures:

        def progress(n_done: int, n_wanted: int, name: str) -> None:
            notify(f"measuring layer {n_done + 1} of {n_wanted}: {name}")

        own = loss_module(graph, sample, loss) if loss else None
        found = modules_of(graph, model, own)
        modules = {path: copy.deepcopy(module) for path, module in found.items()}
        measured = profiled(graph, batch=batch, modules=modules, progress=progress)
        host = None if is_here else AnalyticCosts(here(1), batch=batch, single=single)
        costs = ProfiledCosts(measured, machines=arithmetic, host=host, slower=slower)
    return PlanningRequest(
        graph=graph,
        sample=sample,
        model=asked.model,
        loss=loss,
        cluster=machines,
        batch=batch,
        costs=costs,
        micro_batches=True,
        pins=asked.pins,
        exactly=asked.exactly,
    )


def _captured(model: nn.Module, asked: Request) -> tuple[Sample, LayerGraph]:
    given, loss = asked.inputs, asked.loss
    if isinstance(given, Mapping):
        # A loss of its own reads the same dictionary.
        root = "batch" if loss == OWN or ":" in loss else "inputs"
        entries = [Entry((root, name), spec) for name, spec in sorted(given.items())]
    elif len(given) == 1:
        entries = [Entry(("inputs",), given[0])]
    else:
        entries = [Entry(("inputs", index), spec) for index, spec in enumerate(given)]
    sample = Sample(entries=tuple(entries))
    if loss == OWN or ":" in loss:
        return sample, graph_with_loss(model, sample, loss)
    graph = forward_graph(model, sample, scores=bool(loss))
    if loss:
        graph = append_loss(graph, loss)
        *_, target = (layer for layer in graph.layers if layer.kind == INPUT)
        spec = InputSpec(shape=target.shape, n_values=1 if target.is_integer else None)
        sample = Sample(entries=(*entries, Entry(("targets",), spec)))
    return sample, graph


def _check_sizes(graph: LayerGraph, batch: int) -> None:
    for layer in graph.layers:
        n_bytes = 8 * batch * math.prod(layer.shape)
        if n_bytes > _N_BYTES_MAX:
            raise GraphError(
                f"layer {layer.name!r} of shape {list(layer.shape)} takes "
                f"{n_bytes:.2g} bytes with a batch of {batch:.3g}: use a smaller batch or input"
            )
    for name, use in graph.tensors.items():
        if 8 * math.prod(use.shape) > _N_BYTES_MAX:
            raise GraphError(
                f"tensor {name!r} of shape {list(use.shape)} takes more than "
                f"{_N_BYTES_MAX:.2g} bytes: use a smaller model"
            )


# --- plans ---

_FEWER: Final = (1, 2, 4, 8, 16)  # numbers of machines that are always planned


@final
@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan for one number of machines, and how it was found."""

    cluster: Cluster  # the machines that it may use
    best: SimulatedPlan
    solved: SolvedProblem
    baselines: Mapping[str, float]  # simulated seconds of a step, by name
    one_machine_seconds: float  # median of a step on the first machine alone
    model_bound: float  # lower bound for plans of the candidates, in the solver's model
    lower_bound: float  # for every plan: by the total work, and by the longest chain of layers

    @property
    def n_machines(self) -> int:
        return len(self.cluster)

    @property
    def used(self) -> tuple[int, ...]:
        return tuple(sorted(self.best.cost.compiled.order))

    @property
    def median(self) -> float:
        return self.best.seconds[1]

    @property
    def speed_up(self) -> float:
        return self.one_machine_seconds / self.median

    @property
    def gap(self) -> float | None:
        # How far the plan is above the bound in the solver's model, as a share of the bound.
        if self.best.model_seconds is None or self.model_bound <= 0:
            return None
        return max(0.0, self.best.model_seconds / self.model_bound - 1.0)

    @property
    def lacking(self) -> dict[int, float]:
        # Bytes by which each machine's memory is too small.
        sizes = zip(self.best.cost.memory_bytes, self.cluster.machines, strict=True)
        lacks = {index: n - machine.memory for index, (n, machine) in enumerate(sizes)}
        return {index: n_bytes for index, n_bytes in lacks.items() if n_bytes > 0}

    @property
    def shares(self) -> Seconds:
        # Of the step, averaged over the machines used; they sum to 1.
        cost = self.best.cost
        step = max(cost.step_seconds, 1e-300) * len(self.used)
        rows = [cost.seconds[machine] for machine in self.used]
        return Seconds(*(sum(column) / step for column in zip(*rows, strict=True)))


def plan(
    request: PlanningRequest, counts: Sequence[int], *, notify: Notify = lambda _: None
) -> list[Planned]:
    """Return the best plan for each number of machines, ascending: the first ones of the cluster.

    `notify` is called with a line of progress, which begins with the number of machines. GraphError
    for an impossible number of machines or pin.
    """
    request.cluster.check_plannable()
    for count in counts:
        request.cluster.first(count)  # raises before anything that takes long
    if not counts:
        raise GraphError("machines is empty: give at least one number, 1 or more")
    most = max(counts)
    check_pins(request.graph, request.pins, request.cluster.first(most))
    planner = _Planner(request, notify=notify)
    # Smaller counts are planned too, by the solver alone: more machines may use a plan for fewer,
    # and a row must not depend on the other rows.
    fewer = [] if request.exactly else [n for n in _FEWER if n < most]
    found: list[Planned] = []
    # Plans of large models are millions of objects without cycles; looking for cycles among them
    # would take a third of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for count in sorted({*counts, *fewer}):
            try:
                done = planner.plan_for(count, is_shown=count in counts)
            except GraphError:
                if not request.pins or count == most:
                    raise
                continue  # a pin needs more machines
            found += [done] if count in counts else []
    finally:
        if was_enabled:
            gc.enable()
    return found


def divisors(batch: int, *, n_machines: int) -> list[int]:
    """Return the numbers of micro-batches worth trying."""
    most = min(batch, 4 * n_machines)
    return [n for n in (2**power for power in range(1, 8)) if n <= most and not batch % n]


@final
class _Planner:
    def __init__(self, request: PlanningRequest, *, notify: Notify) -> None:
        self._request = request
        self._notify = notify
        self._simulator = PlanSimulator(request)
        self._best: SimulatedPlan | None = None
        layers = request.graph.computed
        whole = {layer.name: Placement.whole(len(layer.shape), 0) for layer in layers}
        self._alone = self._simulator.way("one machine", whole, n_machines=1)

    def plan_for(self, count: int, *, is_shown: bool) -> Planned:
        request, cluster = self._request, self._request.cluster.first(count)
        self._notify(f"{count} machine{'' if count == 1 else 's'}")
        compares = not request.pins and (is_shown or count == 1)
        baselines = self._baselines(cluster) if compares else []
        others = [*baselines, *self._before(count)]
        orders = machine_orders(cluster)
        solved = [
            solve_problem(
                request,
                cluster,
                machines=machines,
                others=others,
                simulator=self._simulator,
                notify=self._notify,
            )
            for machines in orders
        ]
        found = [way for each in solved for way in each.ways.values()]
        # Of equals `min` takes the first: the machine order of the cluster.
        best = min(solved, key=lambda each: each.rank)
        better = (
            search(best, cluster, simulator=self._simulator, notify=self._notify)
            if request.search and is_shown
            else None
        )
        ways = [*([better] if better else []), *found, *others]
        if not request.pins:
            ways += self._stages(cluster, orders)
        if request.exactly:
            ways = _of_most(ways, count)
        # Of equals `min` takes the first: of the search, the solver, the baselines, in this order.
        chosen = self._best = min(ways, key=lambda way: way.rank)
        return Planned(
            cluster=cluster,
            best=chosen,
            solved=best,
            baselines={way.method: way.seconds[1] for way in baselines},
            one_machine_seconds=self._alone.seconds[1],
            model_bound=min(each.solution.bound for each in solved),
            lower_bound=lower_bound(request.graph, cluster, request.costs),
        )

    def _baselines(self, cluster: Cluster) -> list[SimulatedPlan]:
        request, count = self._request, len(cluster)
        if count == 1:
            return [replace(self._alone, method=method) for method in ("even", "whole layers")]
        layers = whole_layers(request.graph, cluster, costs=request.costs)
        return [
            self._simulator.way("even", even(request.graph, cluster), n_machines=count),
            self._simulator.way("whole layers", layers, n_machines=count),
        ]

    def _before(self, count: int) -> list[SimulatedPlan]:
        # The best plan for fewer machines, on these.
        best = self._best
        if best is None or self._request.exactly:
            return []
        # Idle machines change nothing else.
        compiled = replace(best.cost.compiled, n_machines=count)
        return [replace(best, cost=replace(best.cost, compiled=compiled))]

    def _stages(self, cluster: Cluster, orders: Sequence[Sequence[int]]) -> list[SimulatedPlan]:
        # Pipelines of whole layers with several micro-batches.
        request, count = self._request, len(cluster)
        if not request.micro_batches or count == 1 or statistics_of(request.graph):
            return []
        # The last machines of the second order are the most expensive to talk to: try without.
        fewer = {machines[:n] for machines in orders[1:] for n in (count - 1, count // 2)}
        lines = [tuple(orders[0]), *sorted(map(tuple, fewer))]
        return [
            self._simulator.way(f"stages, {n} parts", layers, n_machines=count, micro_batches=n)
            for line in lines
            for layers in [whole_layers(request.graph, cluster, costs=request.costs, machines=line)]
            for n in divisors(request.batch, n_machines=count)
        ]


def _of_most(ways: Sequence[SimulatedPlan], count: int) -> list[SimulatedPlan]:
    most = max(len(way.cost.compiled.order) for way in ways)
    if most < count:
        layers = ways[0].cost.compiled.graph.layers
        whole = [
            f"{layer.name} is computed whole: {layer.whole}" for layer in layers if layer.whole
        ]
        why = f" ({whole[0]})" if whole else ""
        raise GraphError(
            f"no plan uses exactly {count} machines, only {most}{why}: request {most}, or allow "
            "idle machines"
        )
    return [way for way in ways if len(way.cost.compiled.order) == most]
