"""The guard of sockets in a directory that only its user may enter.

    ipc://DIRECTORY/.NAME.INCARNATION

No other user can enter the directory, so members need no secret. But a path proves
nothing: when a run is over, another user can make a directory of the same name, and
ZeroMQ keeps reconnecting to it. So the directory is opened and checked once, and every
socket is reached through that descriptor (/proc/self/fd/N/NAME), which leads to this
directory or nowhere. It is also short: a socket's path is limited to 107 bytes.
"""

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

import zmq

from distbelief.errors import RemoteProtocolError, TransportError
from distbelief.transport.address import PLACE_CHARACTERS_MAX, Endpoint
from distbelief.transport.keys import KeyPair


# The guard of a transport: who may open a connection, and as whom it may speak.
#
#     guard              sockets   who is let in                   who may name a sender
#     DirectoryAuth     files     whoever may enter a directory   anybody
#     RunAuth (here)    TCP       the holders of the run's key    anybody
#     CurveAuth           TCP       keys of an allow-list           each key for its roles
#
# With keys ZeroMQ asks at its door (RFC 27, "ZAP") before a connection carries its first
# message. No guard sends a secret: CURVE proves at both sides that they hold one.

Inbox = zmq.Socket[bytes]
Outbox = zmq.Socket[bytes]

_CURVE_BYTES: Final = 33  # of a MESSAGE command around a frame's bytes, RFC 26
_SHORT_MAX: Final = 255  # longer ones have a length of 8 bytes instead of 1, RFC 23
_HANDSHAKE_SECONDS_MAX: Final = 5.0

REFUSED: Final = b"400"  # the peer does not try again
NOT_NOW: Final = b"300"  # it does, after a while


class NotIntroducedError(RemoteProtocolError):
    """Who sent this may not speak under that name yet, or no longer: no offence."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the door says to a connection.

    Attributes:
        status: By RFC 27.
        user: What its messages carry as User-Id from now on.
        remark: For the log, if it is not let in.
    """

    status: bytes = b"200"
    user: str = ""
    remark: str = ""

    @property
    def admitted(self) -> bool:
        """Whether it is let in."""
        return self.status == b"200"

    def reply(self, request: Sequence[bytes]) -> list[bytes]:
        """Return the frames of the answer to this request."""
        text = b"OK" if self.admitted else b"not admitted"
        return [*request[:2], self.status, text, self.user.encode(), b""]


@final
@dataclass(frozen=True, slots=True)
class Source:
    """Where a message came from.

    Attributes:
        user: Its User-Id: the public key of who sent it; "" where there are no keys.
        connection: The file descriptor that it came by.
    """

    user: str = ""
    connection: int = -1


class Authenticator(Protocol):
    """Of one transport."""

    @property
    def encrypts(self) -> bool:
        """Whether messages may leave this machine: CURVE encrypts them."""
        ...

    @property
    def watch_seconds(self) -> float:
        """How often `watch` wants to be called."""
        ...

    def wire_bytes(self, n_bytes: int) -> int:
        """Return how long a frame of so many bytes is on the network."""
        ...

    def listen(self, inbox: Inbox, endpoint: str) -> str:
        """Prepare the socket before it is bound; return the key to know it by.

        Raises:
            TransportError: it must not be bound there.
        """
        ...

    def address(self, endpoint: str) -> str:
        """Return what ZeroMQ binds or connects to in place of this endpoint."""
        ...

    def dial(self, outbox: Outbox, peer: str, place: Endpoint) -> None:
        """Prepare a socket before it is connected; `TransportError` if it may not."""
        ...

    def judge(self, request: Sequence[bytes]) -> Verdict:
        """Return whether a connection is let in."""
        ...

    def source(self, part: zmq.Frame, n_bytes: int) -> Source | None:
        """Return where a message of so many bytes came from; None: drop it unread."""
        ...

    def check(self, source: Source, sender: str) -> None:
        """Raise `RemoteProtocolError` if a message from there may not name it."""
        ...

    def offended(self, source: Source, why: str) -> None:
        """Note that a message from there was none; it may cost the connection."""
        ...

    def entrust(self, name: str, to: str) -> None:
        """Let whoever may speak as `to` speak as `name`, and nobody else."""
        ...

    def drained(self) -> None:
        """Note that no message waits to be read just now."""
        ...

    def watch(self, port: int) -> None:
        """Look at all connections to this port, if it is time to."""
        ...

    def close(self) -> None:
        """Let go of the port."""
        ...


class TrustingAuth:
    """Base of the guards that trust every member of the run alike."""

    watch_seconds: Final = float("inf")

    def source(self, part: zmq.Frame, n_bytes: int) -> Source | None:
        """Return nothing: all are alike."""
        del part, n_bytes
        return NOWHERE

    def check(self, source: Source, sender: str) -> None:
        """Do nothing: any member may name any sender."""

    def offended(self, source: Source, why: str) -> None:
        """Do nothing: the transport counts it."""

    def entrust(self, name: str, to: str) -> None:
        """Do nothing: any member may name any sender."""

    def drained(self) -> None:
        """Do nothing."""

    def watch(self, port: int) -> None:
        """Do nothing."""


@final
class RunAuth(TrustingAuth):
    """Lets in peers that hold the run's key pair; all members share it.

    Both sides of a connection prove that they hold the secret key, and neither sends
    it: a stranger that listens at a dead member's port learns nothing.
    """

    encrypts: Final = True

    def __init__(self, pair: KeyPair) -> None:
        self._pair = pair

    def wire_bytes(self, n_bytes: int) -> int:
        """Return how long a frame of so many bytes is on the network."""
        return curve_bytes(n_bytes)

    def listen(self, inbox: Inbox, endpoint: str) -> str:
        """Ask everybody for the key."""
        del endpoint
        self._pair.serve(inbox, handshake_seconds_max=_HANDSHAKE_SECONDS_MAX)
        return self._pair.public

    def address(self, endpoint: str) -> str:
        """Return the same."""
        return endpoint

    def dial(self, outbox: Outbox, peer: str, place: Endpoint) -> None:
        """Connect to who holds the same key, only."""
        if place.key != self._pair.public:
            raise TransportError(
                f"{peer} at {place} is not connected to: it is not known by the key of this run"
            )
        seconds = _HANDSHAKE_SECONDS_MAX
        self._pair.dial(outbox, place.key, handshake_seconds_max=seconds)

    def judge(self, request: Sequence[bytes]) -> Verdict:
        """Let in who has proved the key (RFC 27: it is the seventh frame)."""
        if [request[5], *request[6:]] == [b"CURVE", bytes.fromhex(self._pair.public)]:
            return Verdict()
        return Verdict(status=REFUSED, remark="refused a peer without the run's key")

    def close(self) -> None:
        """There is nothing to let go of."""


NOWHERE: Final = Source()


def curve_bytes(n_bytes: int) -> int:
    """Return how long a frame of so many bytes is on the network, encrypted."""
    command = n_bytes + _CURVE_BYTES
    return command + (2 if command <= _SHORT_MAX else 9)


_OTHERS: Final = 0o077  # permissions of anybody but the owner
_NAME: Final = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CLOSED: Final = -1


@final
class DirectoryAuth(TrustingAuth):
    """Trusts every process that can enter the directory.

    Args:
        directory: All members of the run listen in it.
    """

    encrypts: Final = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = _CLOSED
        self._own = ""  # name of the socket that listens

    def wire_bytes(self, n_bytes: int) -> int:
        """Return how many: ZeroMQ's own few bytes are never limited."""
        return n_bytes

    def listen(self, inbox: Inbox, endpoint: str) -> str:
        """Open the directory."""
        del inbox
        if len(endpoint) > PLACE_CHARACTERS_MAX:
            raise TransportError(
                f"cannot listen at {endpoint}: it has {len(endpoint)} characters, more "
                f"than {PLACE_CHARACTERS_MAX}: set TMPDIR to a shorter directory"
            )
        self._descriptor = open_private(self._directory)
        name = self._name_in(endpoint)
        # ZeroMQ would unlink a socket that another member listens at.
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            raise TransportError(f"cannot listen at {endpoint}: something else does")
        self._own = name
        return ""

    def address(self, endpoint: str) -> str:
        """Return the path by the descriptor, where the system has such paths."""
        name = self._name_in(endpoint)
        base = Path(f"/proc/self/fd/{self._descriptor}")
        if not base.is_dir():  # macOS
            base = self._directory
        return f"ipc://{base}/{name}"

    def dial(self, outbox: Outbox, peer: str, place: Endpoint) -> None:
        """Do nothing: only the same user can listen in the directory."""

    def judge(self, request: object) -> Verdict:
        """Refuse: ZeroMQ asks only about peers that claim a key or a password."""
        del request
        return Verdict(status=REFUSED, remark="refused a peer from the network")

    def close(self) -> None:
        """Remove the socket, which ZeroMQ leaves behind, and close the directory."""
        if self._descriptor == _CLOSED:
            return
        if self._own:
            with suppress(OSError):  # the whole directory may be gone
                os.unlink(self._own, dir_fd=self._descriptor)
        os.close(self._descriptor)
        self._descriptor = _CLOSED

    def _name_in(self, endpoint: str) -> str:
        """Return the name of a socket, which must be in the directory."""
        directory, _, name = Endpoint.parse(endpoint).path.rpartition("/")
        if directory != str(self._directory) or _NAME.fullmatch(name) is None:
            raise TransportError(
                f"{endpoint} is not in {self._directory}, where all members of this "
                "run listen: those elsewhere need keys (`distbelief keys new`)"
            )
        return name


def open_private(directory: Path) -> int:
    """Return a descriptor of a directory that only this user may enter.

    Raises:
        TransportError: there is none, or others may enter it, or it is another user's.
    """
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory, flags)
    except OSError as error:
        raise TransportError(
            f"cannot use {directory} for sockets: {_why(directory, error)}"
        ) from None
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and not mode & _OTHERS:
        return descriptor
    os.close(descriptor)
    if status.st_uid != os.geteuid():
        why = f"it belongs to another user (uid {status.st_uid}), not to you"
    else:
        why = f"other users may enter it (mode {mode:04o}): chmod 700 {directory}"
    raise TransportError(f"cannot use {directory} for sockets: {why}")


def _why(directory: Path, error: OSError) -> str:
    if directory.is_symlink():
        return "it is a symbolic link, which may lead anywhere"
    if isinstance(error, FileNotFoundError):
        return "it is not there; whoever made it has ended"
    return str(error.strerror)
