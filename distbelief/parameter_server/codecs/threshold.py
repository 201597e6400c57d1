"""Steps of one size tau: Strom 2015, and the encoding of DL4J's gradient sharing.

    |r| >= tau        +-tau is sent, the rest is kept               at most one step a push (SR-1)
    |r| >= 2^16 tau   the element is sent whole, the first one of each 64; the others are kept
    rest > clip tau   what is beyond is lost, and counted; every so many pushes (DJ-6)

    | is_bitmap | n_steps | n_whole | tau | steps | whole elements: indices, values |
    steps:  a list      index << 1 | sign: a word each
            a bitmap    2 bits an element, 16 in a word: bit f is the step, bit f + 16 its sign

tau is a bfloat16, so steps are short. The shorter of list and bitmap is sent. DL4J's bitmap also
sends -tau/2 for elements that are negative and half as large; this one has the same steps as the
list, so it needs no switch with a memory (DJ-4), and nothing is lost at it.
"""

from collections.abc import Sequence
from typing import Final, final

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.core.arguments import require
from distbelief.core.vectors import ALIGNMENT
from distbelief.parameter_server.codecs import exactness
from distbelief.parameter_server.codecs.exactness import (
    Adder,
    Cut,
    Encoded,
    History,
    Piece,
    Residual,
    Words,
)


_HEADER: Final = 4  # words
_TAU_MIN: Final = 2.0**-100
_TAU_MAX: Final = 2.0**100


@final
class Adaptive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tau follows the share of elements that is sent (DJ-5)."""

    least: float = 1e-4  # if less is sent, tau falls
    most: float = 1e-2  # if more is sent, tau rises
    decay: float = 0.5 ** (1 / 20)

    def __post_init__(self) -> None:
        user = "codec 'threshold', adaptive"
        require(self, user, "least most", lambda x: 0.0 <= x <= 1.0, "a share from 0 to 1")
        require(self, user, "most", lambda x: x >= self.least, "a share of at least `least`")
        require(self, user, "decay", lambda x: 0.5 <= x < 1.0, "at least 0.5, and less than 1")


@final
class Threshold(exactness.CodecTable, frozen=True, kw_only=True, tag="threshold"):
    """Elements of size tau or more, by one step of tau each; the rest is kept."""

    tau: float = 1e-3  # of the first push, and of all unless it is adaptive; kept to 8 bits
    adaptive: Adaptive | None = None
    clip: float | None = None  # largest size of the rest, in steps; None: any
    clip_every: int = 5  # pushes

    def __post_init__(self) -> None:
        user = "codec 'threshold'"
        in_range = "a number from 2^-100 to 2^100"
        require(self, user, "tau", lambda x: _TAU_MIN <= x <= _TAU_MAX, in_range)
        require(
            self,
            user,
            "clip",
            lambda x: 1.0 <= x < exactness.SHORT_RANGE,
            "1 or more, and less than 65536",
        )
        require(self, user, "clip_every", lambda n: n >= 1, "a whole number of pushes, 1 or more")

    @override
    def choose(self, parts: Sequence[Residual], history: History) -> Cut:
        tau = exactness.shorten(history.tau or self.tau)
        if self.clip is None or not history.n_pushes or history.n_pushes % self.clip_every:
            return Cut(size=tau)
        return Cut(size=tau, clip=exactness.shorten(self.clip * tau))

    @override
    def after(self, history: History, cut: Cut, *, n_sent: int, n_elements: int) -> History:
        tau = history.tau or self.tau
        if self.adaptive is not None:
            share = n_sent / max(n_elements, 1)
            if share < self.adaptive.least:
                tau *= self.adaptive.decay
            elif share > self.adaptive.most:
                tau /= self.adaptive.decay
        return History(n_pushes=history.n_pushes + 1, tau=min(max(tau, _TAU_MIN), _TAU_MAX))

    @override
    def n_words_max(self, n_elements: int) -> int:
        return _HEADER + _bitmap_words(n_elements) + exactness.n_whole_words_max(n_elements)

    @override
    def encode(self, residual: Residual, cut: Cut, out: Words) -> Encoded:
        exactness.check_residual(residual)
        n_elements = len(residual)
        tau, end = np.float32(cut.size), exactness.short_end(cut.size)
        steps = _Steps(out[_HEADER : _HEADER + _bitmap_words(n_elements)])
        whole: list[exactness.Indices] = []
        clipped = clipped_size = 0.0
        for piece, indices, numbers in exactness.selected(residual, cut, end, whole):
            places = indices.astype(np.uint32) + np.uint32(piece.start)
            steps.add(piece, places << np.uint32(1) | np.signbit(numbers))
            rest = numbers - np.copysign(tau, numbers)
            if cut.clip is not None:
                kept = np.clip(rest, -np.float32(cut.clip), np.float32(cut.clip))
                beyond = (rest - kept).astype(np.float64)
                clipped += float(beyond.sum())
                clipped_size += float(np.abs(beyond).sum())
                rest = kept
            residual[piece][indices] = rest
        first_whole = _HEADER + steps.finish()
        n_whole = exactness.put_whole(residual, whole, out[first_whole:])
        out[:_HEADER] = steps.is_bitmap, steps.n, n_whole, tau.view(np.uint32)
        return Encoded(
            n_words=first_whole + 2 * n_whole,
            n_sent=steps.n + n_whole,
            clipped=clipped,
            clipped_size=clipped_size,
        )

    @override
    def decoder(self, words: Words, n_elements: int) -> Adder:
        exactness.require_valid(
            len(words) >= _HEADER, f"{len(words)}, less than the first {_HEADER}"
        )
        is_bitmap, n_steps, n_whole, tau_bits = words[:_HEADER].tolist()
        tau = exactness.short_of(tau_bits >> 16)
        is_short = tau is not None and not tau_bits & 0xFFFF
        exactness.require_valid(is_short, "tau is not a bfloat16 above 0")
        exactness.require_valid(is_bitmap in {0, 1}, f"is_bitmap is {is_bitmap}")
        n_step_words = _bitmap_words(n_elements) if is_bitmap else n_steps
        is_valid = len(words) == _HEADER + n_step_words + 2 * n_whole
        exactness.require_valid(is_valid, f"{len(words)}, which are not as many as its counts say")
        steps, whole = words[_HEADER : _HEADER + n_step_words], words[_HEADER + n_step_words :]
        size = np.float32(tau or 0.0)
        if is_bitmap:
            _require_bitmap(steps, n_steps, n_elements)
            add = _adds_bitmap(steps, size)
        else:
            indices, sent = steps >> np.uint32(1), steps << np.uint32(31) | size.view(np.uint32)
            exactness.require_indices(indices, n_elements)
            add = exactness.adds_some(indices, sent.view(np.float32))
        return exactness.adds_both(add, exactness.pairs(whole, n_elements))


def _bitmap_words(n_elements: int) -> int:
    return -(-n_elements // 16)


class _Steps:
    """Writes steps as a list, as long as that is no longer than a bitmap."""

    def __init__(self, out: Words) -> None:
        self._out = out
        self._listed: list[tuple[Piece, int, int]] = []  # pieces, and which words they have
        self.n = 0
        self.is_bitmap = False

    def add(self, piece: Piece, words: Words) -> None:
        n_before, self.n = self.n, self.n + len(words)
        if not self.is_bitmap and self.n > len(self._out):
            self.is_bitmap = True
            former = self._out[:n_before].copy()
            self._out[:] = 0
            for one, first, last in self._listed:
                self._mark(one, former[first:last])
        if self.is_bitmap:
            self._mark(piece, words)
            return
        self._listed.append((piece, n_before, self.n))
        self._out[n_before : self.n] = words

    def _mark(self, piece: Piece, words: Words) -> None:
        first, last = piece.start // 16, _bitmap_words(piece.stop)
        places = (words >> 1) - piece.start
        bits = np.zeros((2, 16 * (last - first)), np.bool_)
        bits[0, places] = True
        bits[1, places] = words & 1
        halves = np.packbits(bits, axis=1, bitorder="little").view("<u2").astype(np.uint32)
        self._out[first:last] = halves[0] | halves[1] << 16

    def finish(self) -> int:
        """Return the number of words."""
        return len(self._out) if self.is_bitmap else self.n


def _require_bitmap(words: Words, n_steps: int, n_elements: int) -> None:
    n_bits = 0
    for piece in exactness.pieces(len(words)):
        steps, signs = words[piece] & 0xFFFF, words[piece] >> 16
        exactness.require_valid(not (signs & ~steps).any(), "an element has a sign and no step")
        n_bits += int(np.bitwise_count(steps).sum(dtype=np.int64))
    exactness.require_valid(n_bits == n_steps, f"{n_bits} steps, not {n_steps}")
    n_last = n_elements % 16
    is_valid = not n_last or not int(words[-1] & 0xFFFF) >> n_last
    exactness.require_valid(is_valid, f"a step beyond {n_elements} elements")


def _adds_bitmap(words: Words, tau: np.float32) -> Adder:
    @np.errstate(over="ignore")
    def add(start: int, stop: int, out: Residual) -> None:
        assert start % ALIGNMENT == 0
        for piece in exactness.pieces(stop - start):
            first, last = start + piece.start, start + piece.stop
            here = words[first // 16 : _bitmap_words(last)]
            halves = np.array([here & 0xFFFF, here >> 16], "<u2").view(np.uint8)
            bits = np.unpackbits(halves, axis=1, count=last - first, bitorder="little")
            out[piece] += (bits[0] - 2 * bits[1]).view(np.int8) * tau

    return add
