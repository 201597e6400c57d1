"""What ZeroMQ says on a connection, cut into messages: of its sender's side only.

    greeting (64 bytes), command READY, then messages of one or more frames

    frame    flags (1: more follow, 2: long, 4: command), length (1 or 8 bytes), content

ZMTP 3.x as in ZeroMQ's RFC 23, not encrypted. Nothing of a message is looked at but
where it ends, and who sends the first.
"""

from typing import Final, final

from distbelief.errors import RemoteProtocolError
from distbelief.wire import sender_of


GREETING_BYTES: Final = 64
UNIT_BYTES_MAX: Final = 1 << 28
"""Of one message: what is longer is nothing that roles say."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_VERSION_AT = 10


@final
class NoZmtpError(Exception):
    """This is no connection of ZeroMQ's, or of one that is not understood."""


@final
class Cutter:
    """Cuts what comes into pieces that are passed on as a whole.

    Attributes:
        name: Of who speaks, once that was said.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._buffer = bytearray()
        self._n_greeted = 0  # bytes of the greeting that have come
        self._frames_end = 0  # of the message that is not complete

    def feed(self, content: bytes) -> list[tuple[bytes, bool]]:
        """Return what is complete by now, and whether it is a message.

        Raises:
            NoZmtpError: this cannot be cut.
        """
        self._buffer += content
        if len(self._buffer) > UNIT_BYTES_MAX:
            raise NoZmtpError(f"a message of more than {UNIT_BYTES_MAX} bytes")
        pieces: list[tuple[bytes, bool]] = []
        if self._n_greeted < GREETING_BYTES and self._buffer:
            pieces.append((self._greeting(), False))
            if self._n_greeted < GREETING_BYTES:
                return pieces
        while (end := self._frame_end()) is not None:
            flags = self._buffer[self._frames_end]
            if flags & _COMMAND:
                pieces.append((self._command(end), False))
            elif flags & _MORE:
                self._frames_end = end
            else:
                pieces.append((self._message(end), True))
        return pieces

    def _greeting(self) -> bytes:
        """Return what of it has come: both sides speak in turns."""
        begin, buffer = self._n_greeted, self._buffer
        for at, least in ((0, 0xFF), (_VERSION_AT, 3)):
            if begin <= at < begin + len(buffer) and buffer[at - begin] < least:
                raise NoZmtpError("a greeting of another protocol than ZMTP 3")
        content = self._take(min(GREETING_BYTES - begin, len(buffer)))
        self._n_greeted += len(content)
        return content

    def _frame_end(self) -> int | None:
        """Return where the next frame ends, if it has come."""
        begin, buffer = self._frames_end, self._buffer
        if len(buffer) <= begin:
            return None
        n_length = 8 if buffer[begin] & _LONG else 1
        header = begin + 1 + n_length
        if len(buffer) < header:
            return None
        end = header + int.from_bytes(buffer[begin + 1 : header], "big")
        if end > UNIT_BYTES_MAX:
            raise NoZmtpError(f"a message of more than {UNIT_BYTES_MAX} bytes")
        return end if len(buffer) >= end else None

    def _command(self, end: int) -> bytes:
        if self._frames_end:
            raise NoZmtpError("a command in the middle of a message")
        return self._take(end)

    def _message(self, end: int) -> bytes:
        if self.name is None:
            begin = 9 if self._buffer[0] & _LONG else 2
            n = int.from_bytes(self._buffer[1:begin], "big")
            try:
                self.name = sender_of(bytes(self._buffer[begin : begin + n]))
            except RemoteProtocolError as error:
                raise NoZmtpError(str(error)) from None
        return self._take(end)

    def _take(self, end: int) -> bytes:
        taken = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._frames_end = 0
        return taken
