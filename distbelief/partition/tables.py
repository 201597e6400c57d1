"""The numbers of all candidates of all groups: vectors and matrices, each made once.

Networks repeat themselves: whatever follows from a layer's signature and its placements
is kept by these, so that fifty alike layers cost as much as one.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, final

import numpy as np

from distbelief.graph.kind import joined
from distbelief.graph.layer import Layer, LayerGraph
from distbelief.partition.costs import N_BYTES, Signatures, single_sample
from distbelief.partition.grouping import Group, reads_its_own
from distbelief.partition.placed import Placed, needed
from distbelief.partition.sync import ranges, sync_seconds
from distbelief.partition.transfer import Boxes, Floats, Network, own_seconds, transfer_seconds
from distbelief.program.cluster import Cluster
from distbelief.program.gradients import with_gradient
from distbelief.program.placement import Placement
from distbelief.program.pricing import Costs


N_BYTES_INTEGER: Final = 8


@final
class Tables:
    """Costs of placing groups, in seconds, and the memory they take, in bytes.

    Args:
        graph: What is to be placed.
        cluster: On which machines.
        batch: Samples of a step.
        costs: Of computing.
    """

    def __init__(self, graph: LayerGraph, cluster: Cluster, *, batch: int, costs: Costs) -> None:
        self._graph = graph
        self._cluster = cluster
        self._batch = batch
        self._costs = costs
        self._network = Network.of(cluster)
        self._signatures = Signatures()
        self._joined = joined(graph)
        self._single = single_sample(graph)
        self._backward = with_gradient(graph)
        self._placed: dict[str, Placed] = {}
        self._alike: dict[Hashable, Placed] = {}
        self._followed: dict[Hashable, list[Placement]] = {}
        self._boxes: dict[Hashable, Boxes] = {}
        self._numbers: dict[Hashable, Floats] = {}

    def place(self, group: Group, placements: Sequence[Placement]) -> None:
        """Say in which ways the root of a group may be placed."""
        self._placed[group.root.name] = self._shared(group.root, placements)
        for follower in group.followers:
            leader = self._placed[follower.leader.name]
            key = (self._signatures.of(follower.layer), leader)
            if key not in self._followed:
                self._followed[key] = [follower.placement(p) for p in leader.placements]
            placed = self._shared(follower.layer, self._followed[key])
            self._placed[follower.layer.name] = placed

    def costs(self, group: Group) -> Floats:
        """Return the seconds of each candidate of a group, edges apart."""
        computing = sum(map(self._computing, group.members), np.zeros(()))
        total: Floats = computing.max(axis=1)
        for layer in group.members:
            total = total + self._combining(layer) + self._sync(layer)
            readers = [
                other for other in self._graph.consumers[layer.name] if other in group.members
            ]
            if not _all_follow(readers, layer, group):
                total = total + self._transfer(layer, readers, inside=True)
        return total

    def transfers(self, groups: Sequence[Group]) -> Iterator[tuple[tuple[int, int], Floats]]:
        """Yield pairs of groups and what their candidates cost each other, in seconds.

        A pair comes once for each value that goes from one to the other.
        """
        whose = {layer.name: index for index, group in enumerate(groups) for layer in group.members}
        for name, own in whose.items():
            readers: dict[int, list[Layer]] = {}
            for layer in self._graph.consumers[name]:
                readers.setdefault(whose[layer.name], []).append(layer)
            for other, layers in readers.items():
                if other == own:
                    continue
                table = self._transfer(self._graph[name], layers)
                yield (
                    (own, other) if own < other else (other, own),
                    (table if own < other else table.T),
                )

    def memory(self, group: Group) -> Floats:
        """Return the bytes on each machine: (candidates, machines).

        Tensors and their gradients, states that are computed, and those that are read,
        also where they are the machine's own if another layer's: an upper limit.
        """
        total = np.zeros(())
        for layer in group.members:
            leader = next((f.leader.name for f in group.followers if f.layer == layer), None)
            total = total + self._memory(layer, leader)
        return total

    def _shared(self, layer: Layer, placements: Sequence[Placement]) -> Placed:
        key = (self._signatures.of(layer), tuple(placements))
        if key not in self._alike:
            self._alike[key] = Placed(layer, placements)
        return self._alike[key]

    def _bytes_each(self, layer: Layer) -> float:
        """Return the bytes of an element of its output, in all samples."""
        n_samples = 1 if layer.name in self._joined else self._batch
        return float(n_samples * (N_BYTES_INTEGER if layer.is_integer else N_BYTES))

    def _computing(self, layer: Layer) -> Floats:
        """Return the seconds of each machine: (candidates, machines)."""
        placed, backward = self._placed[layer.name], layer.name in self._backward
        key = ("computing", placed, backward, layer.name in self._single)
        if key in self._numbers:
            return self._numbers[key]
        seconds = np.zeros((len(placed.placements), len(self._cluster)))
        for index, cells in enumerate(placed.computed):
            partial = placed.placements[index].combine is not None
            for machine, region in cells:
                each = self._costs.forward(layer, region, machine, partial=partial)
                if backward:
                    each += self._costs.backward(layer, region, machine, partial=partial)
                seconds[index, machine] += each
        self._numbers[key] = seconds
        return seconds

    def _combining(self, layer: Layer) -> Floats:
        """Return the seconds of sending and adding partial outputs: (candidates,)."""
        placed, backward = self._placed[layer.name], layer.name in self._backward
        each = self._bytes_each(layer)
        key = ("combining", placed, backward, each)
        if key in self._numbers:
            return self._numbers[key]
        seconds = np.zeros(len(placed.placements))
        if any(placement.combine for placement in placed.placements):
            n_dims = len(layer.shape)
            seconds = own_seconds(
                Boxes.of(placed.writes, n_dims=n_dims),
                Boxes.of(placed.combined, n_dims=n_dims),
                network=self._network,
                bytes_each=each,
            ) * (2 if backward else 1)
            seconds += self._adding(placed, each)
        self._numbers[key] = seconds
        return seconds

    def _adding(self, placed: Placed, bytes_each: float) -> Floats:
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

    def _sync(self, layer: Layer) -> Floats:
        """Return the seconds of synchronising replicated tensors: (candidates,)."""
        placed = self._placed[layer.name]
        key = ("sync", placed)
        if not layer.tensors:
            return np.zeros(len(placed.placements))
        if key not in self._numbers:
            trains = {word: use.trains for word, use in layer.tensors.items()}
            self._numbers[key] = np.array(
                [sync_seconds(ranges(uses, trains=trains), self._cluster) for uses in placed.uses]
            )
        return self._numbers[key]

    def _transfer(self, layer: Layer, readers: Sequence[Layer], *, inside: bool = False) -> Floats:
        """Return the seconds of sending a layer's output to its readers in one group.

        Returns:
            (candidates, candidates of the readers); (candidates,) if they are `inside`
            its own group.
        """
        owner = self._placed[layer.name]
        reading = tuple((self._placed[reader.name], _indices(reader, layer)) for reader in readers)
        passes = {layer.name} | {reader.name for reader in readers} & self._backward
        n_phases = 2 if layer.name in self._backward and len(passes) > 1 else 1
        each = self._bytes_each(layer)
        key = (owner, reading, n_phases, each, inside)
        if key not in self._numbers:
            place = own_seconds if inside else transfer_seconds
            self._numbers[key] = n_phases * place(
                owner.owned,
                self._needed(reading, n_dims=len(layer.shape)),
                network=self._network,
                bytes_each=each,
            )
        return self._numbers[key]

    def _needed(self, reading: tuple[tuple[Placed, tuple[int, ...]], ...], *, n_dims: int) -> Boxes:
        if reading not in self._boxes:
            self._boxes[reading] = needed(reading, n_dims=n_dims)
        return self._boxes[reading]

    def _memory(self, layer: Layer, leader: str | None) -> Floats:
        placed = self._placed[layer.name]
        # A state is kept with its gradient.
        sizes = {
            name: self._bytes_each(self._graph[name]) * (2 if name in self._backward else 1)
            for name in (layer.name, *layer.inputs)
        }
        own = [
            index
            for index, name in enumerate(layer.inputs)
            if name == leader and reads_its_own(layer, index)
        ]
        read = tuple(
            0.0 if index in own else sizes[name] for index, name in enumerate(layer.inputs)
        )
        key = ("memory", placed, read, sizes[layer.name])
        if key not in self._numbers:
            self._numbers[key] = _bytes(
                placed, read, own=sizes[layer.name], n_machines=len(self._cluster)
            )
        return self._numbers[key]


def _bytes(placed: Placed, read: Sequence[float], *, own: float, n_machines: int) -> Floats:
    """Return the bytes on each machine: (candidates, machines).

    Args:
        placed: A layer.
        read: Bytes of an element of each input.
        own: Bytes of an element of its output.
        n_machines: How many there are.
    """
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
                region.n_elements * N_BYTES * (2 if tensors[word].trains else 1)
                for word, region in uses.items()
            )
    return used


def _indices(reader: Layer, layer: Layer) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(reader.inputs) if name == layer.name)


def _all_follow(readers: Sequence[Layer], layer: Layer, group: Group) -> bool:
    """Return whether each of them reads but what its machine has."""
    leaders = {follower.layer.name: follower.leader for follower in group.followers}
    return all(
        leaders[reader.name] == layer
        and all(reads_its_own(reader, index) for index in _indices(reader, layer))
        for reader in readers
    )
