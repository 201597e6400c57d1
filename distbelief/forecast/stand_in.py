"""A small task that stands for a large one, where only times and bytes are asked for.

Logistic regression on as many samples as the large task has; every sample is one of
1,024. It learns something, so line searches and staleness are real, and it costs next
to nothing, whatever the large net is.
"""

from collections.abc import Sequence
from typing import Final, final

import torch
from torch import nn


N_ROWS: Final = 1024


def net(width: int) -> nn.Module:
    """Return a linear classifier; (n, width) -> (n, 2)."""
    return nn.Linear(width, 2)


@final
class Rows:
    """So many samples of few rows."""

    def __init__(self, n_samples: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(N_ROWS, width, generator=generator)
        self._targets = torch.randint(0, 2, (N_ROWS,), generator=generator)
        self._n_samples = n_samples

    def __len__(self) -> int:
        """Return how many samples there are."""
        return self._n_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample."""
        if not 0 <= index < self._n_samples:
            raise IndexError(f"sample {index} of {self._n_samples}")
        return self._inputs[index % N_ROWS], self._targets[index % N_ROWS]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole batch."""
        rows = torch.as_tensor(indices) % N_ROWS
        return self._inputs[rows], self._targets[rows]


def data(n_samples: int, width: int) -> Rows:
    """Return a data set of so many samples."""
    return Rows(n_samples, width)
