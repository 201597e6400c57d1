"""Key files: this machine's key, the one that follows it, and whom it lets in.

    DIRECTORY/            0700
      secret.key          0600   64 hexadecimal digits
      next.key            0600   likewise, while keys are exchanged
      former.key          0600   likewise, of what still runs since an exchange
      allowed             0600   a line for each key: KEY ROLES NAME

Users edit `allowed` too: blanks at either end of a line, or more than one between its
fields, blank lines, lines that begin with #, and a byte order mark say nothing.

What others could read or write is not used: it is named with the command that mends it.
A file is replaced whole. Whoever runs reads `allowed` again when it has changed.
"""

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Never, Self, final

import zmq
from typing_extensions import override
from zmq.utils import z85

from distbelief.core import files
from distbelief.errors import JobError


# Keys: a public one that names a machine, and a secret one that proves the name.
#
# They are those of CURVE (ZeroMQ's RFC 26): a connection opens only if each side holds
# the secret of the public key that the other expects. Public keys are no secret: they are
# written as 64 hexadecimal digits, in files, messages and logs. A machine's secret key is
# in its file and in the sockets that use it, and nowhere else: it has no text. That of a
# run without key files is in the run's address, too.

KEY_BYTES: Final = 32
KEY_PATTERN: Final = "[0-9a-f]{64}"


@final
class SecretKey:
    """32 bytes that are written nowhere but into a key file and a socket."""

    def __init__(self, value: bytes) -> None:
        if len(value) != KEY_BYTES:
            raise ValueError(f"a secret key of {len(value)} bytes: {KEY_BYTES}")
        self._value = value

    def reveal(self) -> bytes:
        """Return the bytes, for a socket or a key file."""
        return self._value

    @override
    def __repr__(self) -> str:
        """Say nothing."""
        return "SecretKey(...)"

    @override
    def __reduce__(self) -> Never:
        """Refuse to be pickled or copied."""
        raise TypeError("a secret key is not copied")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """Of one machine and user.

    Attributes:
        public: By which others know it.
        secret: By which it proves to be that one.
    """

    public: str
    secret: SecretKey

    @classmethod
    def new(cls) -> Self:
        """Draw a pair (by the system's source of randomness)."""
        _, secret = zmq.curve_keypair()
        return cls.of(SecretKey(z85.decode(secret)))

    @classmethod
    def of(cls, secret: SecretKey) -> Self:
        """Return the pair of this secret key."""
        public = zmq.curve_public(z85.encode(secret.reveal()))
        return cls(public=z85.decode(public).hex(), secret=secret)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the pair of this secret key, in hexadecimal digits.

        Raises:
            JobError: it is none; nothing of it is shown.
        """
        if re.fullmatch(KEY_PATTERN, text) is None:
            raise JobError(
                f"this is no secret of a run: {KEY_BYTES * 2} hexadecimal digits are "
                "needed; copy the whole address"
            )
        return cls.of(SecretKey(bytes.fromhex(text)))

    def serve(self, socket: "zmq.Socket[bytes]", *, handshake_seconds_max: float) -> None:
        """Let a socket ask everybody for a key, before it is bound."""
        socket.curve_server = True
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.reveal())
        socket.handshake_ivl = round(1000 * handshake_seconds_max)

    def dial(
        self, socket: "zmq.Socket[bytes]", server_key: str, *, handshake_seconds_max: float
    ) -> None:
        """Let a socket speak to the holder of that key, before it is connected."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self.public))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.reveal())
        socket.handshake_ivl = round(1000 * handshake_seconds_max)


def new_secret() -> str:
    """Return a secret key for one run, as `KeyPair.parse` reads it."""
    return KeyPair.new().secret.reveal().hex()


def public_key(text: str) -> str:
    """Return the public key that a user gave.

    Raises:
        JobError: it is none.
    """
    key = text.strip().lower()
    if re.fullmatch(KEY_PATTERN, key) is None:
        raise JobError(
            f"{text[:80]!r} is no public key: that is 64 hexadecimal digits, as "
            "`distbelief keys show` prints them on the machine that it is of"
        )
    return key


ROLES: Final = ("worker", "server", "host")
"""As what a key may speak: one's own loop; a server or supervisor, and its shards; a
machine that joins a job."""

DIRECTORY: Final = Path("~/.distbelief/keys")
"""Of this user's keys, unless another is named."""

N_ALLOWED_MAX: Final = 4096

_SECRET: Final = "secret.key"  # noqa: S105 -- a file name
_NEXT: Final = "next.key"
_FORMER: Final = "former.key"
_ALLOWED: Final = "allowed"
_OTHERS: Final = 0o077  # permissions of anybody but the owner
_BYTES_MAX: Final = 1 << 20
_NAME: Final = "[A-Za-z0-9._@-]{1,64}"
_BLANKS: Final = " \t"
_LINE: Final = re.compile(
    rf"(?P<key>{KEY_PATTERN})[{_BLANKS}]+(?P<roles>[a-z,]{{1,64}})[{_BLANKS}]+"
    rf"(?P<name>{_NAME})"
)
_BYTE_ORDER_MARK: Final = "\ufeff"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """One key on the allow-list, as what it may speak, and what the user calls it."""

    key: str
    roles: tuple[str, ...]
    name: str


@final
class KeyFiles:
    """The keys of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> str:
        """Make the directory, and this machine's key; return the public one.

        Raises:
            JobError: there is one already.
            StorageError: the disk does not take it.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise files.explained(error, self.directory, doing="make") from error
        if (self.directory / _SECRET).exists():
            raise JobError(
                f"{self.directory} has a key already: `distbelief keys show` prints "
                "it, `distbelief keys rotate` begins to replace it"
            )
        return self._write_secret(_SECRET)

    def pair(self) -> KeyPair:
        """Return this machine's keys.

        Raises:
            JobError: there is none, or others could read it.
        """
        return self._read_secret(_SECRET)

    def pair_of(self, public: str) -> KeyPair:
        """Return the keys that this public one is of: the present ones, or the former.

        Raises:
            JobError: it is of neither, or others could read them.
        """
        for name in (_SECRET, _FORMER):
            if self._path(name).exists():
                pair = self._read_secret(name)
                if pair.public == public:
                    return pair
        raise JobError(
            f"{self.directory} has no longer the key {public} with which this began: "
            "start it again, to use the present one"
        )

    def next_pair(self) -> KeyPair | None:
        """Return the keys that are to follow, if an exchange has begun."""
        return self._read_secret(_NEXT) if self._path(_NEXT).exists() else None

    def begin_exchange(self) -> str:
        """Draw the key that is to follow, unless there is one; return it."""
        self.pair()
        following = self.next_pair()
        return self._write_secret(_NEXT) if following is None else following.public

    def finish_exchange(self) -> str:
        """Use the key that follows from now on; return it.

        What began with the present one still finds it: else no process of it that dies
        could be started again.

        Raises:
            JobError: no exchange has begun.
        """
        following = self.next_pair()
        if following is None:
            raise JobError(
                f"{self.directory} has no key to follow the present one: begin with "
                "`distbelief keys rotate`"
            )
        path = self._path(_NEXT)
        files.write_private(self._path(_FORMER), _read(self._path(_SECRET)))
        try:
            path.replace(self.directory / _SECRET)
            files.force(self.directory)
        except OSError as error:
            raise files.explained(error, path, doing="rename") from error
        return following.public

    # ------------------------------------------------------------------ allow-list

    def allowed(self) -> tuple[Allowed, ...]:
        """Return the allow-list.

        Raises:
            JobError: it cannot be trusted, or has a line that says nothing.
        """
        path = self._path(_ALLOWED)
        if not path.exists():
            return ()
        return entries_in(_read(path), path=path)

    def allow(self, entry: Allowed) -> None:
        """Add a key to the allow-list, or change as what it may speak.

        Raises:
            JobError: a role or the name makes no sense.
        """
        _check(entry)
        _parsed(_line(entry), path=self._path(_ALLOWED))
        with self._alone():
            others = [known for known in self.allowed() if known.key != entry.key]
            if len(others) >= N_ALLOWED_MAX:
                raise JobError(f"{N_ALLOWED_MAX} keys are allowed already: revoke some")
            self._write_allowed([*others, entry])

    def revoke(self, which: str) -> tuple[Allowed, ...]:
        """Take a key, or all of a name, from the allow-list; return what they were.

        Raises:
            JobError: there is no such key or name.
        """
        with self._alone():
            entries = self.allowed()
            gone = tuple(entry for entry in entries if which in {entry.key, entry.name})
            if not gone:
                known = ", ".join(sorted({entry.name for entry in entries})) or "nobody"
                raise JobError(f"{which[:80]!r} is not allowed anyway; allowed: {known}")
            self._write_allowed([entry for entry in entries if entry not in gone])
            return gone

    @property
    def changed_at(self) -> tuple[int, int]:
        """What is another when the allow-list has changed."""
        with suppress(OSError):
            status = (self.directory / _ALLOWED).stat()
            return status.st_ino, status.st_mtime_ns
        return 0, 0

    # ---------------------------------------------------------------------- inside

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other commands from changing the list meanwhile: one would be undone."""
        _check_private(self.directory)
        try:
            directory = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise files.explained(error, self.directory, doing="open") from error
        try:
            with suppress(OSError):  # of a disk that has no locks
                fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _path(self, name: str) -> Path:
        """Return the path of a file, in a directory that is the user's alone."""
        _check_private(self.directory)
        return self.directory / name

    def _write_secret(self, name: str) -> str:
        pair = KeyPair.new()
        text = pair.secret.reveal().hex().encode() + b"\n"
        files.write_private(self._path(name), text)
        return pair.public

    def _read_secret(self, name: str) -> KeyPair:
        path = self._path(name)
        return pair_in(_read(path), path=path)

    def _write_allowed(self, entries: Iterable[Allowed]) -> None:
        text = "".join(f"{_line(entry)}\n" for entry in entries)
        files.write_private(self._path(_ALLOWED), text.encode())


def entries_in(content: bytes, *, path: Path) -> tuple[Allowed, ...]:
    """Return the entries of an allow-list.

    Raises:
        JobError: a line says nothing, or there are too many; it names the path.
    """
    text = content.decode(errors="replace").removeprefix(_BYTE_ORDER_MARK)
    lines = [line.strip(_BLANKS) for line in text.splitlines()]
    lines = [line for line in lines if line and line[0] != "#"]
    if len(lines) > N_ALLOWED_MAX:
        raise JobError(f"{path} allows {len(lines)} keys: {N_ALLOWED_MAX} at most")
    return tuple(_parsed(line, path=path) for line in lines)


def pair_in(content: bytes, *, path: Path) -> KeyPair:
    """Return the keys of a key file.

    Raises:
        JobError: it has none; it names the path, and shows nothing of what there is.
    """
    text = content.strip().decode(errors="replace")
    if re.fullmatch(KEY_PATTERN, text) is None:
        raise JobError(
            f"{path} holds no key: restore it, or move it away and make another "
            "with `distbelief keys new`"
        )
    return KeyPair.of(SecretKey(bytes.fromhex(text)))


def _line(entry: Allowed) -> str:
    return f"{entry.key} {','.join(entry.roles)} {entry.name}"


def _check(entry: Allowed) -> None:
    """Refuse what a user cannot have meant: what would not be read again."""
    for role in entry.roles:
        if role not in ROLES:
            raise JobError(f"{role[:80]!r} is no role: there are {', '.join(ROLES)}")
    if re.fullmatch(_NAME, entry.name) is None:
        raise JobError(
            f"{entry.name[:80]!r} is no name: letters, digits and . _ @ - are, 64 of "
            "them at the most"
        )


def _parsed(line: str, *, path: Path) -> Allowed:
    found = _LINE.fullmatch(line)
    roles = tuple(found["roles"].split(",")) if found else ()
    if found is None or not set(roles) <= set(ROLES):
        raise JobError(
            f"{path}: {line[:160]!r} is no entry: a key of 64 hexadecimal digits, "
            f"roles ({', '.join(ROLES)}) and a name (letters, digits and . _ @ -)"
        )
    return Allowed(key=found["key"], roles=roles, name=found["name"])


def _check_private(path: Path) -> None:
    """Refuse what others could read or write, or what is another user's."""
    try:
        status = path.lstat()
    except OSError:
        raise JobError(
            f"there is no {path}: make this machine's key with `distbelief keys new`, "
            "or name its directory with --keys"
        ) from None
    if status.st_uid != os.geteuid():
        raise JobError(f"{path} belongs to another user: use a directory of your own")
    if path.is_symlink() or status.st_mode & _OTHERS:
        mode = "700" if path.is_dir() else "600"
        raise JobError(
            f"{path} is open to other users (mode {status.st_mode & 0o7777:04o}), so "
            f"its keys may be known: chmod {mode} {path}, and if others were about, "
            "replace the key: distbelief keys rotate"
        )


def _read(path: Path) -> bytes:
    _check_private(path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(file, "rb") as opened:
            return opened.read(_BYTES_MAX)
    except OSError as error:
        raise files.explained(error, path, doing="read") from error
