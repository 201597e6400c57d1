"""Where the values of a step lie: written once, gone when read for the last time.

Some slots are there once for all micro-batches, of others each has its own. A slot that
several operations add to is copied once, where its first value may be somebody else's
memory, and then added to in place.
"""

from collections.abc import Sequence
from typing import final

import torch

from distbelief.runtime.execution.gathering import Gather, gathered


@final
class Slots:
    """The values of the step under way.

    Args:
        once: Per slot, whether it is there once for all micro-batches.
        n_readers: Per place, how often it is read.
        sizes: Samples of each micro-batch.
        like: A zero of the step's type, where it is computed.
    """

    def __init__(
        self,
        once: Sequence[bool],
        n_readers: Sequence[int],
        *,
        sizes: Sequence[int],
        like: torch.Tensor,
    ) -> None:
        self._once = once
        self._n_readers = list(n_readers)
        self._sizes = sizes
        self._like = like
        self._values: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()  # of these nobody else has the memory

    def at(self, slot: int, copy: int) -> torch.Tensor:
        """Return what lies there, and leave it there."""
        return self._values[copy * len(self._once) + slot]

    def read(self, reads: Sequence[Gather], copy: int) -> list[torch.Tensor | None]:
        """Return what is put together; forget what nobody reads after this."""
        result = []
        for read in reads:
            places = [self._place(piece.slot, copy) for piece in read.pieces]
            pieces = [self._values.get(place) for place in places]
            like = self._like
            if read.samples and not pieces:
                like = like.expand(self._sizes[copy], 1)
            result.append(gathered(read, pieces, like=like))
        for read in reads:
            for piece in read.pieces:
                place = self._place(piece.slot, copy)
                self._n_readers[place] -= 1
                if not self._n_readers[place]:
                    self._values.pop(place, None)
        return result

    def write(self, slot: int, copy: int, value: torch.Tensor, *, adds: bool = False) -> None:
        """Lay a value there, or add it to what there is; unless nobody reads it."""
        place = self._place(slot, copy)
        if not self._n_readers[place]:
            return
        if not adds or place not in self._values:
            self._values[place] = value
        elif place in self._fresh:
            self._values[place] += value
        else:
            # The first may be somebody else's too: out of place once, then in place.
            self._values[place] = self._values[place] + value
            self._fresh.add(place)

    def _place(self, slot: int, copy: int) -> int:
        return slot if self._once[slot] else copy * len(self._once) + slot
