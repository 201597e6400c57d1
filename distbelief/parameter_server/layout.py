"""The layout of the tensors on the shards: which shard holds which element, and where.

    "a" (parameter, 300 elements)   [0 ........ 128)[128 ............. 300)
    "b" (parameter,   5 elements)   [0 5)                  (small: goes whole)
    "m" (buffer,      2 elements)   [0 2)                  (small: goes whole)

    shard 0   a[0:128] | b[0:5] 0...0 | m[0:2] 0...0      offsets   0, 128, 192
    shard 1   a[128:300] 0........0                        offsets   0
              ^ parameters, n_gradient ^^ buffers  ^

Names, shapes, kinds and the number of shards alone decide it. Parameters precede buffers.
"""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import msgspec
import numpy as np
import torch

from distbelief.core.vectors import ALIGNMENT, Vector


__all__ = ["ElementType", "Layout", "LayoutSpec", "Segment", "TensorSpec"]


# --- tensors ---

Kind = Literal["parameter", "buffer"]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a model: name, shape and kind.

    Gradients update a "parameter"; a "buffer" (BatchNorm statistics, a frozen parameter) is
    averaged over the clients.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "parameter"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor has no name; give each tensor its own")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has shape {self.shape}; sizes are 0 or more")
        if self.kind not in {"parameter", "buffer"}:
            raise ValueError(
                f"tensor {self.name!r} has kind {self.kind!r}; use 'parameter' or 'buffer'"
            )

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def check_tensors(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None]) -> None:
    """Raise ValueError unless these are the flat tensors of `specs`."""
    if len(tensors) != len(specs):
        raise ValueError(
            f"{len(tensors)} tensors given, the layout has {len(specs)}: "
            "give all of them, in its order (whole tensors are sorted by name)"
        )
    for spec, tensor in zip(specs, tensors, strict=True):
        check_tensor(spec, tensor)


def check_tensor(spec: TensorSpec, tensor: torch.Tensor | None) -> None:
    """Raise ValueError unless this is the flat tensor of `spec`; None is always valid."""
    if tensor is None:
        return
    if tensor.shape != (spec.n_elements,):
        raise ValueError(
            f"tensor {spec.name!r} has shape {tuple(tensor.shape)}; flatten it to "
            f"({spec.n_elements},), and give tensors in the layout's order (by name)"
        )
    if tensor.is_complex():
        raise ValueError(
            f"tensor {spec.name!r} is {tensor.dtype}, and shards hold real "
            "numbers; make it a real one with torch.view_as_real"
        )


def as_tensor(vector: Vector) -> torch.Tensor:
    """Return the same memory as a tensor, without torch's warning about read-only arrays."""
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


# --- cuts ---


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of one tensor, at vector[offset : offset + n_elements]."""

    tensor_index: int
    start: int
    stop: int
    offset: int

    @property
    def n_elements(self) -> int:
        return self.stop - self.start


def cut(tensors: Sequence[TensorSpec], *, n_shards: int) -> list[list[tuple[int, int, int]]]:
    """Return what each shard holds: (tensor index, start, stop).

    Each shard gets a range of *every* large tensor, so all shards have equal load whichever layer a
    client reads (Dean et al. 2012, section 4.1: each of 10 shards stores 1/10 of the parameters).
    """
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(n_shards)]
    loads = [0] * n_shards
    small: list[int] = []
    for index, tensor in enumerate(tensors):
        if tensor.n_elements < ALIGNMENT * n_shards:
            small.append(index)
            continue
        for k in range(n_shards):
            start = _cut_at(tensor.n_elements, k, n_shards=n_shards)
            stop = _cut_at(tensor.n_elements, k + 1, n_shards=n_shards)
            pieces[k].append((index, start, stop))
            loads[k] += padded(stop - start)
    # Largest first, each to the lightest shard: Graham 1969, within 4/3 of the best.
    small.sort(key=lambda index: (-tensors[index].n_elements, index))
    for index in small:
        n_elements = tensors[index].n_elements
        if n_elements:
            k = loads.index(min(loads))
            pieces[k].append((index, 0, n_elements))
            loads[k] += padded(n_elements)
    return pieces


def _cut_at(n_elements: int, k: int, *, n_shards: int) -> int:
    if k == n_shards:
        return n_elements
    unit = ALIGNMENT * n_shards
    # The multiple of 64 nearest to k/S of the elements. With aligned cuts, vectorised kernels
    # (which treat the last elements of an array differently) round alike for any number of
    # shards.
    return (2 * k * n_elements + unit) // (2 * unit) * ALIGNMENT


def place(
    tensors: Sequence[TensorSpec], pieces: Sequence[tuple[int, int, int]]
) -> tuple[tuple[Segment, ...], int, int]:
    """Return the segments of one shard, the end of its parameters, and its size."""
    segments: list[Segment] = []
    ends: list[int] = []
    offset = 0
    kinds: tuple[Kind, Kind] = ("parameter", "buffer")
    for kind in kinds:
        for index, start, stop in sorted(pieces):
            if tensors[index].kind == kind:
                segments.append(Segment(index, start, stop, offset))
                offset += padded(stop - start)
        ends.append(offset)
    return tuple(segments), ends[0], ends[1]


def padded(n_elements: int) -> int:
    return -(-n_elements // ALIGNMENT) * ALIGNMENT


# --- copies ---


@final
class TensorCopier:
    """Copies between a model's tensors and one shard's vector; made once for many copies.

    Args:
        tensors: All tensors, in the layout's order.
        segments: What the vector holds of them.
        vector: (shard_size,); may be read-only if nothing is gathered into it.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], segments: Sequence[Segment], vector: Vector
    ) -> None:
        whole = as_tensor(vector)
        self._tensors = tensors
        self._views = {  # by tensor; a shard has at most one segment of each
            segment.tensor_index: (
                segment,
                whole[segment.offset : segment.offset + segment.n_elements],
            )
            for segment in segments
        }
        self._padding = [
            whole[end : padded(end)]
            for segment in segments
            if (end := segment.offset + segment.n_elements) % ALIGNMENT
        ]

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy this shard's part of `tensors` into the vector, and zero its padding.

        Args:
            tensors: Each (n_elements,), in the layout's order, of any real dtype; None for zeros.

        Raises:
            ValueError: A tensor is missing, or has another shape.
        """
        check_tensors(self._tensors, tensors)
        for index in self._views:
            self._put(index, tensors[index])
        self.zero_padding()

    def put(self, index: int, tensor: torch.Tensor | None) -> None:
        """Copy this shard's part of one tensor into the vector; see `gather`."""
        check_tensor(self._tensors[index], tensor)
        self._put(index, tensor)

    def _put(self, index: int, tensor: torch.Tensor | None) -> None:
        if index not in self._views:
            return
        segment, view = self._views[index]
        with torch.no_grad():
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor[segment.start : segment.stop])

    def zero_padding(self) -> None:
        """Fill the gaps between segments with zeros; update rules keep them zero."""
        for view in self._padding:
            view.zero_()

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the vector's elements into `tensors`; other elements stay.

        Args:
            tensors: Each (n_elements,), in the layout's order. Integer tensors get the nearest
                integer, because averages of counts are not integers.

        Raises:
            ValueError: A tensor is missing, or has another shape.
        """
        check_tensors(self._tensors, tensors)
        for segment, view in self._views.values():
            _copy(view, tensors[segment.tensor_index][segment.start : segment.stop])


def _copy(values: torch.Tensor, tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values if tensor.is_floating_point() else values.round())


def scatter_blocks(
    specs: Sequence[TensorSpec],
    segments: Sequence[Segment],
    blocks: Sequence[Vector],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Copy a vector that comes in consecutive blocks; see `TensorCopier.scatter`.

    Args:
        specs: All tensors, in the layout's order.
        segments: What the vector holds of them.
        blocks: Together (shard_size,); may be read-only.
        tensors: Each (n_elements,), in the layout's order.
    """
    check_tensors(specs, tensors)
    left = deque(segments)
    end = 0
    for block in blocks:
        begin, end = end, end + len(block)
        values = as_tensor(block)
        while left and left[0].offset < end:
            segment = left[0]
            first = max(begin, segment.offset)
            last = min(end, segment.offset + segment.n_elements)
            # In padding at the start of a block, `first` lies beyond `last`.
            at = segment.start - segment.offset
            if first < last:
                tensor = tensors[segment.tensor_index][first + at : last + at]
                _copy(values[first - begin : last - begin], tensor)
            if segment.offset + segment.n_elements > end:
                break  # the next block goes on with it
            left.popleft()


ElementType = Literal["float32", "float64"]

_CUTTING = 1
"""Version of the layout rules; part of the fingerprint, so that no vector is read with rules
other than its own."""


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that determines a layout; it travels as JSON."""

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
    """Where every element of every tensor lies."""

    def __init__(self, spec: LayoutSpec) -> None:
        tensors = tuple(sorted(spec.tensors, key=lambda tensor: tensor.name))
        # What it was made from, with tensors sorted by name.
        self.spec = msgspec.structs.replace(spec, tensors=tensors)
        pieces = cut(tensors, n_shards=spec.n_shards)
        placed = [place(tensors, pieces[k]) for k in range(spec.n_shards)]
        self._segments = [segments for segments, _, _ in placed]
        self._n_gradient = [n_gradient for _, n_gradient, _ in placed]
        self._shard_size = [shard_size for _, _, shard_size in placed]
        text = msgspec.json.encode([_CUTTING, ALIGNMENT, self.spec])
        # 16 hexadecimal digits, equal for equal layouts only.
        self.fingerprint = hashlib.sha256(text).hexdigest()[:16]

    @classmethod
    def of(
        cls, tensors: Sequence[TensorSpec], *, n_shards: int, dtype: ElementType = "float32"
    ) -> "Layout":
        """Return the layout of these tensors, given in any order.

        Raises:
            ValueError: A name occurs twice, or `n_shards` or `dtype` is invalid.
        """
        return cls(LayoutSpec(tensors=tuple(tensors), n_shards=n_shards, dtype=dtype))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.spec.tensors

    @property
    def n_shards(self) -> int:
        return self.spec.n_shards

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.float64]:
        if self.spec.dtype == "float64":
            return np.dtype(np.float64)
        return np.dtype(np.float32)

    @property
    def n_parameters(self) -> int:
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

    def exchange(self, k: int, vector: Vector) -> TensorCopier:
        """Return a copier for shard k's vector, which must have its size and dtype."""
        size = self.shard_size(k)
        if vector.shape != (size,) or vector.dtype != self.dtype:
            raise ValueError(
                f"the vector of shard {k} has shape {vector.shape} and dtype "
                f"{vector.dtype}; layout {self.fingerprint} needs ({size},) and "
                f"{self.dtype}"
            )
        return TensorCopier(self.tensors, self.segments(k), vector)

    def gather(self, k: int, tensors: Sequence[torch.Tensor | None], out: Vector) -> None:
        """Copy shard k's part of `tensors` into `out`; see `TensorCopier.gather`."""
        self.exchange(k, out).gather(tensors)

    def scatter(self, k: int, vector: Vector, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `vector` into `tensors`; see `TensorCopier.scatter`."""
        self.exchange(k, vector).scatter(tensors)
