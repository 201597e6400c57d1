"""Copies of a shard's values, lent to those who read them block by block.

    values, clock 41   ->   copy (clock 40): replica-3, replica-7 read it
    (updated meanwhile)     copy (clock 38): the evaluator, over a slow link

Rules:

* A lease is of one whole version. Updates go on while it is read.
* There are at most `n_copies` copies. A fetch shares a copy that is of the present
  clock; else it waits, and all that wait share the next copy.
* A lease ends when its reader has every block, fetches anew, is gone, or has made no
  progress for `seconds_max`. The copy is then free once nobody else reads it: it is
  retired, so that a late reader is caught, and used again.
* Blocks on their way are not copied again. Those of a lease that ended mean nothing,
  unless it ended for want of progress: its reader may still take them. Then the copy's
  memory is left to them, and another is used from then on.
* Blocks go out in order, at most `CREDIT_BLOCKS_MAX` beyond those received.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from distbelief.core.memory import Memory
from distbelief.core.vectors import Element, Vector
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server.slices import ShardSlice
from distbelief.protocol import Fetch, FetchAck
from distbelief.roles.role import Address, Seconds


CREDIT_BLOCKS_MAX = 64
"""Blocks under way to one reader, whatever it asks for."""


@final
@dataclass(slots=True, eq=False)
class Version:
    """One version of the values."""

    values: Vector  # (shard_size,)
    clock: int = 0
    n_readers: int = 0
    filling: bool = False
    is_on_its_way: bool = False  # to a reader whose lease has ended


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Pin:
    """One reader of a copy."""

    copy: Version
    holding: ShardSlice  # what the reader wants of it
    request: int
    limit: int  # blocks [0, limit) may be sent
    expires: Seconds
    received: int = 0  # blocks [0, received) have arrived
    sent: int = 0  # blocks [0, sent) were sent

    def blocks(self) -> Iterator[tuple[int, Vector]]:
        """Yield (block index, values) of each block that may be sent now."""
        n_blocks = len(self.holding.bounds)
        limit = min(self.limit, self.received + CREDIT_BLOCKS_MAX, n_blocks)
        while self.sent < limit:
            yield self.sent, self.holding.block(self.copy.values, self.sent)
            self.sent += 1


@final
class PinnedVersions:
    """All copies of one shard's values and their readers."""

    def __init__(
        self,
        *,
        n_elements: int,
        dtype: np.dtype[Element],
        n_copies: int,
        seconds_max: Seconds,
        memory: Memory,
    ) -> None:
        self._n_elements = n_elements
        self._dtype = dtype
        self._n_copies = n_copies
        self._seconds_max = seconds_max
        self._memory = memory
        self._copies: list[Version] = []
        self._leases: dict[Address, Pin] = {}
        self._waiting: dict[Address, tuple[Fetch, ShardSlice]] = {}

    @property
    def n_copies(self) -> int:
        """How many copies there are, lent or free."""
        return len(self._copies)

    @property
    def wants_copy(self) -> bool:
        """Does a fetch wait, and is there a copy to be filled for it?"""
        return bool(self._waiting) and (
            len(self._copies) < self._n_copies or self._free() is not None
        )

    def waits(self, client: Address) -> bool:
        """Return whether a fetch of this client waits for a copy."""
        return client in self._waiting

    def get(self, client: Address) -> Pin | None:
        """Return the lease of this client, if it has one."""
        return self._leases.get(client)

    def ask(
        self, client: Address, fetch: Fetch, *, holding: ShardSlice, clock: int, now: Seconds
    ) -> Pin | None:
        """Return a lease for a new fetch, or None and let it wait for a copy."""
        self.end(client)
        for copy in self._copies:
            if copy.n_readers and copy.clock == clock and not copy.filling:
                return self._lend(client, fetch, copy, holding=holding, now=now)
        self._waiting[client] = fetch, holding
        return None

    def begin_copy(self) -> Version:
        """Return a copy to be filled; call only if `wants_copy`."""
        copy = self._free()
        if copy is None:
            assert len(self._copies) < self._n_copies, self._n_copies
            copy = Version(np.zeros(self._n_elements, self._dtype))
            self._copies.append(copy)
        copy.filling = True
        return copy

    def end_copy(self, copy: Version, *, clock: int, now: Seconds) -> list[Address]:
        """Lend the filled copy to all that wait; return who they are."""
        copy.filling = False
        copy.clock = clock
        waiting, self._waiting = self._waiting, {}
        for client, (fetch, holding) in waiting.items():
            self._lend(client, fetch, copy, holding=holding, now=now)
        if not waiting:  # they left while it was being filled
            self._memory.retire(copy.values)
        return list(waiting)

    def credit(self, client: Address, message: FetchAck, *, n_blocks: int, now: Seconds) -> None:
        """Note what the reader holds; end its lease if that is everything.

        Raises:
            RemoteProtocolError: it claims more than there is.
        """
        lease = self._leases[client]
        if message.received > n_blocks:
            raise RemoteProtocolError(
                f"{client} claims {message.received} blocks of a fetch of {n_blocks}"
            )
        if message.received == n_blocks:
            self.end(client)
            return
        if message.received < lease.received:
            return  # overtaken by a later one
        if message.received > lease.received:
            lease.received = message.received
            lease.expires = now + self._seconds_max
        lease.limit = max(lease.limit, message.limit)
        lease.sent = message.received if message.again else max(lease.sent, message.received)

    def restart(self, client: Address) -> None:
        """The reader asked for this fetch again: unless it has some blocks, resend."""
        lease = self._leases[client]
        if lease.received == 0:
            lease.sent = 0

    def expire(self, client: Address) -> None:
        """End this client's lease or wait; it may still take what is on its way."""
        lease = self._leases.get(client)
        if lease is not None:
            lease.copy.is_on_its_way = True
        self.end(client)

    def end(self, client: Address) -> None:
        """End this client's lease or wait, if it has one."""
        self._waiting.pop(client, None)
        lease = self._leases.pop(client, None)
        if lease is not None:
            lease.copy.n_readers -= 1
            if lease.copy.n_readers == 0:
                self._retire(lease.copy)

    def _lend(
        self, client: Address, fetch: Fetch, copy: Version, *, holding: ShardSlice, now: Seconds
    ) -> Pin:
        copy.n_readers += 1
        lease = Pin(
            copy=copy,
            holding=holding,
            request=fetch.request,
            limit=fetch.credit,
            expires=now + self._seconds_max,
        )
        self._leases[client] = lease
        return lease

    def _retire(self, copy: Version) -> None:
        if copy.is_on_its_way:
            copy.values = np.zeros_like(copy.values)
            copy.is_on_its_way = False
        self._memory.retire(copy.values)

    def _free(self) -> Version | None:
        for copy in self._copies:
            if copy.n_readers == 0 and not copy.filling:
                return copy
        return None
