"""How fast this machine is at a moment: layers of a net now, beside those of a profile.

A host that others use too is faster and slower by tens of percent within minutes, so a
prediction can be no better than its profile is new. So layers are measured again, whole
and once each, just before and after whatever is predicted: in one process, and in as
many at once as it has, for what they share, memory above all, they share then too. Each
counts for as much as machines compute at once (`overlap`). Slices of a layer are taken
to have become slower by as much as the whole.

Nothing here knows of any plan, so nothing is fitted on what plans took.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import final

import msgspec
from msgspec.structs import replace

from distbelief.partition.profiling.profile import WHOLE, Profile, Slices


Pace = dict[str, tuple[float, float]]
"""Seconds of the forward and backward pass of whole layers, by key."""


@final
class Paces(msgspec.Struct, frozen=True, kw_only=True):
    """Paces of one moment.

    Attributes:
        alone: Of a process while no other measures.
        together: Of all of them at once.
    """

    alone: Pace
    together: Pace

    @property
    def seconds(self) -> float:
        """Of all layers, in both."""
        return sum(sum(passes) for pace in (self.alone, self.together) for passes in pace.values())

    def at(self, overlap: float) -> Pace:
        """Return the pace of who computes this share while others compute as well."""
        return {
            key: (
                overlap * both[0] + (1.0 - overlap) * self.alone[key][0],
                overlap * both[1] + (1.0 - overlap) * self.alone[key][1],
            )
            for key, both in self.together.items()
            if key in self.alone
        }


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Return the mean of several."""
    return {
        key: (fmean(pace[key][0] for pace in paces), fmean(pace[key][1] for pace in paces))
        for key in set(paces[0]).intersection(*paces[1:])
    }


def slower(profile: Profile, pace: Pace) -> float:
    """Return how many times as long all layers take as by a profile."""
    keys = pace.keys() & profile.layers.keys()
    then = sum(
        profile.layers[key][WHOLE].forward[-1] + profile.layers[key][WHOLE].backward[-1]
        for key in keys
    )
    return sum(sum(pace[key]) for key in keys) / then


def at_pace(profile: Profile, pace: Pace) -> Profile:
    """Return a profile as it would be, had it been measured at that pace."""
    layers: dict[str, Mapping[str, Slices]] = dict(profile.layers)
    for key, (forward, backward) in pace.items():
        if key in layers:
            whole = layers[key][WHOLE]
            factors = _ratio(forward, whole.forward), _ratio(backward, whole.backward)
            layers[key] = {
                word: replace(
                    slices,
                    forward=tuple(factors[0] * seconds for seconds in slices.forward),
                    backward=tuple(factors[1] * seconds for seconds in slices.backward),
                )
                for word, slices in layers[key].items()
            }
    return replace(profile, layers=layers)


def _ratio(now: float, then: Sequence[float]) -> float:
    return now / then[-1] if then[-1] else 1.0
