"""Compares a layer computed in parts with torch: values and all gradients, in float64.

Also with index tracing: a part depends on all that it reads, and on nothing else.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from distbelief.graph import ops
from distbelief.graph.graph import INPUT, Layer, LayerGraph
from distbelief.graph.operator import Call, Cut, Step, operator_of
from distbelief.graph.region import Region
from tests.distbelief.graph.reference import Partials, Parts, evaluate


assert ops.OPERATORS  # importing them registers them
TOLERANCE = 1e-10


def graph_of(layer: Layer) -> LayerGraph:
    """Return the graph of this layer and its inputs."""
    inputs = [
        Layer(name=name, kind=INPUT, shape=shape)
        for name, shape in dict(zip(layer.inputs, layer.input_shapes, strict=True)).items()
    ]
    return LayerGraph((*inputs, layer), (layer.name,))


@st.composite
def partitions(draw: st.DrawFn, whole: Region, cuts: Sequence[Cut]) -> list[Region]:
    """A grid of parts, split where allowed; some may be empty."""
    parts = [whole]
    for cut in cuts:
        n_parts = draw(st.integers(1, 3))
        weights = draw(st.lists(st.integers(0, 3), min_size=n_parts, max_size=n_parts).filter(any))
        parts = [
            piece
            for part in parts
            for piece in part.cut(cut.dim, [float(w) for w in weights], unit=cut.unit)
        ]
    return draw(st.permutations(parts))


@st.composite
def parts_of(draw: st.DrawFn, layer: Layer) -> Parts:
    """Any split of this layer that its operator allows."""
    kind = operator_of(layer)
    if kind.partial is not None and draw(st.booleans()):
        whole = Region.of(*layer.input_shapes[0])
        cuts = kind.partial.cuts(layer)
        return Partials(tuple(draw(partitions(whole, cuts))))
    return draw(partitions(layer.region, kind.cuts(layer)))


@st.composite
def parts_of_all(draw: st.DrawFn, layers: Sequence[Layer]) -> dict[str, Parts]:
    """Any split of each of these layers."""
    return {layer.name: draw(parts_of(layer)) for layer in layers}


def random_values(layer: Layer, *, batch: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        for name, shape in zip(layer.inputs, layer.input_shapes, strict=True)
    }


def random_tensors(layer: Layer, *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        use.name: torch.randn(*use.shape, generator=generator, dtype=torch.float64)
        for use in layer.tensors.values()
    }


def assert_parts_equal(
    layer: Layer,
    parts: Parts,
    expected: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    *,
    step: Step | None = None,
) -> None:
    """Check that the parts give `expected` and all of its gradients (DB-3).

    Args:
        layer: The layer.
        parts: Its split.
        expected: What torch computes from these inputs and tensors.
        inputs: Leaves that require gradients if they are floats.
        tensors: Leaves that require gradients if they are floats.
        step: The step.
    """
    values = evaluate(graph_of(layer), inputs, tensors, parts={layer.name: parts}, step=step)
    close(values[layer.name], expected)
    leaves = [leaf for leaf in (*inputs.values(), *tensors.values()) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(9)
    seed = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    wanted = torch.autograd.grad(expected, leaves, seed, allow_unused=True)
    found = torch.autograd.grad(values[layer.name], leaves, seed, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        close(zeros(one, other), zeros(other, one))


def assert_layers_equal(  # the arguments of one case, and how it is computed
    layers: Sequence[Layer],
    parts: Mapping[str, Parts],
    expected: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    step: Step | None = None,
) -> dict[str, torch.Tensor]:
    """Check that the last of several layers, each in parts, gives `expected`.

    Checks gradients of all inputs and tensors that require one. Returns all values.
    """
    values = evaluate(composite_of(layers, inputs), inputs, tensors or {}, parts=parts, step=step)
    found = values[layers[-1].name]
    close(found, expected.expand(found.shape))
    leaves = [leaf for leaf in (*inputs.values(), *(tensors or {}).values()) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(9)
    seed = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    pairs = zip(
        torch.autograd.grad(found, leaves, seed, allow_unused=True),
        torch.autograd.grad(expected, leaves, seed, allow_unused=True),
        strict=True,
    )
    for one, other in pairs:
        close(zeros(one, other), zeros(other, one))
    return values


def composite_of(layers: Sequence[Layer], inputs: Mapping[str, torch.Tensor]) -> LayerGraph:
    """Return the graph of these layers, with inputs before them."""
    sources = [source(name, *value.shape[1:]) for name, value in inputs.items()]
    return LayerGraph((*sources, *layers), (layers[-1].name,))


def source(name: str, *shape: int, is_integer: bool = False) -> Layer:
    """Return an input layer, for composites to read."""
    return Layer(name=name, kind=INPUT, shape=shape, is_integer=is_integer)


def assert_reads_are_tight(
    layer: Layer,
    part: Region,
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Check that the part depends on both ends of everything that it reads."""
    kind = operator_of(layer)
    tiles = [
        leaf(inputs[name].detach()[(slice(None), *read.slices)])
        for name, read in zip(layer.inputs, kind.reads(layer, part), strict=True)
    ]
    uses = {
        word: (tensors or {})[layer.tensors[word].name].detach()[region.slices]
        for word, region in kind.uses(layer, part).items()
    }
    value = kind.compute(Call(layer, part, tiles, uses, Step()))
    generator = torch.Generator().manual_seed(8)
    seed = torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.5
    for gradient in torch.autograd.grad(value, tiles, seed):
        if not gradient.numel():
            continue
        for dim in range(1, gradient.dim()):
            assert gradient.select(dim, 0).any(), (layer, part, dim)
            assert gradient.select(dim, -1).any(), (layer, part, dim)


def zeros(gradient: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    if gradient is not None:
        return gradient
    return torch.zeros(()) if other is None else torch.zeros_like(other)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, float(expected.detach().abs().max()) if expected.numel() else 1.0)
    np.testing.assert_allclose(
        found.detach().numpy(), expected.detach().numpy(), rtol=TOLERANCE, atol=TOLERANCE * scale
    )


def leaf(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()
