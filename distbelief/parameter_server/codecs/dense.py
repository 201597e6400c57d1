"""Codecs that send every element, rounded to 16, 8 or 4 bits.

    codec      words of n elements                       an element is sent as
    bfloat16   n / 2                                     the nearest bfloat16
    int8       n / 4 + n / 128                           q s, q = -127 ... 127
    int4       n / 8 + n / 128                           q s, q = -7 ... 7

s is one number for each 64 elements, a bfloat16: the smallest, nearly, by which none of them is
beyond the last q + 1/2. With |r| / s in [q - 1/2, q + 1/2], r and q s are near for any q but 0.
Elements are kept (s = 0) where s would be subnormal. s is at most 2^120 (or 2^124), so that no code
stands for infinity; there the last q s has 7 bits, and what is beyond it is short. Elsewhere q s
has at most 15 bits: a fused multiply-add gives the same sum.
"""

from collections.abc import Sequence
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from distbelief.core.vectors import ALIGNMENT
from distbelief.parameter_server.codecs import exactness, kernels
from distbelief.parameter_server.codecs.exactness import (
    Adder,
    Cut,
    Encoded,
    History,
    Residual,
    Words,
)


_NO_CUT: Final = Cut()


class _Dense(exactness.CodecTable, frozen=True, kw_only=True):
    @override
    def choose(self, parts: Sequence[Residual], history: History) -> Cut:
        return _NO_CUT

    def _require_length(self, words: Words, n_elements: int) -> None:
        n_words = self.n_words_max(n_elements)
        exactness.require_valid(len(words) == n_words, f"{len(words)} for {n_elements} elements")


# --- 16 bits ---

_HALF: Final = np.uint32(0x8000)
_SHORT_SIZE: Final = np.uint16(0x7FFF)
_LARGEST: Final = np.array([exactness.SHORT_MAX << 16], np.uint32).view(np.float32)[0]
_IS_LITTLE: Final = int(np.array([1], np.uint32).view(np.uint16)[0])  # 1: the lower half is first


@final
class Bfloat16(_Dense, frozen=True, kw_only=True, tag="bfloat16"):
    """The upper half of each float32, rounded to nearest; the largest ones down to a finite one.

    What is kept is at most half of the last of 8 bits, so it is near. Zero and numbers that round
    to it are sent as zero.
    """

    @override
    def n_words_max(self, n_elements: int) -> int:
        return -(-n_elements // 2)

    @override
    def encode(self, residual: Residual, cut: Cut, out: Words) -> Encoded:
        exactness.check_residual(residual)
        n_elements = len(residual)
        n_words = self.n_words_max(n_elements)
        halves = out[:n_words].view(np.uint16)
        halves[n_elements:] = 0
        encode = kernels.compiled(kernels.encode_halves) or _encode_halves
        exactness.check_finite(encode(residual, halves[:n_elements]))
        return Encoded(n_words=n_words, n_sent=n_elements)

    @override
    def decoder(self, words: Words, n_elements: int) -> Adder:
        self._require_length(words, n_elements)
        halves = words.view(np.uint16)
        for piece in exactness.pieces(len(halves)):
            is_finite = (halves[piece] & _SHORT_SIZE).max() <= exactness.SHORT_MAX
            exactness.require_valid(is_finite, "a number is not finite")

        def add(start: int, stop: int, out: Residual) -> None:
            add_halves = kernels.compiled(kernels.add_halves) or _add_halves
            add_halves(out, halves[start:stop])

        return add


def _encode_halves(rest: Residual, halves: NDArray[np.uint16]) -> bool:
    room = np.empty(min(exactness.PIECE, len(rest)), np.uint32)
    for piece in exactness.pieces(len(rest)):
        part, target = rest[piece], halves[piece]
        bits = np.add(part.view(np.uint32), _HALF, out=room[: len(part)])
        target[:] = bits.view(np.uint16)[_IS_LITTLE::2]
        if (target & _SHORT_SIZE).max() > exactness.SHORT_MAX:
            if not np.isfinite(part).all():
                return False
            bits[:] = np.clip(part, -_LARGEST, _LARGEST).view(np.uint32) + _HALF
            target[:] = bits.view(np.uint16)[_IS_LITTLE::2]
        bits &= exactness.UPPER
        part -= bits.view(np.float32)
    return True


@np.errstate(over="ignore")
def _add_halves(out: Residual, halves: NDArray[np.uint16]) -> None:
    room = np.zeros(min(exactness.PIECE, len(out)), np.uint32)
    for piece in exactness.pieces(len(out)):
        target = out[piece]
        bits = room[: len(target)]
        bits.view(np.uint16)[_IS_LITTLE::2] = halves[piece]
        target += bits.view(np.float32)


# --- 8 and 4 bits ---


class _Blocks(_Dense, frozen=True, kw_only=True):
    last: ClassVar[int]  # the largest q
    n_bits: ClassVar[int]

    @property
    def _scale_max(self) -> np.uint32:
        """The bits of the largest scale: of which -q - 1 is finite, too."""
        return np.float32(2.0 ** (128 - self.n_bits)).view(np.uint32)

    @property
    def _divisor(self) -> np.float32:
        # Cut down to 8 bits the quotient is smaller by less than 2^-7: within the last q + 1/2.
        return np.float32((self.last + 0.5) / 1.0079)

    def _sizes(self, n_elements: int) -> tuple[int, int, int]:
        """Return the numbers of blocks, of words of scales, and of words."""
        n_blocks = -(-n_elements // ALIGNMENT)
        n_scale_words = -(-n_blocks // 2)
        return n_blocks, n_scale_words, n_scale_words + n_blocks * ALIGNMENT * self.n_bits // 32

    @override
    def n_words_max(self, n_elements: int) -> int:
        return self._sizes(n_elements)[-1]

    @override
    def encode(self, residual: Residual, cut: Cut, out: Words) -> Encoded:
        exactness.check_residual(residual)
        n_elements = len(residual)
        n_blocks, n_scale_words, n_words = self._sizes(n_elements)
        scales = out[:n_scale_words].view(np.uint16)
        scales[n_blocks:] = 0
        codes = (
            out[n_scale_words:n_words]
            .view(np.uint8)
            .reshape(n_blocks, ALIGNMENT * self.n_bits // 8)
        )
        numbers = np.empty((min(exactness.PIECE // ALIGNMENT, n_blocks), ALIGNMENT), np.float32)
        whole = n_elements // ALIGNMENT * ALIGNMENT
        if encode := kernels.compiled(kernels.encode_blocks):
            n_whole = whole // ALIGNMENT
            of_whole = residual[:whole], scales[:n_whole], codes[:n_whole].reshape(-1)
            exactness.check_finite(encode(*of_whole, self._divisor, self.last, self._scale_max))
        else:
            for piece in exactness.pieces(whole):
                part = slice(piece.start // ALIGNMENT, piece.stop // ALIGNMENT)
                rest = residual[piece].reshape(-1, ALIGNMENT)
                self._encode_blocks(rest, scales[part], codes[part], numbers[: len(rest)])
        if whole < n_elements:
            rest = np.zeros((1, ALIGNMENT), np.float32)
            rest[0, : n_elements - whole] = residual[whole:]
            self._encode_blocks(rest, scales[n_blocks - 1 : n_blocks], codes[-1:], numbers[:1])
            residual[whole:] = rest[0, : n_elements - whole]
        return Encoded(n_words=n_words, n_sent=n_elements)

    def _encode_blocks(
        self,
        rest: NDArray[np.float32],  # (n_blocks, 64), as `numbers`, which are overwritten
        scales: NDArray[np.uint16],
        codes: NDArray[np.uint8],
        numbers: NDArray[np.float32],
    ) -> None:
        bits = np.bitwise_and(rest.view(np.uint32), exactness.SIZE, out=numbers.view(np.uint32))
        largest = bits.max(axis=1)
        exactness.check_finite(bool(largest.max() < exactness.INFINITY))
        quotient = largest.view(np.float32) / self._divisor
        short = quotient.view(np.uint32) & exactness.UPPER
        is_cut = bool(short.max() > self._scale_max)
        np.minimum(short, self._scale_max, out=short)
        short[short < kernels.SCALE_MIN] = 0
        scales[:] = short >> 16
        scale = short.view(np.float32)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        np.multiply(rest, inverse[:, None], out=numbers)
        np.rint(numbers, out=numbers)
        if is_cut:
            np.clip(numbers, -self.last, self.last, out=numbers)
        self._pack(numbers.astype(np.int8), codes)
        numbers *= scale[:, None]
        rest -= numbers

    @override
    def decoder(self, words: Words, n_elements: int) -> Adder:
        self._require_length(words, n_elements)
        n_blocks, n_scale_words, _ = self._sizes(n_elements)
        scales = words[:n_scale_words].view(np.uint16)[:n_blocks].astype(np.uint32) << 16
        is_valid = (scales == 0) | ((scales >= kernels.SCALE_MIN) & (scales <= self._scale_max))
        exactness.require_valid(bool(is_valid.all()), "a scale is too small, too large or negative")
        codes = words[n_scale_words:].view(np.uint8).reshape(n_blocks, ALIGNMENT * self.n_bits // 8)
        return self._adds_blocks(scales.view(np.float32), codes)

    def _adds_blocks(self, scales: Residual, codes: NDArray[np.uint8]) -> Adder:
        @np.errstate(over="ignore")
        def add(start: int, stop: int, out: Residual) -> None:
            assert start % ALIGNMENT == 0 and len(out) == stop - start  # noqa: PT018
            n_added = 0
            if add_blocks := kernels.compiled(kernels.add_blocks):
                n_added = len(out) // ALIGNMENT * ALIGNMENT
                part = slice(start // ALIGNMENT, (start + n_added) // ALIGNMENT)
                add_blocks(out[:n_added], scales[part], codes[part].reshape(-1), self.last)
            for piece in exactness.pieces(len(out) - n_added):
                target = out[n_added:][piece]
                first = (start + n_added + piece.start) // ALIGNMENT
                part = slice(first, first - (-len(target) // ALIGNMENT))
                numbers = self._unpack(codes[part]).astype(np.float32)
                numbers *= scales[part, None]
                target += numbers.reshape(-1)[: len(target)]

        return add

    def _pack(self, quanta: NDArray[np.int8], codes: NDArray[np.uint8]) -> None:
        if self.n_bits == 8:
            codes[:] = quanta.view(np.uint8)
            return
        quanta += np.int8(8)
        pairs = quanta.view("<u2")
        pairs |= pairs >> np.uint16(4)
        codes[:] = pairs.view(np.uint8)[:, ::2]

    def _unpack(self, codes: NDArray[np.uint8]) -> NDArray[np.int8]:
        if self.n_bits == 8:
            return codes.view(np.int8)
        pairs = codes.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        quanta = pairs.view(np.int8)
        quanta -= np.int8(8)
        return quanta


@final
class Int8(_Blocks, frozen=True, kw_only=True, tag="int8"):
    """Numbers of 8 bits, with a scale for each 64."""

    last: ClassVar[int] = 127
    n_bits: ClassVar[int] = 8


@final
class Int4(_Blocks, frozen=True, kw_only=True, tag="int4"):
    """Numbers of 4 bits, as q + 8, with a scale for each 64; the first of two in the lower bits."""

    last: ClassVar[int] = 7
    n_bits: ClassVar[int] = 4
