"""Initial values, drawn by each shard for its own elements.

Element e of a tensor is a function of (seed, tensor name, e) only: the counter-based generator
Philox4x64-10 (Salmon et al. 2011), keyed by seed and name, yields its e-th number. So no process
builds the whole model, and values are bit-identical for any number of shards. Values are computed
in float64 and rounded once.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Literal, final

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout


Distribution = Literal["uniform", "normal", "constant"]

_FIELDS: dict[str, tuple[str, ...]] = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "constant": ("value",),
}
_DRAWS_PER_COUNT = 4  # Philox4x64 yields four numbers per value of its counter
_PIECE = 1 << 18  # elements per draw, which bounds the temporary float64 arrays


@final
class Initial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distribution of a tensor's elements."""

    # "uniform" from `low` to `high`, "normal" with `mean` and standard deviation `std`, or
    # "constant": all are `value`. Fields of other distributions stay 0.
    distribution: Distribution
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    std: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        own = _FIELDS.get(self.distribution)
        if own is None:
            raise ValueError(f"distribution is {self.distribution!r}; use one of {sorted(_FIELDS)}")
        for field in ("low", "high", "mean", "std", "value"):
            number = float(getattr(self, field))
            if not math.isfinite(number) or (number != 0.0 and field not in own):
                raise ValueError(
                    f"distribution {self.distribution!r}: {field} is {number}; give {own} only"
                )
        if self.low > self.high:
            raise ValueError(
                f"distribution 'uniform': low {self.low} is above high {self.high}; exchange them"
            )
        if self.std < 0.0:
            raise ValueError(f"distribution 'normal': std is {self.std}; use a number, 0 or more")


def draw(
    initial: Initial, *, seed: int, tensor: str, start: int, stop: int, dtype: npt.DTypeLike
) -> Vector:
    """Return elements [start, stop) of the tensor of this name, flat and row-major.

    With float32, "uniform" may round up to `high`.
    """
    values = np.empty(stop - start, dtype)
    if initial.distribution == "constant":
        values.fill(initial.value)
        return values
    digest = hashlib.sha256(f"{seed}:{tensor}".encode()).digest()
    key = np.frombuffer(digest, "<u8", count=2)
    for piece in range(start, stop, _PIECE):
        piece_stop = min(piece + _PIECE, stop)
        count, skipped = divmod(piece, _DRAWS_PER_COUNT)
        generator = np.random.Generator(np.random.Philox(key=key, counter=count))
        uniforms = generator.random(skipped + piece_stop - piece)[skipped:]  # in [0, 1)
        if initial.distribution == "uniform":
            drawn = initial.low + (initial.high - initial.low) * uniforms
        else:
            drawn = initial.mean + initial.std * _standard_normals(uniforms)
        values[piece - start : piece_stop - start] = drawn
    return values


def shard_values(layout: Layout, k: int, initials: Mapping[str, Initial], *, seed: int) -> Vector:
    """Return shard k's vector before the first push, (shard_size(k),), padding zero.

    ValueError if a tensor of the layout is missing in `initials`.
    """
    missing = [spec.name for spec in layout.tensors if spec.name not in initials]
    if missing:
        raise ValueError(
            f"no initial distribution for tensors {missing}; known: {sorted(initials)}"
        )

    def read(name: str, start: int, stop: int) -> Vector:
        initial, dtype = initials[name], layout.dtype
        return draw(initial, seed=seed, tensor=name, start=start, stop=stop, dtype=dtype)

    return shard_values_from(layout, k, read)


def shard_values_from(layout: Layout, k: int, read: Callable[[str, int, int], Vector]) -> Vector:
    """Return shard k's vector with values read from elsewhere, such as a file of weights.

    `read(name, start, stop)` returns these elements of that tensor, flat and row-major, of any real
    dtype; ValueError if their number is another.
    """
    values = np.zeros(layout.shard_size(k), layout.dtype)
    for segment in layout.segments(k):
        name = layout.tensors[segment.tensor_index].name
        found = read(name, segment.start, segment.stop)
        if found.shape != (segment.n_elements,):
            raise ValueError(
                f"tensor {name!r}: read {found.shape}, not ({segment.n_elements},): of this model?"
            )
        values[segment.offset : segment.offset + segment.n_elements] = found
    return values


def _standard_normals(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    # The inverse distribution function takes one uniform per normal; other methods need a varying
    # number, and so all elements before e. A uniform of 0 would give -inf: use 2**-54 for it.
    from scipy.special import ndtri  # noqa: PLC0415 -- half a second; most jobs draw no normals

    normals: NDArray[np.float64] = ndtri(np.maximum(uniforms, 2.0**-54))
    return normals
