"""What every machine computes, and what it needs for that: states, tensors, sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, final, get_args

from distbelief.graph.kind import joined
from distbelief.graph.layer import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.region import Region
from distbelief.program.boxes import disjoint
from distbelief.program.parts import Parts
from distbelief.program.placement import Placement
from distbelief.program.tasks import Task, backward_of, needed, tasks_of


Needs = Mapping[str, Mapping[int, tuple[Region, ...]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What machines do and need. Regions of one machine are disjoint, none empty.

    Attributes:
        forward: Tasks, layer by layer.
        backward: Tasks, the last layer first.
        states: Per layer that is read and machine that reads it.
        tensors: Per tensor and machine that uses it.
        contributions: Per partial layer and machine, what of the output it adds to.
    """

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    states: Needs
    tensors: Needs
    contributions: Needs


def check(
    graph: LayerGraph, placements: Mapping[str, Placement], *, n_machines: int, known: Parts[None]
) -> None:
    """Check that every layer has a place where it can be computed.

    Args:
        graph: What is computed.
        placements: Where.
        n_machines: They are counted from 0.
        known: Layers, their placements and numbers of machines that are in order.

    Raises:
        GraphError: one has not, or there is a place for no layer.
    """
    computed = {layer.name for layer in graph.layers if layer.kind != INPUT}
    for name in placements:
        if name in computed:
            continue
        if name in graph.by_name:
            raise GraphError(
                f"the plan places {name!r}, an input: every machine reads it from the "
                "data, so leave it out"
            )
        raise GraphError(
            f"the plan places {name!r}, which is no layer of the graph (it has "
            f"{', '.join(sorted(computed))})"
        )
    missing = [layer.name for layer in graph.layers if layer.name in computed]
    missing = [name for name in missing if name not in placements]
    if missing:
        raise GraphError(
            f"the plan has no placement for {', '.join(map(repr, missing))}: every "
            "layer needs one, except inputs"
        )
    for name, placement in placements.items():
        check_one = partial(placement.check, graph[name], n_machines=n_machines)
        known.get((name, placement, n_machines), check_one)


_Found = dict[str, dict[int, set[Region]]]
_Sort = Literal["states", "tensors", "contributions"]


@final
@dataclass(frozen=True, slots=True)
class _Entered:
    """A layer by itself: its tasks, and what they need."""

    forward: tuple[Task, ...]
    backward: tuple[Task, ...]  # the last cell first
    needs: Mapping[_Sort, _Found]


@final
class KnownDemands:
    """What has been worked out for one graph and batch, whatever the plan.

    Args:
        n_max: Parts of each sort that are kept.
    """

    def __init__(self, n_max: int) -> None:
        self.layers = Parts[_Entered](n_max)
        self.unions = Parts[Mapping[int, tuple[Region, ...]]](n_max)


def demands(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    gradients: frozenset[str],
    known: KnownDemands,
) -> Demands:
    """Return what machines compute and need.

    Args:
        graph: What is computed.
        placements: Checked.
        batch: Samples of a step.
        gradients: Layers with a backward pass.
        known: Of plans of the same graph, batch and gradients.
    """
    entered: dict[str, _Entered] = {}
    once = joined(graph)
    for layer in graph.layers:
        if layer.kind == INPUT:
            continue
        name = layer.name
        # A statistic of the batch is one sample, but reads all of them.
        n_samples = 1 if once.issuperset((name, *layer.inputs)) else batch
        enter = partial(
            _entered, layer, placements[name], batch=n_samples, backward=name in gradients
        )
        entered[name] = known.layers.get((name, placements[name]), enter)
    united = {sort: _united(entered, sort, placements, known=known) for sort in get_args(_Sort)}
    return Demands(
        forward=tuple(task for each in entered.values() for task in each.forward),
        backward=tuple(task for each in reversed(entered.values()) for task in each.backward),
        **united,
    )


def _entered(layer: Layer, placement: Placement, *, batch: int, backward: bool) -> _Entered:
    tasks = list(tasks_of(layer, placement, batch=batch))
    computing = [task for task in tasks if task.phase != "combine"]
    needs: dict[_Sort, _Found] = {"states": {}, "tensors": {}, "contributions": {}}
    for task in computing:
        found = needed(layer, task.region, partial=task.is_partial)
        for name, region in found.reads:
            _add(needs["states"], name, task.machine, region)
        for name, region in found.uses:
            _add(needs["tensors"], name, task.machine, region)
        if found.writes is not None:
            _add(needs["contributions"], task.layer, task.machine, found.writes)
    back = [backward_of(task, layer, batch=batch) for task in computing]
    return _Entered(tuple(tasks), tuple(reversed(back)) if backward else (), needs)


def _add(found: _Found, name: str, machine: int, region: Region) -> None:
    if region.n_elements:
        found.setdefault(name, {}).setdefault(machine, set()).add(region)


def _united(
    entered: Mapping[str, _Entered],
    sort: _Sort,
    placements: Mapping[str, Placement],
    *,
    known: KnownDemands,
) -> Needs:
    """Return, by name, what each machine needs for all layers together."""
    users: dict[str, list[str]] = {}
    for layer, each in entered.items():
        for name in each.needs[sort]:
            users.setdefault(name, []).append(layer)

    def union(name: str, layers: Sequence[str]) -> dict[int, tuple[Region, ...]]:
        found: dict[int, set[Region]] = {}
        for layer in layers:
            for machine, regions in entered[layer].needs[sort][name].items():
                found.setdefault(machine, set()).update(regions)
        return {machine: disjoint(regions) for machine, regions in found.items()}

    return {
        name: known.unions.get(
            (sort, name, tuple((layer, placements[layer]) for layer in layers)),
            partial(union, name, layers),
        )
        for name, layers in users.items()
    }
