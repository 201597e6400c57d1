"""Kernels of codecs that numba compiles, where it is installed: the same bits as numpy's.

They are plain Python, too, so that they can be held against numpy without numba. Until `warm_up`
has compiled them numpy does their work. What numba does not check is asserted first: it would read
and write beyond the end of an array.
"""

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from distbelief.core.vectors import ALIGNMENT


Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]
Bits = NDArray[np.uint32]
Taken = ParamSpec("Taken")
Given = TypeVar("Given")

SIZE: Final = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign; they order sizes
INFINITY: Final = np.uint32(0x7F800000)  # NaN is beyond
UPPER: Final = np.uint32(0xFFFF0000)  # the bits of a bfloat16
SCALE_MIN: Final = np.uint32(0x00800000)  # the bits of 2^-126: smaller elements are kept
_BATCH: Final = 32  # blocks: their steps find them in the nearest cache

_COMPILED: Final[dict[object, object]] = {}


def compiled(kernel: Callable[Taken, Given]) -> Callable[Taken, Given] | None:
    """Return what has been compiled of a kernel of this module, or None: numpy does its work."""
    return cast("Callable[Taken, Given] | None", _COMPILED.get(kernel))


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache; do nothing where there is no numba.

    The first call takes seconds, and 150 MB of memory; other threads may encode and decode
    meanwhile.
    """
    try:
        import numba  # noqa: PLC0415 -- an extra, and slow to import
    except ImportError:
        return
    if numba.config.DISABLE_JIT:  # Python would take minutes
        return
    types = numba.types
    size, word, number = types.int64, types.uint32, types.float32

    def read(element: object) -> object:
        """Return the type of an array that is only read, at any address."""
        return types.Array(element, 1, "C", readonly=True, aligned=False)

    signatures = {
        accumulate: types.boolean(read(number), number[::1]),
        encode_halves: types.boolean(number[::1], types.uint16[::1]),
        add_halves: types.void(number[::1], read(types.uint16)),
        encode_blocks: types.boolean(
            number[::1], types.uint16[::1], types.uint8[::1], number, size, word
        ),
        add_blocks: types.void(number[::1], read(number), read(types.uint8), size),
        select: size(read(word), word, size, size, size[::1]),
        add_some: types.void(number[::1], read(word), read(number), size),
    }
    options = {"nogil": True, "error_model": "numpy"}
    for kernel, signature in signatures.items():
        if kernel in _COMPILED:
            continue
        try:
            _COMPILED[kernel] = numba.njit(signature, cache=True, **options)(kernel)
        except RuntimeError:  # there is no folder for a cache
            _COMPILED[kernel] = numba.njit(signature, **options)(kernel)


def accumulate(residual: Floats, push: Floats) -> bool:
    """Add the residual to the push; return whether all numbers are finite."""
    assert len(residual) == len(push)
    bits = push.view(np.uint32)
    largest = np.uint32(0)
    for place in range(len(push)):
        push[place] += residual[place]
        largest = max(largest, np.uint32(bits[place] & SIZE))
    return bool(largest < INFINITY)


# --- 16 bits ---


def encode_halves(rest: Floats, halves: Halves) -> bool:
    """Encode numbers as bfloat16; return whether all are finite."""
    assert len(rest) == len(halves)
    bits = rest.view(np.uint32)
    largest = np.uint32(0)
    for place in range(len(rest)):
        number = bits[place]
        largest = max(largest, np.uint32(number & SIZE))
        rounded = np.uint32(number + np.uint32(0x8000))
        if np.uint32(rounded & SIZE) >= INFINITY:  # down to the largest finite one
            rounded = np.uint32(np.uint32(number & np.uint32(0x80000000)) | np.uint32(0x7F7F0000))
        halves[place] = np.uint16(rounded >> np.uint32(16))
        sent = np.uint32(rounded & UPPER)
        rest[place] -= sent.view(np.float32)
    return bool(largest < INFINITY)


def add_halves(out: Floats, halves: Halves) -> None:
    assert len(out) == len(halves)
    for place in range(len(out)):
        bits = np.uint32(np.uint32(halves[place]) << np.uint32(16))
        out[place] += bits.view(np.float32)


# --- 8 and 4 bits ---


def encode_blocks(
    rest: Floats,  # (64 n_blocks,)
    scales: Halves,  # (n_blocks,)
    codes: Bytes,  # (64 n_blocks,), or half as many
    divisor: np.float32,  # of the largest size, which gives the scale
    last: int,
    scale_max: np.uint32,  # its bits
) -> bool:
    """Encode whole blocks; return whether all numbers are finite."""
    n_bytes = ALIGNMENT if last > 7 else ALIGNMENT // 2  # of a block
    assert len(rest) == len(scales) * ALIGNMENT
    assert len(codes) == len(scales) * n_bytes
    end, lowest = np.float32(last), np.int32(0 if last > 7 else 8)
    words = np.empty(_BATCH, np.uint32)
    numbers = words.view(np.float32)  # the largest sizes, then the scales
    inverses = np.empty(_BATCH, np.float32)
    quanta = np.empty(_BATCH * ALIGNMENT, np.uint8)
    pairs = quanta.view(np.uint16)
    largest = np.uint32(0)
    for first in range(0, len(scales), _BATCH):
        n = min(_BATCH, len(scales) - first)
        part = rest[first * ALIGNMENT : (first + n) * ALIGNMENT]
        bits = part.view(np.uint32)
        for block in range(n):
            size = np.uint32(0)
            for place in range(block * ALIGNMENT, (block + 1) * ALIGNMENT):
                size = max(size, np.uint32(bits[place] & SIZE))
            words[block] = size
            largest = max(largest, size)
        if largest >= INFINITY:
            return False
        for block in range(n):
            numbers[block] /= divisor
            scale_bits = min(np.uint32(words[block] & UPPER), scale_max)
            words[block] = scale_bits if scale_bits >= SCALE_MIN else np.uint32(0)
            scales[first + block] = np.uint16(words[block] >> np.uint32(16))
            inverses[block] = np.float32(1) / numbers[block] if words[block] else np.float32(0)
        for block in range(n):
            scale, inverse = numbers[block], inverses[block]
            for place in range(block * ALIGNMENT, (block + 1) * ALIGNMENT):
                quantum = min(max(np.rint(part[place] * inverse), -end), end)
                part[place] -= quantum * scale
                quanta[place] = np.uint8(np.int32(quantum) + lowest)
        target = codes[first * n_bytes : (first + n) * n_bytes]
        if last > 7:
            for place in range(len(target)):
                target[place] = quanta[place]
        else:
            for place in range(len(target)):
                pair = pairs[place]
                target[place] = np.uint8(np.uint16(pair | np.uint16(pair >> np.uint16(4))))
    return True


def add_blocks(out: Floats, scales: Floats, codes: Bytes, last: int) -> None:
    """Add whole blocks to a vector, (64 n_blocks,)."""
    n_bytes = ALIGNMENT if last > 7 else ALIGNMENT // 2
    assert len(out) == len(scales) * ALIGNMENT
    assert len(codes) == len(scales) * n_bytes
    for block in range(len(scales)):
        scale = scales[block]
        target = out[block * ALIGNMENT : (block + 1) * ALIGNMENT]
        part = codes[block * n_bytes : (block + 1) * n_bytes]
        if last > 7:
            for place in range(ALIGNMENT):
                code = np.int32(part[place])
                target[place] += np.float32(code - ((code >> 7) << 8)) * scale
        else:
            for place in range(ALIGNMENT // 2):
                code = np.int32(part[place])
                target[2 * place] += np.float32((code & 15) - 8) * scale
                target[2 * place + 1] += np.float32((code >> 4) - 8) * scale


# --- some elements ---


def select(
    bits: Bits,  # of elements, from a multiple of 64 on
    least: np.uint32,  # the bits of the smallest size that is sent
    first_place: int,  # of each 64, where elements of exactly that size are sent
    n_places: int,
    room: NDArray[np.intp],
) -> int:
    """Write to `room` the indices of the elements that are sent; return how many there are."""
    assert len(room) >= len(bits)
    n = 0
    for start in range(0, len(bits), ALIGNMENT):
        part = bits[start : start + ALIGNMENT]
        largest = least
        if len(part) == ALIGNMENT:
            largest = np.uint32(0)
            for place in range(ALIGNMENT):
                largest = max(largest, np.uint32(part[place] & SIZE))
        if largest < least:
            continue
        for place in range(len(part)):
            size = np.uint32(part[place] & SIZE)
            room[n] = start + place
            n += int(size > least)
            if size == least:
                n += int((place - first_place) % ALIGNMENT < n_places)
    return n


def add_some(out: Floats, indices: Bits, values: Floats, start: int) -> None:
    """Add numbers at rising indices, which count from `start` elements before the vector."""
    assert len(indices) == len(values)
    if len(indices):
        assert start <= indices[0] and indices[-1] < start + len(out)  # noqa: PT018
    first = np.uint32(start)
    for place in range(len(indices)):
        out[np.uint32(indices[place] - first)] += values[place]
