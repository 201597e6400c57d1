"""ConnectionRate: roles of a large job are accepted, floods are not."""

import socket
from pathlib import Path

import pytest

from distbelief.transport.address import Endpoint
from distbelief.transport.keys import KeyPair
from distbelief.transport.limits import ConnectionRate, PeerLimits
from tests.distbelief.transport.test_curve_auth import World, words
from tests.distbelief.transport.test_zmq_transport import take, wait


def newcomers() -> ConnectionRate:
    return ConnectionRate(
        per_second_max=10.0, burst_max=100.0, silent_max=200.0, ended_max=30.0, own="me"
    )


def admit(it: ConnectionRate, key: str, n: int) -> None:
    for _ in range(n):
        it.admitted(key)


def test_of_each_key_so_many_are_free() -> None:
    it = newcomers()
    admit(it, "a", 100)
    admit(it, "b", 60)
    assert it.look(1.0) == -160
    admit(it, "a", 50)
    admit(it, "b", 60)
    assert it.look(1.0) == -10 - 50
    assert it.look(1000.0) == 0
    admit(it, "me", 1000)  # where all machines of a cluster share one key
    assert it.mute(1.0, n_open=0) == []
    assert it.look(1.0) == -1000
    admit(it, "a", 500)
    assert it.look(1.0) == -100


def test_a_steady_key_is_free_at_the_rate_of_the_bucket() -> None:
    it = newcomers()
    n = 0
    for _ in range(100):
        admit(it, "a", 50)
        n -= it.look(0.5)
    assert n <= 100 + 100 * 5


def test_a_key_that_reconnects_silently_is_found() -> None:
    it = newcomers()
    for _ in range(5):
        admit(it, "a", 150)
        admit(it, "b", 150)
        assert it.mute(1.0, n_open=200) in ([], ["b"])
        it.look(1.0)
        for _ in range(150):
            it.spoke("a")  # a little later
    admit(it, "b", 250)
    assert it.mute(1.0, n_open=200) == ["b"]
    it.look(1.0)
    assert it.mute(1.0, n_open=200) == []


def test_a_key_whose_silent_connections_end_is_found_sooner() -> None:
    """1,000 of them cost 1.2 of six seconds, and further ones were accepted."""
    it = newcomers()
    admit(it, "honest", 90)  # waits until there is something to say
    assert it.are_too_many()  # they are looked at
    assert it.mute(1.0, n_open=90) == []
    it.look(1.0)
    assert not it.are_too_many()
    assert it.mute(5.0, n_open=90) == []
    admit(it, "hostile", 45)
    assert it.mute(1.0, n_open=100) == []
    it.look(1.0)
    assert it.mute(0.0, n_open=90) == []  # some of them may be his
    assert it.mute(0.0, n_open=4) == ["hostile"]
    assert it.mute(0.0, n_open=4) == []


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_roles_of_a_large_job_are_not_a_flood(tmp_path: Path, *, is_allowed: bool) -> None:
    """More than 300 came at once: the rest waited for half a minute."""
    world = World(tmp_path)
    with world.stack:
        caps = PeerLimits(
            burst_newcomers_max=20.0, newcomers_per_second_max=1.0, watch_seconds=0.01
        )
        server = world.server(caps=caps)
        pairs = [KeyPair.new() for _ in range(5)]
        if is_allowed:
            for n, pair in enumerate(pairs):
                world.allow(pair.public, f"lab-{n}")
        for n, pair in enumerate(pairs):
            links = [world.stranger(server, pair) for _ in range(8)]
            if is_allowed:
                for link in links:
                    link.send(words(f"worker-{n + 2}"))
                take(server, 8)

        def is_besieged() -> bool:
            assert not list(server.receive())
            return any("opened in" in text for text in world.log)

        if is_allowed:
            assert not is_besieged()
            return
        wait(server, until=is_besieged)
        port = Endpoint.parse(server.endpoint).port
        server.close()
    with socket.create_server(("127.0.0.1", port)):  # nothing of it listens any more
        pass


def test_a_rush_does_not_wait_for_the_next_look(tmp_path: Path) -> None:
    """Within a quarter of a second thousands came, and each cost the server time."""
    world = World(tmp_path)
    with world.stack:
        server = world.server(caps=PeerLimits(burst_newcomers_max=20.0, watch_seconds=1e6))
        pair = KeyPair.new()
        links = [world.stranger(server, pair) for _ in range(30)]

        def is_besieged() -> bool:
            assert not list(server.receive())
            return any("opened in" in text for text in world.log)

        wait(server, until=is_besieged)
        assert not any(link.closed for link in links)
