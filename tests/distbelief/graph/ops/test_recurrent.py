from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture, evaluation_difference
from distbelief.graph.graph import INPUT, LayerGraph
from distbelief.graph.lowering import recurrent
from distbelief.graph.operator import Step, operator_of
from distbelief.graph.ops.recurrent import N_GATES, linear
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import check, close, leaf, random, randomised, values_of
from tests.distbelief.graph.reference import evaluate


N_STEPS, SIZE, N_UNITS = 3, 4, 5
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


class Recurrent(nn.Module):
    """All results of a recurrent layer, side by side; with `begins`, of states that are given."""

    def __init__(self, layer: nn.RNNBase, *, begins: bool) -> None:
        super().__init__()
        self.layer = layer
        self.begins = begins

    @override
    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        first = self.layer.batch_first
        x = x if first else x.transpose(0, 1)
        state: object = None
        if self.begins:
            n = self.layer.num_layers * (1 + self.layer.bidirectional)
            state = given.transpose(0, 1)[:n]
            state = (state, state.sin()) if isinstance(self.layer, nn.LSTM) else state
        y, last = self.layer(x, state)
        y = y if first else y.transpose(0, 1)
        lasts = last if isinstance(last, tuple) else (last,)
        return torch.cat([y.flatten(1), *(z.transpose(0, 1).flatten(1) for z in lasts)], 1)


@cache
def captured(kind: str, *, begins: bool, **options: bool | int) -> tuple[nn.Module, LayerGraph]:
    layer = KINDS[kind](SIZE, N_UNITS, **options)
    model = Recurrent(layer, begins=begins).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "N_UNITS_MIN", dict.fromkeys(N_GATES, 1))
        specs = [InputSpec(shape=(N_STEPS, SIZE)), InputSpec(shape=(4, N_UNITS))]
        return model, capture(model, specs)


# By default any two values occur together, and any three but the kind.
CASES = [
    pytest.param(
        {"kind": kind, "begins": begins, "num_layers": n, "bidirectional": both},
        marks=[] if divmod(index, 2) == (begins ^ both, (n == 2) ^ both) else pytest.mark.soak,
        id=f"{kind}-{begins}-{n}-{both}",
    )
    for (index, kind), begins, n, both in product(
        enumerate(KINDS), [False, True], [1, 2], [False, True]
    )
]


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@settings(max_examples=2)
def test_recurrent_layers_in_any_parts_are_torchs(
    data: st.DataObject, case: dict[str, bool | int]
) -> None:
    first = bool(case["begins"] ^ case["bidirectional"] ^ (case["num_layers"] == 2))
    model, graph = captured(**case, batch_first=first, bias=case["begins"])
    layers = [layer for layer in graph.layers if layer.kind != INPUT]
    assert not any(layer.whole for layer in layers)
    assert "recurrent" in {layer.kind for layer in layers}
    inputs = {"x": leaf(random(2, N_STEPS, SIZE)), "given": leaf(random(2, 4, N_UNITS, seed=1))}
    check(data, layers, model(**inputs), inputs, dict(model.named_parameters()))


@pytest.mark.parametrize("bias", [False, True])
def test_products_in_single_precision_are_torchs(bias: bool) -> None:  # noqa: FBT001
    x, weight, *biases = (random(*n).float() for n in ((2, 3, 4), (5, 4), (5,))[: 2 + bias])
    leaves = [leaf(value) for value in (x[:, :2], weight, *biases)]
    found, expected = linear(*leaves), functional.linear(*leaves)
    torch.testing.assert_close(found, expected)
    seed = random(*expected.shape, seed=1).float()
    pairs = [torch.autograd.grad(y, leaves, seed) for y in (found, expected)]
    torch.testing.assert_close(*pairs)


def test_ranks_exchange_hidden_states_and_keep_the_cells() -> None:
    _, graph = captured("lstm", begins=False, batch_first=True)
    step = graph["layer.0.step1"]
    units = (2, 4)
    assert operator_of(step).reads(step, step.region.replaced(1, units)) == (
        Region(((1, 2), (0, 4), units)),
        Region(((0, 1), (0, N_UNITS))),
        Region(((1, 2), units)),
    )


def dropped(x: torch.Tensor, graph: LayerGraph, model: nn.Module, step: Step) -> torch.Tensor:
    layers = [layer for layer in graph.layers if layer.kind != INPUT]
    inputs, tensors = {graph.layers[0].name: x}, dict(model.named_parameters())
    return values_of(layers, inputs, tensors, step=step)[graph.outputs[0]]


def test_states_between_layers_are_dropped_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "N_UNITS_MIN", dict.fromkeys(N_GATES, 1))
    model = randomised(nn.Sequential(nn.GRU(4, 5, 2, dropout=0.5, batch_first=True), First()))
    graph = capture(model, [InputSpec(shape=(3, 4))])
    assert [layer.kind for layer in graph.layers].count("dropout") == 1
    x = random(2, 3, 4)
    one, other = (dropped(x, graph, model, Step(training=True, seed=seed)) for seed in (1, 2))
    assert not torch.allclose(one, other)
    close(dropped(x, graph, model, Step()), model.eval()(x))


class First(nn.Module):
    @override
    def forward(self, given: tuple[torch.Tensor, object]) -> torch.Tensor:
        return given[0]


WHOLE = [
    (nn.GRU(4, 255, batch_first=True), 3, "fewer than 256 units"),
    (nn.LSTM(4, 256, batch_first=True), 4, "more than 3 steps"),
    (nn.LSTM(4, 256, proj_size=8, batch_first=True), 3, "projects its states"),
    (weight_norm(nn.RNN(4, 256, batch_first=True), "weight_hh_l0"), 3, "weights are computed"),
]


@pytest.mark.parametrize(("layer", "n_steps", "reason"), WHOLE)
def test_what_is_not_split_says_why(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Module, n_steps: int, reason: str
) -> None:
    monkeypatch.setattr(recurrent, "N_STEPS_MAX", 3)
    graph = capture(nn.Sequential(layer, First()), [InputSpec(shape=(n_steps, 4))])
    assert [reason in layer.whole for layer in graph.layers if layer.whole] == [True]


class Steps(nn.Module):
    def __init__(self, kind: str, *, n_layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = KINDS[kind](SIZE, N_UNITS, n_layers, dropout=dropout, batch_first=True)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.layer(x)[0]
        return states


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_layer_computes_the_same_in_evaluation(kind: str) -> None:
    """Regression: refused by jobs, since the operation is told whether the model trains."""
    inputs = [InputSpec(shape=(N_STEPS, SIZE))]
    for model in (Steps(kind), Steps(kind, n_layers=2, dropout=0.5)):
        assert evaluation_difference(model, inputs) is None


def test_a_small_layer_drops_states_in_training_only() -> None:
    model, x = Steps("gru", n_layers=2, dropout=0.5).double(), random(2, N_STEPS, SIZE)
    graph = capture(model, [InputSpec(shape=(N_STEPS, SIZE))])
    name = graph.outputs[0]

    def computed(**mode: int | bool) -> torch.Tensor:
        step = Step(**mode)  # type: ignore[arg-type]
        return evaluate(graph, {"x": x}, dict(model.named_parameters()), step=step)[name]

    close(computed(training=False), model.eval()(x))
    one = computed(training=True, seed=1)
    assert torch.equal(one, computed(training=True, seed=1))
    assert not torch.equal(one, computed(training=True, seed=2))
    assert not torch.equal(one, computed(training=False))


class Always(nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.alpha_dropout(x, 0.5, training=True)


def test_numbers_that_are_drawn_in_evaluation_too_are_named() -> None:
    found = evaluation_difference(Always(), [InputSpec(shape=(4,))])
    assert found is not None
    assert "alpha_dropout drops elements in evaluation mode too" in found
    assert evaluation_difference(nn.AlphaDropout(0.5), [InputSpec(shape=(4,))]) is None
