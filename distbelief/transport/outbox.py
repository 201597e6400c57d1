"""An outbox: one link to one peer, and ZeroMQ's word on whether it was let in."""

from dataclasses import dataclass, field
from typing import Final, Self, final

import zmq
from zmq.utils.monitor import parse_monitor_message

from distbelief.errors import TransportError
from distbelief.transport.guard import Guard
from distbelief.transport.places import Place, is_local


REFUSED: Final = (zmq.EVENT_HANDSHAKE_FAILED_AUTH,)
"""The peer does not let us in."""

ANOTHER: Final = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
"""It has closed a connection without a word: it has another key, or none."""


BEAT_SECONDS: Final = 2.0
SILENCE_SECONDS_MAX: Final = 8.0
"""Of ZeroMQ's own heartbeats to other machines, after which it connects anew."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """To one life of one peer.

    Attributes:
        incarnation: That life.
        endpoint: Where it listens, as it says.
        socket: That what is for it is written to.
        refusals: Tells of handshakes that failed; None if nobody asks.
        heard: Kinds of these that were not asked for so far.
    """

    incarnation: int
    endpoint: str
    socket: "zmq.Socket[bytes]"
    refusals: "zmq.Socket[bytes] | None"
    heard: set[int] = field(default_factory=set)

    @classmethod
    def open(
        cls,
        context: "zmq.Context[zmq.Socket[bytes]]",
        peer: str,
        place: Place,
        *,
        incarnation: int,
        endpoint: str,
        guard: Guard,
        messages_max: int,
        watched: bool,
    ) -> Self:
        """Return a link that connects as soon as somebody listens there.

        Raises:
            TransportError: no such endpoint can be, or may be, connected to.
        """
        socket = context.socket(zmq.PUSH)
        socket.linger = 0
        socket.sndhwm = messages_max
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 2000
        if not is_local(place.endpoint):
            # A cut link is noticed at both ends, and opened anew, sooner than by TCP,
            # whose patience doubles each time.
            socket.heartbeat_ivl = round(1000 * BEAT_SECONDS)
            socket.heartbeat_timeout = round(1000 * SILENCE_SECONDS_MAX)
            socket.heartbeat_ttl = round(1000 * SILENCE_SECONDS_MAX)
            socket.connect_timeout = round(1000 * BEAT_SECONDS)
        refusals = None
        if watched:
            refusals = socket.get_monitor_socket(sum((*REFUSED, *ANOTHER)))
        outbox = cls(incarnation=incarnation, endpoint=endpoint, socket=socket, refusals=refusals)
        try:
            guard.dial(socket, peer, place)
            socket.connect(guard.address(place.endpoint))
        except TransportError:
            outbox.close(0)
            raise
        except zmq.ZMQError as error:
            outbox.close(0)
            raise TransportError(
                f"cannot connect to {peer} at {endpoint!r}: {error.strerror}"
            ) from None
        return outbox

    def take(self, kinds: tuple[int, ...]) -> bool:
        """Return whether a handshake has failed in such a way since asked last."""
        while self.refusals is not None and self.refusals.poll(0):
            event = parse_monitor_message(self.refusals.recv_multipart())
            self.heard.add(int(event["event"]))
        found = self.heard & set(kinds)
        self.heard.difference_update(found)
        return bool(found)

    def close(self, linger: int) -> None:
        """Send what is under way, for so many milliseconds, in the background."""
        if self.refusals is not None:
            self.socket.disable_monitor()
            self.refusals.close(0)
        self.socket.close(linger)
