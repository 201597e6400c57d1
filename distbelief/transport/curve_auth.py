"""CurveAuth: every peer has a key; an allow-list says which roles each key may speak as.

A connection is encrypted and opens only if each side expects the other's key. What bounds a peer:

    size of a frame, waiting messages, time for the handshake   ZeroMQ, for everybody
    messages and new connections per second                     a token bucket for each key

A key that exceeds its bucket, or breaks a rule, loses its connection and is rejected for a while.
Replayed bytes open no connection: each has session keys of its own.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

import zmq

from distbelief.errors import DistBeliefError, RemoteProtocolError, TransportError
from distbelief.roles.role import SUPERVISOR, Seconds
from distbelief.transport.address import Endpoint
from distbelief.transport.authenticator import NOT_NOW, REFUSED, Socket, Verdict
from distbelief.transport.keys import KEY_BYTES, KeyFiles, KeyPair


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


class NotIntroducedError(RemoteProtocolError):
    """The sender may not use this name yet, or no longer; not a violation."""


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
        if not self.believes:
            for key in self._names.keys() - roles.keys():
                for name in self._names.pop(key):
                    del self._owners[name]
        return True

    def may_speak(self, key: str, name: str) -> bool:
        """Return whether the holder of this key may name this sender."""
        # A name belongs to the key it was introduced with, else to the first that used it.
        owner = self._owners.get(name)
        if owner is None and self._role_allows(key, name):
            owner = self._give(name, key)
        return owner == key

    def introduce(self, name: str, key: str) -> bool:
        """Give the name to the key if the key's roles allow it; return whether it has it."""
        if self._owners.get(name) != key:
            believed = self.believes and name != SUPERVISOR
            if not (believed or self._role_allows(key, name)):
                return False
            self._give(name, key)
        return True

    def assign_name(self, name: str, to: str, *, own: str) -> None:
        """Give the name to the key that has the name `to`, else to `own`."""
        key = self._owners.get(to, own)
        if self._owners.get(name) != key:
            self._give(name, key)

    def _role_allows(self, key: str, name: str) -> bool:
        prefixes = (b for role in self._roles.get(key, ()) for b in SPEAKS_AS[role])
        return any(name.startswith(b) if b[-1] in "-." else name == b for b in prefixes)

    def _give(self, name: str, key: str) -> str:
        self._take_away(name)
        names = self._names.setdefault(key, {})
        if len(names) >= N_NAMES_MAX:
            self._take_away(next(iter(names)))
        names[name] = None
        self._owners[name] = key
        return key

    def _take_away(self, name: str) -> None:
        owner = self._owners.pop(name, None)
        if owner is not None:
            del self._names[owner][name]


@final
@dataclass(frozen=True, kw_only=True)
class PeerLimits:
    """What one key may cost; the roles of a host share one."""

    messages_per_second: float = 5_000.0  # blocks of 1 MiB: 40 Gbit/s
    burst_messages: float = 20_000.0
    connection_messages: float = 20.0  # a new connection counts like so many messages
    suspended_seconds: Seconds = 30.0  # how long a key that broke a rule is rejected


@final
@dataclass(slots=True)
class TokenBucket:
    """Allows `per_second` over some time, and `size` at once."""

    per_second: float
    size: float
    level: float  # tokens left
    at: Seconds  # when that was

    def take(self, n_tokens: float, now: Seconds) -> bool:
        """Take tokens; return whether there were enough."""
        self.level = min(self.size, self.level + self.per_second * (now - self.at)) - n_tokens
        self.at = now
        if self.level >= 0.0:
            return True
        self.level = 0.0
        return False


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Where a message came from."""

    key: str  # the sender's public key
    connection: int = -1  # file descriptor of the connection


_REFRESH_SECONDS: Final = 0.25  # between two looks at the allow-list


@final
class CurveAuth:
    """Accepts the keys of an allow-list, each for its roles.

    Args:
        pair: This side's keys.
        permissions: Which key may speak as which role.
        warn: Called at every violation.
        limits: Limits of one key; this side's own has none.
        now: The clock.
    """

    encrypts: Final = True

    def __init__(
        self,
        pair: KeyPair,
        permissions: Permissions,
        *,
        warn: Callable[[str], None],
        limits: PeerLimits | None = None,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._pair = pair
        self._permissions = permissions
        self._warn = warn
        self._limits = limits or PeerLimits()
        self._now = now
        self._buckets: dict[str, TokenBucket] = {}  # by key
        self._suspended: dict[str, Seconds] = {}  # key -> until when
        self._connections: dict[int, str] = {}  # descriptor -> key of its last message
        self._n_own = 0  # violations by this side's own key
        self._inbox: Socket | None = None
        self._refreshed_at: Seconds = now()
        permissions.refresh()

    # --- connections ---

    def listen(self, inbox: Socket, endpoint: str) -> str:
        del endpoint
        self._inbox = inbox
        self._pair.serve(inbox)
        return self._pair.public

    def address(self, endpoint: str) -> str:
        return endpoint

    def dial(self, outgoing: Socket, peer: str, endpoint: Endpoint) -> None:
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
        self._pair.dial(outgoing, endpoint.key)

    def judge(self, request: Sequence[bytes]) -> Verdict:
        # RFC 27: frames 4, 6 and 7 are the address, the mechanism and the public key.
        address = request[3].decode(errors="replace") if len(request) > 3 else "?"
        if len(request) != 7 or request[5] != b"CURVE" or len(request[6]) != KEY_BYTES:
            return Verdict(status=REFUSED, remark=f"rejected {address}: it has no key")
        key = request[6].hex()
        self._permissions.refresh()
        if not self._permissions.admit(key):
            if self._permissions.believes:
                text = f"rejected {address} until the supervisor introduces its key"
                return Verdict(status=NOT_NOW, remark=text)
            role = " --role host" if self._permissions.is_of_job else ""
            text = (
                f"rejected {address}: its key is not allowed. To allow it: "
                f"distbelief keys allow {key} NAME{role}"
            )
            return Verdict(status=REFUSED, remark=text)
        if not self._may_cost(key, self._limits.connection_messages, "connections"):
            text = f"rejected {address} for a while: its key broke a rule"
            return Verdict(status=NOT_NOW, remark=text)
        return Verdict(user=key)

    def close(self) -> None:
        pass

    # --- messages ---

    def source(self, part: zmq.Frame) -> Source | None:
        """Return the source of a message; None: drop the message unread."""
        key = str(part.get("User-Id"))
        connection = int(part.get(zmq.SRCFD))
        self._connections[connection] = key
        if self._permissions.admit(key) and self._may_cost(key, 1.0, "messages"):
            return Source(key, connection)
        self._cut(connection)
        return None

    def check(self, source: Source, sender: str) -> None:
        """Check that a message from this source may name this sender.

        Raises:
            RemoteProtocolError: It may not.
        """
        if self._permissions.may_speak(source.key, sender):
            return
        text = f"its key may not speak as {sender!r:.80}"
        # Members of a job come and go: a message may be early or late.
        if sender != SUPERVISOR and self._permissions.is_of_job:
            raise NotIntroducedError(text)
        raise RemoteProtocolError(text)

    def assign_name(self, name: str, to: str) -> None:
        """Give the name to the key that has the name `to`, and to no other key."""
        self._permissions.assign_name(name, to, own=self._pair.public)

    def offended(self, source: Source, why: str) -> None:
        """Reject the key of an invalid message for a while, and close its connection."""
        if source.key != self._pair.public:
            self._suspend(source.key, why)
        else:  # never suspended: all roles of this host would be cut off
            self._n_own += 1
            if self._n_own & (self._n_own - 1) == 0:
                self._warn(f"this side's own key: {why} (so far {self._n_own})")
        self._cut(source.connection)

    def refresh(self) -> None:
        """Follow the allow-list, now and then: close the connections of revoked keys."""
        now = self._now()
        if now - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at = now
        if self._permissions.refresh():
            for connection, key in list(self._connections.items()):
                if not self._permissions.admit(key):
                    self._warn(f"closed a connection: key {key[:12]}... is no longer allowed")
                    self._cut(connection)

    def _may_cost(self, key: str, n_messages: float, what: str) -> bool:
        if key == self._pair.public:
            return True
        now = self._now()
        until = self._suspended.get(key)
        if until is not None:
            if now < until:
                return False
            del self._suspended[key]
        bucket = self._buckets.get(key)
        if bucket is None:
            burst = self._limits.burst_messages
            bucket = TokenBucket(self._limits.messages_per_second, burst, burst, now)
            self._buckets[key] = bucket
        if bucket.take(n_messages, now):
            return True
        self._suspend(key, f"too many {what} per second")
        return False

    def _suspend(self, key: str, why: str) -> None:
        seconds = self._limits.suspended_seconds
        if key not in self._suspended:
            self._warn(f"rejecting key {key[:12]}... for {seconds:g} s: {why}")
        self._suspended[key] = self._now() + seconds

    def _cut(self, connection: int) -> None:
        """Close a connection, as if its peer had; ZeroMQ has no call for that."""
        self._connections.pop(connection, None)
        if self._inbox is None:
            return
        own = Endpoint.parse(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT))
        with suppress(OSError):  # ZeroMQ may have closed it already
            link = _socket_of(connection)
            with link:
                # The descriptor may be another's by now: our listener has no peer, and what we
                # opened ourselves another port.
                link.getpeername()
                if link.getsockname()[1] == own.port:
                    link.shutdown(socket.SHUT_RDWR)


def _socket_of(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
