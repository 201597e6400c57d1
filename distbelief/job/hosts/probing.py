"""How fast what the supervisor sends comes in here: pieces, twice as many each time.

    round     1    2    3    4 ...    7       begun when the last one is here
    pieces    1    2    4    8 ...   64       of 64 KiB, all asked for at once

until all of it has taken 150 ms. So a slow link is done after the first pieces, one of
1 Gbit/s after 8 MiB. The rate is that of the best round, for in another one somebody
else may have had the processor: what messages get, encrypted if they are, and read by
this process.
"""

from dataclasses import dataclass
from typing import Final, final

from distbelief.errors import RemoteProtocolError
from distbelief.messages import Ask, Blob, Piece
from distbelief.roles import Seconds


PROBE: Final = "probe"
"""The document that is asked for to see how long it takes."""

PIECE_BYTES: Final = 1 << 16
N_ROUNDS_MAX: Final = 7
N_PIECES_MAX: Final = (1 << N_ROUNDS_MAX) - 1
"""That one life of a host is sent: 8 MiB."""

SECONDS_ENOUGH: Final = 0.15
SECONDS_MAX: Final = 3.0
"""For all of it: a link on which something is lost has no rate."""

_CONTENT: Final = Blob(bytes(PIECE_BYTES))


def probe_piece(offset: int) -> Piece:
    """Return the piece that begins there.

    Raises:
        RemoteProtocolError: there is none.
    """
    n_bytes = N_PIECES_MAX * PIECE_BYTES
    if offset >= n_bytes or offset % PIECE_BYTES:
        raise RemoteProtocolError(f"a piece of {PROBE} at {offset}: there is none")
    return Piece(document=PROBE, offset=offset, n_bytes=n_bytes, content=_CONTENT)


@final
@dataclass(slots=True, kw_only=True)
class LinkProbe:
    """Of one life of a host.

    Attributes:
        begun_at: When its first piece was asked for.
        rate: Bytes a second, of the best round that is whole; 0.0: none is.
        is_over: Whether there is nothing more to ask for.
    """

    begun_at: Seconds
    rate: float = 0.0
    is_over: bool = False
    _n_asked: int = 0
    _n_come: int = 0
    _n_of_round: int = 0
    _round_at: Seconds = 0.0

    def ask(self, now: Seconds) -> list[Ask]:
        """Return what the next round asks for."""
        self._n_of_round = max(1, 2 * self._n_of_round)
        self._round_at = now
        first, self._n_asked = self._n_asked, self._n_asked + self._n_of_round
        return [
            Ask(document=PROBE, offset=index * PIECE_BYTES) for index in range(first, self._n_asked)
        ]

    def take(self, piece: Piece, now: Seconds) -> list[Ask]:
        """Take a piece; return what is to be asked for now."""
        if self.is_over or piece.offset != self._n_come * PIECE_BYTES:
            return []
        self._n_come += 1
        if self._n_come < self._n_asked:
            return []
        seconds = now - self._round_at
        # As if read by a clock of microseconds: an infinite speed is none.
        rate = self._n_of_round * PIECE_BYTES / max(seconds, 1e-6)
        self.rate = max(self.rate, rate)
        if now - self.begun_at >= SECONDS_ENOUGH or self._n_asked == N_PIECES_MAX:
            self.is_over = True
            return []
        return self.ask(now)

    def is_late(self, now: Seconds) -> bool:
        """Return whether it has taken too long."""
        return now - self.begun_at > SECONDS_MAX
