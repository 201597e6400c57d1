"""Portions read in advance, in the data lane: those that are computed next."""

from collections.abc import Sequence
from functools import partial
from typing import Final, final

from distbelief.downpour.steps import Batch
from distbelief.roles import Action, Compute, Cost, Lane
from sandblaster.replicas.portion_sums import PortionSums
from sandblaster.replicas.samples import Samples


N_PORTIONS_HELD: Final = 2

Bounds = tuple[int, int]  # positions [start, stop)


@final
class Prefetch:
    """The samples of the next portions; what is not wanted any more is dropped."""

    def __init__(self, sums: PortionSums, samples: Samples) -> None:
        self._sums = sums
        self._samples = samples
        self._held: dict[Bounds, Batch] = {}
        self._reading: Bounds | None = None
        self._bytes_per_sample = 0.0  # once a portion has come

    def get(self, portion: Bounds) -> Batch | None:
        """Return the samples of a portion, if they have been read."""
        return self._held.get(portion)

    def read(self, wanted: Sequence[Bounds]) -> Sequence[Action]:
        """Read what of these is missing, one at a time."""
        wanted = wanted[:N_PORTIONS_HELD]
        self._held = {p: batch for p, batch in self._held.items() if p in wanted}
        missing = [portion for portion in wanted if portion not in self._held]
        if self._reading is not None or not missing:
            return []
        start, stop = self._reading = missing[0]
        position = start % self._samples.n_samples
        indices = self._samples.at(start, stop)
        return [
            Compute(
                name="replica:read",
                work=partial(self._sums.read, position, indices),
                cost=Cost(n_bytes=2.0 * self._bytes_per_sample * (stop - start)),
                lane=Lane.DATA,
            )
        ]

    def have_read(self, result: object) -> None:
        """Keep what was read."""
        assert isinstance(result, Batch), result
        assert self._reading is not None
        self._held[self._reading] = result
        self._reading = None
        self._bytes_per_sample = result.n_bytes / result.n_samples
