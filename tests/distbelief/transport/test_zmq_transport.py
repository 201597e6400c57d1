"""The real network: what arrives, what is dropped, what does no harm."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given, settings, strategies as st

from distbelief.errors import LocalProtocolError, TransportError
from distbelief.messages import Alive, Message, PushBlock, Save, Stop
from distbelief.transport import zmq_transport
from distbelief.transport.zmq_transport import TransportOptions, ZmqTransport
from distbelief.vectors import BLOCK_BYTES
from distbelief.wire import Envelope, Wire
from tests.distbelief.message_strategies import messages, same


PATIENCE_SECONDS = 20.0

Make = Callable[..., ZmqTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make transports, each closed at the end whatever happens."""
    with ExitStack() as stack:

        def make(name: str, *, token: str = "run", **more: object) -> ZmqTransport:
            transport = ZmqTransport(
                name=name,
                incarnation=1,
                token=token,
                **more,  # type: ignore[arg-type]
            )
            stack.callback(transport.close)
            transport.start()
            return transport

        yield make


def wait(*transports: ZmqTransport, until: Callable[[], bool]) -> None:
    """Let every transport do its part until it is so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not until():
        assert time.monotonic() < deadline, [each.counters for each in transports]
        for transport in transports:
            transport.poll(0.005)


def take(transport: ZmqTransport, n_messages: int) -> list[Envelope]:
    """Return the next so many messages."""
    taken: list[Envelope] = []

    def enough() -> bool:
        taken.extend(transport.receive())
        return len(taken) >= n_messages

    wait(transport, until=enough)
    assert len(taken) == n_messages
    return taken


def labels(envelopes: list[Envelope]) -> list[str]:
    return [e.message.label for e in envelopes if isinstance(e.message, Save)]


# -------------------------------------------------------------------- what arrives


def test_messages_arrive_in_order_and_say_who_sent_them(make: Make) -> None:
    a, b = make("a"), make("b")
    a.connect("b", 1, b.endpoint)
    for index in range(100):
        assert a.send("b", Save(label=f"{index}"))
    arrived = take(b, 100)
    assert labels(arrived) == [f"{index}" for index in range(100)]
    assert {(each.sender, each.incarnation) for each in arrived} == {("a", 1)}
    assert a.counters.messages_out == b.counters.messages_in == 100
    assert a.counters.bytes_out == b.counters.bytes_in > 0


def test_both_directions_are_links_of_their_own(make: Make) -> None:
    a, b = make("a"), make("b")
    a.connect("b", 1, b.endpoint)
    b.connect("a", 1, a.endpoint)
    a.send("b", Save(label="to b"))
    b.send("a", Save(label="to a"))
    assert labels(take(b, 1)) == ["to b"]
    assert labels(take(a, 1)) == ["to a"]


@settings(max_examples=20)
@given(message=messages)
def test_any_message_survives_the_journey(message: Message) -> None:
    with ZmqTransport(name="a", incarnation=7, token="run") as transport:
        transport.connect("a", 7, transport.endpoint)
        transport.send("a", message)
        (envelope,) = take(transport, 1)
    assert same(envelope.message, message)
    assert envelope.incarnation == 7


def test_the_sender_may_change_an_array_as_soon_as_it_is_sent(make: Make) -> None:
    a, b = make("a"), make("b")
    a.connect("b", 1, b.endpoint)
    values = np.ones(BLOCK_BYTES // 4, np.float32)
    a.send(
        "b", PushBlock(sequence=1, shard_incarnation=1, block_index=0, values=values)
    )
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
        message = PushBlock(
            sequence=1, shard_incarnation=1, block_index=0, values=values
        )
        a.send("b", message, lent=True)
        a.send("b", Save(label="no array"), lent=True)
        envelope, after = take(b, 2)
        assert same(envelope.message, message)
        assert labels([after]) == ["no array"]


def test_one_call_of_receive_yields_a_bounded_number(make: Make) -> None:
    a = make("a", options=TransportOptions(batch_max=3))
    a.connect("a", 1, a.endpoint)
    for _ in range(5):
        a.send("a", Alive())
    seen: list[int] = []

    def all_there() -> bool:
        seen.append(len(list(a.receive())))
        return sum(seen) == 5

    wait(a, until=all_there)
    assert max(seen) <= 3


def test_sockets_of_files_work_as_well(make: Make, tmp_path: Path) -> None:
    a = make("a", bind=f"ipc://{tmp_path}/a")
    a.connect("a", 1, a.endpoint)
    a.send("a", Alive())
    take(a, 1)


# ---------------------------------------------------------------------------- poll


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


def test_poll_waits_at_least_as_long_as_it_is_told(make: Make) -> None:
    a = make("a")
    begun = time.monotonic()
    a.poll(0.0015)
    assert time.monotonic() - begun >= 0.0015


# --------------------------------------------------------------- what is not sent


def test_a_message_to_an_unknown_peer_is_dropped_and_counted(make: Make) -> None:
    a = make("a")
    assert not a.send("nobody", Alive())
    assert a.counters.dropped_unknown == 1


def test_a_full_link_drops_counts_and_never_blocks(make: Make) -> None:
    a = make("a", options=TransportOptions(messages_max=10, linger_seconds=0))
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and says nothing
        a.connect("mute", 1, f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        accepted = [a.send("mute", Save(label=f"{n}")) for n in range(50)]
    assert accepted == [True] * 10 + [False] * 40
    assert (a.counters.messages_out, a.counters.dropped_full) == (10, 40)


def test_a_peer_that_reads_nothing_holds_a_bounded_number(make: Make) -> None:
    options = TransportOptions(messages_max=4)
    a, b = make("a", options=options), make("b", options=options)
    a.connect("b", 1, b.endpoint)
    a.send("b", Alive())
    take(b, 1)
    values = np.ones(BLOCK_BYTES // 4, np.float32)
    message = PushBlock(sequence=1, shard_incarnation=1, block_index=0, values=values)
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
    a.send("b", Save(label="and it goes on"))
    assert labels(take(b, 1)) == ["and it goes on"]


# -------------------------------------------------------------------- peers change


def test_a_peer_that_restarts_elsewhere_is_reached_there(make: Make) -> None:
    a, old = make("a"), make("b")
    a.connect("b", 1, old.endpoint)
    a.send("b", Save(label="to the old"))
    take(old, 1)
    old.close()
    new = make("b")
    a.send("b", Save(label="lost"))
    a.connect("b", 2, new.endpoint)
    a.send("b", Save(label="to the new"))
    assert labels(take(new, 1)) == ["to the new"]


def test_a_peer_that_restarts_at_the_same_address_gets_no_old_messages(
    make: Make,
) -> None:
    a, old = make("a"), make("b")
    address = old.endpoint
    a.connect("b", 1, address)
    old.close()
    a.send("b", Save(label="to the old"))
    new = make("b", bind=address)
    a.connect("b", 2, address)
    a.send("b", Save(label="to the new"))
    assert labels(take(new, 1)) == ["to the new"]


def test_connecting_again_to_the_same_life_changes_nothing(make: Make) -> None:
    a, b = make("a"), make("b")
    for label in ("one", "two"):
        a.connect("b", 1, b.endpoint)
        a.send("b", Save(label=label))
    assert labels(take(b, 2)) == ["one", "two"]


def test_a_peer_may_start_later_than_what_is_sent_to_it(make: Make) -> None:
    a = make("a")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
    a.connect("b", 1, address)
    a.send("b", Save(label="early"))
    b = make("b", bind=address)
    assert labels(take(b, 1)) == ["early"]


def test_a_disconnected_peer_is_unknown(make: Make) -> None:
    a, b = make("a"), make("b")
    a.connect("b", 1, b.endpoint)
    a.disconnect("b")
    a.disconnect("b")
    assert not a.send("b", Alive())


def test_who_was_not_written_to_for_longest_makes_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standing server meets more workers than there can be sockets."""
    monkeypatch.setattr(zmq_transport, "_OUTBOXES_MAX", 2)
    a, b, c, d = map(make, "abcd")
    a.connect("b", 1, b.endpoint)
    a.connect("c", 1, c.endpoint)
    assert a.send("b", Alive())
    a.connect("d", 1, d.endpoint)
    assert [a.send(peer, Alive()) for peer in "bcd"] == [True, False, True]


# ------------------------------------------------------------------------- refusals


def test_a_taken_port_is_named_with_the_mend(make: Make) -> None:
    a = make("a")
    with pytest.raises(TransportError) as caught:
        make("b", bind=a.endpoint)
    assert a.endpoint in str(caught.value)
    assert "let the system choose" in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:http", "tcp://127.0.0.1"])
def test_an_address_that_cannot_be_had_is_named(make: Make, address: str) -> None:
    with pytest.raises(TransportError, match=r"cannot listen at|not on this machine"):
        make("b", bind=address)


@pytest.mark.parametrize(
    "address",
    ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://10.1.2.3:5", "tcp://host:5", "udp://x:1"],
)
def test_nothing_leaves_this_machine_unless_allowed(make: Make, address: str) -> None:
    with pytest.raises(TransportError, match="not on this machine"):
        make("a", bind=address)
    with pytest.raises(TransportError, match="allow_remote=True"):
        make("b").connect("c", 1, address)


def test_remote_peers_can_be_allowed(make: Make) -> None:
    a = make("a", bind="tcp://0.0.0.0:*", options=TransportOptions(allow_remote=True))
    a.connect("a", 1, a.endpoint.replace("0.0.0.0", "127.0.0.1"))
    a.send("a", Alive())
    take(a, 1)


def test_who_listens_everywhere_is_on_this_machine_too(make: Make) -> None:
    """A worker beside `distbelief serve --insecure` got no answer for a minute.

    Its shards said 0.0.0.0, which was taken for another machine.
    """
    a = make("a", bind="tcp://0.0.0.0:*", options=TransportOptions(allow_remote=True))
    b = make("b")
    b.connect("a", 1, a.endpoint)
    b.send("a", Alive())
    take(a, 1)


def test_an_endpoint_that_is_none_is_a_transport_error(make: Make) -> None:
    with pytest.raises(TransportError, match="cannot connect to b at"):
        make("a").connect("b", 1, "tcp://127.0.0.1:no-port")


def test_a_transport_that_is_not_running_connects_to_nobody() -> None:
    transport = ZmqTransport(name="a", incarnation=1, token="run")
    assert transport.endpoint == ""
    with pytest.raises(LocalProtocolError, match="transport of a is not running"):
        transport.connect("b", 1, "tcp://127.0.0.1:5")
    transport.close()  # as often as one likes


@pytest.mark.parametrize(
    "wrong",
    [{"messages_max": 0}, {"batch_max": 0}, {"linger_seconds": float("inf")}],
)
def test_options_that_bound_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TransportOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "x" * 256])
def test_name_and_token_must_fit(text: str) -> None:
    with pytest.raises(ValueError, match=f"a token of {len(text)} bytes: 1 to 255"):
        ZmqTransport(name="a", incarnation=1, token=text)
    with pytest.raises(ValueError, match=f"a name of {len(text)} bytes: 1 to 255"):
        ZmqTransport(name=text, incarnation=1, token="run")


# ------------------------------------------------------------------------ strangers


class Stranger:
    """Somebody who connects with sockets of their own."""

    def __init__(self, *, token: str | None) -> None:
        self._token = token
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: list[zmq.Socket[bytes]] = []

    def connect(self, endpoint: str, kind: int = zmq.PUSH) -> "zmq.Socket[bytes]":
        link = self._context.socket(kind)
        link.linger = 0
        if self._token is not None:
            link.plain_username = b"stranger"
            link.plain_password = self._token.encode()
        link.connect(endpoint)
        self._links.append(link)  # which a context does not do
        return link

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def log() -> list[str]:
    """What the transport `inbox` has logged."""
    return []


@pytest.fixture
def inbox(make: Make, log: list[str]) -> ZmqTransport:
    """A transport that strangers reach, and that reaches itself."""
    transport = make("inbox", log=lambda _level, text: log.append(text))
    transport.connect("inbox", 1, transport.endpoint)
    transport.send("inbox", Alive())
    take(transport, 1)
    return transport


def still_works(inbox: ZmqTransport) -> bool:
    inbox.send("inbox", Save(label="honest"))
    return labels(take(inbox, 1)) == ["honest"]


@pytest.mark.parametrize("token", ["another", "ru", "runn"])
def test_who_does_not_know_the_token_is_refused_at_the_door(
    inbox: ZmqTransport, log: list[str], token: str
) -> None:
    stranger = Stranger(token=token)
    link = stranger.connect(inbox.endpoint)
    link.send_multipart([b"x"] * 1000)
    wait(inbox, until=lambda: inbox.counters.refused > 0)
    assert log == ["refused a peer of another run (so far 1)"]
    assert still_works(inbox)
    assert inbox.counters.malformed == 0  # not a byte of it came in
    stranger.close()


def test_who_watches_a_peer_hears_that_its_token_is_not_taken(
    inbox: ZmqTransport, make: Make
) -> None:
    stranger, member, careless = make("s", token="other"), make("m"), make("c")
    stranger.connect("inbox", 1, inbox.endpoint, watched=True)
    member.connect("inbox", 1, inbox.endpoint, watched=True)
    careless.connect("inbox", 1, inbox.endpoint)
    wait(inbox, until=lambda: stranger.is_refused("inbox"))
    member.send("inbox", Save(label="honest"))
    assert labels(take(inbox, 1)) == ["honest"]
    for transport in (member, careless):
        assert not transport.is_refused("inbox")
    assert not stranger.is_refused("nobody")
    stranger.disconnect("inbox")
    assert not stranger.is_refused("inbox")


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.DEALER, zmq.REQ, zmq.PUB])
def test_who_asks_for_no_admission_gets_none(inbox: ZmqTransport, kind: int) -> None:
    stranger = Stranger(token=None)
    link = stranger.connect(inbox.endpoint, kind)
    link.send(b"hello")
    for _ in range(20):
        assert still_works(inbox)
    assert inbox.counters.malformed == 0
    stranger.close()


def test_a_socket_of_another_kind_gets_no_message_in(inbox: ZmqTransport) -> None:
    stranger = Stranger(token="run")
    stranger.connect(inbox.endpoint, zmq.DEALER).send(b"hello")
    for _ in range(20):
        assert still_works(inbox)
    assert inbox.counters.malformed == 0
    stranger.close()


@given(garbage=st.binary(min_size=1, max_size=200))
@settings(max_examples=30)
def test_random_bytes_from_a_raw_socket_do_no_harm(garbage: bytes) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01PLAIN" + bytes(48)
    with ZmqTransport(name="inbox", incarnation=1, token="run") as inbox:
        inbox.connect("inbox", 1, inbox.endpoint)
        host, _, port = inbox.endpoint.removeprefix("tcp://").rpartition(":")
        for prefix in (b"", greeting, greeting + b"\x04\x26\x05HELLO"):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(prefix + garbage)
                assert still_works(inbox)
        assert inbox.counters.malformed == 0


def test_malformed_messages_of_a_member_are_counted_and_seldom_logged(
    inbox: ZmqTransport, log: list[str]
) -> None:
    stranger = Stranger(token="run")
    link = stranger.connect(inbox.endpoint)
    good = Wire(token="run").encode(Alive(), sender="x", incarnation=1)
    bad: list[list[bytes]] = [
        [b""],
        [b"x" * 100],
        [bytes(good[0]), b"no such array"],
        [b"part"] * 5000,
        [bytes(frame) for frame in Wire(token="y").encode(
            Alive(), sender="x", incarnation=1
        )],
    ]  # fmt: skip
    for frames in bad * 4:
        link.send_multipart(frames)

    def all_arrived() -> bool:
        assert not list(inbox.receive())
        return inbox.counters.malformed == 20

    wait(inbox, until=all_arrived)
    assert [text.rpartition(" (")[2] for text in log] == [
        f"so far {n})" for n in (1, 2, 4, 8, 16)
    ]
    assert still_works(inbox)
    stranger.close()


def test_a_frame_that_is_too_large_costs_its_sender_the_connection(
    inbox: ZmqTransport,
) -> None:
    stranger = Stranger(token="run")
    link = stranger.connect(inbox.endpoint)
    wait(inbox, until=lambda: link.poll(0, zmq.POLLOUT) > 0)
    watch = link.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    link.send(b"x" * (BLOCK_BYTES + 1))
    wait(inbox, until=lambda: watch.poll(0) > 0)
    assert not list(inbox.receive())
    assert still_works(inbox)
    link.disable_monitor()
    watch.close()
    stranger.close()


# ------------------------------------------------------------------------ processes


PEER = """
import sys
from distbelief.messages import Save, Stop
from distbelief.transport.zmq_transport import ZmqTransport

with ZmqTransport(name="peer", incarnation=1, token="run") as transport:
    print(transport.endpoint, flush=True)
    transport.connect("a", 1, sys.argv[1])
    going_on = True
    while going_on:
        transport.poll(60)
        for envelope in transport.receive():
            if isinstance(envelope.message, Stop):
                going_on = False
            transport.send("a", Save(label=type(envelope.message).__name__))
"""


def start_peer(a: ZmqTransport) -> tuple["subprocess.Popen[str]", str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, a.endpoint], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.processes
def test_a_killed_peer_costs_nothing_and_its_next_life_is_reached(make: Make) -> None:
    a = make("a", options=TransportOptions(linger_seconds=0))
    first, endpoint = start_peer(a)
    with first:
        a.connect("peer", 1, endpoint)
        a.send("peer", Alive())
        assert labels(take(a, 1)) == ["Alive"]
        first.kill()
    for _ in range(1000):
        a.send("peer", Alive())  # never blocks, whoever is not there
    second, endpoint = start_peer(a)
    with second:
        a.connect("peer", 2, endpoint)
        a.send("peer", Save(label="x"))
        assert labels(take(a, 1)) == ["Save"]
        second.kill()


@pytest.mark.processes
def test_the_last_words_of_a_peer_arrive_though_it_ends_at_once(make: Make) -> None:
    a = make("a")
    process, endpoint = start_peer(a)
    with process:
        a.connect("peer", 1, endpoint)
        a.send("peer", Stop(reason="enough"))
        # The peer closes at once after this reply; its linger lets it out.
        assert labels(take(a, 1)) == ["Stop"]
        assert process.wait(PATIENCE_SECONDS) == 0
