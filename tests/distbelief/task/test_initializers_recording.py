from collections.abc import Callable

import pytest
import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.parameter_server.initial_values import Initial
from distbelief.task.initializers import initials_of, recorded_initials


def recorded(make: Callable[[], nn.Module]) -> dict[str, Initial]:
    module = make()
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(make())
        return built[0]

    found = recorded_initials(build, names)
    assert all(tensor.is_meta for tensor in built[0].parameters())
    return dict(found)


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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.randn(3, 3) * 0.1)), "cannot repeat"),
        (lambda m: nn.init.trunc_normal_(m.weight), "cannot repeat"),
        # Regression: the cast was reported as a fill that shards cannot repeat.
        (nn.Module.double, r"cast to another type after .*in that type \(dtype=torch\.float64\)"),
        (lambda m: nn.init.orthogonal_(m.weight), "cannot repeat"),
        (lambda m: m.weight[0].zero_(), "cannot repeat"),
        (lambda m: nn.init.constant_(m.weight, float("inf")), "cannot repeat"),
        (lambda m: m.weight.fill_(torch.tensor(1.0)), "cannot repeat"),
        (lambda m: setattr(m, "weight", nn.Parameter(torch.empty(3, 3))), "never given any values"),
    ],
)
def test_tensors_that_shards_cannot_draw_are_named(
    change: Callable[[nn.Linear], object], why: str
) -> None:
    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        with torch.no_grad():
            change(module)
        return module

    with pytest.raises(JobError, match=rf"tensor 'weight' is .*{why}.*'module'"):
        recorded(make)
