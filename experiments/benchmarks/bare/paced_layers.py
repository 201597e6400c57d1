"""A net whose layers sleep, for a job over hosts that share a few processors.

The gradient of a layer comes as long after that of the layer behind it as it sleeps. Blocks of its
pushes leave meanwhile in half of the steps, `TURN` in a row, and after the step in the others. Each
step says when it began, and how: lines "seconds 0-or-1" of a file for each object and process.
"""

import os
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.pushes import PushDraft


TURN: Final = 3  # steps
FORWARD: Final = 1 / 3  # of the time of a step


class _Paced(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(FORWARD * seconds)
        return x + weight[0]

    @staticmethod
    @override
    def backward(ctx: Any, *errors: Any) -> Any:
        time.sleep((1.0 - FORWARD) * ctx.seconds)
        return errors[0], ctx.gradient, None, None


class PacedLayers(nn.Module):
    def __init__(self, *, n_layers: int, n_parameters: int, seconds: float, said: Path) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(n_parameters) for _ in range(n_layers))
        self._gradient = torch.full((n_parameters,), 1e-6)
        self._seconds, self._said = seconds, said
        self._n_steps = 0

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            name = f"{os.getpid()}-{id(self)}"  # the job tries other objects before it begins
            with (self._said / name).open("a") as file:
                file.write(f"{time.monotonic()} {self._n_steps // TURN % 2}\n")
            self._n_steps += 1
            # What follows holds from the next step on: this one has begun.
            _sends_early(is_early=self._n_steps // TURN % 2 == 1)
        out = x.sum(1)
        for weight in self.layers:
            out = _Paced.apply(out, weight, self._gradient, self._seconds)  # type: ignore[no-untyped-call]
        return out


_WHOLE: Final = ParameterClient.draft


def _late(
    client: ParameterClient,
    *,
    notes: object = None,
    **options: Any,  # noqa: ANN401 -- passed on
) -> PushDraft:
    del notes  # so nobody hears which blocks are full
    return _WHOLE(client, **options)


def _sends_early(*, is_early: bool) -> None:
    # Users have no choice here.
    ParameterClient.draft = _WHOLE if is_early else _late  # type: ignore[method-assign, assignment]


def net(*, n_layers: int, n_parameters: int, seconds: float, said: str) -> nn.Module:
    _sends_early(is_early=False)
    return PacedLayers(
        n_layers=n_layers, n_parameters=n_parameters, seconds=seconds, said=Path(said)
    )


def samples(*, n_samples: int) -> TensorDataset:
    return TensorDataset(torch.zeros(n_samples, 4), torch.zeros(n_samples))


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean() + 0.0 * targets.float().mean()
