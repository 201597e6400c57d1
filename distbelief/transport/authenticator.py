"""Authenticators: which peers may open a connection, and which roles they may speak as.

    authenticator   sockets   who may connect                      who may name a sender
    DirectoryAuth   files     processes that can enter a directory  anybody
    RunAuth         TCP       holders of the run's key              anybody
    CurveAuth       TCP       keys of an allow-list                 each key for its roles

With keys, ZeroMQ asks (RFC 27, "ZAP") before a connection carries its first message.
No authenticator sends a secret: with CURVE both sides prove that they hold one.
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

from distbelief.errors import TransportError
from distbelief.transport.address import ENDPOINT_CHARACTERS_MAX, Endpoint
from distbelief.transport.keys import KeyPair


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

    @property
    def admitted(self) -> bool:
        return self.status == b"200"


class Authenticator(Protocol):
    """Decides about the connections of one transport."""

    @property
    def encrypts(self) -> bool:
        """Whether messages are encrypted (CURVE), so that they may leave this host."""

    def listen(self, inbox: Socket, endpoint: str) -> str:
        """Prepare the socket before it is bound; return its public key, or "".

        Raises:
            TransportError: The socket must not be bound to this endpoint.
        """

    def address(self, endpoint: str) -> str:
        """Return the address that ZeroMQ binds or connects to for this endpoint."""

    def dial(self, outgoing: Socket, peer: str, endpoint: Endpoint) -> None:
        """Prepare a socket before it connects.

        Raises:
            TransportError: It must not connect to this endpoint.
        """

    def judge(self, request: Sequence[bytes]) -> Verdict:
        """Accept or reject a connection request (RFC 27)."""

    def close(self) -> None:
        """Release what is held open."""


@final
class RunAuth:
    """Accepts peers that hold the run's key pair; all members share it.

    Both sides of a connection prove that they hold the secret key and neither sends it: a stranger
    that listens at a dead member's port learns nothing.
    """

    encrypts: Final = True

    def __init__(self, pair: KeyPair) -> None:
        self._pair = pair

    def listen(self, inbox: Socket, endpoint: str) -> str:
        del endpoint
        self._pair.serve(inbox)
        return self._pair.public

    def address(self, endpoint: str) -> str:
        return endpoint

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

    def close(self) -> None:
        pass


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
        del inbox
        if len(endpoint) > ENDPOINT_CHARACTERS_MAX:
            raise TransportError(
                f"cannot listen at {endpoint}: {len(endpoint)} characters are more than "
                f"{ENDPOINT_CHARACTERS_MAX}: set TMPDIR to a shorter directory"
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
        name = self._name_in(endpoint)
        base = Path(f"/proc/self/fd/{self._descriptor}")
        return f"ipc://{base if base.is_dir() else self._directory}/{name}"  # macOS: no /proc

    def dial(self, outgoing: Socket, peer: str, endpoint: Endpoint) -> None:
        """Do nothing: only the same user can listen in the directory."""

    def judge(self, request: Sequence[bytes]) -> Verdict:
        # ZeroMQ asks only about peers that claim a key or a password.
        del request
        return Verdict(status=REFUSED, remark="rejected a peer from the network")

    def close(self) -> None:
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
                f"{endpoint} is not in {self._directory}, where the members of this run "
                "listen: members elsewhere need keys (`distbelief keys new`)"
            )
        return name


def open_private(directory: Path) -> int:
    """Return a descriptor of a directory that only this user may enter.

    Raises:
        TransportError: It does not exist, is another user's, or others may enter it.
    """
    descriptor = _CLOSED
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory, flags)
    except FileNotFoundError:
        why = "it does not exist; the process that made it has ended"
    except OSError as error:
        why = str(error.strerror)
        if directory.is_symlink():
            why = "it is a symbolic link, which may lead anywhere"
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
