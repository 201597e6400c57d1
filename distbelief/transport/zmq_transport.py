"""The network between processes: one inbox to read, one outbox per peer to write.

    role A                                role B
    outbox to B (PUSH)  --------------->  inbox (PULL)
    inbox (PULL)        <---------------  outbox to A (PUSH)

Every link runs one way, so that neither side has to guess who speaks next, and the
order of one link is the order of one socket. ZeroMQ promises no delivery: what does
not fit a link's bounded queue is dropped and counted, and roles repeat what matters.

Rules this file keeps:

* Nobody says a word without the run's token. The inbox asks for it before a connection
  carries its first message (ZeroMQ's PLAIN mechanism), because what ZeroMQ holds of an
  unfinished multipart message is bounded by nothing else; `Wire` asks again in every
  header.
* Nothing here blocks but `poll`, up to its timeout, and `close`, up to its linger.
* What a peer sends wrongly costs a counter and, now and then, a line in the log.
* The token travels in the clear: beyond this machine only if `allow_remote` says so.

What one link may hold in memory: `messages_max` blocks at either end. A member that
knows the token is trusted not to send a message whose parts never end.
"""

import hmac
import ipaddress
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq

from distbelief.errors import LocalProtocolError, RemoteProtocolError, TransportError
from distbelief.messages import Message
from distbelief.wire import (
    FRAME_BYTES_MAX,
    FRAMES_MAX,
    HEADER_BYTES_MAX,
    Envelope,
    Frame,
    Wire,
)


Log = Callable[[str, str], None]  # level, text

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
_PLAIN_BYTES_MAX = 255  # of a name or password in the PLAIN mechanism, RFC 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Bounds of a transport, and whether it may leave this machine."""

    allow_remote: bool = False
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
    refused: int = 0  # connections without the run's token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outbox:
    incarnation: int
    endpoint: str
    socket: "zmq.Socket[bytes]"
    refusals: "zmq.Socket[bytes] | None"  # ZeroMQ's word that the token was not taken

    def close(self, linger: int) -> None:
        if self.refusals is not None:
            self.socket.disable_monitor()
            self.refusals.close(0)
        self.socket.close(linger)


class ZmqTransport:
    """The links of one role. For one thread only; `start` before all else."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        token: str,
        bind: str = "tcp://127.0.0.1:*",
        options: TransportOptions | None = None,
        log: Log = lambda _level, _text: None,
    ) -> None:
        for what, text in (("name", name), ("token", token)):
            if not 1 <= len(text.encode()) <= _PLAIN_BYTES_MAX:
                raise ValueError(
                    f"a {what} of {len(text.encode())} bytes: 1 to {_PLAIN_BYTES_MAX}"
                )
        self.name = name
        self.incarnation = incarnation
        self.counters = TransportCounters()
        self._token = token
        self._bind = bind
        self._options = options or TransportOptions()
        self._log = log
        self._wire = Wire(token=token)
        self._endpoint = ""
        self._extra_fds: frozenset[int] = frozenset()
        self._outboxes: dict[str, _Outbox] = {}
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
        self._check_reach(self._bind)
        self._context = zmq.Context()
        # Requests to admit a connection; an address of this context alone.
        self._door = self._context.socket(zmq.REP)
        self._door.linger = 0
        self._door.bind(_ZAP_ENDPOINT)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.plain_server = True
        self._inbox.rcvhwm = self._options.messages_max
        self._inbox.maxmsgsize = max(HEADER_BYTES_MAX, FRAME_BYTES_MAX)
        self._inbox.backlog = 1024  # a whole cluster may connect at once
        try:
            self._inbox.bind(self._bind)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(_cannot_bind(self._bind, error)) from None
        self._endpoint = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
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

    def connect(
        self, peer: str, incarnation: int, endpoint: str, *, watched: bool = False
    ) -> None:
        """From now on `peer` is at `endpoint`; what an older link still held is lost.

        Args:
            peer: Whose messages go there.
            incarnation: Its life.
            endpoint: Where it listens.
            watched: Let `is_refused` know whether it takes the run's token.

        Raises:
            TransportError: no such endpoint can be connected to.
        """
        known = self._outboxes.get(peer)
        if known and (known.incarnation, known.endpoint) == (incarnation, endpoint):
            return
        self._check_reach(endpoint)
        self.disconnect(peer)
        socket = self._running_context().socket(zmq.PUSH)
        socket.linger = 0
        socket.plain_username = self.name.encode()
        socket.plain_password = self._token.encode()
        socket.sndhwm = self._options.messages_max
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 2000
        refusals = None
        if watched:
            refusals = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise TransportError(
                f"cannot connect to {peer} at {endpoint!r}: {error.strerror}"
            ) from None
        self._outboxes[peer] = _Outbox(
            incarnation=incarnation,
            endpoint=endpoint,
            socket=socket,
            refusals=refusals,
        )

    def is_refused(self, peer: str) -> bool:
        """Return whether a watched peer has not taken the token since asked last."""
        outbox = self._outboxes.get(peer)
        if outbox is None or outbox.refusals is None:
            return False
        refused = False
        while outbox.refusals.poll(0):
            outbox.refusals.recv_multipart()
            refused = True
        return refused

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
        outbox = self._outboxes.get(peer)
        if outbox is None:
            self.counters.dropped_unknown += 1
            return False
        frames = self._wire.encode(
            message, sender=self.name, incarnation=self.incarnation
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

    def poll(
        self, timeout_seconds: float, extra_fds: Iterable[int] = ()
    ) -> frozenset[int]:
        """Wait for a message, or for one of `extra_fds`; return those that are ready.

        Returns early whenever it likes: the caller looks again.
        """
        wanted = frozenset(extra_fds)
        for fd in self._extra_fds - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._extra_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._extra_fds = wanted
        timeout = math.ceil(1000 * max(0.0, timeout_seconds))  # never a busy wait
        ready = {source for source, _ in self._poller.poll(timeout)}
        if self._door in ready:
            self._admit()
        return wanted & ready

    def receive(self) -> Iterator[Envelope]:
        """Yield messages that are here already, `batch_max` of them at the most."""
        for _ in range(self._options.batch_max):
            # Asking first is five times faster than to be told `Again` by an exception.
            if not zmq.zmq_poll([(self._inbox, zmq.POLLIN)], 0):
                return
            try:
                envelope = self._wire.decode(self._take())
            except RemoteProtocolError as error:
                self.counters.malformed += 1
                self._log_rarely(self.counters.malformed, f"dropped: {error}")
                continue
            self.counters.messages_in += 1
            yield envelope

    def _take(self) -> list[Frame]:
        """Return the next message's frames, but never more than prove it illegal."""
        frames: list[Frame] = []
        more = True
        while more:
            part = self._inbox.recv(zmq.DONTWAIT, copy=False)
            more = part.more  # asking the socket takes longer than all the rest
            frame = part.buffer
            self.counters.bytes_in += len(frame)
            if len(frames) <= FRAMES_MAX:
                frames.append(frame)
        return frames

    def _admit(self) -> None:
        """Let in who knows the token (ZeroMQ's RFC 27: requests and replies)."""
        version, request, *_, password = self._door.recv_multipart()
        if hmac.compare_digest(password, self._token.encode()):
            status = [b"200", b"OK"]
        else:
            self.counters.refused += 1
            self._log_rarely(self.counters.refused, "refused a peer of another run")
            status = [b"400", b"another run"]
        self._door.send_multipart([version, request, *status, b"", b""])

    def _log_rarely(self, count: int, text: str) -> None:
        """Log the 1st, 2nd, 4th, 8th, … of a kind: a flood cannot fill a disk."""
        if count & (count - 1) == 0:
            self._log("warning", f"{text} (so far {count})")

    def _check_reach(self, endpoint: str) -> None:
        if not (self._options.allow_remote or _is_local(endpoint)):
            raise TransportError(
                f"{endpoint!r} is not on this machine, and messages are not encrypted: "
                f"use tcp://127.0.0.1:*, or allow remote peers (allow_remote=True)"
            )

    def _running_context(self) -> "zmq.Context[zmq.Socket[bytes]]":
        if self._context is None:
            raise LocalProtocolError(f"the transport of {self.name} is not running")
        return self._context


def _is_local(endpoint: str) -> bool:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return True
    host, _, _ = address.rpartition(":")
    try:
        return scheme == "tcp" and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def _cannot_bind(address: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return (
            f"cannot listen at {address}: something else does. Stop it, or let the "
            f"system choose a port (tcp://127.0.0.1:*)"
        )
    return f"cannot listen at {address!r}: {error.strerror}"
