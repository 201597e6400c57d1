"""PacketFilter: accepts some of many new connections, and does not disturb open ones."""

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from distbelief.transport.limits import N_WELCOME_MAX, PacketFilter, listener, program


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters")

SECONDS = 0.25


def siege() -> PacketFilter:
    return PacketFilter(per_second_max=40.0, burst_max=100.0)  # 10 in a look


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def comes_from(address: str, port: int) -> socket.socket | None:
    link = socket.socket()
    link.settimeout(0.2)
    link.bind((address, 0))
    with suppress(TimeoutError):
        link.connect(("127.0.0.1", port))
        return link
    link.close()
    return None


def test_a_burst_is_let_in_and_a_flood_is_not(port: int) -> None:
    it = siege()
    assert it.look(port, 100, SECONDS, welcome=()) is None
    assert it.share == 1.0
    told = it.look(port, 200, SECONDS, welcome=())
    assert told is not None
    assert "200 connections opened in 0.25 s, more than 100" in told
    assert it.share == 2.5 / 200.0
    assert it.look(port, 10, SECONDS, welcome=()) is None  # still four times too many
    assert it.share == 2.5 / 200.0 / 4.0
    assert it.look(port, 3, SECONDS, welcome=()) is None  # as many as may come
    assert it.share == 2.5 / 200.0 / 4.0
    for _ in range(200):
        if (told := it.look(port, 0, SECONDS, welcome=())) is not None:
            break
    assert told == "accepting all new connections again"
    assert it.share == 1.0
    it.end()


def test_good_peers_are_accepted_and_open_connections_stay_open(port: int) -> None:
    it = siege()
    before = comes_from("127.0.0.3", port)
    assert before is not None
    it.look(port, 10**9, SECONDS, welcome={"127.0.0.2"})
    assert comes_from("127.0.0.3", port) is None
    friend = comes_from("127.0.0.2", port)
    assert friend is not None
    copy = listener(port)
    assert copy is not None
    for link in (before, friend):
        accepted, _ = copy.accept()
        with link, accepted:
            link.sendall(b"word")
            assert accepted.recv(4) == b"word"
    copy.close()
    it.look(port, 10**9, SECONDS, welcome={"127.0.0.2"})  # it was no friend after all
    assert comes_from("127.0.0.2", port) is None
    it.end()


def test_a_port_that_is_gone_does_no_harm() -> None:
    assert siege().look(1, 10**9, SECONDS, welcome=()) is not None


def test_a_filter_is_never_longer_than_the_kernel_takes() -> None:
    many = {socket.inet_ntoa(struct.pack("!I", n)) for n in range(5000)}
    assert len(program(many, share=0.5)) // 8 == 2 * N_WELCOME_MAX + 8
    assert 2 * N_WELCOME_MAX + 8 <= 4096
