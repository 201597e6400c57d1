"""Losses as sums: the gradient of a portion is a sum over its examples.

Users give a loss that is a mean over the samples of a batch. A batch gradient is the
mean over all its portions, of which the last may be smaller; so portions are summed,
and the shards divide once, at the end.
"""

import torch

from distbelief.runtime.task.losses import Loss


def summed(loss: Loss) -> Loss:
    """Return the loss times the number of samples."""

    def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(outputs, targets) * targets.shape[0]

    return total
