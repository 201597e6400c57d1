import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import GraphError, LayerGraph
from tests.distbelief.graph.test_tracing import Branching, Custom
from tests.distbelief.graph.zoo.catalogue import Applied, Case
from tests.distbelief.graph.zoo.comparison import assert_same


def applying(
    function: Callable[[torch.Tensor, nn.Module], object],
    make: Callable[[], nn.Module] = nn.Identity,
) -> nn.Module:
    """A function of the input and of a layer, after a write into a tensor."""

    def forward(x: torch.Tensor, layer: nn.Module) -> object:
        y = x.clone()
        y[:, :] = x
        return function(y, layer)

    return Applied(forward, layer=make())


class Net(nn.Module):
    """Convolutions and a loop that writes into parts of a tensor."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.weight = nn.Parameter(torch.rand(3, 16))
        self.register_buffer("scale", torch.rand(3))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.conv(x)))
        halves = torch.empty_like(y)
        for start in (0, 2):
            halves[:, start : start + 2] = y[:, start : start + 2] * (start + 1)
        halves[:, 3] = y[:, 0]
        z = functional.max_pool2d(halves, 2).view(x.shape[0], -1)
        z = functional.linear(z, self.weight) * self.scale
        return functional.log_softmax(z, dim=1)


def graph_of(make: Callable[[], nn.Module], *shape: int) -> LayerGraph:
    case = Case(make=make, shape=shape)
    model = case.model()
    graph = capture(model, case.specs)
    for training in (True, False):
        assert_same(graph, model, case, training=training)
        assert_same(graph, model, case, training=training, seed=4)
    return graph


def why_whole(model: nn.Module) -> str:
    """Return why the model, or a part of it, is opaque or refused."""
    try:
        graph = capture(model, [InputSpec(shape=(4,))])
    except GraphError as error:
        return str(error)
    (why,) = {layer.whole for layer in graph.layers if layer.whole}
    return why


def test_what_writes_into_parts_of_tensors_is_captured() -> None:
    graph = graph_of(Net, 2, 4, 4)
    assert not any(layer.whole for layer in graph.layers)
    used = {use.name for layer in graph.layers for use in layer.tensors.values()}
    expected = {name for name in Net().state_dict() if "num_batches" not in name}
    assert used == expected
    assert graph["conv"].kind == "convolution"


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor, nn.Module], object], int]] = {
    "glu": (lambda x, _: functional.glu(x, dim=1), 4),
    "checkpointed": (lambda x, layer: checkpoint(layer, x * 2, use_reentrant=False) + x, 4),
    "several": (lambda x, layer: {"a": layer(x), "b": (x - 1).chunk(2, dim=1)[1]}, 4),
    "products": (lambda x, _: torch.bmm(x[:, :, None], x[:, None, :]), 4),
    "constants": (lambda x, _: x * torch.arange(4.0)[2] + torch.ones(2, 4).sum(), 4),
    "the batch's size": (lambda x, _: x.reshape(x.size(0) * 1, 2, -1).flatten(1), 4),
    "norm": (lambda x, _: functional.layer_norm(x, (4,)), 4),
    "conversions": (lambda x, _: (x > 0).to(x.dtype) * x.clone(), 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_needs_tensors_is_captured(name: str) -> None:
    function, n = FUNCTIONS[name]
    graph = graph_of(lambda: applying(function, lambda: nn.Linear(n, n)), n)
    assert not any(layer.whole for layer in graph.layers)


def test_a_part_is_captured_where_it_stands() -> None:
    part = partial(applying, lambda x, f: f(x).tanh(), lambda: nn.Linear(4, 3))
    graph = graph_of(lambda: nn.Sequential(nn.Linear(4, 4), part(), nn.ReLU()), 4)
    assert [layer.name for layer in graph.layers] == ["input", "0", "1.layer", "1.tanh", "2"]


def test_layers_of_several_results_stay_layers() -> None:
    def function(x: torch.Tensor, lstm: nn.Module) -> object:
        y, _ = lstm(x[:, None].expand(-1, 3, -1))
        return y[:, -1]

    make = lambda: nn.LSTM(4, 2, batch_first=True)  # noqa: E731
    graph = graph_of(lambda: applying(function, make), 4)
    whole = [layer for layer in graph.layers if layer.whole]
    assert {layer.text("module") for layer in whole} == {"layer"}


def test_what_is_in_it_and_cannot_be_captured_stays_whole() -> None:
    def sums(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 1:] = x.cumsum(1)[:, 1:]
        return y

    graph = graph_of(lambda: applying(lambda x, f: f(x) * 2, lambda: Applied(sums)), 4)
    (whole,) = [layer for layer in graph.layers if layer.whole]
    assert whole.options["module"] == "layer"
    assert "cumsum" in whole.whole


def test_what_neither_captures_says_both_reasons() -> None:
    words = why_whole(Branching())
    assert words.startswith("Branching.forward cannot be traced: its forward depends")
    assert words.count("values of its data") == 1  # the same reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, _: x + torch.rand_like(x), "rand_like.* has no split rule"),
        (lambda x, _: x * len(x), "number of samples|depends on the batch size"),
        (lambda x, _: x * x.detach(), "detach.* has no split rule"),
        (lambda x, _: x[:, ::2].sort(1)[0], "sort.* has no split rule"),
    ],
)
def test_what_has_no_rule_is_named(
    function: Callable[[torch.Tensor, nn.Module], object], reason: str
) -> None:
    assert re.search(reason, why_whole(applying(function)))


def test_a_custom_gradient_is_not_lost_in_an_export() -> None:
    words = why_whole(applying(lambda x, f: f(x), Custom))
    assert re.search(r"calls Doubled.*its own", words)


def test_a_model_on_the_meta_device_is_exported() -> None:
    graph = capture(Net().to("meta"), [InputSpec(shape=(2, 4, 4))])
    assert not any(layer.whole for layer in graph.layers)


def test_what_a_layer_changes_in_place_is_seen_and_its_hooks_run() -> None:
    def function(x: torch.Tensor, relu: nn.Module) -> object:
        relu(x)
        return x * 2

    graph_of(lambda: applying(function, lambda: nn.ReLU(inplace=True)), 4)

    def make() -> nn.Module:
        model = applying(lambda x, f: f(x), lambda: nn.Linear(4, 4))
        model.get_submodule("layer").register_forward_hook(lambda _, __, output: output * 2)
        return model

    graph_of(make, 4)
