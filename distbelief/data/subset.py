"""Subsets: which samples a replica reads, and in which order.

"We divide the training data into a number of subsets and run a copy of the model on
each of these subsets" (Dean et al. 2012, section 4.1). Replica r of R reads the samples
[n r / R, n (r + 1) / R), in an order that is drawn anew for each pass over them. The
order depends on nothing but seed, r and the number of the pass; so a replica that is
restarted goes on where the shards have it from one number, the samples consumed.

    n = 10, R = 3     replica 0: 0 1 2    replica 1: 3 4 5    replica 2: 6 7 8 9
    batches of 2      pass 0: (8 6) (9 7)   pass 1: (6 7) (9 8)   ... of replica 2

If a run goes on with another number of replicas, their parts are others, and what was
seen of the present pass is no longer a beginning of each part's order. Then every
replica begins after the same share of its part as of the whole (`fresh_positions`): the
samples consumed add up, passes over the data count right, and a run that stops between
two passes goes on exactly. Within a pass, some samples are read twice and some not.
"""

from dataclasses import KW_ONLY, dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from distbelief.errors import JobError


Indices = NDArray[np.int64]  # (n_samples,)


@dataclass(frozen=True, slots=True)
class DataShard:
    """The data of one replica.

    Attributes:
        n_samples: Of the whole data set.
        replica_index: Whose part it is.
        n_replicas: Into how many parts the data is divided.
        seed: Of the orders.
    """

    n_samples: int
    _: KW_ONLY
    replica_index: int
    n_replicas: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.replica_index < self.n_replicas:
            raise ValueError(
                f"replica_index is {self.replica_index} of {self.n_replicas} replicas"
            )
        if self.n_samples < self.n_replicas:
            raise JobError(
                f"{self.n_replicas} replicas but {self.n_samples} training samples: "
                "each replica needs at least one (use fewer replicas, or more data)"
            )

    @property
    def start(self) -> int:
        """First sample of this part."""
        return self.n_samples * self.replica_index // self.n_replicas

    @property
    def stop(self) -> int:
        """First sample after this part."""
        return self.n_samples * (self.replica_index + 1) // self.n_replicas

    def __len__(self) -> int:
        return self.stop - self.start

    def order(self, epoch: int) -> Indices:
        """Return this part's samples, (len(self),), as pass `epoch` visits them."""
        generator = np.random.default_rng((self.seed, self.replica_index, epoch))
        return self.start + generator.permutation(len(self)).astype(np.int64)


def fresh_positions(
    n_consumed: int, *, n_samples: int, n_replicas: int
) -> tuple[int, ...]:
    """Return where each replica begins when others consumed so many samples before.

    Args:
        n_consumed: By all replicas together; also the sum of what is returned.
        n_samples: Of the whole data set.
        n_replicas: Into how many parts it is divided from now on.
    """
    parts = [
        DataShard(n_samples, replica_index=r, n_replicas=n_replicas, seed=0)
        for r in range(n_replicas)
    ]
    # Differences of one rounded line, so that nothing is lost to rounding.
    return tuple(
        n_consumed * part.stop // n_samples - n_consumed * part.start // n_samples
        for part in parts
    )


@final
class BatchCursor:
    """Batches of one part, by position: the samples consumed before.

    The last batch of a pass is as short as it comes: every sample is read exactly once
    in each pass. Only a single sample left over joins the batch before it: batch
    normalisation cannot train on one. It remembers the order of one pass, nothing else.
    """

    def __init__(self, data_shard: DataShard) -> None:
        self._data_shard = data_shard
        self._epoch = -1
        self._order: Indices = np.empty(0, np.int64)

    def batch(self, position: int, batch_size: int) -> Indices:
        """Return the indices of the batch that begins at this position."""
        epoch, offset = divmod(position, len(self._data_shard))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._data_shard.order(epoch)
        left = len(self._order) - offset
        if left == batch_size + 1 and batch_size > 1:
            return self._order[offset:]
        return self._order[offset : offset + batch_size]
