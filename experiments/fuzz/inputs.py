"""Bytes to try: legal values of any type that msgspec reads, and mutations of their bytes.

Mutations grow from a few legal ones, and from what is accepted. They need nothing, and are as fast
as most decoders. A fuzzer that is led by coverage sees nothing of a decoder written in C, and ends
with bytes that are refused at once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, TypeVar

import numpy as np
from msgspec import inspect

from distbelief.core.vectors import ELEMENT_TYPES
from distbelief.protocol import Blob


N_KEPT_MAX: Final = 4096
N_BYTES_MAX: Final = 4096
# Times as long as the longest seed, that may be gone on from: without a bound all end as long as
# can be, and a decoder reads the same words over and over in most of it
GROWTH: Final = 4
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
    generator = np.random.default_rng(seed)

    def chunks() -> Iterator[list[int]]:
        while True:
            yield generator.integers(0, 1 << 40, _AT_ONCE).tolist()

    stream = chain.from_iterable(chunks())
    return lambda n: next(stream) % n


class Mutator:
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
        """Go on from these legal bytes as well, now and then."""
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


Choice = TypeVar("Choice")
N_ITEMS: Final = 3
_WORDS: Final = (
    *("", "replica-1", "replica-1.2", "shard-0", "host-5f", "supervisor", "brief"),
    *("trial", "s0", "tcp://127.0.0.1:41000", "0", "-1", "é\u2028", "a" * 128),
)
_NUMBERS: Final = (0, 1, 2, 3, 7, 64, 255, 65536, (1 << 31) - 1, (1 << 63) - 1)
_REALS: Final = (0.0, -0.0, 1.5, -1e300, float("inf"), float("nan"))


class Sampler:
    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self._plainest: dict[type, Callable[[], object]] = {
            inspect.NoneType: lambda: None,
            inspect.BoolType: lambda: bool(draw(2)),
            inspect.FloatType: lambda: self._one_of(_REALS),
            inspect.BytesType: lambda: bytes(draw(200)),
            Blob: lambda: Blob(bytes(draw(200))),
            inspect.AnyType: lambda: self._one_of(_WORDS),
            inspect.CustomType: self._array,
        }

    def of(self, kind: object) -> object:
        return self.value(inspect.type_info(kind))

    def value(self, kind: inspect.Type) -> object:
        match kind:
            case inspect.StructType() | inspect.DataclassType():
                return kind.cls(**{f.name: self.value(f.type) for f in kind.fields})
            case inspect.Metadata():
                return self.value(kind.type)
            case inspect.UnionType():
                return self.value(self._one_of(kind.types))
            case inspect.VarTupleType() | inspect.ListType():
                items = [self.value(kind.item_type) for _ in range(self._n(kind))]
                return tuple(items) if isinstance(kind, inspect.VarTupleType) else items
            case inspect.DictType():
                keys = [self.value(kind.key_type) for _ in range(self._draw(N_ITEMS))]
                return {key: self.value(kind.value_type) for key in keys}
            case _:
                return self._plain(kind)

    def _plain(self, kind: inspect.Type) -> object:
        match kind:
            case inspect.IntType():
                low = kind.ge if kind.ge is not None else 0
                high = kind.le if kind.le is not None else 1 << 30
                return min(max(self._one_of(_NUMBERS), low), high)
            case inspect.FloatType() if kind.ge is not None:
                most = np.inf if kind.le is None else float(kind.le)
                within = [real for real in _REALS if kind.ge <= real <= most]
                return self._one_of([float(kind.ge), most, *within])
            case inspect.StrType():
                named = kind.pattern is not None  # of a vector
                return "s0" if named else self._one_of(_WORDS)[: kind.max_length]
            case inspect.TupleType():
                return tuple(self.value(item) for item in kind.item_types)
            case inspect.LiteralType():
                return self._one_of(kind.values)
            case _:
                blob = isinstance(kind, inspect.CustomType) and kind.cls is Blob
                return self._plainest[Blob if blob else type(kind)]()

    def _array(self) -> object:
        dtype = self._one_of(list(ELEMENT_TYPES.values()))
        return np.zeros(self._draw(16), dtype)

    def _n(self, kind: inspect.VarTupleType | inspect.ListType) -> int:
        least = kind.min_length or 0
        return max(least, min(self._draw(N_ITEMS), kind.max_length or N_ITEMS))

    def _one_of(self, choices: Sequence[Choice]) -> Choice:
        return choices[self._draw(len(choices))]
