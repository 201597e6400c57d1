from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional

from distbelief.graph.graph import Layer
from distbelief.graph.ops.windows import L2Pool2d, Window, adaptive_pool_layers, gaussian
from tests.distbelief.graph.ops.comparison import (
    assert_reads_are_tight,
    check,
    layer_of,
    leaf,
    random,
    source,
)


MAXIMA = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
AVERAGES = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


@st.composite
def pools(draw: st.DrawFn, kind: str, *, dims: int = 2) -> Layer:
    n_dims = draw(st.integers(1, dims)) if kind != "l2_pool" else 2
    numbers = [st.integers(1, 4)] * n_dims
    size, stride = draw(st.tuples(*numbers)), draw(st.tuples(*numbers))
    padding = tuple(draw(st.integers(0, n // 2)) for n in size)
    options: dict[str, Any] = {"size": size, "stride": stride, "padding": padding}
    dilation = (1,) * n_dims
    ceil = kind != "l2_pool" and draw(st.booleans())
    match kind:
        case "max_pool":
            dilation = draw(st.tuples(*[st.integers(1, 2)] * n_dims))
            options |= {"dilation": dilation, "ceil": ceil}
        case "average_pool":
            options |= {
                "ceil": ceil,
                "count_include_pad": draw(st.booleans()),
                "divisor": draw(st.sampled_from([None, 3])) if n_dims > 1 else None,
            }
        case _:
            options |= {"epsilon": 0.25, "gaussian": draw(st.booleans())}
    extents = draw(st.tuples(*[st.integers(1, 9)] * n_dims))
    shape = []
    for dim, extent in enumerate(extents):
        window = Window(
            size=size[dim],
            stride=stride[dim],
            padding=padding[dim],
            dilation=dilation[dim],
            ceil=ceil,
        )
        assume(window.n_outputs(extent) > 0)
        shape.append(window.n_outputs(extent))
    n_maps = draw(st.integers(1, 3))
    return layer_of(kind, (n_maps, *shape), (n_maps, *extents), **options)


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


@given(pools("max_pool"), st.data())
@settings(max_examples=70)
def test_max_pooling_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    ties = data.draw(st.booleans())
    x = random(2, *layer.input_shapes[0])
    x = leaf(x.round() if ties else x)  # of equals the first one has the gradient
    expected = pool(MAXIMA, layer, x, dilation=layer.integers("dilation"))
    assume(bool(expected.isfinite().all()))  # no window of padding alone
    check(data, layer, expected, {"x": x})


@given(pools("average_pool"), st.data())
@settings(max_examples=70)
def test_average_pooling_in_parts_is_the_whole(layer: Layer, data: st.DataObject) -> None:
    x = leaf(random(2, *layer.input_shapes[0]))
    counted: dict[str, object] = {"count_include_pad": bool(layer.options["count_include_pad"])}
    if len(layer.shape) > 2:
        counted["divisor_override"] = layer.options["divisor"]
    check(data, layer, pool(AVERAGES, layer, x, **counted), {"x": x}, tight=True)


@given(pools("l2_pool"), st.data())
@settings(max_examples=40)
def test_l2_pooling_in_parts_is_the_module(layer: Layer, data: st.DataObject) -> None:
    x = leaf(random(2, *layer.input_shapes[0]))
    rows, columns = layer.integers("size")
    module = L2Pool2d(
        (rows, columns),
        stride=layer.integers("stride"),  # type: ignore[arg-type]
        padding=layer.integers("padding"),  # type: ignore[arg-type]
        epsilon=0.25,
        gaussian=bool(layer.options["gaussian"]),
    )
    check(data, layer, module(x), {"x": x})


def test_l2_pooling_is_the_root_of_the_sum_of_squares() -> None:
    x = random(2, 3, 6, 6)
    plain = L2Pool2d(2)(x)
    torch.testing.assert_close(plain, functional.lp_pool2d(x, 2.0, 2))
    along = torch.tensor(gaussian(3), dtype=torch.float64)
    weights = torch.outer(along, along)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    weighted = L2Pool2d(3, stride=1, gaussian=True)(x)
    expected = (weights * x[:, :, 1:4, 2:5] ** 2).sum((2, 3)).sqrt()
    torch.testing.assert_close(weighted[:, :, 1, 2], expected)
    assert "kernel_size=(2, 2), stride=(2, 2)" in repr(L2Pool2d(2))


@pytest.mark.parametrize("weighted", [False, True])
def test_l2_pooling_of_silent_units_has_gradient_zero(*, weighted: bool) -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[..., 2:] = 3.0
    x.requires_grad_()
    L2Pool2d(2, gaussian=weighted)(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[..., :2], torch.zeros(1, 1, 2, 2))
    assert bool((x.grad[..., 2:] > 0).all())


@given(st.integers(1, 2), st.data())
@settings(max_examples=60)
def test_adaptive_pooling_in_parts_is_the_whole(n_dims: int, data: st.DataObject) -> None:
    maximum, ties = data.draw(st.booleans()), data.draw(st.booleans())
    extents = data.draw(st.tuples(*[st.integers(1, 7)] * n_dims))
    sizes = data.draw(st.tuples(*[st.integers(1, 7)] * n_dims))
    shape = (2, *extents)
    x = random(2, *shape)
    x = leaf(x.round() if ties else x)
    (layer,) = adaptive_pool_layers("pool", source("x", *shape), sizes=sizes, maximum=maximum)
    functions: dict[tuple[int, bool], Callable[..., torch.Tensor]] = {
        (1, False): functional.adaptive_avg_pool1d,
        (1, True): functional.adaptive_max_pool1d,
        (2, False): functional.adaptive_avg_pool2d,
        (2, True): functional.adaptive_max_pool2d,
    }
    expected = functions[n_dims, maximum](x, sizes)
    check(data, layer, expected, {"x": x})
    if not maximum and layer.kind != "reduction":
        assert_reads_are_tight(layer, layer.region.cut(1, [1.0, 1.0])[1], {"x": x})


def test_a_mean_over_all_of_space_has_partial_sums() -> None:
    (layer,) = adaptive_pool_layers("pool", source("x", 4, 6, 6), sizes=(1, 1), maximum=False)
    assert layer.kind == "reduction"
    (layer,) = adaptive_pool_layers("pool", source("x", 4, 6, 6), sizes=(3, 2), maximum=False)
    assert layer.kind == "average_pool"
