"""ZeroMQ transport: one inbox to read, one outgoing socket for each peer, and their bounds.

    role A                                role B
    socket to B (PUSH)  --------------->  inbox (PULL)
    inbox (PULL)        <---------------  socket to A (PUSH)

Every link runs one way and keeps its order. ZeroMQ promises no delivery: what does not fit a
link's bounded queue is dropped, and roles resend. The authenticator is asked
before a connection carries its first message, as ZeroMQ does not bound unfinished multipart
messages. Nothing blocks but `poll` (its timeout) and `close` (its linger).
"""

import math
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self, final

import zmq

# Not at the first `lent` message: its exit handler, after which nothing can be lent, then runs
# after those that are registered later, such as that of a loop whose pushes are unfinished.
import zmq.utils.garbage
from zmq.utils.monitor import parse_monitor_message

from distbelief.core.errors import LocalProtocolError, RemoteProtocolError, TransportError
from distbelief.protocol import Message, codec as wire
from distbelief.protocol.role import HOST, SUPERVISOR, USER
from distbelief.transport import authenticator as auth
from distbelief.transport.address import LOOPBACK, Endpoint, is_six


# Events: the peer rejects this side's key.
REFUSED: Final = (zmq.EVENT_HANDSHAKE_FAILED_AUTH,)
# Events: the peer closed the connection in the handshake: it has another key, or none.
ANOTHER: Final = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
ENDED: Final = (zmq.EVENT_DISCONNECTED,)  # a connection that was there; the peer may live on
BATCH_MAX: Final = 64  # messages read by one call of `receive`
ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
_FRAME_BYTES_MAX: Final = max(wire.HEADER_BYTES_MAX, wire.FRAME_BYTES_MAX) + 64  # CURVE adds 42
_SOCKETS_MAX: Final = 1 << 14
_INTRODUCTION_SECONDS_MAX: Final = 3.0  # by the supervisor; less than `HANDSHAKE_SECONDS_MAX`
_PEERS_MAX = _SOCKETS_MAX // 4  # a watched peer has three sockets

Log = Callable[[str, str], None]  # level, text


@final
@dataclass(frozen=True, slots=True)
class PeerSocket:
    incarnation: int  # process generation of the peer
    endpoint: str  # the endpoint that the peer announced
    socket: auth.Socket  # socket for messages to the peer
    target: str  # where that is from here
    # Monitor of failed handshakes and of the connection's end; None if not watched
    monitor: auth.Socket | None
    # Events by type, since `take` last returned them.
    seen: set[int] = field(default_factory=set)

    def take(self, kinds: tuple[int, ...]) -> bool:
        """Return whether there was one of these events since the last call."""
        while self.monitor is not None and self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            self.seen.add(int(event["event"]))
        found = self.seen & set(kinds)
        self.seen.difference_update(found)
        return bool(found)

    def close(self, linger_ms: int) -> None:
        """Close, sending queued messages in the background for this long."""
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(0)
        self.socket.close(linger_ms)


class ZmqTransport:
    """The links of one role. For one thread only; call `start` first.

    It listens at `bind`; `guard` decides who may connect. Each end of a link queues
    `messages_max`; `close` waits `linger_seconds` for those not sent yet.
    """

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        run: str,
        bind: str,
        guard: auth.Authenticator,
        log: Log = lambda _level, _text: None,
        messages_max: int = 128,
        linger_seconds: float = 1.0,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.n_malformed = 0  # messages that arrived but are not valid, or not of this run
        self.n_refused = 0  # connections that the authenticator rejected
        self.endpoint = ""  # where peers reach this transport, port included; "" before `start`
        self._authenticator = guard
        self._curve = (
            guard if isinstance(guard, auth.CurveAuth) else None
        )  # it also checks messages
        self._bind = bind
        self._messages_max = messages_max
        self._linger_ms = round(1000 * linger_seconds)
        self._log = log
        # A host does not know the run's id before it has joined.
        strangers = HOST if name == SUPERVISOR and guard.encrypts else None
        self._codec = wire.Codec(run=run, strangers=strangers)
        self._supervisor_host = LOOPBACK
        self._extra_fds: frozenset[int] = frozenset()
        self._requests: list[tuple[float, list[bytes]]] = []  # of peers, since when
        self._sockets: dict[str, PeerSocket] = {}
        self._source: auth.Source | None = None  # of the message that was yielded last
        # The monitors' descriptors, with the names of peers: a poll of thousands of sockets, each
        # time, would take most of a shard's time.
        self._watched: selectors.DefaultSelector | None = None
        self._ended: list[tuple[str, int, str]] = []
        self._context: zmq.Context[auth.Socket] | None = None

    def start(self) -> None:
        """Listen, or raise TransportError if the address cannot be bound."""
        assert self._context is None, "started twice"
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
        self._zap = self._context.socket(zmq.ROUTER)  # the address is private to this context
        self._zap.linger = 0
        self._zap.bind(ZAP_ENDPOINT)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.ipv6 = self._bind.startswith("tcp://[")
        self._inbox.rcvhwm = self._messages_max
        self._inbox.maxmsgsize = _FRAME_BYTES_MAX
        self._inbox.backlog = 256  # further clients try again after a second
        try:
            key = self._authenticator.listen(self._inbox, self._bind)
            self._inbox.bind(self._authenticator.address(self._bind))
        except TransportError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(cannot_bind(self._bind, error)) from None
        self.endpoint = self._bind
        if self._bind.startswith("tcp:"):
            bound = Endpoint.parse(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT))
            self.endpoint = str(replace(bound, key=key))
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._zap, zmq.POLLIN)
        self._watched = selectors.DefaultSelector()
        self._poller.register(self._watched.fileno(), zmq.POLLIN)
        self._extra_fds = frozenset()

    def close(self) -> None:
        """Send what is queued, for at most `linger_seconds`, and stop."""
        if self._context is None:
            return
        while self._sockets:
            self._sockets.popitem()[1].close(self._linger_ms)
        self._context.destroy(linger=0)  # blocks until the lingering sockets are done
        self._context = None
        if self._watched is not None:
            self._watched.close()
        self._authenticator.close()  # last: queued messages go to addresses that it holds open

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def connect(self, peer: str, incarnation: int, endpoint: str, *, watched: bool = False) -> None:
        """Send to `peer` at `endpoint` from now on; messages queued on an older link are lost.

        If `watched`, failed handshakes are recorded for `has_failed`, and the connection's end for
        `ended`. Raises TransportError: the endpoint is invalid or not allowed.
        """
        known = self._sockets.get(peer)
        if known and (known.incarnation, known.endpoint) == (incarnation, endpoint):
            return
        try:
            target = Endpoint.parse(endpoint).seen_from(self._supervisor_host)
        except TransportError as error:
            raise TransportError(f"cannot connect to {peer} at {error}") from None
        if peer == SUPERVISOR:
            self._supervisor_host = target.host
        self.disconnect(peer)
        while len(self._sockets) >= _PEERS_MAX:  # the first is the least recently used
            self.disconnect(next(iter(self._sockets)))
        outgoing, monitor = self._outgoing(watched=watched)
        link = PeerSocket(incarnation, endpoint, outgoing, str(target), monitor)
        try:
            link.socket.ipv6 = is_six(target.host)
            self._authenticator.dial(link.socket, peer, target)
            link.socket.connect(self._authenticator.address(target.endpoint))
        except TransportError:
            link.close(0)
            raise
        except zmq.ZMQError as error:
            link.close(0)
            raise TransportError(
                f"cannot connect to {peer} at {endpoint!r}: {error.strerror}"
            ) from None
        self._sockets[peer] = link
        if monitor is not None and self._watched is not None:
            self._watched.register(monitor.FD, selectors.EVENT_READ, peer)
            self._look_at(peer)  # from then on the descriptor is readable when something has come

    def _outgoing(self, *, watched: bool) -> tuple[auth.Socket, auth.Socket | None]:
        if self._context is None:
            raise LocalProtocolError(f"the transport of {self.name} is not running")
        outgoing = self._context.socket(zmq.PUSH)
        outgoing.linger = 0
        outgoing.sndhwm = self._messages_max
        outgoing.reconnect_ivl = 50
        outgoing.reconnect_ivl_max = 2000
        events = sum((*REFUSED, *ANOTHER, *ENDED))
        return outgoing, outgoing.get_monitor_socket(events) if watched else None

    def has_failed(self, peer: str, kinds: tuple[int, ...]) -> bool:
        """Return whether a handshake with a watched peer has failed so since the last call."""
        link = self._sockets.get(peer)
        return link is not None and link.take(kinds)

    def ended(self) -> list[tuple[str, int, str]]:
        """Return peer, incarnation and endpoint of watched connections that have ended."""
        ended, self._ended = self._ended, []
        return ended

    def assign_name(self, name: str, to: str) -> None:
        """Give the name to the key that has the name `to`, if there are keys."""
        if self._curve is not None:
            self._curve.assign_name(name, to)

    def disconnect(self, peer: str) -> None:
        """Drop the link to `peer` and its queued messages."""
        link = self._sockets.pop(peer, None)
        if link:
            if link.monitor is not None and self._watched is not None:
                self._watched.unregister(link.monitor.FD)
            link.close(0)

    def send(self, peer: str, message: Message, *, lent: bool = False) -> bool:
        """Queue `message`; return False if it was dropped instead.

        Its arrays are copied. If they are `lent`, they are read when the network has room for
        them, and the caller does not change them before.
        """
        link = self._sockets.pop(peer, None)
        if link is None:
            return False
        self._sockets[peer] = link  # now the most recently used
        *before, last = self._codec.encode(
            message, sender=self.name, incarnation=self.incarnation, receiver=peer
        )
        try:
            for frame in before:  # the header, if there are arrays
                link.socket.send(frame, zmq.DONTWAIT | zmq.SNDMORE)
            link.socket.send(last, zmq.DONTWAIT, copy=not (lent and before))
        except zmq.Again:  # only for the first frame: if it fits, the others do
            return False
        return True

    def poll(self, timeout_seconds: float, extra_fds: Iterable[int] = ()) -> set[int]:
        """Wait for a message or `extra_fds`; return which of them are ready. May return early."""
        self._answer_requests()
        wanted = frozenset(extra_fds)
        if wanted != self._extra_fds:
            for fd in self._extra_fds - wanted:
                self._poller.unregister(fd)
            for fd in wanted - self._extra_fds:
                self._poller.register(fd, zmq.POLLIN)
            self._extra_fds = wanted
        timeout = math.ceil(1000 * max(0.0, timeout_seconds))  # rounding down would busy-wait
        ready = {source for source, _ in self._poller.poll(timeout)}
        if self._zap in ready:
            self._requests.append((time.monotonic(), self._zap.recv_multipart()))
            self._answer_requests()
        if self._curve is not None:
            self._curve.refresh()
        if self._watched is not None and self._watched.fileno() in ready:
            for key, _ in self._watched.select(0):
                self._look_at(key.data)
        return ready & wanted

    def _look_at(self, peer: str) -> None:
        link = self._sockets[peer]
        if link.take(ENDED):
            self._ended.append((peer, link.incarnation, link.target))

    def receive(self) -> Iterator[wire.Envelope]:
        """Yield the messages that have arrived, at most `BATCH_MAX`."""
        for _ in range(BATCH_MAX):
            # Polling first is five times faster than catching `zmq.Again`.
            if not zmq.zmq_poll([(self._inbox, zmq.POLLIN)], 0):
                return
            try:
                frames, source = self._take()
            except zmq.Again:  # only a handshake was readable, no message
                return
            if self._curve is not None and source is None:  # the sender may not send
                self.n_malformed += 1
                continue
            try:
                envelope = self._read(frames, source)
            except RemoteProtocolError as error:
                self.n_malformed += 1
                self._log_rarely(self.n_malformed, f"dropped: {error}")
                is_offence = not isinstance(error, wire.AnotherRunError | auth.NotIntroducedError)
                if is_offence and self._curve is not None and source is not None:
                    self._curve.offended(source, str(error))
                continue
            self._source = source
            yield envelope

    def reject_sender(self, why: str) -> None:
        """Reject for a while the key of the message that `receive` yielded last."""
        if self._curve is not None and self._source is not None:
            self._curve.offended(self._source, why)

    def _read(self, frames: list[wire.Frame], source: auth.Source | None) -> wire.Envelope:
        envelope = self._codec.decode(frames)
        if envelope.sender == USER:  # only `RoleRunner.post` delivers user events
            raise RemoteProtocolError(f"a peer may not speak as {USER!r}")
        if self._curve is not None and source is not None:
            self._curve.check(source, envelope.sender)
        return envelope

    def _take(self) -> tuple[list[wire.Frame], auth.Source | None]:
        # Reads all frames but keeps only enough to prove a message invalid.
        frames: list[wire.Frame] = []
        while True:
            part = self._inbox.recv(zmq.DONTWAIT, copy=False)
            if len(frames) <= wire.FRAMES_MAX:
                frames.append(part.buffer)
            if not part.more:  # much faster than asking the socket (RCVMORE)
                return frames, None if self._curve is None else self._curve.source(part)

    def _answer_requests(self) -> None:
        # A shard may connect to a replica before the supervisor's word about it has come. Rejected,
        # it would try again when the time for the handshake is over.
        waiting, self._requests = self._requests, []
        for at, frames in waiting:
            verdict = self._authenticator.judge(frames[2:])
            if verdict.may_change and time.monotonic() - at < _INTRODUCTION_SECONDS_MAX:
                self._requests.append((at, frames))
                continue
            self._zap.send_multipart([*frames[:2], *answer(frames[2:], verdict)])
            if not verdict.admitted:
                self.n_refused += 1
                self._log_rarely(self.n_refused, verdict.remark)

    def _log_rarely(self, count: int, text: str) -> None:
        # The 1st, 2nd, 4th, 8th, ...: a flood must not fill the disk.
        if count & (count - 1) == 0:
            self._log("warning", f"{text} (so far {count})")


def answer(request: Sequence[bytes], verdict: auth.Verdict) -> list[bytes]:
    """Return the reply to a ZAP request (ZeroMQ's RFC 27): may this peer connect?"""
    text = b"OK" if verdict.admitted else b"not admitted"
    return [*request[:2], verdict.status, text, verdict.user.encode(), b""]


def cannot_bind(address: str, error: zmq.ZMQError) -> str:
    why = str(error.strerror)
    if error.errno == zmq.EADDRNOTAVAIL:
        why = "no interface of this host has this address (0.0.0.0 stands for all interfaces)"
    if error.errno == zmq.EADDRINUSE:
        why = "another process does: stop it, or let the system choose a port (port 0)"
    return f"cannot listen at {address}: {why}"
