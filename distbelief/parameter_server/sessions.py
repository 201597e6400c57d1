"""The table of a shard's sessions, and the replies to clients.

A session holds what the shard knows of one client: its incarnation, watermark, push buffers and
the part of the shard that it reads and writes.
"""

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


# --- sessions ---


@final
class SessionTable:
    """All clients that one shard incarnation knows, at most `n_clients_max`.

    OpenSession may come repeatedly and late. It only raises the watermark and never takes away push
    buffers in use. A new incarnation of a client drops the buffers of the old one; only `samples`
    stays. A client that is gone keeps its buffers for a while, because it may only be cut off.
    """

    def __init__(
        self,
        identity: ShardIdentity,
        *,
        slice_table: SliceTable,
        memory: Memory,
        n_clients_max: int,
    ) -> None:
        self._fingerprint = identity.layout.fingerprint
        self._slice_table = slice_table
        self._n_gradient = identity.layout.n_gradient(identity.index)
        self._memory = memory
        self._n_clients_max = n_clients_max
        self._clients: dict[Address, Session] = {}
        self._n_regions = 0

    def restore(self, clients: Iterable[Session]) -> None:
        self._clients = {client.name: client for client in clients}

    def all(self) -> tuple[Session, ...]:
        return tuple(self._clients.values())

    @property
    def n_connected(self) -> int:
        return sum(c.opened and c.connected for c in self._clients.values())

    @property
    def push_buffer_nbytes(self) -> int:
        return sum(client.push_buffer_nbytes for client in self._clients.values())

    def n_averaged(self, shard_slice: ShardSlice) -> int:
        """Return over how many clients the buffers of this part are averaged.

        It is the largest number of pushing clients that hold one and the same buffer element. The
        ranks of a partitioned replica hold each element once, so they count as one client.
        """
        pushing = [
            client.shard_slice
            for client in self.all()
            if client.opened and client.connected and client.push_buffers
        ]
        if all(other.key == shard_slice.key for other in pushing):
            return len(pushing)
        buffers = (self._n_gradient, self._slice_table.whole.n_elements)
        inner = shard_slice.within(*buffers)
        all_ranges = [inner, *(other.within(*buffers) for other in pushing)]
        ends = [end for one in all_ranges for end in (one.starts, one.stops)]
        bounds = np.unique(np.concatenate(ends))
        if not inner.n_elements:
            return len(pushing)
        counts = sum(ranges.mask(bounds).astype(np.int64) for ranges in all_ranges[1:])
        return int(np.max(counts, where=inner.mask(bounds), initial=0))

    def get(self, name: Address) -> Session | None:
        return self._clients.get(name)

    def is_older(self, name: Address, incarnation: int) -> bool:
        client = self._clients.get(name)
        return client is not None and incarnation < client.incarnation

    def why_not(
        self, name: Address, incarnation: int, request: OpenSession, *, steps: StepCounts
    ) -> str | None:
        if request.layout != self._fingerprint:
            return (
                f"your layout is {request.layout}, the shard's {self._fingerprint}: "
                "use the same model and number of shards on both sides"
            )
        try:
            shard_slice = self._slice_table.get(request.holds)
        except RemoteProtocolError as error:
            return f"the elements that you hold are invalid: {error}"
        client = self._clients.get(name)
        if (
            client is not None
            and client.opened
            and client.incarnation == incarnation
            and client.shard_slice.key != shard_slice.key
        ):
            return (
                f"you held {client.shard_slice.n_elements} elements and now hold "
                f"{shard_slice.n_elements} others: restart the client to change what it holds"
            )
        if name not in self._clients and self._is_full and self._oldest_gone is None:
            return (
                f"it serves {len(self._clients)} clients, the limit n_clients_max: "
                "use fewer clients, or raise it"
            )
        return steps.register(shard_slice) if request.pushes else None

    def changes(self, name: Address, incarnation: int, request: OpenSession) -> bool:
        client = self._clients.get(name)
        return (
            client is None
            or incarnation > client.incarnation
            or request.next_sequence - 1 > client.watermark
            or self._needs_push_buffers(client, request)
        )

    def admit(
        self, name: Address, incarnation: int, request: OpenSession, *, region: str
    ) -> tuple[Session, str | None]:
        """Open a session, with push buffers if the client pushes.

        Args:
            name: Name of the client.
            incarnation: Its incarnation, at least the known one.
            request: Its OpenSession.
            region: Prefix of the name of the memory to lend.

        Returns:
            The session, and a warning if shared memory could not be created.
        """
        client = self._clients.get(name)
        # Make room: the oldest absent client becomes unknown.
        if client is None and self._is_full and self._oldest_gone is not None:
            del self._clients[self._oldest_gone]
        if client is None or incarnation > client.incarnation:
            samples, queued = 0, False
            if client is not None:
                # `samples` tells the new incarnation where to resume; the queue holds the name.
                samples, queued = client.samples, client.queued
                self._take_back(client)
            client = Session(name=name, incarnation=incarnation, samples=samples, queued=queued)
            self._clients[name] = client
        client.shard_slice = self._slice_table.get(request.holds)
        warning = None
        if self._needs_push_buffers(client, request):
            self._take_back(client)
            warning = self._lend_push_buffers(client, region, shared=self.shares(request))
        client.opened = client.connected = True
        # A late OpenSession must not lower the watermark.
        client.watermark = max(client.watermark, request.next_sequence - 1)
        return client, warning

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= self._n_clients_max

    @property
    def _oldest_gone(self) -> Address | None:
        # Dicts keep their order: the first client that has neither a session nor a push here.
        return next(
            (
                client.name
                for client in self._clients.values()
                if not (client.opened or client.queued or client.n_unconfirmed)
            ),
            None,
        )

    def shares(self, request: OpenSession) -> bool:
        return bool(request.host) and request.host == self._memory.host

    def take_back(self, client: Session) -> None:
        """Release the push buffers and the pushes in them; the client must open a new session."""
        if client.region:
            self._memory.disown(client.region)  # the client may be alive and still use it
        client.push_buffers, client.region = (), ""
        client.opened = False

    def release(self) -> None:
        for client in self._clients.values():
            self._take_back(client)

    def _needs_push_buffers(self, client: Session, request: OpenSession) -> bool:
        if not request.pushes:
            return False
        # A client without the memory it was lent repeats OpenSession without a host.
        return not client.push_buffers or (bool(client.region) and not self.shares(request))

    def _lend_push_buffers(self, client: Session, region: str, *, shared: bool) -> str | None:
        n_elements, dtype = client.shard_slice.n_elements, client.shard_slice.dtype
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
                warning = f"{client.name} pushes by messages, not shared memory: {error}"
        if memory is None:
            memory = np.zeros(n_bytes, np.uint8)
        views = push_buffer_views(memory, n_elements=n_elements, dtype=dtype)
        client.push_buffers = (PushBuffer(views[0]), PushBuffer(views[1]))
        return warning

    def _take_back(self, client: Session) -> None:
        if client.region:
            self._memory.release(client.region)
        client.push_buffers, client.region = (), ""


@final
class Replies:
    """Replies of one shard incarnation; each carries the shard's incarnation."""

    def __init__(self, *, index: int) -> None:
        self._index = index
        self.incarnation = 0  # incarnation (or term) in the replies; 0 before the shard serves

    def session_opened(self, client: Session, *, clock: int) -> Send:
        return _to(
            client.name,
            SessionOpened(
                shard_incarnation=self.incarnation,
                clock=clock,
                samples=client.samples,
                watermark=client.confirmed,
                applied=client.applied - client.n_unconfirmed,
                parameters_region=client.parameters_region,
                push_buffers_region=client.region,
            ),
        )

    def primary_changed(self, receiver: Address) -> Send:
        """Tell a client of the former primary that this copy serves it now."""
        return _to(receiver, PrimaryChanged(shard_incarnation=self.incarnation))

    def refuse(self, receiver: Address, reason: str, *, for_good: bool = False) -> Send:
        """Refuse with a reason; unless `for_good`, the client opens a session and tries again."""
        text = f"shard {self._index}, incarnation {self.incarnation}: {reason}"
        return _to(receiver, SessionRefused(reason=text, for_good=for_good))

    def push_applied(self, client: Session, *, clock: int) -> Send:
        return _to(
            client.name,
            PushApplied(
                sequence=client.confirmed,
                shard_incarnation=self.incarnation,
                clock=clock,
                staleness=client.confirmed_staleness,
            ),
        )

    def block_ack(self, client: Session, *, sequence: int, received: int) -> Send:
        return _to(
            client.name,
            PushBlockAck(sequence=sequence, shard_incarnation=self.incarnation, received=received),
        )

    def block(self, reader: Address, pin: Pin, index: int, values: Vector) -> Send:
        """Return one block of a pinned version; its memory is lent to the driver."""
        message = ParameterBlock(
            request=pin.request,
            shard_incarnation=self.incarnation,
            block_index=index,
            clock=pin.version.clock,
            values=values,
        )
        return Send(receiver=reader, message=message, lent=True)


def _to(receiver: Address, message: Message) -> Send:
    return Send(receiver=receiver, message=message)
