"""CurveAuth with honest and hostile peers: what they may do, and what they cost."""

import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given, settings, strategies as st

from distbelief.core.vectors import BLOCK_BYTES
from distbelief.errors import TransportError
from distbelief.protocol import HeartbeatAck, PushBlock, SaveCheckpoint
from distbelief.protocol.codec import Codec
from distbelief.transport.address import Endpoint
from distbelief.transport.authenticator import REFUSED, RunAuth, Source
from distbelief.transport.config import KeyConfig
from distbelief.transport.curve_auth import CurveAuth
from distbelief.transport.keys import Allowed, KeyFiles, KeyPair
from distbelief.transport.limits import Connection, PeerLimits, at, connections, cut, cut_descriptor
from distbelief.transport.zmq_transport import ZmqTransport
from tests.distbelief.transport.test_zmq_transport import labels, take, wait


RUN = "run"
MEBIBYTE = 1 << 20

Make = Callable[..., ZmqTransport]


class World:
    """A server with an allow-list, its worker, and other peers."""

    def __init__(self, directory: Path) -> None:
        self.server_files = KeyFiles(directory / "server")
        self.worker_files = KeyFiles(directory / "worker")
        self.server_key = self.server_files.make()
        self.worker_key = self.worker_files.make()
        self.allow(self.worker_key, "honest")
        self.log: list[str] = []
        self.stack = ExitStack()

    def allow(self, key: str, name: str) -> None:
        self.server_files.allow(Allowed(key=key, roles=("worker",), name=name))

    def server(
        self, name: str = "supervisor", *, caps: PeerLimits | None = None, **more: object
    ) -> ZmqTransport:
        ring = KeyConfig(directory=str(self.server_files.directory), role="server")
        return self.started(name, ring, caps=caps, **more)

    def worker(self, name: str = "worker-1", **more: object) -> ZmqTransport:
        directory = str(self.worker_files.directory)
        ring = KeyConfig(directory=directory, role="worker", server_key=self.server_key)
        return self.started(name, ring, caps=None, **more)

    def started(
        self, name: str, ring: KeyConfig, *, caps: PeerLimits | None, **more: object
    ) -> ZmqTransport:
        def log(_level: str, text: str) -> None:
            self.log.append(text)

        transport = ZmqTransport(
            name=name,
            incarnation=1,
            run=RUN,
            guard=ring.guard(log=log, caps=caps),
            log=log,
            **({"bind": "tcp://127.0.0.1:*"} | more),  # type: ignore[arg-type]
        )
        self.stack.callback(transport.close)
        transport.start()
        return transport

    def stranger(
        self, inbox: ZmqTransport, pair: KeyPair, *, server_key: str | None = None
    ) -> "zmq.Socket[bytes]":
        """Return a socket with this key that keeps no rules."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = context.socket(zmq.PUSH)
        link.linger = 0
        link.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
        link.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.reveal())
        key = server_key or self.server_key
        link.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key))
        self.stack.callback(context.destroy, linger=0)
        self.stack.callback(link.close, 0)
        link.connect(Endpoint.parse(inbox.endpoint).endpoint)
        return link

    def watch(self, link: "zmq.Socket[bytes]", event: int) -> "zmq.Socket[bytes]":
        """Return a monitor of this event of the socket."""
        watch = link.get_monitor_socket(event)
        self.stack.callback(watch.close, 0)
        self.stack.callback(link.disable_monitor)
        return watch

    def lost(self, link: "zmq.Socket[bytes]", server: ZmqTransport) -> "zmq.Socket[bytes]":
        """Wait until the link is connected; return a monitor of its disconnection."""
        wait(server, until=lambda: link.poll(0, zmq.POLLOUT) > 0)
        return self.watch(link, zmq.EVENT_DISCONNECTED)

    def member(self, inbox: ZmqTransport, name: str = "hostile") -> "zmq.Socket[bytes]":
        """Return a socket whose key is allowed."""
        pair = KeyPair.new()
        self.allow(pair.public, name)
        return self.stranger(inbox, pair)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    with made.stack:
        yield made


@pytest.fixture
def server(world: World) -> ZmqTransport:
    return world.server()


@pytest.fixture
def worker(world: World, server: ZmqTransport) -> ZmqTransport:
    """An honest worker, whose first message has arrived."""
    made = world.worker()
    made.connect("supervisor", 1, server.endpoint)
    assert works(server, made)
    return made


def works(server: ZmqTransport, worker: ZmqTransport) -> bool:
    worker.send("supervisor", SaveCheckpoint(label="honest"))
    return labels(take(server, 1)) == ["honest"]


def words(sender: str, *, run: str = RUN) -> bytes:
    return bytes(Codec(run=run).encode(HeartbeatAck(), sender=sender, incarnation=1)[0])


def port_of(transport: ZmqTransport) -> int:
    return Endpoint.parse(transport.endpoint).port


# -------------------------------------------------------------------------- honest


def test_peers_with_keys_speak_both_ways(world: World) -> None:
    server, worker = world.server(), world.worker()
    assert Endpoint.parse(server.endpoint).key == world.server_key
    worker.connect("supervisor", 1, server.endpoint)
    server.connect("worker-1", 1, worker.endpoint)
    values = np.arange(BLOCK_BYTES // 4, dtype=np.float32)  # the largest frame
    for start in range(0, values.size, values.size // 4):
        worker.send(
            "supervisor",
            PushBlock(sequence=1, shard_incarnation=1, block_index=0, values=values[start:]),
        )
    for envelope in take(server, 4):
        assert isinstance(envelope.message, PushBlock)
        assert np.array_equal(envelope.message.values, values[-envelope.message.values.size :])
        assert envelope.sender == "worker-1"
    server.send("worker-1", HeartbeatAck())
    take(worker, 1)
    assert world.log == []


def test_a_servers_processes_know_each_other_by_the_key_they_share(world: World) -> None:
    server, shard = world.server(), world.server("shard-0")
    shard.connect("supervisor", 1, server.endpoint)
    server.connect("shard-0", 1, shard.endpoint)
    shard.send("supervisor", SaveCheckpoint(label="here"))
    assert labels(take(server, 1)) == ["here"]
    server.send("shard-0", HeartbeatAck())
    take(shard, 1)


def test_a_shard_that_starts_after_its_key_was_replaced_is_known(world: World) -> None:
    """After a key rotation, a server ended at the first shard that was restarted."""
    files = world.server_files
    ring = KeyConfig(directory=str(files.directory), role="server").pinned()
    server = world.started("supervisor", ring, caps=None)
    files.begin_rotation()
    files.finish_rotation()
    shard = world.started("shard-0", ring, caps=None)
    shard.connect("supervisor", 1, server.endpoint)
    server.connect("shard-0", 1, shard.endpoint)
    shard.send("supervisor", SaveCheckpoint(label="again"))
    assert labels(take(server, 1)) == ["again"]
    server.send("shard-0", HeartbeatAck())
    take(shard, 1)


@pytest.mark.parametrize("name", ["supervisor", "shard-0"])
def test_a_loop_on_the_servers_machine_speaks_by_the_servers_key(world: World, name: str) -> None:
    """A user has one key per host and cannot add it to its own allow-list."""
    server = world.server(name)
    directory = str(world.server_files.directory)
    ring = KeyConfig(directory=directory, role="worker", server_key=world.server_key)
    worker = world.started("worker-1", ring, caps=None)
    worker.connect(name, 1, server.endpoint)
    worker.send(name, SaveCheckpoint(label="mine"))
    assert labels(take(server, 1)) == ["mine"]
    server.connect("worker-1", 1, worker.endpoint)
    server.send("worker-1", HeartbeatAck())
    take(worker, 1)
    assert world.log == []


def test_what_is_bound_everywhere_is_found_where_the_supervisor_was(world: World) -> None:
    server = world.server(bind="tcp://0.0.0.0:*")
    shard = world.server("shard-0", bind="tcp://0.0.0.0:*")
    assert shard.endpoint.startswith("tcp://0.0.0.0:")
    worker = world.worker()
    worker.connect("supervisor", 1, server.endpoint.replace("0.0.0.0", "127.0.0.1"))
    worker.connect("shard-0", 1, shard.endpoint)
    worker.send("shard-0", HeartbeatAck())
    take(shard, 1)


def test_bytes_are_counted_as_the_kernel_does(server: ZmqTransport, worker: ZmqTransport) -> None:
    """Otherwise an error would grow with every message."""
    (before,) = connections(port_of(server))
    n_before = server._authenticator._table.connections[before.peer].n_bytes  # type: ignore[attr-defined]
    for size in (0, 1, 150, 200, 210, 230, 1000, BLOCK_BYTES // 4):
        values = np.zeros(size, np.float32)
        block = PushBlock(sequence=1, shard_incarnation=1, block_index=0, values=values)
        worker.send("supervisor", block)
        take(server, 1)
    (after,) = connections(port_of(server))
    n_after = server._authenticator._table.connections[before.peer].n_bytes  # type: ignore[attr-defined]
    assert n_after - n_before == after.n_bytes - before.n_bytes
    assert 0 < before.n_bytes - n_before < 1000  # the handshake


# ------------------------------------------------------------------------ at the door


def test_a_key_that_is_not_allowed_is_refused_with_the_command_that_allows_it(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    pair = KeyPair.new()
    link = world.stranger(server, pair)
    watch = world.watch(link, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    wait(server, until=lambda: watch.poll(0) > 0)
    assert server.counters.refused == 1
    assert f"distbelief keys allow {pair.public} NAME" in world.log[0]
    assert "127.0.0.1" in world.log[0]
    assert works(server, worker)
    assert server.counters.malformed == 0


def test_a_worker_learns_that_its_key_is_not_allowed(world: World) -> None:
    world.server_files.revoke("honest")
    server, worker = world.server(), world.worker()
    worker.connect("supervisor", 1, server.endpoint, watched=True)
    wait(server, until=lambda: worker.is_refused("supervisor"))
    assert not worker.has_other_key("supervisor")


def test_a_worker_learns_that_another_process_listens_there(world: World) -> None:
    server = world.server()
    other = ZmqTransport(
        name="supervisor",
        incarnation=1,
        run=RUN,
        bind="tcp://127.0.0.1:*",
        guard=RunAuth(KeyPair.new()),
    )
    for inbox in (server, other):
        with inbox if inbox is other else ExitStack():
            wrong = KeyPair.new().public
            directory = str(world.worker_files.directory)
            ring = KeyConfig(directory=directory, role="worker", server_key=wrong)
            worker = world.started("worker-1", ring, caps=None)
            port = Endpoint.parse(inbox.endpoint).port
            place = Endpoint(host="127.0.0.1", port=port, key=wrong)
            worker.connect("supervisor", 1, str(place), watched=True)
            wait(inbox, until=lambda: worker.has_other_key("supervisor"))  # noqa: B023
            assert not worker.is_refused("supervisor")
    assert world.log == []


def test_a_key_that_is_allowed_later_is_accepted_without_a_restart(
    world: World, server: ZmqTransport
) -> None:
    pair = KeyPair.new()
    refused = world.stranger(server, pair)
    wait(server, until=lambda: server.counters.refused > 0)
    refused.close()
    world.allow(pair.public, "new")
    admitted = world.stranger(server, pair)
    admitted.send(words("worker-new"))
    take(server, 1)


def test_a_revoked_key_is_cut(world: World, server: ZmqTransport, worker: ZmqTransport) -> None:
    link = world.member(server)
    link.send(words("worker-2"))
    take(server, 1)
    watch = world.lost(link, server)
    world.server_files.revoke("hostile")
    wait(server, until=lambda: watch.poll(0) > 0)
    assert works(server, worker)


def test_a_key_revoked_by_mistake_is_accepted_as_soon_as_it_is_allowed_again(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    """It was rejected for 30 s, as if it had broken a rule.

    So were all hosts of a job while its allow-list had an invalid line, or was empty for the moment
    in which an editor wrote it.
    """
    world.server_files.revoke("honest")
    wait(server, until=lambda: any("no longer allowed" in said for said in world.log))
    world.allow(world.worker_key, "honest")
    worker.disconnect("supervisor")
    worker.connect("supervisor", 1, server.endpoint)
    assert works(server, worker)


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN"])
def test_a_peer_without_a_key_sends_nothing(
    server: ZmqTransport, worker: ZmqTransport, mechanism: str
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = context.socket(zmq.PUSH)
    link.linger = 0
    if mechanism == "PLAIN":
        link.plain_username, link.plain_password = b"worker-1", RUN.encode()
    link.connect(Endpoint.parse(server.endpoint).endpoint)
    link.send(words("worker-1"))
    for _ in range(20):
        assert works(server, worker)
    assert server.counters.malformed == 0
    link.close(0)
    context.destroy(linger=0)


def test_only_an_endpoint_with_an_allowed_key_is_connected_to(
    worker: ZmqTransport, server: ZmqTransport
) -> None:
    for text, why in [
        ("tcp://127.0.0.1:4000", "uses no key"),
        ("ipc:///tmp/x", "uses no key"),
        ("inproc://zeromq.zap.01", "not an endpoint"),
        (f"tcp://127.0.0.1:4000?key={'a' * 64}", "distbelief keys allow aaaa"),
    ]:
        with pytest.raises(TransportError, match=why):
            worker.connect("shard-0", 1, text)
    with pytest.raises(TransportError, match="not allowed to be a shard"):
        server.connect("shard-0", 1, worker.endpoint)


def test_requests_that_no_zeromq_makes_are_refused(server: ZmqTransport) -> None:
    judge = server._authenticator.judge
    good = [b"1.0", b"1", b"", b"10.0.0.1", b"", b"CURVE", bytes(32)]
    for request in (good[:6], good[:2], [*good[:6], b"x"], [*good, b"more"]):
        assert judge(request).status == REFUSED
    assert judge([*good[:5], b"PLAIN", bytes(32)]).status == REFUSED


# --------------------------------------------------------------------- bad manners


@pytest.mark.parametrize(
    "frames",
    [
        [words("supervisor")],
        [words("shard-0")],
        [words("worker-1")],  # which is somebody else
        [b"\x93random"],
        [words("worker-2"), b"one frame too many"],
        [b"part"] * 5000,
    ],
    ids=["supervisor", "shard", "another", "random", "frames", "parts"],
)
def test_a_peer_that_breaks_a_rule_is_cut_and_rejected_for_a_while(
    world: World, server: ZmqTransport, worker: ZmqTransport, frames: list[bytes]
) -> None:
    link = world.member(server)
    watch = world.lost(link, server)
    link.send_multipart(frames)

    def is_cut() -> bool:
        assert not list(server.receive())
        return watch.poll(0) > 0

    wait(server, until=is_cut)
    assert server.counters.malformed == 1
    assert any(re.search("rejecting key .* for 30 s", text) for text in world.log)
    wait(server, until=lambda: server.counters.refused > 0)  # it tries again
    assert works(server, worker)


def test_messages_sent_before_the_cut_are_dropped_unread(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    link = world.member(server)
    world.lost(link, server)
    for _ in range(50):
        link.send(words("shard-0"))
    wait(server, until=lambda: bool(list(server.receive())) or server.counters.malformed > 9)
    assert server.counters.malformed > 9
    assert sum("its key may not speak as" in text for text in world.log) == 2  # of one
    assert works(server, worker)


def test_violations_of_the_own_key_cannot_fill_a_disk(world: World) -> None:
    """The own key is never suspended, so each bad message caused a log line."""
    ring = KeyConfig(directory=str(world.server_files.directory), role="server")
    authenticator = ring.guard(log=lambda _level, text: world.log.append(text))
    for _ in range(9):
        authenticator.offended(Source(user=world.server_key), "it speaks as 'x'")
    authenticator.close()
    assert world.log == [
        f"this side's own key: it speaks as 'x' (so far {n})" for n in (1, 2, 4, 8)
    ]


def test_a_rejected_peer_may_come_back_after_a_while(world: World) -> None:
    server = world.server(caps=PeerLimits(suspended_seconds=0.2, handshake_seconds_max=0.1))
    link = world.member(server)
    link.send(b"nonsense")
    wait(server, until=lambda: not list(server.receive()) and server.counters.malformed == 1)
    link.send(words("worker-2"))  # lost, perhaps, with the connection
    link.send(words("worker-2"))
    wait(server, until=lambda: bool(list(server.receive())))


def test_a_message_of_another_run_is_no_offence(world: World, server: ZmqTransport) -> None:
    link = world.member(server)
    link.send(words("worker-2", run="before"))
    link.send(words("worker-2"))
    take(server, 1)
    assert server.counters.malformed == 1


def test_a_message_of_too_many_parts_is_ended_before_it_is_whole(world: World) -> None:
    """ZeroMQ bounds waiting messages and frames, not unfinished messages."""
    caps = PeerLimits(unread_bytes_max=8 * MEBIBYTE, watch_seconds=0.01)
    server, worker = world.server(caps=caps), world.worker()
    worker.connect("supervisor", 1, server.endpoint)
    assert works(server, worker)
    link = world.member(server)
    watch = world.lost(link, server)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    link.send_multipart([bytes(MEBIBYTE)] * 512, copy=False)

    def is_cut() -> bool:
        assert not list(server.receive())
        return watch.poll(0) > 0

    wait(server, until=is_cut)
    assert server.counters.malformed == 0  # it never came to be a message
    assert any("unread bytes" in text for text in world.log)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 200 * MEBIBYTE
    assert works(server, worker)


def test_what_a_key_sends_by_many_connections_is_counted_together(world: World) -> None:
    """64 connections, each just below its limit, would take 16 GiB."""
    caps = PeerLimits(unread_bytes_of_key_max=4 * MEBIBYTE, watch_seconds=0.01)
    server, worker = world.server(caps=caps), world.worker()
    worker.connect("supervisor", 1, server.endpoint)
    assert works(server, worker)
    pair = KeyPair.new()
    world.allow(pair.public, "hostile")
    links = [world.stranger(server, pair) for _ in range(3)]
    for link in links:
        world.lost(link, server)
        link.send(words("worker-2"))
    take(server, 3)
    for link in links:
        link.send_multipart([bytes(MEBIBYTE)] * 64, copy=False)
    wait(server, until=lambda: any("on all its" in text for text in world.log))
    assert works(server, worker)


def test_a_peer_that_never_ends_a_message_is_rejected_for_a_while(world: World) -> None:
    """Without a complete message only the address is known, not the key."""
    caps = PeerLimits(unfinished_bytes_max=2 * MEBIBYTE, watch_seconds=0.01)
    server, worker = world.server(caps=caps), world.worker()
    worker.connect("supervisor", 1, server.endpoint)
    assert works(server, worker)
    link = world.member(server)
    watch = world.lost(link, server)
    link.send_multipart([bytes(MEBIBYTE)] * 512, copy=False)

    def is_cut() -> bool:
        assert not list(server.receive())
        return watch.poll(0) > 0

    wait(server, until=is_cut)
    assert any("a message that does not end" in text for text in world.log)
    wait(server, until=lambda: any("a peer at this address" in text for text in world.log))
    assert works(server, worker)  # from the same address, but here already


def test_a_peer_that_never_ends_a_message_is_found_on_a_busy_server(world: World) -> None:
    """A busy server did not check connections for 3.5 s, or never."""
    caps = PeerLimits(unfinished_bytes_max=2 * MEBIBYTE, watch_seconds=0.01)
    server, worker = world.server(caps=caps), world.worker()
    worker.connect("supervisor", 1, server.endpoint)
    assert works(server, worker)
    link = world.member(server)
    watch = world.lost(link, server)
    link.send_multipart([bytes(MEBIBYTE)] * 512, copy=False)

    def is_cut() -> bool:
        worker.send("supervisor", SaveCheckpoint(label="honest"))
        assert server._inbox.poll(5000)  # when it looks at connections, too
        server.poll(0.0)
        list(server.receive())
        return watch.poll(0) > 0

    wait(until=is_cut)
    assert any("a message that does not end" in text for text in world.log)


def test_heartbeats_are_not_counted_as_unfinished_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's heartbeats are bytes outside of messages: 8 MiB after some days."""
    now, n_bytes = 0.0, 0
    ring = KeyConfig(directory=str(world.server_files.directory), role="server")
    permissions = ring.guard(log=lambda _level, _text: None)._permissions
    pair = world.server_files.pair()
    authenticator = CurveAuth(pair, permissions, warn=world.log.append, now=lambda: now)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    world.stack.callback(context.destroy, linger=0)
    inbox = context.socket(zmq.PULL)
    authenticator.listen(inbox, "tcp://127.0.0.1:*")

    def connections_of(_port: int) -> list[Connection]:
        peer = ("10.0.0.1", 4000)
        return [Connection(peer=peer, n_bytes=n_bytes, n_waiting=0)]

    where = "distbelief.transport.limits.connections"
    monkeypatch.setattr(where, connections_of)
    for _ in range(400):
        now += 1000.0
        n_bytes += 500 * 60
        authenticator.drained()
        authenticator.watch(1)
    assert n_bytes > PeerLimits().unfinished_bytes_max
    assert world.log == []
    n_bytes += PeerLimits().unfinished_bytes_max + 128_000
    for _ in range(2):
        now += 1.0
        authenticator.drained()
        authenticator.watch(1)
    assert "a message that does not end" in world.log[0]
    authenticator._connection_rate.close()
    inbox.close(0)


def test_a_key_that_sends_too_much_is_kept_out(world: World) -> None:
    caps = PeerLimits(messages_per_second_max=10, burst_messages_max=100, watch_seconds=0.01)
    server = world.server(caps=caps)
    honest = world.worker()
    honest.connect("supervisor", 1, server.endpoint)
    assert works(server, honest)
    link = world.member(server)
    watch = world.lost(link, server)
    n_taken = 0
    while not watch.poll(0):
        if link.poll(0, zmq.POLLOUT):
            link.send(words("worker-2"))
        server.poll(0.0)
        n_taken += len(list(server.receive()))
        assert n_taken < 5000
    assert n_taken > 100
    assert any("messages in" in text for text in world.log)
    list(server.receive())
    assert works(server, honest)


def test_one_address_has_a_bounded_number_of_connections(world: World) -> None:
    caps = PeerLimits(connections_max=5, watch_seconds=0.01)
    server = world.server(caps=caps)
    worker = world.worker()
    worker.connect("supervisor", 1, server.endpoint)
    assert works(server, worker)
    server.poll(0.02)
    with ExitStack() as stack:
        for _ in range(40):
            raw = socket.create_connection(("127.0.0.1", port_of(server)))
            stack.enter_context(raw)
        wait(server, until=lambda: len(list(connections(port_of(server)))) <= 6)
        assert works(server, worker)  # who has said something is counted apart
    assert 1 <= sum("connections at once" in text for text in world.log) < 10


@pytest.mark.parametrize("n_max", [20, 5])
def test_the_roles_of_one_machine_are_counted_by_its_key(world: World, n_max: int) -> None:
    """400 roles came from one address, and those beyond 256 were cut again and again."""
    caps = PeerLimits(connections_max=5, connections_of_key_max=n_max, watch_seconds=0.01)
    server = world.server(caps=caps)
    pair = KeyPair.new()
    world.allow(pair.public, "lab")

    def is_cut() -> bool:
        assert not list(server.receive())
        return any("6 connections at once" in text for text in world.log)

    for _ in range(min(n_max + 1, 15)):
        link = world.stranger(server, pair)
        link.send(words("worker-2"))
        take(server, 1)
    if n_max == 5:
        wait(server, until=is_cut)
    server.poll(0.02)
    assert is_cut() == (n_max == 5)


def test_a_frame_that_is_too_large_is_not_taken(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    link = world.member(server)
    watch = world.lost(link, server)
    link.send(bytes(64 * MEBIBYTE))
    wait(server, until=lambda: watch.poll(0) > 0)
    assert not list(server.receive())
    assert works(server, worker)


def test_a_key_whose_frames_are_never_taken_is_rejected_after_a_while(world: World) -> None:
    """ZeroMQ closes such a connection itself, but the peer reconnected 1,500 times a second."""
    caps = PeerLimits(connections_max=8, newcomers_per_second_max=0.01, watch_seconds=0.01)
    server = world.server(caps=caps)
    pair = KeyPair.new()
    world.allow(pair.public, "hostile")

    def is_out() -> bool:
        assert not list(server.receive())
        return any("and sends nothing" in text for text in world.log)

    def has_ended(watch: "zmq.Socket[bytes]") -> bool:
        return watch.poll(0) > 0 or is_out()

    for _ in range(12):
        link = world.stranger(server, pair)
        watch = world.lost(link, server)
        link.send(bytes(2 * MEBIBYTE))
        wait(server, until=partial(has_ended, watch))
    wait(server, until=is_out)


def test_a_peer_that_sends_byte_by_byte_is_cut(world: World) -> None:
    server = world.server(caps=PeerLimits(handshake_seconds_max=0.2))
    worker = world.worker()
    worker.connect("supervisor", 1, server.endpoint)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
    with socket.create_connection(("127.0.0.1", port_of(server))) as raw:
        raw.settimeout(0.01)
        begun, n_sent = time.monotonic(), 0
        try:
            while time.monotonic() - begun < 20:
                raw.sendall(greeting[n_sent : n_sent + 1] or b"x")
                n_sent += 1
                assert works(server, worker)
                try:
                    if raw.recv(4096) == b"":
                        break
                except TimeoutError:
                    pass
        except OSError:
            pass
        assert time.monotonic() - begun < 15


@given(garbage=st.binary(min_size=1, max_size=300), data=st.data())
@settings(max_examples=20)
def test_random_bytes_do_no_harm(
    garbage: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = World(tmp_path_factory.mktemp("world"))
    with world.stack:
        server, worker = world.server(), world.worker()
        worker.connect("supervisor", 1, server.endpoint)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
        hello = greeting + b"\x04\xc8\x05HELLO\x01\x00"
        prefix = data.draw(st.sampled_from([b"", greeting, hello]))
        with socket.create_connection(("127.0.0.1", port_of(server))) as raw:
            raw.sendall(prefix + garbage)
            assert works(server, worker)
        assert server.counters.malformed == 0


def test_a_recorded_conversation_opens_nothing(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    """An attacker in the middle records all bytes of a member and replays them."""
    port = port_of(server)
    with socket.create_server(("127.0.0.1", 0)) as middle:
        place = Endpoint(host="127.0.0.1", port=middle.getsockname()[1], key=world.server_key)
        member = world.worker("worker-3")
        member.connect("supervisor", 1, str(place))
        member.send("supervisor", SaveCheckpoint(label="once"))
        near, _ = middle.accept()
        recorded = b""
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            near.settimeout(0.01)
            far.settimeout(0.01)
            taken: list[str] = []
            while not taken:
                for one, other in ((near, far), (far, near)):
                    try:
                        part = one.recv(65536)
                    except TimeoutError:
                        continue
                    other.sendall(part)
                    recorded += part if one is near else b""
                server.poll(0.0)
                taken = labels(list(server.receive()))
            assert taken == ["once"]
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(recorded)
        for _ in range(20):
            assert works(server, worker)  # and nothing else comes
    assert server.counters.malformed == 0


# --------------------------------------------------------------------- connections


def test_only_connections_to_the_port_are_cut(server: ZmqTransport, worker: ZmqTransport) -> None:
    port = port_of(server)
    (one,) = connections(port)
    assert one.peer[0] == "127.0.0.1"
    assert cut(port, {("127.0.0.1", 1)}) == cut(port + 1, {one.peer}) == 0
    assert not cut_descriptor(port, 0)
    assert not cut_descriptor(port, 10**6)
    assert at(0, port) is None
    assert works(server, worker)
    assert cut(port, {one.peer}) == 1

    def comes_through() -> bool:
        # What is sent before ZeroMQ has noticed the cut is lost, however much it is.
        worker.send("supervisor", SaveCheckpoint(label="honest"))
        return "honest" in labels(list(server.receive()))

    wait(server, until=comes_through)
