"""What it costs that a layer reads what other machines have: all candidates at once.

    owned by machine  0        1        2
                      |--------|--------|--------|
    needed by      0  |------------|             receives a bit of 1's
                   1         |-----------|       receives a bit of 0's and of 2's

Machine q receives from p what p owns and q needs: an overlap of two boxes. Overlaps of
boxes are products of overlaps of intervals, so all pairs of all candidates are a few
outer products. Each value goes once to each machine that needs it, in one message.

The price of a phase is that of its busiest machine, as if all waited for it:

    max over machines of max(sending, receiving),
    each of them bytes / rate + overhead * messages

and the latency, once. The gradients travel the same way back, which costs the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import numpy as np
import numpy.typing as npt

from distbelief.graph.region import Region
from distbelief.program.cluster import Cluster


Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Cells = Sequence[tuple[int, Region]]
"""Machines and their regions, which are disjoint; a machine may have several."""

_CODE: Final = np.array([1 << 31, 1])  # an interval as one number
_N_BOXES_MAX: Final = 256
"""Boxes of readers that are looked at together: what fits into a cache."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """What is between machines.

    Attributes:
        rates: Bytes per second between each two (machines, machines), or () if equal.
        latency: Seconds that a message takes to arrive once it is sent.
        overhead: Seconds of each message, beside its bytes.
    """

    rates: Floats
    latency: float
    overhead: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """Return the network of a cluster."""
        bandwidths = np.array([machine.bandwidth for machine in cluster.machines])
        rates = np.minimum.outer(bandwidths, bandwidths)
        for ends in cluster.links:
            low, high = map(int, ends.split("-"))
            if max(low, high) < len(cluster):
                rates[low, high] = rates[high, low] = cluster.rate(low, high)
        if (rates == rates[0, 0]).all():
            rates = rates[0, 0]
        return cls(
            rates=np.asarray(rates), latency=cluster.latency, overhead=cluster.message_overhead
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Which machine has, or needs, which boxes, in each of several candidates.

    Sorted by candidate, then by machine; every candidate has at least one box.

    Attributes:
        intervals: [start, stop) of each box (boxes, dims, 2).
        counts: 1, or 0 for boxes that are empty (boxes,).
        candidates: Of each box (boxes,).
        machines: Of each box (boxes,).
        n_candidates: How many there are.
    """

    intervals: Indices
    counts: Floats
    candidates: Indices
    machines: Indices
    n_candidates: int

    @classmethod
    def of(cls, candidates: Sequence[Cells], *, n_dims: int) -> Self:
        """Return the boxes of these candidates."""
        rows: list[tuple[int, int, float]] = []
        intervals: list[tuple[tuple[int, int], ...]] = []
        for index, cells in enumerate(candidates):
            found = sorted(
                ((m, region.intervals) for m, region in cells if region.n_elements), key=_machine
            )
            rows += [(index, machine, 1.0) for machine, _ in found]
            intervals += [box for _, box in found]
            if not found:
                rows.append((index, 0, 0.0))
                intervals.append(((0, 0),) * n_dims)
        candidate, machine, count = zip(*rows, strict=True)
        return cls(
            intervals=np.array(intervals, dtype=np.int64).reshape(len(rows), n_dims, 2),
            counts=np.array(count),
            candidates=np.array(candidate, dtype=np.int64),
            machines=np.array(machine, dtype=np.int64),
            n_candidates=len(candidates),
        )

    def part(self, first: int, last: int) -> "Boxes":
        """Return candidates [first, last) only, counted from 0."""
        low, high = np.searchsorted(self.candidates, [first, last])
        return Boxes(
            intervals=self.intervals[low:high],
            counts=self.counts[low:high],
            candidates=self.candidates[low:high] - first,
            machines=self.machines[low:high],
            n_candidates=last - first,
        )


def transfer_seconds(owned: Boxes, needed: Boxes, *, network: Network, bytes_each: float) -> Floats:
    """Return what one phase costs: (candidates of who owns, of who needs).

    Args:
        owned: Of the layer that is read; boxes of a candidate are disjoint.
        needed: Of those who read it, likewise for each machine.
        network: Between the machines.
        bytes_each: Bytes of one element, in all samples.
    """
    result = np.empty((owned.n_candidates, needed.n_candidates))
    for first, last in _blocks(needed):
        part = needed.part(first, last)
        result[:, first:last] = _phase(owned, part, network, bytes_each)
    return result


def own_seconds(owned: Boxes, needed: Boxes, *, network: Network, bytes_each: float) -> Floats:
    """Return what one phase costs if both have the same candidate: (candidates,)."""
    assert owned.n_candidates == needed.n_candidates
    result = np.empty(owned.n_candidates)
    for index in range(owned.n_candidates):
        one, other = owned.part(index, index + 1), needed.part(index, index + 1)
        result[index] = _phase(one, other, network, bytes_each)[0, 0]
    return result


def _machine(cell: tuple[int, object]) -> int:
    return cell[0]


def _blocks(boxes: Boxes) -> Iterator[tuple[int, int]]:
    """Yield ranges of candidates that have few boxes together."""
    ends = np.searchsorted(boxes.candidates, np.arange(1, boxes.n_candidates + 1))
    first = 0
    for index in range(boxes.n_candidates):
        begin = ends[first - 1] if first else 0
        last = index + 1 == boxes.n_candidates
        if last or ends[index + 1] - begin > _N_BOXES_MAX:
            yield first, index + 1
            first = index + 1


def _phase(owned: Boxes, needed: Boxes, network: Network, bytes_each: float) -> Floats:
    shared = _overlaps(owned, needed)
    shared, sender, of_owner = _per_machine(shared, owned, axis=0)
    shared, receiver, of_reader = _per_machine(shared, needed, axis=1)
    shared[sender[:, np.newaxis] == receiver] = 0.0
    rates = network.rates
    if rates.ndim:
        rates = rates[np.ix_(sender, receiver)]
    seconds = shared * (bytes_each / rates)
    if network.overhead:
        seconds += network.overhead * (shared > 0)
    sending = np.add.reduceat(seconds, of_reader, axis=1)
    receiving = np.add.reduceat(seconds, of_owner, axis=0)
    busiest = np.maximum(
        np.maximum.reduceat(sending, of_owner, axis=0),
        np.maximum.reduceat(receiving, of_reader, axis=1),
    )
    return np.asarray(busiest + network.latency * (busiest > 0))


def _overlaps(owned: Boxes, needed: Boxes) -> Floats:
    """Return how many indices each two boxes share: (boxes owned, boxes needed)."""
    shared = np.outer(owned.counts, needed.counts)
    for dim in range(owned.intervals.shape[1]):
        own, other = owned.intervals[:, dim], needed.intervals[:, dim]
        # A table of few rows, each then copied to where it is wanted.
        codes, which = np.unique(own @ _CODE, return_inverse=True)
        starts, stops = np.divmod(codes, _CODE[0])
        table = np.minimum.outer(stops, other[:, 1])
        table -= np.maximum.outer(starts, other[:, 0])
        shared *= np.maximum(table, 0).astype(np.float64)[which.reshape(-1)]
    return shared


def _per_machine(shared: Floats, boxes: Boxes, *, axis: int) -> tuple[Floats, Indices, Indices]:
    """Add up the boxes of each machine in each candidate.

    Returns:
        The sums; the machine of each; where each candidate begins.
    """
    change = np.diff(boxes.candidates) | np.diff(boxes.machines)
    starts = np.flatnonzero(np.concatenate([[1], change]))
    if len(starts) < len(boxes.machines):
        shared = np.add.reduceat(shared, starts, axis=axis)
    begins = np.searchsorted(boxes.candidates[starts], np.arange(boxes.n_candidates))
    return shared, boxes.machines[starts], begins
