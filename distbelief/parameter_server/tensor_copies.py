"""Copies between a client's tensors and a shard's vector, also in memory that they share.

TensorCopier    a client's tensors <-> the values of a shard, a block of them, a push
SeqlockVector   the whole vector, in memory that clients on this host read
PushBuffer      where a push comes to its shard; Pushed: its numbers, decoded as they are read
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, cast, final

import msgspec
import numpy as np
import torch

from distbelief.core import vectors
from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import HEADER_BYTES, Memory, Region, attach_all
from distbelief.core.vectors import ALIGNMENT, Element, Vector, padded
from distbelief.parameter_server import codecs
from distbelief.parameter_server.bfloat16 import WORD, as_tensor, decode, encode
from distbelief.parameter_server.codecs import Adder, Residual, Words
from distbelief.parameter_server.ranges import IndexRanges, RangeCopier, rounded
from distbelief.protocol import push_fetch as pf


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

PIECE: Final = 1 << 16  # elements copied and summed, or decoded, at a time

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
            for first in range(start, stop, PIECE):  # summed while it is in the cache
                piece = slice(first, min(first + PIECE, stop))
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


# --- pushes at their shard ---
#
#     dense      gradient, then buffers              in memory shared with the client, or in blocks
#     encoded    words of the gradient, then the     in blocks
#                bits of the buffers
#
# Words are decoded piece by piece while the rule is applied to what lies in the cache. So a shard
# has memory for the words that its clients send, not for the numbers that these stand for.


class Held(Protocol):
    """What a client holds of a shard's vector: a `ShardSlice`."""

    n_elements: int
    n_parameters: int
    dtype: np.dtype[Element]


N_PUSH_BUFFERS: Final = 2
"""Push s lies in buffer s mod 2."""

PUSH_WORD: Final = np.dtype(np.uint32)
_NOTHING: Final[Vector] = np.zeros(0, np.float32)


@final
class EncodedNumbers:
    """Numbers that are decoded as they are read; each read overwrites what the last one returned.

    numbers[start:stop] is a vector, as of an array.
    """

    def __init__(self, add: Adder, n_elements: int, *, zero: float = 0.0) -> None:
        self._add, self._n_elements, self._zero = add, n_elements, zero
        self._room: Residual = np.zeros(0, np.float32)

    def __len__(self) -> int:
        return self._n_elements

    def __getitem__(self, where: "slice[int | None, int | None]") -> Vector:
        start, stop, _ = where.indices(self._n_elements)
        first = start // ALIGNMENT * ALIGNMENT  # decoding begins there
        if len(self._room) < stop - first:
            self._room = np.empty(stop - first, np.float32)
        out = self._room[: stop - first]
        out[:] = self._zero
        self._add(first, stop, out)
        return out[start - first :]


Numbers = Vector | EncodedNumbers


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pushed:
    """The numbers of a complete push."""

    values: Vector  # as they came
    form: pf.Form | msgspec.UnsetType
    gradient: Numbers  # (n_parameters,)
    buffers: Vector
    flops: float = 0.0  # that decoding takes, beside what it moves

    @classmethod
    def of(
        cls, values: Vector, held: Held, form: pf.Form | msgspec.UnsetType = msgspec.UNSET
    ) -> "Pushed":
        """Read a push of these elements; RemoteProtocolError if its words are invalid."""
        n = held.n_parameters
        if form is msgspec.UNSET:
            return cls(values=values, form=form, gradient=values[:n], buffers=values[n:])
        if held.dtype != np.float32:
            raise RemoteProtocolError(f"words of a push to a vector of {held.dtype}: use float32")
        n_words = len(values) - (held.n_elements - n)
        if n_words < 0:
            raise RemoteProtocolError(f"a push of {len(values)} words lacks some of its buffers")
        words = cast("Words", values[:n_words])
        add = codecs.decoder(form, words, n)
        buffers, flops, zero = values[n_words:].view(np.float32), 0.0, 0.0
        if form == "factors":
            flops, zero = codecs.flops_of(words, n), -0.0  # -0.0 + x has the bits of x
        gradient = EncodedNumbers(add, n, zero=zero)
        return cls(values=values, form=form, gradient=gradient, buffers=buffers, flops=flops)

    def dense(self) -> Vector:
        """Return all numbers, decoded if they are not dense."""
        if self.form is msgspec.UNSET:
            return self.values
        return np.concatenate([self.gradient[:], self.buffers])


# --- buffers ---


def push_buffer_bytes(n_elements: int, *, itemsize: int) -> int:
    """Return the size of a region of two push buffers; never 0, which no region can have."""
    return max(N_PUSH_BUFFERS * n_elements * itemsize, 64)


def push_buffer_views(
    region: Region, *, n_elements: int, dtype: np.dtype[Element]
) -> tuple[Vector, Vector]:
    """Return both push buffers, each (n_elements,); RemoteProtocolError if the size differs."""
    n_bytes = push_buffer_bytes(n_elements, itemsize=dtype.itemsize)
    if region.nbytes != n_bytes:
        raise RemoteProtocolError(
            f"push buffers have {region.nbytes} bytes, not {n_bytes}: use one layout"
        )
    whole = region[: N_PUSH_BUFFERS * n_elements * dtype.itemsize].view(dtype)
    return whole[:n_elements], whole[n_elements:]


PushBuffers = tuple[Vector, Vector]
"""Each of what the client holds: (n_elements,)."""


@final
@dataclass(slots=True, eq=False)
class PushBuffer:
    n_elements: int  # of a dense push, at most
    dtype: np.dtype[Element]
    shared: Vector | None = None  # (n_elements,) that the client fills; None: blocks come
    sequence: int = 0  # of the push in it; 0 for none
    attempt: pf.Attempt = msgspec.UNSET  # at that push
    n_words: pf.Words = msgspec.UNSET  # of that push
    received: int = 0  # blocks [0, received) are in it, in the order sent
    push: pf.Push | None = None  # set when it has come
    pushed: Pushed | None = None  # set when all of it has come
    n_blocks: int = 0  # that the push in it has
    _memory: Vector = field(default_factory=lambda: _NOTHING)
    _size: int = 0  # numbers, or words, of blocks that are in it
    _indices: set[int] = field(default_factory=set)  # of those blocks

    @property
    def nbytes(self) -> int:
        return (self._memory if self.shared is None else self.shared).nbytes

    @property
    def _kind(self) -> tuple[int, np.dtype[Element]]:
        if self.n_words is msgspec.UNSET:
            return self.n_elements, self.dtype
        return self.n_words, PUSH_WORD

    @property
    def n_received(self) -> int:
        """How many blocks are in it; all of them where the client fills it."""
        return self.received if self.shared is None else self.n_blocks

    def lend(self, sequence: int, n_words: pf.Words, attempt: pf.Attempt = msgspec.UNSET) -> bool:
        """Reuse the buffer for push `sequence`, unless it already holds that attempt at it.

        Return False if it holds a later one: what comes of this one is void.
        """
        if self.sequence == sequence:
            n_later = (attempt or 0) - (self.attempt or 0)
            if n_later < 0:
                return False
            if not n_later and self.n_words != n_words:
                raise RemoteProtocolError(f"push {sequence} is of two sizes: encode it once")
            if not n_later:
                return True
            if self.push is not None:
                raise RemoteProtocolError(f"push {sequence} was closed before it was taken back")
        if n_words is not msgspec.UNSET:
            n_max = codecs.n_words_max(self.n_elements)
            if n_words > n_max:
                raise RemoteProtocolError(f"push {sequence} has {n_words} words, more than {n_max}")
        self.sequence, self.n_words, self.attempt = sequence, n_words, attempt
        self.received = self._size = 0
        self._indices.clear()
        self.push = self.pushed = None
        n, dtype = self._kind
        self.n_blocks = max(1, -(-n // _per_block(dtype)))
        return True

    def take(self, block: pf.PushBlock, *, sender: str, of_part: bool = False) -> bool:
        """Store a block if it is the next one: the sender repeats the others.

        Return whether it is in the buffer now. RemoteProtocolError if it is none of this push.
        `of_part`: a dense push may be shorter.
        """
        if not self.lend(block.sequence, block.n_words, block.attempt):
            return False
        n, dtype = self._kind
        if block.block_index >= self.n_blocks:
            raise RemoteProtocolError(
                f"{sender} sent block {block.block_index} of a push of {self.n_blocks}: use one "
                "layout"
            )
        per_block = _per_block(dtype)
        expected = min(n - block.block_index * per_block, per_block)
        size = block.values.size
        fits = size == expected or (of_part and size < expected)
        if block.values.dtype != dtype or not fits:
            raise RemoteProtocolError(
                f"{sender} sent {size} elements of {block.values.dtype} as block "
                f"{block.block_index}, which has {expected} of {dtype}: use one layout"
            )
        number = block.block_index if block.number is msgspec.UNSET else block.number
        if number != self.received:
            return number < self.received
        if block.block_index in self._indices:
            raise RemoteProtocolError(f"{sender} sent block {block.block_index} under two numbers")
        if not self.received:
            self._size = 0
            if len(self._memory) != n or self._memory.dtype != dtype:
                self._memory = np.empty(n, dtype)
        start = self._size if of_part else block.block_index * per_block
        self._memory[start : start + size] = block.values
        self._indices.add(block.block_index)
        self._size += size
        self.received += 1
        return True

    def settled(self) -> None:
        """Give the memory of words back: nobody asks for this push again."""
        self._memory, self.pushed = _NOTHING, None

    def complete(self, held: Held) -> bool:
        """Read the push if all of it is here; return whether that is so for the first time.

        RemoteProtocolError if it is invalid: then it is as if nothing had come.
        """
        push = self.push
        if push is None or self.pushed is not None or self.n_received != self.n_blocks:
            return False
        try:
            self.pushed = self.read(held, push.form)
        except RemoteProtocolError:
            self.sequence = 0
            raise
        return True

    def read(self, held: Held, form: pf.Form | msgspec.UnsetType = msgspec.UNSET) -> Pushed:
        """Return the push, of which all has come; RemoteProtocolError if it is invalid."""
        if self.shared is not None:
            return Pushed.of(self.shared[: held.n_elements], held)
        n, _ = self._kind
        if self.n_words is msgspec.UNSET:
            n = held.n_elements
        if self._size != n:
            raise RemoteProtocolError(
                f"push {self.sequence} has {self._size} elements, its client {n}"
            )
        if (form is msgspec.UNSET) is not (self.n_words is msgspec.UNSET):
            raise RemoteProtocolError(f"push {self.sequence} has words without a form: give both")
        return Pushed.of(self._memory[: self._size], held, form)


def _per_block(dtype: np.dtype[Element]) -> int:
    return vectors.BLOCK_BYTES // dtype.itemsize


def push_block(
    values: Vector,  # all numbers of a push, or all words
    index: int,
    *,
    sequence: int,
    term: int,
    answer: bool = True,
    number: int | msgspec.UnsetType = msgspec.UNSET,
    attempt: pf.Attempt = msgspec.UNSET,
) -> pf.PushBlock:
    per_block = _per_block(values.dtype)
    return pf.PushBlock(
        sequence=sequence,
        term=term,
        block_index=index,
        answer=answer,
        number=number,
        attempt=attempt,
        values=values[index * per_block : (index + 1) * per_block],
        n_words=len(values) if values.dtype == PUSH_WORD else msgspec.UNSET,
    )
