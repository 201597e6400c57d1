"""Compares a layer computed in parts with torch: values and all gradients, in float64.

Also with index tracing: a part depends on all that it reads, and on nothing else.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from distbelief.graph import ops
from distbelief.graph.graph import INPUT, Layer, LayerGraph, Option, TensorUse
from distbelief.graph.operator import Call, Cut, Step, operator_of
from distbelief.graph.ops.call import operation_of
from distbelief.graph.region import Region, Shape
from tests.distbelief.graph.reference import Partials, Parts, evaluate


_ = ops.views  # importing them registers them
TOLERANCE = 1e-10


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def leaf(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


def uses_of(module: nn.Module) -> dict[str, TensorUse]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors.pop("num_batches_tracked", None)
    return {
        name: TensorUse(name=name, shape=tuple(t.shape), trains=t.requires_grad)
        for name, t in tensors.items()
    }


def randomised(module: nn.Module) -> nn.Module:
    module.double()
    with torch.no_grad():
        for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(random(*tensor.shape, seed=number + 3).abs() + 0.1)
    return module


def source(name: str, *shape: int, is_integer: bool = False) -> Layer:
    """Return an input layer, for composites to read."""
    return Layer(name=name, kind=INPUT, shape=shape, is_integer=is_integer)


def layer_of(
    kind: str,
    shape: Shape,
    *input_shapes: Shape,
    name: str = "",
    words: Mapping[str, Shape] | None = None,
    **options: Option,
) -> Layer:
    """Return a layer with inputs x, y and z, and tensors of these names and shapes."""
    return Layer(
        name=name or kind,
        kind=kind,
        inputs=("x", "y", "z")[: len(input_shapes)],
        input_shapes=input_shapes,
        shape=shape,
        options=options,
        tensors={
            word: TensorUse(name=word, shape=extents) for word, extents in (words or {}).items()
        },
    )


def attention_layer(
    name: str,
    sources: Sequence[Layer],
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Layer:
    """Return an attention layer for query, key, value and an optional mask."""
    options = {"causal": causal, "scale": scale, "dropout": dropout}
    shape = (*sources[0].shape[:-1], sources[2].shape[-1])
    return Layer.of(name, "attention", sources, shape, options=options)


def cat_layer(name: str, sources: Sequence[Layer], *, dim: int) -> Layer:
    """Return the layer that joins these along a dimension, the batch not counted."""
    shape = list(sources[0].shape)
    shape[dim] = sum(source.shape[dim] for source in sources)
    return Layer.of(name, "cat", sources, tuple(shape), options={"dim": dim})


def call_of(operation: str, shape: Shape, *input_shapes: Shape, **numbers: float) -> Layer:
    """Return an elementwise operation of torch, such as "aten.add.Tensor", as a layer."""
    words = [argument.name for argument in operation_of(operation)._schema.arguments]
    places: dict[str, object] = {
        word: {"input": index, "batch": 0} for index, word in enumerate(words[: len(input_shapes)])
    }
    return layer_of(
        "call",
        shape,
        *input_shapes,
        operation=operation,
        arguments=json.dumps({"arguments": [], "keywords": places | numbers}),
        batch=0,
        along=(),
    )


def inputs_of(layer: Layer) -> dict[str, torch.Tensor]:
    """Return random inputs with a gradient: two samples."""
    inputs = zip(layer.inputs, layer.input_shapes, strict=True)
    return {name: leaf(random(2, *shape, seed=i)) for i, (name, shape) in enumerate(inputs)}


def tensors_of(layer: Layer) -> dict[str, torch.Tensor]:
    uses = enumerate(layer.tensors.values(), start=5)
    return {use.name: leaf(random(*use.shape, seed=i)) for i, use in uses}


def graph_of(layer: Layer) -> LayerGraph:
    """Return the graph of this layer and its inputs."""
    inputs = zip(layer.inputs, layer.input_shapes, strict=True)
    return LayerGraph((*(source(name, *shape) for name, shape in inputs), layer), (layer.name,))


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


def values_of(
    layers: Sequence[Layer],
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    parts: Mapping[str, Parts] | None = None,
    step: Step | None = None,
) -> dict[str, torch.Tensor]:
    return evaluate(composite_of(layers, inputs), inputs, tensors or {}, parts=parts, step=step)


def composite_of(layers: Sequence[Layer], inputs: Mapping[str, torch.Tensor]) -> LayerGraph:
    """Return the graph of these layers, with inputs before them."""
    sources = [source(name, *value.shape[1:]) for name, value in inputs.items()]
    return LayerGraph((*sources, *layers), (layers[-1].name,))


def check(
    data: st.DataObject,
    layers: Layer | Sequence[Layer],
    expected: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    step: Step | None = None,
    tight: bool = False,
) -> dict[str, torch.Tensor]:
    """Check the last of these layers, each in any parts (DB-3), and return all values.

    Checks gradients of all inputs and tensors that require one; if `tight`, also that a part of
    the layer depends on all that it reads.
    """
    layers = [layers] if isinstance(layers, Layer) else layers
    parts = {layer.name: data.draw(parts_of(layer)) for layer in layers}
    if tight:
        (layer,) = layers
        pieces = data.draw(partitions(layer.region, operator_of(layer).cuts(layer)))
        parts = {layer.name: pieces}
        part = next(part for part in pieces if part.n_elements)
        assert_reads_are_tight(layer, part, inputs, tensors)
    return assert_parts_equal(layers, parts, expected, inputs, tensors, step=step)


def assert_parts_equal(
    layers: Sequence[Layer],
    parts: Mapping[str, Parts],
    expected: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    step: Step | None = None,
) -> dict[str, torch.Tensor]:
    values = values_of(layers, inputs, tensors, parts=parts, step=step)
    found = values[layers[-1].name]
    close(found, expected.expand(found.shape))
    leaves = [leaf for leaf in (*inputs.values(), *(tensors or {}).values()) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(9)
    seed = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    close_gradients(found, expected, leaves, seed)
    return values


def close_gradients(
    found: torch.Tensor,
    expected: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    seed: torch.Tensor | None = None,
) -> None:
    pairs = (torch.autograd.grad(y, leaves, seed, allow_unused=True) for y in (found, expected))
    for one, other in zip(*pairs, strict=True):
        close(zeros(one, other), zeros(other, one))


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
