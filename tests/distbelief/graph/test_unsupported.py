"""What cannot be split: modules computed whole with a reason, and models that are refused."""

import random  # noqa: TID251 -- what a forward may use
import re
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture, evaluation_difference
from distbelief.graph.graph import GraphError, LayerGraph
from distbelief.graph.ops.call import is_module
from distbelief.graph.region import Shape
from distbelief.graph.unsupported import attributes_kept
from tests.distbelief.graph.test_capture import check, owning
from tests.distbelief.graph.zoo.catalogue import Applied, Case


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


def captured(model: nn.Module, *shape: int) -> LayerGraph:
    return capture(model, [InputSpec(shape=shape or (4,))])


def wholes(graph: LayerGraph) -> Mapping[str, str]:
    return {layer.name: layer.whole for layer in graph.layers if layer.whole}


# --- opaque modules ---


class Doubled(torch.autograd.Function):
    """Its gradient differs from that of its operations."""

    @staticmethod
    @override
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return 2 * x

    @staticmethod
    @override
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return 5 * gradients[0]


class Custom(nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> object:
        return Doubled.apply(x)  # type: ignore[no-untyped-call]


def local_function() -> nn.Module:
    class Local(Doubled):
        """Ranks cannot find it by its name."""

    return Applied(lambda x: Local.apply(x) + x)  # type: ignore[no-untyped-call]


class Branching(nn.Module):
    """Branches on the values of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return -y if x.sum() > 0 else y


class Scaling(nn.Module):
    @override
    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.cumsum(1) * factor if x.sum() > 0 else x


class Cache:
    """An object that cannot be sent."""

    def __init__(self, *kept: torch.Tensor) -> None:
        self.kept = kept


class Attending(nn.Module):
    """Branches on its data, and gets a cache, like GPT-2's attention."""

    @override
    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return x + cache.kept[0] if x.sum() > 0 else x


def looped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for _ in range(int(x.detach().abs().amax().clamp(max=1.0).ceil())):
        x = x + 1
    return x, x.cumsum(1)


def uncompiled(x: torch.Tensor) -> torch.Tensor:
    """Regression: torch.compiler.is_compiling() was true here, so that the model was refused."""
    y = x * float(x.detach().sum())
    if torch.compiler.is_compiling():
        raise ValueError("give a mask")
    return y


def joined(x: torch.Tensor, pair: nn.Module) -> object:
    one, other = pair(x)
    return one * other


def cached() -> nn.Module:
    return Applied(lambda x, attend: attend(x, Cache(x)), attend=Attending())


def listing() -> nn.Module:
    parameters = [nn.Parameter(torch.ones(3, 4, dtype=torch.float64))]
    return Two(lambda m, x: m.b(x) + x @ parameters[0].T)


def branching_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.__dict__["forward"] = lambda x: x if x.sum() > 1e9 else layer.weight.sum() * x
    return nn.Sequential(layer, nn.Tanh())


def halved(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).view(2, x.shape[0] // 2, 4).transpose(0, 1).reshape(x.shape)


def test_a_view_that_needs_an_even_batch_is_not_blamed_on_the_shape_alone() -> None:
    with pytest.raises(GraphError, match=r"right, for any number of samples \(3 here\)"):
        capture(Applied(halved), [InputSpec(shape=(4,))])


VALUES = "it depends on the values of its data"


def test_what_torch_cannot_run_without_values_is_refused_with_its_module() -> None:
    """Regression: AttributeError, "unexpected error"."""

    def reading(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.vmap(lambda row: row * row.sum().item())(x)
        return found

    module = nn.Sequential(nn.Linear(4, 4), Applied(reading))
    with pytest.raises(GraphError, match=r"1 .Applied. cannot be run .* vmap"):
        capture(module, [InputSpec(shape=(4,))])


def keeping(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    y: torch.Tensor = norm(x)
    return y if y.sum() > 0 else -y


class Physics(nn.Module):
    """A net and its derivative by the input, as physics-informed networks have."""

    def __init__(self, derivative: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.derivative = derivative

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.net(x), self.derivative(self.net, x)], dim=1)


def by_autograd(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return found


def by_rows(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.vmap(torch.func.grad(lambda row: net(row).squeeze()))(x)
    return found


def along(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.jvp(net, (x,), (torch.ones_like(x),))[1]
    return found


class Packing(nn.Module):
    """A recurrent layer that reads packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 3, batch_first=True)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (2, 2))
        lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found: torch.Tensor = self.layer(packed)[1][0]
        return found


OPAQUE: dict[str, tuple[Callable[[], nn.Module], list[str], str]] = {
    "a branch": (lambda: nn.Sequential(Branching(), nn.Linear(3, 2)), ["0"], VALUES),
    "the model itself": (Branching, ["branching"], rf"{VALUES}.*\(test_unsupported.py, line \d+\)"),
    "compiled in another way": (lambda: Applied(uncompiled), ["applied"], VALUES),
    "the innermost": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), Branching()), nn.Linear(3, 2)),
        ["0.1"],
        VALUES,
    ),
    "a number": (lambda: Applied(lambda x: x * float(x.detach().sum())), ["applied"], VALUES),
    "a pair": (lambda: Applied(joined, pair=Applied(looped)), ["pair", "pair.2"], VALUES),
    "its own gradient": (
        lambda: nn.Sequential(nn.Linear(4, 4), Custom()),
        [f"{__name__}:Doubled"],
        "is Doubled.*its own",
    ),
    "its own gradient, whole": (Custom, [f"{__name__}:Doubled"], "is Doubled.*its own"),
    "its own gradient, of a local class": (local_function, ["applied"], "calls .*Local, a torch"),
    "its own gradient, between others": (
        lambda: Inner(lambda m, x: m.b(Doubled.apply(m.a(x)) * m.b.bias.sum())),  # type: ignore[no-untyped-call]
        [f"{__name__}:Doubled"],
        "it is Doubled.*its own",
    ),
    "called with a number": (
        lambda: Applied(lambda x, part: part(x, 2.0), part=Scaling()),
        ["part"],
        VALUES,
    ),
    "called with an object": (cached, ["applied"], "attend .* type Cache"),
    "called with an object in a part": (
        lambda: nn.Sequential(nn.Linear(4, 4), cached()), ["1"], "1.attend .* type Cache",
    ),
    "the number of samples": (
        lambda: Applied(lambda x: x * len(x)), ["applied"], "depends on the batch size",
    ),
    "the number of samples in Python": (
        lambda: Applied(lambda x: x * int(x.shape[0])), ["applied"], "number of samples",
    ),
    "statistics": (
        lambda: nn.Sequential(nn.Linear(4, 4), Applied(keeping, norm=nn.BatchNorm1d(4))),
        ["1.statistics", "1"],
        VALUES,
    ),
    "statistics of the model": (
        lambda: Applied(
            lambda x, norm: norm(x) / int(x.shape[0]), norm=nn.BatchNorm1d(4, momentum=0.3)
        ),
        ["applied.statistics", "applied"],
        r"as int\(x.shape\[0\]\)",
    ),
    "torch's random numbers": (
        lambda: Inner(lambda m, x: m.b(x if float(torch.rand(())) < 1e-9 else m.a(x))),
        ["part"],
        VALUES,
    ),
    # Regressions: torch's words, or those about another shape of the input.
    "rows by vmap": (lambda: Applied(lambda x: torch.vmap(torch.sin)(x) * 2), ["applied"], "dim"),
    "a derivative": (lambda: Physics(by_autograd), ["physics"], "torch.autograd.grad"),
    "a derivative in a part": (
        lambda: nn.Sequential(nn.Linear(4, 4), Physics(by_autograd)),
        ["1"],
        "computes gradients in its forward",
    ),
    "a derivative of each row": (lambda: Physics(by_rows), ["physics"], "torch.autograd.grad"),
    "a derivative along a direction": (lambda: Physics(along), ["physics"], "number of samples"),
    "a packed sequence": (Packing, ["packing"], "part layer .* type PackedSequence"),
    "parameters in a list": (listing, ["two"], "outside of its attributes"),
    "a forward of an instance": (branching_forward, ["0"], VALUES),
}  # fmt: skip


@pytest.mark.parametrize("name", OPAQUE)
def test_a_module_that_cannot_be_exported_is_computed_whole(name: str) -> None:
    make, names, reason = OPAQUE[name]
    graph = check(Case(make=make, shape=(4,)), whole=len(names))
    assert list(wholes(graph)) == names
    for layer in names:
        assert is_module(graph[layer])
        assert re.search(reason, graph[layer].whole)
        assert "Error:" not in graph[layer].whole


def numbered(x: torch.Tensor) -> torch.Tensor:
    nodes = x.flatten(0, 1)  # of all graphs: (samples * 3, 4)
    first = torch.arange(x.shape[0])[:, None] * 3
    edges = (x[:, :, 0] > 0).long() + first
    return nodes[edges.flatten()].view(x.shape)


def among_samples(x: torch.Tensor) -> torch.Tensor:
    return x[(x[:, 0, 0] > 0).long()]


def of_control(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (x,))
    return found


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (numbered, r"add mixes samples, as message passing.*torch\.gather.*partitions = 1"),
        (among_samples, r"index mixes samples, as message passing.*torch\.gather"),
        (of_control, r"forward calls cond, .*torch\.where.*partitions = 1"),
    ],
)
def test_what_ranks_cannot_compute_is_refused_with_what_replaces_it(
    function: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    """Regressions: a sentence about batch_first; errors of Python and of torch in the step."""
    with pytest.raises(GraphError, match=words):
        captured(nn.Sequential(nn.Linear(4, 4), Applied(function)), 3, 4)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused() -> None:
    """Regression: AttributeError: 'OrderedDictWrapper' object has no attribute 'update'."""
    inner = torch.jit.trace(nn.Linear(4, 4), torch.zeros(2, 4))
    with pytest.raises(
        GraphError, match=r"0\.1 is compiled by torch\.jit\..*that it was made from"
    ):
        captured(nn.Sequential(nn.Sequential(nn.Linear(4, 4), inner)), 4)


class Constants(dict[str, object]):
    """Refuses all changes, as the configuration of a model of diffusers does."""

    def _refuse(self, *_: object, **__: object) -> None:
        raise TypeError("constants cannot be changed")

    update = clear = __setitem__ = __delitem__ = pop = _refuse


def test_an_attribute_that_cannot_be_changed_is_left_alone() -> None:
    """Regression: capture put back all dictionaries, also those that nobody had changed."""
    model = nn.Linear(4, 3)
    model.constants = Constants(size=4)  # type: ignore[assignment] # torch allows it
    assert not wholes(captured(model))
    assert model.constants == {"size": 4}


def test_a_whole_module_may_lie_on_the_meta_device() -> None:
    graph = captured(nn.Sequential(Branching().to("meta")))
    assert graph["0"].shape == (3,)
    assert VALUES in graph["0"].whole


def cast(model: Two, x: torch.Tensor) -> object:
    with torch.autocast("cpu", torch.bfloat16):
        return model.b(model.a(x))


def inferring(model: Two, x: torch.Tensor) -> object:
    with torch.inference_mode():
        y = x + 1
    return model.b(y.clone())


@pytest.mark.each_value
@pytest.mark.parametrize("make", [Two, Inner])
@pytest.mark.parametrize(("forward", "mode"), [(cast, "autocast"), (inferring, "inference_mode")])
def test_modes_of_torch_are_left_to_the_whole_module(
    forward: Forward, mode: str, make: type[Two | Inner]
) -> None:
    (reason,) = wholes(captured(make(forward))).values()
    assert f"torch.{mode}" in reason


# --- gradients, hooks and other effects ---


def frozen(model: Two, x: torch.Tensor) -> object:
    with torch.no_grad():
        h = model.a(x).relu()
        h = torch.cat(h.chunk(2, dim=1)[::-1], dim=1)
    return model.b(h + x) * model.b.bias.detach()


def several(m: Two, x: torch.Tensor) -> object:
    with torch.no_grad():
        parts = x.chunk(2, dim=1)
        positive = m.a(x) > 0
    return m.b(torch.cat(parts, dim=1) * positive.to(x.dtype))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "forward",
    [frozen, several, lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False))],
    ids=["no_grad", "several results under no_grad", "a checkpoint"],
)
@pytest.mark.parametrize("make", [Two, Inner])
def test_gradients_stop_where_the_forward_stops_them(
    forward: Forward, make: type[Two | Inner]
) -> None:
    check(Case(make=lambda: make(forward), shape=(4,)))


@pytest.mark.parametrize("changes_part", [False, True])
def test_changes_in_place_of_what_is_detached_are_not_followed(*, changes_part: bool) -> None:
    def forward(m: Two, x: torch.Tensor) -> object:
        h = m.a(x)
        part = h.detach()
        (part if changes_part else h).add_(1.0)
        return m.b(h * part)

    with pytest.raises(GraphError, match="of which a part is detached"):
        captured(Two(forward))


def test_frozen_parameters_do_for_no_grad() -> None:
    model = Two(lambda m, x: m.b(m.a(x)))
    model.a.requires_grad_(requires_grad=False)
    uses = captured(model).tensors
    assert [use.trains for use in uses.values()] == [False, False, True, True]


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
    model.register_forward_hook(lambda _, __, output: output * 2)
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    model[0].register_forward_hook(lambda _, __, output: output.relu())
    model.get_submodule("0.0").register_forward_hook(lambda _, __, output: output * 3)
    return model


def hooked_inside() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    layer.linear1.register_forward_hook(lambda _, __, output: output * 2)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), layer)


def replaced(path: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3)))
    part = model.get_submodule(path)
    usual = part.forward
    part.forward = lambda x: usual(x) * 3
    return model


@pytest.mark.parametrize(
    "make", [hooked, hooked_inside, *(partial(replaced, path) for path in ("", "0", "1"))]
)
def test_hooks_and_forwards_of_instances_run(make: Callable[[], nn.Module]) -> None:
    check(Case(make=make, shape=(4,)))


def _threefold(
    _: nn.Module, __: object, gradients: tuple[torch.Tensor, ...] | torch.Tensor
) -> tuple[torch.Tensor]:
    return (gradients[0] * 3,)


@pytest.mark.parametrize("path", ["", "1", "1.0"])
def test_hooks_on_gradients_run_with_the_whole_module(path: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        model.get_submodule(path).register_full_backward_hook(_threefold)
        return model

    (reason,) = wholes(check(Case(make=make, shape=(4,)), whole=1)).values()
    assert "hooks" in reason


def test_hooks_on_parameters_are_refused() -> None:
    model = Two(lambda m, x: m.b(m.a(x)))
    model.a.weight.register_hook(lambda gradient: gradient * 10)
    with pytest.raises(GraphError, match=r"'a.weight' has a hook"):
        captured(model)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda _: random.random(), "Python's `random`"),
        (lambda _: np.random.rand(), "numpy.random"),  # noqa: NPY002 -- that of users
        (lambda m: m.random.random(), "its '(part.)?random'"),
        (lambda m: float(m.numbers.random()), "its '(part.)?numbers'"),
        (lambda m: float(m.older.rand()), "its '(part.)?older'"),
        (lambda m: float(torch.rand((), generator=m.torchs)), "its '(part.)?torchs'"),
    ],
)
@pytest.mark.parametrize("make", [Two, Inner])
def test_random_numbers_that_are_not_torchs_are_refused(
    draw: Callable[[Two], float], name: str, make: type[Two | Inner]
) -> None:
    """Stochastic depth kept the numbers that it drew during the capture."""
    model = make(lambda m, x: m.b(x) if draw(m) < 1e-9 else m.b(m.a(x)))
    with pytest.raises(GraphError, match=f"draws random numbers of ({name}).*torch.nn.Dropout"):
        captured(model)


@pytest.mark.each_value
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
    with pytest.raises(GraphError, match=r"changes '(part\.)?mean', a tensor|mean joins samples"):
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


# --- evaluation ---


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.b(m.a(x)) if m.training else m.b(m.a(x)).softmax(1),
        lambda m, x: m.b(m.a(x)) if m.training else m.b(x),
        lambda m, x: m.b(m.a(x) * (2 if m.training else 1)),
        lambda m, x: m.b(m.a(x) * torch.tensor(2.0 if m.training else 1.0)),
        lambda m, x: m.b(functional.dropout(m.a(x))),  # without training=self.training
        lambda m, x: m.b(functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
    ],
)
def test_a_model_that_differs_in_evaluation_is_found(function: Forward) -> None:
    """Prediction with a plan computed what the model returns in training."""
    assert evaluation_difference(Two(function), [InputSpec(shape=(2, 4))])


def dropping(model: Two, x: torch.Tensor) -> object:
    x = functional.dropout(model.a(x), 0.5, model.training)
    return model.b(functional.dropout(x) if model.training else x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Two(dropping),
        lambda: Inner(frozen),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(inplace=True)),
        lambda: Two(
            lambda m, x: (
                functional.scaled_dot_product_attention(
                    x[:, None], x[:, None], x[:, None], dropout_p=0.1 * m.training, scale=0.5
                )
                .transpose(1, 2)
                .contiguous()
            )
        ),
        lambda: Two(lambda m, x: m.b(m.a(x).contiguous() if m.training else m.a(x))),
        lambda: Inner(lambda m, x: m.b(x) if x.sum() > 0 else m.b(m.a(x))),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()),
        lambda: nn.Linear(4, 4),
    ],
)
def test_what_layers_know_of_evaluation_is_no_difference(make: Callable[[], nn.Module]) -> None:
    assert evaluation_difference(make(), [InputSpec(shape=(4,))]) is None


# --- what is refused ---


APART = "a layer must keep them separate"
FIRST = "must have the batch as its first dimension"
REFUSED: list[tuple[nn.Module, Shape, str]] = [
    (Applied(lambda x: x.mean(0)), (4,), f"mean .*{APART}"),
    (Applied(lambda x: x.mean()), (4,), f"mean .*{APART}"),
    (Applied(lambda x: x.sum(0, keepdim=True) + x), (4,), f"sum .*{APART}"),
    (Applied(lambda x: x.cumsum(0)), (4,), f"cumsum .*{APART}"),
    (Applied(lambda x: x.flip(0)), (4,), f"flip .*{APART}"),
    (Applied(lambda x: torch.roll(x, 1, 0)), (4,), f"roll .*{APART}"),
    (Applied(lambda x: x.repeat(2, 1)), (4,), FIRST),
    (Applied(lambda x: torch.cat([x, x])), (4,), f"cat .*{APART}"),
    (Applied(lambda x: x[[0, 1]]), (4,), "index mixes samples"),
    (Applied(lambda x: x[torch.arange(1, -1, -1)]), (4,), "index mixes samples"),
    # Regression: accepted, and the plan failed in its first step.
    (Applied(lambda x: x @ x.T), (4,), f"mixes samples .*the batch twice.*: {APART}"),
    (Applied(lambda x: x[1:]), (4,), "joins samples .*number of samples"),
    (Applied(lambda x: x.transpose(0, 1)), (4,), FIRST),
    (Applied(lambda x: x.reshape(-1, 2)), (4,), FIRST),
    (Applied(lambda x: torch.stack([x, x])), (4,), FIRST),
    (Applied(lambda _: torch.ones(3)), (4,), "not depend on its inputs"),
    (Applied(lambda x: x.size(0)), (4,), "returns no tensors"),
    (Applied(lambda x: x.mean(3)), (4,), "Dimension out of range"),
    (Applied(lambda x: (x + 1).nothing), (4,), "no attribute 'nothing'"),
    (nn.MultiheadAttention(4, 2), (3, 4), "takes 3 inputs .query, key, value"),
    (Applied(lambda x, f: f(x, x, x)[0], attention=nn.MultiheadAttention(4, 2)),
     (3, 4), "batch_first=True"),
    (nn.TransformerEncoderLayer(4, 2), (3, 4), "batch_first=True"),
    # Regression: torch computed each step, of which there were 1009, and a user waited.
    (nn.LSTM(4, 2), (3, 4), "lstm mixes samples.* steps: give it batch_first=True"),
    (nn.GRU(4, 2), (3, 4), "gru mixes samples.* steps: give it batch_first=True"),
    (nn.RNN(4, 2), (3, 4), "rnn_tanh mixes samples.* steps: give it batch_first=True"),
    (Applied(lambda x, f: f(x.transpose(0, 1)), layer=nn.GRU(4, 2, batch_first=True)),
     (3, 4), "layer mixes samples.* steps: transpose its input"),
    (nn.LSTM(4, 2, batch_first=True), (3, 4), FIRST),
    (nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True)), (2, 3), "would be lost"),
    (Applied(lambda x: {}[x]), (4,), "cannot be run on batchx4: KeyError: "),
    (nn.Linear(5, 2), (4,), "cannot be run on batchx4.*shape of the input"),
    (nn.BatchNorm1d(5), (4,), "5 features, but 'input' has 4|cannot be run on batchx4.*not 5"),
    (nn.BatchNorm1d(4, momentum=None), (4,), "momentum=None"),
    # Regression: accepted, because its hook changes a buffer, and the change was lost.
    (nn.Sequential(spectral_norm(nn.Linear(4, 4))), (4,), "changes '0.weight_u'"),
    (owning(lambda x, w: x * w.add_(1), (4,), buffer=True), (4,), "'own', a"),
    (owning(lambda _, w: w * 2, (4,)), (4,), "not depend on its inputs"),
    (nn.Embedding(7, 3, max_norm=1.0), (4,), "the model is an .* max_norm = 1, which"),
    (nn.Sequential(nn.EmbeddingBag(7, 3, max_norm=0.5)), (4,), "0 is an Emb.*0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shape", "message"), REFUSED)
def test_models_that_would_be_wrong_are_refused(
    module: nn.Module, shape: Shape, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        captured(module, *shape)


def test_a_part_that_embeds_its_words_is_not_told_to_embed_them() -> None:
    module = Applied(lambda x, f: f(x).view(2, len(x) // 2, 4), part=nn.Embedding(5, 4))
    with pytest.raises(GraphError, match=r"shape of the input right") as caught:
        capture(module, [InputSpec(shape=(), n_values=5)])
    assert "embed them" not in str(caught.value)


class Mixing(nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> object:
        return torch.cumsum(x, 1) + x.mean(0)


def test_refusals_say_where_in_the_source_they_stand() -> None:
    with pytest.raises(GraphError, match=r'test_unsupported.py"?, line \d+'):
        captured(nn.Sequential(Mixing()))


def test_tensors_that_a_forward_replaces_are_put_back() -> None:
    module = nn.BatchNorm1d(3)
    weight, mean = module.weight, module.running_mean
    with attributes_kept(module):
        module.weight = nn.Parameter(torch.zeros(3))
        module.running_mean = torch.ones(3)
        module.seen = 1  # type: ignore[assignment] # as a forward may
    assert module.weight is weight
    assert module.running_mean is mean
    assert not hasattr(module, "seen")


class Recording(nn.Module):
    """Registers a hook in its first forward, as models of transformers that return all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.Tensor] = []

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "has_hooks", False):
            self.has_hooks = True
            self.layer.register_forward_hook(lambda _, __, y: self.seen.append(y))
        self.seen.clear()
        self.layer(x)
        return torch.stack(self.seen).sum(0)


def test_hooks_that_a_forward_registers_are_taken_back() -> None:
    """The flag was restored, the hook was not: a captured model computed something else."""
    model, x = Recording(), torch.ones(2, 4)
    kept = model.register_forward_hook(lambda _, __, y: y + 1)
    captured(model, 4)
    assert torch.equal(model(x), model.layer(x) + 1)
    kept.remove()
    assert torch.equal(model(x), model.layer(x))
    assert evaluation_difference(model, [InputSpec(shape=(4,))]) is None


class Fading(nn.Module):
    """Branches on its data, and changes a buffer in place."""

    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor.mul_(0.9)
        y: torch.Tensor = self.linear(x)
        return y * self.factor if x.sum() > 0 else y


def test_a_change_in_place_inside_of_an_opaque_module_is_refused() -> None:
    """Inside of torch.export no tensor counted such changes, and this one was lost."""
    with pytest.raises(GraphError, match=r"the forward changes '1\.factor'"):
        captured(nn.Sequential(nn.Linear(4, 4), Fading(), nn.Linear(4, 2)), 4)


class Irreps(tuple[int, ...]):
    """A tuple that has no length, as that of e3nn."""

    __slots__ = ()

    @override
    def __len__(self) -> int:
        raise NotImplementedError


def test_an_attribute_may_be_a_tuple_that_counts_nothing() -> None:
    """It ended in the NotImplementedError of its `len`."""
    layer = nn.Linear(4, 4)
    vars(layer)["kinds"] = Irreps((1, 3))
    captured(nn.Sequential(layer, nn.Linear(4, 2)), 4)
