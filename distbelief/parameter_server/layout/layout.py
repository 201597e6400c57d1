"""Which shard holds which element, and where: one flat parameter space, cut S ways.

Tensors are sorted by name; the elements of each, row-major, are cut into S contiguous
ranges, and shard k holds the k-th range of *every* tensor in one vector. So all shards
are loaded alike however a client walks through the layers, and whatever is done
element by element needs no word between shards (Dean et al. 2012, section 4.1: each of
10 shards stores, and applies updates to, 1/10 of the parameters).

    "a" (parameter, 300 elements)   [0 ........ 128)[128 ............. 300)
    "b" (parameter,   5 elements)   [0 5)                  (small: goes whole)
    "m" (buffer,      2 elements)   [0 2)                  (small: goes whole)

    shard 0   a[0:128] | b[0:5] 0...0 | m[0:2] 0...0      offsets   0, 128, 192
    shard 1   a[128:300] 0........0                        offsets   0
              ^ parameters, n_gradient ^^ buffers  ^

Rules that every layout keeps:

* Each element of each tensor lies on exactly one shard, and nothing else decides where
  than names, shapes, kinds and S: not the order in which tensors are given.
* Cuts and offsets are multiples of `ALIGNMENT`, so that vectorised kernels (which
  treat the last few elements of an array otherwise) round alike for any S.
* Between segments lie zeros. `gather` writes them, update rules keep them.
* All parameters of a shard come before all its buffers: what a rule updates is one
  slice, `vector[:n_gradient]`.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Literal, final

import msgspec
import numpy as np
import torch

from distbelief.parameter_server.layout.exchange import Exchange
from distbelief.parameter_server.layout.segments import Segment, cut, place
from distbelief.parameter_server.layout.tensors import TensorSpec
from distbelief.vectors import ALIGNMENT, Vector


__all__ = ["ElementType", "Layout", "LayoutSpec", "Segment", "TensorSpec"]

ElementType = Literal["float32", "float64"]

_CUTTING = 1
"""Number of the rules by which this module cuts. Another one makes other fingerprints,
so that nobody reads a vector under rules it was not cut by."""


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that determines a layout; as JSON it tells another process how to cut."""

    tensors: tuple[TensorSpec, ...]
    n_shards: int
    dtype: ElementType = "float32"

    def __post_init__(self) -> None:
        if self.n_shards < 1:
            raise ValueError(f"n_shards is {self.n_shards}; use at least 1")
        if self.dtype not in {"float32", "float64"}:
            raise ValueError(f"dtype is {self.dtype!r}; use 'float32' or 'float64'")
        counts = Counter(tensor.name for tensor in self.tensors)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(
                f"tensors {twice} are given more than once; give each its own name "
                "(of a tied tensor, give one name only)"
            )


@final
class Layout:
    """Where every element of every tensor lies.

    Attributes:
        spec: What it was made from, tensors sorted by name.
        fingerprint: 16 hexadecimal digits; equal for equal layouts only.
    """

    def __init__(self, spec: LayoutSpec) -> None:
        tensors = tuple(sorted(spec.tensors, key=lambda tensor: tensor.name))
        self.spec = msgspec.structs.replace(spec, tensors=tensors)
        pieces = cut(tensors, n_shards=spec.n_shards)
        placed = [place(tensors, pieces[k]) for k in range(spec.n_shards)]
        self._segments = [segments for segments, _, _ in placed]
        self._n_gradient = [n_gradient for _, n_gradient, _ in placed]
        self._shard_size = [shard_size for _, _, shard_size in placed]
        text = msgspec.json.encode([_CUTTING, ALIGNMENT, self.spec])
        self.fingerprint = hashlib.sha256(text).hexdigest()[:16]

    @classmethod
    def of(
        cls, tensors: Sequence[TensorSpec], *, n_shards: int, dtype: ElementType = "float32"
    ) -> "Layout":
        """Return the layout of these tensors, in whatever order they are given.

        Raises:
            ValueError: a name is given twice, or `n_shards` or `dtype` cannot be.
        """
        return cls(LayoutSpec(tensors=tuple(tensors), n_shards=n_shards, dtype=dtype))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors, sorted by name."""
        return self.spec.tensors

    @property
    def n_shards(self) -> int:
        """S."""
        return self.spec.n_shards

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.float64]:
        """Element type of every shard's vector."""
        if self.spec.dtype == "float64":
            return np.dtype(np.float64)
        return np.dtype(np.float32)

    @property
    def n_parameters(self) -> int:
        """Elements of all parameters, over all shards, without padding."""
        return sum(t.n_elements for t in self.tensors if t.kind == "parameter")

    def shard_size(self, k: int) -> int:
        """Elements of shard k's vector, padding included: a multiple of 64."""
        return self._shard_size[k]

    def n_gradient(self, k: int) -> int:
        """Elements of the parameter part of shard k's vector: a multiple of 64."""
        return self._n_gradient[k]

    def segments(self, k: int) -> tuple[Segment, ...]:
        """What lies on shard k, by rising offset."""
        return self._segments[k]

    def exchange(self, k: int, vector: Vector) -> Exchange:
        """Return shard k's vector, cut for copies.

        Raises:
            ValueError: `vector` has another size or dtype.
        """
        size = self.shard_size(k)
        if vector.shape != (size,) or vector.dtype != self.dtype:
            raise ValueError(
                f"the vector of shard {k} has shape {vector.shape} and dtype "
                f"{vector.dtype}; layout {self.fingerprint} needs ({size},) and "
                f"{self.dtype}"
            )
        return Exchange(self.tensors, self.segments(k), vector)

    def gather(self, k: int, tensors: Sequence[torch.Tensor | None], out: Vector) -> None:
        """Copy shard k's part of `tensors` into `out`; see `Exchange.gather`."""
        self.exchange(k, out).gather(tensors)

    def scatter(self, k: int, vector: Vector, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `vector` to where its elements belong; see `Exchange.scatter`."""
        self.exchange(k, vector).scatter(tensors)
