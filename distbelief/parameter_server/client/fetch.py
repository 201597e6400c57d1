"""Fetches from one shard: from shared memory, or block by block.

    begin --> (shared memory: at once)  -----------------------> complete --> installed
          --> Fetch, blocks in order, FetchAck, ..., FetchAck -->

All blocks of a request have one clock, because the shard pins one version for it. Blocks stay in
the transport's buffers until the install, which copies each number once. If reads of shared memory
are torn for too long, the fetch goes by blocks, so that steady writes cannot starve a reader.
"""

from collections.abc import Sequence
from typing import final

import torch

from distbelief.core.vectors import Vector
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.session_state import Bounds
from distbelief.parameter_server.shared_vector import SeqlockVector
from distbelief.parameter_server.slices import BlockCopier, Copier, SliceCopier
from distbelief.protocol import Fetch, FetchAck, ParameterBlock
from distbelief.roles.role import Seconds


@final
class ShardReader:
    """What one install reads from one shard.

    It keeps its own references, so that a new session meanwhile changes nothing for it.
    """

    def __init__(
        self,
        exchange: Copier | BlockCopier,
        *,
        published: SeqlockVector | None,
        clock: int,
        shard_incarnation: int,
    ) -> None:
        self._exchange = exchange
        self._published = published
        self._clock = clock
        # Incarnation of the shard that the values come from.
        self.shard_incarnation = shard_incarnation

    @property
    def shared(self) -> bool:
        return self._published is not None

    @property
    def readable(self) -> bool:
        return self._published is None or self._published.version % 2 == 0

    def read(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Copy the values into `tensors`; return their clock, or None if the read was torn."""
        if self._published is None:
            self._exchange.scatter(tensors)
            return self._clock
        return self._published.read(lambda: self._exchange.scatter(tensors))


@final
class ShardFetch:
    """The fetches of one client from one shard. Invalid blocks raise RemoteProtocolError."""

    def __init__(self, part: SliceCopier, index: int, *, credit_blocks: int) -> None:
        self._part = part
        self._index = index
        self._credit_blocks = credit_blocks
        self._bounds: Bounds = part.shard_slice.bounds
        self._shard_incarnation = 0
        self._first_clock = 0  # of that incarnation, as far as known
        self._published: SeqlockVector | None = None
        self._shared: Copier | None = None  # of the published values
        self._blocks: list[Vector] = []  # of this request, until they are installed
        self._request = 0
        self._received = 0  # blocks of this request
        self._block_clock = 0
        self._block_incarnation = 0
        self._acked = 0  # blocks of this request the shard was told of
        self._by_blocks = True
        self._torn_since: Seconds | None = None
        self.wanted = False  # a fetch has begun and is not installed
        self.clock = 0  # of the installed values; lowered when the shard restarts
        self.version = 0, 0  # shard incarnation and clock of the installed values
        self.bytes_in = 0  # of received blocks and of installs from shared memory

    def start(self, first_request: int) -> None:
        """Number requests from here: beyond those of any former incarnation."""
        self._request = first_request

    @property
    def received(self) -> int:
        return self._received

    @property
    def complete(self) -> bool:
        if not self.wanted or not self._by_blocks:
            return True
        return self._received == len(self._bounds)

    def session_opened(
        self, published: SeqlockVector | None, *, shard_incarnation: int, clock: int
    ) -> list[Fetch]:
        """Read from this shard incarnation; restart an incomplete fetch."""
        if shard_incarnation != self._shard_incarnation:
            # Staleness is counted within one incarnation of the shard.
            self.clock = min(self.clock, clock)
            self._first_clock = clock
        self._shard_incarnation = shard_incarnation
        if published is not self._published:
            self._published = published
            self._shared = None
            if published is not None:
                self._shared = self._part.copier_in_place(published.values)
        if self.wanted and not (self._by_blocks and self.complete):
            return self._begin(by_blocks=published is None)
        return []

    def lost(self) -> None:
        """Drop an incomplete fetch: the shard is gone until the session opens."""
        if not self.complete or not self._by_blocks:
            self._by_blocks = True
            self._received = 0
            self._blocks.clear()

    def begin(self, *, is_open: bool) -> list[Fetch]:
        self.wanted = True
        self._torn_since = None
        if not is_open:
            self._by_blocks = True
            self._received = 0
            self._blocks.clear()
            return []
        return self._begin(by_blocks=self._published is None)

    def take(self, block: ParameterBlock) -> list[FetchAck]:
        """Keep a block if it is the next one; return the acknowledgement, if one is due."""
        if block.request != self._request or self.complete:
            return []
        n_blocks = len(self._bounds)
        if block.block_index >= n_blocks:
            raise RemoteProtocolError(
                f"shard {self._index} sent block {block.block_index} of a fetch of {n_blocks}"
            )
        # Blocks are kept in order; the shard resends from the first missing one.
        if block.block_index != self._received:
            return []
        start, stop = self._bounds[self._received]
        values, dtype = block.values, self._part.dtype
        if values.dtype != dtype or values.size != stop - start:
            raise RemoteProtocolError(
                f"shard {self._index} sent {values.size} elements of {values.dtype} as "
                f"block {block.block_index}; that block has {stop - start} of {dtype}"
            )
        if self._received and block.clock != self._block_clock:
            raise RemoteProtocolError(
                f"shard {self._index} sent block {block.block_index} of clock "
                f"{block.clock} after blocks of clock {self._block_clock}: a mixture"
            )
        self._block_clock = block.clock
        self._block_incarnation = self._shard_incarnation
        self._blocks.append(values)
        self._received += 1
        self.bytes_in += values.nbytes
        if self._received < n_blocks and (
            self._received - self._acked < max(1, self._credit_blocks // 4)
        ):
            return []
        return [self._ack(again=False)]

    def again(self) -> list[Fetch | FetchAck]:
        """Return the message to repeat after a while without progress."""
        if self.complete:
            return []
        if self._received == 0:
            return [self._fetch()]
        return [self._ack(again=True)]

    def reader(self) -> ShardReader:
        """Return what the install reads; call only if complete."""
        if self._by_blocks:
            return ShardReader(
                self._part.block_copier(tuple(self._blocks)),
                published=None,
                clock=self._block_clock,
                shard_incarnation=self._block_incarnation,
            )
        assert self._shared is not None
        return ShardReader(
            self._shared,
            published=self._published,
            clock=0,
            shard_incarnation=self._shard_incarnation,
        )

    def installed(self, clock: int, reader: ShardReader) -> None:
        self.wanted = False
        self._blocks.clear()
        self.version = reader.shard_incarnation, clock
        if reader.shard_incarnation != self._shard_incarnation:
            clock = min(clock, self._first_clock)
        self.clock = clock
        if reader.shared:
            self.bytes_in += self._part.n_bytes

    def torn(self, now: Seconds, *, seconds_max: Seconds) -> list[Fetch]:
        """Note a torn read; after `seconds_max` of them, fetch by blocks."""
        if self._by_blocks:
            return []  # the shard was lost in the meantime
        if self._torn_since is None:
            self._torn_since = now
        if now - self._torn_since < seconds_max:
            return []
        return self._begin(by_blocks=True)

    def _begin(self, *, by_blocks: bool) -> list[Fetch]:
        self._by_blocks = by_blocks
        self._request += 1
        self._received = self._acked = 0
        self._blocks.clear()
        return [self._fetch()] if by_blocks else []

    def _fetch(self) -> Fetch:
        return Fetch(
            request=self._request,
            shard_incarnation=self._shard_incarnation,
            credit=self._credit_blocks,
        )

    def _ack(self, *, again: bool) -> FetchAck:
        self._acked = self._received
        return FetchAck(
            request=self._request,
            shard_incarnation=self._shard_incarnation,
            received=self._received,
            limit=self._received + self._credit_blocks,
            again=again,
        )
