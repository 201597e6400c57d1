"""CurveAuth with honest and hostile peers: what they may do, and what they cost."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings, strategies as st

from distbelief.core.errors import TransportError
from distbelief.protocol import HeartbeatAck, PushBlock, SaveCheckpoint
from distbelief.protocol.codec import FRAME_BYTES_MAX, Codec
from distbelief.transport import zmq_transport
from distbelief.transport.address import Endpoint
from distbelief.transport.authenticator import REFUSED, PeerLimits, RunAuth, Source, TokenBucket
from distbelief.transport.keys import Allowed, KeyFiles, KeyPair
from distbelief.transport.listen_config import KeyConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.zmq_transport import ZmqTransport
from tests.distbelief.transport.test_node import Scripted
from tests.distbelief.transport.test_zmq_transport import labels, take, wait


RUN = "run"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)


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

    def server(self, name: str = "supervisor", **options: Any) -> ZmqTransport:  # noqa: ANN401
        ring = KeyConfig(directory=str(self.server_files.directory), role="server")
        return self.started(name, ring, **options)

    def worker(
        self, name: str = "worker-1", *, files: KeyFiles | None = None, key: str = ""
    ) -> ZmqTransport:
        """Return a worker with these key files, for a server with this key."""
        directory = str((files or self.worker_files).directory)
        ring = KeyConfig(directory=directory, role="worker", server_key=key or self.server_key)
        return self.started(name, ring)

    def pair(self, limits: PeerLimits | None = None) -> tuple[ZmqTransport, ZmqTransport]:
        """Return a server and an honest worker, whose first message has arrived."""
        server, worker = self.server(limits=limits), self.worker()
        worker.connect("supervisor", 1, server.endpoint)
        assert works(server, worker)
        return server, worker

    def started(
        self,
        name: str,
        ring: KeyConfig,
        *,
        limits: PeerLimits | None = None,
        bind: str = "tcp://127.0.0.1:*",
    ) -> ZmqTransport:
        log = lambda _level, text: self.log.append(text)  # noqa: E731
        guard = ring.guard(log=log, limits=limits)
        transport = ZmqTransport(name=name, incarnation=1, run=RUN, bind=bind, guard=guard, log=log)
        self.stack.callback(transport.close)
        transport.start()
        return transport

    def stranger(self, inbox: ZmqTransport, pair: KeyPair) -> "zmq.Socket[bytes]":
        """Return a socket with this key that keeps no rules."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = context.socket(zmq.PUSH)
        link.linger = 0
        pair.dial(link, self.server_key)
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


def test_peers_with_keys_speak_both_ways(world: World) -> None:
    server, worker = world.server(), world.worker()
    assert Endpoint.parse(server.endpoint).key == world.server_key
    worker.connect("supervisor", 1, server.endpoint)
    server.connect("worker-1", 1, worker.endpoint)
    values = np.arange(FRAME_BYTES_MAX // 4, dtype=np.float32)  # the largest frame
    for start in range(0, values.size, values.size // 4):
        worker.send(
            "supervisor", PushBlock(sequence=1, term=1, block_index=0, values=values[start:])
        )
    for envelope in take(server, 4):
        assert isinstance(envelope.message, PushBlock)
        assert np.array_equal(envelope.message.values, values[-envelope.message.values.size :])
        assert envelope.sender == "worker-1"
    server.send("worker-1", HeartbeatAck())
    take(worker, 1)
    assert world.log == []


@pytest.mark.parametrize("rotates", [False, True])
def test_a_servers_processes_know_each_other_by_the_key_they_share(
    world: World, *, rotates: bool
) -> None:
    """After a key rotation, a server ended at the first shard that was restarted."""
    files = world.server_files
    ring = KeyConfig(directory=str(files.directory), role="server").pinned()
    server = world.started("supervisor", ring)
    if rotates:
        files.begin_rotation()
        files.finish_rotation()
    shard = world.started("shard-0", ring)
    shard.connect("supervisor", 1, server.endpoint)
    server.connect("shard-0", 1, shard.endpoint)
    shard.send("supervisor", SaveCheckpoint(label="here"))
    assert labels(take(server, 1)) == ["here"]
    server.send("shard-0", HeartbeatAck())
    take(shard, 1)


@pytest.mark.parametrize("name", ["supervisor", "shard-0"])
def test_a_loop_on_the_servers_machine_speaks_by_the_servers_key(world: World, name: str) -> None:
    """A user has one key per host and cannot add it to its own allow-list."""
    server = world.server(name)
    worker = world.worker(files=world.server_files)
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


def test_a_key_that_is_not_allowed_is_refused_with_the_command_that_allows_it(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    pair = KeyPair.new()
    link = world.stranger(server, pair)
    watch = world.watch(link, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    wait(server, until=lambda: watch.poll(0) > 0)
    assert server.n_refused == 1
    assert f"distbelief keys allow {pair.public} NAME" in world.log[0]
    assert "127.0.0.1" in world.log[0]
    assert works(server, worker)
    assert server.n_malformed == 0


def test_a_worker_learns_that_its_key_is_not_allowed(world: World) -> None:
    world.server_files.revoke("honest")
    server, worker = world.server(), world.worker()
    worker.connect("supervisor", 1, server.endpoint, watched=True)
    wait(server, until=lambda: worker.has_failed("supervisor", zmq_transport.REFUSED))
    assert not worker.has_failed("supervisor", zmq_transport.ANOTHER)


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
            worker = world.worker(key=wrong)
            port = Endpoint.parse(inbox.endpoint).port
            place = Endpoint(host="127.0.0.1", port=port, key=wrong)
            worker.connect("supervisor", 1, str(place), watched=True)
            wait(inbox, until=lambda: worker.has_failed("supervisor", zmq_transport.ANOTHER))  # noqa: B023
            assert not worker.has_failed("supervisor", zmq_transport.REFUSED)
    assert world.log == []


def test_a_key_that_is_allowed_later_is_accepted_without_a_restart(
    world: World, server: ZmqTransport
) -> None:
    pair = KeyPair.new()
    refused = world.stranger(server, pair)
    wait(server, until=lambda: server.n_refused > 0)
    refused.close()
    world.allow(pair.public, "new")
    admitted = world.stranger(server, pair)
    admitted.send(words("worker-new"))
    take(server, 1)


def test_the_open_connections_of_a_revoked_key_are_closed(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    link = world.member(server)
    link.send(words("worker-2"))
    take(server, 1)
    watch = world.lost(link, server)
    world.server_files.revoke("hostile")
    wait(server, until=lambda: watch.poll(0) > 0)  # though it sends nothing
    assert any("no longer allowed" in said for said in world.log)
    assert works(server, worker)


def test_a_connection_of_a_revoked_key_that_has_sent_nothing_brings_no_message(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    link = world.member(server)
    watch = world.watch(link, zmq.EVENT_HANDSHAKE_SUCCEEDED)
    wait(server, until=lambda: watch.poll(0) > 0)
    world.server_files.revoke("hostile")
    assert server._curve is not None
    permissions = server._curve._permissions
    wait(server, until=lambda: len(permissions._revoked) == 1)
    link.send(words("worker-2"))

    def is_dropped() -> bool:
        assert not list(server.receive())
        return server.n_malformed > 0

    wait(server, until=is_dropped)
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
    assert server.n_malformed == 0
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
    assert server.n_malformed == 1
    assert any(re.search("rejecting key .* for 30 s", text) for text in world.log)
    wait(server, until=lambda: server.n_refused > 0)  # it tries again
    assert works(server, worker)


def test_a_role_rejects_the_key_of_a_false_claim(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    """Only messages that could not be read cost their key anything."""
    role = Scripted(lambda _event, _now: [])
    node = RoleRunner(role, transport=server, log=lambda _level, _text: None)
    link = world.member(server)
    watch = world.lost(link, server)
    link.send(words("worker-2"))
    assert node.pump(lambda: watch.poll(0) > 0, timeout_seconds=20.0)
    node.close()
    assert any("HeartbeatAck: only supervisor may" in text for text in world.log)
    assert [type(event).__name__ for event in role.events] == ["Started"]
    assert works(server, worker)


def test_messages_sent_before_the_cut_are_dropped_unread(
    world: World, server: ZmqTransport, worker: ZmqTransport
) -> None:
    link = world.member(server)
    world.lost(link, server)
    for _ in range(50):
        link.send(words("shard-0"))
    wait(server, until=lambda: bool(list(server.receive())) or server.n_malformed > 9)
    assert server.n_malformed > 9
    assert sum("its key may not speak as" in text for text in world.log) == 2  # of one
    assert works(server, worker)


def test_violations_of_the_own_key_cannot_fill_a_disk(world: World) -> None:
    """The own key is never suspended, so each bad message caused a log line."""
    ring = KeyConfig(directory=str(world.server_files.directory), role="server")
    authenticator = ring.guard(log=lambda _level, text: world.log.append(text))
    for _ in range(9):
        authenticator.offended(Source(world.server_key), "it speaks as 'x'")
    assert world.log == [
        f"this side's own key: it speaks as 'x' (so far {n})" for n in (1, 2, 4, 8)
    ]


def test_a_rejected_peer_may_come_back_after_a_while(world: World) -> None:
    server = world.server(limits=PeerLimits(suspended_seconds=0.2))
    link = world.member(server)
    link.send(b"nonsense")
    wait(server, until=lambda: not list(server.receive()) and server.n_malformed == 1)
    link.send(words("worker-2"))  # lost, perhaps, with the connection
    link.send(words("worker-2"))
    wait(server, until=lambda: bool(list(server.receive())))


@given(
    rate=st.floats(0.1, 100.0),
    size=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 5)), max_size=60),
)
def test_a_bucket_gives_what_its_rate_allows_and_once_its_size(
    rate: float, size: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken = TokenBucket(rate, float(size), float(size), 0.0), 0.0, 0
    for pause, n_tokens in steps:
        now += pause
        held = min(size, bucket.level + rate * pause)
        got = bucket.take(n_tokens, now)
        assert got == (held >= n_tokens)
        taken += n_tokens * got
        assert 0 <= bucket.level <= size
        assert taken <= size + rate * now + 1e-6


def test_a_key_that_sends_too_much_is_kept_out(world: World) -> None:
    server, honest = world.pair(PeerLimits(messages_per_second=10, burst_messages=100))
    link = world.member(server)
    watch = world.lost(link, server)
    n_taken = 0
    while not watch.poll(0):
        if link.poll(0, zmq.POLLOUT):
            link.send(words("worker-2"))
        server.poll(0.0)
        n_taken += len(list(server.receive()))
    assert 75 <= n_taken <= 1000  # 100 less the connection
    assert any("too many messages per second" in text for text in world.log)
    list(server.receive())
    assert works(server, honest)


def test_a_key_that_opens_too_many_connections_is_kept_out(world: World) -> None:
    limits = PeerLimits(messages_per_second=1, burst_messages=100, connection_messages=30)
    server, honest = world.pair(limits)
    pair = KeyPair.new()
    world.allow(pair.public, "hostile")
    links = [world.stranger(server, pair) for _ in range(6)]
    wait(server, until=lambda: server.n_refused > 0)
    assert any("too many connections per second" in text for text in world.log)
    for link in links:
        link.send(words("worker-2"))
    assert works(server, honest)  # and nothing of the others comes before


def test_all_roles_of_this_host_share_a_key_without_limits(world: World) -> None:
    limits = PeerLimits(messages_per_second=1, burst_messages=1)
    server, shard = world.server(limits=limits), world.server("shard-0")
    shard.connect("supervisor", 1, server.endpoint)
    for n in range(50):
        shard.send("supervisor", SaveCheckpoint(label=f"{n}"))
    take(server, 50)
    assert world.log == []


def test_a_message_of_another_run_is_no_offence(world: World, server: ZmqTransport) -> None:
    link = world.member(server)
    link.send(words("worker-2", run="before"))
    link.send(words("worker-2"))
    take(server, 1)
    assert server.n_malformed == 1


def test_a_peer_that_sends_byte_by_byte_is_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distbelief.transport.keys.HANDSHAKE_SECONDS_MAX", 0.2)
    server, worker = world.pair()
    with socket.create_connection(("127.0.0.1", port_of(server))) as raw:
        raw.settimeout(0.01)
        begun, n_sent = time.monotonic(), 0
        try:
            while time.monotonic() - begun < 20:
                raw.sendall(GREETING[n_sent : n_sent + 1] or b"x")
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
        server, worker = world.pair()
        hello = GREETING + b"\x04\xc8\x05HELLO\x01\x00"
        prefix = data.draw(st.sampled_from([b"", GREETING, hello]))
        with socket.create_connection(("127.0.0.1", port_of(server))) as raw:
            raw.sendall(prefix + garbage)
            assert works(server, worker)
        assert server.n_malformed == 0


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
    assert server.n_malformed == 0
