"""Fetches by blocks: each one reads one pinned version of the values.

    Fetch -> wait for a version -> blocks, FetchAck, ..., FetchAck

A fetch never mixes two versions: once its pin has ended it is not served again. If the pin
expired, the client gets `SessionRefused` and fetches anew.
"""

from typing import final

from distbelief.core.vectors import Vector
from distbelief.parameter_server.pinned_versions import PinnedVersions, Version
from distbelief.parameter_server.session_state import Session
from distbelief.parameter_server.sessions import Replies, SessionTable
from distbelief.protocol import Fetch, FetchAck
from distbelief.roles.role import Action, Address, Seconds, SetTimer


_PIN = "lease:"


@final
class FetchHandler:
    def __init__(self, clients: SessionTable, replies: Replies, pins: PinnedVersions) -> None:
        self._clients = clients
        self._replies = replies
        self._pins = pins
        self._copying: Version | None = None
        self._bytes_out = 0

    @property
    def bytes_out(self) -> int:
        return self._bytes_out

    @property
    def wants_copy(self) -> bool:
        return self._pins.wants_copy

    def begin_copy(self) -> Vector:
        self._copying = self._pins.begin_copy()
        return self._copying.values

    def end_copy(self, *, clock: int, now: Seconds) -> list[Action]:
        assert self._copying is not None
        version, self._copying = self._copying, None
        actions: list[Action] = []
        for reader in self._pins.end_copy(version, clock=clock, now=now):
            actions += self._begin(reader)
        return actions

    def fetch(self, client: Session, message: Fetch, *, clock: int, now: Seconds) -> list[Action]:
        """Start a fetch, or handle a repeated request."""
        name = client.name
        if message.request < client.request:
            return []
        if message.request > client.request:
            client.request = message.request
            lends = self._pins.ask(
                name, message, shard_slice=client.shard_slice, clock=clock, now=now
            )
            return self._begin(name) if lends else []
        if self._pins.waits(name):
            return [self._replies.session_opened(client, clock=clock)]  # a sign of life
        if self._pins.get(name) is None:
            return self._answer_ended(client)
        self._pins.restart(name)
        return self._blocks(name)

    def ack(self, client: Session, message: FetchAck, *, now: Seconds) -> list[Action]:
        if message.request != client.request:
            return []
        if self._pins.get(client.name) is None:
            return self._answer_ended(client)
        n_blocks = client.n_blocks
        self._pins.ack(client.name, message, n_blocks=n_blocks, now=now)
        return self._blocks(client.name)

    def timer(self, name: str, now: Seconds) -> list[Action]:
        client = self._clients.get(Address(name.removeprefix(_PIN)))
        pin = None if client is None else self._pins.get(client.name)
        if client is None or pin is None:
            return []
        if now < pin.expires:
            return [SetTimer(name=name, at=pin.expires)]
        self.expire(client)
        return []

    def expire(self, client: Session) -> None:
        """End the client's fetch, and tell the client if it comes back."""
        client.expired = client.request
        self._pins.expire(client.name)

    def end(self, name: Address) -> None:
        self._pins.end(name)

    def _answer_ended(self, client: Session) -> list[Action]:
        # The client ended this fetch itself; the message is a late copy.
        if client.expired != client.request:
            return []
        reason = f"fetch {client.request} expired without progress: fetch again"
        return [self._replies.refuse(client.name, reason)]

    def _begin(self, name: Address) -> list[Action]:
        pin = self._pins.get(name)
        assert pin is not None, name
        timer = SetTimer(name=f"{_PIN}{name}", at=pin.expires)
        return [timer, *self._blocks(name)]

    def _blocks(self, name: Address) -> list[Action]:
        actions: list[Action] = []
        pin = self._pins.get(name)
        if pin is not None:
            for index, values in pin.blocks():
                self._bytes_out += values.nbytes
                actions.append(self._replies.block(name, pin, index, values))
        return actions
