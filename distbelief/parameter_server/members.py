"""What a shard must know of all its clients at each message, kept as each of them changes.

    Least        the smallest of keys that come, change and go
    SliceCounts  how many clients hold one and the same element
    WorkersIn    those that are in: pushes are divided by their number, or by their samples
    Pushers      those that push or have pushed: over them the buffers of a push are averaged

A message costs O(log n) of n clients, and O(d) of their d different slices: as many as a replica
has ranks. Only clients that are gone are gone through, in an array, where others have buffers or
a backup. Together with `ticks.Floor` this takes at most 3 KB for each client.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Protocol, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.slices import ShardSlice
from distbelief.protocol.role import Address


Key = TypeVar("Key", int, str)

_N_STALE_MAX: Final = 64  # entries of a heap, beyond one for each key


@final
class Least(Generic[Key]):
    """The smallest of keys that come, change and go; of equal ones, that of the first name."""

    # A key that changes or goes stays in the heap until it is on top, or most of the heap is old.

    def __init__(self) -> None:
        self._keys: dict[Address, Key] = {}
        self._heap: list[tuple[Key, Address]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, name: Address, key: Key) -> None:
        if self._keys.get(name) == key:
            return
        self._keys[name] = key
        heappush(self._heap, (key, name))
        if len(self._heap) > 2 * len(self._keys) + _N_STALE_MAX:
            self._heap = [(key, name) for name, key in self._keys.items()]
            heapify(self._heap)

    def drop(self, name: Address) -> None:
        self._keys.pop(name, None)

    def first(self) -> tuple[Key, Address] | None:
        heap, keys = self._heap, self._keys
        while heap:
            key, name = heap[0]
            if keys.get(name) == key:
                return heap[0]
            heappop(heap)
        return None


# --- slices ---


@final
class SliceCounts:
    """How many of some clients hold one and the same element of a slice.

    Only elements in one part of the shard's vector count. The ranks of a partitioned replica hold
    each element once, so they count as one client.
    """

    def __init__(self, part: tuple[int, int]) -> None:
        self._part = part
        self._rows: dict[bytes, int] = {}
        self._inner: list[IndexRanges] = []  # of each row, what lies in the part
        # The ends of all ranges; between which of them each range lies, and its row.
        self._bounds: NDArray[np.int64] | None = None
        self._ranges: NDArray[np.int64] = np.zeros((3, 0), np.int64)

    def __len__(self) -> int:
        return len(self._inner)

    def row(self, shard_slice: ShardSlice) -> int:
        """Return the number of this slice; equal ones have one."""
        row = self._rows.get(shard_slice.key)
        if row is None:
            row = self._rows[shard_slice.key] = len(self._inner)
            self._inner.append(shard_slice.within(*self._part))
            self._bounds = None
        return row

    def most(self, row: int, counts: Sequence[int]) -> int:
        """Return how many hold one element of this row's slice, at most, and at least 1.

        `counts` are the clients of each row.
        """
        n = sum(counts)
        inner = self._inner[row]
        if counts[row] == n or not inner.n_elements:
            return max(1, n)
        if self._bounds is None:
            self._sort()
        assert self._bounds is not None
        starts, stops, rows = self._ranges
        weights, size = np.asarray(counts)[rows], len(self._bounds)
        change = np.bincount(starts, weights, size) - np.bincount(stops, weights, size)
        holding = np.cumsum(change)[:-1]
        return max(1, int(np.max(holding, where=inner.mask(self._bounds), initial=0)))

    def _sort(self) -> None:
        bounds = self._bounds = IndexRanges.ends(self._inner)
        rows = np.repeat(np.arange(len(self._inner)), [len(one.starts) for one in self._inner])
        ends = [np.concatenate([getattr(r, e) for r in self._inner]) for e in ("starts", "stops")]
        self._ranges = np.stack([*(np.searchsorted(bounds, one) for one in ends), rows])


# --- those that are in ---


class Worker(Protocol):
    """A client, as far as others count it."""

    shard_slice: ShardSlice
    n_samples: int | None  # of its last push
    n_beside: int  # clients that were in with it, itself included, when one of them left
    turn: int
    last_clock: int

    @property
    def name(self) -> Address: ...
    @property
    def is_in(self) -> bool: ...
    @property
    def is_pushing(self) -> bool: ...


@final
@dataclass(slots=True, eq=False)
class _In:
    worker: Worker
    row: int
    n_samples: int | None
    since: int  # those that left before do not count


@final
class WorkersIn:
    """The clients that are in: how many hold one element, and the samples of their last pushes."""

    def __init__(self, part: tuple[int, int]) -> None:
        self._slices = SliceCounts(part)
        self._counts: list[int] = []  # by row
        self._inside: dict[Address, _In] = {}
        self._samples = self._n_unknown = 0  # of all: the sum, and those that have not pushed yet
        self._n_left = 0
        # By row: who left, and how many held one element then. Only the latest of each number and
        # of all smaller ones stays, so that the first one since then is the largest.
        self._left: list[list[tuple[int, int]]] = []

    def note(self, worker: Worker) -> None:
        """Take over what has changed."""
        known = self._inside.get(worker.name)
        if known is not None and not (known.worker is worker and worker.is_in):
            known.worker.n_beside = self._most_beside(known)
            self._count(known, -1)
            del self._inside[worker.name]
            known = None
        if known is None and worker.is_in:
            known = _In(worker, self._row(worker), worker.n_samples, self._n_left)
            self._inside[worker.name] = known
            self._count(known, 1)
        elif known is not None and known.n_samples != worker.n_samples:
            self._count(known, -1)
            known.n_samples = worker.n_samples
            self._count(known, 1)

    def leave(self) -> None:
        """Note how many hold one element before one of them leaves.

        What they have done together, and not pushed yet, counts as before: or the last pushes of
        workers that end together would count 1/4 + 1/3 + 1/2 + 1.
        """
        for row, n in enumerate(self._counts):
            if n:
                n_most, left = self._slices.most(row, self._counts), self._left[row]
                while left and left[-1][1] <= n_most:
                    left.pop()
                left.append((self._n_left, n_most))
        self._n_left += 1

    def divisor(self, worker: Worker) -> int:
        """Return by how many clients a push is divided; the next one begins anew."""
        known, row = self._inside.get(worker.name), self._row(worker)
        counts = self._counts
        if known is None:
            counts = [n + (one == row) for one, n in enumerate(counts)]
            n_beside = worker.n_beside
        else:
            n_beside = self._most_beside(known)
            known.since = self._n_left
        worker.n_beside = 0
        return max(self._slices.most(row, counts), n_beside)

    def others_samples(self, worker: Worker) -> tuple[int, int, int]:
        """Return how many others are in, how many have not pushed, and the samples of the rest."""
        n, n_unknown, samples = len(self._inside), self._n_unknown, self._samples
        known = self._inside.get(worker.name)
        if known is None:
            return n, n_unknown, samples
        return n - 1, n_unknown - (known.n_samples is None), samples - (known.n_samples or 0)

    def _most_beside(self, known: _In) -> int:
        left = self._left[known.row]
        first = bisect_left(left, (known.since,))
        return max(known.worker.n_beside, left[first][1] if first < len(left) else 0)

    def _count(self, known: _In, n: int) -> None:
        self._counts[known.row] += n
        self._n_unknown += n * (known.n_samples is None)
        self._samples += n * (known.n_samples or 0)

    def _row(self, worker: Worker) -> int:
        row = self._slices.row(worker.shard_slice)
        if row == len(self._counts):
            self._counts.append(0)
            self._left.append([])
        return row


# --- those that push ---


@final
class Pushers:
    """The clients that push, and those that have pushed and are gone."""

    def __init__(self, part: tuple[int, int]) -> None:
        self._slices = SliceCounts(part)
        self._counts: list[int] = []  # of those that push, by row
        self._pushing: dict[Address, int] = {}  # their rows
        self._turns = Least[int]()  # of these
        # Of those that are gone: turn, clock after the last push, row. Names in their order.
        self._gone = np.zeros((3, 16), np.int64)
        self._names: list[Address] = []
        self._columns: dict[Address, int] = {}

    def note(self, worker: Worker) -> None:
        """Take over what has changed."""
        name = worker.name
        if worker.is_pushing:
            row = self._row(worker)
            if self._pushing.get(name) != row:
                self._drop_gone(name)
                self._drop_pushing(name)
                self._pushing[name] = row
                self._counts[row] += 1
            self._turns.put(name, worker.turn)
            return
        self._drop_pushing(name)
        if worker.turn or worker.last_clock:
            self._put_gone(name, worker)
        else:
            self._drop_gone(name)

    def drop(self, name: Address) -> None:
        """Forget a client."""
        self._drop_pushing(name)
        self._drop_gone(name)

    @property
    def next_turn(self) -> int:
        """The turn of a client that begins now: of the last here, or after all that were."""
        first = self._turns.first()
        if first is not None:
            return first[0]
        return int(self._gone[0, : len(self._names)].max(initial=0))

    def n_averaged(self, worker: Worker, *, since: int) -> int:
        """Return over how many clients the buffers of a push are averaged.

        The k-th pushes of all are averaged, also if some have ended by then: workers that end one
        by one count as those that end together. Nor does a push overwrite what others have pushed
        since its worker fetched, though they are gone.
        """
        row, counts = self._row(worker), self._counts
        if self._names:
            turns, clocks, rows = self._gone[:, : len(self._names)]
            is_beside = (turns > worker.turn) | (clocks > since)
            is_own = self._columns.get(worker.name)
            if is_own is not None:
                is_beside[is_own] = True
            gone = np.bincount(rows[is_beside], minlength=len(counts))
            counts = [n + more for n, more in zip(counts, gone.tolist(), strict=True)]
        if worker.name not in self._pushing and worker.name not in self._columns:
            counts = [n + (one == row) for one, n in enumerate(counts)]
        return self._slices.most(row, counts)

    def _row(self, worker: Worker) -> int:
        row = self._slices.row(worker.shard_slice)
        if row == len(self._counts):
            self._counts.append(0)
        return row

    def _drop_pushing(self, name: Address) -> None:
        row = self._pushing.pop(name, None)
        if row is not None:
            self._counts[row] -= 1
            self._turns.drop(name)

    def _put_gone(self, name: Address, worker: Worker) -> None:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = len(self._names)
            self._names.append(name)
            if column == self._gone.shape[1]:
                self._gone = np.concatenate([self._gone, np.zeros_like(self._gone)], axis=1)
        self._gone[:, column] = worker.turn, worker.last_clock, self._row(worker)

    def _drop_gone(self, name: Address) -> None:
        column = self._columns.pop(name, None)
        if column is None:
            return
        last = self._names.pop()
        if last != name:  # it takes the free place
            self._gone[:, column] = self._gone[:, len(self._names)]
            self._names[column], self._columns[last] = last, column
