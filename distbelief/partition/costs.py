"""How long a machine computes a region of a layer: by arithmetic, without measuring.

    seconds = overhead + max(operations / flops, bytes / memory rate)

which is a roofline (Williams et al. 2009). Whoever has measured gives better times by
the same protocol, `pricing.Costs`: see `profile`.
"""

from typing import Final, final

import msgspec

from distbelief.graph.kind import joined, kind_of
from distbelief.graph.layer import INPUT, Layer, LayerGraph
from distbelief.graph.region import Region
from distbelief.program.cluster import Cluster, Machine
from distbelief.program.tasks import work_of


N_BYTES: Final = 4
"""Of a number."""

Signature = bytes
"""What a layer's costs depend on: everything but names."""


@final
class Signatures:
    """Signatures of layers, each made once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Layer, Signature]] = {}

    def of(self, layer: Layer) -> Signature:
        """Return what layers have in common that cost the same."""
        known = self._known.get(id(layer))
        if known is None:
            # The layer is kept, so that nobody else gets its id.
            known = self._known[id(layer)] = (layer, signature(layer))
        return known[1]


def signature(layer: Layer) -> Signature:
    """Return what layers have in common that cost the same."""
    tensors = {word: (use.shape, use.trains) for word, use in sorted(layer.tensors.items())}
    options = {word: value for word, value in layer.options.items() if word != "module"}
    return msgspec.json.encode(
        (
            layer.kind,
            layer.shape,
            layer.input_shapes,
            [layer.inputs.index(name) for name in layer.inputs],
            options,
            tensors,
            bool(layer.whole),
        ),
        order="sorted",
    )


def single_sample(graph: LayerGraph) -> frozenset[str]:
    """Return the layers that read statistics only, and compute them for one sample."""
    single = joined(graph)
    return frozenset(name for name in single if single.issuperset(graph[name].inputs))


@final
class AnalyticCosts:
    """Costs from figures of the machines.

    Args:
        cluster: The machines.
        batch: Samples of a step.
        single: Layers that are computed for one sample, of `single_sample`.
    """

    def __init__(
        self, cluster: Cluster, *, batch: int, single: frozenset[str] = frozenset()
    ) -> None:
        self.batch = batch
        self._machines = cluster.machines
        # Equal machines by the first of them: a number is quicker to look up.
        self._first = [cluster.machines.index(machine) for machine in cluster.machines]
        self._single = single
        self._signatures = Signatures()
        self._known: dict[tuple[Signature, int, bool, bool], dict[Region, tuple[float, float]]] = {}

    def forward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the forward pass."""
        return self._seconds(layer, region, machine, partial=partial)[0]

    def backward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the backward pass."""
        return self._seconds(layer, region, machine, partial=partial)[1]

    def _seconds(
        self, layer: Layer, region: Region, machine: int, *, partial: bool
    ) -> tuple[float, float]:
        if layer.kind == INPUT or not region.n_elements:
            return (0.0, 0.0)
        first, single = self._first[machine], layer.name in self._single
        key = (self._signatures.of(layer), first, partial, single)
        known = self._known.setdefault(key, {})
        seconds = known.get(region)
        if seconds is None:
            figures, n_samples = self._machines[first], 1 if single else self.batch
            seconds = _roofline(layer, region, figures, n_samples, partial=partial)
            known[region] = seconds
        return seconds


def tensor_bytes(layer: Layer, region: Region, *, partial: bool) -> tuple[float, float]:
    """Return the bytes of the tensors that a region uses: of all, of those that train.

    Every use counts; whether another layer uses the same tensor is not known here.
    """
    kind = kind_of(layer)
    if partial:
        assert kind.partial is not None, layer.name
        uses = kind.partial.uses(layer, region)
    else:
        uses = kind.uses(layer, region)
    every = sum(N_BYTES * part.n_elements for part in uses.values())
    trains = sum(
        N_BYTES * part.n_elements for word, part in uses.items() if layer.tensors[word].trains
    )
    return float(every), float(trains)


def _roofline(
    layer: Layer, region: Region, machine: Machine, n_samples: int, *, partial: bool
) -> tuple[float, float]:
    work = work_of(layer, region, partial=partial)
    every, trains = tensor_bytes(layer, region, partial=partial)
    n_bytes = N_BYTES * work.n_elements * n_samples
    forward = machine.overhead + max(
        work.forward * n_samples / machine.flops, (n_bytes + every) / machine.memory_rate
    )
    # Values are read again, and gradients read and written: twice the traffic.
    backward = machine.overhead + max(
        work.backward * n_samples / machine.flops,
        (2 * n_bytes + every + trains) / machine.memory_rate,
    )
    return forward, backward
