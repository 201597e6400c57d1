"""Effects of a forward that no operation shows; each was once captured wrongly."""

import random  # noqa: TID251 -- what a forward may use
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture, evaluation_difference
from distbelief.graph.graph import GraphError, LayerGraph
from tests.distbelief.graph.zoo.catalogue import Case
from tests.distbelief.graph.zoo.comparison import assert_same


Forward = Callable[["Two", torch.Tensor], object]


class Two(nn.Module):
    """Two layers, a buffer, and any forward."""

    mean: torch.Tensor

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.function = function
        self.random = random.Random(1)
        self.numbers = np.random.default_rng(1)
        self.older = np.random.RandomState(1)
        self.torchs = torch.Generator().manual_seed(1)
        self.n_calls = 0

    @override
    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x)


class Inner(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.part = Two(function)
        self.last = nn.Linear(3, 2)

    @override
    def forward(self, x: torch.Tensor) -> object:
        return self.last(self.part(x))


def captured(model: nn.Module) -> LayerGraph:
    return capture(model, [InputSpec(shape=(4,))])


def graph_of(make: Callable[[], nn.Module]) -> LayerGraph:
    case = Case(make=make, shape=(4,))
    model = case.model()
    graph = capture(model, case.specs)
    assert_same(graph, model, case, training=True)
    assert_same(graph, model, case, training=False, seed=1)
    return graph


def wholes(graph: LayerGraph) -> dict[str, str]:
    return {layer.name: layer.whole for layer in graph.layers if layer.whole}


def frozen(model: Two, x: torch.Tensor) -> object:
    with torch.no_grad():
        h = model.a(x).relu()
        h = torch.cat(h.chunk(2, dim=1)[::-1], dim=1)
    return model.b(h + x) * model.b.bias.detach()


def test_no_gradient_goes_back_to_what_is_under_no_grad() -> None:
    """no_grad was dropped silently, and a frozen backbone trained."""
    graph = graph_of(lambda: Two(frozen))
    assert not wholes(graph)
    assert not wholes(graph_of(lambda: Inner(frozen)))


def test_frozen_parameters_do_for_no_grad() -> None:
    model = Two(lambda m, x: m.b(m.a(x)))
    model.a.requires_grad_(requires_grad=False)
    uses = captured(model).tensors
    assert [use.trains for use in uses.values()] == [False, False, True, True]


@pytest.mark.parametrize("changes_part", [False, True])
def test_changes_in_place_of_what_is_detached_are_not_followed(*, changes_part: bool) -> None:
    def forward(m: Two, x: torch.Tensor) -> object:
        h = m.a(x)
        part = h.detach()
        (part if changes_part else h).add_(1.0)
        return m.b(h * part)

    with pytest.raises(GraphError, match="of which a part is detached"):
        captured(Two(forward))


def cast(model: Two, x: torch.Tensor) -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return model.b(model.a(x))


@pytest.mark.parametrize("make", [Two, Inner])
def test_autocast_is_left_to_the_whole_module(make: type[Two | Inner]) -> None:
    (reason,) = wholes(captured(make(cast))).values()
    assert "torch.autocast" in reason
    assert "test_unsupported.py" in reason


def test_what_is_made_under_inference_mode_is_left_to_the_whole_module() -> None:
    def forward(m: Two, x: torch.Tensor) -> object:
        with torch.inference_mode():
            y = x + 1
        return m.b(y)

    assert "torch.inference_mode" in wholes(captured(Two(forward)))["two"]


def several(m: Two, x: torch.Tensor) -> object:
    with torch.no_grad():
        parts = x.chunk(2, dim=1)
        positive = m.a(x) > 0
    return m.b(torch.cat(parts, dim=1) * positive.to(x.dtype))


@pytest.mark.parametrize(
    "forward",
    [
        several,
        # With gradients on, torch saved proxies as tensors and crashed the process.
        lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)),
    ],
    ids=["several results under no_grad", "a checkpoint"],
)
def test_what_a_forward_wraps_is_looked_through(forward: Forward) -> None:
    assert not wholes(graph_of(lambda: Two(forward)))


def test_hooks_of_the_model_run() -> None:
    """Only hooks of torch's own layers were found."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
        model.register_forward_hook(lambda _, __, output: output * 2)
        model.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
        model[0].register_forward_hook(lambda _, __, output: output.relu())
        return model

    assert not wholes(graph_of(make))


def _threefold(
    _: nn.Module, __: object, gradients: tuple[torch.Tensor, ...] | torch.Tensor
) -> tuple[torch.Tensor]:
    return (gradients[0] * 3,)


@pytest.mark.parametrize("path", ["", "1", "1.0"])
def test_hooks_on_gradients_run_with_the_whole_module(path: str) -> None:
    def make() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model = nn.Sequential(nn.Linear(4, 4), inner)
        part = model.get_submodule(path)
        part.register_full_backward_hook(_threefold)
        return model

    (reason,) = wholes(graph_of(make)).values()
    assert "hooks" in reason


def test_hooks_of_a_part_of_a_layer_keep_the_layer_whole() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    layer.linear1.register_forward_hook(lambda _, __, output: output * 2)
    graph = capture(nn.Sequential(layer), [InputSpec(shape=(3, 4))])
    assert wholes(graph)


def test_hooks_on_parameters_are_refused() -> None:
    model = Two(lambda m, x: m.b(m.a(x)))
    model.a.weight.register_hook(lambda gradient: gradient * 10)
    with pytest.raises(GraphError, match=r"'a.weight' has a hook"):
        captured(model)


@pytest.mark.parametrize("path", ["", "0", "1"])
def test_the_forward_of_an_instance_is_the_one_that_is_captured(path: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3)))
        part = model.get_submodule(path)
        usual = part.forward
        part.forward = lambda x: usual(x) * 3
        return model

    assert not wholes(graph_of(make))


def test_the_forward_of_an_instance_cannot_be_kept_whole() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh())
    layer.__dict__["forward"] = lambda x: x if x.sum() > 0 else layer.weight.sum() * x
    with pytest.raises(GraphError, match="forward of '0' was replaced"):
        captured(model)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda _: random.random(), "Python's `random`"),
        (lambda _: np.random.rand(), "numpy.random"),  # noqa: NPY002 -- that of users
        (lambda m: m.random.random(), "its 'random'|its 'part.random'"),
        (lambda m: float(m.numbers.random()), "its '(part.)?numbers'"),
        (lambda m: float(m.older.rand()), "its '(part.)?older'"),
        (lambda m: float(torch.rand((), generator=m.torchs)), "its '(part.)?torchs'"),
    ],
)
@pytest.mark.parametrize("make", [Two, Inner])
def test_random_numbers_that_are_not_torchs_are_refused(
    draw: Callable[[Two], float], name: str, make: type[Two | Inner]
) -> None:
    """Stochastic depth kept the numbers that it drew during tracing."""

    def forward(m: Two, x: torch.Tensor) -> object:
        return m.b(x) if draw(m) < 1e-9 else m.b(m.a(x))

    with pytest.raises(GraphError, match=f"draws random numbers of ({name}).*line"):
        captured(make(forward))


def test_torchs_random_numbers_are_left_to_the_whole_module() -> None:
    def forward(m: Two, x: torch.Tensor) -> object:
        return m.b(x) if float(torch.rand(())) < 1e-9 else m.b(m.a(x))

    (reason,) = wholes(captured(Inner(forward))).values()
    assert "draws random numbers" in reason
    assert "test_unsupported.py" in reason


@pytest.mark.parametrize("by_values", [False, True])
@pytest.mark.parametrize("make", [Two, Inner])
def test_a_buffer_that_is_assigned_is_refused_as_one_changed_in_place(
    *, by_values: bool, make: type[Two | Inner]
) -> None:
    def assigning(m: Two, x: torch.Tensor) -> object:
        if not by_values or x.sum() > -1e9:
            m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
        return m.b(x - m.mean)

    model = make(assigning)
    with pytest.raises(GraphError, match=r"changes '(part\.)?mean', a tensor"):
        captured(model)
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())


def test_what_a_forward_notes_is_put_back() -> None:
    def forward(m: Two, x: torch.Tensor) -> object:
        m.last = m.a(x)
        m.n_calls += 1
        return m.b(m.last)

    model = Two(forward)
    captured(model)
    assert model.n_calls == 0
    assert not hasattr(model, "last")


def test_results_by_name_are_followed() -> None:
    """torch.fx asked for a missing attribute until Python's stack overflowed."""
    graph = graph_of(lambda: Two(lambda m, x: m.b(x.topk(4, dim=1).values)))
    (reason,) = wholes(graph).values()
    assert "topk" in reason or "getattr" in reason
    missing = "nothing"
    with pytest.raises(GraphError, match=r"no attribute 'nothing'"):
        captured(Two(lambda _, x: getattr(x + 1, missing) + 1))


def test_parameters_in_a_list_are_not_taken_for_constants() -> None:
    def forward(m: Two, x: torch.Tensor) -> object:
        (weight,) = (each for name, each in vars(m.b)["_parameters"].items() if name == "weight")
        return x @ (weight * 2).sum(0)[:, None]

    assert "nn.ParameterList" in wholes(graph_of(lambda: Two(forward)))["two"]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.b(m.a(x)) if m.training else m.b(m.a(x)).softmax(1),
        lambda m, x: m.b(m.a(x)) if m.training else m.b(x),
        lambda m, x: m.b(m.a(x) * (2 if m.training else 1)),
        lambda m, x: m.b(m.a(x) * torch.tensor(2.0 if m.training else 1.0)),
    ],
)
def test_a_model_that_differs_in_evaluation_is_found(function: Forward) -> None:
    """Prediction with a plan computed what the model returns in training."""
    difference = evaluation_difference(Two(function), [InputSpec(shape=(4,))])
    assert difference


def dropping(model: Two, x: torch.Tensor) -> object:
    x = functional.dropout(model.a(x), 0.5, model.training)
    return model.b(functional.dropout(x) if model.training else x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Two(dropping),
        lambda: Inner(frozen),
        lambda: Inner(lambda m, x: m.b(x) if x.sum() > 0 else m.b(m.a(x))),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()),
        lambda: nn.Linear(4, 4),
    ],
)
def test_what_layers_know_of_evaluation_is_no_difference(make: Callable[[], nn.Module]) -> None:
    assert evaluation_difference(make(), [InputSpec(shape=(4,))]) is None
