"""Muon and its AdamW, beside those of torch."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim import _muon

from distbelief.core import muon
from distbelief.core.errors import SettingError
from distbelief.core.torch_optimizers import check, made


SHAPES = ((5, 9), (9, 5), (7, 7), (16, 3), (4,), (1, 6), (6, 1), ())


def parameters_of(shapes: tuple[tuple[int, ...], ...], seed: int) -> list[nn.Parameter]:
    stream = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=stream)) for shape in shapes]


def take_steps(
    optimizers: Sequence[torch.optim.Optimizer], parameters: list[nn.Parameter], n: int
) -> None:
    for number in range(n):
        stream = torch.Generator().manual_seed(100 + number)
        for one in parameters:
            one.grad = torch.randn(one.shape, generator=stream)
        for each in optimizers:
            each.step()


def test_steps_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's iterations in float32, too: in bfloat16 three digits would be the same."""
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_float32)
    own, others = parameters_of(SHAPES, 1), parameters_of(SHAPES, 1)
    table = {"name": "Muon", "lr": 0.02, "weight_decay": 0.05, "betas": (0.8, 0.95)}
    optimizer, _ = made(table, own, where="inner")
    take_steps([optimizer], own, 5)
    matrices = [one for one in others if muon.is_matrix(one)]
    rest = [one for one in others if not muon.is_matrix(one)]
    assert len(matrices) == 4
    rms = "match_rms_adamw"
    theirs = (
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05, adjust_lr_fn=rms),
        torch.optim.AdamW(rest, lr=0.02, weight_decay=0.05, betas=(0.8, 0.95)),
    )
    take_steps(theirs, others, 5)
    for one, other in zip(own, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def in_float32(
    grad: torch.Tensor, coefficients: tuple[float, float, float], n_steps: int, eps: float
) -> torch.Tensor:
    assert coefficients == (3.4445, -4.7750, 2.0315)
    assert n_steps == muon.N_ITERATIONS
    a, b, c = coefficients
    x: torch.Tensor = grad if grad.size(0) <= grad.size(1) else grad.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(n_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if grad.size(0) <= grad.size(1) else x.T


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(muon.orthogonalised(matrix))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_a_kernel_of_a_convolution_is_a_matrix_of_a_row_for_each_output() -> None:
    (kernel,), (matrix,) = parameters_of(((4, 3, 2, 2),), 3), parameters_of(((4, 12),), 3)
    for one in (kernel, matrix):
        optimizer, _ = made({"name": "Muon", "lr": 0.1}, [one], where="inner")
        one.grad = torch.ones_like(one).cumsum(0)
        optimizer.step()
    assert torch.equal(kernel.view(4, 12), matrix)


@pytest.mark.parametrize(
    "keywords",
    [
        {"lr": -0.1},
        {"lr": "0.1"},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"weight_decay": -1.0},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"eps": "a"},
    ],
)
def test_bad_keywords_are_refused_before_the_start(keywords: dict[str, object]) -> None:
    """Regression: a negative rate went uphill."""
    with pytest.raises(SettingError, match=rf"inner Muon: .*{next(iter(keywords))}"):
        check({"name": "Muon", **keywords}, where="inner")


def test_zero_gradients_stay_finite() -> None:
    (one,) = parameters_of(((4, 4),), 0)
    optimizer, _ = made({"name": "Muon", "lr": 0.1, "weight_decay": 0.0}, [one], where="inner")
    before, one.grad = one.detach().clone(), torch.zeros(4, 4)
    optimizer.step()
    assert torch.equal(one, before)


def test_a_schedule_changes_the_rate_of_all_parameters() -> None:
    both = parameters_of(((4, 4), (4,)), 0)
    table = {
        "name": "Muon",
        "lr": 1.0,
        "schedule": {"name": "StepLR", "step_size": 1, "gamma": 0.0},
    }
    optimizer, scheduler = made(table, both, where="inner")
    take_steps([optimizer], both, 1)
    assert scheduler is not None
    scheduler.step()
    before = [one.detach().clone() for one in both]
    take_steps([optimizer], both, 1)
    assert all(map(torch.equal, before, both))
