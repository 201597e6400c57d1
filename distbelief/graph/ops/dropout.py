"""Dropout whose mask depends only on the step's seed, the layer and the element's indices.

The mask is a hash of (seed, layer name, sample index, element index), so that any split and any
range of samples sees the same one.
"""

import hashlib
import math
from typing import ClassVar, Final, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distbelief.graph.graph import GraphError
from distbelief.graph.operator import Call, Operator, Step, Work
from distbelief.graph.region import Region, Shape


# torch has wrapping signed 32-bit integers on every device, and CPUs multiply eight at a
# time. Shifts and multipliers of Wellons' "lowbias32" (2018).
_LOWBIAS: Final = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_SPLITMIX: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


@final
class Dropout(Operator):
    """x / (1 - probability) where the hash keeps an element, 0 elsewhere; identity in inference."""

    # input     x
    # options   probability: of being dropped, 0 to 1
    #           n_shared: trailing dimensions that are dropped together (Dropout1d: 1,
    #           Dropout2d: 2, Dropout3d: 3); 0 for plain dropout
    #           place: where torch's tensor has the samples, 0 if absent
    name: ClassVar[str] = "dropout"
    per_element: ClassVar[Work | None] = Work(forward=20.0, backward=1.0, n_elements=2.0)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        probability = layer.number("probability")
        if not call.step.training or probability == 0.0:
            return call.inputs[0]
        n_own = len(layer.shape) - layer.integer("n_shared")
        kept = mask(
            layer.name,
            layer.shape[:n_own],
            Region(call.region.intervals[:n_own]),
            probability=probability,
            like=call.inputs[0],
            step=call.step,
        )
        return call.inputs[0] * kept.view(*kept.shape, *(1,) * layer.integer("n_shared"))


def mask(
    name: str, shape: Shape, part: Region, *, probability: float, like: torch.Tensor, step: Step
) -> torch.Tensor:
    """Return 0 for dropped elements, 1 / (1 - probability) for kept ones.

    Two rounds of a 32-bit hash: one of the element, computed once for all samples, one of that plus
    a random number per sample. The probability is exact to 2^-32.

    `part` is a region of `shape`, the independent elements; `like` has the number of samples,
    device and dtype of the result, (n_samples, *part.shape). GraphError if a sample has 2^32
    elements or more.
    """
    if math.prod(shape) >= 1 << 32:
        raise GraphError(
            f"dropout {name!r} has {math.prod(shape)} elements per sample, at most 2^32 "
            "are possible: use several layers"
        )
    n_samples = like.shape[0]
    if probability == 1.0:
        return like.new_zeros(n_samples, *part.shape)
    key = hashlib.blake2b(f"{step.seed}:{name}".encode(), digest_size=16).digest()
    element_key, sample_key = np.frombuffer(key, dtype="<u8")
    elements = _elements(shape, part, key=element_key).to(like.device)
    samples = _samples(step.first_sample, n_samples, key=sample_key).to(like.device)
    hashed = _hash(_hash(elements) + samples.view(-1, *(1,) * len(shape)))
    dropped = min(round(probability * 2.0**32), (1 << 32) - 1)
    kept = hashed >= dropped - (1 << 31)
    return kept.to(like.dtype) * (1.0 / (1.0 - probability))


def _elements(shape: Shape, part: Region, *, key: np.uint64) -> torch.Tensor:
    index = np.zeros((), dtype=np.uint64)
    for extent, (start, stop) in zip(shape, part, strict=True):
        places = np.arange(start, stop, dtype=np.uint64)
        index = index[..., np.newaxis] * np.uint64(extent) + places
    return _low_halves(index ^ key)


def _samples(first: int, count: int, *, key: np.uint64) -> torch.Tensor:
    z = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * _GOLDEN + key
    for shift, multiplier in _SPLITMIX:
        z = (z ^ (z >> shift)) * multiplier
    return _low_halves(z ^ (z >> np.uint64(31)))


def _low_halves(numbers: npt.NDArray[np.uint64]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(numbers.astype(np.uint32).view(np.int32)))


def _hash(numbers: torch.Tensor) -> torch.Tensor:
    hashed = numbers.clone()
    for shift, multiplier in _LOWBIAS:
        hashed ^= (hashed >> shift) & ((1 << (32 - shift)) - 1)  # a logical shift
        hashed *= multiplier
    hashed ^= (hashed >> 16) & 0xFFFF
    return hashed
