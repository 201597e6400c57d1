"""Random numbers: one stream per concern, all from one seed.

With one stream for everything a single extra message would reshuffle every fault after
it, and two runs of almost the same system could not be compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


_N_DRAWN = 256


def draws(stream: np.random.Generator) -> Iterator[float]:
    """Yield what `stream.random()` would return, call by call; nobody else may draw.

    A single draw costs twenty times as much as one of many.
    """
    while True:
        yield from stream.random(_N_DRAWN).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The generators of one simulation."""

    schedule: np.random.Generator  # how long work takes
    network: np.random.Generator  # how long messages travel
    disk: np.random.Generator  # how long a snapshot takes
    faults: np.random.Generator  # which message a fault hits
    user: np.random.Generator  # what the test itself draws

    @staticmethod
    def of(seed: int) -> "Streams":
        """Return the streams of `seed`, in the order of the fields."""
        schedule, network, disk, faults, user = (
            np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)
        )
        return Streams(schedule=schedule, network=network, disk=disk, faults=faults, user=user)
