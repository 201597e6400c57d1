"""The guard of a transport: who may open a connection, and as whom it may speak.

    guard              sockets   who is let in                   who may name a sender
    DirectoryGuard     files     whoever may enter a directory   anybody
    RunGuard (here)    TCP       the holders of the run's key    anybody
    KeyGuard           TCP       keys of an allow-list           each key for its roles

With keys ZeroMQ asks at its door (RFC 27, "ZAP") before a connection carries its first
message. No guard sends a secret: CURVE proves at both sides that they hold one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import zmq

from distbelief.errors import RemoteProtocolError, TransportError
from distbelief.transport.keys import KeyPair
from distbelief.transport.places import Place


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


class Guard(Protocol):
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


class TrustingGuard:
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
class RunGuard(TrustingGuard):
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

    def dial(self, outbox: Outbox, peer: str, place: Place) -> None:
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
