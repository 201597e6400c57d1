"""Pinned versions: copies of a shard's values that readers fetch block by block.

    values, clock 41      ->  version (clock 40): read by replica-3, replica-7
    (updated meanwhile)       version (clock 38): read by the evaluator over a slow link

A pin keeps one whole version while updates go on. There are at most `n_copies` versions. A fetch
shares a version of the current clock; otherwise it waits, and all waiting fetches share the next
version. A pin ends when its reader has every block, fetches again, is gone, or makes no progress
for `seconds_max`.
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
"""Limit of the blocks under way to one reader."""


@final
@dataclass(slots=True, eq=False)
class Version:
    values: Vector  # (shard_size,)
    clock: int = 0
    n_readers: int = 0
    filling: bool = False
    in_flight: bool = False  # blocks are under way to a reader whose pin has expired


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Pin:
    version: Version
    shard_slice: ShardSlice  # what the reader wants of it
    request: int
    limit: int  # blocks [0, limit) may be sent
    expires: Seconds
    received: int = 0  # blocks [0, received) have arrived
    sent: int = 0  # blocks [0, sent) were sent

    def blocks(self) -> Iterator[tuple[int, Vector]]:
        """Yield (block index, values) of each block that may be sent now."""
        n_blocks = len(self.shard_slice.bounds)
        limit = min(self.limit, self.received + CREDIT_BLOCKS_MAX, n_blocks)
        while self.sent < limit:
            yield self.sent, self.shard_slice.block(self.version.values, self.sent)
            self.sent += 1


@final
class PinnedVersions:
    """All versions of one shard's values, and their readers."""

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
        self._versions: list[Version] = []
        self._pins: dict[Address, Pin] = {}
        self._waiting: dict[Address, tuple[Fetch, ShardSlice]] = {}

    @property
    def n_copies(self) -> int:
        return len(self._versions)

    @property
    def wants_copy(self) -> bool:
        return bool(self._waiting) and (
            len(self._versions) < self._n_copies or self._free() is not None
        )

    def waits(self, client: Address) -> bool:
        return client in self._waiting

    def get(self, client: Address) -> Pin | None:
        return self._pins.get(client)

    def ask(
        self, client: Address, fetch: Fetch, *, shard_slice: ShardSlice, clock: int, now: Seconds
    ) -> Pin | None:
        """Return a pin for a new fetch, or None if the fetch waits for a version."""
        self.end(client)
        for version in self._versions:
            if version.n_readers and version.clock == clock and not version.filling:
                return self._pin(client, fetch, version, shard_slice=shard_slice, now=now)
        self._waiting[client] = fetch, shard_slice
        return None

    def begin_copy(self) -> Version:
        version = self._free()
        if version is None:
            assert len(self._versions) < self._n_copies, self._n_copies
            version = Version(np.zeros(self._n_elements, self._dtype))
            self._versions.append(version)
        version.filling = True
        return version

    def end_copy(self, version: Version, *, clock: int, now: Seconds) -> list[Address]:
        """Pin the filled version for all waiting readers; return their names."""
        version.filling = False
        version.clock = clock
        waiting, self._waiting = self._waiting, {}
        for client, (fetch, shard_slice) in waiting.items():
            self._pin(client, fetch, version, shard_slice=shard_slice, now=now)
        if not waiting:  # the readers left meanwhile
            self._memory.retire(version.values)
        return list(waiting)

    def ack(self, client: Address, message: FetchAck, *, n_blocks: int, now: Seconds) -> None:
        """Note what the reader has; end its pin if it has everything."""
        pin = self._pins[client]
        if message.received > n_blocks:
            raise RemoteProtocolError(
                f"{client} claims {message.received} blocks of a fetch of {n_blocks}"
            )
        if message.received == n_blocks:
            self.end(client)
            return
        if message.received < pin.received:
            return  # overtaken by a later one
        if message.received > pin.received:
            pin.received = message.received
            pin.expires = now + self._seconds_max
        pin.limit = max(pin.limit, message.limit)
        pin.sent = message.received if message.again else max(pin.sent, message.received)

    def restart(self, client: Address) -> None:
        """Resend all blocks if the reader, which repeats its request, has none."""
        pin = self._pins[client]
        if pin.received == 0:
            pin.sent = 0

    def expire(self, client: Address) -> None:
        """End this client's pin or wait; blocks under way stay valid."""
        pin = self._pins.get(client)
        if pin is not None:
            pin.version.in_flight = True
        self.end(client)

    def end(self, client: Address) -> None:
        self._waiting.pop(client, None)
        pin = self._pins.pop(client, None)
        if pin is not None:
            pin.version.n_readers -= 1
            if pin.version.n_readers == 0:
                self._retire(pin.version)

    def _pin(
        self,
        client: Address,
        fetch: Fetch,
        version: Version,
        *,
        shard_slice: ShardSlice,
        now: Seconds,
    ) -> Pin:
        version.n_readers += 1
        pin = Pin(
            version=version,
            shard_slice=shard_slice,
            request=fetch.request,
            limit=fetch.credit,
            expires=now + self._seconds_max,
        )
        self._pins[client] = pin
        return pin

    def _retire(self, version: Version) -> None:
        if version.in_flight:
            # The expired reader may still copy from the old memory, so leave that memory to it.
            version.values = np.zeros_like(version.values)
            version.in_flight = False
        self._memory.retire(version.values)

    def _free(self) -> Version | None:
        for version in self._versions:
            if version.n_readers == 0 and not version.filling:
                return version
        return None
