"""A push at its shard: the buffer into which it comes, and its numbers.

    dense      gradient, then buffers              in memory shared with the client, or in blocks
    encoded    words of the gradient, then the     in blocks
               bits of the buffers

Words are decoded piece by piece while the rule is applied to what lies in the cache. So the memory
of a shard grows with the words that its clients send, not with the numbers that these stand for.
"""

from dataclasses import dataclass, field
from typing import Final, cast, final

import msgspec
import numpy as np

from distbelief.core import vectors
from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import Region
from distbelief.core.vectors import ALIGNMENT, Element, Vector
from distbelief.parameter_server import codecs
from distbelief.parameter_server.codecs import Adder, Residual, Words
from distbelief.parameter_server.slices import ShardSlice
from distbelief.protocol import push_fetch as pf


N_PUSH_BUFFERS: Final = 2
"""Push s lies in buffer s mod 2."""

PIECE: Final = 1 << 16
"""Elements that are decoded at a time."""

WORD: Final = np.dtype(np.uint32)
_NOTHING: Final[Vector] = np.zeros(0, np.float32)


@final
class EncodedNumbers:
    """Numbers that are decoded as they are read; each read overwrites what the last one returned.

    numbers[start:stop] is a vector, as of an array.
    """

    def __init__(self, add: Adder, n_elements: int) -> None:
        self._add, self._n_elements = add, n_elements
        self._room: Residual = np.zeros(0, np.float32)

    def __len__(self) -> int:
        return self._n_elements

    def __getitem__(self, where: "slice[int | None, int | None]") -> Vector:
        start, stop, _ = where.indices(self._n_elements)
        first = start // ALIGNMENT * ALIGNMENT  # decoding begins there
        if len(self._room) < stop - first:
            self._room = np.empty(stop - first, np.float32)
        out = self._room[: stop - first]
        out[:] = 0
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

    @classmethod
    def of(
        cls, values: Vector, held: ShardSlice, form: pf.Form | msgspec.UnsetType = msgspec.UNSET
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
        buffers = values[n_words:].view(np.float32)
        return cls(values=values, form=form, gradient=EncodedNumbers(add, n), buffers=buffers)

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
    n_words: pf.Words = msgspec.UNSET  # of that push
    received: int = 0  # blocks [0, received) are in it
    push: pf.Push | None = None  # set when it has come
    pushed: Pushed | None = None  # set when all of it has come
    n_blocks: int = 0  # that the push in it has
    _memory: Vector = field(default_factory=lambda: _NOTHING)
    _size: int = 0  # numbers, or words, of blocks that are in it

    @property
    def nbytes(self) -> int:
        return (self._memory if self.shared is None else self.shared).nbytes

    @property
    def _kind(self) -> tuple[int, np.dtype[Element]]:
        if self.n_words is msgspec.UNSET:
            return self.n_elements, self.dtype
        return self.n_words, WORD

    @property
    def n_received(self) -> int:
        """Blocks [0, n_received) are in it; all of them where the client fills it."""
        return self.received if self.shared is None else self.n_blocks

    def lend(self, sequence: int, n_words: pf.Words) -> None:
        """Reuse the buffer for push `sequence`, unless it already holds that push."""
        if self.sequence == sequence:
            if self.n_words != n_words:
                raise RemoteProtocolError(f"push {sequence} is of two sizes: encode it once")
            return
        if n_words is not msgspec.UNSET:
            n_max = codecs.n_words_max(self.n_elements)
            if n_words > n_max:
                raise RemoteProtocolError(f"push {sequence} has {n_words} words, more than {n_max}")
        self.sequence, self.n_words = sequence, n_words
        self.received = self._size = 0
        self.push = self.pushed = None
        n, dtype = self._kind
        self.n_blocks = max(1, -(-n // _per_block(dtype)))

    def take(self, block: pf.PushBlock, *, sender: str, of_part: bool = False) -> None:
        """Store a block if it is the next one: the sender repeats the others.

        RemoteProtocolError if it is none of this push. `of_part`: a dense push may be shorter.
        """
        self.lend(block.sequence, block.n_words)
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
        if block.block_index != self.received:
            return
        if not self.received:
            self._size = 0
            if len(self._memory) != n or self._memory.dtype != dtype:
                self._memory = np.empty(n, dtype)
        self._memory[self._size : self._size + size] = block.values
        self._size += size
        self.received += 1

    def settled(self) -> None:
        """Give the memory of words back: nobody asks for this push again."""
        self._memory, self.pushed = _NOTHING, None

    def complete(self, held: ShardSlice) -> bool:
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

    def read(self, held: ShardSlice, form: pf.Form | msgspec.UnsetType = msgspec.UNSET) -> Pushed:
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
) -> pf.PushBlock:
    per_block = _per_block(values.dtype)
    return pf.PushBlock(
        sequence=sequence,
        term=term,
        block_index=index,
        answer=answer,
        values=values[index * per_block : (index + 1) * per_block],
        n_words=len(values) if values.dtype == WORD else msgspec.UNSET,
    )
