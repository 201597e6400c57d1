import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import GraphError
from tests.distbelief.graph.zoo.catalogue import Applied, Case
from tests.distbelief.graph.zoo.comparison import assert_same


class Doubled(torch.autograd.Function):
    """Its gradient differs from what tracing through it would give."""

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


class Branching(nn.Module):
    """Branches on the values of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return -y if x.sum() > 0 else y


def noting(x: torch.Tensor) -> torch.Tensor:
    """Branches on shapes, which are known."""
    if x.dim() != 2 or x.shape[-1] > 8:
        raise ValueError("use at most 8 features")
    return x * 2 if int(x.size(1)) == 3 else x


def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors, by a loop over values."""
    for _ in range(int(x.detach().abs().amax().clamp(max=1.0).ceil())):
        x = x + 1
    return x, x.cumsum(1)


def joined() -> nn.Module:
    def forward(x: torch.Tensor, pair: nn.Module) -> object:
        one, other = pair(x)
        return one * other

    return Applied(forward, pair=Applied(pair))


def whole_of(model: nn.Module) -> dict[str, str]:
    graph = capture(model, [InputSpec(shape=(4,))])
    return {layer.name: layer.whole for layer in graph.layers if layer.whole}


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), Custom()), "1", "it calls Doubled"),
        (lambda: nn.Sequential(Branching(), Applied(noting)), "0", "values of its data"),
        (joined, "pair.0", "NotImplementedError|RuntimeError|TypeError"),
        (lambda: nn.Sequential(nn.CELU()), "0", "CELU has no split rule"),
    ],
)
def test_a_module_that_cannot_be_traced_is_computed_whole(
    make: Callable[[], nn.Module], name: str, reason: str
) -> None:
    case = Case(make=make, shape=(4,))
    model = case.model()
    found = whole_of(model)
    assert next(iter(found)) == name
    assert any(word in found[name] for word in reason.split("|"))
    graph = capture(model, case.specs)
    assert_same(graph, model, case, training=True)
    assert_same(graph, model, case, training=False, seed=1)


def summing(x: torch.Tensor) -> torch.Tensor:
    """Calls a function without a lowering rule, and mixes positions with samples."""
    return x.cumsum(1).reshape(-1, 2).tanh().view(len(x), -1)


def test_a_module_that_calls_an_unknown_function_is_computed_whole() -> None:
    case = Case(
        make=lambda: nn.Sequential(nn.Linear(4, 4), Applied(summing), nn.Linear(4, 2)), shape=(4,)
    )
    model = case.model()
    found = whole_of(model)
    assert list(found) == ["1"]
    assert "cumsum" in found["1"]
    assert "test_tracing.py" in found["1"]
    graph = capture(model, case.specs)
    assert_same(graph, model, case, training=True, seed=2)


def test_only_the_innermost_module_is_kept_whole() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Branching()), nn.Linear(3, 2))
    assert list(whole_of(model)) == ["0.1"]


def test_branches_on_shapes_are_traced_through() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Applied(noting))
    assert whole_of(model) == {}
    graph = capture(model, [InputSpec(shape=(4,))])
    assert graph.layers[-1].name == "1.mul"


def test_the_gradient_of_a_custom_function_at_the_root_is_not_lost() -> None:
    (reason,) = whole_of(Custom()).values()
    assert re.search(r"Custom.forward .* calls Doubled.*its own", reason)
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(Custom()(x).sum(), x)
    assert gradient.tolist() == [5.0, 5.0]  # and the class is as it was


def test_a_whole_module_on_the_meta_device_has_to_be_given_a_shape() -> None:
    model = nn.Sequential(Branching().to("meta"))
    with pytest.raises(GraphError, match=r"0 .Branching. .*meta device\..*torch\.where"):
        whole_of(model)


def test_statistics_of_a_whole_module_are_not_lost_silently() -> None:
    def keeping(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        y: torch.Tensor = norm(x)
        return y if y.sum() > 0 else -y

    with pytest.raises(GraphError, match="statistics of its norm would be lost"):
        whole_of(nn.Sequential(Applied(keeping, norm=nn.BatchNorm1d(4))))


def test_the_caller_of_an_opaque_module_with_a_number_is_opaque_too() -> None:
    class Scaling(nn.Module):
        @override
        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return x.cumsum(1) * factor if x.sum() > 0 else x

    called = Applied(lambda x, part: part(x, 2.0), part=Scaling())
    (reason,) = whole_of(called).values()
    assert re.search(r"part .Scaling. is opaque .* is called with 2\.0", reason)


def cubed(x: torch.Tensor) -> torch.Tensor:
    """Crashed the process: C code of torch read the memory of a fake tensor.

    Found with GPT-2 of transformers, whose activation is `torch.pow(x, 3.0)`: torch asks whether
    `x` is a tensor, got yes from the proxy, and read its memory.
    """
    return torch.where(x > 0, torch.pow(x, 3.0), 0.0)


def test_functions_that_take_a_number_for_a_tensor_do_not_end_the_process() -> None:
    code = (
        "from distbelief.graph.capture import InputSpec, capture\n"
        "from tests.distbelief.graph.test_tracing import Applied, cubed\n"
        "print(capture(Applied(cubed), [InputSpec(shape=(4,))]).layers[-1].name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "where\n"), done.stderr


def matching(x: object) -> object:
    """Asks for its class in Python's other ways."""
    kind: object = x.__class__
    match x:
        case torch.Tensor() if kind is torch.Tensor:
            return -x
        case _:
            return x


@pytest.mark.parametrize(
    ("function", "name"),
    [(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, "mul"), (matching, "neg")],
)
def test_fake_tensors_look_like_tensors_to_python_code(
    function: Callable[[object], object], name: str
) -> None:
    graph = capture(Applied(function), [InputSpec(shape=(4,))])
    assert graph.layers[-1].name == name


class Cache:
    """An object that torch.fx cannot pass on."""

    def __init__(self, *kept: torch.Tensor) -> None:
        self.kept = kept


class Attending(nn.Module):
    """Uses an operation without a rule, and gets a cache."""

    @override
    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return (x + cache.kept[0]).cummax(1).values


@pytest.mark.parametrize("depth", [1, 2])
def test_the_caller_that_passes_an_untraceable_object_is_opaque(depth: int) -> None:
    """It was traced again for ever, because the opaque module was blamed."""
    # Like GPT-2: it passes a cache to an opaque module.
    model: nn.Module = Applied(lambda x, attend: attend(x, Cache(x)), attend=Attending())
    for _ in range(depth - 1):
        model = nn.Sequential(nn.Linear(4, 4), model)
    (reason,) = whole_of(model).values()
    assert "Cache" in reason


def test_hooks_run_with_the_whole_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda _, __, output: output * 2)
    assert "it has hooks" in whole_of(model)["0"]
