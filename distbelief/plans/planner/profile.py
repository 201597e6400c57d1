"""The profile of a host: measured layer times, kept in ~/.cache/distbelief.

    linear 2560 -> 8192, batch 64          seconds forward, backward
        units  8192   4096   2048 ...      of the whole, of a half, of a quarter
        inputs 2560   1280    640 ...      of partial sums
        samples  64     32     16 ...      of the whole, with fewer samples

A slice does not take its share of the time: four channels of a convolution take many times theirs.
So each layer is measured along each dimension that can be cut. There is one profile for each
version of torch, processor and number of threads.
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
from distbelief.core.errors import StorageError


VERSION: Final = 5  # of the format and the method; profiles of other versions are ignored

# Keys of slices that are not along a dimension of the output.
WHOLE: Final = "whole"  # the whole layer
INPUTS: Final = "inputs"  # along the summed dimension of the first input
SAMPLES: Final = "samples"  # of the batch


@final
class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What times depend on."""

    torch: str  # version
    processor: str  # name
    n_threads: int  # of torch

    @property
    def path(self) -> Path:
        # XDG_CACHE_HOME overrides ~/.cache.
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
        return Path(root) / "distbelief" / f"profile-{digest}.json"


@final
class Slices(msgspec.Struct, frozen=True, kw_only=True):
    """Times of slices along one dimension, the smallest first, the whole last."""

    extents: tuple[int, ...]
    forward: tuple[float, ...]  # seconds
    backward: tuple[float, ...]  # seconds


@final
class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Measured figures of a host, for all layers; the names are those of a `Machine`."""

    flops: float
    memory_rate: float
    message_rate: float
    memory: float
    overhead: float
    jitter: float


@final
class Profile(msgspec.Struct, frozen=True, kw_only=True):
    host: Host
    date: str  # of the last layers, ISO 8601
    layers: Mapping[str, Mapping[str, Slices]]
    figures: Figures | None = None
    probe: float | None = None  # seconds
    version: int = VERSION

    def save(self) -> None:
        """Write the profile; raise StorageError on failure."""
        path = self.host.path
        with files.explaining(path, doing="write"):
            path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.format(msgspec.json.encode(self)))


def this_host() -> Host:
    return Host(
        torch=str(torch.__version__), processor=_processor(), n_threads=torch.get_num_threads()
    )


def load(host: Host) -> Profile | None:
    """Return the profile of a host; None if there is none, or it cannot be read."""
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
    """Add measurements to the profile of a host; return all of it.

    If it cannot be saved (a read-only home), it is measured again next time.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    # Read at the last moment: another process may have measured too.
    known = load(host) or Profile(host=host, date=date, layers={})
    profile = msgspec.structs.replace(
        known,
        date=date if layers or not known.layers else known.date,
        layers={**known.layers, **(layers or {})},
        figures=figures or known.figures,
        probe=probe or known.probe,
    )
    if layers or figures or probe:
        with suppress(StorageError):
            profile.save()
    return profile


def digest(signature: bytes, *, batch: int) -> str:
    """Return the key of a layer in a profile."""
    return hashlib.sha256(b"%d " % batch + signature).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
