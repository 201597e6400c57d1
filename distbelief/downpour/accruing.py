"""The sum of a machine's gradients since its last push, and what is known of it."""

from collections.abc import Mapping, Sequence
from typing import final

import torch


@final
class Accrued:
    """Gradients of several steps, added up until they are pushed.

    Args:
        n_items: Tensors that a machine keeps.

    Attributes:
        sums: One for each item; None if it has had no gradient.
        n_gradients: How many were added.
        clocks: Of the shards, when the oldest was computed.
        stop: Samples up to and with the newest.
    """

    def __init__(self, n_items: int) -> None:
        self.sums: list[torch.Tensor | None] = [None] * n_items
        self.n_gradients = 0
        self.clocks: tuple[int, ...] = ()
        self.stop = 0
        self._owned: set[int] = set()  # sums that are nobody else's memory

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add those of a step, which are given away. Work of the compute lane."""
        for item, gradient in gradients.items():
            accrued = self.sums[item]
            if accrued is None:
                self.sums[item] = gradient
            elif item in self._owned:
                accrued.add_(gradient)
            else:
                # The first may share memory with another gradient: added to a copy.
                self.sums[item] = accrued + gradient
                self._owned.add(item)

    def count(self, stop: int, *, clocks: tuple[int, ...]) -> None:
        """Count a gradient that was added, of samples up to `stop`."""
        if not self.n_gradients:
            self.clocks = clocks
        self.n_gradients += 1
        self.stop = stop

    def fetched_clocks(self, clocks: Sequence[int]) -> tuple[int, ...]:
        """Return when the oldest was computed, by clocks of shards that live now."""
        # A shard that has restarted since counts from an older clock again.
        return tuple(map(min, self.clocks, clocks))

    def drop(self) -> None:
        """Forget them all: they were pushed, or are computed again."""
        self.sums[:] = [None] * len(self.sums)
        self._owned.clear()
        self.n_gradients = 0
