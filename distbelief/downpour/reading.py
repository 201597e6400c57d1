"""Batches read in advance, in the data lane: that of the present step, and the next."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import final

from distbelief.data.subset import BatchCursor, DataShard
from distbelief.downpour.steps import Batch, Trainer
from distbelief.roles import Action, Compute, Cost, Lane


N_BATCHES_HELD = 2


@final
class BatchReader:
    """The batches of one life of a replica, each read once.

    Args:
        data_shard: Where they are taken from.
        trainer: Who reads them.
        batch_size: Samples of each.
        n_batches_max: How many there will be; None: no end.
    """

    def __init__(
        self, data_shard: DataShard, trainer: Trainer, *, batch_size: int, n_batches_max: int | None
    ) -> None:
        self._cursor = BatchCursor(data_shard)
        self._trainer = trainer
        self._batch_size = batch_size
        self._n_left = n_batches_max
        self._position = 0  # after the last batch asked for
        self._reading = False
        self._held: deque[Batch] = deque()
        self._bytes_per_sample = 0.0  # once a batch has come

    def start(self, position: int) -> None:
        """Begin after so many samples."""
        self._position = position

    @property
    def next(self) -> Batch | None:
        """The batch of the next step, if it has been read."""
        return self._held[0] if self._held else None

    def take(self) -> Batch:
        """Return the batch of the step that is done, and forget it."""
        return self._held.popleft()

    def read_ahead(self) -> Sequence[Action]:
        """Ask for one more batch, unless there are enough or one is on its way."""
        if self._reading or len(self._held) >= N_BATCHES_HELD or self._n_left == 0:
            return []
        if self._n_left is not None:
            self._n_left -= 1
        self._reading = True
        indices = self._cursor.batch(self._position, self._batch_size)
        work = partial(self._trainer.read, self._position, indices)
        self._position += len(indices)
        return [
            Compute(
                name="replica:read",
                work=work,
                cost=Cost(n_bytes=2.0 * self._bytes_per_sample * len(indices)),
                lane=Lane.DATA,
            )
        ]

    def have_read(self, result: object) -> None:
        """Keep the batch that was asked for."""
        assert isinstance(result, Batch), result
        self._reading = False
        self._held.append(result)
        self._bytes_per_sample = result.n_bytes / result.n_samples
