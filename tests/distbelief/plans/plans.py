"""Graphs of the zoo, and plans drawn at random: any grid, any machines."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from torch import nn

from distbelief.graph import ops
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import capture
from distbelief.graph.graph import INPUT, Layer, LayerGraph, TensorUse
from distbelief.graph.operator import operator_of
from distbelief.graph.region import Region, Shape
from distbelief.plans.placement import Cuts, Placement
from tests.distbelief.graph.zoo.catalogue import ZOO


_ = ops.views  # importing them registers them


@cache
def captured(name: str) -> tuple[nn.Module, LayerGraph]:
    """A model of the zoo and its graph, with a loss if it has classes."""
    graph = zoo_graph(name)
    if name in WITH_LOSS:
        graph = append_loss(graph, "cross_entropy")
    return ZOO[name].model(), graph


@cache
def zoo_graph(name: str) -> LayerGraph:
    """A model of the zoo, captured once in each process."""
    return capture(ZOO[name].model(), ZOO[name].specs)


WITH_LOSS = {"alexnet", "mobilenet", "resnet18", "vision transformer"}


def random_plan(
    graph: LayerGraph, generator: np.random.Generator, *, n_machines: int
) -> dict[str, Placement]:
    return {
        layer.name: random_placement(layer, generator, n_machines=n_machines)
        for layer in graph.layers
        if layer.kind != INPUT
    }


def random_placement(layer: Layer, generator: np.random.Generator, *, n_machines: int) -> Placement:
    """Anything that is legal; cells may be empty, machines have several or none."""
    kind = operator_of(layer)
    if kind.partial is not None and generator.random() < 0.4:
        shape = layer.input_shapes[0]
        cuts = _cuts(shape, dict(kind.partial.cuts(layer)), generator)
        everywhere = dict.fromkeys(range(len(layer.shape)), 1)
        combine = _placed(_cuts(layer.shape, everywhere, generator), generator, n_machines)
        return _placed(cuts, generator, n_machines, combine)
    cuts = _cuts(layer.shape, dict(kind.cuts(layer)), generator)
    return _placed(cuts, generator, n_machines)


def _cuts(shape: Shape, units: Mapping[int, int], generator: np.random.Generator) -> Cuts:
    cuts: list[tuple[int, ...]] = []
    for dim, extent in enumerate(shape):
        unit = units.get(dim)
        n_cuts = int(generator.integers(3)) if unit and generator.random() < 0.6 else 0
        places = generator.integers(0, extent // (unit or 1) + 1, n_cuts)
        cuts.append(tuple(sorted(int(place) * (unit or 1) for place in places)))
    return tuple(cuts)


def _placed(
    cuts: Cuts, generator: np.random.Generator, n_machines: int, combine: Placement | None = None
) -> Placement:
    n_cells = int(np.prod([len(places) + 1 for places in cuts]))
    machines = generator.integers(n_machines, size=n_cells)
    return Placement(cuts=cuts, machines=tuple(machines.tolist()), combine=combine)


def chain(widths: Sequence[int]) -> LayerGraph:
    """Fully connected layers, one after the other."""
    layers = [Layer(name="x", kind=INPUT, shape=(widths[0],))]
    for index, width in enumerate(widths[1:]):
        before = layers[-1]
        layers.append(
            Layer(
                name=f"fc{index}",
                kind="linear",
                inputs=(before.name,),
                input_shapes=(before.shape,),
                shape=(width,),
                tensors={
                    "weight": TensorUse(name=f"fc{index}.weight", shape=(width, *before.shape)),
                    "bias": TensorUse(name=f"fc{index}.bias", shape=(width,)),
                },
            )
        )
    return LayerGraph(tuple(layers), (layers[-1].name,))


def indices(region: Region) -> set[tuple[int, ...]]:
    """Every index, one by one."""
    return {
        tuple(start + k for (start, _), k in zip(region, place, strict=True))
        for place in np.ndindex(*region.shape)
    }
