"""Whether what is kept of this host still holds: a short computation says, in a moment.

Who measured a host while others used it would plan with those times for good. So each
profile keeps how long a probe took then. If it takes much shorter now, what was
measured is thrown away, and measured again by those who want it. If it takes much
longer, others may be using the host now: what is kept is kept, and that is remarked.

The probe is a linear layer, which stays in the caches, and a copy, which does not; both
take about as long. The median of many counts. The least does not change where a host is
shared: it is a moment in which nobody was there (1.45 ms of such a layer, whether the
others took 1.6 or 2.9), and what takes a second has no such moment.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Final

import torch
from torch.nn import functional

from distbelief.errors import StorageError
from distbelief.partition.profiling.profile import Profile, add, load, this_host


DIFFERENCE_MAX: Final = 0.25
"""By which share a probe may take longer than when a profile was measured, or then
than now."""

_N_RUNS: Final = 60
_WIDTH: Final = 512  # of the layer: a few milliseconds for 256 samples
_BATCH: Final = 256
_N_COPIED: Final = 1 << 22  # numbers, 16 MiB, from one place to another


def recheck(tell: Callable[[str], None]) -> float:
    """Throw away what is kept of this host if it was measured when that was slower.

    Args:
        tell: Told if it was.

    Returns:
        How many times as long a probe takes now as it did then; 1 if that is nothing
        to speak of.
    """
    host = this_host()
    known = load(host)
    now = seconds()
    if known is None or known.probe is None:
        add(host, probe=now)
        return 1.0
    if known.probe > (1.0 + DIFFERENCE_MAX) * now:
        ratio = known.probe / now
        tell(f"measuring this machine anew: it was {ratio:.1f} times as slow before")
        anew = Profile(host=host, date=known.date, layers={}, probe=now, replaced=ratio)
        with suppress(StorageError):  # a home that is read-only keeps what it has
            anew.save()
    return now / known.probe if now > (1.0 + DIFFERENCE_MAX) * known.probe else 1.0


def seconds(*, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long the probe takes: the median of many runs."""
    generator = torch.Generator("cpu").manual_seed(0)
    value, weight, source = (
        torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((_BATCH, _WIDTH), (_WIDTH, _WIDTH), (_N_COPIED,))
    )
    target = torch.empty_like(source)
    times = []
    with torch.inference_mode():
        functional.linear(value, weight)
        for _ in range(_N_RUNS):
            began = clock()
            functional.linear(value, weight)
            target.copy_(source)
            times.append(max(clock() - began, 1e-9))
    return median(times)
