import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional

from distbelief.graph.graph import Layer
from distbelief.graph.operator import operator_of
from distbelief.graph.ops.pointwise import PARAMETRIC, SEVERAL, UNARY
from tests.distbelief.graph.ops.comparison import check, layer_of, leaf, parts_of, random


@st.composite
def linears(draw: st.DrawFn) -> Layer:
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    n_inputs, n_outputs = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    transposed = draw(st.booleans())
    matrix = (n_inputs, n_outputs) if transposed else (n_outputs, n_inputs)
    words = {"weight": matrix} | draw(st.sampled_from([{}, {"bias": (n_outputs,)}]))
    options: dict[str, Any] = {"transposed": True} if transposed else {}
    return layer_of("linear", (*leading, n_outputs), (*leading, n_inputs), words=words, **options)


@st.composite
def convolutions(draw: st.DrawFn) -> Layer:
    n_dims = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    n_in = groups * draw(st.integers(1, 2))
    n_out = groups * draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(1, 4)] * n_dims))
    options: dict[str, Any] = {
        word: draw(st.tuples(*[st.integers(low, high)] * n_dims))
        for word, low, high in [
            ("stride", 1, 3),
            ("padding", 0, 3),
            ("extra", 0, 1),
            ("dilation", 1, 2),
        ]
    }
    extents = draw(st.tuples(*[st.integers(1, 9)] * n_dims))
    shape = []
    for dim in range(n_dims):
        reach = (sizes[dim] - 1) * options["dilation"][dim] + 1
        room = extents[dim] + 2 * options["padding"][dim] + options["extra"][dim]
        assume(room >= reach)
        shape.append((room - reach) // options["stride"][dim] + 1)
    words = {"weight": (n_out, n_in // groups, *sizes)}
    words |= draw(st.sampled_from([{}, {"bias": (n_out,)}]))
    return layer_of(
        "convolution", (n_out, *shape), (n_in, *extents), words=words, groups=groups, **options
    )


def leaves_of(layer: Layer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return random inputs and tensors."""
    inputs = {
        name: leaf(random(2, *shape, seed=index))
        for index, (name, shape) in enumerate(zip(layer.inputs, layer.input_shapes, strict=True))
    }
    uses = layer.tensors.values()
    return inputs, {
        use.name: leaf(random(*use.shape, seed=index)) for index, use in enumerate(uses, start=5)
    }


def convolved(
    layer: Layer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    pads: list[int] = []
    for padding, extra in zip(layer.integers("padding"), layer.integers("extra"), strict=True):
        pads = [padding, padding + extra, *pads]
    return (functional.conv1d, functional.conv2d)[len(layer.shape) - 2](
        functional.pad(x, pads),
        weight,
        bias,
        stride=layer.integers("stride"),
        dilation=layer.integers("dilation"),
        groups=layer.integer("groups"),
    )


@given(linears(), st.data())
def test_a_linear_layer_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    inputs, tensors = leaves_of(layer)
    weight = tensors["weight"].t() if layer.options else tensors["weight"]
    expected = functional.linear(inputs["x"], weight, tensors.get("bias"))
    check(data, layer, expected, inputs, tensors)


@given(convolutions(), st.data())
@settings(max_examples=150)
def test_a_convolution_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    inputs, tensors = leaves_of(layer)
    expected = convolved(layer, inputs["x"], tensors["weight"], tensors.get("bias"))
    check(data, layer, expected, inputs, tensors)


@given(convolutions(), st.data())
@settings(max_examples=60)
def test_a_part_of_a_convolution_depends_on_what_it_reads_and_no_more(
    layer: Layer, data: st.DataObject
) -> None:
    parts = data.draw(parts_of(layer))
    assert isinstance(parts, list)
    part = data.draw(st.sampled_from([p for p in parts if p.n_elements]))
    (read,) = operator_of(layer).reads(layer, part)
    inputs = leaf(torch.ones(1, *layer.input_shapes[0], dtype=torch.float64))
    weight = torch.ones(layer.tensors["weight"].shape, dtype=torch.float64)
    whole = convolved(layer, inputs, weight)
    (gradient,) = torch.autograd.grad(whole[(slice(None), *part.slices)].sum(), inputs)
    outside = gradient.clone()
    outside[(slice(None), *read.slices)] = 0
    assert not outside.any(), "it depends on more than it says"


REDUCED: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


@pytest.mark.parametrize("function", sorted({*UNARY, *PARAMETRIC, *SEVERAL} - {"detach"}))
@given(data=st.data())
@settings(max_examples=5)
def test_a_pointwise_function_in_parts_is_the_whole(function: str, data: st.DataObject) -> None:
    n_inputs = 3 if function in SEVERAL else 1
    shapes = ((3, 4),) * n_inputs
    layer = layer_of("pointwise", (3, 4), *shapes, function=function, argument=0.3)
    inputs = {name: leaf(x.detach().abs() + 0.1) for name, x in leaves_of(layer)[0].items()}
    if function in SEVERAL:
        expected = reduce(REDUCED[function], inputs.values())
    elif function in UNARY:
        expected = UNARY[function](inputs["x"])
    else:
        expected = PARAMETRIC[function](inputs["x"], 0.3)
    check(data, layer, expected, inputs)
