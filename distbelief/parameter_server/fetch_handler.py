"""A shard's half of the fetch protocol by blocks: requests, and leases on copies.

Rules:

* A request is served from one version only. Once its lease has ended it is never served
  again: blocks of two versions could meet in one fetch. If the lease ended for want of
  progress, the client's next word is answered by `SessionRefused`, and it fetches anew; if the
  client ended it, late copies of its messages mean nothing.
* A fetch that is asked for again while it waits for a copy is answered by `SessionOpened`, a
  sign of life; one that has its lease, by its first blocks if none has arrived.
"""

from typing import final

from distbelief.core.vectors import Vector
from distbelief.parameter_server.pinned_versions import PinnedVersions, Version
from distbelief.parameter_server.session_state import Session
from distbelief.parameter_server.sessions import Replies, SessionTable
from distbelief.protocol import Fetch, FetchAck
from distbelief.roles.role import Action, Address, Seconds, SetTimer


_LEASE = "lease:"


@final
class FetchHandler:
    """All fetches by blocks of one life of a shard."""

    def __init__(self, clients: SessionTable, replies: Replies, leases: PinnedVersions) -> None:
        self._clients = clients
        self._replies = replies
        self._leases = leases
        self._copying: Version | None = None
        self._bytes_out = 0

    @property
    def bytes_out(self) -> int:
        """Bytes of all blocks sent."""
        return self._bytes_out

    @property
    def wants_copy(self) -> bool:
        """Does a fetch wait, and is there a copy to be filled for it?"""
        return self._leases.wants_copy

    def begin_copy(self) -> Vector:
        """Return where to copy the values to."""
        self._copying = self._leases.begin_copy()
        return self._copying.values

    def end_copy(self, *, clock: int, now: Seconds) -> list[Action]:
        """Serve all that wait from the copy just made."""
        assert self._copying is not None
        copy, self._copying = self._copying, None
        actions: list[Action] = []
        for reader in self._leases.end_copy(copy, clock=clock, now=now):
            actions += self._begin(reader)
        return actions

    def fetch(self, client: Session, message: Fetch, *, clock: int, now: Seconds) -> list[Action]:
        """Begin a fetch, or hear once more of one that was begun."""
        name = client.name
        if message.request < client.request:
            return []
        if message.request > client.request:
            client.request = message.request
            lends = self._leases.ask(name, message, holding=client.holding, clock=clock, now=now)
            return self._begin(name) if lends else []
        if self._leases.waits(name):
            return [self._replies.welcome(client, clock=clock)]
        if self._leases.get(name) is None:
            return self._over(client)
        self._leases.restart(name)
        return self._blocks(name)

    def credit(self, client: Session, message: FetchAck, *, now: Seconds) -> list[Action]:
        """Send more blocks, or end the lease."""
        if message.request != client.request:
            return []
        if self._leases.get(client.name) is None:
            return self._over(client)
        n_blocks = client.n_blocks
        self._leases.credit(client.name, message, n_blocks=n_blocks, now=now)
        return self._blocks(client.name)

    def timer(self, name: str, now: Seconds) -> list[Action]:
        """End a lease without progress; wait on for one with."""
        client = self._clients.get(Address(name.removeprefix(_LEASE)))
        lease = None if client is None else self._leases.get(client.name)
        if client is None or lease is None:
            return []
        if now < lease.expires:
            return [SetTimer(name=name, at=lease.expires)]
        self.expire(client)
        return []

    def expire(self, client: Session) -> None:
        """End what the client has begun, and tell it if it comes back."""
        client.expired = client.request
        self._leases.expire(client.name)

    def end(self, name: Address) -> None:
        """End what a former life of this client has begun."""
        self._leases.end(name)

    def _over(self, client: Session) -> list[Action]:
        if client.expired != client.request:
            return []
        reason = f"fetch {client.request} has ended, without progress: fetch anew"
        return [self._replies.refuse(client.name, reason)]

    def _begin(self, name: Address) -> list[Action]:
        lease = self._leases.get(name)
        assert lease is not None, name
        timer = SetTimer(name=f"{_LEASE}{name}", at=lease.expires)
        return [timer, *self._blocks(name)]

    def _blocks(self, name: Address) -> list[Action]:
        """Send what may be sent now."""
        actions: list[Action] = []
        lease = self._leases.get(name)
        if lease is not None:
            for index, values in lease.blocks():
                self._bytes_out += values.nbytes
                actions.append(self._replies.block(name, lease, index, values))
        return actions
