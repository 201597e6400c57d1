"""Muon for matrices, AdamW for all other parameters, at one learning rate.

    m := m + (1 - momentum) (g - m);  u := orthogonalised (g + momentum (m - g))
    w := (1 - lr weight_decay) w - lr 0.2 sqrt(max(rows, columns)) u

Muon is of Jordan et al. 2024, its scale, by which one rate fits both, of Liu et al. 2025 ("Muon is
scalable for LLM training", section 2.2). `torch.optim.Muon` takes matrices only, and multiplies in
bfloat16, which takes ten times as long on most CPUs: here it is float32.

A step of an (m, n) matrix, m <= n, takes 10 m^2 (3 n + m) operations, beside 6 m n for each row of
the batch: it is for batches of many rows, such as tokens, not for wide layers and small batches.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final, TypedDict, cast, final, overload

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override


N_ITERATIONS: Final = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # which raise small singular values fastest
_EPSILON: Final = 1e-7


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return about U V^T of the matrix's U S V^T, by Newton-Schulz iterations."""
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPSILON)
    for _ in range(N_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def is_matrix(parameter: torch.Tensor) -> bool:
    """Return whether Muon takes it; a convolution's kernel counts as one row per output."""
    return parameter.dim() >= 2 and 1 < parameter.size(0) < parameter.numel()


@final
class Muon(Optimizer):
    """Takes what `torch.optim.Muon` and `AdamW` take together; `betas` and `eps` are AdamW's."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        good = {
            "lr": lr >= 0.0,
            "momentum": 0.0 <= momentum < 1.0,
            "weight_decay": weight_decay >= 0.0,
            "betas": len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas),
            "eps": eps >= 0.0,
        }
        for key, is_good in good.items():
            if not is_good:
                raise ValueError(f"{key} is out of range, or not as in torch.optim.AdamW")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "betas": betas, "eps": eps})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for each in self.param_groups:
            group = cast("_Group", each)
            for parameter in each["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                descend = _descend_matrix if is_matrix(parameter) else _descend
                descend(parameter, parameter.grad, self.state[parameter], group)
        return loss


class _Group(TypedDict):
    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float


State = dict[str, torch.Tensor]


def _descend_matrix(
    parameter: nn.Parameter, gradient: torch.Tensor, state: State, group: _Group
) -> None:
    mean = state.setdefault("mean", torch.zeros_like(gradient))
    mean.lerp_(gradient, 1.0 - group["momentum"])
    update = orthogonalised(gradient.lerp(mean, group["momentum"]).flatten(1))
    scale = 0.2 * math.sqrt(max(update.shape))
    parameter.add_(update.view_as(parameter), alpha=-group["lr"] * scale)


def _descend(parameter: nn.Parameter, gradient: torch.Tensor, state: State, group: _Group) -> None:
    """Take AdamW's step."""
    beta1, beta2 = group["betas"]
    state["n"] = state.get("n", torch.zeros((), dtype=torch.float32)) + 1.0
    n = float(state["n"])
    mean = state.setdefault("mean", torch.zeros_like(gradient))
    square = state.setdefault("square", torch.zeros_like(gradient))
    mean.lerp_(gradient, 1.0 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    size = (square / (1.0 - beta2**n)).sqrt_().add_(group["eps"])
    parameter.addcdiv_(mean, size, value=-group["lr"] / (1.0 - beta1**n))
