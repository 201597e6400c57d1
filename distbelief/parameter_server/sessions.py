"""What a shard says to its clients; every reply carries the shard's incarnation."""

from collections.abc import Iterable
from typing import final

import numpy as np

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.errors import RemoteProtocolError, StorageError
from distbelief.parameter_server.checkpoint import ShardIdentity
from distbelief.parameter_server.optimizers import StepCounts
from distbelief.parameter_server.pinned_versions import Pin
from distbelief.parameter_server.session_state import (
    PushBuffer,
    Session,
    push_buffer_bytes,
    push_buffer_views,
)
from distbelief.parameter_server.slices import ShardSlice, SliceTable
from distbelief.protocol import (
    Message,
    OpenSession,
    ParameterBlock,
    PrimaryChanged,
    PushApplied,
    PushBlockAck,
    SessionOpened,
    SessionRefused,
)
from distbelief.roles.role import Address, Send


# The clients of one shard: their lives, and the memory lent to each.
#
# Rules:
#
# * A Hello may come any number of times, and late: it only raises the watermark, and it
#   never takes away slots that are in use. A client that could not reach the memory it
#   was lent says Hello again, without a host, and pushes by blocks from then on.
# * A new incarnation drops the older one's slots, and what waited in them; only `samples`
#   stays. An older incarnation is a stranger: an answer would reach its successor.
# * What a snapshot tells of a client counts once that very incarnation says Hello.
# * At most `n_clients_max` are known, each with two slots of the size of what it holds
#   if it pushes. One that is gone keeps them for a while: it may only have been cut off.
#   Then they are taken back; how far it has come stays known, and Hello lends it others.
# * Where all are known that may be, one that is gone for so long, and was first known
#   before all other such ones, makes room for a new one: it is a stranger from then on.
# * What a client holds is the same as long as it lives.


@final
class SessionTable:
    """All clients that one life of a shard knows."""

    def __init__(
        self, identity: ShardIdentity, *, holdings: SliceTable, memory: Memory, n_clients_max: int
    ) -> None:
        self._fingerprint = identity.layout.fingerprint
        self._holdings = holdings
        self._n_gradient = identity.layout.n_gradient(identity.index)
        self._memory = memory
        self._n_clients_max = n_clients_max
        self._clients: dict[Address, Session] = {}
        self._n_regions = 0

    def restore(self, clients: Iterable[Session]) -> None:
        """Know those that a snapshot tells of; none has said Hello yet."""
        self._clients = {client.name: client for client in clients}

    def all(self) -> tuple[Session, ...]:
        """Return every client known."""
        return tuple(self._clients.values())

    @property
    def n_present(self) -> int:
        """How many said Hello and are not gone."""
        return sum(c.greeted and c.present for c in self._clients.values())

    @property
    def slots_bytes(self) -> int:
        """Memory of all slots that are lent."""
        return sum(client.slots_bytes for client in self._clients.values())

    def n_averaged(self, holding: ShardSlice) -> int:
        """Over how many of those buffers are averaged that are pushed by one of them.

        That is how many push: as many as hold one element of these buffers, at the
        most. Of replicas of several machines each holds every element once.
        """
        pushing = [
            client.holding
            for client in self.all()
            if client.greeted and client.present and client.slots
        ]
        if all(other.key == holding.key for other in pushing):
            return len(pushing)
        buffers = (self._n_gradient, self._holdings.whole.n_elements)
        inner = holding.within(*buffers)
        all_ranges = [inner, *(other.within(*buffers) for other in pushing)]
        ends = [end for one in all_ranges for end in (one.starts, one.stops)]
        bounds = np.unique(np.concatenate(ends))
        if not inner.n_elements:
            return len(pushing)
        counts = sum(ranges.marks(bounds).astype(np.int64) for ranges in all_ranges[1:])
        return int(np.max(counts, where=inner.marks(bounds), initial=0))

    def get(self, name: Address) -> Session | None:
        """Return the client of this name, of whatever incarnation."""
        return self._clients.get(name)

    def is_older(self, name: Address, incarnation: int) -> bool:
        """Return whether this is an earlier life of a client known here."""
        client = self._clients.get(name)
        return client is not None and incarnation < client.incarnation

    def why_not(
        self, name: Address, incarnation: int, hello: OpenSession, *, steps: StepCounts
    ) -> str | None:
        """Return why this client can never be welcome, if so."""
        if hello.layout != self._fingerprint:
            return (
                f"your layout is {hello.layout}, the shard's {self._fingerprint}: "
                "use the same model and number of shards on both sides"
            )
        try:
            holding = self._holdings.get(hello.holds)
        except RemoteProtocolError as error:
            return f"what you hold of it cannot be: {error}"
        client = self._clients.get(name)
        if (
            client is not None
            and client.greeted
            and client.incarnation == incarnation
            and client.holding.key != holding.key
        ):
            return (
                f"you held {client.holding.n_elements} elements of it, and now hold "
                f"{holding.n_elements} others: what a client holds is the same as long "
                "as it lives; begin another life of it"
            )
        if name not in self._clients and self._is_full and self._oldest_gone is None:
            return (
                f"it serves {len(self._clients)} clients already, all that "
                "n_clients_max allows: use fewer, or raise it"
            )
        return steps.know(holding) if hello.pushes else None

    def changes(self, name: Address, incarnation: int, hello: OpenSession) -> bool:
        """Return whether this Hello says anything new."""
        client = self._clients.get(name)
        return (
            client is None
            or incarnation > client.incarnation
            or hello.next_sequence - 1 > client.watermark
            or self._needs_slots(client, hello)
        )

    def admit(
        self, name: Address, incarnation: int, hello: OpenSession, *, region: str
    ) -> tuple[Session, str | None]:
        """Know this client, and lend it slots if it pushes.

        Args:
            name: Who it is.
            incarnation: Its life, not older than the one known.
            hello: What it said.
            region: Beginning of the name of the memory to lend it.

        Returns:
            The client, and why it was lent no memory to share, if that is new.
        """
        client = self._clients.get(name)
        if client is None and self._is_full and self._oldest_gone is not None:
            del self._clients[self._oldest_gone]
        if client is None or incarnation > client.incarnation:
            samples, queued = 0, False
            if client is not None:
                samples, queued = client.samples, client.queued  # under this name
                self._take_back(client)
            client = Session(name=name, incarnation=incarnation, samples=samples, queued=queued)
            self._clients[name] = client
        client.holding = self._holdings.get(hello.holds)
        warning = None
        if self._needs_slots(client, hello):
            self._take_back(client)
            warning = self._lend_slots(client, region, shared=self.shares(hello))
        client.greeted = client.present = True
        client.watermark = max(client.watermark, hello.next_sequence - 1)
        return client, warning

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= self._n_clients_max

    @property
    def _oldest_gone(self) -> Address | None:
        """Of those whose slots have been taken back, or who were of a former life."""
        return next(
            (
                client.name
                for client in self._clients.values()
                if not (client.greeted or client.queued or client.n_held)
            ),
            None,
        )

    def shares(self, hello: OpenSession) -> bool:
        """Return whether the client can reach this shard's memory."""
        return bool(hello.host) and hello.host == self._memory.host

    def take_back(self, client: Session) -> None:
        """Take back its slots, and what waits in them; it has to say Hello again."""
        if client.region:
            self._memory.disown(client.region)  # it may be alive, and still use it
        client.slots, client.region = (), ""
        client.greeted = False

    def release(self) -> None:
        """Take back everything that was lent."""
        for client in self._clients.values():
            self._take_back(client)

    def _needs_slots(self, client: Session, hello: OpenSession) -> bool:
        """It has none; or it has some that it cannot reach."""
        if not hello.pushes:
            return False
        return not client.slots or (bool(client.region) and not self.shares(hello))

    def _lend_slots(self, client: Session, region: str, *, shared: bool) -> str | None:
        n_elements, dtype = client.holding.n_elements, client.holding.dtype
        n_bytes = push_buffer_bytes(n_elements, itemsize=dtype.itemsize)
        warning = None
        memory = None
        if shared:
            name = f"{region}-{self._n_regions}"
            self._n_regions += 1
            try:
                memory = self._memory.create(name, n_bytes=n_bytes)
                client.region = name
            except StorageError as error:
                warning = f"{client.name} has to push by messages: {error}"
        if memory is None:
            memory = np.zeros(n_bytes, np.uint8)
        views = push_buffer_views(memory, n_elements=n_elements, dtype=dtype)
        client.slots = (PushBuffer(views[0]), PushBuffer(views[1]))
        return warning

    def _take_back(self, client: Session) -> None:
        if client.region:
            self._memory.release(client.region)
        client.slots, client.region = (), ""


@final
class Replies:
    """Replies of one life of a shard.

    Attributes:
        incarnation: That life; 0 before it has begun.
    """

    def __init__(self, *, index: int) -> None:
        self._index = index
        self.incarnation = 0

    def welcome(self, client: Session, *, clock: int) -> Send:
        """Answer `OpenSession`; also a sign of life for one whose fetch waits."""
        return _to(
            client.name,
            SessionOpened(
                shard_incarnation=self.incarnation,
                clock=clock,
                samples=client.samples,
                watermark=client.told,
                applied=client.applied - client.n_held,
                parameters_region=client.parameters_region,
                slots_region=client.region,
            ),
        )

    def leading(self, receiver: Address) -> Send:
        """Tell a client of the shard's other copy that this one serves it now."""
        return _to(receiver, PrimaryChanged(shard_incarnation=self.incarnation))

    def refuse(self, receiver: Address, reason: str, *, for_good: bool = False) -> Send:
        """Say why not; unless `for_good`, the client says Hello and tries again."""
        text = f"shard {self._index}, incarnation {self.incarnation}: {reason}"
        return _to(receiver, SessionRefused(reason=text, for_good=for_good))

    def acknowledge(self, client: Session, *, clock: int) -> Send:
        """Every push of this client is settled, save those that are held."""
        return _to(
            client.name,
            PushApplied(
                sequence=client.told,
                shard_incarnation=self.incarnation,
                clock=clock,
                staleness=client.told_staleness,
            ),
        )

    def push_credit(self, client: Session, *, sequence: int, received: int) -> Send:
        """That many blocks of this push are here."""
        return _to(
            client.name,
            PushBlockAck(sequence=sequence, shard_incarnation=self.incarnation, received=received),
        )

    def block(self, reader: Address, lease: Pin, index: int, values: Vector) -> Send:
        """One block of the leased version, lent to the driver as well (`leases`)."""
        message = ParameterBlock(
            request=lease.request,
            shard_incarnation=self.incarnation,
            block_index=index,
            clock=lease.copy.clock,
            values=values,
        )
        return Send(receiver=reader, message=message, lent=True)


def _to(receiver: Address, message: Message) -> Send:
    return Send(receiver=receiver, message=message)
