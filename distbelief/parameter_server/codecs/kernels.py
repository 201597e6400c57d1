"""Kernels of 8 and 4 bits, compiled where numba is installed: the same bits as numpy's.

They are plain Python, too, so that they can be held against numpy without numba.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from distbelief.core.vectors import ALIGNMENT


Floats = NDArray[np.float32]
Limits = tuple[np.uint32, np.uint32]  # of a scale, as bits
Encode = Callable[[Floats, NDArray[np.uint16], NDArray[np.uint8], np.float32, int, Limits], bool]
Add = Callable[[Floats, Floats, NDArray[np.uint8], int], None]


@cache
def compiled() -> tuple[Encode, Add] | None:
    """Return both kernels, or None without numba. Their first calls compile them."""
    try:
        import numba  # noqa: PLC0415 -- an extra, and slow to import
    except ImportError:
        return None
    try:
        decorate = numba.njit(nogil=True, error_model="numpy", cache=True)
        return decorate(encode), decorate(add)
    except RuntimeError:  # there is no folder for a cache
        decorate = numba.njit(nogil=True, error_model="numpy")
        return decorate(encode), decorate(add)


def encode(
    rest: Floats,  # (64 n_blocks,)
    scales: NDArray[np.uint16],  # (n_blocks,)
    codes: NDArray[np.uint8],  # (n_blocks, 64 or 32)
    divisor: np.float32,  # of the largest size, which gives the scale
    last: int,
    limits: Limits,
) -> bool:
    """Encode whole blocks; return whether all numbers are finite."""
    bits = rest.view(np.uint32)
    number = np.empty(1, np.float32)
    word = number.view(np.uint32)
    end = np.float32(last)
    quanta = np.empty(ALIGNMENT, np.int32)
    for block in range(len(scales)):
        start = block * ALIGNMENT
        largest = np.uint32(0)
        for place in range(start, start + ALIGNMENT):
            largest = max(largest, bits[place] & np.uint32(0x7FFFFFFF))
        if largest >= np.uint32(0x7F800000):
            return False
        word[0] = largest
        number[0] /= divisor
        word[0] = min(word[0] & np.uint32(0xFFFF0000), limits[1])
        if word[0] < limits[0]:
            word[0] = 0
        scales[block] = word[0] >> np.uint32(16)
        scale = number[0]
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        for place in range(ALIGNMENT):
            quantum = min(max(np.rint(rest[start + place] * inverse), -end), end)
            rest[start + place] -= quantum * scale
            quanta[place] = np.int32(quantum)
        if last > 7:
            for place in range(ALIGNMENT):
                codes[block, place] = quanta[place] & 0xFF
        else:
            for place in range(ALIGNMENT // 2):
                high = (quanta[2 * place + 1] + 8) << 4
                codes[block, place] = (quanta[2 * place] + 8) | high
    return True


def add(out: Floats, scales: Floats, codes: NDArray[np.uint8], last: int) -> None:
    """Add whole blocks to a vector, (64 n_blocks,)."""
    for block in range(len(scales)):
        start, scale = block * ALIGNMENT, scales[block]
        if last > 7:
            for place in range(ALIGNMENT):
                code = np.int32(codes[block, place])
                out[start + place] += np.float32(code - ((code >> 7) << 8)) * scale
        else:
            for place in range(ALIGNMENT // 2):
                code, first = np.int32(codes[block, place]), start + 2 * place
                out[first] += np.float32((code & 15) - 8) * scale
                out[first + 1] += np.float32((code >> 4) - 8) * scale
