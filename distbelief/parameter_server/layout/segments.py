"""How tensors are cut, and how the pieces of one shard lie behind one another.

`layout` has the rules that this keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.parameter_server.layout.tensors import Kind, TensorSpec
from distbelief.vectors import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of one tensor, at vector[offset : offset + n_elements]."""

    tensor_index: int
    start: int
    stop: int
    offset: int

    @property
    def n_elements(self) -> int:
        """How many elements of the tensor these are; never 0."""
        return self.stop - self.start


def cut(tensors: Sequence[TensorSpec], *, n_shards: int) -> list[list[tuple[int, int, int]]]:
    """Return per shard what it holds: (tensor index, start, stop)."""
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
    """Return the multiple of 64 nearest to k/S of the elements (k = S: all of them)."""
    if k == n_shards:
        return n_elements
    unit = ALIGNMENT * n_shards
    return (2 * k * n_elements + unit) // (2 * unit) * ALIGNMENT


def place(
    tensors: Sequence[TensorSpec], pieces: Sequence[tuple[int, int, int]]
) -> tuple[tuple[Segment, ...], int, int]:
    """Return the segments of one shard, the end of its parameters, its size."""
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
    """Return the next multiple of 64."""
    return -(-n_elements // ALIGNMENT) * ALIGNMENT
