"""Cost tables: vectors and matrices of the costs of all candidates of all groups.

Networks repeat layers. Everything that depends only on a layer's signature and its placements is
cached by these: fifty equal layers cost as much as one.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Final, Self, TypeVar, final

import numpy as np

from distbelief.graph.graph import Layer, LayerGraph
from distbelief.graph.operator import Operator, PartialSums
from distbelief.graph.region import IntArray, Interval, Region, disjoint
from distbelief.plans.cluster import Cluster, FloatArray
from distbelief.plans.compiler import index_bytes, with_gradient
from distbelief.plans.placement import Placement
from distbelief.plans.planner.cost_model import N_BYTES, single_sample
from distbelief.plans.planner.grouping import Group, reads_its_own
from distbelief.plans.step_cost import Costs
from distbelief.plans.tasks import rule_of, written_by


# --- replicated parameters ---
#
# Each user owns a piece of the range: it broadcasts the piece to the other users before the forward
# pass, and adds up their gradients after the backward pass.


def sync_seconds(
    used: Iterable[tuple[int, Mapping[str, Region]]],
    cluster: Cluster,
    *,
    trains: Mapping[str, bool],
) -> float:
    """Return the seconds of all broadcasts and reductions on the busiest machine.

    `used` pairs machines with the region that each uses of every tensor.
    """
    users: defaultdict[tuple[str, Region], set[int]] = defaultdict(set)
    for machine, uses in used:
        for name, region in uses.items():
            if region.n_elements:
                users[name, region].add(machine)
    seconds: defaultdict[int, float] = defaultdict(float)
    for (name, region), machines in users.items():
        if len(machines) > 1:
            # Broadcast before the forward pass; reduction of gradients after the backward pass.
            n_phases = 2 if trains[name] else 1
            each = _phase_seconds(region, sorted(machines), cluster) * n_phases
            for machine in machines:
                seconds[machine] += each
    return max(seconds.values(), default=0.0)


def _phase_seconds(region: Region, users: Sequence[int], cluster: Cluster) -> float:
    # A broadcast or a reduction by the first user, who owns most. The range is cut along dimension
    # 0 into a piece of whole rows per user, as far as it has rows.
    rows = region.shape[0] if region.shape else 1
    n_others, n_owners = len(users) - 1, min(len(users), rows)
    n_bytes = float(N_BYTES * region.n_elements)
    largest = n_bytes * -(-rows // n_owners) / rows
    received = n_bytes - (n_bytes / n_owners if len(users) == n_owners else 0)
    rate = min(cluster.machines[machine].bandwidth for machine in users)
    if cluster.links:
        rate = min(rate, *(cluster.rate(users[0], other) for other in users[1:]))
    overhead = cluster.message_overhead
    sending = (largest / rate + overhead) * n_others
    receiving = received / rate + overhead * min(n_others, n_owners)
    return max(sending, receiving) + cluster.latency


# --- transfers ---

# Disjoint regions and their machines; a machine may have several.
Cells = Sequence[tuple[int, Region]]

_CODE: Final = np.array([1 << 31, 1])  # an interval as one number
_N_BOXES_MAX: Final = 256  # readers' boxes handled together, so that they fit in a cache


@final
@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The boxes that each machine owns, or needs, in each of several candidates.

    Sorted by candidate, then by machine; every candidate has at least one box.
    """

    intervals: IntArray  # [start, stop) of each box: (boxes, dims, 2)
    counts: FloatArray  # (boxes,): 0 for empty boxes, else 1
    candidates: IntArray  # (boxes,)
    machines: IntArray  # (boxes,)
    n_candidates: int

    @classmethod
    def of(cls, candidates: Sequence[Cells], *, n_dims: int) -> Self:
        nothing = (0, ((0, 0),) * n_dims, 0.0)
        rows: list[tuple[int, int, tuple[Interval, ...], float]] = []
        for index, cells in enumerate(candidates):
            found = [(m, region.intervals, 1.0) for m, region in cells if region.n_elements]
            rows += [(index, *row) for row in sorted(found, key=itemgetter(0)) or [nothing]]
        candidate, machine, intervals, count = zip(*rows, strict=True)
        return cls(
            intervals=np.array(intervals, dtype=np.int64).reshape(len(rows), n_dims, 2),
            counts=np.array(count),
            candidates=np.array(candidate, dtype=np.int64),
            machines=np.array(machine, dtype=np.int64),
            n_candidates=len(candidates),
        )

    def part(self, first: int, last: int) -> "Boxes":
        """Return candidates [first, last), renumbered from 0."""
        low, high = np.searchsorted(self.candidates, [first, last])
        return Boxes(
            intervals=self.intervals[low:high],
            counts=self.counts[low:high],
            candidates=self.candidates[low:high] - first,
            machines=self.machines[low:high],
            n_candidates=last - first,
        )


def transfer_seconds(
    owned: Boxes, needed: Boxes, *, cluster: Cluster, bytes_each: float
) -> FloatArray:
    """Return the cost of one phase: (candidates of the owner, candidates of the reader).

        owned by machine  0        1        2
                          |--------|--------|--------|
        needed by      0  |------------|             receives a part of 1's
                       1         |-----------|       receives parts of 0's and 2's

    Machine q receives from p the overlap of p's boxes and q's: a product of overlaps of intervals,
    so all pairs of all candidates are a few outer products. A phase costs as much as its busiest
    machine, bytes / rate + overhead * messages for sending or receiving, plus one latency.
    """
    result = np.empty((owned.n_candidates, needed.n_candidates))
    for first, last in _blocks(needed):
        part = needed.part(first, last)
        result[:, first:last] = _phase(owned, part, cluster, bytes_each)
    return result


def own_seconds(owned: Boxes, needed: Boxes, *, cluster: Cluster, bytes_each: float) -> FloatArray:
    """Return the cost of one phase if both have the same candidate: (candidates,)."""
    return np.diagonal(transfer_seconds(owned, needed, cluster=cluster, bytes_each=bytes_each))


def _blocks(boxes: Boxes) -> Iterator[tuple[int, int]]:
    # Ranges of candidates with few boxes in total.
    ends = np.searchsorted(boxes.candidates, np.arange(1, boxes.n_candidates + 1))
    first = 0
    for index in range(boxes.n_candidates):
        begin = ends[first - 1] if first else 0
        last = index + 1 == boxes.n_candidates
        if last or ends[index + 1] - begin > _N_BOXES_MAX:
            yield first, index + 1
            first = index + 1


def _phase(owned: Boxes, needed: Boxes, cluster: Cluster, bytes_each: float) -> FloatArray:
    shared = _overlaps(owned, needed)
    shared, sender, of_owner = _per_machine(shared, owned, axis=0)
    shared, receiver, of_reader = _per_machine(shared, needed, axis=1)
    # What a machine owns itself needs no message.
    shared[sender[:, np.newaxis] == receiver] = 0.0
    rates = cluster.rates
    if rates.ndim:
        rates = rates[np.ix_(sender, receiver)]
    seconds = shared * (bytes_each / rates)
    if cluster.message_overhead:
        seconds += cluster.message_overhead * (shared > 0)
    sending = np.add.reduceat(seconds, of_reader, axis=1)
    receiving = np.add.reduceat(seconds, of_owner, axis=0)
    busiest = np.maximum(
        np.maximum.reduceat(sending, of_owner, axis=0),
        np.maximum.reduceat(receiving, of_reader, axis=1),
    )
    return np.asarray(busiest + cluster.latency * (busiest > 0))


def _overlaps(owned: Boxes, needed: Boxes) -> FloatArray:
    # The number of indices that two boxes share: (boxes owned, boxes needed).
    shared = np.outer(owned.counts, needed.counts)
    for dim in range(owned.intervals.shape[1]):
        own, other = owned.intervals[:, dim], needed.intervals[:, dim]
        # Few intervals are distinct: compute a table of those, then copy its rows.
        codes, which = np.unique(own @ _CODE, return_inverse=True)
        starts, stops = np.divmod(codes, _CODE[0])
        table = np.minimum.outer(stops, other[:, 1])
        table -= np.maximum.outer(starts, other[:, 0])
        shared *= np.maximum(table, 0).astype(np.float64)[which.reshape(-1)]
    return shared


def _per_machine(
    shared: FloatArray, boxes: Boxes, *, axis: int
) -> tuple[FloatArray, IntArray, IntArray]:
    # Adds up the boxes of each machine in each candidate. Returns the sums, their machines, and
    # where each candidate begins.
    change = np.diff(boxes.candidates) | np.diff(boxes.machines)
    starts = np.flatnonzero(np.concatenate([[1], change]))
    if len(starts) < len(boxes.machines):
        shared = np.add.reduceat(shared, starts, axis=axis)
    begins = np.searchsorted(boxes.candidates[starts], np.arange(boxes.n_candidates))
    return shared, boxes.machines[starts], begins


# --- one layer, all candidates ---

_T = TypeVar("_T")


@final
class NodeCosts:
    """A layer in all candidates of its group.

    Equal layers with equal placements share one object, and all that is computed from it.
    """

    def __init__(self, layer: Layer, placements: Sequence[Placement]) -> None:
        self.layer = layer
        self.placements = tuple(placements)

    @cached_property
    def computed(self) -> list[list[tuple[int, Region]]]:
        # Per candidate, the cells: of the output or, if partial, of the first input.
        layer = self.layer
        return [
            list(p.cells(layer.input_shapes[0] if p.combine else layer.shape))
            for p in self.placements
        ]

    @cached_property
    def owned(self) -> Boxes:
        cells = [placement.owners(self.layer) for placement in self.placements]
        return Boxes.of(cells, n_dims=len(self.layer.shape))

    @cached_property
    def reads(self) -> list[list[tuple[int, tuple[Region, ...]]]]:
        # Per candidate, what each machine needs of each input.
        return self._each(lambda rule, cell: rule.reads(self.layer, cell))

    @cached_property
    def uses(self) -> list[list[tuple[int, Mapping[str, Region]]]]:
        # Per candidate, what each machine uses of the tensors.
        return self._each(lambda rule, cell: rule.uses(self.layer, cell))

    @cached_property
    def writes(self) -> list[list[tuple[int, Region]]]:
        # Per candidate, the part of the output to which each machine adds, if partial.
        return [
            [(machine, written_by(self.layer, cell)) for machine, cell in cells if p.combine]
            for p, cells in zip(self.placements, self.computed, strict=True)
        ]

    @cached_property
    def combined(self) -> list[Cells]:
        # Per candidate, the machines that add up the output, if partial.
        return [p.owners(self.layer) if p.combine else [] for p in self.placements]

    def _each(
        self, found: Callable[[Operator | PartialSums, Region], _T]
    ) -> list[list[tuple[int, _T]]]:
        rules = [rule_of(self.layer, partial=p.combine is not None) for p in self.placements]
        return [
            [(machine, found(rule, cell)) for machine, cell in cells]
            for rule, cells in zip(rules, self.computed, strict=True)
        ]


_Readers = tuple[tuple[NodeCosts, tuple[int, ...]], ...]


def needed(readers: _Readers, *, n_dims: int) -> Boxes:
    """Return what each machine needs of a layer, for all its readers.

    Readers are of one group, each with the indices of those inputs that are this layer.
    """
    found: list[Cells] = []
    for candidate in range(len(readers[0][0].placements)):
        cells = [
            (machine, reads[i])
            for reader, indices in readers
            for machine, reads in reader.reads[candidate]
            for i in indices
        ]
        if len(dict(cells)) < len(cells):
            needs: dict[int, set[Region]] = {}
            for machine, region in cells:
                needs.setdefault(machine, set()).add(region)
            cells = [(machine, region) for machine in needs for region in disjoint(needs[machine])]
        found.append(cells)
    return Boxes.of(found, n_dims=n_dims)


@final
class Tables:
    """Costs of placing groups, in seconds, and the memory they take, in bytes."""

    def __init__(self, graph: LayerGraph, cluster: Cluster, *, batch: int, costs: Costs) -> None:
        self._graph = graph
        self._cluster = cluster
        self._costs = costs
        self._bytes_each = index_bytes(graph, batch=batch)
        self._single = single_sample(graph)
        self._backward = with_gradient(graph)
        self._placed: dict[str, NodeCosts] = {}
        self._alike: dict[Hashable, NodeCosts] = {}
        self._followed: dict[Hashable, list[Placement]] = {}
        self._boxes: dict[Hashable, Boxes] = {}
        self._numbers: dict[Hashable, FloatArray] = {}

    def place(
        self, group: Group, placements: Sequence[Placement]
    ) -> tuple[Mapping[str, Placement], ...]:
        """Set the candidates of the root of a group; return those of all members."""
        self._placed[group.root.name] = self._shared(group.root, placements)
        for follower in group.followers:
            leader, layer = self._placed[follower.leader.name], follower.layer
            key = (layer.signature, leader)
            if key not in self._followed:
                self._followed[key] = list(map(follower.placement, leader.placements))
            self._placed[layer.name] = self._shared(layer, self._followed[key])
        names = [layer.name for layer in group.members]
        rows = zip(*(self._placed[name].placements for name in names), strict=True)
        return tuple(dict(zip(names, row, strict=True)) for row in rows)

    def costs(self, group: Group) -> FloatArray:
        """Return the seconds of each candidate of a group, without transfers to other groups."""
        computing = sum(map(self._computing, group.members), np.zeros(()))
        total: FloatArray = computing.max(axis=1)
        for layer in group.members:
            total = total + self._combining(layer) + self._sync(layer)
            readers = [
                other for other in self._graph.consumers[layer.name] if other in group.members
            ]
            if not _all_follow(readers, layer, group):
                total = total + self._transfer(layer, readers, inside=True)
        return total

    def transfers(self, groups: Sequence[Group]) -> Iterator[tuple[tuple[int, int], FloatArray]]:
        """Yield pairs of groups and the cost of transfers between their candidates, in seconds.

        A pair occurs once for each value that goes from one to the other.
        """
        whose = {layer.name: index for index, group in enumerate(groups) for layer in group.members}
        for name, own in whose.items():
            readers: dict[int, list[Layer]] = {}
            for layer in self._graph.consumers[name]:
                readers.setdefault(whose[layer.name], []).append(layer)
            for other, layers in readers.items():
                if other != own:
                    table = self._transfer(self._graph[name], layers)
                    yield ((own, other), table) if own < other else ((other, own), table.T)

    def memory(self, group: Group) -> FloatArray:
        """Return the bytes on each machine: (candidates, machines).

        Tensors and their gradients, states that are computed, and states that are read, even if the
        machine itself owns them: an upper limit.
        """
        leaders = {follower.layer.name: follower.leader.name for follower in group.followers}
        each = (self._memory(layer, leaders.get(layer.name)) for layer in group.members)
        return sum(each, np.zeros(()))

    def _shared(self, layer: Layer, placements: Sequence[Placement]) -> NodeCosts:
        key = (layer.signature, layer.options.get("step"), tuple(placements))
        return _once(self._alike, key, lambda: NodeCosts(layer, placements))

    def _computing(self, layer: Layer) -> FloatArray:
        # Seconds of each machine: (candidates, machines).
        placed, backward = self._placed[layer.name], layer.name in self._backward

        def compute() -> FloatArray:
            seconds = np.zeros((len(placed.placements), len(self._cluster)))
            for index, cells in enumerate(placed.computed):
                partial = placed.placements[index].combine is not None
                for machine, region in cells:
                    passes = self._costs.passes(layer, region, machine, partial=partial)
                    seconds[index, machine] += sum(passes) if backward else passes.forward
            return seconds

        key = ("computing", placed, backward, layer.name in self._single)
        return _once(self._numbers, key, compute)

    def _combining(self, layer: Layer) -> FloatArray:
        # Sending partial outputs and adding them up: (candidates,).
        placed, backward = self._placed[layer.name], layer.name in self._backward
        each = float(self._bytes_each[layer.name])

        def compute() -> FloatArray:
            if not any(placement.combine for placement in placed.placements):
                return np.zeros(len(placed.placements))
            written, combined = (
                Boxes.of(cells, n_dims=len(layer.shape))
                for cells in (placed.writes, placed.combined)
            )
            sent = own_seconds(written, combined, cluster=self._cluster, bytes_each=each)
            return sent * (2 if backward else 1) + self._adding(placed, each)

        return _once(self._numbers, ("combining", placed, backward, each), compute)

    def _adding(self, placed: NodeCosts, bytes_each: float) -> FloatArray:
        seconds = np.zeros(len(placed.placements))
        for index, cells in enumerate(placed.combined):
            written = sum(region.n_elements for _, region in placed.writes[index])
            n_summands = written / max(1, placed.layer.region.n_elements)
            for machine, region in cells:
                figures = self._cluster.machines[machine]
                moved = bytes_each * region.n_elements * (1 + n_summands)
                taken = figures.overhead + moved / figures.memory_rate
                seconds[index] = max(seconds[index], taken)
        return seconds

    def _sync(self, layer: Layer) -> FloatArray:
        # Synchronising replicated tensors: (candidates,).
        placed = self._placed[layer.name]
        if not layer.tensors:
            return np.zeros(len(placed.placements))
        trains = {argument: use.trains for argument, use in layer.tensors.items()}
        return _once(
            self._numbers,
            ("sync", placed),
            lambda: np.array(
                [sync_seconds(uses, self._cluster, trains=trains) for uses in placed.uses]
            ),
        )

    def _transfer(
        self, layer: Layer, readers: Sequence[Layer], *, inside: bool = False
    ) -> FloatArray:
        # Seconds to send a layer to its readers in one group: (candidates, candidates of the
        # readers), or (candidates,) if they are `inside` its own group.
        owner, n_dims = self._placed[layer.name], len(layer.shape)
        reading = tuple((self._placed[reader.name], _indices(reader, layer)) for reader in readers)
        # The gradient takes the same way back, at the same cost.
        goes_back = any(reader.name in self._backward for reader in readers)
        n_phases = 2 if layer.name in self._backward and goes_back else 1
        each = float(self._bytes_each[layer.name])

        def compute() -> FloatArray:
            place = own_seconds if inside else transfer_seconds
            wanted = _once(self._boxes, reading, lambda: needed(reading, n_dims=n_dims))
            return n_phases * place(owner.owned, wanted, cluster=self._cluster, bytes_each=each)

        return _once(self._numbers, (owner, reading, n_phases, each, inside), compute)

    def _memory(self, layer: Layer, leader: str | None) -> FloatArray:
        placed = self._placed[layer.name]
        # A state is stored with its gradient: twice the bytes.
        own, *sizes = (
            float(self._bytes_each[name]) * (2 if name in self._backward else 1)
            for name in (layer.name, *layer.inputs)
        )
        # A follower reads what its machine owns.
        read = tuple(
            0.0 if name == leader and reads_its_own(layer, index) else size
            for index, (name, size) in enumerate(zip(layer.inputs, sizes, strict=True))
        )
        return _once(
            self._numbers,
            ("memory", placed, read, own),
            lambda: _bytes(placed, read, own=own, n_machines=len(self._cluster)),
        )


def _once(known: dict[Hashable, _T], key: Hashable, make: Callable[[], _T]) -> _T:
    found = known.get(key)
    if found is None:
        found = known[key] = make()
    return found


def _bytes(placed: NodeCosts, read: Sequence[float], *, own: float, n_machines: int) -> FloatArray:
    # The bytes on each machine, (candidates, machines); `read` and `own` are bytes per element.
    used = np.zeros((len(placed.placements), n_machines))
    tensors = placed.layer.tensors
    for index, placement in enumerate(placed.placements):
        for machine, region in placement.owners(placed.layer):
            used[index, machine] += own * region.n_elements
        for machine, region in placed.writes[index]:
            used[index, machine] += own * region.n_elements
        for machine, regions in placed.reads[index]:
            used[index, machine] += sum(
                size * region.n_elements for size, region in zip(read, regions, strict=True)
            )
        for machine, uses in placed.uses[index]:
            used[index, machine] += sum(
                region.n_elements * N_BYTES * (2 if tensors[argument].trains else 1)
                for argument, region in uses.items()
            )
    return used


def _indices(reader: Layer, layer: Layer) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(reader.inputs) if name == layer.name)


def _all_follow(readers: Sequence[Layer], layer: Layer, group: Group) -> bool:
    # Whether each reader reads only what its machine owns.
    leaders = {follower.layer.name: follower.leader for follower in group.followers}
    return all(
        leaders[reader.name] == layer
        and all(reads_its_own(reader, index) for index in _indices(reader, layer))
        for reader in readers
    )
