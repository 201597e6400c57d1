"""What ranks of a group send each other: blocks of messages, numbered and acknowledged.

`RankLink` is the stream to one peer and the acknowledgement of what comes from it.
`Reassembly` puts the blocks of a message together and keeps it until its step begins. The
size of each message is known from the program and checked before memory is allocated.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, final

import numpy as np

from distbelief.core.reliable import Arrivals, Backoff, ReliableStream
from distbelief.core.vectors import Element, Vector
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.protocol.codec import FRAME_BYTES_MAX
from distbelief.roles.role import Action, Address, Seconds, Send


# Transfers after which to send a `TransferAck`, if no transfer carries it earlier.
ACK_EVERY: Final = 8
AGAIN_SECONDS: Final = 2.0
AGAIN_SECONDS_MAX: Final = 30.0


class StreamKey(NamedTuple):
    """Identifies a message, the same in every generation and process."""

    step: int
    micro_batch: int
    way: int
    sender: int


class Block(NamedTuple):
    """One block of one message of a program."""

    step: int
    micro_batch: int
    way: int
    block_index: int
    values: Vector


@final
class RankLink:
    """The stream to one peer, and the acknowledgements of what it sends."""

    def __init__(self, peer: Address) -> None:
        self._peer = peer
        self.n_bytes = 0  # sent in all generations, each block counted once
        self.n_out = 0  # blocks sent
        self._n_again = 0  # in earlier generations
        self._stream = self._new_stream()
        self.begin(0)

    def begin(self, generation: int) -> None:
        """Begin a generation; drop what was under way in the one before."""
        self._generation = generation
        self._n_again += self._stream.n_again
        self._stream = self._new_stream()
        self._arrivals = Arrivals()
        self._n_untold = 0

    @property
    def n_again(self) -> int:
        return self._n_again + self._stream.n_again

    def post(self, blocks: Iterable[Block], now: Seconds) -> list[Action]:
        return self._count(self._stream.put(blocks, now))

    def acked(self, count: int, now: Seconds) -> list[Action]:
        """The peer has all transfers before `count`."""
        return self._count(self._stream.acked(count, now))

    def remind(self, now: Seconds) -> list[Action]:
        """Send again what has been under way for too long, or acknowledge what arrived."""
        again = self._stream.again(now)
        return [*again] if again or not self._n_untold else [self._ack()]

    def is_new(self, sequence: int) -> bool:
        return self._arrivals.is_new(sequence)

    def arrived(self, sequence: int) -> list[Action]:
        """Note that a transfer arrived, perhaps again; acknowledge every few."""
        self._n_untold += 1
        self._arrivals.add(sequence)
        return [self._ack()] if self._n_untold >= ACK_EVERY else []

    def _new_stream(self) -> ReliableStream[Block, Send]:
        backoff = Backoff(first=AGAIN_SECONDS, longest=AGAIN_SECONDS_MAX)
        return ReliableStream(self._transfer, backoff=backoff)

    def _count(self, sent: Iterable[Send]) -> list[Action]:
        actions: list[Action] = []
        for action in sent:
            assert isinstance(action.message, TransferBlock)
            self.n_out += 1
            self.n_bytes += action.message.values.nbytes
            actions.append(action)
        return actions

    def _transfer(self, sequence: int, block: Block) -> Send:
        self._n_untold = 0
        message = TransferBlock(
            generation=self._generation,
            sequence=sequence,
            taken=self._arrivals.count,
            step=block.step,
            micro_batch=block.micro_batch,
            way=block.way,
            block_index=block.block_index,
            values=block.values,
        )
        # The stream keeps the values for a repetition, so nobody changes them meanwhile.
        return Send(receiver=self._peer, message=message, lent=True)

    def _ack(self) -> Send:
        self._n_untold = 0
        ack = TransferAck(generation=self._generation, taken=self._arrivals.count)
        return Send(receiver=self._peer, message=ack)


@final
class Reassembly:
    """Messages that arrived, complete or in part."""

    def __init__(self) -> None:
        self._parts: dict[StreamKey, tuple[Vector, set[int]]] = {}  # and which blocks are missing
        self._whole: dict[StreamKey, Vector] = {}

    def clear(self) -> None:
        self._parts.clear()
        self._whole.clear()

    def take(
        self, key: StreamKey, message: TransferBlock, *, n_elements: int, dtype: "np.dtype[Element]"
    ) -> bool:
        """Keep a block that fits its message; return whether it completes the message."""
        index, values = message.block_index, message.values
        size = FRAME_BYTES_MAX // dtype.itemsize
        count = max(1, -(-n_elements // size))
        # Meaningless for a block that does not exist: hence the check of the index.
        start, stop = index * size, min((index + 1) * size, n_elements)
        if index >= count or values.dtype != dtype or len(values) != stop - start:
            raise RemoteProtocolError(
                f"block {index} of message {key.way} of step {key.step} has {len(values)} numbers "
                f"of {values.dtype}: the message has {n_elements} of {dtype} in {count} blocks"
            )
        if key in self._whole:
            return False
        if count == 1:
            self._whole[key] = values
            return True
        if key not in self._parts:
            whole: Vector = np.empty(n_elements, dtype=dtype)
            self._parts[key] = whole, set(range(count))
        whole, missing = self._parts[key]
        whole[start:stop] = values
        missing.discard(index)
        if not missing:
            self._whole[key], _ = self._parts.pop(key)
        return not missing

    def pop_step(self, step: int) -> Iterator[tuple[StreamKey, Vector]]:
        """Yield the complete messages of a step, and drop them here."""
        for key in [key for key in self._whole if key.step == step]:
            yield key, self._whole.pop(key)


def blocks_of(values: Vector) -> Iterator[tuple[int, Vector]]:
    """Yield the blocks that `take` puts together; an empty message has one, too."""
    size = FRAME_BYTES_MAX // values.itemsize
    for start in range(0, max(len(values), 1), size):
        yield start // size, values[start : start + size]
