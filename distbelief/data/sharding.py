"""The order of the data: fixed for a job, endless, circular.

Position p is sample `order[p mod n]`. A batch of all n examples is read the same way
whichever position it begins at, and a smaller one is a window that can be moved on, or
moved half-way, so that two batches overlap.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from distbelief.errors import JobError


# Subsets: which samples a replica reads, and in which order.
#
# "We divide the training data into a number of subsets and run a copy of the model on
# each of these subsets" (Dean et al. 2012, section 4.1). The samples are dealt in a
# seeded random order: data sets often lie sorted by class, and a replica that never sees
# most classes trains the others' knowledge of them away. Replica r of R reads the places
# [n r / R, n (r + 1) / R) of that order, in an order that is drawn anew for each pass. It
# depends on nothing but seed, r and the number of the pass; so a replica that is
# restarted goes on where the shards have it from one number, the samples consumed.
#
#     n = 10, R = 3     replica 0: 9 0 3    replica 1: 2 8 1    replica 2: 6 7 5 4
#     batches of 2      pass 0: (5 7) (6 4)   pass 1: (7 4) (6 5)   ... of replica 2
#
# So a pass reads its samples from all over the data set, with any number of replicas.
#
# If a run goes on with another number of replicas, their parts are others, and what was
# seen of the present pass is no longer a beginning of each part's order. Then every
# replica begins after the same share of its part as of the whole (`fresh_positions`): the
# samples consumed add up, passes over the data count right, and a run that stops between
# two passes goes on exactly. Within a pass, some samples are read twice and some not.

Indices = NDArray[np.int64]  # (n_samples,)

_N_ROUNDS: Final = 6
_N_DEALT: Final = 4096  # places whose samples are computed at once


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
            raise ValueError(f"replica_index is {self.replica_index} of {self.n_replicas} replicas")
        if self.n_samples < self.n_replicas:
            raise JobError(
                f"{self.n_replicas} replicas but {self.n_samples} training samples: "
                "each replica needs at least one (use fewer replicas, or more data)"
            )

    @property
    def start(self) -> int:
        """First place of this part in the order in which samples are dealt."""
        return self.n_samples * self.replica_index // self.n_replicas

    @property
    def stop(self) -> int:
        """First place after this part."""
        return self.n_samples * (self.replica_index + 1) // self.n_replicas

    def __len__(self) -> int:
        return self.stop - self.start

    def order(self, epoch: int) -> Indices:
        """Return this part's samples, (len(self),), as pass `epoch` visits them."""
        return self.samples(self.places(epoch))

    def places(self, epoch: int) -> Indices:
        """Return the places of these samples in the order in which they are dealt."""
        generator = np.random.default_rng((self.seed, self.replica_index, epoch))
        return self.start + generator.permutation(len(self)).astype(np.int64)

    def samples(self, places: Indices) -> Indices:
        """Return the samples that are dealt at these places."""
        if self.n_replicas == 1:
            return places  # it is all of the data, whatever is dealt first
        return dealt(places, n_samples=self.n_samples, seed=self.seed)


def dealt(places: Indices, *, n_samples: int, seed: int) -> Indices:
    """Return the samples that are dealt at these places, each in [0, n_samples).

    The order is a keyed permutation that nobody stores: each replica computes its own
    part of it. A Feistel network permutes [0, 4^k) for the smallest k that has room for
    all samples; what it takes outside of the data set is permuted again until it lies
    inside, which keeps it a permutation (Black & Rogaway 2002, "cycle walking").
    """
    n_bits = max(1, ((n_samples - 1).bit_length() + 1) // 2)
    keys = np.random.default_rng((seed, n_samples)).integers(0, 1 << 64, _N_ROUNDS, dtype=np.uint64)
    found = np.asarray(places, np.uint64)
    outside = np.ones(len(found), np.bool_)
    while outside.any():
        found[outside] = _permuted(found[outside], n_bits=n_bits, keys=keys)
        outside = found >= n_samples
    return found.astype(np.int64)


def _permuted(
    values: NDArray[np.uint64], *, n_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return a permutation of [0, 4^n_bits), at these values."""
    shift, mask = np.uint64(n_bits), np.uint64((1 << n_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        # The last step of splitmix64, without its first xor: halves are short.
        mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << shift) | right


def fresh_positions(n_consumed: int, *, n_samples: int, n_replicas: int) -> tuple[int, ...]:
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
        n_consumed * part.stop // n_samples - n_consumed * part.start // n_samples for part in parts
    )


@final
class BatchCursor:
    """Batches of one part, by position: the samples consumed before.

    The last batch of a pass is as short as it comes: every sample is read exactly once
    in each pass. Only a single sample left over joins the batch before it: batch
    normalisation cannot train on one. It remembers the order of one pass, and which
    samples are dealt at the next few places: to compute that for a whole pass at once
    would hold up a replica with many samples.
    """

    def __init__(self, data_shard: DataShard) -> None:
        self._data_shard = data_shard
        self._epoch = -1
        self._places: Indices = np.empty(0, np.int64)
        self._samples: Indices = np.empty(0, np.int64)  # from `_begin` on
        self._begin = 0

    def batch(self, position: int, batch_size: int) -> Indices:
        """Return the indices of the batch that begins at this position."""
        epoch, offset = divmod(position, len(self._data_shard))
        if epoch != self._epoch:
            self._epoch, self._places = epoch, self._data_shard.places(epoch)
            self._samples = self._samples[:0]
        left = len(self._places) - offset
        is_short = left <= batch_size or (left == batch_size + 1 and batch_size > 1)
        return self._dealt(offset, left if is_short else batch_size)

    def _dealt(self, offset: int, n: int) -> Indices:
        begin = offset - self._begin
        if begin < 0 or begin + n > len(self._samples):
            places = self._places[offset : offset + max(n, _N_DEALT)]
            self._samples, self._begin = self._data_shard.samples(places), offset
            begin = 0
        return self._samples[begin : begin + n]


@final
class Samples:
    """The samples of a data set, by position.

    Args:
        n_samples: Of the data set.
        seed: Of the order; None: as they come.
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
        """Return the samples at positions [start, stop), (stop - start,)."""
        return self._order[np.arange(start, stop) % self.n_samples]
