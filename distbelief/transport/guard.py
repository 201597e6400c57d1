"""The guard of a transport: who may open a connection, and as whom it may speak.

ZeroMQ asks at its door (RFC 27, "ZAP") before a connection carries its first message.
There are two kinds of guard: `TokenGuard` here, where everybody who knows the run's
token is of the run, and `key_guard.KeyGuard`, where every key has its roles.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import zmq

from distbelief.errors import RemoteProtocolError, TransportError
from distbelief.transport.places import Place


Inbox = zmq.Socket[bytes]
Outbox = zmq.Socket[bytes]

PLAIN_BYTES_MAX: Final = 255  # of a name or password in the PLAIN mechanism, RFC 24

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


class Guard(Protocol):
    """Of one transport."""

    @property
    def encrypts(self) -> bool:
        """Whether messages may leave this machine."""
        ...

    @property
    def watch_seconds(self) -> float:
        """How often `watch` wants to be called."""
        ...

    def wire_bytes(self, n_bytes: int) -> int:
        """Return how long a frame of so many bytes is on the network."""
        ...

    def listen(self, inbox: Inbox) -> str:
        """Prepare the socket before it is bound; return the key to know it by."""
        ...

    def dial(self, outbox: Outbox, peer: str, place: Place) -> None:
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


@final
class TokenGuard:
    """Whoever knows the token is let in, and may name any sender.

    It is sent in the clear, so this is for one machine, or for a network of friends.
    """

    encrypts: Final = False
    watch_seconds: Final = float("inf")

    def __init__(self, *, name: str, token: str) -> None:
        for what, text in (("name", name), ("token", token)):
            if not 1 <= len(text.encode()) <= PLAIN_BYTES_MAX:
                raise ValueError(
                    f"a {what} of {len(text.encode())} bytes: 1 to {PLAIN_BYTES_MAX}"
                )
        self._name = name
        self._token = token

    def wire_bytes(self, n_bytes: int) -> int:
        """Return how many: ZeroMQ's own few bytes are never limited."""
        return n_bytes

    def listen(self, inbox: Inbox) -> str:
        """Ask everybody for the token."""
        inbox.plain_server = True
        return ""

    def dial(self, outbox: Outbox, peer: str, place: Place) -> None:
        """Show the token."""
        if place.key:
            raise TransportError(
                f"{peer} at {place} has a key, and this side has none: give its "
                "directory of keys (`distbelief keys new` makes one)"
            )
        outbox.plain_username = self._name.encode()
        outbox.plain_password = self._token.encode()

    def judge(self, request: Sequence[bytes]) -> Verdict:
        """Let in who shows it (RFC 27: the last frame of a request is the password)."""
        if hmac.compare_digest(request[-1], self._token.encode()):
            return Verdict()
        return Verdict(status=REFUSED, remark="refused a peer of another run")

    def source(self, part: zmq.Frame, n_bytes: int) -> Source | None:
        """Return nothing: all are alike."""
        del part, n_bytes
        return NOWHERE

    def check(self, source: Source, sender: str) -> None:
        """Do nothing: who knows the token is believed."""

    def offended(self, source: Source, why: str) -> None:
        """Do nothing: the transport counts it."""

    def entrust(self, name: str, to: str) -> None:
        """Do nothing: who knows the token may name any sender."""

    def drained(self) -> None:
        """Do nothing."""

    def watch(self, port: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """There is nothing to let go of."""


NOWHERE: Final = Source()
