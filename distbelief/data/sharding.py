"""Data shards: which samples each replica reads, and in which order.

"We divide the training data into a number of subsets and run a copy of the model on each of these
subsets" (Dean et al. 2012, section 4.1).

    n = 10, R = 3     replica 0: 9 0 3    replica 1: 2 8 1    replica 2: 6 7 5 4
    batches of 2      pass 0: (5 7) (6 4)   pass 1: (7 4) (6 5)   ... of replica 2

Replica r of R reads positions [n r / R, n (r + 1) / R) of one seeded shuffle of the data set, in a
new order for each pass. Seed, r and pass alone decide it, so a restarted replica continues from
one number: the samples consumed.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from distbelief.errors import JobError


# Data sets are often sorted by class. Without the shuffle, a replica that never sees most classes
# would make the model forget them.

Indices = NDArray[np.int64]  # (n_samples,)

_N_ROUNDS: Final = 6
_N_AHEAD: Final = 4096  # samples computed at once; a whole pass at once would stall the replica


@dataclass(frozen=True, slots=True)
class DataShard:
    """The data of one replica."""

    n_samples: int  # of the whole data set
    _: KW_ONLY
    replica_index: int
    n_replicas: int
    seed: int  # of the orders

    def __post_init__(self) -> None:
        if not 0 <= self.replica_index < self.n_replicas:
            raise ValueError(f"replica_index is {self.replica_index} of {self.n_replicas} replicas")
        if self.n_samples < self.n_replicas:
            raise JobError(
                f"{self.n_replicas} replicas but {self.n_samples} training samples: "
                "each replica needs at least one (use fewer replicas, or more data)"
            )

    @property
    def start(self) -> int:
        return self.n_samples * self.replica_index // self.n_replicas

    @property
    def stop(self) -> int:
        return self.n_samples * (self.replica_index + 1) // self.n_replicas

    def __len__(self) -> int:
        return self.stop - self.start

    def order(self, epoch: int) -> Indices:
        """Return this shard's samples, (len(self),), in the order of pass `epoch`."""
        return self.samples(self.positions(epoch))

    def positions(self, epoch: int) -> Indices:
        """Return the shuffled positions of these samples, in the order of pass `epoch`."""
        generator = np.random.default_rng((self.seed, self.replica_index, epoch))
        return self.start + generator.permutation(len(self)).astype(np.int64)

    def samples(self, positions: Indices) -> Indices:
        if self.n_replicas == 1:
            return positions  # one replica reads everything anyway
        return shuffled(positions, n_samples=self.n_samples, seed=self.seed)


def shuffled(positions: Indices, *, n_samples: int, seed: int) -> Indices:
    """Return the samples at these positions of the shuffle, each in [0, n_samples).

    The shuffle is a keyed permutation that nobody stores. A Feistel network permutes [0, 4^k) for
    the smallest sufficient k; results outside the data set are permuted again until they lie
    inside (Black & Rogaway 2002, "cycle walking").
    """
    n_bits = max(1, ((n_samples - 1).bit_length() + 1) // 2)
    keys = np.random.default_rng((seed, n_samples)).integers(0, 1 << 64, _N_ROUNDS, dtype=np.uint64)
    found = np.asarray(positions, np.uint64)
    outside = np.ones(len(found), np.bool_)
    while outside.any():
        found[outside] = _permuted(found[outside], n_bits=n_bits, keys=keys)
        outside = found >= n_samples
    return found.astype(np.int64)


def _permuted(
    values: NDArray[np.uint64], *, n_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    shift, mask = np.uint64(n_bits), np.uint64((1 << n_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        # The last step of splitmix64, without its first xor, because the halves are short.
        mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << shift) | right


def start_positions(n_consumed: int, *, n_samples: int, n_replicas: int) -> tuple[int, ...]:
    """Return where each replica starts if others consumed so many samples before.

    Every replica starts after the same share of its part. So the counts add up, and a run that
    stopped between two passes continues exactly; within a pass, some samples are read twice and
    some not at all.

    Args:
        n_consumed: By all replicas together; also the sum of the result.
        n_samples: Of the whole data set.
        n_replicas: Number of replicas from now on.
    """
    parts = [
        DataShard(n_samples, replica_index=r, n_replicas=n_replicas, seed=0)
        for r in range(n_replicas)
    ]
    # Differences of one rounded line, so that the sum is exact.
    return tuple(
        n_consumed * part.stop // n_samples - n_consumed * part.start // n_samples for part in parts
    )


@final
class BatchCursor:
    """Batches of one data shard, by position: the samples consumed before.

    The last batch of a pass may be short, so that each pass reads every sample exactly once. A
    single sample left over joins the batch before it, because batch normalisation cannot train on
    one sample.
    """

    def __init__(self, data_shard: DataShard) -> None:
        self._data_shard = data_shard
        self._epoch = -1
        self._positions: Indices = np.empty(0, np.int64)
        self._samples: Indices = np.empty(0, np.int64)  # from `_begin` on
        self._begin = 0

    def batch(self, position: int, batch_size: int) -> Indices:
        """Return the indices of the batch that begins at this position."""
        epoch, offset = divmod(position, len(self._data_shard))
        if epoch != self._epoch:
            self._epoch, self._positions = epoch, self._data_shard.positions(epoch)
            self._samples = self._samples[:0]
        left = len(self._positions) - offset
        is_short = left <= batch_size or (left == batch_size + 1 and batch_size > 1)
        return self._window(offset, left if is_short else batch_size)

    def _window(self, offset: int, n: int) -> Indices:
        begin = offset - self._begin
        if begin < 0 or begin + n > len(self._samples):
            positions = self._positions[offset : offset + max(n, _N_AHEAD)]
            self._samples, self._begin = self._data_shard.samples(positions), offset
            begin = 0
        return self._samples[begin : begin + n]


@final
class Samples:
    """The samples of a data set by position, endless: position p is sample `order[p mod n]`.

    Args:
        n_samples: Of the data set.
        seed: Of the order; None for the order of the data set.
    """

    def __init__(self, n_samples: int, *, seed: int | None = None) -> None:
        if n_samples < 1:
            raise JobError(f"the training data has {n_samples} samples: a batch needs at least one")
        self.n_samples = n_samples
        order = np.arange(n_samples, dtype=np.int64)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        self._order = order

    def at(self, start: int, stop: int) -> Indices:
        return self._order[np.arange(start, stop) % self.n_samples]
