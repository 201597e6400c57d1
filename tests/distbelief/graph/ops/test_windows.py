from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import nn
from torch.nn import functional

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import Layer
from distbelief.graph.operator import operator_of
from distbelief.graph.ops.windows import L2Pool2d, Weights, Window, gaussian, window_sums
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import (
    check,
    inputs_of,
    layer_of,
    leaf,
    random,
    tensors_of,
)


# --- index arithmetic ---

windows = st.builds(
    Window,
    size=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    padding=st.integers(0, 4),
    ceil=st.booleans(),
)


@st.composite
def parts(draw: st.DrawFn, *, ceil: bool = True) -> tuple[Window, int, tuple[int, int]]:
    """Return a window, the extent of its input, and some of its outputs."""
    window, extent = draw(windows), draw(st.integers(1, 20))
    assume(ceil or not window.ceil)
    n_outputs = window.n_outputs(extent)
    assume(n_outputs > 0)
    start = draw(st.integers(0, n_outputs - 1))
    return window, extent, (start, draw(st.integers(start + 1, n_outputs)))


def traced(window: Window, output: int, extent: int) -> set[int]:
    first = output * window.stride - window.padding
    return {
        first + k * window.dilation
        for k in range(window.size)
        if 0 <= first + k * window.dilation < extent
    }


@given(parts())
def test_reads_is_the_hull_of_what_every_output_reads(
    part: tuple[Window, int, tuple[int, int]],
) -> None:
    window, extent, (start, stop) = part
    inputs = set().union(*(traced(window, o, extent) for o in range(start, stop)))
    low, high = window.reads((start, stop), extent=extent)
    if inputs:
        assert low <= min(inputs)
        assert high >= max(inputs) + 1
        # Nothing beyond the first and last window is read.
        assert low == max(0, start * window.stride - window.padding)
    assert 0 <= low <= high <= extent


@given(parts(ceil=False))
def test_a_padded_tile_gives_exactly_these_outputs(
    drawn: tuple[Window, int, tuple[int, int]],
) -> None:
    window, extent, (start, stop) = drawn
    values = torch.arange(1.0, extent + 1).view(1, 1, -1)
    weight = torch.arange(1.0, window.size + 1).view(1, 1, -1) ** 2
    whole = functional.conv1d(
        values, weight, stride=window.stride, padding=window.padding, dilation=window.dilation
    )
    assert whole.shape[-1] == window.n_outputs(extent)
    low, high = window.reads((start, stop), extent=extent)
    tile = functional.pad(values[..., low:high], window.pads((start, stop), extent=extent))
    part = functional.conv1d(tile, weight, stride=window.stride, dilation=window.dilation)
    assert torch.equal(part, whole[..., start:stop])


@given(windows, st.integers(1, 20))
def test_outputs_are_counted_as_torch_counts_them(window: Window, extent: int) -> None:
    assume(window.padding <= window.size // 2)  # torch allows no more in pooling
    assume(extent + 2 * window.padding >= window.span)
    pooled = functional.max_pool1d(
        torch.zeros(1, 1, extent),
        window.size,
        stride=window.stride,
        padding=window.padding,
        dilation=window.dilation,
        ceil_mode=window.ceil,
    )
    assert pooled.shape[-1] == window.n_outputs(extent)


def test_nothing_is_read_for_no_output() -> None:
    assert Window(size=3).reads((2, 2), extent=9) == (0, 0)
    assert Window(size=3).pads((2, 2), extent=9) == (0, 0)
    assert Window(size=3).n_outputs(2) == 0


@pytest.mark.parametrize(
    ("word", "value"), [("size", 0), ("stride", 0), ("dilation", 0), ("padding", -1)]
)
def test_a_window_without_extent_is_refused(word: str, value: int) -> None:
    arguments: dict[str, Any] = {"size": 1, word: value}
    with pytest.raises(ValueError, match=rf"{word} must be .*got {value}"):
        Window(**arguments)


# --- window sums ---

WEIGHTS = st.lists(st.floats(0.125, 2.0), min_size=1, max_size=4).map(tuple)


@given(
    rows=WEIGHTS,
    columns=WEIGHTS,
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    extents=st.tuples(st.integers(4, 9), st.integers(4, 9)),
)
def test_sums_and_gradients_are_those_of_a_convolution(
    rows: Weights, columns: Weights, stride: tuple[int, int], extents: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 2, *extents, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    kernel = torch.outer(*(torch.tensor(w, dtype=x.dtype) for w in (rows, columns)))
    maps = functional.conv2d(x.flatten(0, 1)[:, None], kernel[None, None], stride=stride)
    wanted = maps.view(3, 2, *maps.shape[2:])
    found = window_sums(x, rows=rows, columns=columns, stride=stride)
    torch.testing.assert_close(found, wanted)
    seed = torch.rand(found.shape, generator=generator, dtype=x.dtype)
    (gradient,) = torch.autograd.grad(found, x, seed)
    (expected,) = torch.autograd.grad(wanted, x, seed)
    torch.testing.assert_close(gradient, expected)


def test_a_window_has_the_same_bits_wherever_it_lies() -> None:
    x = torch.rand(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    weights = gaussian(5)
    whole = window_sums(x, rows=weights, columns=weights)
    part = window_sums(x[:, :, 3:12, 6:19], rows=weights, columns=weights)
    assert torch.equal(whole[:, :, 3:8, 6:15], part)


def test_weights_sum_to_one() -> None:
    assert sum(gaussian(5)) == pytest.approx(1.0)
    assert gaussian(1) == (1.0,)


def test_a_window_that_does_not_fit_is_refused() -> None:
    ones = (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="a window of 3 does not fit into 2 places"):
        window_sums(torch.zeros(1, 2, 4), rows=ones, columns=ones)


# --- operators ---

MAXIMA = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
AVERAGES = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


@st.composite
def layers(draw: st.DrawFn, kind: str) -> Layer:
    """A convolution or a pooling with any window that fits."""
    n_dims = 2 if kind == "l2" else draw(st.integers(1, 2))

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(low, high)] * n_dims))

    size, stride, extents = numbers(1, 4), numbers(1, 4), numbers(1, 9)
    padding = tuple(draw(st.integers(0, n // 2)) for n in size)
    n_in = n_out = draw(st.integers(1, 3))
    options: dict[str, Any] = {"size": size}
    words: dict[str, tuple[int, ...]] = {}
    match kind:
        case "convolution":
            groups = draw(st.sampled_from([1, 1, 2, 3]))
            n_in, n_out = n_in * groups, groups * draw(st.integers(1, 3))
            words = {"weight": (n_out, n_in // groups, *size)}
            words |= draw(st.sampled_from([{}, {"bias": (n_out,)}]))
            padding = numbers(0, 3)
            options = {"groups": groups, "extra": numbers(0, 1), "dilation": numbers(1, 2)}
        case "max":
            options |= {"dilation": numbers(1, 2), "ceil": draw(st.booleans())}
        case "average":
            options |= {
                "ceil": draw(st.booleans()),
                "count_include_pad": draw(st.booleans()),
                "divisor": draw(st.sampled_from([None, 3])) if n_dims > 1 else None,
            }
        case _:
            options |= {"epsilon": 0.25}
    shape = []
    for dim, extent in enumerate(extents):
        window = Window(
            size=size[dim],
            stride=stride[dim],
            padding=padding[dim],
            dilation=options.get("dilation", (1, 1))[dim],
            extra=options.get("extra", (0, 0))[dim],
            ceil=options.get("ceil", False),
        )
        assume(window.n_outputs(extent) > 0)
        shape.append(window.n_outputs(extent))
    options |= {"stride": stride, "padding": padding}
    if kind != "convolution":
        kind, options["function"] = "pool", kind
    return layer_of(kind, (n_out, *shape), (n_in, *extents), words=words, **options)


@given(layers("convolution"), st.data())
@settings(max_examples=75)
def test_a_convolution_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    inputs, tensors = inputs_of(layer), tensors_of(layer)
    pads: list[int] = []
    for padding, extra in zip(layer.integers("padding"), layer.integers("extra"), strict=True):
        pads = [padding, padding + extra, *pads]
    expected = CONVOLUTIONS[len(layer.shape) - 2](
        functional.pad(inputs["x"], pads),
        tensors["weight"],
        tensors.get("bias"),
        stride=layer.integers("stride"),
        dilation=layer.integers("dilation"),
        groups=layer.integer("groups"),
    )
    check(data, layer, expected, inputs, tensors)


TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d)


@given(data=st.data(), n_dims=st.integers(1, 2), is_computed=st.booleans())
@settings(max_examples=75)
def test_a_transposed_convolution_in_parts_is_the_whole(
    *, data: st.DataObject, n_dims: int, is_computed: bool
) -> None:
    """U-Nets and generators: one rank computed all of it."""

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return data.draw(st.tuples(*[st.integers(low, high)] * n_dims))

    size, extents = numbers(1, 4), numbers(1, 6)
    groups = data.draw(st.integers(1, 2))
    n_in, n_out = (groups * data.draw(st.integers(1, 3)) for _ in range(2))
    own: dict[str, Any] = {
        "stride": numbers(1, 4),
        "padding": numbers(0, 2),
        "dilation": numbers(1, 2),
    }
    more = tuple(
        data.draw(st.integers(0, max(s, d) - 1))
        for s, d in zip(own["stride"], own["dilation"], strict=True)
    )
    weight = (n_in, n_out // groups, *size)
    words = {"bias": (n_out,)} | ({} if is_computed else {"weight": weight})

    def expected(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return TRANSPOSED[n_dims - 1](x, w, bias, groups=groups, output_padding=list(more), **own)

    space = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1 + e
        for n, s, p, d, k, e in zip(extents, *own.values(), size, more, strict=True)
    ]
    assume(min(space) > 0)
    shape = (n_out, *space)
    read = [(n_in, *extents), *([weight] if is_computed else [])]
    layer = layer_of(
        "transposed_convolution", shape, *read, words=words, size=size, groups=groups, **own
    )
    inputs, tensors = inputs_of(layer), tensors_of(layer)
    if is_computed:
        inputs["y"] = leaf(random(1, *weight))
    w = inputs["y"][0] if is_computed else tensors["weight"]
    check(data, layer, expected(inputs["x"], w, tensors["bias"]), inputs, tensors)


def pool(
    functions: Sequence[Callable[..., torch.Tensor]],
    layer: Layer,
    x: torch.Tensor,
    **options: object,
) -> torch.Tensor:
    """What torch's function of this layer's dimensions computes."""
    return functions[len(layer.shape) - 2](
        x,
        layer.integers("size"),
        stride=layer.integers("stride"),
        padding=layer.integers("padding"),
        ceil_mode=bool(layer.options["ceil"]),
        **options,
    )


@given(layers("max"), st.data())
@settings(max_examples=70)
def test_max_pooling_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    ties = data.draw(st.booleans())
    x = random(2, *layer.input_shapes[0])
    x = leaf(x.round() if ties else x)  # of equals the first one has the gradient
    expected = pool(MAXIMA, layer, x, dilation=layer.integers("dilation"))
    assume(bool(expected.isfinite().all()))  # no window of padding alone
    check(data, layer, expected, {"x": x})


@given(layers("average"), st.data())
@settings(max_examples=70)
def test_average_pooling_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    inputs = inputs_of(layer)
    counted: dict[str, object] = {"count_include_pad": bool(layer.options["count_include_pad"])}
    if len(layer.shape) > 2:
        counted["divisor_override"] = layer.options["divisor"]
    check(data, layer, pool(AVERAGES, layer, inputs["x"], **counted), inputs, tight=True)


@given(layers("l2"), st.data())
@settings(max_examples=40)
def test_l2_pooling_in_parts_is_the_module(layer: Layer, data: st.DataObject) -> None:
    inputs = inputs_of(layer)
    rows, columns = layer.integers("size")
    module = L2Pool2d(
        (rows, columns),
        stride=layer.integers("stride"),  # type: ignore[arg-type]
        padding=layer.integers("padding"),  # type: ignore[arg-type]
        epsilon=0.25,
    )
    check(data, layer, module(inputs["x"]), inputs)


def test_l2_pooling_is_the_root_of_the_sum_of_squares() -> None:
    x = random(2, 3, 6, 6)
    plain = L2Pool2d(2)(x)
    torch.testing.assert_close(plain, functional.lp_pool2d(x, 2.0, 2))
    assert "kernel_size=(2, 2), stride=(2, 2)" in repr(L2Pool2d(2))


def test_l2_pooling_of_silent_units_has_gradient_zero() -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[..., 2:] = 3.0
    x.requires_grad_()
    L2Pool2d(2)(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[..., :2], torch.zeros(1, 1, 2, 2))
    assert bool((x.grad[..., 2:] > 0).all())


# --- resizing ---


def test_half_of_a_resized_image_reads_half_and_a_halo() -> None:
    """It read all of the image, so that only channels could be split."""
    graph = capture(nn.Upsample(scale_factor=2, mode="bilinear"), [InputSpec(shape=(2, 16, 16))])
    layer = graph[graph.outputs[0]]
    (read,) = operator_of(layer).reads(layer, Region(((0, 2), (0, 16), (0, 32))))
    assert read == Region(((0, 2), (0, 9), (0, 16)))
    assert [cut.dim for cut in operator_of(layer).cuts(layer)] == [0, 1, 2]
