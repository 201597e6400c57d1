"""Documents in pieces."""

import pytest
from hypothesis import given, strategies as st

from distbelief.errors import RemoteProtocolError
from distbelief.job.hosts import documents
from distbelief.job.hosts.documents import DOCUMENT_BYTES_MAX, Reading, piece_of
from distbelief.messages import Blob, Piece


@given(
    content=st.binary(max_size=50),
    size=st.integers(1, 9),
    times=st.lists(st.integers(0, 2), max_size=40),
)
def test_a_document_arrives_whatever_is_lost_or_comes_twice(
    content: bytes, size: int, times: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES_MAX", size)
        reading, ask = Reading("d"), Reading("d").ask()
        for n in [*times, *[1] * 200]:
            piece = piece_of("d", content, ask.offset)
            for _ in range(n):
                if reading.take(piece):
                    ask = reading.ask()
            ask = reading.ask_again() or ask
    assert reading.content == content
    assert reading.ask_again() is None


@pytest.mark.parametrize(
    ("offset", "n_bytes", "content"),
    [
        (0, 3, b"four"),
        (0, DOCUMENT_BYTES_MAX + 1, b"x"),
        (0, 1, b""),
    ],
)
def test_a_piece_that_makes_no_sense_is_refused(
    offset: int, n_bytes: int, content: bytes
) -> None:
    piece = Piece(document="d", offset=offset, n_bytes=n_bytes, content=Blob(content))
    with pytest.raises(RemoteProtocolError, match="bytes of d at 0"):
        Reading("d").take(piece)


def test_a_document_does_not_change_its_length() -> None:
    reading, ab = Reading("d"), Blob(b"ab")
    assert reading.take(Piece(document="d", offset=0, n_bytes=4, content=ab))
    assert not reading.take(Piece(document="e", offset=2, n_bytes=4, content=ab))
    with pytest.raises(RemoteProtocolError, match="before: 4"):
        reading.take(Piece(document="d", offset=2, n_bytes=5, content=ab))
    with pytest.raises(RemoteProtocolError, match="it has 3 bytes"):
        piece_of("d", b"abc", 4)
