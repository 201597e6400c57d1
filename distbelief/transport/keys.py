"""Keys: a public one that names a machine, and a secret one that proves the name.

They are those of CURVE (ZeroMQ's RFC 26): a connection opens only if each side holds
the secret of the public key that the other expects. Public keys are no secret: they are
written as 64 hexadecimal digits, in files, messages and logs. A machine's secret key is
in its file and in the sockets that use it, and nowhere else: it has no text. That of a
run without key files is in the run's address, too.
"""

import re
from dataclasses import dataclass
from typing import Final, Never, Self, final

import zmq
from typing_extensions import override
from zmq.utils import z85

from distbelief.errors import JobError


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
