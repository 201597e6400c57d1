"""Copies between a client's tensors and a shard's vector, also in memory that they share.

TensorCopier    a client's tensors <-> the values of a shard, a block of them, a push
SeqlockVector   the whole vector, in memory that clients on this host read
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, final

import numpy as np
import torch

from distbelief.core.memory import HEADER_BYTES, Memory, Region, attach_all
from distbelief.core.vectors import ALIGNMENT, Element, Vector, padded
from distbelief.parameter_server.bfloat16 import WORD, as_tensor, decode, encode
from distbelief.parameter_server.ranges import IndexRanges, RangeCopier, rounded


def parts(vector: Vector, n_parameters: int) -> tuple[Vector, Vector]:
    """Return the parameters and the buffers of a vector, or of its words."""
    if vector.dtype != WORD:
        return vector[:n_parameters], vector[n_parameters:]
    buffers = vector[n_parameters + n_parameters % 2 :].view(np.float32)
    # A small message may lie at any address.
    return vector[:n_parameters], buffers if buffers.flags.aligned else buffers.copy()


def convert(source: Vector, target: Vector, *, n_parameters: int) -> int:
    """Copy a vector, or its words, into another one, or into words; return the source's size."""
    parameters, buffers = parts(source, n_parameters)
    to_parameters, to_buffers = parts(target, n_parameters)
    if source.dtype == target.dtype:
        np.copyto(to_parameters, parameters)
    elif target.dtype == WORD:
        encode(as_tensor(parameters), to_parameters)
    else:
        decode(parameters, as_tensor(to_parameters))
    np.copyto(to_buffers, buffers)
    return len(source)


# --- tensors ---

_PIECE: Final = 1 << 16  # elements copied and summed at a time

Sizes = Sequence[tuple[str, int]]  # name and elements of each of a client's tensors

Piece = tuple[int, int, int, int | IndexRanges]
"""Elements [start, stop) of a tensor, and where they lie in a vector: index of the tensor, start,
stop, and the first element there or their ranges."""


def _check_tensor(size: tuple[str, int], tensor: torch.Tensor) -> None:
    name, n_elements = size
    if tensor.shape != (n_elements,):
        raise ValueError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}; flatten it to ({n_elements},), "
            "and give tensors in the layout's order (by name)"
        )
    if tensor.is_complex():
        raise ValueError(f"tensor {name!r} is {tensor.dtype}: make it real with torch.view_as_real")


_TORCH_TYPES: Final = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


def _array(tensor: torch.Tensor, *, like: Vector) -> Vector | None:
    """Return a tensor's memory as an array, or None if it lies elsewhere or has another type."""
    if tensor.dtype != _TORCH_TYPES.get(like.dtype) or not tensor.is_cpu or tensor.is_neg():
        return None
    array: Vector = tensor.detach().numpy()
    return array


@final
class TensorCopier:
    """Copies between a client's tensors and vectors of one kind; made once for many copies.

    Tensors are flat, in the order of `sizes` and of any real dtype; those that do not fit raise
    ValueError.
    """

    def __init__(
        self,
        sizes: Sizes,
        pieces: Iterable[Piece],
        *,
        has_padding: bool,  # a gap of zeros follows a piece that ends at no multiple of 64
        n_parameters: int,  # of the vectors; buffers follow
    ) -> None:
        self._sizes = sizes
        self._n_parameters = n_parameters
        # By tensor: start, stop, whether it is a buffer, and where it lies in that part.
        self._pieces: dict[int, tuple[int, int, bool, int | RangeCopier]] = {}
        self._padding: list[tuple[int, int, bool]] = []
        for index, start, stop, place in pieces:
            if isinstance(place, IndexRanges):
                is_buffer = bool(len(place.starts)) and int(place.starts[0]) >= n_parameters
                copier = RangeCopier(place.shifted(-n_parameters if is_buffer else 0))
                self._pieces[index] = start, stop, is_buffer, copier
                continue
            is_buffer = place >= n_parameters
            offset = place - n_parameters if is_buffer else place
            self._pieces[index] = start, stop, is_buffer, offset
            end = offset + stop - start
            if has_padding and end % ALIGNMENT:
                self._padding.append((end, padded(end), is_buffer))

    def put(self, index: int, tensor: torch.Tensor | None, vector: Vector) -> float:
        """Copy the elements of one tensor, None for zeros, into a vector.

        Return their sum, which shows NaN and infinity at a fortieth of the cost of a look at each
        element. It may also overflow although all elements are finite.
        """
        if tensor is not None:
            _check_tensor(self._sizes[index], tensor)
        if index not in self._pieces:
            return 0.0
        start, stop, is_buffer, place = self._pieces[index]
        vector = parts(vector, self._n_parameters)[is_buffer]
        with torch.no_grad():
            if isinstance(place, RangeCopier):
                return _put_ranges(place, None if tensor is None else tensor[start:stop], vector)
            here = vector[place : place + stop - start]
            if tensor is None:
                here[:] = 0
                return 0.0
            array, total = _array(tensor, like=vector), 0.0
            for first in range(start, stop, _PIECE):  # summed while it is in the cache
                piece = slice(first, min(first + _PIECE, stop))
                target = here[piece.start - start : piece.stop - start]
                summed = torch.from_numpy(target)
                if array is None:
                    summed.copy_(tensor[piece])
                else:  # torch would read the target before it writes it
                    np.copyto(target, array[piece])
                total += summed.sum().item()
        return total

    def put_all(self, tensors: Mapping[int, torch.Tensor], vector: Vector) -> list[float]:
        """Put these tensors; return the sum of each, as `put` does."""
        return [self.put(index, tensor, vector) for index, tensor in tensors.items()]

    def zero_padding(self, vector: Vector) -> None:
        """Fill the gaps between pieces with zeros; update rules keep them zero."""
        both = parts(vector, self._n_parameters)
        for start, stop, is_buffer in self._padding:
            both[is_buffer][start:stop] = 0

    def scatter(self, vector: Vector, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the elements of a vector, or its words, into `tensors`; other elements stay."""
        if len(tensors) != len(self._sizes):
            raise ValueError(
                f"{len(tensors)} tensors given, the layout has {len(self._sizes)}: give all of them"
            )
        both = parts(vector, self._n_parameters)
        with torch.no_grad():
            for index, (start, stop, is_buffer, place) in self._pieces.items():
                tensor = tensors[index]
                _check_tensor(self._sizes[index], tensor)
                if isinstance(place, RangeCopier):
                    place.gather(as_tensor(both[is_buffer]), tensor[start:stop])
                    continue
                values = both[is_buffer][place : place + stop - start]
                array = _array(tensor, like=values)
                if array is not None:
                    np.copyto(array[start:stop], values)
                elif values.dtype == WORD:
                    decode(values, tensor[start:stop])
                else:
                    tensor[start:stop].copy_(rounded(as_tensor(values), tensor))


def _put_ranges(copier: RangeCopier, tensor: torch.Tensor | None, vector: Vector) -> float:
    whole = as_tensor(vector)
    if tensor is None:
        copier.scatter(torch.zeros(1, dtype=whole.dtype).expand(copier.n_elements), whole)
        return 0.0
    copier.scatter(tensor, whole)
    return float(tensor.sum(dtype=whole.dtype))


# --- memory shared with clients ---

_VERSION, _CLOCK = range(2)


@final
class SeqlockVector:
    """One vector under a seqlock: one writer, many readers, nobody waits.

        | version, clock, 0 ... (64 bytes) | values (n elements) |

    The writer makes the version odd before it writes the values and even afterwards. A reader
    copies between two reads of the version; if they differ or are odd, the copy is torn: it mixes
    two versions, and the reader must try again later. The version is odd until the first write is
    complete, and stays odd if the writer dies while it writes.
    """

    def __init__(self, name: str, region: Region, *, dtype: np.dtype[Element]) -> None:
        self.name = name  # of its region; "" if the vector lies in memory of this process alone
        self._header = region[:HEADER_BYTES].view(np.int64)
        # (n,) the vector itself. Only the writer may use it without `read`.
        self.values: Vector = region[HEADER_BYTES:].view(dtype)

    @classmethod
    def create(
        cls, memory: Memory | None, name: str, *, n_elements: int, dtype: np.dtype[Element]
    ) -> "SeqlockVector":
        """Return a vector that others may attach but not yet read, or raise StorageError.

        Without `memory` it lies in memory of this process alone.
        """
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        if memory is None:
            name, region = "", np.zeros(n_bytes, np.uint8)
        else:
            region = memory.create(name, n_bytes=n_bytes)
        published = cls(name, region, dtype=dtype)
        published.begin()
        return published

    @classmethod
    def attach(
        cls, memory: Memory, name: str, *, n_elements: int, dtype: np.dtype[Element]
    ) -> "SeqlockVector":
        """Attach another role's vector, or raise MemoryGoneError, or RemoteProtocolError."""
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        return cls(name, attach_all(memory, name, n_bytes=n_bytes), dtype=dtype)

    @property
    def version(self) -> int:
        return int(self._header[_VERSION])

    @property
    def clock(self) -> int:
        return int(self._header[_CLOCK])

    def begin(self) -> None:
        assert self.version % 2 == 0, f"{self.name!r} is being written already"
        self._header[_VERSION] += 1

    def end(self, *, clock: int) -> None:
        """Mark the values as complete, with `clock` applied pushes."""
        assert self.version % 2 == 1, f"{self.name!r} is not being written"
        # x86 keeps the order of stores, which is all that a seqlock needs. On other processors
        # the order comes from the locks that a driver takes between `handle` and work.
        self._header[_CLOCK] = clock
        self._header[_VERSION] += 1

    def read(self, copy: Callable[[], object]) -> int | None:
        """Call `copy` and return the clock of what it copied, or None if the copy is torn.

        `copy` is not called if a write is in progress.
        """
        version = self.version
        if version % 2:
            return None
        copy()
        clock = self.clock
        return clock if self.version == version else None
