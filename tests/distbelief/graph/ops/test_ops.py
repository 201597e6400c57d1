from typing import ClassVar, final

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from typing_extensions import override

from distbelief.graph import ops
from distbelief.graph.graph import GraphError, Layer, Option
from distbelief.graph.operator import OPERATORS, Call, Operator, Work, operator_of
from distbelief.graph.ops import norms
from distbelief.graph.ops.linear import product_layer
from distbelief.graph.ops.loss_layers import cross_entropy_layers, elementwise_loss_layer
from distbelief.graph.ops.reductions import softmax_layers
from distbelief.graph.region import Region, Shape
from tests.distbelief.graph.ops.comparison import (
    attention_layer,
    call_of,
    cat_layer,
    check,
    graph_of,
    layer_of,
    leaf,
    partitions,
    random,
    source,
    uses_of,
)
from tests.distbelief.graph.reference import Partials, evaluate


IMAGE: Shape = (4, 6, 8)
WORDS: dict[str, Shape] = {"weight": (4,), "bias": ()}


def reading(
    kind: str,
    shape: Shape,
    *,
    name: str = "",
    words: dict[str, Shape] | None = None,
    **options: Option,
) -> Layer:
    return layer_of(kind, shape, IMAGE, name=name, words=words, **options)


def examples() -> list[Layer]:
    """At least one layer of every operator."""
    x, labels = source("x", *IMAGE), source("t", 6, 8, is_integer=True)
    batch_norm = nn.BatchNorm2d(4)
    twos, ones, zeros = (2, 2), (1, 1), (0, 0)
    return [
        reading("linear", (4, 6, 3), words={"weight": (3, 8), "bias": (3,)}),
        reading(
            *("convolution", (6, 5, 7)), words={"weight": (6, 2, 2, 2), "bias": (6,)},
            groups=2, stride=ones, padding=zeros, extra=zeros, dilation=ones,
        ),
        reading(
            *("transposed_convolution", (6, 5, 7)), words={"weight": (4, 3, 2, 2), "bias": (6,)},
            groups=2, size=twos, stride=ones, padding=zeros, dilation=ones,
        ),
        reading(
            *("locally_connected", (3, 3, 4)), words={"weight": (3, 4, 3, 16), "bias": (3, 4, 3)},
            size=twos, stride=twos, padding=zeros,
        ),
        layer_of("embedding", (5, 7), (5,), words={"weight": (9, 7)}, padding=None),
        layer_of("parameter", (2, 3), words={"value": (1, 2, 3)}),
        reading(
            *("pool", (4, 3, 4)), name="max_pool", function="max",
            size=twos, stride=twos, padding=zeros, dilation=ones, ceil=False,
        ),
        reading(
            *("pool", (4, 3, 4)), name="average_pool", function="average",
            size=twos, stride=twos, padding=zeros, count_include_pad=True, divisor=None,
        ),
        reading(
            *("pool", (4, 3, 4)), name="l2_pool", function="l2",
            size=twos, stride=twos, padding=zeros, epsilon=0.0,
        ),
        reading("resize", (4, 9, 12), operation="upsample_bilinear2d", align=False, scales=""),
        reading("local_contrast", IMAGE, size=3, epsilon=0.1),
        *norms.batch_norm_layers("bn", x, tensors=uses_of(batch_norm), epsilon=1e-5, momentum=0.1),
        *norms.group_norm_layers("gn", x, n_groups=2, tensors={}, epsilon=1e-5),
        *softmax_layers("softmax", x, dim=0),
        attention_layer("attention", [source(name, 2, 5, 4) for name in "qkv"], causal=True),
        layer_of("permute", (5, 2, 4), (2, 5, 4), dims=(1, 0, 2)),
        reading("dropout", IMAGE, probability=0.5, n_shared=2),
        cat_layer("cat", [x, x], dim=1),
        reading("slice", (2, 2, 2), starts=(1, 0, 2), steps=(1, 3, 2)),
        reading("pad", (4, 8, 8), before=(0, 1, 0), after=(0, 1, 0), value=0.0),
        call_of("aten.relu.default", IMAGE, IMAGE),
        layer_of("expand", (4, 5), (4, 1)),
        product_layer("product", source("p", 2, 3, 4), source("q", 2, 4, 5)),
        call_of("aten.where.self", IMAGE, (6, 1), IMAGE, (4, 6, 8)),
        elementwise_loss_layer("logistic", (x, labels), function="mse_loss"),
        *cross_entropy_layers("cross_entropy", (x, labels)),
        layer_of("gates", (5, 3, 4), (5, 6), words={f"weight{i}": (12, 6) for i in range(3)}),
        layer_of(
            *("recurrent", (2, 4), (5, 4, 4), (2, 4), (2, 4)), cell="lstm", step=2,
            words={f"{word}{i}": (16, *n) for i in range(4) for word, n in WORDS.items()},
        ),
        layer_of("cat", (3, 4), (2, 4), (2, 4), (2, 4), name="rows", dim=0, each=1),
        layer_of("routing", (5, 4), (5, 2), (5, 2)),
        layer_of("experts", (5, 6), (5, 4), (5, 6), (5, 2), words={"w": (4, 6, 6)}, module="m"),
        reading("call", (7,), name="whole", words={"w": (3, 3)}, module="m"),
        reading(
            "call",
            (7,),
            operation="aten.cumsum.default",
            arguments='{"arguments": [{"input": 0, "batch": 0, "before": 0, "after": 0}, 1], '
            '"keywords": {}}',
            batch=0,
        ),
    ]  # fmt: skip


EXAMPLES = examples()


def test_every_operator_has_an_example() -> None:
    _ = ops.views  # importing them registers them
    assert {layer.kind for layer in EXAMPLES} == OPERATORS.keys() - {Pairs.name}


@pytest.mark.parametrize("layer", EXAMPLES, ids=lambda layer: layer.name)
@given(data=st.data())
@settings(max_examples=4)
def test_what_a_part_reads_and_uses_lies_inside_and_prices_add_up(
    layer: Layer, data: st.DataObject
) -> None:
    kind = operator_of(layer)
    parts = data.draw(partitions(layer.region, kind.cuts(layer)))
    wholes = [Region.of(*shape) for shape in layer.input_shapes]
    for part in parts:
        reads = kind.reads(layer, part)
        assert all(read in whole for read, whole in zip(reads, wholes, strict=True))
        for word, use in kind.uses(layer, part).items():
            assert use in Region.of(*layer.tensors[word].shape)
    works = [kind.work(layer, part) for part in parts if part.n_elements]
    whole = kind.work(layer, layer.region)
    # Halos are computed or read twice; what causal parts do without is an estimate.
    assert sum(work.forward for work in works) >= 0.5 * whole.forward
    assert all(work.forward <= whole.forward for work in works)
    assert all(work.backward <= whole.backward for work in works)
    assert all(0 <= work.n_elements <= whole.n_elements for work in works)


@pytest.mark.parametrize("layer", EXAMPLES, ids=lambda layer: layer.name)
def test_even_an_empty_region_reads_what_lies_inside(layer: Layer) -> None:
    kind = operator_of(layer)
    wholes = [Region.of(*shape) for shape in layer.input_shapes]
    for cut in kind.cuts(layer):
        nothing = layer.region.replaced(cut.dim, (0, 0))
        reads = kind.reads(layer, nothing)
        assert all(read in whole for read, whole in zip(reads, wholes, strict=True))


@pytest.mark.parametrize("layer", EXAMPLES, ids=lambda layer: layer.name)
def test_a_partial_sum_reads_and_writes_what_lies_inside(layer: Layer) -> None:
    partial = operator_of(layer).partial
    if partial is None:
        return
    whole = Region.of(*layer.input_shapes[0])
    assert partial.writes(layer, whole) == layer.region
    for cut in partial.cuts(layer):
        for part in whole.cut(cut.dim, [1.0, 1.0], unit=cut.unit):
            assert partial.writes(layer, part) in layer.region
            reads = partial.reads(layer, part)
            assert reads[0] == part
            for read, shape in zip(reads, layer.input_shapes, strict=True):
                assert read in Region.of(*shape)


@final
class Pairs(Operator):
    """A user's own operator: sums of pairs of neighbors."""

    name: ClassVar[str] = "test.pairs"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        ((start, stop),) = output
        return (Region(((2 * start, 2 * stop),)),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        return Work(forward=float(output.n_elements))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return call.inputs[0][:, ::2] + call.inputs[0][:, 1::2]


PAIRS = layer_of("test.pairs", (3,), (6,), name="pairs")


@given(st.data())
@settings(max_examples=10)
def test_a_users_own_operator_is_split_like_the_others(data: st.DataObject) -> None:
    x = leaf(random(2, 6))
    check(data, PAIRS, x[:, ::2] + x[:, 1::2], {"x": x})


def test_a_name_that_another_operator_has_is_refused() -> None:
    with pytest.raises(GraphError, match=r"there is an operator .* already"):

        @final
        class Other(Operator):
            name: ClassVar[str] = "linear"
            reads = Pairs.reads
            work = Pairs.work
            compute = Pairs.compute

    assert type(operator_of(EXAMPLES[0])).__name__ == "Linear"
    with pytest.raises(GraphError, match="unknown operator 'nowhere'"):
        operator_of(msgspec.structs.replace(PAIRS, kind="nowhere"))


def test_a_graph_computed_with_what_does_not_fit_says_so() -> None:
    graph, x = graph_of(PAIRS), torch.zeros(2, 6)
    half = Region(((0, 2),))
    whole = Region.of(6)
    for message, inputs, parts in [
        ("input 'x' is missing", {}, None),
        ("do not tile 'pairs'", {"x": x}, [half]),
        ("do not tile the first input of 'pairs'", {"x": x}, Partials((half,))),
        ("have no partial outputs", {"x": x}, Partials((whole,))),
        (r"with shape \[2\], not \[3\]", {"x": x[:, :4]}, None),
    ]:
        with pytest.raises(GraphError, match=message):
            evaluate(graph, inputs, {}, parts=None if parts is None else {"pairs": parts})
