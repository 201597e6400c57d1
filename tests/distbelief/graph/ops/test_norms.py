from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Step, joined
from distbelief.graph.ops import norms as norms_module
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.ops.reductions import reduction_layer, softmax_layers
from tests.distbelief.graph.ops.comparison import (
    check,
    close,
    composite_of,
    leaf,
    parts_of,
    random,
    randomised,
    source,
    uses_of,
    values_of,
)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
TRAINING = Step(training=True)


def reduced(function: str, x: torch.Tensor, y: torch.Tensor, over: Sequence[int]) -> torch.Tensor:
    """The reductions in torch; y is the statistic that some need."""
    match function:
        case "sum" | "mean":
            summands = x
        case "mean_square":
            summands = x**2
        case "variance":
            summands = (x - y) ** 2
        case _:
            summands = (x - y).exp()
    total = summands.sum(list(over), keepdim=True) if over else summands
    if function in {"sum", "sum_exp"}:
        return total
    return total * total.numel() / summands.numel()


@given(shapes, st.data())
@settings(max_examples=70)
def test_a_reduction_in_parts_is_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    functions = ["sum", "mean", "mean_square", "variance", "sum_exp"]
    function = data.draw(st.sampled_from(functions))
    keep, batch = data.draw(st.booleans()), data.draw(st.booleans())
    statistic = tuple(1 if dim in dims else n for dim, n in enumerate(shape))
    x, y = leaf(random(3, *shape)), leaf(random(1, *statistic, seed=1))
    inputs = {"x": x, "y": y} if function in {"variance", "sum_exp"} else {"x": x}
    layer = reduction_layer(
        "r",
        [source(name, *value.shape[1:]) for name, value in inputs.items()],
        function=function,
        dims=dims,
        keep=keep,
        batch=batch,
    )
    over = [0] * batch + [dim + 1 for dim in dims]
    expected = reduced(function, x, y, over)
    if not keep:
        expected = expected.squeeze([dim + 1 for dim in dims])
    check(data, layer, expected, inputs)


@given(shapes, st.data())
@settings(max_examples=40)
def test_a_maximum_without_a_gradient_in_parts_is_the_whole(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    every = st.sampled_from(range(len(shape)))
    dims = data.draw(st.lists(every, unique=True, min_size=1))
    x = leaf(random(3, *shape))
    layer = reduction_layer("m", [source("x", *shape)], function="maximum", dims=dims, keep=False)
    value = values_of([layer], {"x": x}, parts={"m": data.draw(parts_of(layer))})["m"]
    assert not value.requires_grad
    close(value, x.amax([dim + 1 for dim in dims]))


@given(shapes, st.data())
@settings(max_examples=40)
def test_a_softmax_in_parts_is_the_whole(shape: tuple[int, ...], data: st.DataObject) -> None:
    log = data.draw(st.booleans())
    dim = data.draw(st.integers(0, len(shape) - 1))
    x = leaf(random(2, *shape) * 30)
    layers = softmax_layers("s", source("x", *shape), dim=dim, log=log)
    function = functional.log_softmax if log else functional.softmax
    check(data, layers, function(x, dim + 1), {"x": x})


@st.composite
def norms(draw: st.DrawFn) -> tuple[nn.Module, Sequence[Layer], tuple[int, ...]]:
    """A module without running statistics, its layers, and its input's shape."""
    n_channels = 2 * draw(st.integers(1, 3))
    space = tuple(draw(st.lists(st.integers(2, 4), min_size=2, max_size=2)))
    shape = (n_channels, *space)
    x = source("x", *shape)
    affine = draw(st.booleans())
    n_dims = draw(st.integers(1, 3))
    module: nn.Module
    build: Callable[..., Sequence[Layer]]
    options: dict[str, Any] = {"epsilon": 1e-5}
    match draw(st.sampled_from(["layer", "rms", "group", "instance", "batch"])):
        case "layer":
            module = nn.LayerNorm([*shape[3 - n_dims :]], elementwise_affine=affine)
            build, options["over"] = norms_module.norm_layers, range(3 - n_dims, 3)
        case "rms":
            module = nn.RMSNorm([*shape[3 - n_dims :]], 1e-6, elementwise_affine=affine)
            build = norms_module.norm_layers
            options = {"over": range(3 - n_dims, 3), "epsilon": 1e-6, "centred": False}
        case "group":
            n_groups = draw(st.sampled_from([1, 2, n_channels]))
            module = nn.GroupNorm(n_groups, n_channels, affine=affine)
            build, options["n_groups"] = norms_module.group_norm_layers, n_groups
        case "instance":
            module = nn.InstanceNorm2d(n_channels, affine=affine)
            build = norms_module.norm_layers
            options |= {"over": (1, 2), "dims": (0,)}
        case _:
            module = nn.BatchNorm2d(n_channels, affine=affine, track_running_stats=False)
            build, options["momentum"] = norms_module.batch_norm_layers, 0.1
    layers = build("n", x, tensors=uses_of(module), **options)
    return randomised(module), layers, shape


@given(norms(), st.data())
@settings(max_examples=80)
def test_a_norm_in_parts_is_the_whole(
    case: tuple[nn.Module, Sequence[Layer], tuple[int, ...]], data: st.DataObject
) -> None:
    training = data.draw(st.booleans())
    module, layers, shape = case
    module.train(training)
    x = leaf(random(3, *shape) + 5)
    tensors = dict(module.named_parameters())
    check(data, layers, module(x), {"x": x}, tensors, step=Step(training=training))


@given(st.sampled_from([(4,), (3, 5), (3, 2, 4)]), st.data())
@settings(max_examples=40)
def test_batch_norm_in_parts_leaves_the_running_statistics_that_torch_has(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    training = data.draw(st.booleans())
    kind = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
    module = randomised(kind(shape[0], momentum=0.3)).train(training)
    layers = norms_module.batch_norm_layers(
        "bn", source("x", *shape), tensors=uses_of(module), epsilon=1e-5, momentum=0.3
    )
    x = leaf(random(4, *shape) * 3 + 7)
    state = {
        **dict(module.named_parameters()),
        **{name: tensor.clone() for name, tensor in module.named_buffers()},
    }
    values = check(data, layers, module(x), {"x": x}, state, step=Step(training=training))
    graph = composite_of(layers, {"x": x})
    replaced = running_averages(graph)
    assert sorted(replaced) == ["running_mean", "running_var"]
    for tensor, name in replaced.items():
        close(values[name], module.get_buffer(tensor).unsqueeze(0))
    assert joined(graph) == {layer.name for layer in layers[:-1]}


@given(st.data())
@settings(max_examples=20)
def test_a_frozen_batch_norm_uses_its_running_statistics_in_training(data: st.DataObject) -> None:
    module = randomised(nn.BatchNorm2d(3)).eval()
    layers = norms_module.batch_norm_layers(
        "bn", source("x", 3, 4, 2), tensors=uses_of(module), epsilon=1e-5, momentum=0.1, frozen=True
    )
    x = leaf(random(2, 3, 4, 2))
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    check(data, layers, module(x), {"x": x}, state, step=TRAINING)


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_of_one_number_is_as_far_from_its_mean_as_can_be(*, training: bool) -> None:
    layers = norms_module.batch_norm_layers(
        "bn", source("x", 3), tensors={}, epsilon=1e-5, momentum=0.1
    )
    x, step = random(1, 3), Step(training=training)
    close(values_of(layers, {"x": x}, step=step)["bn"], torch.zeros(1, 3))


def test_a_variance_of_large_numbers_is_not_the_difference_of_larger_ones() -> None:
    x = 1e8 + torch.arange(8, dtype=torch.float64).view(4, 1, 2)
    layers = norms_module.batch_norm_layers(
        "bn", source("x", 1, 2), tensors={}, epsilon=0.0, momentum=0.1
    )
    variance = values_of(layers, {"x": x}, step=TRAINING)["bn.variance"]
    assert variance.item() == x.var().item() == 6.0
