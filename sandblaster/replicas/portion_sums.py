"""What a replica runs in its lanes: portions, one after the other, summed to a set.

The sum of a set depends on its portions and the parameters alone, not on what the
replica computed before: buffers begin each set as they were fetched, and the model's
own random numbers are drawn by position. So every try at a set is worth the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from distbelief.data.subset import Indices
from distbelief.downpour.norms import is_finite
from distbelief.downpour.steps import Attempt, Batch, Trainer
from distbelief.parameter_server.client.client import Installed


@final
@dataclass(frozen=True, slots=True, eq=False)
class SetSum:
    """The gradient of a set, and the buffers after it; flat, as a client stages it."""

    gradients: Sequence[torch.Tensor | None]
    values: Sequence[torch.Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortionOutcome:
    """What came of one portion.

    Attributes:
        loss: Sum over its examples; NaN if that or the gradient is not finite.
        blame: Which sample is to blame for that, if one is.
        is_of_set: Of which portion of the set that is cannot be told.
        total: Of the set, if this was its last portion.
    """

    loss: float
    blame: str | None = None
    is_of_set: bool = False
    total: SetSum | None = None


@final
class PortionSums:
    """The lanes' work of one replica.

    Args:
        trainer: Which computes gradients, of a loss that is a sum.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        model = trainer.model
        self.values = model.values
        self._buffers = [index for index, spec in enumerate(model.specs()) if spec.kind == "buffer"]
        self._fetched: list[torch.Tensor] = []

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors of the model."""
        return self._trainer.model.n_bytes

    def flops(self, n_samples: int) -> float:
        """Return about how many operations a portion takes."""
        return self._trainer.model.flops(n_samples)

    def read(self, position: int, indices: Indices) -> Batch:
        """Return the samples of a portion (in the data lane)."""
        return self._trainer.read(position, indices)

    def install(self, work: Callable[[], Installed]) -> Installed:
        """Copy what was fetched into the model; remember its buffers."""
        installed = work()
        if not installed.torn:
            self._fetched = [self.values[index].clone() for index in self._buffers]
        return installed

    def step(self, batch: Batch, *, is_first: bool, is_last: bool) -> PortionOutcome:
        """Add the gradient of a portion to that of its set.

        Raises:
            JobError: the user's model, loss or data fails on it.
        """
        model = self._trainer.model
        if is_first:
            model.drop_accrued()
            for index, fetched in zip(self._buffers, self._fetched, strict=True):
                self.values[index].copy_(fetched)
        outcome = self._trainer.step(batch, Attempt(), local_rate=None)
        assert outcome is not None
        if not outcome.is_finite:
            return PortionOutcome(loss=math.nan, blame=outcome.blame)
        if not is_last:
            return PortionOutcome(loss=outcome.loss)
        values = list(self.values)
        for index in self._buffers:
            values[index] = values[index].clone()
        total = SetSum(tuple(model.accrued), values)
        model.drop_accrued()
        gradients = (tensor for tensor in total.gradients if tensor is not None)
        if not is_finite(dict(enumerate(gradients))):
            return PortionOutcome(loss=math.nan, is_of_set=True)
        return PortionOutcome(loss=outcome.loss, total=total)
