"""What a shard does for its clients, and for whom: the handshake and the messages.

Rules:

* Nothing is served before `OpenSession`. A message of an older incarnation of the client is
  dropped. One that is meant for another incarnation of the shard, or comes from a
  client that has not said Hello to this one, is answered by `SessionRefused`.
* A Hello that arrives before the values are there, or says something new while a push
  of this client is applied or held, is answered afterwards, and with "busy" at once.
* One of two copies that does not lead says nothing to clients. It keeps their Hellos,
  to welcome them when it leads, and tells the others that its leader knew.
* A client that has been gone for `absence_seconds_max` loses its slots, as soon as
  nothing of it is under way here.
* After `close` nobody gets an answer; what is complete is still applied.
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
    """All clients of one life of a shard, and what is under way for them.

    Attributes:
        pushes: Until they are applied.
        fetches: By blocks.
        forwarding: Of pushes, to a second copy of the shard if it has one.
        bounds: Of each block of a vector: (start, stop).
    """

    def __init__(self, config: ShardConfig, values: ShardStore, *, memory: Memory) -> None:
        layout, index = config.layout, config.index
        size, dtype = layout.shard_size(index), layout.dtype
        self._name = config.name
        self._life = 0
        self._values = values
        self._replies = Replies(index=index)
        self._clients = SessionTable(
            config.identity,
            holdings=values.holdings,
            memory=memory,
            n_clients_max=config.n_clients_max,
        )
        self.bounds = tuple(block_bounds(size, itemsize=dtype.itemsize))
        self.pushes = PushHandler(self._clients, self._replies)
        leases = PinnedVersions(
            n_elements=size,
            dtype=dtype,
            n_copies=config.n_copies,
            seconds_max=config.lease_seconds_max,
            memory=memory,
        )
        self.fetches = FetchHandler(self._clients, self._replies, leases)
        self.forwarding = Primary(values, self._clients, self.pushes)
        self._n_held_max = config.n_clients_max
        self._absence_seconds_max = config.absence_seconds_max
        self._held: dict[Address, tuple[Received, OpenSession]] = {}
        self._leads = not config.waits_for_lead
        self._open = False
        self._closed = False

    @property
    def incarnation(self) -> int:
        """Of the shard, to clients; 0 before it has started, or leads."""
        return self._replies.incarnation

    @property
    def clients(self) -> tuple[Session, ...]:
        """Every client known."""
        return self._clients.all()

    def n_averaged(self, client: Session) -> int:
        """Over how many clients the buffers are averaged that this one pushes."""
        return max(1, self._clients.n_averaged(client.holding))

    def counters(self) -> Mapping[str, float]:
        """Return figures for the role's status."""
        return {
            "clients": float(self._clients.n_present),
            "slots_bytes": float(self._clients.slots_bytes),
            "bytes_out": float(self.fetches.bytes_out),
            **self.pushes.counters(),
        }

    def region(self, what: str) -> str:
        """Return a name that no other role, and no other life of this one, uses."""
        return f"{self._name}.{self._life}.{what}"

    def start(self, incarnation: int) -> None:
        """The shard's life begins; nobody is served yet."""
        self._life = incarnation
        if self._leads:
            self._replies.incarnation = incarnation

    def open(self, clients: Iterable[Session]) -> list[Action]:
        """The values are there: serve, beginning with those who have said Hello."""
        self._clients.restore(clients)
        self._open = True
        return self.greet_held()

    def lead(self, pairing: int, clients: Iterable[Session]) -> list[Action]:
        """Serve from now on, as the copy that leads; these clients may not know yet."""
        self._leads, self._replies.incarnation = True, pairing
        clients = tuple(clients)
        unheard = [client for client in clients if client.name not in self._held]
        return [*self.open(clients), *(self._replies.leading(client.name) for client in unheard)]

    def close(self) -> None:
        """Answer nobody from now on."""
        self._closed = True

    def release(self) -> None:
        """Take back all memory that was lent."""
        self._clients.release()

    def lost(self, event: PeerLost, now: Seconds) -> list[Action]:
        """A peer is gone: what it reads is free again, its buffers do not count."""
        held = self._held.get(event.peer)
        if held is not None and held[0].incarnation <= event.incarnation:
            del self._held[event.peer]
        client = self._clients.get(event.peer)
        if client is not None and client.incarnation <= event.incarnation:
            client.present = False
            self.fetches.expire(client)
            if client.slots:
                return [self._wait_for(client, now)]
        return []

    def timer(self, name: str, now: Seconds) -> list[Action]:
        """Take back the slots of who is gone for too long; or it is one of fetches."""
        if not name.startswith(_ABSENT):
            return self.fetches.timer(name, now)
        client = self._clients.get(Address(name.removeprefix(_ABSENT)))
        if client is None or client.present or not client.slots:
            return []
        is_applying = self.pushes.is_applying(client.name)
        if is_applying or client.queued or client.n_held:
            return [self._wait_for(client, now)]
        n_bytes = client.slots_bytes
        self._clients.take_back(client)
        text = (
            f"{client.name} has been gone for {self._absence_seconds_max:g} s: its "
            f"slots are taken back ({n_bytes:,} bytes); it gets others if it returns"
        )
        return [Report(text=text)]

    def _wait_for(self, client: Session, now: Seconds) -> SetTimer:
        """Look again later whether it is back."""
        at = now + self._absence_seconds_max
        return SetTimer(name=f"{_ABSENT}{client.name}", at=at)

    # ------------------------------------------------------------------ handshake

    def greet(self, event: Received, hello: OpenSession) -> list[Action]:
        """Answer a Hello, now or when that can be done."""
        sender, clients = event.sender, self._clients
        if not self._leads:
            self._hold(event, hello)
            return []
        if self._closed or clients.is_older(sender, event.incarnation):
            return []  # an answer to the older one would reach its successor
        steps = self._values.steps
        reason = clients.why_not(sender, event.incarnation, hello, steps=steps)
        if reason is not None:
            return [self._replies.refuse(sender, reason, for_good=True)]
        if self._must_wait(event, hello):
            self._hold(event, hello)
            return [self._replies.refuse(sender, "busy, you will be welcomed")]
        before = clients.get(sender)
        client, why_not = clients.admit(
            sender, event.incarnation, hello, region=self.region("slots")
        )
        if client is not before:
            self.fetches.end(sender)  # of its former life
        shares = clients.shares(hello)
        client.parameters_region = self._values.region if shares else ""
        actions: list[Action] = [self._replies.welcome(client, clock=self._values.clock)]
        if why_not is not None:
            actions.append(Report(text=why_not, level="warning"))
        return actions

    def greet_held(self) -> list[Action]:
        """Answer those Hellos that had to wait and need not any more."""
        held, self._held = self._held, {}
        actions: list[Action] = []
        for sender, (event, hello) in held.items():
            if self._must_wait(event, hello):
                self._held[sender] = event, hello
            else:
                actions += self.greet(event, hello)
        return actions

    def _must_wait(self, event: Received, hello: OpenSession) -> bool:
        if not self._open:
            return True
        client = self._clients.get(event.sender)
        is_held = client is not None and client.n_held > 0
        return (is_held or self.pushes.is_applying(event.sender)) and self._clients.changes(
            event.sender, event.incarnation, hello
        )

    def _hold(self, event: Received, hello: OpenSession) -> None:
        held = self._held.get(event.sender)
        if held is None and len(self._held) >= self._n_held_max:
            return  # it will ask again
        if held is None or held[0].incarnation <= event.incarnation:
            self._held[event.sender] = event, hello

    # -------------------------------------------------------------------- serving

    def _hears(self, event: Received, message: ClientMessage) -> bool:
        """Whether such a message gets an answer; count a push that comes too late."""
        if not self._leads or self._closed:
            return False
        is_older = self._clients.is_older(event.sender, event.incarnation)
        if is_older and isinstance(message, Push):
            self.pushes.refuse(event.sender, message)
        return not is_older

    def serve(self, event: Received, message: ClientMessage, now: Seconds) -> list[Action]:
        """Serve a client that said Hello; ask the others to."""
        sender, client = event.sender, self._clients.get(event.sender)
        if not self._hears(event, message):
            return []
        if (
            client is None
            or not client.greeted
            or event.incarnation != client.incarnation
            or message.shard_incarnation != self.incarnation
        ):
            # It pushes that again when it is welcome: nothing is lost.
            return [self._replies.refuse(sender, "say OpenSession first")]
        client.present = True
        clock = self._values.clock
        match message:
            case Fetch():
                return self.fetches.fetch(client, message, clock=clock, now=now)
            case FetchAck():
                return self.fetches.credit(client, message, now=now)
            case PushBlock():
                return self.pushes.take_block(client, message, clock=clock)
            case Push():
                return self._take_push(client, message)
            case _:
                assert_never(message)

    def _take_push(self, client: Session, push: Push) -> list[Action]:
        reason = self._values.why_not(push.touches, client.holding)
        if reason is not None:
            return [self._replies.refuse(client.name, reason, for_good=True)]
        return self.pushes.take(client, push, clock=self._values.clock)
