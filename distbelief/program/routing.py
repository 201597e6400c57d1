"""Who sends what to whom: the messages of a step, the most urgent first.

    states      go from who computes to who reads: owners' cells meet readers' boxes
    partials    go from the parts of a layer to who combines them
    parameters  go from who keeps a piece to who uses it
    gradients   are all of these on their way back

Input layers are read from the data by whoever needs them, and travel nowhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from distbelief.graph.kind import joined
from distbelief.graph.layer import INPUT, Layer, LayerGraph
from distbelief.graph.region import Region
from distbelief.program.demands import Demands, Needs
from distbelief.program.instructions import MessageKind
from distbelief.program.parts import Parts
from distbelief.program.placement import Placement
from distbelief.program.traffic import Traffic


NUMBER_BYTES: Final = 4
INTEGER_BYTES: Final = 8

Kept = Mapping[str, list[tuple[int, Region]]]


def index_bytes(graph: LayerGraph, *, batch: int) -> dict[str, int]:
    """Return what one index of each layer's output takes, all samples together."""
    once = joined(graph)
    return {
        layer.name: (INTEGER_BYTES if layer.is_integer else NUMBER_BYTES)
        * (1 if layer.name in once else batch)
        for layer in graph.layers
    }


def route(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    needs: Demands,
    kept: Kept,
    *,
    batch: int,
    gradients: frozenset[str],
    known: Parts[Traffic],
) -> tuple[Traffic, ...]:
    """Return all messages, by kind and name.

    Args:
        graph: What is computed.
        placements: Where.
        needs: What machines do and need.
        kept: Who keeps which piece of each tensor.
        batch: Samples of a step.
        gradients: Layers with a backward pass.
        known: Of plans of the same graph and batch.
    """
    n_bytes = index_bytes(graph, batch=batch)

    def ways(kind: MessageKind, wanted: Needs) -> dict[str, Traffic]:
        return {
            layer.name: _way(
                (kind, layer.name),
                placements[layer.name].owners(layer),
                wanted.get(layer.name, {}),
                n_bytes=n_bytes[layer.name],
                n_dims=len(layer.shape),
                known=known,
            )
            for layer in graph.layers
            if layer.kind != INPUT
        }

    states = ways("state", needs.states)
    sums = ways("partial_gradient", needs.contributions)
    parameters = {
        name: _way(
            ("parameter", name),
            kept[name],
            by_machine,
            n_bytes=NUMBER_BYTES,
            n_dims=len(graph.tensors[name].shape),
            known=known,
        )
        for name, by_machine in needs.tensors.items()
    }
    found = _Ways(graph, needs, gradients, states, sums, parameters)
    return tuple(way for way in (*found.forward(), *found.back()) if len(way))


def _way(
    subject: tuple[MessageKind, str],
    owners: Sequence[tuple[int, Region]],
    needs: Mapping[int, tuple[Region, ...]],
    *,
    n_bytes: int,
    n_dims: int,
    known: Parts[Traffic],
) -> Traffic:
    return known.get(
        (subject, tuple(owners), tuple(needs.items())),
        lambda: Traffic.between(subject, owners, needs, n_bytes=n_bytes, n_dims=n_dims),
    )


@final
@dataclass(frozen=True, slots=True)
class _Ways:
    graph: LayerGraph
    needs: Demands
    gradients: frozenset[str]
    states: Mapping[str, Traffic]
    sums: Mapping[str, Traffic]
    parameters: Mapping[str, Traffic]

    def forward(self) -> Iterator[Traffic]:
        # Tensors are in the order of the first layer that uses them.
        parameters = dict(self.parameters)
        for layer in self.graph.layers:
            if layer.kind == INPUT:
                continue
            for use in layer.tensors.values():
                if use.name in parameters:
                    yield parameters.pop(use.name)
            contributing = self.needs.contributions.get(layer.name, {})
            yield self.sums[layer.name].back("partial", senders=contributing)
            yield self.states[layer.name]

    def back(self) -> Iterator[Traffic]:
        backward = [layer for layer in self.graph.layers if layer.name in self.gradients]
        going_back: dict[str, set[int]] = {}
        for task in self.needs.backward:
            going_back.setdefault(task.layer, set()).add(task.machine)
        users: dict[str, list[Layer]] = {}
        for layer in backward:
            for use in layer.tensors.values():
                users.setdefault(use.name, []).append(layer)
        for layer in reversed(backward):
            readers = self.graph.consumers[layer.name]
            yield self.states[layer.name].back("gradient", senders=_machines(going_back, readers))
            yield self.sums[layer.name]
        for name, way in reversed(list(self.parameters.items())):
            if self.graph.tensors[name].trains:
                senders = _machines(going_back, users.get(name, []))
                yield way.back("parameter_gradient", senders=senders)


def _machines(by_layer: Mapping[str, set[int]], layers: Iterable[Layer]) -> set[int]:
    return {m for layer in layers for m in by_layer.get(layer.name, ())}
