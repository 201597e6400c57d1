"""CURVE key pairs (ZeroMQ's RFC 26), their files and the allow-list.

    DIRECTORY/            0700
      secret.key          0600   64 hexadecimal digits
      next.key            0600   the next key, during a key rotation
      former.key          0600   the previous key, for processes that still use it
      allowed             0600   a line for each key: KEY ROLES NAME

A connection opens only if each side holds the secret of the public key that the other expects.
Files that others could read or write are rejected, and replaced atomically. Running
processes read `allowed` again when it has changed.
"""

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, final

import zmq
from zmq.utils import z85

from distbelief.core import files
from distbelief.core.errors import JobError


KEY_BYTES: Final = 32
KEY_PATTERN: Final = "[0-9a-f]{64}"
HANDSHAKE_SECONDS_MAX: Final = 5.0  # to prove a key
KEEPALIVE_SECONDS: Final = 2  # between questions to a silent peer, and to open a connection
SILENCE_SECONDS_MAX: Final = 8  # of the other host, until a connection is closed

# Of a training loop; of a server or supervisor and its shards; of a host that joins a job.
ROLES: Final = ("worker", "server", "host")
DIRECTORY: Final = Path("~/.distbelief/keys")  # this user's keys, by default
N_ALLOWED_MAX: Final = 4096

_SECRET: Final = "secret.key"  # noqa: S105 -- a file name
_NEXT: Final = "next.key"
_FORMER: Final = "former.key"
_ALLOWED: Final = "allowed"
_OTHERS: Final = 0o077  # permissions of everybody but the owner
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
class KeyPair:
    public: str  # 64 hexadecimal digits
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """Return a new pair from the system's source of randomness."""
        return cls.of(z85.decode(zmq.curve_keypair()[1]))

    @classmethod
    def of(cls, secret: bytes) -> Self:
        return cls(public=z85.decode(zmq.curve_public(z85.encode(secret))).hex(), secret=secret)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the pair of a secret key in hexadecimal digits, or raise JobError."""
        if re.fullmatch(KEY_PATTERN, text) is None:  # the message does not show it
            raise JobError(
                f"the secret must have {KEY_BYTES * 2} hexadecimal digits: copy the whole address"
            )
        return cls.of(bytes.fromhex(text))

    def serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Require a key from all clients of a socket; call it before binding."""
        socket.curve_server = True
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        _limit_silence(socket)

    def dial(self, socket: "zmq.Socket[bytes]", server_key: str) -> None:
        """Accept only the server with this key; call it before connecting."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self.public))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.connect_timeout = 1000 * KEEPALIVE_SECONDS
        _limit_silence(socket)


def _limit_silence(socket: "zmq.Socket[bytes]") -> None:
    # Both ends notice a cut link, and reopen it sooner than TCP, whose timeouts double. Not by
    # ZeroMQ's own heartbeats: libzmq 4.3.5 aborts the process if one is in the buffer of a full
    # inbox whose connection breaks.
    socket.handshake_ivl = round(1000 * HANDSHAKE_SECONDS_MAX)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_SECONDS
    socket.tcp_maxrt = 1000 * SILENCE_SECONDS_MAX


def new_secret() -> str:
    """Return a new secret key for one run, for `KeyPair.parse`."""
    return KeyPair.new().secret.hex()


def public_key(text: str) -> str:
    """Parse a public key that a user gave, or raise JobError."""
    key = text.strip().lower()
    if re.fullmatch(KEY_PATTERN, key) is None:
        raise JobError(
            f"{text[:80]!r} is not a public key: use what `distbelief keys show` prints on its host"
        )
    return key


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """An entry of the allow-list; `name` is the user's own label."""

    key: str
    roles: tuple[str, ...]
    name: str

    @property
    def line(self) -> str:
        return f"{self.key} {','.join(self.roles)} {self.name}"


@final
class KeyFiles:
    """The key files of one directory.

    Every method raises JobError if a file is missing, invalid or open to other users, and
    StorageError if it cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> str:
        """Create the directory and this host's key; return the public key."""
        with files.explaining(self.directory, doing="make"):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (self.directory / _SECRET).exists():
            raise JobError(
                f"{self.directory} has a key already: use `distbelief keys show`, or `rotate`"
            )
        return self._write_secret(_SECRET)

    def pair(self) -> KeyPair:
        return self._read_secret(_SECRET)

    def pair_of(self, public: str) -> KeyPair:
        """Return the present or the former pair, whichever has this public key."""
        for name in (_SECRET, _FORMER):
            if self._path(name).exists():
                pair = self._read_secret(name)
                if pair.public == public:
                    return pair
        raise JobError(f"{self.directory} no longer has the key {public}: restart this process")

    def next_pair(self) -> KeyPair | None:
        """Return the next key pair if a key rotation has begun."""
        return self._read_secret(_NEXT) if self._path(_NEXT).exists() else None

    def begin_rotation(self) -> str:
        """Begin a key rotation: create the next key unless it exists; return it."""
        self.pair()  # raises if there is no present key
        following = self.next_pair()
        return self._write_secret(_NEXT) if following is None else following.public

    def finish_rotation(self) -> str:
        """Replace the present key by the next one; keep it for a running job's restarts."""
        following = self.next_pair()
        if following is None:
            raise JobError(f"{self.directory} has no next key: begin with `distbelief keys rotate`")
        path = self._path(_NEXT)
        files.write_private(self._path(_FORMER), _read(self._path(_SECRET)))
        with files.explaining(path, doing="rename"):
            path.replace(self.directory / _SECRET)
            files.force(self.directory)
        return following.public

    def allowed(self) -> tuple[Allowed, ...]:
        path = self._path(_ALLOWED)
        return entries_in(_read(path), path=path) if path.exists() else ()

    def allow(self, entry: Allowed) -> None:
        """Add a key to the allow-list, or change its roles."""
        for role in entry.roles:
            if role not in ROLES:
                raise JobError(f"unknown role {role[:80]!r}: use {', '.join(ROLES)}")
        if re.fullmatch(_NAME, entry.name) is None:
            raise JobError(
                f"invalid name {entry.name[:80]!r}: use at most 64 letters, digits and . _ @ -"
            )
        _parsed(entry.line, path=self._path(_ALLOWED))
        with self._alone():
            others = [known for known in self.allowed() if known.key != entry.key]
            if len(others) >= N_ALLOWED_MAX:
                raise JobError(f"the allow-list is full ({N_ALLOWED_MAX} keys): revoke some")
            self._write_allowed([*others, entry])

    def revoke(self, which: str) -> tuple[Allowed, ...]:
        """Remove a key, or all keys of a name, and return the removed entries."""
        with self._alone():
            entries = self.allowed()
            gone = tuple(entry for entry in entries if which in {entry.key, entry.name})
            if not gone:
                known = ", ".join(sorted({entry.name for entry in entries})) or "nobody"
                raise JobError(f"{which[:80]!r} is not on the allow-list; allowed: {known}")
            self._write_allowed([entry for entry in entries if entry not in gone])
            return gone

    @property
    def changed_at(self) -> tuple[int, int]:
        """A value that differs after the allow-list has changed."""
        with suppress(OSError):
            status = (self.directory / _ALLOWED).stat()
            return status.st_ino, status.st_mtime_ns
        return 0, 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Two commands that change the list at once would undo each other.
        _check_private(self.directory)
        with files.explaining(self.directory, doing="open"):
            directory = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # file systems without locks
                fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _path(self, name: str) -> Path:
        _check_private(self.directory)
        return self.directory / name

    def _write_secret(self, name: str) -> str:
        pair = KeyPair.new()
        files.write_private(self._path(name), pair.secret.hex().encode() + b"\n")
        return pair.public

    def _read_secret(self, name: str) -> KeyPair:
        path = self._path(name)
        return pair_in(_read(path), path=path)

    def _write_allowed(self, entries: Iterable[Allowed]) -> None:
        text = "".join(f"{entry.line}\n" for entry in entries)
        files.write_private(self._path(_ALLOWED), text.encode())


def entries_in(content: bytes, *, path: Path) -> tuple[Allowed, ...]:
    """Parse an allow-list, or raise JobError; `path` is for messages."""
    # Users edit the file too: extra spaces, blank lines, lines that begin with # and a byte order
    # mark are ignored.
    text = content.decode(errors="replace").removeprefix(_BYTE_ORDER_MARK)
    lines = [line.strip(_BLANKS) for line in text.splitlines()]
    lines = [line for line in lines if line and line[0] != "#"]
    if len(lines) > N_ALLOWED_MAX:
        raise JobError(f"{path} has {len(lines)} keys, at most {N_ALLOWED_MAX} are allowed")
    return tuple(_parsed(line, path=path) for line in lines)


def pair_in(content: bytes, *, path: Path) -> KeyPair:
    """Parse a key file, or raise JobError, which does not show its content."""
    text = content.strip().decode(errors="replace")
    if re.fullmatch(KEY_PATTERN, text) is None:
        raise JobError(
            f"{path} holds no key: restore it, or make a new one with `distbelief keys new`"
        )
    return KeyPair.of(bytes.fromhex(text))


def _parsed(line: str, *, path: Path) -> Allowed:
    found = _LINE.fullmatch(line)
    roles = tuple(found["roles"].split(",")) if found else ()
    if found is None or not set(roles) <= set(ROLES):
        raise JobError(
            f"{path}: invalid entry {line[:160]!r}: use KEY ROLES NAME, "
            f"64 hexadecimal digits and {', '.join(ROLES)}"
        )
    return Allowed(key=found["key"], roles=roles, name=found["name"])


def _check_private(path: Path) -> None:
    try:
        status = path.lstat()
    except OSError:
        raise JobError(
            f"{path} does not exist: make a key with `distbelief keys new`, or use --keys"
        ) from None
    if status.st_uid != os.geteuid():
        raise JobError(f"{path} belongs to another user: use a directory of your own")
    if path.is_symlink() or status.st_mode & _OTHERS:
        mode = "700" if path.is_dir() else "600"
        raise JobError(
            f"{path} is open to other users (mode {status.st_mode & 0o7777:04o}): chmod {mode} "
            f"{path}, and if others had access: distbelief keys rotate"
        )


def _read(path: Path) -> bytes:
    _check_private(path)
    with files.explaining(path, doing="read"):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(file, "rb") as opened:
            return opened.read(_BYTES_MAX)
