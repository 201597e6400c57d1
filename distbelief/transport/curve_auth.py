"""CurveAuth: every peer has a key; an allow-list says which roles each key may speak as.

A connection is encrypted and opens only if each side expects the other's key. A peer that breaks
a rule loses its connections, and its key or address is rejected for some seconds. Limits:

    size of a frame, unread messages, time for the handshake    ZeroMQ
    unread bytes, messages per second, connections               here, every `watch_seconds`
    new connections per second without an allowed key            the kernel (`PacketFilter`)

A limit on bytes may be exceeded by what arrives between two checks. Replayed bytes open no
connection: each has session keys of its own.
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
    OutgoingSocket,
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


# --- permissions ---

# Role of a key -> names of roles that it may use; an entry that ends in - or . is a prefix.
SPEAKS_AS: Final[dict[str, tuple[str, ...]]] = {
    "worker": ("worker-",),
    "server": ("supervisor", "shard-"),
    "host": ("host-",),
    "job": ("supervisor", "host-", "shard-", "replica-", "evaluator", "evaluator.", "coordinator"),
    "guest": (),
}

# Names that one key may have; beyond it, the oldest is forgotten.
N_NAMES_MAX: Final = 8192


@final
class Permissions:
    """Which key may speak as which role, by the allow-list and by introduction.

    Args:
        files: Key files with the allow-list.
        trusted: Keys that are not on the list, and their roles.
        warn: Called when the list cannot be read, once until it changes.
        is_of_job: Whether this is the transport of a role of a job.
        believes: Whether keys introduced by the supervisor are trusted.
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
        # A job has no workers: such a key is rejected at once, since no role would answer it.
        self._ignored_roles = ("worker",) if is_of_job else ()
        self._files = files
        self._trusted = trusted
        self._warn = warn
        self._read_at: tuple[int, int] | None = None
        self._roles: dict[str, tuple[str, ...]] = {}
        self._listed: set[str] = set()  # keys that are or were on the list
        self._revoked: set[str] = set()  # keys that were on the list and are not now
        self._names: dict[str, dict[str, None]] = {}  # key -> its names, oldest first
        self._owners: dict[str, str] = {}  # name -> its key

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key in (*self._roles, *self._names) if self.admit(key))

    def admit(self, key: str) -> bool:
        # A member of a job trusts its supervisor's introductions, but no revoked key.
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
                roles_used = tuple(r for r in entry.roles if r not in self._ignored_roles)
                both = (*roles.get(entry.key, ()), *roles_used)
                if both:
                    roles[entry.key] = tuple(dict.fromkeys(both))
        except DistBeliefError as error:
            self._warn(f"{error}. Until then its keys are not accepted")
        else:
            self._listed |= roles.keys()
            self._revoked = self._listed - roles.keys()
        self._roles = roles
        for key in self._names.keys() - roles.keys():
            if not self.believes:
                self._forget(key)
        return True

    def may_speak(self, key: str, name: str) -> bool:
        """Return whether the holder of this key may name this sender."""
        # A name belongs to the key it was introduced with, else to the first that used it.
        owner = self._owners.get(name)
        if owner is not None:
            return owner == key
        if not self._role_allows(key, name):
            return False
        self._give(name, key)
        return True

    def introduce(self, name: str, key: str) -> bool:
        """Give the name to the key if the key's roles allow it; return whether it has it."""
        if self._owners.get(name) == key:
            return True
        believed = self.believes and name != SUPERVISOR
        if not (believed or self._role_allows(key, name)):
            return False
        self._take_away(name)
        self._give(name, key)
        return True

    def assign_name(self, name: str, to: str, *, own: str) -> None:
        """Give the name to the key that has the name `to`, else to `own`."""
        key = self._owners.get(to, own)
        if self._owners.get(name) != key:
            self._take_away(name)
            self._give(name, key)

    def _role_allows(self, key: str, name: str) -> bool:
        prefixes = (b for role in self._roles.get(key, ()) for b in SPEAKS_AS[role])
        return any(name.startswith(b) if b[-1] in "-." else name == b for b in prefixes)

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


# --- authenticator ---

_BEAT_BYTES: Final = 128  # per second: more than ZeroMQ's heartbeats, less than messages
_PEEK_SECONDS: Final = 0.01  # short enough that a flood in between is at most a burst


@final
class CurveAuth:
    """Accepts the keys of an allow-list, each for its roles.

    Args:
        pair: This side's keys.
        permissions: Which key may speak as which role.
        warn: Called at every violation.
        caps: Limits of one peer.
        now: The clock.
    """

    encrypts: Final = True

    def __init__(
        self,
        pair: KeyPair,
        permissions: Permissions,
        *,
        warn: Callable[[str], None],
        caps: PeerLimits | None = None,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._pair = pair
        self._permissions = permissions
        self._warn = warn
        self._caps = caps or PeerLimits()
        self._now = now
        self._table = PeerTable()
        self._watched_at: Seconds = now()
        self._peeked_at: Seconds = now()
        self._port = 0
        self._has_drained = False  # since the last check
        leak = self._caps.newcomers_per_second_max
        burst = self._caps.burst_newcomers_max
        self._connection_rate = ConnectionRate(
            per_second_max=leak,
            burst_max=burst,
            silent_max=self._caps.connections_max,
            ended_max=self._caps.unheard_max,
            own=pair.public,
        )
        self._packet_filter = PacketFilter(per_second_max=leak, burst_max=burst)
        self.watch_seconds = self._caps.watch_seconds
        permissions.refresh()

    def wire_bytes(self, n_bytes: int) -> int:
        return curve_bytes(n_bytes)

    def listen(self, inbox: Inbox, endpoint: str) -> str:
        del endpoint
        seconds = self._caps.handshake_seconds_max
        self._pair.serve(inbox, handshake_seconds_max=seconds)
        self._connection_rate.listen(inbox)
        return self._pair.public

    def address(self, endpoint: str) -> str:
        return endpoint

    def dial(self, outbox: OutgoingSocket, peer: str, endpoint: Endpoint) -> None:
        if not endpoint.key:
            raise TransportError(
                f"cannot connect to {peer} at {endpoint}: it uses no key and this side does; "
                "use keys on both sides or on none"
            )
        self._permissions.refresh()
        if not self._permissions.introduce(peer, endpoint.key):
            raise TransportError(
                f"cannot connect to {peer} at {endpoint}: its key is not allowed to be a "
                f"{peer.rpartition('-')[0] or peer}. To allow it, on the server's host: "
                f"distbelief keys allow {endpoint.key} NAME"
            )
        seconds = self._caps.handshake_seconds_max
        self._pair.dial(outbox, endpoint.key, handshake_seconds_max=seconds)

    def judge(self, request: Sequence[bytes]) -> Verdict:
        # RFC 27: frames 4, 6 and 7 are the address, the mechanism and the public key.
        address = request[3].decode(errors="replace") if len(request) > 3 else "?"
        if len(request) != 7 or request[5] != b"CURVE" or len(request[6]) != KEY_BYTES:
            return Verdict(status=REFUSED, remark=f"rejected {address}: it has no key")
        key = request[6].hex()
        self._permissions.refresh()
        if self._permissions.believes and not self._permissions.admit(key):
            text = f"rejected {address} until the supervisor introduces its key"
            return Verdict(status=NOT_NOW, remark=text)
        if not self._permissions.admit(key):
            role = " --role host" if self._permissions.is_of_job else ""
            text = (
                f"rejected {address}: its key is not allowed. To allow it: "
                f"distbelief keys allow {key} NAME{role}"
            )
            return Verdict(status=REFUSED, remark=text)
        if self._is_suspended(key):
            text = f"rejected {address} for a while: its key broke a rule"
            return Verdict(status=NOT_NOW, remark=text)
        if key != self._pair.public and self._is_barred(address):
            text = f"rejected {address} for a while: a peer at this address broke a rule"
            return Verdict(status=NOT_NOW, remark=text)
        self._connection_rate.admitted(key)
        return Verdict(user=key)

    def source(self, part: zmq.Frame, n_bytes: int) -> Source | None:
        key = str(part.get("User-Id"))
        descriptor = int(part.get(zmq.SRCFD))
        record = self._table.speaking.get(descriptor)
        if record is None:
            record = self._met(descriptor)
            self._connection_rate.spoke(key)
        if record is not None:
            record.key = key
            record.n_bytes += n_bytes
        self._table.n_messages[key] += 1
        if not self._permissions.admit(key) or self._is_suspended(key):
            limits.cut_descriptor(self._port, descriptor)
            return None
        return Source(key, descriptor)

    def _met(self, descriptor: int) -> PeerRecord | None:
        # None: the connection has ended already.
        table = self._table
        connection = limits.at(descriptor, self._port)
        if connection is None:
            return None
        record = self._record(connection, self._now())
        if record.descriptor is not None:  # the same port of the same host again
            table.speaking.pop(record.descriptor, None)
        record.descriptor = descriptor
        table.speaking[descriptor] = record
        return record

    def check(self, source: Source, sender: str) -> None:
        if self._permissions.may_speak(source.user, sender):
            return
        text = f"its key may not speak as {sender!r:.80}"
        # Members of a job come and go: a message may be early or late.
        if sender != SUPERVISOR and self._permissions.is_of_job:
            raise NotIntroducedError(text)
        raise RemoteProtocolError(text)

    def assign_name(self, name: str, to: str) -> None:
        self._permissions.assign_name(name, to, own=self._pair.public)

    def offended(self, source: Source, why: str) -> None:
        self._suspend(source.user, why)
        limits.cut_descriptor(self._port, source.connection)

    def _is_suspended(self, key: str) -> bool:
        until = self._table.suspended.get(key)
        if until is not None and until <= self._now():
            del self._table.suspended[key]
            return False
        return until is not None

    def _is_barred(self, address: str) -> bool:
        until = self._table.barred.get(address)
        return until is not None and until > self._now()

    def _suspend(self, key: str, why: str) -> None:
        # Never suspend the own key: all roles of this host would be cut off.
        if key == self._pair.public:
            n = self._table.n_own = self._table.n_own + 1
            self._warn_rarely(n, f"this side's own key: {why}")
            return
        seconds = self._caps.suspended_seconds
        if not self._is_suspended(key):
            self._warn(f"rejecting key {key[:12]}... for {seconds:g} s: {why}")
        self._table.suspended[key] = self._now() + seconds

    # --- checks ---

    def drained(self) -> None:
        self._has_drained = True

    def watch(self, port: int) -> None:
        self._port = port
        now, caps = self._now(), self._caps
        seconds = now - self._watched_at
        if seconds < caps.watch_seconds and not self._is_burst(now):
            return
        self._watched_at = now
        self._permissions.refresh()
        self._check_message_rates(seconds)
        found = sorted(limits.connections(port), key=self._age)
        self._forget({connection.peer for connection in found}, now)
        n_of: Counter[str] = Counter()  # connections, by key or else by address
        cuts: dict[Peer, tuple[PeerRecord, str]] = {}
        unfinished: set[str] = set()  # addresses
        greedy = self._greedy(found, now)
        for connection in found:
            record = self._record(connection, now)
            record.discount(round(_BEAT_BYTES * seconds), at_most=connection.n_bytes)
            whose = record.key or connection.peer[0]
            n_of[whose] += 1
            why = greedy.get(record.key)
            why = why or self._objection(connection, record, n_of[whose])
            if self._has_drained and why is None:
                why = limits.objection(record, caps)
                unfinished |= {record.peer[0]} if why and not record.key else set()
            if why is not None:
                cuts[connection.peer] = record, why
        records = self._table.connections.values()
        cuts = limits.alike(records, caps, addresses=unfinished) | cuts
        limits.cut(port, cuts.keys())
        # ZeroMQ does not tell the key of a connection without a complete message.
        until = now + caps.suspended_seconds
        self._table.barred = {
            address: at for address, at in self._table.barred.items() if at > now
        } | dict.fromkeys(unfinished, until)
        for record, why in cuts.values():
            self._closed(record, why)
        for connection in found:
            n_taken = connection.n_bytes - connection.n_waiting
            self._record(connection, now).n_taken = n_taken
        self._has_drained = False
        n_silent = sum(not self._record(each, now).key for each in found)
        self._check_connection_rate(seconds, n_silent=n_silent)

    def _greedy(self, found: Sequence[Connection], now: Seconds) -> dict[str, str]:
        unread: Counter[str] = Counter()
        for connection in found:
            record = self._record(connection, now)
            unread[record.key] += max(0, connection.n_bytes - record.n_bytes)
        return {
            key: f"{n} unread bytes on all its connections"
            for key, n in unread.items()
            if key and n > self._caps.unread_bytes_of_key_max
        }

    def _forget(self, seen: set[Peer], now: Seconds) -> None:
        table = self._table
        for peer in table.connections.keys() - seen:
            record = table.connections.pop(peer)
            descriptor, key = record.descriptor, record.key
            if descriptor is None:
                continue
            table.speaking.pop(descriptor, None)
            # A new connection reuses the descriptor: its bytes were counted for the old one.
            follower = limits.at(descriptor, self._port)
            if follower is not None:
                self._record(follower, now).n_bytes = follower.n_bytes
                self._connection_rate.spoke(key)

    def _is_burst(self, now: Seconds) -> bool:
        if now - self._peeked_at < _PEEK_SECONDS:
            return False
        self._peeked_at = now
        return self._connection_rate.are_too_many()

    def _check_connection_rate(self, seconds: Seconds, *, n_silent: int) -> None:
        mute = self._connection_rate.mute(seconds, n_open=n_silent)
        for key in mute:
            self._suspend(key, "it opens connections and sends nothing")
        n = self._connection_rate.look(seconds)
        if mute:  # these were accepted, and more will come
            n += round(self._caps.burst_newcomers_max)
        welcome = {
            record.peer[0]
            for record in self._table.connections.values()
            if record.key and not self._is_suspended(record.key)
        } - self._table.barred.keys()
        news = self._packet_filter.look(self._port, n, seconds, welcome=welcome)
        if news is not None:
            self._warn(news)

    def _check_message_rates(self, seconds: Seconds) -> None:
        # A leaky bucket for each key.
        table, caps = self._table, self._caps
        leaked = caps.messages_per_second_max * seconds
        for key in table.levels.keys() | table.n_messages.keys():
            n = table.n_messages[key]
            level = max(0.0, table.levels.pop(key, 0.0) - leaked) + n
            if level > caps.burst_messages_max:
                self._suspend(key, f"it sent {n} messages in {seconds:.2f} s")
            elif level > 0.0:
                table.levels[key] = level
        table.n_messages.clear()

    def _closed(self, record: PeerRecord, why: str) -> None:
        # A revoked key broke no rule: allowed again, it connects at once.
        if record.key and self._permissions.admit(record.key):
            self._suspend(record.key, why)
            return
        n = self._table.n_closed = self._table.n_closed + 1
        self._warn_rarely(n, f"closed a connection of {record.peer[0]}: {why}")

    def _warn_rarely(self, n: int, text: str) -> None:
        if n & (n - 1) == 0:
            self._warn(f"{text} (so far {n})")

    def _record(self, connection: Connection, now: Seconds) -> PeerRecord:
        known = self._table.connections
        record = known.get(connection.peer)
        if record is None:
            record = known[connection.peer] = PeerRecord(peer=connection.peer, since=now)
        return record

    def _age(self, connection: Connection) -> Seconds:
        # Oldest first, new connections last.
        record = self._table.connections.get(connection.peer)
        return self._now() if record is None else record.since

    def _objection(self, connection: Connection, record: PeerRecord, n_alike: int) -> str | None:
        caps = self._caps
        unread = connection.n_bytes - record.n_bytes
        if unread > caps.unread_bytes_max:
            return f"{unread} unread bytes: a message that does not end or is too large"
        n_max = caps.connections_of_key_max if record.key else caps.connections_max
        if n_alike > n_max:
            return f"{n_alike} connections at once, at most {n_max} are allowed"
        if record.key and not self._permissions.admit(record.key):
            return "its key is no longer allowed"
        if record.key and self._is_suspended(record.key):
            return "it broke a rule"
        return None

    def close(self) -> None:
        self._packet_filter.end()
