"""How long a machine computes a region of a layer, from what has been measured here.

A region that is cut along several dimensions takes the product of the shares of slices
along each. For machines that are not this host, what it takes longer than arithmetic
says, they do too.

A part never takes less than its share of the whole. Measurements may say so, by chance
or by the grace of a cache, but nobody could say then what no plan beats.
"""

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np

from distbelief.graph.layer import Layer
from distbelief.graph.region import Region
from distbelief.partition.candidates import summed_dims
from distbelief.partition.costs import AnalyticCosts, Signature, Signatures
from distbelief.partition.profiling.profile import INPUTS, SAMPLES, WHOLE, Profile, Slices, digest


class _Passes(NamedTuple):
    """Seconds."""

    forward: float
    backward: float


@final
class ProfiledCosts:
    """Costs as measured; by arithmetic where nothing has been measured.

    Args:
        profile: What has been measured.
        machines: Costs by arithmetic.
        host: Costs by arithmetic of the host of the profile, its only machine, if the
            machines are others: what it takes longer than by arithmetic, they do too.
            If absent, each machine is such a host.
        slower: How many times as slow the host is now as when it was measured.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        machines: AnalyticCosts,
        host: AnalyticCosts | None = None,
        slower: float = 1.0,
    ) -> None:
        self.profile = profile
        self.slower = slower
        self.is_absolute = host is None
        self._machines = machines
        self._host = host
        self._signatures = Signatures()
        self._digests: dict[Signature, str] = {}
        self._summed_dims: dict[Signature, tuple[int, ...]] = {}
        self._known: dict[tuple[Signature, Region, int, bool], _Passes] = {}

    def forward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the forward pass."""
        if not self.knows(layer) or not region.n_elements:
            return self._machines.forward(layer, region, machine, partial=partial)
        return self._passes(layer, region, machine, partial=partial).forward

    def backward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the backward pass."""
        if not self.knows(layer) or not region.n_elements:
            return self._machines.backward(layer, region, machine, partial=partial)
        return self._passes(layer, region, machine, partial=partial).backward

    def knows(self, layer: Layer) -> bool:
        """Whether this layer has been measured."""
        return WHOLE in self._slices(layer)

    def shares(self, layer: Layer, n_samples: int) -> tuple[float, float] | None:
        """Return what share of its passes' seconds fewer samples take, if measured."""
        slices = self._slices(layer).get(SAMPLES)
        if slices is None:
            return None
        return _shares(slices, n_samples, self._machines.batch)

    def _passes(self, layer: Layer, region: Region, machine: int, *, partial: bool) -> _Passes:
        key = (self._signatures.of(layer), region, machine, partial)
        if key not in self._known:
            taken = self._scaled(layer, region, machine, partial=partial)
            of = Region.of(*layer.input_shapes[0]) if partial else layer.region
            if partial or region != of:
                whole = self._passes(layer, layer.region, machine, partial=False)
                share = region.n_elements / of.n_elements
                taken = _Passes(
                    max(taken.forward, share * whole.forward),
                    max(taken.backward, share * whole.backward),
                )
            self._known[key] = taken
        return self._known[key]

    def _scaled(self, layer: Layer, region: Region, machine: int, *, partial: bool) -> _Passes:
        """Return what has been measured, as it would be on that machine."""
        measured = self._measured(layer, region, partial=partial)
        if self._host is None:
            return measured
        ratios = [
            there(layer, region, machine, partial=partial)
            / max(here(layer, region, 0, partial=partial), 1e-300)
            for there, here in (
                (self._machines.forward, self._host.forward),
                (self._machines.backward, self._host.backward),
            )
        ]
        return _Passes(measured.forward * ratios[0], measured.backward * ratios[1])

    def _measured(self, layer: Layer, region: Region, *, partial: bool) -> _Passes:
        slices = self._slices(layer)
        of = layer.input_shapes[0] if partial else layer.shape
        summed = self._summed(layer) if partial else ()
        base = slices.get(INPUTS, slices[WHOLE]) if partial else slices[WHOLE]
        forward, backward = base.forward[-1], base.backward[-1]
        for dim, (extent, whole) in enumerate(zip(region.shape, of, strict=True)):
            if extent < whole:
                word = INPUTS if dim in summed else str(dim)
                shares = _shares(slices.get(word), extent, whole)
                forward, backward = forward * shares[0], backward * shares[1]
        return _Passes(forward, backward)

    def _slices(self, layer: Layer) -> Mapping[str, Slices]:
        signature = self._signatures.of(layer)
        if signature not in self._digests:
            self._digests[signature] = digest(signature, batch=self._machines.batch)
        return self.profile.layers.get(self._digests[signature], {})

    def _summed(self, layer: Layer) -> tuple[int, ...]:
        signature = self._signatures.of(layer)
        if signature not in self._summed_dims:
            self._summed_dims[signature] = summed_dims(layer)[:1]
        return self._summed_dims[signature]


def _shares(slices: Slices | None, extent: int, whole: int) -> tuple[float, float]:
    """Return what share of the whole's times a slice takes.

    Below the smallest that has been measured it is as slow as that.
    """
    if slices is None:
        return extent / whole, extent / whole
    return (
        _interpolated(extent, slices.extents, slices.forward),
        _interpolated(extent, slices.extents, slices.backward),
    )


def _interpolated(extent: int, extents: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    if not seconds[-1]:
        return 0.0
    return float(np.interp(extent, extents, seconds)) / seconds[-1]
