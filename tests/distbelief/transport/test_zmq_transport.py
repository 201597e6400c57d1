"""ZmqTransport over real sockets: what arrives, what is dropped, what does no harm."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zmq

from distbelief.core.errors import LocalProtocolError, TransportError
from distbelief.core.vectors import BLOCK_BYTES
from distbelief.protocol import HeartbeatAck, PushBlock, SaveCheckpoint, Stop
from distbelief.protocol.codec import FRAME_BYTES_MAX, Codec, Envelope
from distbelief.transport import zmq_transport
from distbelief.transport.address import Endpoint, own_address
from distbelief.transport.authenticator import Authenticator, DirectoryAuth, RunAuth
from distbelief.transport.keys import KeyPair
from distbelief.transport.zmq_transport import ZmqTransport
from tests.distbelief.protocol.message_strategies import same
from tests.links import link


PATIENCE_SECONDS = 20.0

PAIR = KeyPair.new()  # of the run


@dataclass
class Make:
    """Makes transports over files or TCP and closes them at the end."""

    directory: Path
    over_tcp: bool
    stack: ExitStack
    n_made: int = 0

    def __call__(
        self, name: str, *, run: str = "run", bind: str = "", **more: object
    ) -> ZmqTransport:
        transport = ZmqTransport(
            name=name,
            incarnation=1,
            run=run,
            bind=bind or self.somewhere(),
            **({"guard": self.guard()} | more),  # type: ignore[arg-type]
        )
        self.stack.callback(transport.close)
        transport.start()
        return transport

    def guard(self) -> Authenticator:
        return RunAuth(PAIR) if self.over_tcp else DirectoryAuth(self.directory)

    def somewhere(self) -> str:
        """Return an endpoint at which nothing listens."""
        self.n_made += 1
        if not self.over_tcp:
            return f"ipc://{self.directory}/.{self.n_made}"
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            return f"tcp://127.0.0.1:{reserved.getsockname()[1]}"

    def place(self, bound: str) -> str:
        """Return the endpoint of what listens there."""
        return f"{bound}?key={PAIR.public}" if self.over_tcp else bound


@pytest.fixture
def make_files(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:
        yield Make(tmp_path, over_tcp=False, stack=stack)


@pytest.fixture
def make_tcp(make_files: Make) -> Make:
    make_files.over_tcp = True
    return make_files


@pytest.fixture(params=[False, True], ids=["files", "tcp"])
def make(request: pytest.FixtureRequest, make_files: Make) -> Make:
    make_files.over_tcp = request.param
    return make_files


def wait(*transports: ZmqTransport, until: Callable[[], bool]) -> None:
    """Poll all transports until the condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not until():
        assert time.monotonic() < deadline, [each.n_malformed for each in transports]
        for transport in transports:
            transport.poll(0.005)


def take(transport: ZmqTransport, n_messages: int) -> list[Envelope]:
    """Return the next `n` messages."""
    taken: list[Envelope] = []

    def enough() -> bool:
        taken.extend(transport.receive())
        return len(taken) >= n_messages

    wait(transport, until=enough)
    assert len(taken) == n_messages
    return taken


def labels(envelopes: list[Envelope]) -> list[str]:
    return [e.message.label for e in envelopes if isinstance(e.message, SaveCheckpoint)]


def test_messages_arrive_in_order_with_their_sender(make: Make) -> None:
    a, b = make("a"), make("b")
    a.connect("b", 1, b.endpoint)
    for index in range(100):
        assert a.send("b", SaveCheckpoint(label=f"{index}"))
    arrived = take(b, 100)
    assert labels(arrived) == [f"{index}" for index in range(100)]
    assert {(each.sender, each.incarnation) for each in arrived} == {("a", 1)}


def test_the_sender_may_change_an_array_as_soon_as_it_is_sent(make: Make) -> None:
    a, b = make("a"), make("b")
    a.connect("b", 1, b.endpoint)
    values = np.ones(BLOCK_BYTES // 4, np.float32)
    a.send("b", PushBlock(sequence=1, term=1, block_index=0, values=values))
    values.fill(np.nan)
    (envelope,) = take(b, 1)
    assert isinstance(envelope.message, PushBlock)
    assert (envelope.message.values == 1).all()


def test_what_is_lent_arrives_as_it_is(make: Make) -> None:
    a, b = make("a"), make("b")
    a.connect("b", 1, b.endpoint)
    for n in (BLOCK_BYTES // 4, 0):
        values = np.arange(n, dtype=np.float32)
        values.flags.writeable = False
        message = PushBlock(sequence=1, term=1, block_index=0, values=values)
        a.send("b", message, lent=True)
        a.send("b", SaveCheckpoint(label="no array"), lent=True)
        envelope, after = take(b, 2)
        assert same(envelope.message, message)
        assert labels([after]) == ["no array"]


def test_one_call_of_receive_yields_a_bounded_number(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "BATCH_MAX", 3)
    a = make("a")
    a.connect("a", 1, a.endpoint)
    for _ in range(5):
        a.send("a", HeartbeatAck())
    seen: list[int] = []

    def all_there() -> bool:
        seen.append(len(list(a.receive())))
        return sum(seen) == 5

    wait(a, until=all_there)
    assert max(seen) <= 3


def test_poll_returns_the_descriptors_that_are_ready(make: Make) -> None:
    a = make("a")
    reader, writer = os.pipe()
    quiet, other = os.pipe()
    assert a.poll(0.0, [reader, quiet]) == frozenset()
    os.write(writer, b"x")
    assert a.poll(PATIENCE_SECONDS, [reader, quiet]) == {reader}
    assert a.poll(0.0, [quiet]) == frozenset()  # no longer asked for
    assert a.poll(0.0) == frozenset()
    for fd in (reader, writer, quiet, other):
        os.close(fd)


def test_poll_waits_at_least_for_its_timeout(make: Make) -> None:
    a = make("a")
    begun = time.monotonic()
    a.poll(0.0015)
    assert time.monotonic() - begun >= 0.0015


@contextmanager
def mute(make: Make) -> Iterator[str]:
    """Listen without reading; yield the endpoint."""
    place = Endpoint.parse(make.place(make.somewhere()))
    is_file = bool(place.path)
    with socket.socket(socket.AF_UNIX if is_file else socket.AF_INET) as listener:
        listener.bind(place.path if is_file else (place.host, place.port))
        listener.listen()
        yield str(place)


def test_a_full_link_drops_and_never_blocks(make: Make) -> None:
    a = make("a", messages_max=10, linger_seconds=0)
    with mute(make) as endpoint:
        a.connect("mute", 1, endpoint)
        accepted = [a.send("mute", SaveCheckpoint(label=f"{n}")) for n in range(50)]
    assert accepted == [True] * 10 + [False] * 40


def test_a_peer_that_reads_nothing_holds_a_bounded_number(make: Make) -> None:
    a, b = make("a", messages_max=4), make("b", messages_max=4)
    a.connect("b", 1, b.endpoint)
    a.send("b", HeartbeatAck())
    take(b, 1)
    values = np.ones(BLOCK_BYTES // 4, np.float32)
    message = PushBlock(sequence=1, term=1, block_index=0, values=values)
    n_taken = 0
    n_refused_running = 0
    while n_refused_running < 3:  # full, and still so after b had time to take more
        if a.send("b", message):
            n_taken, n_refused_running = n_taken + 1, 0
        else:
            n_refused_running += 1
            a.poll(0.05)
    # Four at either end; the kernel's socket buffers hold some too.
    assert n_taken <= 40
    assert len(take(b, n_taken)) == n_taken  # none of those taken is lost
    a.send("b", SaveCheckpoint(label="and it goes on"))
    assert labels(take(b, 1)) == ["and it goes on"]


def test_a_peer_that_restarts_elsewhere_is_reached_there(make: Make) -> None:
    a, old = make("a"), make("b")
    a.connect("b", 1, old.endpoint)
    a.send("b", SaveCheckpoint(label="to the old"))
    take(old, 1)
    old.close()
    new = make("b")
    a.send("b", SaveCheckpoint(label="lost"))
    a.connect("b", 2, new.endpoint)
    a.send("b", SaveCheckpoint(label="to the new"))
    assert labels(take(new, 1)) == ["to the new"]


def test_a_peer_that_restarts_at_the_same_address_gets_no_old_messages(make: Make) -> None:
    address = make.somewhere()
    a, old = make("a"), make("b", bind=address)
    a.connect("b", 1, old.endpoint)
    old.close()
    a.send("b", SaveCheckpoint(label="to the old"))
    new = make("b", bind=address)
    a.connect("b", 2, new.endpoint)
    a.send("b", SaveCheckpoint(label="to the new"))
    assert labels(take(new, 1)) == ["to the new"]


def test_connecting_again_to_the_same_incarnation_changes_nothing(make: Make) -> None:
    a, b = make("a"), make("b")
    for label in ("one", "two"):
        a.connect("b", 1, b.endpoint)
        a.send("b", SaveCheckpoint(label=label))
    assert labels(take(b, 2)) == ["one", "two"]


def test_a_peer_may_start_later_than_what_is_sent_to_it(make: Make) -> None:
    a, address = make("a"), make.somewhere()
    a.connect("b", 1, make.place(address))
    a.send("b", SaveCheckpoint(label="early"))
    b = make("b", bind=address)
    assert labels(take(b, 1)) == ["early"]


def test_a_message_to_a_peer_that_is_unknown_or_disconnected_is_dropped(make: Make) -> None:
    a, b = make("a"), make("b")
    assert not a.send("b", HeartbeatAck())
    a.connect("b", 1, b.endpoint)
    a.disconnect("b")
    a.disconnect("b")
    assert not a.send("b", HeartbeatAck())


def test_the_least_recently_used_link_makes_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standing server meets more workers than it can have sockets."""
    monkeypatch.setattr(zmq_transport, "_PEERS_MAX", 2)
    a, b, c, d = map(make, "abcd")
    a.connect("b", 1, b.endpoint)
    a.connect("c", 1, c.endpoint)
    assert a.send("b", HeartbeatAck())
    a.connect("d", 1, d.endpoint)
    assert [a.send(peer, HeartbeatAck()) for peer in "bcd"] == [True, False, True]


def test_a_port_in_use_is_named_with_the_fix(make_tcp: Make) -> None:
    address = make_tcp.somewhere()
    make_tcp("a", bind=address)
    with pytest.raises(TransportError) as caught:
        make_tcp("b", bind=address)
    assert address in str(caught.value)
    assert "let the system choose" in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:http", "tcp://127.0.0.1"])
def test_an_address_that_cannot_be_had_is_named(make_tcp: Make, address: str) -> None:
    with pytest.raises(TransportError, match="cannot listen at"):
        make_tcp("b", bind=address)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:*", "tcp://127.0.0.1:*", "tcp://host:5", "udp://x:1"]
)
def test_a_listener_at_a_file_has_no_port(make_files: Make, address: str) -> None:
    with pytest.raises(TransportError):
        make_files("a", bind=address)
    with pytest.raises(TransportError, match=r"cannot connect to c|keys new"):
        make_files("b").connect("c", 1, address.replace("*", "5"))


def test_a_listener_at_all_interfaces_is_on_this_host_too(make_tcp: Make) -> None:
    """A worker beside `distbelief serve --insecure` got no answer for a minute.

    Its shards announced 0.0.0.0, which it took for another host.
    """
    a = make_tcp("a", bind="tcp://0.0.0.0:*")
    b = make_tcp("b")
    b.connect("a", 1, a.endpoint)
    b.send("a", HeartbeatAck())
    take(a, 1)


def test_an_endpoint_that_is_none_is_a_transport_error(make: Make) -> None:
    with pytest.raises(TransportError, match="cannot connect to b at"):
        make("a").connect("b", 1, "tcp://127.0.0.1:no-port")


def test_a_transport_that_is_not_running_does_not_connect(tmp_path: Path) -> None:
    transport = link("a", tmp_path)
    assert transport.endpoint == ""
    with pytest.raises(LocalProtocolError, match="transport of a is not running"):
        transport.connect("b", 1, f"ipc://{tmp_path}/.b.1")
    transport.close()  # as often as one likes


class Stranger:
    """A peer with its own sockets, perhaps with a key."""

    def __init__(self, make: Make, *, pair: KeyPair | None = PAIR) -> None:
        self._pair = pair if make.over_tcp else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: list[zmq.Socket[bytes]] = []
        make.stack.callback(self.close)

    def connect(self, endpoint: str, kind: int = zmq.PUSH) -> "zmq.Socket[bytes]":
        link = self._context.socket(kind)
        link.linger = 0
        place = Endpoint.parse(endpoint)
        if self._pair is not None:
            self._pair.dial(link, place.key)
        link.connect(place.endpoint)
        self._links.append(link)  # which a context does not do
        return link

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def log() -> list[str]:
    """The log of the transport `inbox`."""
    return []


@pytest.fixture
def inbox(make: Make, log: list[str]) -> ZmqTransport:
    """A transport that strangers can reach, connected to itself."""
    return reached(make, log)


@pytest.fixture
def inbox_tcp(make_tcp: Make, log: list[str]) -> ZmqTransport:
    return reached(make_tcp, log)


def reached(make: Make, log: list[str]) -> ZmqTransport:
    transport = make("inbox", log=lambda _level, text: log.append(text))
    transport.connect("inbox", 1, transport.endpoint)
    transport.send("inbox", HeartbeatAck())
    take(transport, 1)
    return transport


def still_works(inbox: ZmqTransport) -> bool:
    inbox.send("inbox", SaveCheckpoint(label="honest"))
    return labels(take(inbox, 1)) == ["honest"]


def test_the_end_of_a_watched_connection_is_told_once(make: Make) -> None:
    """So that it is known at once where a worker was killed."""
    a, b, c = make("a"), make("b"), make("c")
    a.connect("b", 3, b.endpoint, watched=True)
    a.connect("c", 1, c.endpoint)
    for name, peer in (("b", b), ("c", c)):
        a.send(name, HeartbeatAck())
        take(peer, 1)
        assert a.ended() == []
        peer.close()
    ended: list[tuple[str, int, str]] = []

    def has_ended() -> bool:
        ended.extend(a.ended())
        return bool(ended)

    wait(a, until=has_ended)
    assert ended == [("b", 3, b.endpoint)]
    a.poll(0.0)
    assert a.ended() == []
    a.disconnect("b")
    a.poll(0.0)  # its monitor is not polled any more


def test_another_key_is_rejected_before_the_first_message(
    inbox_tcp: ZmqTransport, log: list[str], make_tcp: Make
) -> None:
    stranger = Stranger(make_tcp, pair=KeyPair.new())
    link = stranger.connect(inbox_tcp.endpoint)
    link.send_multipart([b"x"] * 1000)
    wait(inbox_tcp, until=lambda: inbox_tcp.n_refused > 0)
    assert log == ["rejected a peer without the run's key (so far 1)"]
    assert still_works(inbox_tcp)
    assert inbox_tcp.n_malformed == 0  # not a byte of it came in


def test_a_listener_with_another_key_than_the_endpoint_learns_nothing(make_tcp: Make) -> None:
    """A process of another user took the port of a dead role.

    It got the run's token within 0.06 s, was accepted with it, and ended the job.
    """
    a, address = make_tcp("a"), make_tcp.somewhere()
    label = "nobody else is to read this"
    with socket.create_server(("127.0.0.1", Endpoint.parse(address).port)) as thief:
        a.connect("b", 1, make_tcp.place(address))
        a.send("b", SaveCheckpoint(label=label))
        learnt = b""
        for _ in range(3):  # it is dialled again and again
            line, _ = thief.accept()
            with line:
                line.settimeout(PATIENCE_SECONDS)
                line.sendall(GREETING)
                heard = b""
                while b"HELLO" not in heard:  # then it waits for a proof of the key
                    heard += line.recv(1 << 16)
                learnt += heard
    assert b"CURVE" in learnt
    for secret in (PAIR.secret, b"run\xa1a", label.encode()):
        assert secret not in learnt
    b = make_tcp("b", bind=address)
    assert labels(take(b, 1)) == [label]


def test_an_endpoint_with_another_key_is_not_connected_to(
    inbox_tcp: ZmqTransport, make_tcp: Make
) -> None:
    stranger, member = make_tcp("s", guard=RunAuth(KeyPair.new())), make_tcp("m")
    with pytest.raises(TransportError, match="does not have the key of this run"):
        stranger.connect("inbox", 1, inbox_tcp.endpoint)
    member.connect("inbox", 1, inbox_tcp.endpoint, watched=True)
    member.send("inbox", SaveCheckpoint(label="honest"))
    assert labels(take(inbox_tcp, 1)) == ["honest"]
    assert not member.has_failed("inbox", zmq_transport.ANOTHER)
    assert not stranger.has_failed("nobody", zmq_transport.ANOTHER)


def test_a_socket_of_another_kind_gets_no_message_in(inbox: ZmqTransport, make: Make) -> None:
    Stranger(make).connect(inbox.endpoint, zmq.DEALER).send(b"hello")
    for _ in range(20):
        assert still_works(inbox)
    assert inbox.n_malformed == 0


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)


def test_no_peer_may_speak_as_the_user(inbox: ZmqTransport, make: Make, log: list[str]) -> None:
    """Ctrl+C is a user event: as a message it could end another user's job."""
    member = make("user")
    member.connect("inbox", 1, inbox.endpoint)
    member.send("inbox", Stop(reason="Ctrl+C"))

    def arrived() -> bool:
        assert not list(inbox.receive())
        return inbox.n_malformed == 1

    wait(inbox, until=arrived)
    assert log == ["dropped: a peer may not speak as 'user' (so far 1)"]
    assert still_works(inbox)


def test_malformed_messages_of_a_member_are_counted_and_seldom_logged(
    inbox: ZmqTransport, make: Make, log: list[str]
) -> None:
    stranger = Stranger(make)
    link = stranger.connect(inbox.endpoint)
    good = Codec(run="run").encode(HeartbeatAck(), sender="x", incarnation=1)
    bad: list[list[bytes]] = [
        [b""],
        [b"x" * 100],
        [bytes(good[0]), b"no such array"],
        [b"part"] * 5000,
        [bytes(frame) for frame in Codec(run="y").encode(
            HeartbeatAck(), sender="x", incarnation=1
        )],
    ]  # fmt: skip
    for frames in bad * 4:
        link.send_multipart(frames)

    def all_arrived() -> bool:
        assert not list(inbox.receive())
        return inbox.n_malformed == 20

    wait(inbox, until=all_arrived)
    assert [text.rpartition(" (")[2] for text in log] == [f"so far {n})" for n in (1, 2, 4, 8, 16)]
    assert still_works(inbox)


def test_a_frame_that_is_too_large_costs_its_sender_the_connection(
    inbox: ZmqTransport, make: Make
) -> None:
    stranger = Stranger(make)
    link = stranger.connect(inbox.endpoint)
    wait(inbox, until=lambda: link.poll(0, zmq.POLLOUT) > 0)
    watch = link.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    link.send(b"x" * (FRAME_BYTES_MAX + 1000))  # a few bytes more pass for CURVE
    wait(inbox, until=lambda: watch.poll(0) > 0)
    assert not list(inbox.receive())
    assert still_works(inbox)
    link.disable_monitor()
    watch.close()


PEER = """
import sys
from distbelief.protocol import SaveCheckpoint, Stop
from distbelief.transport.listen_config import ListenConfig

links = ListenConfig(directory=sys.argv[2]).transport(
    name="peer", incarnation=int(sys.argv[3]), run="run", log=print
)
with links as transport:
    print(transport.endpoint, flush=True)
    transport.connect("a", 1, sys.argv[1])
    going_on = True
    while going_on:
        transport.poll(60)
        for envelope in transport.receive():
            if isinstance(envelope.message, Stop):
                going_on = False
            transport.send("a", SaveCheckpoint(label=type(envelope.message).__name__))
"""


def start_peer(
    a: ZmqTransport, directory: Path, incarnation: int = 1
) -> tuple["subprocess.Popen[str]", str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, a.endpoint, str(directory), str(incarnation)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.processes
def test_a_killed_peer_does_no_harm_and_its_next_incarnation_is_reached(make_files: Make) -> None:
    a = make_files("a", linger_seconds=0)
    first, endpoint = start_peer(a, make_files.directory)
    with first:
        a.connect("peer", 1, endpoint)
        a.send("peer", HeartbeatAck())
        assert labels(take(a, 1)) == ["HeartbeatAck"]
        first.kill()
    for _ in range(1000):
        a.send("peer", HeartbeatAck())  # never blocks, even without a receiver
    second, endpoint = start_peer(a, make_files.directory, 2)
    with second:
        a.connect("peer", 2, endpoint)
        a.send("peer", SaveCheckpoint(label="x"))
        assert labels(take(a, 1)) == ["SaveCheckpoint"]
        second.kill()


@pytest.mark.processes
def test_the_last_messages_of_a_peer_arrive_though_it_ends_at_once(make_files: Make) -> None:
    a = make_files("a")
    process, endpoint = start_peer(a, make_files.directory)
    with process:
        a.connect("peer", 1, endpoint)
        a.send("peer", Stop(reason="enough"))
        # The peer closes at once after this reply; its linger lets it out.
        assert labels(take(a, 1)) == ["Stop"]
        assert process.wait(PATIENCE_SECONDS) == 0


INBOX = """
import sys, time
from distbelief.transport.listen_config import ListenConfig

links = ListenConfig(host=sys.argv[1], secret=sys.argv[2])
with links.transport(name="a", incarnation=1, run="run", log=print) as transport:
    transport.connect("peer", 1, sys.argv[3])
    print(transport.endpoint, flush=True)
    while not list(transport.receive()):  # the handshake needs polls
        transport.poll(0.1)
    print(1, flush=True)
    sys.stdin.readline()
    n_read, until = 0, time.monotonic() + 2.0
    while time.monotonic() < until:
        transport.poll(0.1)
        n_read += len(list(transport.receive()))
    print(n_read)
"""
FLOOD = """
import os, sys, time
from distbelief.protocol import HeartbeatAck
from distbelief.transport.listen_config import ListenConfig

links = ListenConfig(host=sys.argv[1], secret=sys.argv[2])
with links.transport(name="peer", incarnation=1, run="run", log=print) as transport:
    print(transport.endpoint, flush=True)
    transport.connect("a", 1, sys.stdin.readline().strip())
    for n_messages, seconds in ((1, 0.0), (60, 0.0), (20, 0.11), (60, 0.0), (20, 0.11)):
        for _ in range(n_messages):
            transport.send("a", HeartbeatAck())
            time.sleep(seconds)
        print(n_messages, flush=True)
        if seconds == 0.0:
            sys.stdin.readline()
"""


@pytest.mark.processes
def test_a_full_inbox_outlives_the_host_of_its_peer() -> None:
    # libzmq's own heartbeats, if one was in the buffer, made the process abort once it read on:
    # a supervisor ended with a host.
    def begin(script: str, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", script, own_address(), PAIR.secret.hex(), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def line(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def tell(process: "subprocess.Popen[str]", text: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{text}\n")
        process.stdin.flush()

    with begin(FLOOD) as peer, begin(INBOX, line(peer)) as inbox:
        tell(peer, line(inbox))
        assert line(peer) == line(inbox) == "1"
        tell(peer, "more")
        assert line(peer) == "60"
        time.sleep(0.2)  # until they have arrived
        os.kill(inbox.pid, signal.SIGSTOP)
        tell(peer, "more")
        assert line(peer) == "20"
        assert line(peer) == "60"
        tell(peer, "more")
        assert line(peer) == "20"
        peer.kill()
        os.kill(inbox.pid, signal.SIGCONT)
        time.sleep(0.3)  # until it is full
        tell(inbox, "read")
        assert int(line(inbox)) > 0
        assert inbox.wait(PATIENCE_SECONDS) == 0
