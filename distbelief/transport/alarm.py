"""An alarm: ends the wait of a poll, from any thread and from a signal handler."""

import socket
from contextlib import suppress
from typing import final


@final
class Alarm:
    """Two sockets: what is written to one ends a poll of the other."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> None:
        """Make the sockets; until then nothing can be rung."""
        ends = socket.socketpair()
        for end in ends:
            end.settimeout(0)
        self._ends = ends

    def ring(self) -> None:
        """End the poll, or the next one. Unlike a lock, safe in a signal handler."""
        if self._ends is not None:
            with suppress(OSError):  # full: it rings; closed: nobody is there to hear
                self._ends[1].send(b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable once it was rung, until `silence`."""
        assert self._ends is not None
        return self._ends[0].fileno()

    def silence(self) -> None:
        """It was heard."""
        assert self._ends is not None
        with suppress(BlockingIOError):
            self._ends[0].recv(4096)

    def close(self) -> None:
        """Close the sockets; it may be rung all the same."""
        for end in self._ends or ():
            end.close()
