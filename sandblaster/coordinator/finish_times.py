"""Finish times: numbered items, kept in the order of the seconds that each has left.

What is left changes at one of three rates, so items of one rate never overtake each other:

    slope -1    in progress, and in time    offset - now
           0    not started                 offset
          +1    overdue                     offset + now

Each slope has a column sorted by offset, in blocks that cache their sums: to put, drop or
sum up to a bound takes about the square root of the number of items.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from operator import itemgetter
from typing import Final, Literal, NamedTuple, final

from distbelief.roles.role import Seconds


Slope = Literal[-1, 0, 1]

_BLOCK: Final = 64

# The number is negated, so that of equal offsets the lower number is the longer one.
_Entry = tuple[float, int, float]  # offset, -number, weight


@final
@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a function of time."""

    offset: float
    slope: Slope = 0

    def at(self, now: Seconds) -> Seconds:
        return self.offset + self.slope * now

    def later(self, seconds: Seconds) -> "Line":
        return Line(self.offset + seconds, self.slope)


class Sum(NamedTuple):
    """Number of some items, sum of their weights, and sum of seconds times weights."""

    n: int
    weight: float
    weighted: float


@final
class _Column:
    """Entries of one slope."""

    def __init__(self) -> None:
        self._blocks: list[list[_Entry]] = []
        self._lasts: list[_Entry] = []  # of each block
        self._sums: list[Sum | None] = []  # of each block; None: it has changed

    def put(self, entry: _Entry) -> None:
        if not self._blocks:
            self._insert(0, [entry])
            return
        index = min(bisect_left(self._lasts, entry), len(self._blocks) - 1)
        block = self._blocks[index]
        insort(block, entry)
        if len(block) > 2 * _BLOCK:  # split it, so that an insertion stays cheap
            self._insert(index + 1, block[_BLOCK:])
            del block[_BLOCK:]
        self._lasts[index], self._sums[index] = block[-1], None

    def drop(self, entry: _Entry) -> None:
        index = bisect_left(self._lasts, entry)
        block = self._blocks[index]
        del block[bisect_left(block, entry)]
        if block:
            self._lasts[index], self._sums[index] = block[-1], None
        else:
            del self._blocks[index], self._lasts[index], self._sums[index]

    def below(self, offset: float) -> Sum:
        n, weight, weighted = 0, 0.0, 0.0
        for index, (last, _, _) in enumerate(self._lasts):
            block = self._blocks[index]
            if last < offset:
                part = self._sums[index]
                if part is None:
                    part = self._sums[index] = _sum(block)
            else:
                part = _sum(block[: bisect_left(block, offset, key=itemgetter(0))])
            n += part.n
            weight += part.weight
            weighted += part.weighted
            if last >= offset:
                break
        return Sum(n, weight, weighted)

    def rising(self) -> Iterator[_Entry]:
        return chain.from_iterable(self._blocks)

    def falling(self) -> Iterator[_Entry]:
        return chain.from_iterable(map(reversed, reversed(self._blocks)))

    def _insert(self, index: int, block: list[_Entry]) -> None:
        self._blocks.insert(index, block)
        self._lasts.insert(index, block[-1])
        self._sums.insert(index, None)


def _sum(entries: list[_Entry]) -> Sum:
    return Sum(
        len(entries),
        sum(weight for _, _, weight in entries),
        sum(offset * weight for offset, _, weight in entries),
    )


@final
class FinishTimes:
    """Items by number, each with a line and a weight."""

    def __init__(self) -> None:
        self._columns: dict[Slope, _Column] = {s: _Column() for s in (-1, 0, 1)}
        self._entries: dict[int, tuple[Slope, _Entry]] = {}

    def put(self, number: int, line: Line, *, weight: float = 0.0) -> None:
        """Add an item, or change its line and weight."""
        entry = line.offset, -number, weight
        known = self._entries.get(number)
        if known == (line.slope, entry):
            return
        self.drop(number)
        self._columns[line.slope].put(entry)
        self._entries[number] = line.slope, entry

    def drop(self, number: int) -> None:
        known = self._entries.pop(number, None)
        if known is not None:
            slope, entry = known
            self._columns[slope].drop(entry)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def at_most(self, seconds: Seconds, now: Seconds) -> Iterator[int]:
        """Yield the numbers of all items with at most so many seconds left, in any order."""
        for slope, column in self._columns.items():
            for offset, number, _ in column.rising():
                if offset + slope * now > seconds:
                    break
                yield -number

    def longest(self, now: Seconds) -> Iterator[tuple[Seconds, int]]:
        """Yield seconds and numbers, the longest first; if equal, the lower number."""
        lines = [self._falling(slope, now) for slope in self._columns]
        return ((s, -number) for s, number in merge(*lines, reverse=True))

    def shortest(self, now: Seconds) -> Iterator[tuple[Seconds, int]]:
        """Yield seconds and numbers, the shortest first; if equal, the later number."""
        lines = [self._rising(slope, now) for slope in self._columns]
        return ((s, -number) for s, number in merge(*lines))

    def below(self, seconds: Seconds, now: Seconds) -> Sum:
        """Return the sum of all items with fewer seconds left."""
        n, weight, weighted = 0, 0.0, 0.0
        for slope, column in self._columns.items():
            part = column.below(seconds - slope * now)
            n += part.n
            weight += part.weight
            weighted += part.weighted + slope * now * part.weight
        return Sum(n, weight, weighted)

    def _rising(self, slope: Slope, now: Seconds) -> Iterator[tuple[Seconds, int]]:
        for offset, number, _ in self._columns[slope].rising():
            yield offset + slope * now, number

    def _falling(self, slope: Slope, now: Seconds) -> Iterator[tuple[Seconds, int]]:
        for offset, number, _ in self._columns[slope].falling():
            yield offset + slope * now, number
