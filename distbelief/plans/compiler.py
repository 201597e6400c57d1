"""Compiles a plan: the tasks of all ranks, and the messages between them.

    placements --> demands --> pieces of tensors --> traffic
                   what each    who owns which       who sends
                   rank needs   range                what to whom

Invariants: each rank receives an index that it needs and does not own exactly once. Each range of a
tensor has one owner, hence one version and one gradient.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, Generic, Literal, TypeVar, final, get_args

import msgspec

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import joined
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.region import Region, disjoint, shared_by
from distbelief.plans.placement import Placement
from distbelief.plans.tasks import Message, MessageKind, Phase, Task, needed, tasks_of
from distbelief.plans.traffic import Traffic


# --- layers with a gradient ---

NO_GRADIENT: Final = "gradient"  # layer option: False means no gradient (the maxima of a softmax)


def with_gradient(graph: LayerGraph) -> frozenset[str]:
    """Return the layers that take part in the backward pass.

    They train, or read a layer that does, and an output depends on them.
    """
    wanting: set[str] = set()
    for layer in graph.layers:
        trains = any(use.trains for use in layer.tensors.values())
        if _has_gradient(layer) and (trains or not wanting.isdisjoint(layer.inputs)):
            wanting.add(layer.name)
    reached = set(graph.outputs)
    # An output must depend on the layer, or its gradient is never used.
    for layer in reversed(graph.layers):
        if layer.name in reached and _has_gradient(layer):
            reached.update(layer.inputs)
    return frozenset(wanting & reached)


def _has_gradient(layer: Layer) -> bool:
    # Integers have no gradient.
    if layer.kind == INPUT or layer.is_integer:
        return False
    return layer.options.get(NO_GRADIENT) is not False


# --- cache ---

_T = TypeVar("_T")


@final
class LruCache(Generic[_T]):
    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._kept: dict[Hashable, _T] = {}

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        # Popping and inserting again moves the entry to the end: the first one is the oldest.
        kept = self._kept.pop(key, None)
        if kept is None:
            kept = make()
            if len(self._kept) >= self._n_max:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = kept
        return kept


@final
class CompilerCache:
    """Caches for compiling many plans of one graph and batch, which often share most layers."""

    def __init__(self, graph: LayerGraph, *, n_plans: int = 4) -> None:
        # Room for `n_plans` plans that share nothing.
        n_parts = n_plans * (2 * len(graph.layers) + len(graph.tensors))
        self.layers = LruCache[_LayerDemands](n_parts)
        self.unions = LruCache[Mapping[int, tuple[Region, ...]]](n_parts)
        self.pieces = LruCache[list[tuple[int, Region]]](n_parts)
        self.traffic = LruCache[Traffic](n_parts)
        self.gradients = with_gradient(graph)


# --- demands: states, tensors and sums that each rank needs ---

Needs = Mapping[str, Mapping[int, tuple[Region, ...]]]
Kept = Mapping[str, list[tuple[int, Region]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What ranks compute and need; the regions of one rank are disjoint, and none is empty."""

    forward: tuple[Task, ...]  # layer by layer
    backward: tuple[Task, ...]  # the last layer first
    states: Needs  # by layer that is read, then by rank that reads it
    tensors: Needs  # by tensor, then by rank that uses it
    contributions: Needs  # by partial layer, then by rank: where it adds to the output
    owners: Kept  # of each layer except inputs, once it is computed


def check(graph: LayerGraph, placements: Mapping[str, Placement]) -> None:
    """Raise GraphError if a layer has no placement, or a placement has no layer."""
    computed = [layer.name for layer in graph.computed]
    for name in placements:
        if name in graph.by_name and graph[name].kind == INPUT:
            raise GraphError(
                f"the plan places {name!r}, an input: leave it out, every machine reads it from "
                "the data"
            )
        if name not in graph.by_name:
            raise GraphError(
                f"the plan places {name!r}, which is not a layer of the graph (layers: "
                f"{', '.join(sorted(computed))})"
            )
    missing = [name for name in computed if name not in placements]
    if missing:
        raise GraphError(
            f"the plan has no placement for {', '.join(map(repr, missing))}: every "
            "layer except inputs needs one"
        )


_Found = dict[str, dict[int, set[Region]]]
_Sort = Literal["states", "tensors", "contributions"]


@final
@dataclass(frozen=True, slots=True)
class _LayerDemands:
    forward: tuple[Task, ...]
    backward: tuple[Task, ...]  # the last cell first
    needs: Mapping[_Sort, _Found]
    owners: list[tuple[int, Region]]


def demands(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    n_machines: int,
    cache: CompilerCache,
) -> Demands:
    """Return what each rank computes and needs; GraphError if a placement is impossible."""
    by_layer: dict[str, _LayerDemands] = {}
    once = joined(graph)
    for layer in graph.computed:
        name, placement = layer.name, placements[layer.name]
        # A batch statistic has one sample, but it reads all of them.
        n_samples = 1 if once.issuperset((name, *layer.inputs)) else batch
        backward = name in cache.gradients
        make = partial(_layer_demands, layer, placement, n_machines, n_samples, backward=backward)
        by_layer[name] = cache.layers.get((name, placement, n_machines), make)
    united = {sort: _united(by_layer, sort, placements, cache=cache) for sort in get_args(_Sort)}
    return Demands(
        forward=tuple(task for each in by_layer.values() for task in each.forward),
        backward=tuple(task for each in reversed(by_layer.values()) for task in each.backward),
        owners={name: each.owners for name, each in by_layer.items()},
        **united,
    )


def _layer_demands(
    layer: Layer, placement: Placement, n_machines: int, batch: int, *, backward: bool
) -> _LayerDemands:
    placement.check(layer, n_machines=n_machines)
    tasks = list(tasks_of(layer, placement, batch=batch))
    # Combining adds up messages; it reads no layer and no tensor.
    computing = [task for task in tasks if task.phase != "combine"]
    needs: dict[_Sort, _Found] = {"states": {}, "tensors": {}, "contributions": {}}
    for task in computing:
        found = needed(layer, task.region, partial=task.is_partial)
        wanted: list[tuple[_Sort, str, Region]] = [
            *(("states", name, region) for name, region in found.reads),
            *(("tensors", name, region) for name, region in found.uses),
        ]
        if found.writes is not None:
            wanted.append(("contributions", layer.name, found.writes))
        for sort, name, region in wanted:
            if region.n_elements:
                needs[sort].setdefault(name, {}).setdefault(task.machine, set()).add(region)
    phases: dict[bool, Phase] = {False: "backward", True: "partial_backward"}
    back = [
        msgspec.structs.replace(task, phase=phases[task.is_partial])
        for task in (reversed(computing) if backward else ())
    ]
    return _LayerDemands(tuple(tasks), tuple(back), needs, placement.owners(layer))


def _united(
    by_layer: Mapping[str, _LayerDemands],
    sort: _Sort,
    placements: Mapping[str, Placement],
    *,
    cache: CompilerCache,
) -> Needs:
    # Per name, what each rank needs for all layers together.
    users: dict[str, list[str]] = {}
    for layer, each in by_layer.items():
        for name in each.needs[sort]:
            users.setdefault(name, []).append(layer)

    def union(name: str, layers: Sequence[str]) -> dict[int, tuple[Region, ...]]:
        found: dict[int, set[Region]] = {}
        for layer in layers:
            for machine, regions in by_layer[layer].needs[sort][name].items():
                found.setdefault(machine, set()).update(regions)
        return {machine: disjoint(regions) for machine, regions in found.items()}

    # The union depends only on the placements of these layers: plans share it.
    return {
        name: cache.unions.get(
            (sort, name, tuple((layer, placements[layer]) for layer in layers)),
            partial(union, name, layers),
        )
        for name, layers in users.items()
    }


# --- owners of shared tensors ---
#
# The owner fetches its piece, sends it to the other users before the forward pass, adds up their
# gradients after the backward pass, and pushes the sum: the server sees each number once.


def pieces(uses: Mapping[int, Sequence[Region]], *, n_dims: int) -> list[tuple[int, Region]]:
    """Return the owner of each part of a tensor; the parts cover all that is used, once.

        weight of a convolution, image cut into 3 bands       used by 0, 1 and 2
        rows   0:5 | 5:11 | 11:16                             owned by 0 | 1 | 2

    The order of the ranks decides who owns what.
    """
    return [piece for users, region in shared_by(uses, n_dims) for piece in _cut(users, region)]


def _cut(users: Sequence[int], region: Region) -> list[tuple[int, Region]]:
    if len(users) == 1 or not region.intervals or region.shape[0] == 1:
        return [(users[0], region)]
    # Each user owns an equal part along dimension 0: the traffic is spread evenly.
    parts = region.cut(0, [1.0] * len(users))
    owned = zip(users, parts, strict=True)
    return [(machine, part) for machine, part in owned if part.n_elements]


# --- messages ---

NUMBER_BYTES: Final = 4
INTEGER_BYTES: Final = 8


def index_bytes(graph: LayerGraph, *, batch: int) -> dict[str, int]:
    """Return the bytes of one index of each layer's output, all samples together."""
    once = joined(graph)
    return {
        layer.name: (INTEGER_BYTES if layer.is_integer else NUMBER_BYTES)
        * (1 if layer.name in once else batch)
        for layer in graph.layers
    }


def route(
    graph: LayerGraph, needs: Demands, kept: Kept, *, batch: int, cache: CompilerCache
) -> tuple[Traffic, ...]:
    """Return all messages of a step, the most urgent first.

    state       from the rank that computes it to the ranks that read it
    partial     from the parts of a layer to the rank that combines them
    parameter   from the owner of a piece to its users
    gradient    each of these on its way back
    """
    each = index_bytes(graph, batch=batch)

    def between(
        kind: MessageKind, name: str, owners: list[tuple[int, Region]], wanted: Needs, n_dims: int
    ) -> Traffic:
        subject, users = (kind, name), wanted[name]
        n_bytes = NUMBER_BYTES if kind == "parameter" else each[name]
        return cache.traffic.get(
            (subject, tuple(owners), tuple(users.items())),
            lambda: Traffic.between(subject, owners, users, n_bytes=n_bytes, n_dims=n_dims),
        )

    def flows(kind: MessageKind, wanted: Needs) -> dict[str, Traffic]:
        # Input layers are left out: each rank reads its part from the data.
        return {
            name: between(kind, name, owners, wanted, len(graph[name].shape))
            for name, owners in needs.owners.items()
            if name in wanted
        }

    states, sums = flows("state", needs.states), flows("partial_gradient", needs.contributions)
    parameters = {
        name: between("parameter", name, kept[name], needs.tensors, len(graph.tensors[name].shape))
        for name in needs.tensors
    }
    found = [
        *_forward(graph, needs, states, sums, parameters),
        *_back(graph, needs, states, sums, parameters),
    ]
    return tuple(flow for flow in found if len(flow))


_Flows = Mapping[str, Traffic]


def _forward(
    graph: LayerGraph, needs: Demands, states: _Flows, sums: _Flows, parameters: _Flows
) -> Iterator[Traffic]:
    # Tensors are in the order of the first layer that uses them.
    left = dict(parameters)
    for layer in graph.computed:
        for use in layer.tensors.values():
            if use.name in left:
                yield left.pop(use.name)
        if layer.name in sums:
            yield sums[layer.name].back("partial", senders=needs.contributions[layer.name])
        if layer.name in states:
            yield states[layer.name]


def _back(
    graph: LayerGraph, needs: Demands, states: _Flows, sums: _Flows, parameters: _Flows
) -> Iterator[Traffic]:
    # A rank sends a gradient only for what one of its own backward tasks has read or used.
    going_back: dict[str, set[int]] = {}
    for task in needs.backward:
        going_back.setdefault(task.layer, set()).add(task.machine)
    backward = [layer for layer in graph.layers if layer.name in going_back]

    def machines(layers: Iterable[Layer]) -> set[int]:
        return {m for layer in layers for m in going_back.get(layer.name, ())}

    for layer in reversed(backward):
        if layer.name in states:
            readers = machines(graph.consumers[layer.name])
            yield states[layer.name].back("gradient", senders=readers)
        if layer.name in sums:
            yield sums[layer.name]
    users: dict[str, list[Layer]] = {}
    for layer in backward:
        for use in layer.tensors.values():
            users.setdefault(use.name, []).append(layer)
    for name, flow in reversed(list(parameters.items())):
        if graph.tensors[name].trains:
            yield flow.back("parameter_gradient", senders=machines(users.get(name, [])))


# --- compiled plans ---


@final
@dataclass(frozen=True, kw_only=True)
class Compiled:
    graph: LayerGraph
    placements: Mapping[str, Placement]
    batch: int  # samples of a step
    n_machines: int  # some may have no task
    order: tuple[int, ...]  # ranks with a task, as they first appear in the plan
    gradients: frozenset[str]  # layers with a backward pass
    demands: Demands
    kept: Kept  # per tensor, its owners and their pieces
    traffic: tuple[Traffic, ...]  # all messages by kind and name, the most urgent first

    @cached_property  # in an order in which they can be computed
    def tasks(self) -> tuple[Task, ...]:
        return (*self.demands.forward, *self.demands.backward)

    @property
    def n_messages(self) -> int:
        return sum(map(len, self.traffic))

    @cached_property  # slow if there are many
    def messages(self) -> tuple[Message, ...]:
        return tuple(flow.message(i) for flow in self.traffic for i in range(len(flow)))


def compile_plan(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    n_machines: int,
    cache: CompilerCache | None = None,
) -> Compiled:
    """Compile a plan.

    `placements` are of every layer except inputs. GraphError if a layer is unknown, has no
    placement, or cannot be computed there.
    """
    cache = cache or CompilerCache(graph, n_plans=1)
    check(graph, placements)
    placed = [placements[layer.name] for layer in graph.computed]
    both = [part for each in placed for part in (each, each.combine) if part is not None]
    order = tuple(dict.fromkeys(machine for part in both for machine in part.machines))
    needs = demands(graph, placements, batch=batch, n_machines=n_machines, cache=cache)
    kept = {}
    averages = running_averages(graph)
    for name, by_machine in needs.tensors.items():
        if name in averages:  # the rank that computes a running statistic owns it
            kept[name] = needs.owners[averages[name]]
            continue
        # In the order of the plan, so that the numbers of the machines do not matter.
        users = {m: by_machine[m] for m in order if m in by_machine}
        n_dims = len(graph.tensors[name].shape)
        kept[name] = cache.pieces.get(
            (name, tuple(users.items())), partial(pieces, users, n_dims=n_dims)
        )
    return Compiled(
        graph=graph,
        placements=placements,
        batch=batch,
        n_machines=n_machines,
        order=order,
        gradients=cache.gradients,
        demands=needs,
        kept=kept,
        traffic=route(graph, needs, kept, batch=batch, cache=cache),
    )
