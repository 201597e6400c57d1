from collections.abc import Callable

import pytest
import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.parameter_server.initial_values import Initial
from distbelief.task.initializers import Recording, initials_of


def recorded(make: Callable[[], nn.Module]) -> dict[str, Initial]:
    with Recording() as recording:
        module = make()
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    assert all(tensor.is_meta for tensor in module.parameters())
    return dict(recording.initials(module, names))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(7, 3),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)),
        lambda: nn.LSTM(3, 4),
        lambda: nn.Embedding(5, 4),
        lambda: nn.MultiheadAttention(8, 2),
    ],
)
def test_recorded_distributions_are_those_of_the_layers(make: Callable[[], nn.Module]) -> None:
    module = make()
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    known = initials_of(module, names)
    for name, initial in recorded(make).items():
        assert initial.distribution == known[name].distribution, name
        for field in ("low", "high", "mean", "std", "value"):
            expected = getattr(known[name], field)
            assert getattr(initial, field) == pytest.approx(expected), (name, field)


def test_initial_values_chosen_by_the_user_are_kept() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(6, 6)
        nn.init.xavier_normal_(layer.weight, gain=2.0)
        nn.init.constant_(layer.bias, -4.5)
        return layer

    found = recorded(make)
    assert found["weight"].distribution == "normal"
    assert found["weight"].std == pytest.approx(2.0 / 6**0.5)
    assert found["bias"] == Initial(distribution="constant", value=-4.5)


class _Made(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.Parameter(torch.ones(3))
        self.full = nn.Parameter(torch.full((2, 2), 0.5))
        self.register_buffer("zeros", torch.zeros(3))


def test_new_tensors_of_one_value_are_constant() -> None:
    values = {name: initial.value for name, initial in recorded(_Made).items()}
    assert values == {"ones": 1.0, "full": 0.5, "zeros": 0.0}


def scaled() -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(torch.randn(3, 3) * 0.1)
    return module


def truncated() -> nn.Module:
    module = nn.Linear(3, 3)
    nn.init.trunc_normal_(module.weight)
    return module


def doubled() -> nn.Module:
    """Regression: its cast was reported as a fill that shards cannot repeat."""
    return nn.Linear(3, 3).double()


def turned() -> nn.Module:
    module = nn.Linear(3, 3)
    nn.init.orthogonal_(module.weight)
    return module


def in_parts() -> nn.Module:
    module = nn.Linear(3, 3)
    with torch.no_grad():
        module.weight[0].zero_()
    return module


def infinite() -> nn.Module:
    module = nn.Linear(3, 3)
    nn.init.constant_(module.weight, float("inf"))
    return module


def of_a_tensor() -> nn.Module:
    module = nn.Linear(3, 3)
    with torch.no_grad():
        module.weight.fill_(torch.tensor(1.0))
    return module


def untouched() -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(torch.empty(3, 3))
    return module


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (scaled, "cannot repeat"),
        (truncated, "cannot repeat"),
        (doubled, r"cast to another type after .*layer in that type \(dtype=torch\.float64\)"),
        (turned, "cannot repeat"),
        (in_parts, "cannot repeat"),
        (infinite, "cannot repeat"),
        (of_a_tensor, "cannot repeat"),
        (untouched, "never given any values"),
    ],
)
def test_tensors_that_shards_cannot_draw_are_named(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(JobError, match=rf"tensor 'weight' is .*{why}.*'module'"):
        recorded(make)
