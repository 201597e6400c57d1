"""Linear layers, convolutions and pointwise functions, in any legal split."""

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional

from distbelief.graph.graph import Layer, TensorUse
from distbelief.graph.operator import operator_of
from distbelief.graph.ops.pointwise import PARAMETRIC, SEVERAL, UNARY
from tests.distbelief.graph.ops.comparison import (
    assert_parts_equal,
    leaf,
    parts_of,
    random_tensors,
    random_values,
)


def tensors_of(**shapes: tuple[int, ...]) -> dict[str, TensorUse]:
    return {word: TensorUse(name=word, shape=shape) for word, shape in shapes.items()}


@st.composite
def linears(draw: st.DrawFn) -> Layer:
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    n_inputs, n_outputs = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    transposed = draw(st.booleans())
    matrix = (n_inputs, n_outputs) if transposed else (n_outputs, n_inputs)
    tensors = tensors_of(weight=matrix, bias=(n_outputs,))
    if draw(st.booleans()):
        del tensors["bias"]
    return Layer(
        name="fc",
        kind="linear",
        inputs=("x",),
        input_shapes=((*leading, n_inputs),),
        shape=(*leading, n_outputs),
        options={"transposed": True} if transposed else {},
        tensors=tensors,
    )


@st.composite
def convolutions(draw: st.DrawFn) -> Layer:
    n_dims = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    n_in = groups * draw(st.integers(1, 2))
    n_out = groups * draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(1, 4)] * n_dims))
    options = {
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
    tensors = tensors_of(weight=(n_out, n_in // groups, *sizes), bias=(n_out,))
    if draw(st.booleans()):
        del tensors["bias"]
    return Layer(
        name="conv",
        kind="convolution",
        inputs=("x",),
        input_shapes=((n_in, *extents),),
        shape=(n_out, *shape),
        options={**options, "groups": groups},
        tensors=tensors,
    )


@given(linears(), st.data())
def test_a_linear_layer_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    inputs = {k: leaf(v) for k, v in random_values(layer, batch=2, seed=0).items()}
    tensors = {k: leaf(v) for k, v in random_tensors(layer, seed=0).items()}
    weight = tensors["weight"].t() if layer.options else tensors["weight"]
    expected = functional.linear(inputs["x"], weight, tensors.get("bias"))
    parts = data.draw(parts_of(layer))
    assert_parts_equal(layer, parts, expected, inputs, tensors)


@given(convolutions(), st.data())
@settings(max_examples=150)
def test_a_convolution_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    inputs = {k: leaf(v) for k, v in random_values(layer, batch=2, seed=1).items()}
    tensors = {k: leaf(v) for k, v in random_tensors(layer, seed=1).items()}
    n_dims = len(layer.shape) - 1
    convolve = (functional.conv1d, functional.conv2d)[n_dims - 1]
    pads: list[int] = []
    for padding, extra in zip(layer.integers("padding"), layer.integers("extra"), strict=True):
        pads = [padding, padding + extra, *pads]
    expected = convolve(
        functional.pad(inputs["x"], pads),
        tensors["weight"],
        tensors.get("bias"),
        stride=layer.integers("stride"),
        dilation=layer.integers("dilation"),
        groups=layer.integer("groups"),
    )
    parts = data.draw(parts_of(layer))
    assert_parts_equal(layer, parts, expected, inputs, tensors)


@given(convolutions(), st.data())
@settings(max_examples=60)
def test_a_part_of_a_convolution_depends_on_what_it_reads_and_no_more(
    layer: Layer, data: st.DataObject
) -> None:
    """The gradient of a part shows, index by index, what it depends on."""
    parts = data.draw(parts_of(layer))
    assert isinstance(parts, list)
    part = data.draw(st.sampled_from([p for p in parts if p.n_elements]))
    (read,) = operator_of(layer).reads(layer, part)
    inputs = leaf(torch.ones(1, *layer.input_shapes[0], dtype=torch.float64))
    weight = torch.ones(layer.tensors["weight"].shape, dtype=torch.float64)
    pads: list[int] = []
    for padding, extra in zip(layer.integers("padding"), layer.integers("extra"), strict=True):
        pads = [padding, padding + extra, *pads]
    whole = (functional.conv1d, functional.conv2d)[len(layer.shape) - 2](
        functional.pad(inputs, pads),
        weight,
        stride=layer.integers("stride"),
        dilation=layer.integers("dilation"),
        groups=layer.integer("groups"),
    )
    (gradient,) = torch.autograd.grad(whole[(slice(None), *part.slices)].sum(), inputs)
    outside = gradient.clone()
    outside[(slice(None), *read.slices)] = 0
    assert not outside.any(), "it depends on more than it says"


@pytest.mark.parametrize("function", sorted({*UNARY, *PARAMETRIC, *SEVERAL} - {"detach"}))
@given(data=st.data())
@settings(max_examples=5)
def test_a_pointwise_function_in_parts_is_the_whole(function: str, data: st.DataObject) -> None:
    n_inputs = 3 if function in SEVERAL else 1
    names = ("x", "y", "z")[:n_inputs]
    shape = (3, 4)
    layer = Layer(
        name="f",
        kind="pointwise",
        inputs=names,
        input_shapes=(shape,) * n_inputs,
        shape=shape,
        options={"function": function, "argument": 0.3},
    )
    values = random_values(layer, batch=2, seed=2)
    inputs = {name: leaf(value.abs() + 0.1) for name, value in values.items()}
    match function:
        case "add":
            expected = inputs["x"] + inputs["y"] + inputs["z"]
        case "subtract":
            expected = inputs["x"] - inputs["y"] - inputs["z"]
        case "multiply":
            expected = inputs["x"] * inputs["y"] * inputs["z"]
        case "divide":
            expected = inputs["x"] / inputs["y"] / inputs["z"]
        case "maximum" | "minimum":
            extremes = torch.stack(list(inputs.values()))
            largest = function == "maximum"
            expected = extremes.amax(0) if largest else extremes.amin(0)
        case _ if function in UNARY:
            expected = UNARY[function](inputs["x"])
        case _:
            expected = PARAMETRIC[function](inputs["x"], 0.3)
    parts = data.draw(parts_of(layer))
    assert_parts_equal(layer, parts, expected, inputs, {})
