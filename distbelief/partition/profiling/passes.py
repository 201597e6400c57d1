"""What was measured several times: whether it agrees, and on what."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from distbelief.partition.profiling.profile import Slices


DIFFERENCE_MAX: Final = 0.1
"""Between the best two measurements of one slice, as a share."""

Pass = Mapping[str, Slices]
"""Slices of one layer, by dimension; if time was up some are left out."""


def agreed(passes: Sequence[Pass]) -> dict[str, Slices]:
    """Return the median of each slice."""
    found = {}
    for word in passes[0]:
        slices = _of(word, passes)
        found[word] = msgspec.structs.replace(
            slices[0],
            forward=tuple(median(times) for times in _forward(slices)),
            backward=tuple(median(times) for times in _backward(slices)),
        )
    return found


def differ(passes: Sequence[Pass]) -> bool:
    """Return whether the best two measurements of some slice are not alike."""
    for word in passes[0]:
        slices = _of(word, passes)
        for times in (*_forward(slices), *_backward(slices)):
            best = _best(times)
            if best[-1] > (1.0 + DIFFERENCE_MAX) * best[0]:
                return True
    return False


def _best(times: Sequence[float]) -> list[float]:
    return sorted(times)[:2]


def _of(word: str, passes: Sequence[Pass]) -> list[Slices]:
    return [slices[word] for slices in passes if word in slices]


def _forward(slices: Sequence[Slices]) -> Iterator[tuple[float, ...]]:
    return zip(*(each.forward for each in slices), strict=True)


def _backward(slices: Sequence[Slices]) -> Iterator[tuple[float, ...]]:
    return zip(*(each.backward for each in slices), strict=True)
