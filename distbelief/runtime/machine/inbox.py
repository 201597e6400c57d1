"""Messages of other machines, put together from their blocks, until they are wanted.

A message may come before its step has begun here; it is kept. How many numbers of which
kind it must have is known beforehand, and checked before any memory is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

import numpy as np

from distbelief.errors import RemoteProtocolError
from distbelief.messages import Transfer
from distbelief.vectors import Element, Vector, block_bounds, n_blocks


class Label(NamedTuple):
    """Which message it is: the same in every life and process."""

    step: int
    micro_batch: int
    way: int
    sender: int


@dataclass(slots=True)
class _Parts:
    whole: Vector
    missing: set[int] = field(default_factory=set)


@final
class Inbox:
    """Messages that have come, whole or in part."""

    def __init__(self) -> None:
        self._parts: dict[Label, _Parts] = {}
        self._whole: dict[Label, Vector] = {}

    def clear(self) -> None:
        """Forget all: another life begins."""
        self._parts.clear()
        self._whole.clear()

    def take(
        self, label: Label, message: Transfer, *, n_elements: int, dtype: "np.dtype[Element]"
    ) -> bool:
        """Keep a block; return whether its message is whole now.

        Raises:
            RemoteProtocolError: it does not fit the message.
        """
        count = n_blocks(n_elements, itemsize=dtype.itemsize)
        index, values = message.block_index, message.values
        bounds = _bounds(index, n_elements, itemsize=dtype.itemsize)
        if index >= count or values.dtype != dtype or len(values) != bounds[1] - bounds[0]:
            raise RemoteProtocolError(
                f"block {index} of message {label.way} of step {label.step} has "
                f"{len(values)} numbers of {values.dtype}: of {count} blocks with "
                f"{n_elements} of {dtype} it should have {bounds[1] - bounds[0]}"
            )
        if label in self._whole:
            return False
        if count == 1:
            self._whole[label] = values
            return True
        if label not in self._parts:
            whole: Vector = np.empty(n_elements, dtype=dtype)
            self._parts[label] = _Parts(whole, set(range(count)))
        parts = self._parts[label]
        parts.whole[bounds[0] : bounds[1]] = values
        parts.missing.discard(index)
        if parts.missing:
            return False
        self._whole[label] = self._parts.pop(label).whole
        return True

    def pop_step(self, step: int) -> Iterator[tuple[Label, Vector]]:
        """Yield the whole messages of a step; they are no longer kept."""
        for label in [label for label in self._whole if label.step == step]:
            yield label, self._whole.pop(label)


def blocks_of(values: Vector) -> Iterator[tuple[int, Vector]]:
    """Yield the blocks that `take` puts together."""
    bounds = block_bounds(len(values), itemsize=values.itemsize)
    for index, (start, stop) in enumerate(bounds):
        yield index, values[start:stop]


def _bounds(index: int, n_elements: int, *, itemsize: int) -> tuple[int, int]:
    """Return start and stop of a block; nonsense for one that there is not."""
    _, size = next(block_bounds(1 << 62, itemsize=itemsize))
    return index * size, min((index + 1) * size, n_elements)
