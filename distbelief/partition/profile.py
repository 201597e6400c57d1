"""How long layers really take on this host: measured, and kept.

    linear 2560 -> 8192, batch 64          seconds forward, backward
        units  8192   4096   2048 ...      of the whole, of a half, of a quarter
        inputs 2560   1280    640 ...      of partial sums

Slices of a layer do not take their share of its time: four channels of a convolution
take many times theirs. So each layer is measured along each dimension it may be cut in.
A region that is cut in several takes the product of the shares. Measured once, for each
version of torch, processor and number of threads: in ~/.cache/distbelief. For machines
that are not this host, what it takes longer than arithmetic says, they do too.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
import torch

from distbelief.graph.layer import Layer
from distbelief.graph.region import Region
from distbelief.partition.candidates import summed_dims
from distbelief.partition.costs import AnalyticCosts, Signatures


VERSION: Final = 1
WHOLE: Final = "whole"
"""What a layer that is not cut is called in a profile."""

INPUTS: Final = "inputs"
"""What the summed dimension of the first input is called in a profile."""


@final
class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What times depend on.

    Attributes:
        torch: Version.
        processor: Its name.
        n_threads: That torch computes with.
    """

    torch: str
    processor: str
    n_threads: int

    @property
    def path(self) -> Path:
        """Where its profile is kept; XDG_CACHE_HOME says where caches are."""
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
        return Path(root) / "distbelief" / f"profile-{digest}.json"


@final
class Slices(msgspec.Struct, frozen=True, kw_only=True):
    """Times of slices along one dimension, the smallest first and the whole last.

    Attributes:
        extents: Of the slices.
        operations: Floating point operations of the forward pass, of the whole batch.
        forward: Seconds.
        backward: Seconds.
    """

    extents: tuple[int, ...]
    operations: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@final
class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What has been measured on a host.

    Attributes:
        host: Which.
        date: Of the last measurement, ISO 8601.
        layers: By the digest of a layer and its batch: slices, by dimension.
        version: Of this format.
    """

    host: Host
    date: str
    layers: Mapping[str, Mapping[str, Slices]]
    version: int = VERSION

    def save(self) -> None:
        """Write it to its place, at once or not at all."""
        path = self.host.path
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        beside.replace(path)


def this_host() -> Host:
    """Return what this process computes on."""
    return Host(
        torch=str(torch.__version__),
        processor=_processor(),
        n_threads=torch.get_num_threads(),
    )


def load(host: Host) -> Profile | None:
    """Return what is kept of a host; None if nothing is, or it cannot be read."""
    try:
        profile = msgspec.json.decode(host.path.read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError):
        return None
    return profile if (profile.version, profile.host) == (VERSION, host) else None


def digest(signature: bytes, *, batch: int) -> str:
    """Return the key of a layer in a profile."""
    return hashlib.sha256(b"%d " % batch + signature).hexdigest()[:16]


@final
class ProfiledCosts:
    """Costs as measured; by arithmetic where nothing has been measured.

    Args:
        profile: What has been measured.
        machines: Costs by arithmetic.
        host: Costs by arithmetic of the host of the profile, its only machine, if the
            machines are others: what it takes longer than by arithmetic, they do too.
            If absent, each machine is such a host.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        machines: AnalyticCosts,
        host: AnalyticCosts | None = None,
    ) -> None:
        self._profile = profile
        self._machines = machines
        self._host = host
        self._signatures = Signatures()
        self._digests: dict[bytes, str] = {}
        self._summed_dims: dict[bytes, tuple[int, ...]] = {}

    def forward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the forward pass."""
        expected = self._machines.forward(layer, region, machine, partial=partial)
        measured = self._measured(layer, region, partial=partial)
        if measured is None or not region.n_elements:
            return expected
        if self._host is None:
            return measured[0]
        there = self._host.forward(layer, region, 0, partial=partial)
        return measured[0] * expected / there if there else measured[0]

    def backward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the backward pass."""
        expected = self._machines.backward(layer, region, machine, partial=partial)
        measured = self._measured(layer, region, partial=partial)
        if measured is None or not region.n_elements:
            return expected
        if self._host is None:
            return measured[1]
        there = self._host.backward(layer, region, 0, partial=partial)
        return measured[1] * expected / there if there else measured[1]

    def _measured(
        self, layer: Layer, region: Region, *, partial: bool
    ) -> tuple[float, float] | None:
        signature = self._signatures.of(layer)
        if signature not in self._digests:
            self._digests[signature] = digest(signature, batch=self._machines.batch)
        slices = self._profile.layers.get(self._digests[signature])
        if not slices or WHOLE not in slices:
            return None
        of = layer.input_shapes[0] if partial else layer.shape
        summed = self._summed(layer, signature) if partial else ()
        base = slices.get(INPUTS, slices[WHOLE]) if partial else slices[WHOLE]
        forward, backward = base.forward[-1], base.backward[-1]
        for dim, (extent, whole) in enumerate(zip(region.shape, of, strict=True)):
            if extent < whole:
                word = INPUTS if dim in summed else str(dim)
                shares = _shares(slices.get(word), extent, whole)
                forward, backward = forward * shares[0], backward * shares[1]
        return forward, backward

    def _summed(self, layer: Layer, signature: bytes) -> tuple[int, ...]:
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


def _interpolated(
    extent: int, extents: tuple[int, ...], seconds: tuple[float, ...]
) -> float:
    if not seconds[-1]:
        return 0.0
    return float(np.interp(extent, extents, seconds)) / seconds[-1]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
