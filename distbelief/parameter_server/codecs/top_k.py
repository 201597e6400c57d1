"""The largest elements: of share s, found by a cut that a sample gives, exact or as 2 bits.

    bits = 32    indices, then values: 2 words an element; or all n values, if that is less
    bits = 2     | low level, high level | n_whole | counts | entries | whole elements |
                   bfloat16, bfloat16                uint16   uint16    indices, values

Exact values leave nothing behind. With 2 bits (SparseLoCo, Sarfi et al. 2025) an entry has 14 bits
of an index within 16,384 elements, and 2 bits: the sign, and which of two levels. `counts` are the
entries of each 16,384 elements. A level is at most twice the smallest size that it stands for, so
it is near, or short. Elements of 2^16 times the high level or more are sent whole, the first one of
each 64; the others are kept.

Where many elements have one size (after a step by signs alone) the cut goes through them: those at
some places of each 64 are sent, at other places with each push.
"""

from collections.abc import Sequence
from typing import Final, Literal, final

import numpy as np
from typing_extensions import override

from distbelief.core.arguments import require
from distbelief.core.vectors import ALIGNMENT
from distbelief.parameter_server.codecs import exactness
from distbelief.parameter_server.codecs.exactness import (
    Adder,
    Cut,
    Encoded,
    Form,
    History,
    Residual,
    Words,
)


_ROW: Final = 1 << 14  # elements whose indices have 14 bits
_SLACK: Final = 1.25  # of the share: so many elements of one size need no thinning
_FAR: Final = 8.0  # times below the mean: left to later pushes, where few elements are not 0
_LEAST: Final = (127 - 120) << 23  # the bits of 2^-120: smaller elements have no level


@final
class TopK(exactness.CodecTable, frozen=True, kw_only=True, tag="top-k"):
    """About this share of the elements, those of the largest sizes; the others are kept."""

    share: float = 0.01
    bits: Literal[2, 32] = 32  # of each value
    decay: float = 1.0  # of what is held back, from one push to the next

    def __post_init__(self) -> None:
        require(self, "codec 'top-k'", "decay", lambda x: 0.0 < x <= 1.0, "above 0, and at most 1")
        require(self, "codec 'top-k'", "share", lambda x: 0.0 < x < 1.0, "a share between 0 and 1")

    @property
    @override
    def form(self) -> Form:
        return "top-k" if self.bits == 32 else "top-k-2"

    @override
    def choose(self, parts: Sequence[Residual], history: History) -> Cut:
        sizes = exactness.sampled_sizes(parts, history)
        wanted = max(round(self.share * len(sizes)), 1)
        least = 1 if self.bits == 32 else _LEAST  # zeros are never sent
        size = least
        if len(sizes):
            size = max(int(np.partition(sizes, len(sizes) - wanted)[len(sizes) - wanted]), least)
            if self.bits == 2 and size == _LEAST:
                size = _least_of_few(sizes)
        n_above = int(np.count_nonzero(sizes > size))
        n_equal = int(np.count_nonzero(sizes == size))
        n_places = ALIGNMENT
        if n_above + n_equal > max(_SLACK * wanted, 1):
            n_places = max(ALIGNMENT * (wanted - n_above) // n_equal, 1)
        return Cut(
            size=exactness.number_of(size),
            first_place=history.n_pushes * n_places % ALIGNMENT,
            n_places=n_places,
            levels=_levels(sizes[sizes >= size], size) if self.bits == 2 else (0.0, 0.0),
        )

    @override
    def n_words_max(self, n_elements: int) -> int:
        if self.bits == 32:
            return n_elements
        n_counts = -(-n_elements // _ROW)
        n_entry_words = -(-n_elements // 2)
        return 2 + -(-n_counts // 2) + n_entry_words + exactness.n_whole_words_max(n_elements)

    @property
    @override
    def words_per_element(self) -> float:
        return min(2.0 * self.share, 1.0) if self.bits == 32 else self.share / 2.0

    @override
    def encode(self, residual: Residual, cut: Cut, out: Words) -> Encoded:
        exactness.check_residual(residual)
        encode = _encode_values if self.bits == 32 else _encode_levels
        return encode(residual, cut, out)

    @override
    def decoder(self, words: Words, n_elements: int) -> Adder:
        if self.bits == 2:
            return _decode_levels(words, n_elements)
        exactness.require_valid(len(words) <= n_elements, f"{len(words)} for {n_elements} elements")
        if len(words) == n_elements:
            exactness.require_finite(words)
            return exactness.adds_all(words.view(np.float32))
        return exactness.pairs(words, n_elements)


def _encode_values(residual: Residual, cut: Cut, out: Words) -> Encoded:
    n_elements = len(residual)
    n_max = max(n_elements - 1, 0) // 2  # of a list, which is shorter than all values
    values = out[n_elements - n_max : n_elements]  # of the list, until all indices are known
    n, is_list = 0, True
    for piece, indices, numbers in exactness.selected(residual, cut, np.float32(np.inf), []):
        residual[piece][indices] = 0
        places, n_before = indices + piece.start, n
        n += len(indices)
        if is_list and n > n_max:
            is_list = False
            listed = out[:n_before].copy(), values[:n_before].copy()
            out[:n_elements] = 0
            out[listed[0]] = listed[1]
        if is_list:
            out[n_before:n], values[n_before:n] = places, numbers.view(np.uint32)
        else:
            out[places] = numbers.view(np.uint32)
    if not is_list:
        return Encoded(n_words=n_elements, n_sent=n)
    out[n : 2 * n] = values[:n]
    return Encoded(n_words=2 * n, n_sent=n)


# --- 2 bits ---


def _least_of_few(sizes: Words) -> int:
    """Return the cut where less than the share has any size.

    At the least one that there is, two levels would be far from most: so not far below the mean.
    """
    some = sizes[sizes >= _LEAST]
    if not len(some):
        return _LEAST
    numbers = some.view(np.float32)
    return int(some[numbers >= numbers.mean(dtype=np.float64) / _FAR].min())


def _levels(sizes: Words, size: int) -> tuple[float, float]:
    """Return the means of the sampled sizes below and above their mean, as short numbers.

    The lower one is near for sizes from the cut on, the higher one from the middle of both.
    """
    cut = exactness.number_of(size)
    numbers = np.sort(sizes).view(np.float32).astype(np.float64)
    if not len(numbers):
        return (exactness.shorten(cut),) * 2
    mean = numbers.mean()
    lower, upper = numbers[numbers <= mean], numbers[numbers > mean]
    # Cut down, not rounded, to 8 bits: at most twice the cut.
    low = min(
        exactness.shorten(float(lower.mean())),
        exactness.from_short(exactness.to_short(min(2 * cut, exactness.LARGEST))),
    )
    high = exactness.shorten(float(upper.mean())) if len(upper) else low
    return low, min(max(high, low), exactness.shorten(low * exactness.SHORT_RANGE / 2))


def _sizes(n_elements: int, n_entries: int) -> tuple[int, int, int]:
    """Return how many rows there are, and where in the words entries and whole elements begin."""
    n_rows = -(-n_elements // _ROW)
    first_entry = 2 + -(-n_rows // 2)
    return n_rows, first_entry, first_entry + -(-n_entries // 2)


def _encode_levels(residual: Residual, cut: Cut, out: Words) -> Encoded:
    n_elements = len(residual)
    _, first_entry, _ = _sizes(n_elements, 0)
    low, high = cut.levels
    middle = np.float32((low + high) / 2)
    table = np.array([low, -low, high, -high], np.float32)
    out[0] = exactness.to_short(low) << 16 | exactness.to_short(high)
    out[2:first_entry] = 0
    counts = out[2:first_entry].view(np.uint16)
    entries = out[first_entry:].view(np.uint16)
    n_entries = 0
    whole: list[exactness.Indices] = []
    for piece, indices, numbers in exactness.selected(
        residual, cut, exactness.short_end(high), whole
    ):
        codes = (np.abs(numbers) >= middle).astype(np.uint16) << 1 | np.signbit(numbers)
        residual[piece][indices] = numbers - table[codes]
        first_row, n = piece.start // _ROW, len(indices)
        here = np.bincount(indices // _ROW)
        counts[first_row : first_row + len(here)] = here
        entries[n_entries : n_entries + n] = (indices % _ROW).astype(np.uint16) << 2 | codes
        n_entries += n
    entries[n_entries : n_entries + n_entries % 2] = 0
    *_, first_whole = _sizes(n_elements, n_entries)
    n_whole = exactness.put_whole(residual, whole, out[first_whole:])
    out[1] = n_whole
    return Encoded(n_words=first_whole + 2 * n_whole, n_sent=n_entries + n_whole)


def _decode_levels(words: Words, n_elements: int) -> Adder:
    n_rows, first_entry, _ = _sizes(n_elements, 0)
    exactness.require_valid(len(words) >= first_entry, f"{len(words)} for {n_elements} elements")
    low, high = words[0] & exactness.UPPER, words[0] << 16
    for level in (low, high):
        is_valid = exactness.short_of(int(level) >> 16) is not None
        exactness.require_valid(is_valid, "a level is not a number above 0")
    counts = words[2:first_entry].view(np.uint16)[:n_rows].astype(np.int64)
    n_entries = int(counts.sum())
    *_, first_whole = _sizes(n_elements, n_entries)
    is_valid = len(words) == first_whole + 2 * int(words[1])
    exactness.require_valid(is_valid, f"{len(words)}, which are not as many as its counts say")
    entries = words[first_entry:first_whole].view(np.uint16)[:n_entries]
    indices = np.repeat(np.arange(n_rows, dtype=np.uint32) * np.uint32(_ROW), counts)
    indices += entries >> np.uint16(2)
    exactness.require_indices(indices, n_elements)
    codes = entries.astype(np.uint32)  # computed, not looked up: half the time
    sent = (codes >> 1 & 1) * (low ^ high) ^ low | codes << 31
    some = exactness.adds_some(indices, sent.view(np.float32))
    return exactness.adds_both(some, exactness.pairs(words[first_whole:], n_elements))
