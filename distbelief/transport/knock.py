"""A knock at a port: does anything listen there? Nobody has to wait for the answer.

ZeroMQ connects again and again, and does not say why it has to. The kernel at the other
side does: where nothing listens it refuses at once, and of a link that is cut nothing
is heard.
"""

import errno
import select
import socket
from typing import Final, final

from distbelief.roles import Seconds
from distbelief.transport.places import Place


SECONDS: Final = 2.0
"""Between two knocks, and for the answer to one."""


@final
class Knock:
    """Again and again, at one place, for as long as somebody asks.

    Args:
        place: Where.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._link: socket.socket | None = None
        self._begun_at: Seconds | None = None

    def finds_nobody(self, now: Seconds) -> bool:
        """Return whether an answer has just come, and is that nothing listens."""
        if self._begun_at is None or now - self._begun_at >= SECONDS:
            self._begin(now)
        if self._link is None or not _is_answered(self._link):
            return False
        error = self._link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.close()
        return error == errno.ECONNREFUSED

    def close(self) -> None:
        """Wait for no answer."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _begin(self, now: Seconds) -> None:
        self.close()
        self._begun_at = now
        self._link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._link.settimeout(0.0)
        try:
            self._link.connect((self._place.host, self._place.port))
        except BlockingIOError:
            pass  # as expected: the answer is on its way
        except OSError:  # there is no way there at all
            self.close()


def _is_answered(link: socket.socket) -> bool:
    poller = select.poll()
    poller.register(link, select.POLLOUT)
    return bool(poller.poll(0))
