"""The network between processes: one inbox to read, one outbox per peer to write.

    role A                                role B
    outbox to B (PUSH)  --------------->  inbox (PULL)
    inbox (PULL)        <---------------  outbox to A (PUSH)

Every link runs one way, so that neither side has to guess who speaks next, and the
order of one link is the order of one socket. ZeroMQ promises no delivery: what does
not fit a link's bounded queue is dropped and counted, and roles repeat what matters.

Rules this file keeps:

* Nobody says a word unless the guard lets him (`guard`): on one machine, who may enter
  the run's directory; over TCP, who has a key (CURVE). It asks before a connection
  carries its first message, because what ZeroMQ holds of an unfinished multipart
  message is bounded by nothing else.
* No secret is in any message: `Codec` only tells runs apart.
* Nobody in the network is the user: a message that says so is dropped.
* Nothing here blocks but `poll`, up to its timeout, and `close`, up to its linger.
* What a peer sends wrongly costs a counter and, now and then, a line in the log.

What one link may hold in memory: `messages_max` blocks at either end. A member that
holds the run's key is trusted not to send a message whose parts never end; one with a
key of its own is not.
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


# An outbox: one link to one peer, and ZeroMQ's word on whether it was let in.

REFUSED: Final = (zmq.EVENT_HANDSHAKE_FAILED_AUTH,)
"""The peer does not let us in."""

ANOTHER: Final = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
"""It has closed a connection without a word: it has another key, or none."""


BEAT_SECONDS: Final = 2.0
SILENCE_SECONDS_MAX: Final = 8.0
"""Of ZeroMQ's own heartbeats to other machines, after which it connects anew."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSocket:
    """To one life of one peer.

    Attributes:
        incarnation: That life.
        endpoint: Where it listens, as it says.
        socket: That what is for it is written to.
        refusals: Tells of handshakes that failed; None if nobody asks.
        heard: Kinds of these that were not asked for so far.
    """

    incarnation: int
    endpoint: str
    socket: "zmq.Socket[bytes]"
    refusals: "zmq.Socket[bytes] | None"
    heard: set[int] = field(default_factory=set)

    @classmethod
    def open(
        cls,
        context: "zmq.Context[zmq.Socket[bytes]]",
        peer: str,
        place: Endpoint,
        *,
        incarnation: int,
        endpoint: str,
        guard: Authenticator,
        messages_max: int,
        watched: bool,
    ) -> Self:
        """Return a link that connects as soon as somebody listens there.

        Raises:
            TransportError: no such endpoint can be, or may be, connected to.
        """
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.sndhwm = messages_max
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 2000
        if not is_local(place.endpoint):
            # A cut link is noticed at both ends, and opened anew, sooner than by TCP,
            # whose patience doubles each time.
            socket.heartbeat_ivl = round(1000 * BEAT_SECONDS)
            socket.heartbeat_timeout = round(1000 * SILENCE_SECONDS_MAX)
            socket.heartbeat_ttl = round(1000 * SILENCE_SECONDS_MAX)
            socket.connect_timeout = round(1000 * BEAT_SECONDS)
        refusals = None
        if watched:
            refusals = socket.get_monitor_socket(sum((*REFUSED, *ANOTHER)))
        outbox = cls(incarnation=incarnation, endpoint=endpoint, socket=socket, refusals=refusals)
        try:
            guard.dial(socket, peer, place)
            socket.connect(guard.address(place.endpoint))
        except TransportError:
            outbox.close(0)
            raise
        except zmq.ZMQError as error:
            outbox.close(0)
            raise TransportError(
                f"cannot connect to {peer} at {endpoint!r}: {error.strerror}"
            ) from None
        return outbox

    def take(self, kinds: tuple[int, ...]) -> bool:
        """Return whether a handshake has failed in such a way since asked last."""
        while self.refusals is not None and self.refusals.poll(0):
            event = parse_monitor_message(self.refusals.recv_multipart())
            self.heard.add(int(event["event"]))
        found = self.heard & set(kinds)
        self.heard.difference_update(found)
        return bool(found)

    def close(self, linger: int) -> None:
        """Send what is under way, for so many milliseconds, in the background."""
        if self.refusals is not None:
            self.socket.disable_monitor()
            self.refusals.close(0)
        self.socket.close(linger)


Log = Callable[[str, str], None]  # level, text

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
_SOCKETS_MAX = 4096
_OUTBOXES_MAX = _SOCKETS_MAX // 4  # watched ones are three sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Bounds of a transport."""

    messages_max: int = 128  # queued at each end of a link
    batch_max: int = 64  # messages read by one call of `receive`
    linger_seconds: float = 1.0  # how long `close` waits for unsent messages

    def __post_init__(self) -> None:
        """Refuse bounds that bound nothing, or everything."""
        for name in ("messages_max", "batch_max"):
            if getattr(self, name) < 1:  # 0 would mean "no limit" to ZeroMQ
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if not 0 <= self.linger_seconds < math.inf:
            raise ValueError(f"linger_seconds={self.linger_seconds}: 0 or more")


@dataclass(slots=True, kw_only=True)
class TransportCounters:
    """What has happened on the links of one transport so far."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped_full: int = 0  # the link's queue was full
    dropped_unknown: int = 0  # to a peer nobody has connected
    malformed: int = 0  # arrived, and were no messages of this run
    refused: int = 0  # connections that the guard did not let in


class ZmqTransport:
    """The links of one role. For one thread only; `start` before all else."""

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
        self._guard = guard
        self._bind = bind
        self._options = options or TransportOptions()
        self._log = log
        # Hosts do not know the run before they have joined it.
        strangers = HOST if name == SUPERVISOR and self._guard.encrypts else None
        self._wire = Codec(run=run, strangers=strangers)
        self._endpoint = ""
        self._port = 0
        self._supervisor_host = LOOPBACK
        self._extra_fds: frozenset[int] = frozenset()
        self._outboxes: dict[str, PeerSocket] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def endpoint(self) -> str:
        """Where peers find this transport, port included; "" before `start`."""
        return self._endpoint

    def start(self) -> None:
        """Listen.

        Raises:
            TransportError: naming the address that cannot be had, and why.
        """
        assert self._context is None, "started twice"
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
        # Requests to admit a connection; an address of this context alone.
        self._door = self._context.socket(zmq.REP)
        self._door.linger = 0
        self._door.bind(_ZAP_ENDPOINT)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.rcvhwm = self._options.messages_max
        self._inbox.maxmsgsize = self._guard.wire_bytes(max(HEADER_BYTES_MAX, FRAME_BYTES_MAX))
        self._inbox.backlog = 256  # who finds no place tries again, a second later
        try:
            key = self._guard.listen(self._inbox, self._bind)
            self._inbox.bind(self._guard.address(self._bind))
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
        self._poller.register(self._door, zmq.POLLIN)
        self._extra_fds = frozenset()

    def close(self) -> None:
        """Send what is under way, for `linger_seconds` at the most, and stop."""
        if self._context is None:
            return
        for peer in list(self._outboxes):
            linger = round(1000 * self._options.linger_seconds)
            self._outboxes.pop(peer).close(linger)
        self._context.destroy(linger=0)  # the other sockets; returns when all is sent
        self._context = None
        self._guard.close()  # what is still to be sent goes to addresses that it gave

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def connect(self, peer: str, incarnation: int, endpoint: str, *, watched: bool = False) -> None:
        """From now on `peer` is at `endpoint`; what an older link still held is lost.

        Args:
            peer: Whose messages go there.
            incarnation: Its life.
            endpoint: Where it listens.
            watched: Let `is_refused` and `is_another` know what it says to us.

        Raises:
            TransportError: no such endpoint can be connected to.
        """
        known = self._outboxes.get(peer)
        if known and (known.incarnation, known.endpoint) == (incarnation, endpoint):
            return
        place = self._place(peer, endpoint)
        self.disconnect(peer)
        while len(self._outboxes) >= _OUTBOXES_MAX:  # the first: unused for longest
            self.disconnect(next(iter(self._outboxes)))
        self._outboxes[peer] = PeerSocket.open(
            self._running_context(),
            peer,
            place,
            incarnation=incarnation,
            endpoint=endpoint,
            guard=self._guard,
            messages_max=self._options.messages_max,
            watched=watched,
        )

    def is_refused(self, peer: str) -> bool:
        """Return whether a watched peer has not let us in since asked last."""
        outbox = self._outboxes.get(peer)
        return outbox is not None and outbox.take(REFUSED)

    def is_another(self, peer: str) -> bool:
        """Return whether who listens at a watched peer's place may be somebody else.

        It has closed a connection without a word: it has another key, or none.
        """
        outbox = self._outboxes.get(peer)
        return outbox is not None and outbox.take(ANOTHER)

    def entrust(self, name: str, to: str) -> None:
        """From now on `name` belongs to whoever may speak as `to` (by its key)."""
        self._guard.entrust(name, to)

    def disconnect(self, peer: str) -> None:
        """Forget where `peer` is, and what has not been sent to it."""
        outbox = self._outboxes.pop(peer, None)
        if outbox:
            outbox.close(0)

    def send(self, peer: str, message: Message, *, lent: bool = False) -> bool:
        """Queue `message`; return False if it was dropped instead.

        Args:
            peer: Whom it is for.
            message: Arrays are copied, unless they are lent.
            lent: Nobody changes the arrays while a changed one could do harm: they are
                read when the network has room for them.
        """
        outbox = self._outboxes.pop(peer, None)
        if outbox is None:
            self.counters.dropped_unknown += 1
            return False
        self._outboxes[peer] = outbox  # the last now
        frames = self._wire.encode(
            message, sender=self.name, incarnation=self.incarnation, receiver=peer
        )
        *before, last = frames
        try:
            for frame in before:  # the header, if there is an array
                outbox.socket.send(frame, zmq.DONTWAIT | zmq.SNDMORE)
            outbox.socket.send(last, zmq.DONTWAIT, copy=not (lent and before))
        except zmq.Again:  # of the first frame: where it fits, the others do
            self.counters.dropped_full += 1
            return False
        self.counters.messages_out += 1
        self.counters.bytes_out += sum(map(len, frames))
        return True

    def poll(self, timeout_seconds: float, extra_fds: Iterable[int] = ()) -> frozenset[int]:
        """Wait for a message, or for one of `extra_fds`; return those that are ready.

        Returns early whenever it likes: the caller looks again.
        """
        wanted = frozenset(extra_fds)
        for fd in self._extra_fds - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._extra_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._extra_fds = wanted
        seconds = min(max(0.0, timeout_seconds), self._guard.watch_seconds)
        timeout = math.ceil(1000 * seconds)  # never a busy wait
        ready = {source for source, _ in self._poller.poll(timeout)}
        if self._door in ready:
            self._admit()
        self._guard.watch(self._port)
        return wanted & ready

    def receive(self) -> Iterator[Envelope]:
        """Yield messages that are here already, `batch_max` of them at the most."""
        for _ in range(self._options.batch_max):
            # Asking first is five times faster than to be told `Again` by an exception.
            if not zmq.zmq_poll([(self._inbox, zmq.POLLIN)], 0):
                self._guard.drained()
                return
            try:
                frames, source = self._take()
            except zmq.Again:  # what was there was no message, but who will send some
                return
            if source is None:  # nobody who may say anything
                self.counters.malformed += 1
                continue
            try:
                envelope = self._read(frames, source)
            except RemoteProtocolError as error:
                self.counters.malformed += 1
                self._log_rarely(self.counters.malformed, f"dropped: {error}")
                if not isinstance(error, AnotherRunError | NotIntroducedError):
                    self._guard.offended(source, str(error))
                continue
            self.counters.messages_in += 1
            yield envelope

    def _read(self, frames: list[Frame], source: Source) -> Envelope:
        envelope = self._wire.decode(frames)
        if envelope.sender == USER:  # `RoleRunner.post` alone delivers what the user says
            raise RemoteProtocolError(f"a peer speaks as {USER!r}")
        self._guard.check(source, envelope.sender)
        return envelope

    def _take(self) -> tuple[list[Frame], Source | None]:
        """Return the next message's frames, but never more than prove it illegal."""
        frames: list[Frame] = []
        n_wire_bytes = 0
        while True:
            part = self._inbox.recv(zmq.DONTWAIT, copy=False)
            frame = part.buffer
            self.counters.bytes_in += len(frame)
            n_wire_bytes += self._guard.wire_bytes(len(frame))
            if len(frames) <= FRAMES_MAX:
                frames.append(frame)
            if not part.more:  # asking the socket takes longer than all the rest
                return frames, self._guard.source(part, n_wire_bytes)

    def _admit(self) -> None:
        """Let in whom the guard does (ZeroMQ's RFC 27: requests and replies)."""
        request = self._door.recv_multipart()
        verdict = self._guard.judge(request)
        if not verdict.admitted:
            self.counters.refused += 1
            self._log_rarely(self.counters.refused, verdict.remark)
        self._door.send_multipart(verdict.reply(request))

    def _log_rarely(self, count: int, text: str) -> None:
        """Log the 1st, 2nd, 4th, 8th, … of a kind: a flood cannot fill a disk."""
        if count & (count - 1) == 0:
            self._log("warning", f"{text} (so far {count})")

    def _place(self, peer: str, endpoint: str) -> Endpoint:
        """Return where a peer is, seen from here.

        Who listens at all interfaces is where the supervisor is.
        """
        try:
            place = Endpoint.parse(endpoint).seen_from(self._supervisor_host)
        except TransportError as error:
            raise TransportError(f"cannot connect to {peer} at {error}") from None
        if peer == SUPERVISOR:
            self._supervisor_host = place.host
        return place

    def _running_context(self) -> "zmq.Context[zmq.Socket[bytes]]":
        if self._context is None:
            raise LocalProtocolError(f"the transport of {self.name} is not running")
        return self._context


def _cannot_bind(address: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRNOTAVAIL:
        return (
            f"cannot listen at {address}: no interface of this machine has that number "
            f"(0.0.0.0 stands for all that it has)"
        )
    if error.errno == zmq.EADDRINUSE:
        return (
            f"cannot listen at {address}: something else does. Stop it, or let the "
            f"system choose a port (port 0)"
        )
    return f"cannot listen at {address!r}: {error.strerror}"
