"""Documents between a host and the supervisor: asked for piece by piece.

    who wants it                    who has it
      | Ask (offset 0) ----------->  |
      | <-------------------- Piece  |
      | Ask (where that ended) --->  |   and so on; asked again if nothing comes

One piece is under way at a time, but for a few that were asked for twice, so a document
takes little more of a link, or of memory at its end, than a piece: what is trained goes
first.
"""

from typing import Final, final

from distbelief.errors import RemoteProtocolError
from distbelief.messages import Ask, Blob, Piece
from distbelief.messages.hosts import PIECE_BYTES_MAX


DOCUMENT_BYTES_MAX: Final = 1 << 26


def piece_of(document: str, content: bytes, offset: int) -> Piece:
    """Return the piece that begins there.

    Raises:
        RemoteProtocolError: there is none.
    """
    if offset > len(content):
        raise RemoteProtocolError(f"a piece of {document} at {offset}: it has {len(content)} bytes")
    return Piece(
        document=document,
        offset=offset,
        n_bytes=len(content),
        content=Blob(memoryview(content)[offset : offset + PIECE_BYTES_MAX]),
    )


@final
class Reading:
    """One document, as far as it has come.

    Args:
        document: Its name.
    """

    def __init__(self, document: str) -> None:
        self.document = document
        self._content = bytearray()
        self._n_bytes: int | None = None
        self._n_looks = 0  # since it was asked last
        self._patience = 2  # looks, after which it is asked again

    @property
    def content(self) -> bytes | None:
        """All of it, once it is here."""
        is_whole = self._n_bytes == len(self._content)
        return bytes(self._content) if is_whole else None

    def ask(self) -> Ask:
        """Return what to ask for now."""
        self._n_looks = 0
        return Ask(document=self.document, offset=len(self._content))

    def ask_again(self) -> Ask | None:
        """Return what to ask for if nothing has come for long; called now and then.

        More and more seldom: what is merely slow comes as often as it is asked for, and
        the next piece after all that.
        """
        self._n_looks += 1
        if self.content is not None or self._n_looks < self._patience:
            return None
        self._patience *= 2
        return self.ask()

    def take(self, piece: Piece) -> bool:
        """Take a piece; return whether it is news.

        Raises:
            RemoteProtocolError: it does not go with what has come.
        """
        if piece.document != self.document or piece.offset != len(self._content):
            return False  # of a question that was repeated
        end = piece.offset + len(piece.content)
        known = piece.n_bytes if self._n_bytes is None else self._n_bytes
        is_sound = known == piece.n_bytes <= DOCUMENT_BYTES_MAX and end <= known
        if not is_sound or (end < known and not piece.content):
            raise RemoteProtocolError(
                f"{len(piece.content)} bytes of {self.document} at {piece.offset}, of "
                f"{piece.n_bytes} (before: {self._n_bytes}); {DOCUMENT_BYTES_MAX} at "
                "most"
            )
        if self.content is not None:
            return False
        self._n_bytes = known
        self._content += piece.content.content
        return True
