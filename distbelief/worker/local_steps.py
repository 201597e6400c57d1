"""Local steps: a replica trains with an optimizer of its own, and pushes how far it has come.

    anchor    a                        the values at the last push, as the shards were told
    step      x := optimizer(x, g)
    push      a - x, then a := x       applied at rate 1.0 by rule "sgd", a shard moves as x did
    install   x := w + (x - a); a := w

So each local step is in exactly one push, and no fetch loses or repeats one. The state of the
optimizer (velocity, moments) stays here; it is lost when steps are taken back, or the replica dies.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distbelief.core import torch_optimizers
from distbelief.core.torch_optimizers import Table


@final
class LocalSteps:
    """The steps of one replica, or of one rank of it. Runs in the compute executor."""

    def __init__(
        self,
        table: Table,
        values: Mapping[int, torch.Tensor],  # flat, of what is trained, by item
        *,
        shapes: Sequence[Sequence[int]] | None = None,  # per item; None: flat
    ) -> None:
        self._table = table
        self._values = values
        self._parameters = {
            item: nn.Parameter(value if shapes is None else value.view(*shapes[item]))
            for item, value in values.items()
        }
        self._anchors = {item: value.clone() for item, value in values.items()}
        self._optimizer: tuple[Optimizer, LRScheduler | None] | None = None
        self._n_scheduled = 0
        self._is_held = False  # the anchors hold x - a, while an install overwrites x
        self._has_moved = False  # x differs from a

    @property
    def is_held(self) -> bool:
        return self._is_held

    def restart(self) -> None:
        """Drop all steps that are not pushed, and the optimizer's state; a fetch follows."""
        self._optimizer = None
        self._is_held = self._has_moved = False

    def step(self, gradients: Mapping[int, torch.Tensor], number: int) -> None:
        """Take a step; `number` is that of the replica's whole training, for the schedule."""
        if self._optimizer is None:
            parameters = list(self._parameters.values())
            self._optimizer = torch_optimizers.made(self._table, parameters, where="inner")
            self._n_scheduled = 0
        optimizer, schedule = self._optimizer
        if schedule is not None and self._n_scheduled < number:
            torch_optimizers.advance(schedule, number - self._n_scheduled)
            self._n_scheduled = number
        for item, parameter in self._parameters.items():
            gradient = gradients.get(item)
            parameter.grad = None if gradient is None else gradient.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self._has_moved = True

    def put_into(self, put: Callable[[int, torch.Tensor], None]) -> None:
        """Give away what is to be pushed; `pushed` follows."""
        for item, anchor in self._anchors.items():
            put(item, -anchor if self._is_held else anchor - self._values[item])

    def pushed(self, *, finite: bool) -> None:
        """All steps so far are pushed; or refused, and then they are taken back."""
        self._has_moved = False
        if not finite:
            self._optimizer = None
        if self._is_held:  # what is installed next becomes the anchor
            return
        for item, value in self._values.items():
            if finite:
                self._anchors[item].copy_(value)
            else:
                value.copy_(self._anchors[item])

    def hold(self) -> None:
        """Before an install, which may be repeated: keep what is not pushed."""
        if self._is_held:
            return
        self._is_held = True
        if self._has_moved:
            for item, anchor in self._anchors.items():
                torch.sub(self._values[item], anchor, out=anchor)

    def merge(self) -> None:
        """After an install: what is here now is the anchor; repeat what is not pushed from it."""
        self._is_held = False
        for item, value in self._values.items():
            anchor = self._anchors[item]
            # Without steps the fetched values stay as they are, to the sign of a zero.
            moved = value + anchor if self._has_moved else None
            anchor.copy_(value)
            if moved is not None:
                value.copy_(moved)
