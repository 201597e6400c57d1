"""ZeroMQ transport: one inbox to read, one outgoing socket for each peer.

    role A                                role B
    socket to B (PUSH)  --------------->  inbox (PULL)
    inbox (PULL)        <---------------  socket to A (PUSH)

Every link runs one way and keeps its order. ZeroMQ promises no delivery: what does not fit a
link's bounded queue is dropped and counted, and roles resend. The authenticator is asked
before a connection carries its first message, as ZeroMQ does not bound unfinished multipart
messages. Nothing blocks but `poll` (its timeout) and `close` (its linger).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self, final

import zmq
from zmq.utils.monitor import parse_monitor_message

from distbelief.errors import LocalProtocolError, RemoteProtocolError, TransportError
from distbelief.protocol import Message
from distbelief.protocol.codec import (
    FRAME_BYTES_MAX,
    FRAMES_MAX,
    HEADER_BYTES_MAX,
    AnotherRunError,
    Codec,
    Envelope,
    Frame,
)
from distbelief.roles.role import HOST, SUPERVISOR, USER
from distbelief.transport.address import LOOPBACK, Endpoint, is_local
from distbelief.transport.authenticator import Authenticator, NotIntroducedError, Source


# Events: the peer rejects this side's key.
REFUSED: Final = (zmq.EVENT_HANDSHAKE_FAILED_AUTH,)

# Events: the peer closed the connection in the handshake: it has another key, or none.
ANOTHER: Final = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

HEARTBEAT_SECONDS: Final = 2.0
# Silence of ZeroMQ's own heartbeats after which a link to another host is opened again.
SILENCE_SECONDS_MAX: Final = 8.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSocket:
    """The link to one incarnation of one peer."""

    incarnation: int  # process generation of the peer
    endpoint: str  # the endpoint that the peer announced
    socket: "zmq.Socket[bytes]"  # socket for messages to the peer
    refusals: "zmq.Socket[bytes] | None"  # monitor of failed handshakes; None if not watched
    # Failed handshakes by event type, since `take` last returned them.
    failed: set[int] = field(default_factory=set)

    @classmethod
    def open(
        cls,
        context: "zmq.Context[zmq.Socket[bytes]]",
        peer: str,
        target: Endpoint,
        *,
        incarnation: int,
        endpoint: str,
        guard: Authenticator,
        messages_max: int,
        watched: bool,
    ) -> Self:
        """Return a link that connects as soon as the peer listens.

        Raises:
            TransportError: The endpoint is invalid or not allowed.
        """
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.sndhwm = messages_max
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 2000
        if not is_local(target.endpoint):
            # Both ends notice a cut link and reopen it sooner than TCP, whose timeouts double.
            socket.heartbeat_ivl = round(1000 * HEARTBEAT_SECONDS)
            socket.heartbeat_timeout = round(1000 * SILENCE_SECONDS_MAX)
            socket.heartbeat_ttl = round(1000 * SILENCE_SECONDS_MAX)
            socket.connect_timeout = round(1000 * HEARTBEAT_SECONDS)
        refusals = None
        if watched:
            refusals = socket.get_monitor_socket(sum((*REFUSED, *ANOTHER)))
        link = cls(incarnation=incarnation, endpoint=endpoint, socket=socket, refusals=refusals)
        try:
            guard.dial(socket, peer, target)
            socket.connect(guard.address(target.endpoint))
        except TransportError:
            link.close(0)
            raise
        except zmq.ZMQError as error:
            link.close(0)
            raise TransportError(
                f"cannot connect to {peer} at {endpoint!r}: {error.strerror}"
            ) from None
        return link

    def take(self, kinds: tuple[int, ...]) -> bool:
        """Return whether a handshake has failed with one of these events since the last call."""
        while self.refusals is not None and self.refusals.poll(0):
            event = parse_monitor_message(self.refusals.recv_multipart())
            self.failed.add(int(event["event"]))
        found = self.failed & set(kinds)
        self.failed.difference_update(found)
        return bool(found)

    def close(self, linger: int) -> None:
        """Close, sending queued messages in the background for `linger` milliseconds."""
        if self.refusals is not None:
            self.socket.disable_monitor()
            self.refusals.close(0)
        self.socket.close(linger)


Log = Callable[[str, str], None]  # level, text

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
_SOCKETS_MAX = 4096
_PEERS_MAX = _SOCKETS_MAX // 4  # a watched peer has three sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    messages_max: int = 128  # queued at each end of a link
    batch_max: int = 64  # messages read by one call of `receive`
    linger_seconds: float = 1.0  # how long `close` waits for unsent messages

    def __post_init__(self) -> None:
        for name in ("messages_max", "batch_max"):
            if getattr(self, name) < 1:  # 0 would mean "no limit" to ZeroMQ
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.linger_seconds < math.inf:
            raise ValueError(f"linger_seconds must be 0 or more, got {self.linger_seconds}")


@dataclass(slots=True, kw_only=True)
class TransportCounters:
    """Counters of one transport."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped_full: int = 0  # the link's queue was full
    dropped_unknown: int = 0  # to a peer without a link
    malformed: int = 0  # arrived but are not valid messages of this run
    refused: int = 0  # connections that the authenticator rejected


class ZmqTransport:
    """The links of one role. For one thread only; call `start` first."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        run: str,
        bind: str,
        guard: Authenticator,
        options: TransportOptions | None = None,
        log: Log = lambda _level, _text: None,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.counters = TransportCounters()
        self._authenticator = guard
        self._bind = bind
        self._options = options or TransportOptions()
        self._log = log
        # A host does not know the run's id before it has joined.
        strangers = HOST if name == SUPERVISOR and self._authenticator.encrypts else None
        self._wire = Codec(run=run, strangers=strangers)
        self._endpoint = ""
        self._port = 0
        self._supervisor_host = LOOPBACK
        self._extra_fds: frozenset[int] = frozenset()
        self._sockets: dict[str, PeerSocket] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def endpoint(self) -> str:
        """Where peers reach this transport, port included; "" before `start`."""
        return self._endpoint

    def start(self) -> None:
        """Listen.

        Raises:
            TransportError: The address cannot be bound.
        """
        assert self._context is None, "started twice"
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
        # ZAP requests; the address is private to this context.
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.rcvhwm = self._options.messages_max
        self._inbox.maxmsgsize = self._authenticator.wire_bytes(
            max(HEADER_BYTES_MAX, FRAME_BYTES_MAX)
        )
        self._inbox.backlog = 256  # further clients try again after a second
        try:
            key = self._authenticator.listen(self._inbox, self._bind)
            self._inbox.bind(self._authenticator.address(self._bind))
        except TransportError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(_cannot_bind(self._bind, error)) from None
        self._endpoint = self._bind
        if self._bind.startswith("tcp:"):
            bound = Endpoint.parse(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT))
            self._port, self._endpoint = bound.port, str(replace(bound, key=key))
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._zap, zmq.POLLIN)
        self._extra_fds = frozenset()

    def close(self) -> None:
        """Send what is queued, for at most `linger_seconds`, and stop."""
        if self._context is None:
            return
        for peer in list(self._sockets):
            linger = round(1000 * self._options.linger_seconds)
            self._sockets.pop(peer).close(linger)
        self._context.destroy(linger=0)  # blocks until the lingering sockets are done
        self._context = None
        self._authenticator.close()  # last: queued messages go to addresses that it holds open

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def connect(self, peer: str, incarnation: int, endpoint: str, *, watched: bool = False) -> None:
        """Send to `peer` at `endpoint` from now on; messages queued on an older link are lost.

        Args:
            peer: Name of the peer.
            incarnation: Process generation of the peer.
            endpoint: Where it listens.
            watched: Record failed handshakes for `is_refused` and `has_other_key`.

        Raises:
            TransportError: The endpoint is invalid or not allowed.
        """
        known = self._sockets.get(peer)
        if known and (known.incarnation, known.endpoint) == (incarnation, endpoint):
            return
        target = self._resolve(peer, endpoint)
        self.disconnect(peer)
        while len(self._sockets) >= _PEERS_MAX:  # the first is the least recently used
            self.disconnect(next(iter(self._sockets)))
        self._sockets[peer] = PeerSocket.open(
            self._running_context(),
            peer,
            target,
            incarnation=incarnation,
            endpoint=endpoint,
            guard=self._authenticator,
            messages_max=self._options.messages_max,
            watched=watched,
        )

    def is_refused(self, peer: str) -> bool:
        """Return whether a watched peer has rejected this side since the last call."""
        link = self._sockets.get(peer)
        return link is not None and link.take(REFUSED)

    def has_other_key(self, peer: str) -> bool:
        """Return whether another process may listen at a watched peer's endpoint.

        A peer with another key, or without one, closes the connection in the handshake.
        """
        link = self._sockets.get(peer)
        return link is not None and link.take(ANOTHER)

    def assign_name(self, name: str, to: str) -> None:
        """Give the name to the key that has the name `to`."""
        self._authenticator.assign_name(name, to)

    def disconnect(self, peer: str) -> None:
        """Drop the link to `peer` and its queued messages."""
        link = self._sockets.pop(peer, None)
        if link:
            link.close(0)

    def send(self, peer: str, message: Message, *, lent: bool = False) -> bool:
        """Queue `message`; return False if it was dropped instead.

        Args:
            peer: Name of the receiver.
            message: Its arrays are copied, unless they are lent.
            lent: The caller does not change the arrays until they are sent: they are read when the
                network has room for them.
        """
        link = self._sockets.pop(peer, None)
        if link is None:
            self.counters.dropped_unknown += 1
            return False
        self._sockets[peer] = link  # now the most recently used
        frames = self._wire.encode(
            message, sender=self.name, incarnation=self.incarnation, receiver=peer
        )
        *before, last = frames
        try:
            for frame in before:  # the header, if there are arrays
                link.socket.send(frame, zmq.DONTWAIT | zmq.SNDMORE)
            link.socket.send(last, zmq.DONTWAIT, copy=not (lent and before))
        except zmq.Again:  # only for the first frame: if it fits, the others do
            self.counters.dropped_full += 1
            return False
        self.counters.messages_out += 1
        self.counters.bytes_out += sum(map(len, frames))
        return True

    def poll(self, timeout_seconds: float, extra_fds: Iterable[int] = ()) -> frozenset[int]:
        """Wait for a message or for one of `extra_fds`; return those of them that are ready.

        It may return early.
        """
        wanted = frozenset(extra_fds)
        for fd in self._extra_fds - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._extra_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._extra_fds = wanted
        seconds = min(max(0.0, timeout_seconds), self._authenticator.watch_seconds)
        timeout = math.ceil(1000 * seconds)  # rounding down would busy-wait
        ready = {source for source, _ in self._poller.poll(timeout)}
        if self._zap in ready:
            self._authenticate()
        self._authenticator.watch(self._port)
        return wanted & ready

    def receive(self) -> Iterator[Envelope]:
        """Yield the messages that have arrived, at most `batch_max`."""
        for _ in range(self._options.batch_max):
            # Polling first is five times faster than catching `zmq.Again`.
            if not zmq.zmq_poll([(self._inbox, zmq.POLLIN)], 0):
                self._authenticator.drained()
                return
            try:
                frames, source = self._take()
            except zmq.Again:  # only a handshake was readable, no message
                return
            if source is None:  # the sender may not send
                self.counters.malformed += 1
                continue
            try:
                envelope = self._read(frames, source)
            except RemoteProtocolError as error:
                self.counters.malformed += 1
                self._log_rarely(self.counters.malformed, f"dropped: {error}")
                if not isinstance(error, AnotherRunError | NotIntroducedError):
                    self._authenticator.offended(source, str(error))
                continue
            self.counters.messages_in += 1
            yield envelope

    def _read(self, frames: list[Frame], source: Source) -> Envelope:
        envelope = self._wire.decode(frames)
        if envelope.sender == USER:  # only `RoleRunner.post` delivers user events
            raise RemoteProtocolError(f"a peer may not speak as {USER!r}")
        self._authenticator.check(source, envelope.sender)
        return envelope

    def _take(self) -> tuple[list[Frame], Source | None]:
        # Reads all frames but keeps only enough to prove a message invalid.
        frames: list[Frame] = []
        n_wire_bytes = 0
        while True:
            part = self._inbox.recv(zmq.DONTWAIT, copy=False)
            frame = part.buffer
            self.counters.bytes_in += len(frame)
            n_wire_bytes += self._authenticator.wire_bytes(len(frame))
            if len(frames) <= FRAMES_MAX:
                frames.append(frame)
            if not part.more:  # much faster than asking the socket (RCVMORE)
                return frames, self._authenticator.source(part, n_wire_bytes)

    def _authenticate(self) -> None:
        # A ZAP request and its reply (ZeroMQ's RFC 27).
        request = self._zap.recv_multipart()
        verdict = self._authenticator.judge(request)
        if not verdict.admitted:
            self.counters.refused += 1
            self._log_rarely(self.counters.refused, verdict.remark)
        self._zap.send_multipart(verdict.reply(request))

    def _log_rarely(self, count: int, text: str) -> None:
        # The 1st, 2nd, 4th, 8th, ...: a flood must not fill the disk.
        if count & (count - 1) == 0:
            self._log("warning", f"{text} (so far {count})")

    def _resolve(self, peer: str, endpoint: str) -> Endpoint:
        # 0.0.0.0 stands for the supervisor's host.
        try:
            target = Endpoint.parse(endpoint).seen_from(self._supervisor_host)
        except TransportError as error:
            raise TransportError(f"cannot connect to {peer} at {error}") from None
        if peer == SUPERVISOR:
            self._supervisor_host = target.host
        return target

    def _running_context(self) -> "zmq.Context[zmq.Socket[bytes]]":
        if self._context is None:
            raise LocalProtocolError(f"the transport of {self.name} is not running")
        return self._context


def _cannot_bind(address: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRNOTAVAIL:
        return (
            f"cannot listen at {address}: no interface of this host has this address "
            f"(0.0.0.0 stands for all interfaces)"
        )
    if error.errno == zmq.EADDRINUSE:
        return (
            f"cannot listen at {address}: another process does: stop it, or let the "
            f"system choose a port (port 0)"
        )
    return f"cannot listen at {address!r}: {error.strerror}"
