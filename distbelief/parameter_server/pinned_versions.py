"""Fetches by blocks: each one reads one pinned version of the shard's values.

    Fetch -> wait for a version -> blocks, FetchAck, ..., FetchAck

    values, clock 41      ->  version (clock 40): read by replica-3, replica-7
    (updated meanwhile)       version (clock 38): read by the evaluator over a slow link

A pin keeps one whole version while updates go on. There are at most `n_copies` versions. A fetch
shares a version of the current clock; otherwise it waits, and all waiting fetches share the next
version. A pin ends when its reader has every block, fetches again, is gone, or makes no progress
for `pin_seconds_max`. A fetch never mixes two versions: once its pin has ended it is not served
again. If the pin expired, the client gets `SessionRefused` and fetches anew.
"""

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from distbelief.core.memory import Memory
from distbelief.core.reliable import Window
from distbelief.core.vectors import Vector
from distbelief.parameter_server.config import ShardConfig
from distbelief.parameter_server.sessions import Session, Sessions
from distbelief.parameter_server.store import ShardStore
from distbelief.protocol import push_fetch as pf
from distbelief.roles.role import Action, Address, Seconds, Send, SetTimer


CREDIT_BLOCKS_MAX: Final = 64
"""Limit of the blocks under way to one reader."""

_PIN: Final = "lease:"


@final
@dataclass(slots=True, eq=False)
class Version:
    values: Vector  # (shard_size,)
    clock: int = 0
    n_readers: int = 0
    filling: bool = False
    in_flight: bool = False  # blocks are under way to a reader whose pin has expired


@final
@dataclass(slots=True, eq=False)
class Pin:
    version: Version
    client: Session
    blocks: Window
    limit: int  # blocks [0, limit) may be sent
    expires: Seconds


@final
class PinnedVersions:
    """All versions of one shard's values, and their readers."""

    def __init__(
        self, config: ShardConfig, values: ShardStore, sessions: Sessions, *, memory: Memory
    ) -> None:
        self._size = config.layout.shard_size(config.index)
        self._dtype = config.layout.dtype
        self._n_copies = config.n_copies
        self._seconds_max = config.pin_seconds_max
        self._values = values
        self._sessions = sessions
        self._memory = memory
        self._versions: list[Version] = []
        self._pins: dict[Address, Pin] = {}
        self._copying: Version | None = None
        self.waiting: dict[Address, tuple[Session, pf.Fetch]] = {}
        self.bytes_out = 0

    # -------------------------------------------------------------------- messages

    def fetch(self, client: Session, message: pf.Fetch, now: Seconds) -> list[Action]:
        """Start a fetch, or handle a repeated request."""
        name = client.name
        if message.request < client.request:
            return []
        if message.request > client.request:
            client.request = message.request
            self.end(name)
            for version in self._versions:
                is_current = version.clock == self._values.clock and not version.filling
                if version.n_readers and is_current:
                    return self._pin(client, message, version, now)
            self.waiting[name] = client, message
            return []
        if name in self.waiting:
            return [self._sessions.session_opened(client)]  # a sign of life
        pin = self._pins.get(name)
        if pin is None:
            return self._answer_ended(client)
        if pin.blocks.received == 0:  # the reader repeats its request and has nothing
            pin.blocks.again()
        return self._blocks(pin)

    def ack(self, client: Session, message: pf.FetchAck, now: Seconds) -> list[Action]:
        """Note what the reader has, and send what it allows; its pin ends if it has everything."""
        if message.request != client.request:
            return []
        pin = self._pins.get(client.name)
        if pin is None:
            return self._answer_ended(client)
        if pin.blocks.acked(message.received):
            pin.expires = now + self._seconds_max
        if message.received == pin.blocks.n:
            self.end(client.name)
            return []
        if message.received == pin.blocks.received:  # not overtaken by a later one
            pin.limit = max(pin.limit, message.limit)
            if message.again:
                pin.blocks.again()
        return self._blocks(pin)

    def timer(self, name: str, now: Seconds) -> list[Action]:
        pin = self._pins.get(Address(name.removeprefix(_PIN)))
        if pin is None:
            return []
        if now < pin.expires:
            return [SetTimer(name=name, at=pin.expires)]
        self.expire(pin.client)
        return []

    # ---------------------------------------------------------------------- copies

    @property
    def wants_copy(self) -> bool:
        return bool(self.waiting) and (
            len(self._versions) < self._n_copies or self._free() is not None
        )

    def begin_copy(self) -> Vector:
        """Return the memory of a version, to copy the values into."""
        version = self._free()
        if version is None:
            assert len(self._versions) < self._n_copies, self._n_copies
            version = Version(np.zeros(self._size, self._dtype))
            self._versions.append(version)
        version.filling = True
        self._copying = version
        return version.values

    def end_copy(self, now: Seconds) -> list[Action]:
        """Pin the filled version for all waiting readers, and send them blocks."""
        assert self._copying is not None
        version, self._copying = self._copying, None
        version.filling = False
        version.clock = self._values.clock
        waiting, self.waiting = self.waiting, {}
        if not waiting:  # the readers left meanwhile
            self._memory.retire(version.values)
        pins = [self._pin(client, fetch, version, now) for client, fetch in waiting.values()]
        return [action for actions in pins for action in actions]

    def expire(self, client: Session) -> None:
        """End the client's fetch; blocks under way stay valid. It learns of it if it comes back."""
        client.expired = client.request
        pin = self._pins.get(client.name)
        if pin is not None:
            pin.version.in_flight = True
        self.end(client.name)

    def end(self, name: Address) -> None:
        self.waiting.pop(name, None)
        pin = self._pins.pop(name, None)
        if pin is None:
            return
        version = pin.version
        version.n_readers -= 1
        if version.n_readers == 0:
            if version.in_flight:
                # The expired reader may still copy from the old memory: leave that memory to it.
                version.values = np.zeros_like(version.values)
                version.in_flight = False
            self._memory.retire(version.values)

    def _pin(
        self, client: Session, message: pf.Fetch, version: Version, now: Seconds
    ) -> list[Action]:
        version.n_readers += 1
        blocks = Window(client.n_blocks)
        expires = now + self._seconds_max
        pin = self._pins[client.name] = Pin(version, client, blocks, message.credit, expires)
        return [SetTimer(name=f"{_PIN}{client.name}", at=expires), *self._blocks(pin)]

    def _blocks(self, pin: Pin) -> list[Action]:
        client, version, blocks = pin.client, pin.version, pin.blocks
        actions: list[Action] = []
        for index in blocks.due(min(pin.limit - blocks.received, CREDIT_BLOCKS_MAX)):
            values = client.shard_slice.block(version.values, index)
            self.bytes_out += values.nbytes
            message = pf.ParameterBlock(
                request=client.request,
                shard_incarnation=self._sessions.incarnation,
                block_index=index,
                clock=version.clock,
                values=values,
            )
            # The memory of a version is lent to the driver.
            actions.append(Send(receiver=client.name, message=message, lent=True))
        return actions

    def _answer_ended(self, client: Session) -> list[Action]:
        # The client ended this fetch itself; the message is a late copy.
        if client.expired != client.request:
            return []
        reason = f"fetch {client.request} expired without progress: fetch again"
        return [self._sessions.refuse(client.name, reason)]

    def _free(self) -> Version | None:
        for version in self._versions:
            if version.n_readers == 0 and not version.filling:
                return version
        return None
