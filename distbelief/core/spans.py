"""Positions of dealt samples: sets of them, and how epochs are cut into pushes and batches.

    position    0 1 2 3 ... n-1 | n n+1 ...         epoch 0, epoch 1, each in an order of its own
    push        [      )[      )[   ) [      )      every `n_push` batches, anew in each epoch
    batch       [  )[  )[  )[  )[   ) [  )[  )

All replicas cut at the same positions. So two pushes have the same samples or none in common, and
the positions alone tell a shard what it has applied. Where pushes are fitted to the link, ranges
end where pushes end that some shard has applied (`supervisor.dealer`).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Final, final

from typing_extensions import override

from distbelief.core.pieces import PieceOrder


Span = tuple[int, int]  # positions [start, stop)

_FEW: Final = 16  # of two sets, one has so many times fewer spans


@final
class Spans:
    """An immutable set of positions, as sorted spans that neither overlap nor touch."""

    __slots__ = ("_n_positions", "_spans")

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        merged: list[Span] = []
        for start, stop in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], stop)
            elif start < stop:
                merged.append((start, stop))
        self._spans = tuple(merged)
        self._n_positions = -1  # not counted yet

    @classmethod
    def from_wire(cls, ends: Iterable[int]) -> "Spans":
        flat = tuple(ends)
        return cls(zip(flat[::2], flat[1::2], strict=False))

    def to_wire(self) -> tuple[int, ...]:
        return tuple(end for span in self._spans for end in span)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __bool__(self) -> bool:
        return bool(self._spans)

    @property
    def n_spans(self) -> int:
        return len(self._spans)

    # No `__len__`: it would be taken for the number of spans, and memory made for so many.
    @property
    def n_positions(self) -> int:
        if self._n_positions < 0:
            self._n_positions = sum(stop - start for start, stop in self._spans)
        return self._n_positions

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._spans == other._spans

    @override
    def __hash__(self) -> int:
        return hash(self._spans)

    @override
    def __repr__(self) -> str:
        return f"Spans({list(self._spans)})"

    def overlaps(self, span: Span) -> bool:
        n_before = bisect_left(self._spans, (span[1],))  # those that begin before its end
        return n_before > 0 and self._spans[n_before - 1][1] > span[0]

    def contains(self, span: Span) -> bool:
        n_before = bisect_left(self._spans, (span[0] + 1,))  # those that begin no later
        return span[0] >= span[1] or (n_before > 0 and self._spans[n_before - 1][1] >= span[1])

    def __or__(self, other: "Spans") -> "Spans":
        if len(self._spans) < len(other._spans):
            return other | self
        if len(self._spans) // _FEW < len(other._spans):
            return Spans((*self, *other)) if other._spans else self
        # Few to many, as of a push among what thousands of replicas have pushed: a look at few.
        merged = list(self._spans)
        for start, stop in other:
            first, last = _touched(merged, start, stop)
            ends = [(start, stop), *merged[first:last]]
            merged[first:last] = [(min(ends)[0], max(end for _, end in ends))]
        return Spans._sorted(merged)

    @classmethod
    def _sorted(cls, spans: Iterable[Span]) -> "Spans":
        found = cls()
        found._spans = tuple(spans)
        return found

    def __sub__(self, other: "Spans") -> "Spans":
        if len(self._spans) // _FEW >= len(other._spans):
            kept = list(self._spans)
            for start, stop in other:
                first, last = _touched(kept, start, stop)
                kept[first:last] = [
                    (max(a, s), min(b, e))
                    for s, e in kept[first:last]
                    for a, b in ((s, start), (stop, e))
                    if max(a, s) < min(b, e)
                ]
            return Spans._sorted(kept)
        left: list[Span] = []
        cuts, first = other._spans, 0
        for start, stop in self:
            at = start
            if len(self._spans) < len(cuts) // 16:  # few from many: no look at each of them
                first = max(first, bisect_left(cuts, (start,)) - 1)
            while first < len(cuts) and cuts[first][1] <= start:
                first += 1  # for good: the next span begins later
            for index in range(first, len(cuts)):  # `islice` would go through those before, too
                begin, end = cuts[index]
                if begin >= stop:
                    break
                left.append((at, begin))
                at = max(at, end)
            left.append((at, stop))
        return Spans(span for span in left if span[0] < span[1])

    def __and__(self, other: "Spans") -> "Spans":
        return self - (self - other)


def _touched(spans: Sequence[Span], start: int, stop: int) -> tuple[int, int]:
    """Return which of these spans, `first` to before `last`, overlap or touch [start, stop)."""
    first = bisect_left(spans, (start,))
    if first and spans[first - 1][1] >= start:
        first -= 1
    return first, bisect_left(spans, (stop + 1,))


NOTHING: Final = Spans()

# Each rank of a split replica pushes its own part of the parameters. A shard must know which part
# has which samples, so a rank counts its positions from a number of its own.
_PART: Final = 1 << 41  # more samples than any job has; 4,096 ranks stay exact as floats


def of_part(span: Span, part: int) -> Span:
    """Return the positions for which a push by the rank of this number stands."""
    assert span[1] <= _PART, span
    return part * _PART + span[0], part * _PART + span[1]


def dealt_of(span: Span) -> Span:
    """Return the positions that were dealt for which such a push stands."""
    part = span[0] // _PART * _PART
    return span[0] - part, span[1] - part


def in_part(spans: Spans, part: int) -> Spans:
    """Return which positions the rank of this number has pushed."""
    first, last = of_part((0, _PART), part)
    return Spans((max(start, first) - first, min(stop, last) - first) for start, stop in spans)


def in_all_parts(spans: Spans) -> Spans:
    """Return which positions all those ranks have pushed that have pushed anything."""
    parts = {end // _PART for start, stop in spans for end in (start, stop - 1)}
    return reduce(and_, [in_part(spans, part) for part in parts]) if parts else NOTHING


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """How the positions of an endless sequence of epochs are cut.

    A single sample left over joins the batch before it, because batch normalisation cannot train
    on one sample.
    """

    n_samples: int  # of the data set
    batch_size: int
    n_push: int = 1  # batches of a push
    pieces: PieceOrder | None = None  # pushes end with the piece, too

    def whole(self, position: int) -> Span:
        """Return the epoch, or the piece in it, that contains this position."""
        if self.pieces is not None:
            return self.pieces.at_position(position)[1]
        epoch = position - position % self.n_samples
        return epoch, epoch + self.n_samples

    def start(self, position: int) -> int:
        """Return where the push that contains this position begins."""
        (first, last), size = self.whole(position), self.push_size
        start = position - (position - first) % size
        return start - size if start > first and self._is_single(last - start) else start

    def stop(self, position: int) -> int:
        """Return where the push that contains this position ends."""
        last = self.whole(position)[1]
        stop = min(self.start(position) + self.push_size, last)
        return last if self._is_single(last - stop) else stop

    def batch(self, left: int) -> int:
        """Return the size of the next batch if its push has so many samples left."""
        is_last = left <= self.batch_size or self._is_single(left - self.batch_size)
        return left if is_last else self.batch_size

    def n_batches(self, start: int, stop: int) -> int:
        """Return how many batches a range has; it lies within one epoch."""
        n_batches = 0
        while start < stop:
            end = min(self.whole(start)[1], stop)
            n_batches += self._n_batches(start, end)
            start = end
        return n_batches

    def _n_batches(self, start: int, stop: int) -> int:
        first, last = min(self.stop(start), stop), max(self.start(stop - 1), start)
        if first >= stop:
            return self._n_within(stop - start)
        inner = (last - first) // self.batch_size
        return self._n_within(first - start) + inner + self._n_within(stop - last)

    @property
    def n_pushes(self) -> int:
        """The number of pushes of one epoch."""
        rows = (self.n_samples,) if self.pieces is None else self.pieces.pieces.rows
        return sum(self._n_pushes(n) for n in rows)

    def _n_pushes(self, n_samples: int) -> int:
        n_whole, rest = divmod(n_samples, self.push_size)
        return n_whole + (rest > 0) - (n_whole > 0 and self._is_single(rest))

    @property
    def push_size(self) -> int:
        return self.batch_size * self.n_push

    def _is_single(self, left: int) -> bool:
        return left == 1 and self.batch_size > 1

    def _n_within(self, left: int) -> int:
        n_whole, rest = divmod(left, self.batch_size)
        return n_whole + (rest > 0) - (n_whole > 0 and self._is_single(rest))
