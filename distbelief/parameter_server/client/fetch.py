"""A client's half of fetching from one shard: from shared memory, or block by block.

    begin --> (shared memory: at once)  -------------------> complete --> installed
          --> Fetch, blocks in order, Credit, ..., Credit -->

Rules:

* Blocks are taken in order; one that is out of order is dropped, and after a while
  without progress the shard is asked to send again from the first one missing.
* All blocks of a request are of one clock: the shard leases one version to it. A new
  request begins whenever the lease may be gone. Blocks of former requests mean nothing.
* Blocks stay where the driver put them until the install, which copies each number
  once, to where it belongs.
* A read of shared memory that keeps being torn gives way to blocks for this fetch: the
  shard then makes a copy, and writes that go on without a pause cannot starve a reader.
"""

from collections.abc import Sequence
from typing import final

import torch

from distbelief.core.vectors import Vector
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.session_state import Bounds
from distbelief.parameter_server.shared_vector import SeqlockVector
from distbelief.parameter_server.slices import BlockCopier, SliceCopier, TensorExchange
from distbelief.protocol import Fetch, FetchAck, ParameterBlock
from distbelief.roles.role import Seconds


@final
class ShardReader:
    """What an install reads: one shard's values, wherever they are. For one install.

    Holds its own references, so that a handshake meanwhile changes nothing under it.

    Attributes:
        shard_incarnation: Whose values they are.
    """

    def __init__(
        self,
        exchange: TensorExchange | BlockCopier,
        *,
        published: SeqlockVector | None,
        clock: int,
        shard_incarnation: int,
    ) -> None:
        self._exchange = exchange
        self._published = published
        self._clock = clock
        self.shard_incarnation = shard_incarnation

    @property
    def shared(self) -> bool:
        """Can the read be torn?"""
        return self._published is not None

    @property
    def readable(self) -> bool:
        """Are the values not being written just now?"""
        return self._published is None or self._published.version % 2 == 0

    def read(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Copy the values into `tensors`; return their clock, None if torn."""
        if self._published is None:
            self._exchange.scatter(tensors)
            return self._clock
        return self._published.read(lambda: self._exchange.scatter(tensors))


@final
class ShardFetch:
    """One client's fetches from one shard.

    Attributes:
        wanted: A fetch was begun and is not yet installed.
        clock: Of the values installed last; lowered when the shard begins a new life.
        version: Their shard's life, and their clock in it.
        bytes_in: Of blocks received and values installed from shared memory.
    """

    def __init__(self, part: SliceCopier, index: int, *, credit_blocks: int) -> None:
        self._part = part
        self._index = index
        self._credit_blocks = credit_blocks
        self._bounds: Bounds = part.holding.bounds
        self._shard_incarnation = 0
        self._first_clock = 0  # of that life, as far as known
        self._published: SeqlockVector | None = None
        self._shared: TensorExchange | None = None  # of the published values
        self._blocks: list[Vector] = []  # of this request, until they are installed
        self._request = 0
        self._received = 0  # blocks of this request
        self._block_clock = 0
        self._block_incarnation = 0
        self._credited = 0  # blocks of this request the shard was told of
        self._by_blocks = True
        self._torn_since: Seconds | None = None
        self.wanted = False
        self.clock = 0
        self.version = 0, 0
        self.bytes_in = 0

    def start(self, first_request: int) -> None:
        """Number requests from here: beyond those of any former life."""
        self._request = first_request

    @property
    def received(self) -> int:
        """Blocks of the present fetch that have come."""
        return self._received

    @property
    def complete(self) -> bool:
        """Nothing more needs to arrive before the fetch can be installed."""
        if not self.wanted or not self._by_blocks:
            return True
        return self._received == len(self._bounds)

    def welcomed(
        self, published: SeqlockVector | None, *, shard_incarnation: int, clock: int
    ) -> list[Fetch]:
        """Read from here from now on; begin again what was not complete."""
        if shard_incarnation != self._shard_incarnation:
            # Staleness is counted within one life of the shard.
            self.clock = min(self.clock, clock)
            self._first_clock = clock
        self._shard_incarnation = shard_incarnation
        if published is not self._published:
            self._published = published
            self._shared = None
            if published is not None:
                self._shared = self._part.exchange_in_place(published.values)
        if self.wanted and not (self._by_blocks and self.complete):
            return self._begin(by_blocks=published is None)
        return []

    def lost(self) -> None:
        """The shard is away: nothing can be begun before it says Welcome."""
        if not self.complete or not self._by_blocks:
            self._by_blocks = True
            self._received = 0
            self._blocks.clear()

    def begin(self, *, welcome: bool) -> list[Fetch]:
        """Fetch anew; if not `welcome`, as soon as that changes."""
        self.wanted = True
        self._torn_since = None
        if not welcome:
            self._by_blocks = True
            self._received = 0
            self._blocks.clear()
            return []
        return self._begin(by_blocks=self._published is None)

    def take(self, block: ParameterBlock) -> list[FetchAck]:
        """Keep a block if it is the next; return word of it for the shard.

        Raises:
            RemoteProtocolError: no such block can be.
        """
        if block.request != self._request or self.complete:
            return []
        n_blocks = len(self._bounds)
        if block.block_index >= n_blocks:
            raise RemoteProtocolError(
                f"shard {self._index} sent block {block.block_index} of a fetch of {n_blocks}"
            )
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
            self._received - self._credited < max(1, self._credit_blocks // 4)
        ):
            return []
        return [self._credit(again=False)]

    def again(self) -> list[Fetch | FetchAck]:
        """Return what to send if nothing has come for a while."""
        if self.complete:
            return []
        if self._received == 0:
            return [self._fetch()]
        return [self._credit(again=True)]

    def reader(self) -> ShardReader:
        """Return what the install is to read; call only if complete."""
        if self._by_blocks:
            return ShardReader(
                self._part.exchange_blocks(tuple(self._blocks)),
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
        """The values that `reader` read, of this clock, are where they belong."""
        self.wanted = False
        self._blocks.clear()
        self.version = reader.shard_incarnation, clock
        if reader.shard_incarnation != self._shard_incarnation:
            clock = min(clock, self._first_clock)
        self.clock = clock
        if reader.shared:
            self.bytes_in += self._part.n_bytes

    def torn(self, now: Seconds, *, seconds_max: Seconds) -> list[Fetch]:
        """The read was torn; after `seconds_max` of that, ask for blocks."""
        if self._by_blocks:
            return []  # the shard was lost meanwhile
        if self._torn_since is None:
            self._torn_since = now
        if now - self._torn_since < seconds_max:
            return []
        return self._begin(by_blocks=True)

    def _begin(self, *, by_blocks: bool) -> list[Fetch]:
        self._by_blocks = by_blocks
        self._request += 1
        self._received = self._credited = 0
        self._blocks.clear()
        return [self._fetch()] if by_blocks else []

    def _fetch(self) -> Fetch:
        return Fetch(
            request=self._request,
            shard_incarnation=self._shard_incarnation,
            credit=self._credit_blocks,
        )

    def _credit(self, *, again: bool) -> FetchAck:
        self._credited = self._received
        return FetchAck(
            request=self._request,
            shard_incarnation=self._shard_incarnation,
            received=self._received,
            limit=self._received + self._credit_blocks,
            again=again,
        )
