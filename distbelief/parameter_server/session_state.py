"""How stale pushes were: shard clock at application minus clock at fetch."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from distbelief.core.memory import Region
from distbelief.core.vectors import Element, Vector
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.slices import NOTHING, ShardSlice
from distbelief.protocol import Push, PushBlock, SessionRecord
from distbelief.roles.role import Address


# What a shard knows of one client: its two slots, and how far its pushes have come.
#
#     sequence        1   2   3   4   5   6
#                     [ applied  ]  |   |          watermark = 3
#     slot s mod 2                  0   1          room for watermark + 1 and + 2, no more
#
# Rules:
#
# * A push is applied when its slot is complete and its sequence is watermark + 1; the one
#   after it waits in the other slot. So the pushes of one client are applied in the order
#   in which it made them, each at most once.
# * A slot is complete when its `Push` has come and, if the client shares no memory with
#   the shard, every block before it. Blocks are taken in order only: one that is out of
#   order is dropped, and the client begins again where the shard says.
# * The watermark only rises: by an application, or because the client says at the
#   handshake from which push on it will go (what it gave up is never applied).
# * A push may be applied and yet be held: nobody is told, and its slot stays as it is,
#   until a second copy of the shard has it as well (`forwarding`).
# * A new incarnation of the client begins anew; only `samples` stays, so that it knows
#   how much of its data is in the values.

Bounds = Sequence[tuple[int, int]]  # (start, stop) of each block of a vector

N_SLOTS = 2


def push_buffer_bytes(n_elements: int, *, itemsize: int) -> int:
    """Return the size of a region of two slots; never 0, which no memory can be."""
    return max(N_SLOTS * n_elements * itemsize, 64)


def push_buffer_views(
    region: Region, *, n_elements: int, dtype: np.dtype[Element]
) -> tuple[Vector, Vector]:
    """Return both slots of a region, each (n_elements,).

    Raises:
        RemoteProtocolError: the region has another size.
    """
    n_bytes = push_buffer_bytes(n_elements, itemsize=dtype.itemsize)
    if region.nbytes != n_bytes:
        raise RemoteProtocolError(
            f"a region of slots has {region.nbytes} bytes, not the {n_bytes} of "
            f"{N_SLOTS} times {n_elements} elements of {dtype}: both sides must use "
            "one layout"
        )
    whole = region[: N_SLOTS * n_elements * dtype.itemsize].view(dtype)
    return whole[:n_elements], whole[n_elements:]


@final
@dataclass(slots=True, eq=False)
class PushBuffer:
    """Room for one push."""

    values: Vector  # (n_elements,) of what the client holds: gradient, then buffers
    sequence: int = 0  # whose push is in it; 0: nobody's yet
    received: int = 0  # blocks [0, received) are in it
    n_elements: int = 0  # of those blocks, in a second's slot
    push: Push | None = None  # once it has come

    def lend(self, sequence: int) -> None:
        """Make room for push `sequence`, unless the slot holds it already."""
        if self.sequence != sequence:
            self.sequence, self.received, self.push = sequence, 0, None
            self.n_elements = 0


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client, as a shard sees it.

    Attributes:
        incarnation: Its present life.
        watermark: No push up to it is applied from now on.
        applied: How many pushes of this incarnation the values contain.
        samples: Its total in the last push applied, of any incarnation.
        staleness: Of the last push applied.
        n_held: How many of the last pushes applied nobody is to know of yet.
        told_staleness: Of the last push that is not held.
        greeted: Has this incarnation said Hello to this life of the shard?
        present: Is it there, as far as the shard knows?
        holding: What it fetches and pushes of the shard's vector.
        slots: Two if it pushes, none if it only fetches.
        region: Where they lie; "" in the shard's own memory, filled by blocks.
        parameters_region: Where it can read the values; "" by blocks only.
        queued: Does it stand in the shard's queue of complete pushes?
        request: Its latest fetch.
        expired: The latest fetch whose lease ended because it was idle.
    """

    name: Address
    incarnation: int
    watermark: int = 0
    applied: int = 0
    samples: int = 0
    staleness: int = 0
    n_held: int = 0
    told_staleness: int = 0
    greeted: bool = False
    present: bool = True
    holding: ShardSlice = NOTHING
    slots: tuple[PushBuffer, ...] = field(default=())
    region: str = ""
    parameters_region: str = ""
    queued: bool = False
    request: int = 0
    expired: int = 0

    @classmethod
    def of(cls, record: SessionRecord) -> "Session":
        """Return the client that another copy, or another life, of the shard knew."""
        return cls(
            name=Address(record.name),
            incarnation=record.incarnation,
            watermark=record.watermark,
            applied=record.applied,
            samples=record.samples,
            staleness=record.staleness,
            told_staleness=record.staleness,
        )

    @property
    def record(self) -> SessionRecord:
        """What the other copy of the shard has to know."""
        return SessionRecord(
            name=self.name,
            incarnation=self.incarnation,
            watermark=self.watermark,
            applied=self.applied,
            samples=self.samples,
            staleness=self.staleness,
        )

    @property
    def told(self) -> int:
        """The watermark, as the client may know it."""
        return self.watermark - self.n_held

    @property
    def slots_bytes(self) -> int:
        """Memory of the slots that it is lent."""
        return sum(slot.values.nbytes for slot in self.slots)

    @property
    def n_blocks(self) -> int:
        """How many make a push, or a fetch."""
        return len(self.holding.bounds)

    def take_block(self, message: PushBlock) -> int | None:
        """Put a block where it belongs; return how many its slot holds now.

        None says that it was dropped because one before it is missing.

        Raises:
            RemoteProtocolError: no such block can be.
        """
        slot, bounds = self._slot_of(message.sequence), self.holding.bounds
        if self.region:
            raise RemoteProtocolError(
                f"{self.name} sent a block of push {message.sequence}, but its slots "
                f"lie in shared memory ({self.region!r})"
            )
        if message.block_index >= len(bounds):
            raise RemoteProtocolError(
                f"{self.name} sent block {message.block_index} of push "
                f"{message.sequence}; a push has {len(bounds)}"
            )
        start, stop = bounds[message.block_index]
        values, dtype = message.values, slot.values.dtype
        if values.dtype != dtype or values.size != stop - start:
            raise RemoteProtocolError(
                f"{self.name} sent {values.size} elements of {values.dtype} as block "
                f"{message.block_index} of push {message.sequence}; that block has "
                f"{stop - start} of {dtype}"
            )
        slot.lend(message.sequence)
        if message.block_index > slot.received:
            return None
        if message.block_index == slot.received:
            slot.values[start:stop] = values
            slot.received += 1
        return slot.received

    def take_push(self, message: Push) -> PushBuffer:
        """Note that a push is made; return its slot, with the first such message.

        Raises:
            RemoteProtocolError: no such push can be.
        """
        slot = self._slot_of(message.sequence)
        slot.lend(message.sequence)
        if slot.push is None:
            slot.push = message
        return slot

    def next_complete(self) -> PushBuffer | None:
        """Return the slot of push watermark + 1 if it is complete."""
        if not self.slots:
            return None
        slot = self.slots[(self.watermark + 1) % N_SLOTS]
        if slot.sequence != self.watermark + 1 or slot.push is None:
            return None
        return slot if self.region or slot.received == self.n_blocks else None

    def count_applied(self, push: Push, *, staleness: int, held: bool) -> None:
        """`push` is in the values; it is `held` if nobody is to know of it yet."""
        self.watermark = max(self.watermark, push.sequence)
        self.applied += 1
        self.samples = push.samples
        self.staleness = staleness
        if held:
            self.n_held += 1
        else:
            self.told_staleness = staleness

    def settle(self, *, staleness: int) -> None:
        """The oldest push that is held, of that staleness, is held no longer."""
        assert self.n_held > 0, self
        self.n_held -= 1
        self.told_staleness = staleness

    def _slot_of(self, sequence: int) -> PushBuffer:
        if not self.slots:
            raise RemoteProtocolError(
                f"{self.name} pushes, but said at the handshake that it would not"
            )
        if not self.watermark < sequence <= self.told + N_SLOTS:
            raise RemoteProtocolError(
                f"{self.name} sent push {sequence}; its slots have room for pushes "
                f"{self.watermark + 1} to {self.told + N_SLOTS}"
            )
        return self.slots[sequence % N_SLOTS]


_N_RECENT = 1024


@final
class Staleness:
    """Mean and maximum over all pushes, 95th percentile over the recent 1024."""

    def __init__(self) -> None:
        self._n = 0
        self._sum = 0
        self._max = 0
        self._recent: deque[int] = deque(maxlen=_N_RECENT)

    def add(self, staleness: int) -> None:
        """Count one push."""
        self._n += 1
        self._sum += staleness
        self._max = max(self._max, staleness)
        self._recent.append(staleness)

    def counters(self) -> dict[str, float]:
        """Return mean, p95 and max, under the names that roles report them by."""
        recent = sorted(self._recent)
        p95 = recent[(95 * len(recent) - 1) // 100] if recent else 0
        return {
            "staleness_mean": self._sum / self._n if self._n else 0.0,
            "staleness_p95": float(p95),
            "staleness_max": float(self._max),
        }
