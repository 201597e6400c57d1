"""Reliable streams between ranks: numbered transfers, acknowledged, sent again.

`ReliableSender` numbers the transfers to one peer. Each is sent again, with back-off, until
the peer acknowledges it, in a transfer of its own or by `TransferAck`. At most `WINDOW` are
under way; the rest wait. Duplicates are dropped; order does not matter to the receiver.

`Reassembly` puts the blocks of a message together and keeps it until its step begins. The
size of each message is known from the program and checked before memory is allocated.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

import numpy as np

from distbelief.core.vectors import Element, Vector, block_bounds, n_blocks
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.roles.role import Action, Address, Seconds, Send


WINDOW: Final = 32
"""Transfers under way, of at most one mebibyte each."""

TAKEN_EVERY: Final = 8
"""Transfers after which to send a `TransferAck`, if no transfer carries it earlier."""

AGAIN_SECONDS: Final = 2.0
AGAIN_SECONDS_MAX: Final = 30.0
"""Until an unacknowledged transfer is sent again; doubles each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One block of one message of a program."""

    step: int
    micro_batch: int
    way: int
    block_index: int
    values: Vector


@final
class ReliableSender:
    """The stream to one peer, and the acknowledgements of what it sends.

    Attributes:
        n_bytes: Sent in all generations, each transfer counted once.
        n_again: Transfers that were sent again.
    """

    def __init__(self, peer: Address) -> None:
        self._peer = peer
        self.n_bytes = 0
        self.n_out = 0
        self.n_again = 0
        self.begin(0)

    def begin(self, generation: int) -> None:
        """Begin a generation; drop what was under way in the one before."""
        self._generation = generation
        self._waiting: deque[Outgoing] = deque()
        self._under_way: deque[tuple[int, Outgoing]] = deque()
        self._next = 0  # sequence of the next transfer
        self._came = 0  # all before this number arrived
        self._ahead: set[int] = set()  # arrived out of order
        self._untold = 0
        self._patience = AGAIN_SECONDS
        self._again_at: Seconds = 0.0

    # --------------------------------------------------------------------------- sends

    def post(self, parcels: Iterable[Outgoing], now: Seconds) -> list[Action]:
        """Send these as far as the window allows; the rest later."""
        self._waiting.extend(parcels)
        return self._send(now)

    def taken(self, count: int, now: Seconds) -> list[Action]:
        """The peer has all transfers before `count`.

        Raises:
            RemoteProtocolError: some of them were never sent.
        """
        if count > self._next:
            raise RemoteProtocolError(
                f"{self._peer} acknowledged {count} transfers; {self._next} were sent"
            )
        while self._under_way and self._under_way[0][0] < count:
            self._under_way.popleft()
            self._patience = AGAIN_SECONDS
            self._again_at = now + self._patience
        return self._send(now)

    def remind(self, now: Seconds) -> list[Action]:
        """Send again what has been under way for too long; acknowledge what arrived."""
        actions: list[Action] = []
        if self._under_way and now >= self._again_at:
            self._patience = min(2 * self._patience, AGAIN_SECONDS_MAX)
            self._again_at = now + self._patience
            self.n_again += len(self._under_way)
            actions += [self._transfer(*each) for each in self._under_way]
        elif self._untold:
            actions.append(self._tell())
        return actions

    def _send(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        while self._waiting and len(self._under_way) < WINDOW:
            if not self._under_way:
                self._again_at = now + self._patience
            parcel = self._waiting.popleft()
            self._under_way.append((self._next, parcel))
            actions.append(self._transfer(self._next, parcel))
            self._next += 1
            self.n_bytes += parcel.values.nbytes
            self.n_out += 1
        return actions

    def _transfer(self, sequence: int, parcel: Outgoing) -> Send:
        self._untold = 0
        message = TransferBlock(
            generation=self._generation,
            sequence=sequence,
            taken=self._came,
            step=parcel.step,
            micro_batch=parcel.micro_batch,
            way=parcel.way,
            block_index=parcel.block_index,
            values=parcel.values,
        )
        return Send(receiver=self._peer, message=message)

    # ------------------------------------------------------------------------ receives

    def is_new(self, sequence: int) -> bool:
        """Return whether a transfer did not arrive before.

        Raises:
            RemoteProtocolError: its number is beyond the window.
        """
        if sequence >= self._came + WINDOW:
            raise RemoteProtocolError(
                f"{self._peer} sent transfer {sequence} before {self._came} arrived; "
                f"at most {WINDOW} may be under way"
            )
        return sequence >= self._came and sequence not in self._ahead

    def have(self, sequence: int) -> list[Action]:
        """Note that a transfer arrived, perhaps again; acknowledge every few."""
        self._untold += 1
        if self.is_new(sequence):
            self._ahead.add(sequence)
            while self._came in self._ahead:
                self._ahead.remove(self._came)
                self._came += 1
        return [self._tell()] if self._untold >= TAKEN_EVERY else []

    def _tell(self) -> Send:
        self._untold = 0
        return Send(
            receiver=self._peer, message=TransferAck(generation=self._generation, taken=self._came)
        )


class StreamKey(NamedTuple):
    """Identifies a message, the same in every generation and process."""

    step: int
    micro_batch: int
    way: int
    sender: int


@dataclass(slots=True)
class _Parts:
    whole: Vector
    missing: set[int] = field(default_factory=set)


@final
class Reassembly:
    """Messages that arrived, complete or in part."""

    def __init__(self) -> None:
        self._parts: dict[StreamKey, _Parts] = {}
        self._whole: dict[StreamKey, Vector] = {}

    def clear(self) -> None:
        self._parts.clear()
        self._whole.clear()

    def take(
        self,
        label: StreamKey,
        message: TransferBlock,
        *,
        n_elements: int,
        dtype: "np.dtype[Element]",
    ) -> bool:
        """Keep a block; return whether it completes its message.

        Raises:
            RemoteProtocolError: it does not fit the message.
        """
        count = n_blocks(n_elements, itemsize=dtype.itemsize)
        index, values = message.block_index, message.values
        bounds = _bounds(index, n_elements, itemsize=dtype.itemsize)
        if index >= count or values.dtype != dtype or len(values) != bounds[1] - bounds[0]:
            raise RemoteProtocolError(
                f"block {index} of message {label.way} of step {label.step} has "
                f"{len(values)} numbers of {values.dtype}: of {count} blocks with "
                f"{n_elements} of {dtype} it should have {bounds[1] - bounds[0]}"
            )
        if label in self._whole:
            return False
        if count == 1:
            self._whole[label] = values
            return True
        if label not in self._parts:
            whole: Vector = np.empty(n_elements, dtype=dtype)
            self._parts[label] = _Parts(whole, set(range(count)))
        parts = self._parts[label]
        parts.whole[bounds[0] : bounds[1]] = values
        parts.missing.discard(index)
        if parts.missing:
            return False
        self._whole[label] = self._parts.pop(label).whole
        return True

    def pop_step(self, step: int) -> Iterator[tuple[StreamKey, Vector]]:
        """Yield the complete messages of a step, and drop them here."""
        for label in [label for label in self._whole if label.step == step]:
            yield label, self._whole.pop(label)


def blocks_of(values: Vector) -> Iterator[tuple[int, Vector]]:
    """Yield the blocks that `take` puts together."""
    bounds = block_bounds(len(values), itemsize=values.itemsize)
    for index, (start, stop) in enumerate(bounds):
        yield index, values[start:stop]


def _bounds(index: int, n_elements: int, *, itemsize: int) -> tuple[int, int]:
    # Meaningless for a block that does not exist: the caller checks the index too.
    _, size = next(block_bounds(1 << 62, itemsize=itemsize))
    return index * size, min((index + 1) * size, n_elements)
