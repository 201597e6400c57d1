"""What a machine that joins sees of the supervisor, beside what that says to it.

    it lets in no key like this one     the user is told how to change that; it is tried
                                        again
    somebody else listens there         the user is told
    nothing listens there               the run is over, if this machine was of it; at
                                        the beginning the user is told

Of a link that is cut nothing is seen: that may pass. What this machine's own address
is, may change meanwhile.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

from distbelief.errors import TransportError
from distbelief.roles import SUPERVISOR, Seconds
from distbelief.transport.knock import Knock
from distbelief.transport.places import Place, own_number_towards
from distbelief.transport.zmq_transport import ZmqTransport


DIAL_SECONDS: Final = 3.0
"""Between two tries of who is not let in."""

ONCE_SECONDS: Final = 1.5
"""In which there is but one knock: where something listens, it is a stranger's."""


@final
class Lookout:
    """Of one machine; to be closed.

    Args:
        transport: Of this machine.
        key: Likewise; "": it has none.
        place: Of the supervisor.
        tell: Tells the user.
    """

    def __init__(
        self, transport: ZmqTransport, *, key: str, place: Place, tell: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._key = key
        self._place = place
        self._knock = Knock(place)
        self._begun_at: Seconds | None = None
        self._tell = tell
        self._told: set[str] = set()
        self._dial_at: Seconds | None = None

    def close(self) -> None:
        """Knock no more."""
        self._knock.close()

    def dial(self) -> None:
        """Connect to the supervisor; again, too: ZeroMQ gives up when refused."""
        self._transport.disconnect(SUPERVISOR)
        self._transport.connect(SUPERVISOR, 0, str(self._place), watched=True)

    def look(self, *, is_alone: bool, is_known: bool) -> str | None:
        """Tell the user what is new; return why the run is over, if it seems so.

        Args:
            is_alone: Whether this machine was of the run, and hears nothing now.
            is_known: Whether the supervisor has spoken to it. Who closes a connection
                then is busy, or stands still: its key is the right one.
        """
        now, where = time.monotonic(), self._place.endpoint
        if self._dial_at is not None and now >= self._dial_at:
            self._dial_at = None
            self.dial()
        if self._transport.is_refused(SUPERVISOR):
            self._dial_at = now + DIAL_SECONDS
            self._say(
                f"{where} does not let this machine in. On its machine: distbelief "
                f"keys allow {self._key} NAME --role host; then it will"
            )
        elif self._transport.is_another(SUPERVISOR) and not is_known:
            self._say(
                f"who listens at {where} has another key than this address, or none: "
                "use the address that `distbelief train --listen` prints there"
            )
        self._begun_at = now if self._begun_at is None else self._begun_at
        is_new = now - self._begun_at < ONCE_SECONDS
        if (is_alone or is_new) and self._knock.finds_nobody(now):
            if is_alone:
                return f"nothing listens at {where} any more"
            self._say(f"nothing listens at {where} so far")
        return None

    def own_number(self, *, known: str) -> str:
        """Return the number by which the supervisor can reach this machine now.

        Args:
            known: What it was; returned as long as there is no way there.
        """
        with suppress(TransportError):
            return own_number_towards(self._place.host)
        return known

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)
