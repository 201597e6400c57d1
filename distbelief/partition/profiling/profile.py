"""How long layers really take on this host: measured, and kept.

    linear 2560 -> 8192, batch 64          seconds forward, backward
        units  8192   4096   2048 ...      of the whole, of a half, of a quarter
        inputs 2560   1280    640 ...      of partial sums
        samples  64     32     16 ...      of the whole, with fewer of them

Slices of a layer do not take their share of its time: four channels of a convolution
take many times theirs. So each layer is measured along each dimension it may be cut in.
Measured once, for each version of torch, processor and number of threads: in
~/.cache/distbelief. What becomes of it is in `profiled_costs`, who measures in
`measuring` and `host`.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.core import files
from distbelief.errors import StorageError


VERSION: Final = 5
"""Of what is measured, and how; what another version has measured is not used."""

WHOLE: Final = "whole"
"""What a layer that is not cut is called in a profile."""

INPUTS: Final = "inputs"
"""What the summed dimension of the first input is called in a profile."""


SAMPLES: Final = "samples"
"""What the batch is called in a profile."""


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
class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a host can do, whatever the layer.

    Attributes:
        flops: Floating point operations per second in a large matrix product.
        memory_rate: Bytes per second to and from memory.
        message_rate: Bytes per second of messages that would keep its processors busy.
        memory: Bytes.
        overhead: Seconds that each layer costs, however small.
        jitter: Standard deviation of the logarithm of its compute times.
        date: Of the measurement, ISO 8601.
    """

    flops: float
    memory_rate: float
    message_rate: float
    memory: float
    overhead: float
    jitter: float
    date: str


@final
class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What has been measured on a host.

    Attributes:
        host: Which.
        date: When a layer was last measured, ISO 8601.
        layers: By the digest of a layer and its batch: slices, by dimension.
        figures: Of the host itself; None if nobody has measured them.
        load: Programs per processor that wanted to compute meanwhile; the most.
        probe: Seconds that a probe took before anything was measured.
        replaced: How many times as long it took for a profile that this one has
            replaced; 0 if there was none.
        version: Of this format.
    """

    host: Host
    date: str
    layers: Mapping[str, Mapping[str, Slices]]
    figures: Figures | None = None
    load: float = 0.0
    probe: float | None = None
    replaced: float = 0.0
    version: int = VERSION

    def save(self) -> None:
        """Write it to its place, at once or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        path = self.host.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.explained(error, path, doing="write") from error
        files.write(path, msgspec.json.format(msgspec.json.encode(self)))


def this_host() -> Host:
    """Return what this process computes on."""
    return Host(
        torch=str(torch.__version__), processor=_processor(), n_threads=torch.get_num_threads()
    )


def load(host: Host) -> Profile | None:
    """Return what is kept of a host; None if nothing is, or it cannot be read."""
    try:
        profile = msgspec.json.decode(host.path.read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return profile if (profile.version, profile.host) == (VERSION, host) else None


def add(
    host: Host,
    *,
    layers: Mapping[str, Mapping[str, Slices]] | None = None,
    figures: Figures | None = None,
    probe: float | None = None,
) -> Profile:
    """Add measurements to what is kept of a host; return all there is.

    What cannot be kept, in a home that is read-only, is measured again next time.
    """
    # Read at the last moment: another process may have measured too.
    known = load(host)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    profile = Profile(
        host=host,
        date=known.date if known and known.layers and not layers else date,
        layers={**(known.layers if known else {}), **(layers or {})},
        figures=figures or (known.figures if known else None),
        load=max(known.load if known else 0.0, _load() if layers or figures else 0.0),
        probe=probe or (known.probe if known else None),
        replaced=known.replaced if known else 0.0,
    )
    if layers or figures or probe:
        with suppress(StorageError):
            profile.save()
    return profile


def digest(signature: bytes, *, batch: int) -> str:
    """Return the key of a layer in a profile."""
    return hashlib.sha256(b"%d " % batch + signature).hexdigest()[:16]


def _load() -> float:
    """Return how many programs there are for each processor, this one included."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
