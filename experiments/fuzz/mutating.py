"""Mutations of bytes: what grows from a few legal ones, and from what is accepted.

They need nothing, and are as fast as most decoders. A fuzzer that is led by coverage sees
nothing of a decoder written in C, and ends with bytes that are refused at once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, final

import numpy as np


N_KEPT_MAX: Final = 4096
N_BYTES_MAX: Final = 4096
GROWTH: Final = 4
"""Times as long as the longest seed, that may be gone on from: without a bound all end
as long as can be, and a decoder reads the same words over and over in most of it."""

_AT_ONCE: Final = 1 << 16

TOKENS: Final = (
    *(b"\x00", b"\xff", b"\x80", b"\x7f", b"\xff" * 8, b"\x00" * 8, b"-1", b"1e999"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\x91" * 300, b"[" * 300, b'{"a":' * 300, b"\xd7\xff" + b"\xff" * 8, b"\xc0"),
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xcb\x7f\xf8" + b"\x00" * 6),
    *(b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"null", b"true", b"NaN", b"{}", b"[]"),
    *(b'"', b"\\u0000", b"\\ud800", b"../", b"/etc/passwd", b"\n", b"%s", b"9" * 5000),
)


def numbers(seed: int) -> Callable[[int], int]:
    """Return what draws a number from 0 to its argument - 1."""
    generator = np.random.default_rng(seed)

    def chunks() -> Iterator[list[int]]:
        while True:
            yield generator.integers(0, 1 << 40, _AT_ONCE).tolist()

    stream = chain.from_iterable(chunks())
    return lambda n: next(stream) % n


@final
class Mutator:
    """Draws bytes.

    Args:
        seeds: Legal ones.
        draw: Returns a number from 0 to its argument - 1.
    """

    def __init__(self, seeds: Sequence[bytes], *, draw: Callable[[int], int]) -> None:
        self._kept = list(seeds)
        self._n_seeds = len(self._kept)
        self._n_bytes_kept = GROWTH * max(map(len, self._kept))
        self._draw = draw
        self._changes = (
            self._flip,
            self._put,
            self._remove,
            self._repeat,
            self._cross,
            self._insert,
        )

    def next(self) -> bytes:
        data = self._kept[self._draw(len(self._kept))]
        draw = self._draw
        for _ in range(1 + draw(4)):
            data = self._changes[draw(6)](data)
        return data[:N_BYTES_MAX]

    def accepted(self, data: bytes) -> None:
        """These were legal: go on from them as well, now and then."""
        if self._draw(64) or len(data) > self._n_bytes_kept:
            return
        if len(self._kept) < N_KEPT_MAX:
            self._kept.append(data)
        else:
            n_grown = len(self._kept) - self._n_seeds
            self._kept[self._n_seeds + self._draw(n_grown)] = data

    def _flip(self, data: bytes) -> bytes:
        at = self._draw(len(data) + 1)
        flipped = bytes([data[at] ^ (1 << self._draw(8))]) if at < len(data) else b""
        return data[:at] + flipped + data[at + 1 :]

    def _put(self, data: bytes) -> bytes:
        at = self._draw(len(data) + 1)
        return data[:at] + bytes([self._draw(256)]) + data[at + 1 :]

    def _insert(self, data: bytes) -> bytes:
        at = self._draw(len(data) + 1)
        return data[:at] + TOKENS[self._draw(len(TOKENS))] + data[at:]

    def _remove(self, data: bytes) -> bytes:
        at = self._draw(len(data) + 1)
        return data[:at] + data[at + 1 + self._draw(16) :]

    def _repeat(self, data: bytes) -> bytes:
        at = self._draw(len(data) + 1)
        part = data[at : at + 1 + self._draw(32)]
        return data[:at] + part * (1 + self._draw(8)) + data[at:]

    def _cross(self, data: bytes) -> bytes:
        other = self._kept[self._draw(len(self._kept))]
        return data[: self._draw(len(data) + 1)] + other[self._draw(len(other) + 1) :]
