"""What the last pushes have done to a shard's values, for fetches of that alone.

    clock      40         41          42         43
    changed        3 17        -          3 900        elements whose bits differ
    moved          words       -          words        w := w - decode(words)

A client with the values of clock 40 sets the elements that have changed since, or moves by the
words since: then it has the bits of clock 43. What is not known, or is as long as the values, is
no log: then all values are sent. A log knows the last pushes only.

So that a shard's values move by what words can say, it holds back the rest:

    r := r + (w - rule(w, push));  words, r := codec.encode(r);  w := w - decode(words)
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, cast, final

import numpy as np
from numpy.typing import NDArray

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.codecs import Cut, Int4, Int8, Residual, Words
from distbelief.parameter_server.ranges import IndexRanges


Places = NDArray[np.uint32]  # elements, rising
ToWords = Callable[[Vector], Words]  # from the shard's values

PIECE: Final = 1 << 16
WORD: Final = np.dtype(np.uint32)
_N_PUSHES_MAX: Final = 1024
_NO_WORDS: Final = np.zeros(0, np.uint32)


def pieces(n_elements: int) -> "Iterator[slice[int, int, None]]":
    for start in range(0, n_elements, PIECE):
        yield slice(start, min(start + PIECE, n_elements))


class _Pushes:
    """What of each of the last pushes; together they have at most so many words."""

    def __init__(self, n_words_max: int) -> None:
        self._n_words_max = n_words_max
        self._pushes: deque[Words] = deque()
        self._n_words = 0
        self._clock = 0  # after the last of them

    def begin(self, clock: int) -> None:
        """Nothing is known of what was before this clock."""
        self._pushes.clear()
        self._n_words, self._clock = 0, clock

    def add(self, words: Words) -> None:
        self._pushes.append(words)
        self._n_words += len(words)
        self._clock += 1
        while self._n_words > self._n_words_max or len(self._pushes) > _N_PUSHES_MAX:
            self._n_words -= len(self._pushes.popleft())

    def since(self, clock: int) -> list[Words] | None:
        n_pushes = self._clock - clock
        if not 0 <= n_pushes <= len(self._pushes):
            return None
        return [*islice(reversed(self._pushes), n_pushes)][::-1]


@final
class ChangeLog:
    """Which elements each of the last pushes has changed."""

    payload: Final = "changed"

    def __init__(self, n_elements: int) -> None:
        self._n_elements = n_elements
        self._pushes = _Pushes(n_elements // 2)
        self._next: Places = _NO_WORDS

    def begin(self, clock: int) -> None:
        self._pushes.begin(clock)

    def note(self, before: Vector, values: Vector) -> None:
        """The push in progress has done this."""
        self._next = changed_of(before, values)

    def forget(self) -> None:
        """The push in progress has set the values."""

    def end_push(self) -> None:
        self._pushes.add(self._next)
        self._next = _NO_WORDS

    def since(self, clock: int, ranges: IndexRanges | None) -> ToWords | None:
        """Return what makes the words of a fetch: places in these ranges, then values."""
        last = self._pushes.since(clock)
        # Some may be in several pushes: to find that out is work.
        if last is None or 2 * sum(map(len, last)) > self._n_elements // 2:
            return None

        def to_words(values: Vector) -> Words:
            places, here = compact(np.unique(np.concatenate([_NO_WORDS, *last])), ranges)
            return np.concatenate([places, values[here].view(WORD)])

        return to_words


@final
class MoveLog:
    """The words by which each of the last pushes has moved the values; the rest waits."""

    payload: Final = "moved"

    def __init__(self, codec: Int8 | Int4, n_elements: int, *, n_gradient: int) -> None:
        self.codec = codec
        self._n_gradient = n_gradient
        self._pushes = _Pushes(max(n_elements - 1, 0))
        self._next: Words = _NO_WORDS
        self.rest: Residual = np.zeros(n_elements, np.float32)  # of buffers: zeros

    def begin(self, clock: int) -> None:
        self._pushes.begin(clock)

    def note(self, before: Vector, values: Vector) -> None:
        """Let the push in progress move the values by what words can say."""
        n = self._n_gradient
        rest, was, values = self.rest[:n], before[:n], values[:n]
        for piece in pieces(n):
            rest[piece] += was[piece] - values[piece]
        words = np.empty(self.codec.n_words_max(n), WORD)
        encoded = self.codec.encode(rest, Cut(), words)
        self._next = words[: encoded.n_words]
        values[:] = was
        move(cast("Residual", values), self.codec, self._next)

    def end_push(self) -> None:
        self._pushes.add(self._next)
        self._next = _NO_WORDS

    def since(self, clock: int, ranges: IndexRanges | None) -> ToWords | None:
        """Return what makes the words of a fetch: those of the pushes, then the buffers' bits."""
        last = self._pushes.since(clock)
        if last is None or ranges is not None:
            return None
        n = self._n_gradient
        return lambda values: np.concatenate([*last, values[n:].view(WORD)])

    def forget(self) -> None:
        """The push in progress has set the values."""
        self.rest[:] = 0

    def settled(self, values: Vector) -> Vector:
        """Return the values without anything held back."""
        return values - self.rest


FetchLog = ChangeLog | MoveLog


def move(values: Residual, codec: Int8 | Int4, words: Words) -> None:
    """Set values to values - decode(words); RemoteProtocolError if the words are invalid."""
    add = codec.decoder(words, len(values))
    room = np.empty(min(PIECE, len(values)), np.float32)
    for piece in pieces(len(values)):
        step = room[: piece.stop - piece.start]
        step[:] = 0
        add(piece.start, piece.stop, step)
        values[piece] -= step


def moves_of(
    words: Words, codec: Int8 | Int4, n_elements: int, *, n_parameters: int
) -> Callable[[Residual], None]:
    """Return what moves values by these words of a fetch; RemoteProtocolError if they are none."""
    n, n_each = n_elements - n_parameters, codec.n_words_max(n_parameters)
    n_pushes, rest = divmod(len(words) - n, max(n_each, 1))
    if rest or n_pushes < 0 or (n_pushes and not n_each):
        raise RemoteProtocolError(f"{len(words)} words are no moves of {n_elements} elements")
    each = [words[k * n_each : (k + 1) * n_each] for k in range(n_pushes)]
    for one in each:
        codec.decoder(one, n_parameters)  # raises if it is invalid
    buffers = words[len(words) - n :].view(np.float32)

    def update(values: Residual) -> None:
        for one in each:
            move(values[:n_parameters], codec, one)
        values[n_parameters:] = buffers

    return update


def changed_of(before: Vector, after: Vector) -> Places:
    """Return the elements whose bits differ."""
    bits = np.dtype(f"u{before.itemsize}")
    return np.flatnonzero(before.view(bits) != after.view(bits)).astype(np.uint32)


def compact(changed: Places, ranges: IndexRanges | None) -> tuple[Places, Places]:
    """Return those that lie in the ranges: where in the compact vector, and in the whole one."""
    if ranges is None:
        return changed, changed
    n_before = np.searchsorted(ranges.starts, changed, "right")  # ranges that begin up to it
    is_here = changed < np.append(0, ranges.stops)[n_before]
    here, found = changed[is_here], n_before[is_here] - 1
    places = ranges.offsets[found] + here - ranges.starts[found]
    return places.astype(np.uint32), here
