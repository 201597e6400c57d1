"""Numbers as sent: as they are, or rounded to bfloat16, the words of 16 bits.

    payload      parameters           buffers
    dense        4 bytes (double: 8)  the same
    bfloat16     2 bytes, rounded     4 bytes, from an even word on

Buffers stay exact: among them are counters, indices and frozen parameters. Bfloat16 is the upper
half of a float32, so it has the same exponents and each conversion back is exact.
"""

from typing import Final, final

import numpy as np
import torch

from distbelief.core.vectors import Vector


WORD: Final = np.dtype(np.uint16)
"""The element type of a vector in bfloat16."""

_ROUNDED_PIECE: Final = 1 << 15  # elements; torch starts its threads for more
_INFINITY: Final = 0x7F80  # as a word; NaN is beyond
_LARGEST: Final = torch.finfo(torch.bfloat16).max


def as_tensor(vector: Vector) -> torch.Tensor:
    """Return the same memory as a tensor: words as bfloat16, and read-only arrays unmarked."""
    if vector.dtype == WORD:
        return as_tensor(vector.view(np.int16)).view(torch.bfloat16)
    if vector.flags.writeable:
        return torch.from_numpy(vector)
    return torch.from_numpy(np.asarray(_Writeable(vector)))


@final
# Torch has no read-only tensors and warns about read-only arrays.
class _Writeable:
    def __init__(self, vector: Vector) -> None:
        address, _ = vector.__array_interface__["data"]
        self._vector = vector  # keeps the memory alive
        self.__array_interface__ = vector.__array_interface__ | {"data": (address, False)}


def encode(values: torch.Tensor, words: Vector) -> bool:
    """Round numbers, (n,), to the nearest bfloat16, ties to even; return whether all are finite.

    A finite number that would round to infinity becomes the largest bfloat16, which is within one
    step of it: what is finite here must be finite at the peer, where it would spoil a whole model.
    """
    target, is_finite = as_tensor(words), True
    for start in range(0, len(words), _ROUNDED_PIECE):
        piece = slice(start, start + _ROUNDED_PIECE)
        numbers = values[piece].to("cpu", torch.float32)
        target[piece].copy_(numbers)
        if np.max(words[piece].view(np.uint16) & 0x7FFF) >= _INFINITY:
            here = numbers.isfinite()
            is_finite = is_finite and bool(here.all())
            target[piece].copy_(torch.where(here, numbers.clamp(-_LARGEST, _LARGEST), numbers))
    return is_finite


def decode(words: Vector, target: torch.Tensor) -> None:
    source = as_tensor(words)
    for start in range(0, len(words), _ROUNDED_PIECE):
        piece = slice(start, start + _ROUNDED_PIECE)
        target[piece].copy_(source[piece])


def word_count(n_elements: int, n_parameters: int) -> int:
    """Return how many words these parameters and buffers take, the parameters first."""
    return n_parameters + n_parameters % 2 + 2 * (n_elements - n_parameters)
