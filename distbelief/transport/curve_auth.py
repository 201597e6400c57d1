"""The guard where every peer has a key: CURVE, an allow-list, and caps for each peer.

A connection is encrypted, opens only if each side expects the other's key, and may
speak only as the roles of its key (`speakers`). Who breaks a rule loses the connection
at once, and for a while gets no other:

    cap                               how it is kept
    frame                             by ZeroMQ, before it takes the memory
    messages that wait to be read     by ZeroMQ, which stops reading
    bytes that wait to be read        here: also those of a message that never ends; of
                                      a connection, and of all those of a key
    messages in a second, of a key    here
    time to prove one's key           by ZeroMQ
    connections of one key, or else   here
    of one address
    new connections in a second,      by the kernel (`siege`)
    that prove no key, or too many
    with the same

What is kept here is looked at every `watch_seconds` (a rush of newcomers sooner), so a
cap on bytes may be exceeded by what comes in within that time. A replay of recorded
bytes opens nothing: every connection has keys of its own.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, final

import zmq

from distbelief.errors import DistBeliefError, RemoteProtocolError, TransportError
from distbelief.roles.role import SUPERVISOR, Seconds
from distbelief.transport import limits
from distbelief.transport.address import Endpoint
from distbelief.transport.authenticator import (
    NOT_NOW,
    REFUSED,
    Inbox,
    NotIntroducedError,
    Outbox,
    Source,
    Verdict,
    curve_bytes,
)
from distbelief.transport.keys import KEY_BYTES, KeyFiles, KeyPair
from distbelief.transport.limits import (
    Connection,
    ConnectionRate,
    PacketFilter,
    Peer,
    PeerLimits,
    PeerRecord,
    PeerTable,
)


# Speakers: which key may speak as which role, by the allow-list and by introduction.
#
#     key of          may speak as
#     worker          worker-...
#     server          supervisor, shard-...
#     host            host-..., and the roles that the supervisor has placed there
#     (the job's)     supervisor, and all its roles
#
# Rules:
#
# * A name belongs to the key that it was introduced with (`introduce`), else to the first
#   that spoke under it: nobody goes on under the name of somebody else.
# * Beside the allow-list, which is read again when it has changed, the key that this side
#   was told of by its own user (a server's address) is trusted as a server.
# * A member of a job believes its supervisor: whoever that introduces has the name, and
#   is let in, though the allow-list does not have it; but not who was taken from that.
# * A job has no workers: whose key is allowed as nothing else is not let in, and so is
#   told at once. Inside, nobody would listen to it, nor say so.
# * A side that cannot read its allow-list lets in nobody.

SPEAKS_AS: Final[dict[str, tuple[str, ...]]] = {
    "worker": ("worker-",),
    "server": ("supervisor", "shard-"),
    "host": ("host-",),
    "job": ("supervisor", "host-", "shard-", "replica-", "evaluator", "evaluator.", "coordinator"),
    "guest": (),
}
"""Roles of keys, and the names of roles; those with a dash or dot are beginnings."""

N_NAMES_MAX: Final = 8192
"""Under which one key has spoken; the oldest are forgotten beyond that."""


@final
class Permissions:
    """Of one transport.

    Args:
        files: With the allow-list.
        trusted: Keys, and their roles, that are not on it.
        warn: Told why the list cannot be read, once until it changes.
        is_of_job: Whether this is the transport of a role of a job.
        believes: Whether whoever is introduced has the name.
    """

    def __init__(
        self,
        files: KeyFiles,
        *,
        trusted: dict[str, tuple[str, ...]],
        warn: Callable[[str], None],
        is_of_job: bool = False,
        believes: bool = False,
    ) -> None:
        self.is_of_job = is_of_job
        self.believes = believes
        self._useless = ("worker",) if is_of_job else ()
        self._files = files
        self._trusted = trusted
        self._warn = warn
        self._read_at: tuple[int, int] | None = None
        self._roles: dict[str, tuple[str, ...]] = {}
        self._listed: set[str] = set()  # keys that are on the list, or were
        self._revoked: set[str] = set()  # of these, who were, when it was last read
        self._names: dict[str, dict[str, None]] = {}  # of each key, oldest first
        self._owners: dict[str, str] = {}  # of each name, its key

    @property
    def keys(self) -> frozenset[str]:
        """Every key that may open a connection."""
        return frozenset(key for key in (*self._roles, *self._names) if self.admit(key))

    def admit(self, key: str) -> bool:
        """Return whether this key may open a connection."""
        believed = self.believes and key in self._names and key not in self._revoked
        return believed or key in self._roles

    def refresh(self) -> bool:
        """Read the allow-list again if it has changed; return whether it had."""
        changed_at = self._files.changed_at
        if changed_at == self._read_at:
            return False
        self._read_at = changed_at
        roles = dict(self._trusted)
        try:
            for entry in self._files.allowed():
                useful = tuple(r for r in entry.roles if r not in self._useless)
                both = (*roles.get(entry.key, ()), *useful)
                if both:
                    roles[entry.key] = tuple(dict.fromkeys(both))
        except DistBeliefError as error:
            self._warn(f"{error}. Until then nobody is let in by it")
        else:
            self._listed |= roles.keys()
            self._revoked = self._listed - roles.keys()
        self._roles = roles
        for key in self._names.keys() - roles.keys():
            if not self.believes:
                self._forget(key)
        return True

    def may_speak(self, key: str, name: str) -> bool:
        """Return whether what this key's holder sends may name this sender."""
        owner = self._owners.get(name)
        if owner is not None:
            return owner == key
        if not self._is_of_roles(key, name):
            return False
        self._give(name, key)
        return True

    def introduce(self, name: str, key: str) -> bool:
        """Give this name to this key, if its roles allow that, or it has it already."""
        if self._owners.get(name) == key:
            return True
        believed = self.believes and name != SUPERVISOR
        if not (believed or self._is_of_roles(key, name)):
            return False
        self._take_away(name)
        self._give(name, key)
        return True

    def entrust(self, name: str, to: str, *, own: str) -> None:
        """Give this name to the key that has the name `to`; else to one's own."""
        key = self._owners.get(to, own)
        if self._owners.get(name) != key:
            self._take_away(name)
            self._give(name, key)

    def _is_of_roles(self, key: str, name: str) -> bool:
        beginnings = (b for role in self._roles.get(key, ()) for b in SPEAKS_AS[role])
        return any(name.startswith(b) if b[-1] in "-." else name == b for b in beginnings)

    def _give(self, name: str, key: str) -> None:
        names = self._names.setdefault(key, {})
        if len(names) >= N_NAMES_MAX:
            self._take_away(next(iter(names)))
        names[name] = None
        self._owners[name] = key

    def _take_away(self, name: str) -> None:
        owner = self._owners.pop(name, None)
        if owner is not None:
            del self._names[owner][name]

    def _forget(self, key: str) -> None:
        for name in self._names.pop(key):
            del self._owners[name]


_BEAT_BYTES: Final = 128  # in a second: more than ZeroMQ's heartbeats, no messages
_PEEK_SECONDS: Final = 0.01  # a flood of that time is as much as a burst


@final
class CurveAuth:
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
        speakers: Permissions,
        *,
        warn: Callable[[str], None],
        caps: PeerLimits | None = None,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._pair = pair
        self._speakers = speakers
        self._warn = warn
        self._caps = caps or PeerLimits()
        self._now = now
        self._books = PeerTable()
        self._watched_at: Seconds = now()
        self._peeked_at: Seconds = now()
        self._port = 0
        self._has_drained = False  # since the last look
        leak = self._caps.newcomers_per_second_max
        burst = self._caps.burst_newcomers_max
        self._newcomers = ConnectionRate(
            per_second_max=leak,
            burst_max=burst,
            silent_max=self._caps.connections_max,
            ended_max=self._caps.unheard_max,
            own=pair.public,
        )
        self._siege = PacketFilter(per_second_max=leak, burst_max=burst)
        self.watch_seconds = self._caps.watch_seconds
        speakers.refresh()

    # --------------------------------------------------------------------- sockets

    def wire_bytes(self, n_bytes: int) -> int:
        """Return how long a frame of so many bytes is on the network."""
        return curve_bytes(n_bytes)

    def listen(self, inbox: Inbox, endpoint: str) -> str:
        """Ask everybody for a key."""
        del endpoint
        seconds = self._caps.handshake_seconds_max
        self._pair.serve(inbox, handshake_seconds_max=seconds)
        self._newcomers.listen(inbox)
        return self._pair.public

    def address(self, endpoint: str) -> str:
        """Return the same."""
        return endpoint

    def dial(self, outbox: Outbox, peer: str, place: Endpoint) -> None:
        """Show this side's key to who holds the one that the place names, only."""
        if not place.key:
            raise TransportError(
                f"{peer} at {place} has no key, and this side has: either both use keys, or none"
            )
        self._speakers.refresh()
        if not self._speakers.introduce(peer, place.key):
            raise TransportError(
                f"{peer} at {place} is not connected to: this key is not allowed to "
                f"be a {peer.rpartition('-')[0] or peer}. If it should, on the "
                f"server's machine: distbelief keys allow {place.key} NAME"
            )
        seconds = self._caps.handshake_seconds_max
        self._pair.dial(outbox, place.key, handshake_seconds_max=seconds)

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
            role = " --role host" if self._speakers.is_of_job else ""
            text = (
                f"refused {address}, whose key is not allowed. If it should be: "
                f"distbelief keys allow {key} NAME{role}"
            )
            return Verdict(status=REFUSED, remark=text)
        if self._is_suspended(key):
            text = f"refused {address} for a while: it broke a rule lately"
            return Verdict(status=NOT_NOW, remark=text)
        if key != self._pair.public and self._is_barred(address):
            text = f"refused {address} for a while: somebody there broke a rule lately"
            return Verdict(status=NOT_NOW, remark=text)
        self._newcomers.admitted(key)
        return Verdict(user=key)

    def source(self, part: zmq.Frame, n_bytes: int) -> Source | None:
        """Return where a message came from; None if that is nobody who may speak."""
        key = str(part.get("User-Id"))
        descriptor = int(part.get(zmq.SRCFD))
        record = self._books.speaking.get(descriptor)
        if record is None:
            record = self._met(descriptor)
            self._newcomers.spoke(key)
        if record is not None:
            record.key = key
            record.n_bytes += n_bytes
        self._books.n_messages[key] += 1
        if not self._speakers.admit(key) or self._is_suspended(key):
            limits.cut_descriptor(self._port, descriptor)
            return None
        return Source(key, descriptor)

    def _met(self, descriptor: int) -> PeerRecord | None:
        """Return the record of one that says its first word; None: it has ended."""
        books = self._books
        connection = limits.at(descriptor, self._port)
        if connection is None:
            return None
        record = self._record(connection, self._now())
        if record.descriptor is not None:  # the same port of the same machine again
            books.speaking.pop(record.descriptor, None)
        record.descriptor = descriptor
        books.speaking[descriptor] = record
        return record

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
        limits.cut_descriptor(self._port, source.connection)

    def _is_suspended(self, key: str) -> bool:
        until = self._books.suspended.get(key)
        if until is not None and until <= self._now():
            del self._books.suspended[key]
            return False
        return until is not None

    def _is_barred(self, address: str) -> bool:
        until = self._books.barred.get(address)
        return until is not None and until > self._now()

    def _suspend(self, key: str, why: str) -> None:
        if key == self._pair.public:  # a mistake of ours; there would be nobody left
            n = self._books.n_own = self._books.n_own + 1
            self._warn_rarely(n, f"this side's own key: {why}")
            return
        seconds = self._caps.suspended_seconds
        if not self._is_suspended(key):
            self._warn(f"key {key[:12]}... is kept out for {seconds:g} s: {why}")
        self._books.suspended[key] = self._now() + seconds

    # ----------------------------------------------------------------------- looks

    def drained(self) -> None:
        """Note that all that was whole has been handed over."""
        self._has_drained = True

    def watch(self, port: int) -> None:
        """Look at all connections to this port, if it is time to."""
        self._port = port
        now, caps = self._now(), self._caps
        seconds = now - self._watched_at
        if seconds < caps.watch_seconds and not self._is_rushed(now):
            return
        self._watched_at = now
        self._speakers.refresh()
        self._look_at_rates(seconds)
        found = sorted(limits.connections(port), key=self._age)
        self._forget({connection.peer for connection in found}, now)
        n_of: Counter[str] = Counter()  # connections, by key or else by address
        cuts: dict[Peer, tuple[PeerRecord, str]] = {}
        hoarding: set[str] = set()  # addresses
        greedy = self._greedy(found, now)
        for connection in found:
            record = self._record(connection, now)
            record.forgive(round(_BEAT_BYTES * seconds), at_most=connection.n_bytes)
            whose = record.key or connection.peer[0]
            n_of[whose] += 1
            why = greedy.get(record.key)
            why = why or self._objection(connection, record, n_of[whose])
            if self._has_drained and why is None:
                why = limits.objection(record, caps)
                hoarding |= {record.peer[0]} if why and not record.key else set()
            if why is not None:
                cuts[connection.peer] = record, why
        records = self._books.connections.values()
        cuts = limits.alike(records, caps, addresses=hoarding) | cuts
        limits.cut(port, cuts.keys())
        # Which key it was that never said a whole word, ZeroMQ does not tell.
        until = now + caps.suspended_seconds
        self._books.barred = {
            address: at for address, at in self._books.barred.items() if at > now
        } | dict.fromkeys(hoarding, until)
        for record, why in cuts.values():
            self._closed(record, why)
        for connection in found:
            n_taken = connection.n_bytes - connection.n_waiting
            self._record(connection, now).n_taken = n_taken
        self._has_drained = False
        n_silent = sum(not self._record(each, now).key for each in found)
        self._look_at_newcomers(seconds, n_silent=n_silent)

    def _greedy(self, found: Sequence[Connection], now: Seconds) -> dict[str, str]:
        """Return the keys whose connections hold too much together, and why."""
        unread: Counter[str] = Counter()
        for connection in found:
            record = self._record(connection, now)
            unread[record.key] += max(0, connection.n_bytes - record.n_bytes)
        return {
            key: f"{n} bytes wait, of all its connections"
            for key, n in unread.items()
            if key and n > self._caps.unread_bytes_of_key_max
        }

    def _forget(self, seen: set[Peer], now: Seconds) -> None:
        """Forget the connections that have ended."""
        books = self._books
        for peer in books.connections.keys() - seen:
            record = books.connections.pop(peer)
            descriptor, key = record.descriptor, record.key
            if descriptor is None:
                continue
            books.speaking.pop(descriptor, None)
            # What another has said by the same descriptor was taken for the last words
            # of the one before.
            follower = limits.at(descriptor, self._port)
            if follower is not None:
                self._record(follower, now).n_bytes = follower.n_bytes
                self._newcomers.spoke(key)

    def _is_rushed(self, now: Seconds) -> bool:
        """Return whether there are so many newcomers that it cannot wait."""
        if now - self._peeked_at < _PEEK_SECONDS:
            return False
        self._peeked_at = now
        return self._newcomers.are_too_many()

    def _look_at_newcomers(self, seconds: Seconds, *, n_silent: int) -> None:
        mute = self._newcomers.mute(seconds, n_open=n_silent)
        for key in mute:
            self._suspend(key, "it opens connections, and says nothing")
        n = self._newcomers.look(seconds)
        if mute:  # they were let in, and more of them will come
            n += round(self._caps.burst_newcomers_max)
        welcome = {
            record.peer[0]
            for record in self._books.connections.values()
            if record.key and not self._is_suspended(record.key)
        } - self._books.barred.keys()
        told = self._siege.look(self._port, n, seconds, welcome=welcome)
        if told is not None:
            self._warn(told)

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

    def _closed(self, record: PeerRecord, why: str) -> None:
        """A connection was closed: say so, but never so often as to fill a disk."""
        # Who is let in no longer has broken no rule: allowed again, it need not wait.
        if record.key and self._speakers.admit(record.key):
            self._suspend(record.key, why)
            return
        n = self._books.n_closed = self._books.n_closed + 1
        self._warn_rarely(n, f"closed a connection of {record.peer[0]}: {why}")

    def _warn_rarely(self, n: int, text: str) -> None:
        """Warn of the 1st, 2nd, 4th, 8th, ... of a kind."""
        if n & (n - 1) == 0:
            self._warn(f"{text} (so far {n})")

    def _record(self, connection: Connection, now: Seconds) -> PeerRecord:
        """Return what is known of a connection."""
        known = self._books.connections
        record = known.get(connection.peer)
        if record is None:
            record = known[connection.peer] = PeerRecord(peer=connection.peer, since=now)
        return record

    def _age(self, connection: Connection) -> Seconds:
        """Sort the oldest first, those never seen last."""
        record = self._books.connections.get(connection.peer)
        return self._now() if record is None else record.since

    def _objection(self, connection: Connection, record: PeerRecord, n_alike: int) -> str | None:
        """Return why this connection must not go on."""
        caps = self._caps
        unread = connection.n_bytes - record.n_bytes
        if unread > caps.unread_bytes_max:
            return f"{unread} bytes wait, of a message that does not end or is too much"
        n_max = caps.connections_of_key_max if record.key else caps.connections_max
        if n_alike > n_max:
            return f"{n_alike} connections at once, more than {n_max}"
        if record.key and not self._speakers.admit(record.key):
            return "its key is no longer allowed"
        if record.key and self._is_suspended(record.key):
            return "it broke a rule lately"
        return None

    def close(self) -> None:
        """Let go of the port: else nobody could listen there again."""
        self._siege.end()
