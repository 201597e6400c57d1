"""What every machine computes, and what it needs for that: states, tensors, sums."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from distbelief.graph.kind import joined
from distbelief.graph.layer import INPUT, GraphError, LayerGraph
from distbelief.graph.region import Region
from distbelief.program.boxes import disjoint
from distbelief.program.placement import Placement
from distbelief.program.tasks import Needed, Task, backward_of, needed, tasks_of


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
    graph: LayerGraph, placements: Mapping[str, Placement], *, n_machines: int
) -> None:
    """Check that every layer has a place where it can be computed.

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
        placement.check(graph[name], n_machines=n_machines)


def demands(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    gradients: frozenset[str],
) -> Demands:
    """Return what machines compute and need.

    Args:
        graph: What is computed.
        placements: Checked.
        batch: Samples of a step.
        gradients: Layers with a backward pass.
    """
    forward: list[Task] = []
    backward: list[Task] = []
    books = _Books()
    once = joined(graph)
    for layer in graph.layers:
        if layer.kind == INPUT:
            continue
        # A statistic of the batch is one sample, but reads all of them.
        n_samples = 1 if once.issuperset((layer.name, *layer.inputs)) else batch
        tasks = list(tasks_of(layer, placements[layer.name], batch=n_samples))
        for task in tasks:
            if task.phase != "combine":
                books.enter(task, needed(layer, task.region, partial=task.is_partial))
        forward += tasks
        if layer.name in gradients:
            # Turned around as a whole at the end, so cells too come last first.
            backward += [
                backward_of(task, layer, batch=n_samples)
                for task in tasks
                if task.phase != "combine"
            ]
    return Demands(
        forward=tuple(forward),
        backward=tuple(reversed(backward)),
        states=_disjoint(books.states),
        tensors=_disjoint(books.tensors),
        contributions=_disjoint(books.contributions),
    )


_Found = dict[str, dict[int, set[Region]]]


@final
@dataclass(slots=True)
class _Books:
    states: _Found = field(default_factory=dict)
    tensors: _Found = field(default_factory=dict)
    contributions: _Found = field(default_factory=dict)

    def enter(self, task: Task, needs: Needed) -> None:
        for name, region in needs.reads:
            _add(self.states, name, task.machine, region)
        for name, region in needs.uses:
            _add(self.tensors, name, task.machine, region)
        if needs.writes is not None:
            _add(self.contributions, task.layer, task.machine, needs.writes)


def _add(found: _Found, name: str, machine: int, region: Region) -> None:
    if region.n_elements:
        found.setdefault(name, {}).setdefault(machine, set()).add(region)


def _disjoint(found: _Found) -> Needs:
    return {
        name: {machine: disjoint(regions) for machine, regions in by_machine.items()}
        for name, by_machine in found.items()
    }
