"""Documents in pieces."""

from collections import deque

import pytest
from hypothesis import given, strategies as st

from distbelief.cluster import bootstrap
from distbelief.cluster.bootstrap import DOCUMENT_BYTES_MAX, FileDownload, chunk_of
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Blob, FileChunk, FileRequest
from distbelief.protocol.hosts import CHUNK_BYTES_MAX


@given(
    content=st.binary(max_size=50),
    size=st.integers(1, 9),
    times=st.lists(st.integers(0, 2), max_size=40),
)
def test_a_document_arrives_whatever_is_lost_or_comes_twice(
    content: bytes, size: int, times: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "CHUNK_BYTES_MAX", size)
        reading, ask = FileDownload("d"), FileDownload("d").ask()
        for n in [*times, *[1] * 200]:
            piece = chunk_of("d", content, ask.offset)
            for _ in range(n):
                if reading.take(piece):
                    ask = reading.ask()
            ask = reading.ask_again() or ask
    assert reading.content == content
    assert reading.ask_again() is None


@pytest.mark.parametrize("piece_seconds", [0.1, 0.7, 1.0, 3.0, 8.0])
def test_a_slow_link_does_not_fill_with_the_same_piece(piece_seconds: float) -> None:
    """Each half second without news was one more question, and one more answer.

    Of each piece there were more than of the one before, and all else that a machine
    waits for came after them.
    """
    content, heartbeat_seconds, free_at, n_sent = bytes(6 * CHUNK_BYTES_MAX), 0.5, 0.0, 0
    reading = FileDownload("d")
    coming: deque[tuple[float, FileChunk]] = deque()

    def send(ask: FileRequest, now: float) -> None:
        nonlocal free_at, n_sent
        free_at, n_sent = max(now, free_at) + piece_seconds, n_sent + 1
        coming.append((free_at, chunk_of("d", content, ask.offset)))

    send(reading.ask(), 0.0)
    for beat in range(round(30 * piece_seconds / heartbeat_seconds)):
        now = beat * heartbeat_seconds
        while coming and coming[0][0] <= now:
            at, piece = coming.popleft()
            if reading.take(piece) and reading.content is None:
                send(reading.ask(), at)
        again = reading.ask_again()
        if again is not None:
            send(again, now)
    assert reading.content == content
    assert n_sent <= 6 + 6


@pytest.mark.parametrize(
    ("offset", "n_bytes", "content"),
    [(0, 3, b"four"), (0, DOCUMENT_BYTES_MAX + 1, b"x"), (0, 1, b"")],
)
def test_a_piece_that_makes_no_sense_is_refused(offset: int, n_bytes: int, content: bytes) -> None:
    piece = FileChunk(document="d", offset=offset, n_bytes=n_bytes, content=Blob(content))
    with pytest.raises(RemoteProtocolError, match="bytes of d at 0"):
        FileDownload("d").take(piece)


def test_a_document_does_not_change_its_length() -> None:
    reading, ab = FileDownload("d"), Blob(b"ab")
    assert reading.take(FileChunk(document="d", offset=0, n_bytes=4, content=ab))
    assert not reading.take(FileChunk(document="e", offset=2, n_bytes=4, content=ab))
    with pytest.raises(RemoteProtocolError, match="before: 4"):
        reading.take(FileChunk(document="d", offset=2, n_bytes=5, content=ab))
    with pytest.raises(RemoteProtocolError, match="it has 3 bytes"):
        chunk_of("d", b"abc", 4)
