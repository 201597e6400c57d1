"""What a shard knows of one client: two push buffers, and how far its pushes are applied.

    sequence           1   2   3   4   5   6
                       [ applied  ]  |   |       watermark = 3
    buffer s mod 2                   0   1       room for watermark + 1 and + 2 only

A push is applied when its buffer is complete and its sequence is watermark + 1. So the pushes of
a client are applied in order, each at most once.
"""

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


# --- push buffers ---

Bounds = Sequence[tuple[int, int]]  # (start, stop) of each block of a vector

N_PUSH_BUFFERS = 2


def push_buffer_bytes(n_elements: int, *, itemsize: int) -> int:
    """Return the size of a region of two push buffers; never 0, which no region can have."""
    return max(N_PUSH_BUFFERS * n_elements * itemsize, 64)


def push_buffer_views(
    region: Region, *, n_elements: int, dtype: np.dtype[Element]
) -> tuple[Vector, Vector]:
    """Return both push buffers of a region, each (n_elements,).

    Raises:
        RemoteProtocolError: The region has another size.
    """
    n_bytes = push_buffer_bytes(n_elements, itemsize=dtype.itemsize)
    if region.nbytes != n_bytes:
        raise RemoteProtocolError(
            f"a region of push buffers has {region.nbytes} bytes, not the {n_bytes} of "
            f"{N_PUSH_BUFFERS} times {n_elements} elements of {dtype}: use one layout"
        )
    whole = region[: N_PUSH_BUFFERS * n_elements * dtype.itemsize].view(dtype)
    return whole[:n_elements], whole[n_elements:]


@final
@dataclass(slots=True, eq=False)
class PushBuffer:
    values: Vector  # (n_elements,) of what the client holds: gradient, then buffers
    sequence: int = 0  # of the push in it; 0 for none
    received: int = 0  # blocks [0, received) are in it
    n_elements: int = 0  # of those blocks, on a backup
    push: Push | None = None  # set when it has come

    def lend(self, sequence: int) -> None:
        """Reuse the buffer for push `sequence`, unless it already holds that push."""
        if self.sequence != sequence:
            self.sequence, self.received, self.push = sequence, 0, None
            self.n_elements = 0


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client, as a shard sees it. Invalid messages raise RemoteProtocolError."""

    name: Address
    incarnation: int  # the client's current incarnation
    watermark: int = 0  # no push up to it is applied from now on. It only rises
    applied: int = 0  # pushes of this incarnation in the values
    samples: int = 0  # the client's total in the last applied push, of any incarnation
    staleness: int = 0  # of the last applied push
    n_unconfirmed: int = 0  # last pushes that are applied here but not yet on the backup
    confirmed_staleness: int = 0  # staleness of the last push that both copies have
    # Whether this incarnation has opened a session with this shard incarnation.
    opened: bool = False
    connected: bool = True  # whether the client is there, as far as the shard knows
    shard_slice: ShardSlice = NOTHING  # what it fetches and pushes of the shard's vector
    # Two if it pushes, none if it only fetches.
    push_buffers: tuple[PushBuffer, ...] = field(default=())
    region: str = ""  # where they lie; "" for memory of the shard that blocks fill
    parameters_region: str = ""  # where it can read the values; "" for blocks only
    queued: bool = False  # whether it is in the queue of complete pushes
    request: int = 0  # its latest fetch
    expired: int = 0  # the latest fetch whose pin expired

    @classmethod
    def of(cls, record: SessionRecord) -> "Session":
        return cls(
            name=Address(record.name),
            incarnation=record.incarnation,
            watermark=record.watermark,
            applied=record.applied,
            samples=record.samples,
            staleness=record.staleness,
            confirmed_staleness=record.staleness,
        )

    @property
    def record(self) -> SessionRecord:
        return SessionRecord(
            name=self.name,
            incarnation=self.incarnation,
            watermark=self.watermark,
            applied=self.applied,
            samples=self.samples,
            staleness=self.staleness,
        )

    @property
    def confirmed(self) -> int:
        return self.watermark - self.n_unconfirmed

    @property
    def push_buffer_nbytes(self) -> int:
        return sum(push_buffer.values.nbytes for push_buffer in self.push_buffers)

    @property
    def n_blocks(self) -> int:
        return len(self.shard_slice.bounds)

    def take_block(self, message: PushBlock) -> int | None:
        """Store a block; return how many its buffer holds, or None if an earlier one is missing."""
        push_buffer, bounds = self._push_buffer_of(message.sequence), self.shard_slice.bounds
        if self.region:
            raise RemoteProtocolError(
                f"{self.name} sent a block of push {message.sequence}, but its push buffers "
                f"are in shared memory ({self.region!r})"
            )
        if message.block_index >= len(bounds):
            raise RemoteProtocolError(
                f"{self.name} sent block {message.block_index} of push "
                f"{message.sequence}; a push has {len(bounds)}"
            )
        start, stop = bounds[message.block_index]
        values, dtype = message.values, push_buffer.values.dtype
        if values.dtype != dtype or values.size != stop - start:
            raise RemoteProtocolError(
                f"{self.name} sent {values.size} elements of {values.dtype} as block "
                f"{message.block_index} of push {message.sequence}; that block has "
                f"{stop - start} of {dtype}"
            )
        push_buffer.lend(message.sequence)
        # Blocks are stored in order; the client resends from the first missing one.
        if message.block_index > push_buffer.received:
            return None
        if message.block_index == push_buffer.received:
            push_buffer.values[start:stop] = values
            push_buffer.received += 1
        return push_buffer.received

    def take_push(self, message: Push) -> PushBuffer:
        push_buffer = self._push_buffer_of(message.sequence)
        push_buffer.lend(message.sequence)
        if push_buffer.push is None:
            push_buffer.push = message
        return push_buffer

    def next_complete(self) -> PushBuffer | None:
        if not self.push_buffers:
            return None
        push_buffer = self.push_buffers[(self.watermark + 1) % N_PUSH_BUFFERS]
        if push_buffer.sequence != self.watermark + 1 or push_buffer.push is None:
            return None
        # In shared memory the client has filled the buffer before it sends Push.
        return push_buffer if self.region or push_buffer.received == self.n_blocks else None

    def count_applied(self, push: Push, *, staleness: int, held: bool) -> None:
        """Note that `push` is in the values; `held` if the backup does not have it yet."""
        self.watermark = max(self.watermark, push.sequence)
        self.applied += 1
        self.samples = push.samples
        self.staleness = staleness
        if held:
            self.n_unconfirmed += 1
        else:
            self.confirmed_staleness = staleness

    def confirm(self, *, staleness: int) -> None:
        assert self.n_unconfirmed > 0, self
        self.n_unconfirmed -= 1
        self.confirmed_staleness = staleness

    def _push_buffer_of(self, sequence: int) -> PushBuffer:
        if not self.push_buffers:
            raise RemoteProtocolError(f"{self.name} pushes, but its OpenSession has pushes = false")
        # An unconfirmed push keeps its buffer, because the backup may still read it there.
        if not self.watermark < sequence <= self.confirmed + N_PUSH_BUFFERS:
            raise RemoteProtocolError(
                f"{self.name} sent push {sequence}; its buffers have room for pushes "
                f"{self.watermark + 1} to {self.confirmed + N_PUSH_BUFFERS}"
            )
        return self.push_buffers[sequence % N_PUSH_BUFFERS]


_N_RECENT = 1024


@final
class Staleness:
    """Staleness of pushes: mean and maximum of all, 95th percentile of the last 1024.

    The staleness of a push is the shard's clock when the push is applied, minus its clock when the
    parameters were fetched.
    """

    def __init__(self) -> None:
        self._n = 0
        self._sum = 0
        self._max = 0
        self._recent: deque[int] = deque(maxlen=_N_RECENT)

    def add(self, staleness: int) -> None:
        self._n += 1
        self._sum += staleness
        self._max = max(self._max, staleness)
        self._recent.append(staleness)

    def counters(self) -> dict[str, float]:
        recent = sorted(self._recent)
        p95 = recent[(95 * len(recent) - 1) // 100] if recent else 0
        return {
            "staleness_mean": self._sum / self._n if self._n else 0.0,
            "staleness_p95": float(p95),
            "staleness_max": float(self._max),
        }
