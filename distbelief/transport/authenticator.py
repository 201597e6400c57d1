"""Authenticators: which peers may connect, which roles they may speak as, how much they may send.

    authenticator   sockets   who may connect                      who may name a sender
    DirectoryAuth   files     processes that can enter a directory  anybody
    RunAuth         TCP       holders of the run's key              anybody
    CurveAuth       TCP       keys of an allow-list                 each key for its roles

With keys, ZeroMQ asks (RFC 27, "ZAP") before a connection carries its first message.
No authenticator sends a secret: with CURVE both sides prove that they hold one.
"""

import os
import re
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import zmq

from distbelief.core.errors import DistBeliefError, RemoteProtocolError, TransportError
from distbelief.protocol.role import SUPERVISOR, Seconds
from distbelief.transport.address import ENDPOINT_CHARACTERS_MAX, Endpoint
from distbelief.transport.keys import KEY_BYTES, KeyFiles, KeyPair


Socket = zmq.Socket[bytes]

REFUSED: Final = b"400"  # the peer does not try again
NOT_NOW: Final = b"300"  # the peer tries again after a while


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reply to a connection request."""

    status: bytes = b"200"  # status code of RFC 27
    user: str = ""  # User-Id of all messages of this connection
    remark: str = ""  # reason for the log if the connection is rejected
    may_change: bool = False  # within a moment: the request may wait for that

    @property
    def admitted(self) -> bool:
        return self.status == b"200"


_OTHERS: Final = 0o077  # permissions of everybody but the owner
_NAME: Final = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CLOSED: Final = -1


@final
class DirectoryAuth:
    """Trusts every process that can enter the directory in which all members listen.

        ipc://DIRECTORY/.NAME.INCARNATION

    Other users cannot enter it, so members need no secret. But a path proves nothing: after a run,
    another user can make a directory of the same name, and ZeroMQ keeps reconnecting to it. So the
    directory is opened and checked once, and every socket is reached through that descriptor
    (/proc/self/fd/N/NAME). That path is also short: a socket's path is limited to 107 bytes.
    """

    encrypts: Final = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = _CLOSED
        self._own = ""  # name of the listening socket

    def listen(self, inbox: Socket, endpoint: str) -> str:
        """Prepare the socket before it is bound; return its public key, or ""."""
        del inbox
        if len(endpoint) > ENDPOINT_CHARACTERS_MAX:
            raise TransportError(
                f"cannot listen at {endpoint}: more than {ENDPOINT_CHARACTERS_MAX} characters: "
                "set TMPDIR to a shorter directory"
            )
        self._descriptor = open_private(self._directory)
        name = self._name_in(endpoint)
        # Without this check ZeroMQ would unlink the socket of another member.
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            raise TransportError(f"cannot listen at {endpoint}: another member listens there")
        self._own = name
        return ""

    def address(self, endpoint: str) -> str:
        """Return the address that ZeroMQ binds or connects to for this endpoint."""
        name = self._name_in(endpoint)
        return f"ipc:///proc/self/fd/{self._descriptor}/{name}"

    def dial(self, outgoing: Socket, peer: str, endpoint: Endpoint) -> None:
        """Prepare a socket before it connects, or raise `TransportError`."""
        # Nothing to do: only the same user can listen in the directory.

    def judge(self, request: Sequence[bytes]) -> Verdict:
        """Accept or reject a connection request (RFC 27)."""
        # ZeroMQ asks only about peers that claim a key or a password.
        del request
        return Verdict(status=REFUSED, remark="rejected a peer from the network")

    def close(self) -> None:
        """Release what is held open."""
        if self._descriptor == _CLOSED:
            return
        if self._own:
            with suppress(OSError):  # the whole directory may be gone
                os.unlink(self._own, dir_fd=self._descriptor)
        os.close(self._descriptor)
        self._descriptor = _CLOSED

    def _name_in(self, endpoint: str) -> str:
        directory, _, name = Endpoint.parse(endpoint).path.rpartition("/")
        if directory != str(self._directory) or _NAME.fullmatch(name) is None:
            raise TransportError(
                f"{endpoint} is not in {self._directory}, where this run listens: members "
                "elsewhere need keys (`distbelief keys new`)"
            )
        return name


def open_private(directory: Path) -> int:
    """Return a descriptor of a directory that only this user may enter, or raise TransportError."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory, flags)
    except FileNotFoundError:
        why = "it does not exist; the process that made it has ended"
    except OSError as error:
        why = "it is a symbolic link" if directory.is_symlink() else str(error.strerror)
    else:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == os.geteuid() and not mode & _OTHERS:
            return descriptor
        os.close(descriptor)
        why = f"other users may enter it (mode {mode:04o}): chmod 700 {directory}"
        if status.st_uid != os.geteuid():
            why = f"it belongs to another user (uid {status.st_uid}), not to you"
    raise TransportError(f"cannot use {directory} for sockets: {why}")


class _Encrypted:
    """What the authenticators with keys share: they listen over TCP, with their key."""

    encrypts: Final = True

    def __init__(self, pair: KeyPair) -> None:
        self._pair = pair
        self._inbox: Socket | None = None

    def listen(self, inbox: Socket, endpoint: str) -> str:
        del endpoint
        self._inbox = inbox
        self._pair.serve(inbox)
        return self._pair.public

    def address(self, endpoint: str) -> str:
        return endpoint

    def close(self) -> None:
        pass


@final
class RunAuth(_Encrypted):
    """Accepts peers that hold the run's key pair; all members share it.

    Both sides of a connection prove that they hold the secret key and neither sends it: a stranger
    that listens at a dead member's port learns nothing.
    """

    def dial(self, outgoing: Socket, peer: str, endpoint: Endpoint) -> None:
        if endpoint.key != self._pair.public:
            raise TransportError(
                f"cannot connect to {peer} at {endpoint}: it does not have the key of this run"
            )
        self._pair.dial(outgoing, endpoint.key)  # only a holder of the same key can answer

    def judge(self, request: Sequence[bytes]) -> Verdict:
        # RFC 27: the sixth frame is the mechanism, the seventh the public key.
        if [request[5], *request[6:]] == [b"CURVE", bytes.fromhex(self._pair.public)]:
            return Verdict()
        return Verdict(status=REFUSED, remark="rejected a peer without the run's key")


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
    """Which key may speak as which role, by the allow-list and by introduction."""

    def __init__(
        self,
        files: KeyFiles,  # they have the allow-list
        *,
        trusted: dict[str, tuple[str, ...]],  # keys that are not on the list, and their roles
        warn: Callable[[str], None],  # called once when the list cannot be read
        is_of_job: bool = False,  # whether this is the transport of a role of a job
        believes: bool = False,  # whether keys introduced by the supervisor are trusted
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
class CurveAuth(_Encrypted):
    """Accepts the keys of an allow-list, each for its roles.

    A connection is encrypted and opens only if each side expects the other's key. Bounds of a peer:

        size of a frame, waiting messages, time for the handshake   ZeroMQ, for everybody
        messages and new connections per second                     a token bucket for each key

    A key that exceeds its bucket, or breaks a rule, loses its connection and is rejected for a
    while. Replayed bytes open no connection: each has session keys of its own.

    `warn` is called at every violation. This side's own key has no limits.
    """

    def __init__(
        self,
        pair: KeyPair,
        permissions: Permissions,
        *,
        warn: Callable[[str], None],
        limits: PeerLimits | None = None,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        super().__init__(pair)
        self._permissions = permissions
        self._warn = warn
        self._limits = limits or PeerLimits()
        self._now = now
        self._buckets: dict[str, TokenBucket] = {}  # by key
        self._suspended: dict[str, Seconds] = {}  # key -> until when
        self._connections: dict[int, str] = {}  # descriptor -> key of its last message
        self._n_own = 0  # violations by this side's own key
        self._refreshed_at: Seconds = now()
        permissions.refresh()

    def dial(self, outgoing: Socket, peer: str, endpoint: Endpoint) -> None:
        if not endpoint.key:
            raise TransportError(
                f"cannot connect to {peer} at {endpoint}: it uses no key and this side does"
            )
        self._permissions.refresh()
        if not self._permissions.introduce(peer, endpoint.key):
            raise TransportError(
                f"cannot connect to {peer} at {endpoint}: its key is not allowed to be a "
                f"{peer.rpartition('-')[0] or peer}: distbelief keys allow {endpoint.key} NAME"
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
                return Verdict(status=NOT_NOW, remark=text, may_change=True)
            role = " --role host" if self._permissions.is_of_job else ""
            text = (
                f"rejected {address}: its key is not allowed: "
                f"distbelief keys allow {key} NAME{role}"
            )
            return Verdict(status=REFUSED, remark=text)
        if not self._may_cost(key, self._limits.connection_messages, "connections"):
            text = f"rejected {address} for a while: its key broke a rule"
            return Verdict(status=NOT_NOW, remark=text)
        return Verdict(user=key)

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
        """Raise RemoteProtocolError unless a message from this source may name this sender."""
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
        with (
            suppress(OSError),  # ZeroMQ may have closed it already
            socket.fromfd(connection, socket.AF_INET, socket.SOCK_STREAM) as link,  # a copy
        ):
            # The descriptor may be another's by now: our listener has no peer, and what we
            # opened ourselves another port.
            link.getpeername()
            if link.getsockname()[1] == own.port:
                link.shutdown(socket.SHUT_RDWR)


Authenticator = DirectoryAuth | RunAuth | CurveAuth
