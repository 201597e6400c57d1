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
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from distbelief.errors import TransportError
from distbelief.transport.guard import REFUSED, Inbox, Outbox, TrustingGuard, Verdict
from distbelief.transport.places import PLACE_CHARACTERS_MAX, Place


_OTHERS: Final = 0o077  # permissions of anybody but the owner
_NAME: Final = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CLOSED: Final = -1


@final
class DirectoryGuard(TrustingGuard):
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

    def dial(self, outbox: Outbox, peer: str, place: Place) -> None:
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
        directory, _, name = Place.parse(endpoint).path.rpartition("/")
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
