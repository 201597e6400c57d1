import math

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

from distbelief.graph.graph import GraphError, Layer, TensorUse
from distbelief.graph.operator import Call, Step, joined, operator_of
from distbelief.graph.ops.views import Block, blocks, reshape_layer
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import (
    assert_parts_equal,
    call_of,
    cat_layer,
    check,
    composite_of,
    layer_of,
    leaf,
    partitions,
    random,
    source,
)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def reshapes(draw: st.DrawFn) -> Layer:
    """Factors of some number, grouped in two ways, with ones in between."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), max_size=5))
    both = []
    for _ in range(2):
        shape, product = [], 1
        for factor in factors:
            product *= factor
            if draw(st.booleans()):
                shape.append(product)
                product = 1
        both.append((*shape, product))
    return reshape_layer("r", source("x", *both[0]), shape=both[1])


@given(reshapes(), st.data())
@settings(max_examples=60)
def test_a_reshape_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    x = leaf(random(2, *layer.input_shapes[0]))
    parts = data.draw(partitions(layer.region, operator_of(layer).cuts(layer)))
    assert_parts_equal([layer], {"r": parts}, x.reshape(2, *layer.shape), {"x": x})
    for part in parts:
        (read,) = operator_of(layer).reads(layer, part)
        assert read.n_elements == part.n_elements, "a cut at its unit reads its own"


@given(reshapes(), st.data())
@settings(max_examples=60)
def test_any_other_region_of_a_reshape_is_right_too(layer: Layer, data: st.DataObject) -> None:
    bounds = [
        sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
        for n in layer.shape
    ]
    part = Region(tuple((low, high + 1) for low, high in bounds))
    x = random(1, *layer.input_shapes[0])
    (read,) = operator_of(layer).reads(layer, part)
    tile = x[(slice(None), *read.slices)]
    value = operator_of(layer).compute(Call(layer, part, [tile], {}, Step()))
    whole = x.reshape(1, *layer.shape)
    assert torch.equal(value, whole[(slice(None), *part.slices)])


def test_blocks_are_the_finest() -> None:
    assert blocks((16, 5, 5, 3), (400, 3)) == [
        Block(before=(0, 1, 2), after=(0,)),
        Block(before=(3,), after=(1,)),
    ]
    assert blocks((6, 1, 4), (1, 2, 3, 4)) == [
        Block(before=(0,), after=(1, 2)),
        Block(before=(2,), after=(3,)),
    ]
    assert blocks((), (1, 1)) == []
    layer = reshape_layer("r", source("x", 16, 5, 5, 3), shape=(400, 3))
    assert operator_of(layer).cuts(layer) == ((0, 25), (1, 1))
    layer = reshape_layer("r", source("x", 4, 6), shape=(8, 3))
    assert operator_of(layer).cuts(layer) == ((0, 2),)
    with pytest.raises(GraphError, match="they have 6 and 8 elements"):
        blocks((6,), (2, 4))


@given(shapes, st.data())
@settings(max_examples=50)
def test_a_permutation_in_parts_is_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    dims = tuple(data.draw(st.permutations(range(len(shape)))))
    layer = layer_of("permute", tuple(shape[dim] for dim in dims), shape, dims=dims)
    x = leaf(random(2, *shape))
    expected = x.permute(0, *(dim + 1 for dim in dims))
    check(data, layer, expected, {"x": x}, tight=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.data())
@settings(max_examples=50)
def test_a_slice_in_parts_is_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    starts = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    steps = data.draw(st.tuples(*[st.integers(1, 3)] * len(shape)))
    ranges = [
        range(start, data.draw(st.integers(start + 1, n)), step)
        for start, step, n in zip(starts, steps, shape, strict=True)
    ]
    layer = layer_of("slice", tuple(map(len, ranges)), shape, starts=starts, steps=steps)
    x = leaf(random(2, *shape))
    index = (slice(None), *(slice(r.start, r.stop, r.step) for r in ranges))
    check(data, layer, x[index], {"x": x}, tight=True)


@given(shapes, st.data())
@settings(max_examples=50)
def test_a_padded_layer_in_parts_is_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    borders = [st.tuples(*[st.integers(0, 3)] * len(shape))] * 2
    before, after = (data.draw(border) for border in borders)
    padded = tuple(b + n + a for b, n, a in zip(before, shape, after, strict=True))
    layer = layer_of("pad", padded, shape, before=before, after=after, value=2.5)
    x = leaf(random(2, *shape))
    pads: list[int] = []
    for pair in zip(before, after, strict=True):
        pads = [*pair, *pads]
    check(data, layer, functional.pad(x, pads, value=2.5), {"x": x})


@given(shapes, st.data())
@settings(max_examples=50)
def test_an_expansion_in_parts_is_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    ones = tuple(data.draw(st.sampled_from([1, n])) for n in shape)
    x = leaf(random(2, *ones))
    check(data, layer_of("expand", shape, ones), x.expand(2, *shape), {"x": x})


@given(shapes, st.integers(1, 3), st.data())
@settings(max_examples=50)
def test_joined_layers_in_parts_are_the_whole(
    shape: tuple[int, ...], n_sources: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    inputs, sources = {}, []
    for index in range(n_sources):
        extents = list(shape)
        extents[dim] = data.draw(st.integers(1, 4))
        inputs[f"x{index}"] = leaf(random(2, *extents, seed=index))
        sources.append(source(f"x{index}", *extents))
    expected = torch.cat(list(inputs.values()), dim + 1)
    check(data, cat_layer("j", sources, dim=dim), expected, inputs)


@given(st.data())
@settings(max_examples=40)
def test_a_token_and_positions_are_added_to_every_sample(data: st.DataObject) -> None:
    """As in vision transformers: parameters are layers with a batch of one."""
    has_batch = data.draw(st.booleans())
    batch = (1,) if has_batch else ()
    token, positions = leaf(random(*batch, 1, 5)), leaf(random(*batch, 4, 5, seed=1))
    scale = leaf(random(5, seed=2))
    tensors = {"token": token, "positions": positions, "scale": scale}
    parameters = [
        Layer(
            name=f"{name}.layer",
            kind="parameter",
            shape=tuple(value.shape[int(has_batch and name != "scale") :]),
            tensors={"value": TensorUse(name=name, shape=tuple(value.shape))},
        )
        for name, value in tensors.items()
    ]
    x = leaf(random(3, 3, 5, seed=3))
    cat = cat_layer("cat", [parameters[0], source("x", 3, 5)], dim=0)
    both = call_of("aten.add.Tensor", (4, 5), (4, 5), (4, 5))
    both = msgspec.structs.replace(both, name="both", inputs=("cat", "positions.layer"))
    added = call_of("aten.add.Tensor", (4, 5), (4, 5), (5,))
    added = msgspec.structs.replace(added, name="added", inputs=("both", "scale.layer"))
    layers = [*parameters, cat, both, added]
    expected = torch.cat([token.view(1, 1, 5).expand(3, 1, 5), x], 1)
    check(data, layers, expected + positions + scale, {"x": x}, tensors)
    graph = composite_of(layers, {"x": x})
    assert joined(graph) == {layer.name for layer in parameters}


@given(shapes, st.sampled_from(["add", "mul", "div"]), st.data())
@settings(max_examples=40)
def test_pointwise_functions_broadcast_as_torch_does(
    shape: tuple[int, ...], function: str, data: st.DataObject
) -> None:
    n_missing = data.draw(st.integers(0, len(shape)))
    other = tuple(data.draw(st.sampled_from([1, n])) for n in shape[n_missing:])
    inputs = {"x": leaf(random(3, *shape)), "y": leaf(random(3, *other, seed=1).abs())}
    layer = call_of(f"aten.{function}.Tensor", shape, shape, other)
    x, y = inputs["x"], inputs["y"].view(3, *(1,) * n_missing, *other)
    check(data, layer, {"add": x + y, "mul": x * y, "div": x / y}[function], inputs)


@given(shapes.filter(lambda shape: len(shape) < 4), st.data())
@settings(max_examples=50)
def test_an_embedding_in_parts_is_the_whole(
    positions: tuple[int, ...], data: st.DataObject
) -> None:
    padding = data.draw(st.sampled_from([None, 0, 6]))
    generator = torch.Generator().manual_seed(math.prod(positions))
    indices = torch.randint(7, (3, *positions), generator=generator)
    weight = leaf(random(7, 5))
    words = {"weight": (7, 5)}
    layer = layer_of("embedding", (*positions, 5), positions, words=words, padding=padding)
    expected = functional.embedding(indices, weight, padding)
    check(data, layer, expected, {"x": indices}, {"weight": weight})
