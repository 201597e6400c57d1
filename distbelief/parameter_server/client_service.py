"""The clients of a shard: sessions, pushes and fetches.

    OpenSession  -> SessionOpened, or SessionRefused with a reason
    Push, Fetch  -> served in an open session only; otherwise SessionRefused, and the client
                    opens a session and sends again

Messages of an older incarnation of a client are dropped. A backup answers nobody: it keeps the
OpenSession messages until it is promoted. After `close` no client gets an answer.
"""

from collections.abc import Iterable, Mapping
from typing import assert_never, final

from distbelief.core.memory import Memory
from distbelief.core.vectors import block_bounds
from distbelief.parameter_server.config import ShardConfig
from distbelief.parameter_server.fetch_handler import FetchHandler
from distbelief.parameter_server.pinned_versions import PinnedVersions
from distbelief.parameter_server.push_handler import PushHandler
from distbelief.parameter_server.replication import Primary
from distbelief.parameter_server.session_state import Session
from distbelief.parameter_server.sessions import Replies, SessionTable
from distbelief.parameter_server.store import ShardStore
from distbelief.protocol import Fetch, FetchAck, OpenSession, Push, PushBlock
from distbelief.roles.role import Action, Address, PeerLost, Received, Report, Seconds, SetTimer


ClientMessage = Fetch | FetchAck | PushBlock | Push

_ABSENT = "absent:"


@final
class ClientService:
    """All clients of one shard incarnation, and their work in progress."""

    def __init__(self, config: ShardConfig, values: ShardStore, *, memory: Memory) -> None:
        layout, index = config.layout, config.index
        size, dtype = layout.shard_size(index), layout.dtype
        self._name = config.name
        self._incarnation = 0
        self._values = values
        self._replies = Replies(index=index)
        self._clients = SessionTable(
            config.identity,
            slice_table=values.slice_table,
            memory=memory,
            n_clients_max=config.n_clients_max,
        )
        # (start, stop) of each block of a vector.
        self.bounds = tuple(block_bounds(size, itemsize=dtype.itemsize))
        self.pushes = PushHandler(self._clients, self._replies)  # pushes until they are applied
        pins = PinnedVersions(
            n_elements=size,
            dtype=dtype,
            n_copies=config.n_copies,
            seconds_max=config.pin_seconds_max,
            memory=memory,
        )
        self.fetches = FetchHandler(self._clients, self._replies, pins)  # fetches by blocks
        # Replication to the backup, if the shard has two copies.
        self.primary = Primary(values, self._clients, self.pushes)
        self._n_deferred_max = config.n_clients_max
        self._absence_seconds_max = config.absence_seconds_max
        self._deferred: dict[Address, tuple[Received, OpenSession]] = {}
        self._is_primary = not config.is_replicated
        self._open = False
        self._closed = False

    @property
    def incarnation(self) -> int:
        return self._replies.incarnation

    @property
    def clients(self) -> tuple[Session, ...]:
        return self._clients.all()

    def n_averaged(self, client: Session) -> int:
        return max(1, self._clients.n_averaged(client.shard_slice))

    def counters(self) -> Mapping[str, float]:
        return {
            "clients": float(self._clients.n_connected),
            "push_buffer_bytes": float(self._clients.push_buffer_nbytes),
            "bytes_out": float(self.fetches.bytes_out),
            **self.pushes.counters(),
        }

    def region(self, what: str) -> str:
        return f"{self._name}.{self._incarnation}.{what}"

    def start(self, incarnation: int) -> None:
        """Begin an incarnation; nobody is served yet."""
        self._incarnation = incarnation
        if self._is_primary:
            self._replies.incarnation = incarnation

    def open(self, clients: Iterable[Session]) -> list[Action]:
        """Serve from now on, deferred OpenSession messages first; the values must be there."""
        self._clients.restore(clients)
        self._open = True
        return self.answer_deferred()

    def promote(self, term: int, clients: Iterable[Session]) -> list[Action]:
        """Serve as primary. These clients of the former primary get `PrimaryChanged`."""
        self._is_primary, self._replies.incarnation = True, term
        clients = tuple(clients)
        unheard = [client for client in clients if client.name not in self._deferred]
        return [
            *self.open(clients),
            *(self._replies.primary_changed(client.name) for client in unheard),
        ]

    def close(self) -> None:
        self._closed = True

    def release(self) -> None:
        self._clients.release()

    def lost(self, event: PeerLost, now: Seconds) -> list[Action]:
        """Note that a peer is gone: its pins end, and its buffers are no longer averaged."""
        held = self._deferred.get(event.peer)
        if held is not None and held[0].incarnation <= event.incarnation:
            del self._deferred[event.peer]
        client = self._clients.get(event.peer)
        if client is not None and client.incarnation <= event.incarnation:
            client.connected = False
            self.fetches.expire(client)
            if client.push_buffers:
                return [self._wait_for(client, now)]
        return []

    def timer(self, name: str, now: Seconds) -> list[Action]:
        """Release the push buffers of a client that is gone for too long, or let a pin expire."""
        if not name.startswith(_ABSENT):
            return self.fetches.timer(name, now)
        client = self._clients.get(Address(name.removeprefix(_ABSENT)))
        if client is None or client.connected or not client.push_buffers:
            return []
        is_applying = self.pushes.is_applying(client.name)
        # The buffers are still needed here or by the backup; look again later.
        if is_applying or client.queued or client.n_unconfirmed:
            return [self._wait_for(client, now)]
        n_bytes = client.push_buffer_nbytes
        self._clients.take_back(client)
        text = (
            f"{client.name} has been gone for {self._absence_seconds_max:g} s: released its "
            f"push buffers ({n_bytes:,} bytes)"
        )
        return [Report(text=text)]

    def _wait_for(self, client: Session, now: Seconds) -> SetTimer:
        at = now + self._absence_seconds_max
        return SetTimer(name=f"{_ABSENT}{client.name}", at=at)

    # ------------------------------------------------------------------- sessions

    def open_session(self, event: Received, request: OpenSession) -> list[Action]:
        """Answer OpenSession, now or as soon as possible."""
        sender, clients = event.sender, self._clients
        if not self._is_primary:
            self._defer(event, request)
            return []
        if self._closed or clients.is_older(sender, event.incarnation):
            return []  # the answer would reach its successor
        steps = self._values.steps
        reason = clients.why_not(sender, event.incarnation, request, steps=steps)
        if reason is not None:
            return [self._replies.refuse(sender, reason, for_good=True)]
        if self._must_wait(event, request):
            self._defer(event, request)
            return [self._replies.refuse(sender, "busy; the session opens later")]
        before = clients.get(sender)
        client, why_not = clients.admit(
            sender, event.incarnation, request, region=self.region("slots")
        )
        if client is not before:
            self.fetches.end(sender)  # of its former incarnation
        shares = clients.shares(request)
        client.parameters_region = self._values.region if shares else ""
        actions: list[Action] = [self._replies.session_opened(client, clock=self._values.clock)]
        if why_not is not None:
            actions.append(Report(text=why_not, level="warning"))
        return actions

    def answer_deferred(self) -> list[Action]:
        held, self._deferred = self._deferred, {}
        actions: list[Action] = []
        for sender, (event, request) in held.items():
            if self._must_wait(event, request):
                self._deferred[sender] = event, request
            else:
                actions += self.open_session(event, request)
        return actions

    def _must_wait(self, event: Received, request: OpenSession) -> bool:
        # The client's push is being applied or replicated from a buffer that a new session would
        # replace, so an OpenSession that changes anything must wait.
        if not self._open:
            return True
        client = self._clients.get(event.sender)
        is_unconfirmed = client is not None and client.n_unconfirmed > 0
        return (is_unconfirmed or self.pushes.is_applying(event.sender)) and self._clients.changes(
            event.sender, event.incarnation, request
        )

    def _defer(self, event: Received, request: OpenSession) -> None:
        held = self._deferred.get(event.sender)
        if held is None and len(self._deferred) >= self._n_deferred_max:
            return  # the client repeats it
        if held is None or held[0].incarnation <= event.incarnation:
            self._deferred[event.sender] = event, request

    # -------------------------------------------------------------------- serving

    def _accepts(self, event: Received, message: ClientMessage) -> bool:
        if not self._is_primary or self._closed:
            return False
        # Count pushes of former incarnations, which come too late.
        is_older = self._clients.is_older(event.sender, event.incarnation)
        if is_older and isinstance(message, Push):
            self.pushes.refuse(event.sender, message)
        return not is_older

    def serve(self, event: Received, message: ClientMessage, now: Seconds) -> list[Action]:
        """Serve a client that has an open session; ask others to open one."""
        sender, client = event.sender, self._clients.get(event.sender)
        if not self._accepts(event, message):
            return []
        if (
            client is None
            or not client.opened
            or event.incarnation != client.incarnation
            or message.shard_incarnation != self.incarnation
        ):
            # The client repeats the message in its next session, so nothing is lost.
            return [self._replies.refuse(sender, "open a session first")]
        client.connected = True
        clock = self._values.clock
        match message:
            case Fetch():
                return self.fetches.fetch(client, message, clock=clock, now=now)
            case FetchAck():
                return self.fetches.ack(client, message, now=now)
            case PushBlock():
                return self.pushes.take_block(client, message, clock=clock)
            case Push():
                return self._take_push(client, message)
            case _:
                assert_never(message)

    def _take_push(self, client: Session, push: Push) -> list[Action]:
        reason = self._values.why_not(push.touches, client.shard_slice)
        if reason is not None:
            return [self._replies.refuse(client.name, reason, for_good=True)]
        return self.pushes.take(client, push, clock=self._values.clock)
