"""Bytes of memory that a plan takes on each machine."""

from collections.abc import Iterator, Sequence

from distbelief.graph.layer import INPUT
from distbelief.graph.region import Region
from distbelief.program.compilation import Compiled
from distbelief.program.routing import NUMBER_BYTES, index_bytes


def memory(compiled: Compiled, *, micro_batches: int = 1) -> tuple[int, ...]:
    """Return the bytes that each machine holds at the end of the forward pass.

    Tensors that it uses, inputs that it reads, states that it owns or receives, and
    contributions to sums; as much again for gradients of those that have one. What a
    kind needs for itself while it computes is not known, and not counted.

    Args:
        compiled: For the samples of one micro-batch.
        micro_batches: Whose states are all there at once, at the most.
    """
    totals = [0] * compiled.n_machines
    for machine, n_bytes in _tensors(compiled):
        totals[machine] += n_bytes
    for held in (_states(compiled), _received(compiled)):
        for machine, n_bytes in held:
            totals[machine] += micro_batches * n_bytes
    return tuple(totals)


def trained(compiled: Compiled) -> frozenset[str]:
    """Return the tensors that get a gradient."""
    return frozenset(
        use.name
        for layer in compiled.graph.layers
        if layer.name in compiled.gradients
        for use in layer.tensors.values()
        if use.trains
    )


def _tensors(compiled: Compiled) -> Iterator[tuple[int, int]]:
    with_gradient = trained(compiled)
    for name, users in compiled.demands.tensors.items():
        each = NUMBER_BYTES * (2 if name in with_gradient else 1)
        for machine, regions in users.items():
            yield machine, each * _n_elements(regions)


def _states(compiled: Compiled) -> Iterator[tuple[int, int]]:
    needs = compiled.demands
    n_bytes = index_bytes(compiled.graph, batch=compiled.batch)
    for layer in compiled.graph.layers:
        each = n_bytes[layer.name] * (2 if layer.name in compiled.gradients else 1)
        if layer.kind == INPUT:
            held = needs.states.get(layer.name, {})
        else:
            held = needs.contributions.get(layer.name, {})
            for machine, region in compiled.placements[layer.name].owners(layer):
                yield machine, each * region.n_elements
        for machine, regions in held.items():
            yield machine, each * _n_elements(regions)


def _received(compiled: Compiled) -> Iterator[tuple[int, int]]:
    for way in compiled.traffic:
        if way.kind == "state":
            both = 2 if way.name in compiled.gradients else 1
            for machine, which in way.receiving.items():
                yield machine, both * int(way.n_bytes[which].sum())


def _n_elements(regions: Sequence[Region]) -> int:
    return sum(region.n_elements for region in regions)
