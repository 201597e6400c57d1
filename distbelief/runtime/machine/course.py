"""Which samples each step of a life is about: the same on every machine of a group."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol, final

import numpy as np

from distbelief.data.subset import BatchCursor, DataShard, Indices


N_KEPT: Final = 4
"""Steps remembered: the present one, those after it, and one before."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The samples of one step.

    Attributes:
        position: Samples before them.
        indices: (n_samples,) in the data set.
    """

    position: int
    indices: Indices

    @property
    def stop(self) -> int:
        """Samples up to and with them."""
        return self.position + len(self.indices)


class Course(Protocol):
    """The samples of all steps of a life."""

    def start(self, position: int) -> None:
        """Begin a life there."""
        ...

    def batch(self, step: int) -> Chosen:
        """Return the samples of this step: not long before, nor after, others asked."""
        ...


@final
class TrainingCourse:
    """One batch after the other, pass after pass.

    Args:
        data_shard: Of the replica.
        batch_size: Samples of a step.
    """

    def __init__(self, data_shard: DataShard, *, batch_size: int) -> None:
        self._cursor = BatchCursor(data_shard)
        self._n_samples = len(data_shard)
        self._batch_size = batch_size
        self._known: dict[int, Chosen] = {}
        self._next = 0
        self._position = 0

    def start(self, position: int) -> None:
        """Begin after so many samples."""
        self._known.clear()
        self._next, self._position = 0, position

    def batch(self, step: int) -> Chosen:
        """Return the samples of this step."""
        while self._next <= step:
            indices = self._cursor.batch(self._position, self._batch_size)
            self._known[self._next] = Chosen(position=self._position, indices=indices)
            self._known.pop(self._next - N_KEPT, None)
            self._position += len(indices)
            self._next += 1
        return self._known[step]

    def n_steps(self, start: int, stop: int) -> int:
        """Return how many steps there are from one position to another."""
        left = self._n_samples - start % self._n_samples
        if stop - start <= left:
            return self._n_within(left, stop - start)
        n_passes, rest = divmod(stop - start - left, self._n_samples)
        n_whole = self._n_within(self._n_samples, self._n_samples)
        return (
            self._n_within(left, left) + n_passes * n_whole + self._n_within(self._n_samples, rest)
        )

    def _n_within(self, left: int, n_samples: int) -> int:
        """Return the steps of so many samples, where a pass has `left` of them."""
        size = self._batch_size
        is_long = left % size == 1 and left > size > 1  # the last batch takes one more
        n_left = left // size if is_long else -(-left // size)
        return min(-(-max(n_samples, 0) // size), n_left)


@final
class MeasuringCourse:
    """The held-out samples, chunk by chunk: a subset (position 0), or all (1).

    Args:
        kinds: The samples of both, in their order.
        chunk: Samples of a step.
    """

    def __init__(self, kinds: Sequence[Indices], *, chunk: int) -> None:
        self._kinds = kinds
        self._chunk = chunk
        self._indices = kinds[0]

    def start(self, position: int) -> None:
        """Begin to measure these."""
        self._indices = self._kinds[min(position, len(self._kinds) - 1)]

    def n_steps(self, position: int) -> int:
        """Return how many chunks there are."""
        return -(-len(self._kinds[position]) // self._chunk)

    def batch(self, step: int) -> Chosen:
        """Return a chunk."""
        first = step * self._chunk
        return Chosen(position=first, indices=self._indices[first : first + self._chunk])


def step_seed(seed: Sequence[int], position: int) -> int:
    """Return the seed of a step's randomness, equal on all machines."""
    sequence = np.random.SeedSequence((*seed, position))
    return int(sequence.generate_state(1, np.uint64)[0])


def micro_sizes(n_samples: int, micro_batches: int) -> list[int]:
    """Return the samples of each micro-batch; none is empty."""
    n = min(micro_batches, n_samples)
    ends = [n_samples * (index + 1) // n for index in range(n)]
    return [stop - start for start, stop in pairwise([0, *ends])]
