"""The inner optimizer: a class of torch.optim, and its schedule, by their names and keywords."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distbelief.core import torch_optimizers
from distbelief.core.torch_optimizers import Table


@final
class InnerOptimizer:
    """The optimizer of one replica, or of one rank of it. It is made at the first step."""

    def __init__(
        self,
        table: Table,
        values: Mapping[int, torch.Tensor],  # flat, of what is trained, by item
        *,
        shapes: Sequence[Sequence[int]] | None = None,  # per item; None: flat
        names: Sequence[str] = (),  # of the values, for groups
    ) -> None:
        self._table = table
        self._parameters = {
            item: nn.Parameter(value if shapes is None else value.view(tuple(shapes[item])))
            for item, value in values.items()
        }
        self._names = names
        self._optimizer: tuple[Optimizer, LRScheduler | None] | None = None
        self._n_scheduled = 0

    def forget(self) -> None:
        """Begin anew, with fresh state."""
        self._optimizer = None

    def step(self, gradients: Mapping[int, torch.Tensor], number: int) -> None:
        """Take a step; `number` is that of the replica's whole training, for the schedule."""
        if not self._parameters:  # of a rank that trains nothing
            return
        if self._optimizer is None:
            parameters = list(self._parameters.values())
            self._optimizer = torch_optimizers.made(
                self._table, parameters, where="inner", names=self._names
            )
            self._n_scheduled = 0
        optimizer, schedule = self._optimizer
        if schedule is not None and self._n_scheduled < number:
            torch_optimizers.advance(schedule, number - self._n_scheduled)
            self._n_scheduled = number
        for item, parameter in self._parameters.items():
            gradient = gradients.get(item)
            parameter.grad = None if gradient is None else gradient.view_as(parameter)
        optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None
