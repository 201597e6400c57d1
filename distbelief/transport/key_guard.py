"""The guard where every peer has a key: CURVE, an allow-list, and caps for each peer.

A connection is encrypted, opens only if each side expects the other's key, and may
speak only as the roles of its key (`speakers`). Who breaks a rule loses the connection
at once, and for a while gets no other:

    cap                               how it is kept
    frame                             by ZeroMQ, before it takes the memory
    messages that wait to be read     by ZeroMQ, which stops reading
    bytes that wait to be read        here: also those of a message that never ends
    messages in a second, of a key    here
    time to prove one's key           by ZeroMQ
    connections of one address        here

What is kept here is looked at every `watch_seconds`, so a cap on bytes may be exceeded
by what comes in within that time. A replay of recorded bytes opens nothing: every
connection has keys of its own.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import zmq

from distbelief.errors import RemoteProtocolError, TransportError
from distbelief.roles import SUPERVISOR, Seconds
from distbelief.transport import connections
from distbelief.transport.guard import (
    NOT_NOW,
    REFUSED,
    Inbox,
    NotIntroducedError,
    Outbox,
    Source,
    Verdict,
)
from distbelief.transport.keys import KEY_BYTES, KeyPair
from distbelief.transport.places import Place
from distbelief.transport.speakers import Speakers


_CURVE_BYTES: Final = 33  # of a MESSAGE command around a frame's bytes, RFC 26
_SHORT_MAX: Final = 255  # longer ones have a length of 8 bytes instead of 1, RFC 23


@final
@dataclass(frozen=True, kw_only=True)
class Caps:
    """What one peer may cost.

    Attributes:
        messages_per_second_max: Of one key, over some seconds.
        burst_messages_max: Of one key, at once.
        unread_bytes_max: Of one connection.
        connections_max: Of one address.
        handshake_seconds_max: To prove one's key.
        suspended_seconds: How long who broke a rule stays out.
        watch_seconds: Between two looks.
    """

    messages_per_second_max: float = 5_000.0  # blocks of 1 MiB: 40 Gbit/s
    burst_messages_max: float = 20_000.0
    unread_bytes_max: int = 1 << 28
    connections_max: int = 256
    handshake_seconds_max: float = 5.0
    suspended_seconds: float = 30.0
    watch_seconds: float = 0.25


@final
@dataclass(slots=True, kw_only=True)
class _Record:
    """What is known of one connection.

    Attributes:
        key: Of its messages so far.
        peer: Address and port; None before it has been looked at.
        since: When it was first seen.
        n_bytes: That have been read here, or are forgiven.
    """

    key: str = ""
    peer: tuple[str, int] | None = None
    since: Seconds = 0.0
    n_bytes: int = 0


@final
@dataclass(slots=True)
class _Books:
    """Of all peers."""

    connections: dict[int, _Record] = field(default_factory=dict)  # by descriptor
    n_messages: Counter[str] = field(default_factory=Counter)  # by key, since a look
    levels: dict[str, float] = field(default_factory=dict)  # by key, of its bucket
    suspended: dict[str, Seconds] = field(default_factory=dict)  # key -> until when
    n_closed: int = 0  # connections of who has not shown a key


@final
class KeyGuard:
    """Lets in the keys of an allow-list, each for its roles.

    Args:
        pair: This side's keys.
        speakers: Who may speak as whom.
        warn: Told of every offence.
        caps: What one peer may cost.
        now: The clock.
    """

    encrypts: Final = True

    def __init__(
        self,
        pair: KeyPair,
        speakers: Speakers,
        *,
        warn: Callable[[str], None],
        caps: Caps | None = None,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._pair = pair
        self._speakers = speakers
        self._warn = warn
        self._caps = caps or Caps()
        self._now = now
        self._books = _Books()
        self._watched_at: Seconds = now()
        self._port = 0
        self.watch_seconds = self._caps.watch_seconds
        speakers.refresh()

    # --------------------------------------------------------------------- sockets

    def wire_bytes(self, n_bytes: int) -> int:
        """Return how long a frame of so many bytes is on the network."""
        command = n_bytes + _CURVE_BYTES
        return command + (2 if command <= _SHORT_MAX else 9)

    def listen(self, inbox: Inbox) -> str:
        """Ask everybody for a key."""
        inbox.curve_server = True
        inbox.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.reveal())
        inbox.handshake_ivl = round(1000 * self._caps.handshake_seconds_max)
        return self._pair.public

    def dial(self, outbox: Outbox, peer: str, place: Place) -> None:
        """Show this side's key to who holds the one that the place names, only."""
        if not place.key:
            raise TransportError(
                f"{peer} at {place} has no key, and this side has: either both use "
                "keys, or none"
            )
        self._speakers.refresh()
        if not self._speakers.introduce(peer, place.key):
            raise TransportError(
                f"{peer} at {place} is not connected to: this key is not allowed to "
                f"be a {peer.rpartition('-')[0] or peer}. If it should, on the "
                f"server's machine: distbelief keys allow {place.key} NAME"
            )
        outbox.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(place.key))
        outbox.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._pair.public))
        outbox.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.reveal())
        outbox.handshake_ivl = round(1000 * self._caps.handshake_seconds_max)

    # ----------------------------------------------------------------------- peers

    def judge(self, request: Sequence[bytes]) -> Verdict:
        """Let in the keys on the allow-list (RFC 27; the key is the seventh frame)."""
        address = request[3].decode(errors="replace") if len(request) > 3 else "?"
        if len(request) != 7 or request[5] != b"CURVE" or len(request[6]) != KEY_BYTES:
            return Verdict(status=REFUSED, remark=f"refused {address}: it has no key")
        key = request[6].hex()
        self._speakers.refresh()
        if self._speakers.believes and not self._speakers.admit(key):
            text = f"{address} waits until the supervisor introduces its key"
            return Verdict(status=NOT_NOW, remark=text)
        if not self._speakers.admit(key):
            text = (
                f"refused {address}, whose key is not allowed. If it should be: "
                f"distbelief keys allow {key} NAME"
            )
            return Verdict(status=REFUSED, remark=text)
        if self._is_suspended(key):
            text = f"refused {address} for a while: it broke a rule lately"
            return Verdict(status=NOT_NOW, remark=text)
        return Verdict(user=key)

    def source(self, part: zmq.Frame, n_bytes: int) -> Source | None:
        """Return where a message came from; None if that is nobody who may speak."""
        key = str(part.get("User-Id"))
        descriptor = int(part.get(zmq.SRCFD))
        record = self._books.connections.setdefault(descriptor, _Record())
        record.key = key
        record.n_bytes += n_bytes
        self._books.n_messages[key] += 1
        if not self._speakers.admit(key) or self._is_suspended(key):
            connections.cut(self._port, descriptor)
            return None
        return Source(key, descriptor)

    def check(self, source: Source, sender: str) -> None:
        """Refuse a message that names a sender whom its key may not speak for."""
        if self._speakers.may_speak(source.user, sender):
            return
        text = f"it speaks as {sender!r:.80}, which its key may not"
        # Members of a job come and go: some are early, or late.
        if sender != SUPERVISOR and self._speakers.is_of_job:
            raise NotIntroducedError(text)
        raise RemoteProtocolError(text)

    def entrust(self, name: str, to: str) -> None:
        """Give this name to the key of `to`."""
        self._speakers.entrust(name, to, own=self._pair.public)

    def offended(self, source: Source, why: str) -> None:
        """Close the connection, and keep the key out for a while."""
        self._suspend(source.user, why)
        connections.cut(self._port, source.connection)

    def _is_suspended(self, key: str) -> bool:
        until = self._books.suspended.get(key)
        if until is not None and until <= self._now():
            del self._books.suspended[key]
            return False
        return until is not None

    def _suspend(self, key: str, why: str) -> None:
        if key == self._pair.public:  # a mistake of ours; there would be nobody left
            self._warn(f"this side's own key: {why}")
            return
        seconds = self._caps.suspended_seconds
        if not self._is_suspended(key):
            self._warn(f"key {key[:12]}... is kept out for {seconds:g} s: {why}")
        self._books.suspended[key] = self._now() + seconds

    # ----------------------------------------------------------------------- looks

    def watch(self, port: int) -> None:
        """Look at all connections to this port, if it is time to."""
        self._port = port
        now = self._now()
        seconds = now - self._watched_at
        if seconds < self._caps.watch_seconds:
            return
        self._watched_at = now
        self._speakers.refresh()
        self._look_at_rates(seconds)
        known, seen = self._books.connections, set[int]()
        of_address: Counter[str] = Counter()
        for connection in sorted(connections.connections(port), key=self._age):
            seen.add(connection.descriptor)
            record = self._record(connection, now)
            of_address[connection.peer[0]] += 1
            why = self._objection(connection, record, of_address[connection.peer[0]])
            if why is not None:
                connections.cut(port, connection.descriptor, connection.peer)
                self._closed(connection, record, why)
        for descriptor in known.keys() - seen:
            del known[descriptor]

    def _look_at_rates(self, seconds: Seconds) -> None:
        """Each key has a bucket that leaks; it must not run over."""
        books, caps = self._books, self._caps
        leaked = caps.messages_per_second_max * seconds
        for key in books.levels.keys() | books.n_messages.keys():
            n = books.n_messages[key]
            level = max(0.0, books.levels.pop(key, 0.0) - leaked) + n
            if level > caps.burst_messages_max:
                self._suspend(key, f"it sent {n} messages in {seconds:.2f} s")
            elif level > 0.0:
                books.levels[key] = level
        books.n_messages.clear()

    def _closed(
        self, connection: connections.Connection, record: _Record, why: str
    ) -> None:
        """A connection was closed: say so, but never so often as to fill a disk."""
        if record.key:
            self._suspend(record.key, why)
            return
        n = self._books.n_closed = self._books.n_closed + 1
        if n & (n - 1) == 0:
            text = f"closed a connection of {connection.peer[0]}: {why} (so far {n})"
            self._warn(text)

    def _record(self, connection: connections.Connection, now: Seconds) -> _Record:
        """Return what is known of a connection; begin anew with a new one."""
        records = self._books.connections
        record = records.get(connection.descriptor)
        if record is None:  # it has said nothing so far
            record = _Record(peer=connection.peer, since=now)
        elif record.peer != connection.peer:  # its messages came before this look
            key = record.key if record.peer is None else ""
            n_bytes = connection.n_bytes  # as if all had been read
            record = _Record(key=key, peer=connection.peer, since=now, n_bytes=n_bytes)
        records[connection.descriptor] = record
        return record

    def _age(self, connection: connections.Connection) -> Seconds:
        """Sort the oldest first, those never seen last."""
        record = self._books.connections.get(connection.descriptor)
        is_known = record is not None and record.peer == connection.peer
        return record.since if record is not None and is_known else self._now()

    def _objection(
        self, connection: connections.Connection, record: _Record, n_of_address: int
    ) -> str | None:
        """Return why this connection must not go on."""
        caps = self._caps
        unread = connection.n_bytes - record.n_bytes
        if unread > caps.unread_bytes_max:
            return f"{unread} bytes wait, of a message that does not end or is too much"
        if n_of_address > caps.connections_max:
            return (
                f"{n_of_address} connections at once, more than {caps.connections_max}"
            )
        if record.key and not self._speakers.admit(record.key):
            return "its key is no longer allowed"
        if record.key and self._is_suspended(record.key):
            return "it broke a rule lately"
        return None
