"""Messages that pass through another process: hit as a whole, or let alone."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import pytest

from distbelief.forecast.chaos.detour import Detour
from distbelief.forecast.chaos.schedule import Blow
from distbelief.forecast.chaos.zmtp import Cutter, NoZmtpError
from distbelief.messages import Heartbeat, Join, Message
from distbelief.roles import Action, Address, Event, Received, Seconds, Started
from distbelief.transport.zmq_transport import ZmqTransport


GREETING = b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53)
HELLO = b"\x04\x0f\x05HELLO\x03one\x04word"
MESSAGE = b"\x01\x02ab" + b"\x02" + (3).to_bytes(8, "big") + b"cde"


def test_what_is_said_is_cut_into_messages_however_it_comes() -> None:
    spoken = GREETING + HELLO + MESSAGE + b"\x00\x01x"
    pieces = [(GREETING, False), (HELLO, False), (MESSAGE, True), (b"\x00\x01x", True)]
    whole = Cutter()
    assert whole.feed(spoken) == pieces
    assert whole.name == "one"
    slow = Cutter()
    found = [piece for byte in spoken for piece in slow.feed(bytes([byte]))]
    assert b"".join(content for content, _ in found) == spoken
    assert found[64:] == pieces[1:]  # the greeting passes as it comes


@pytest.mark.parametrize(
    ("spoken", "said"),
    [
        (b"GET / HTTP/1.1\r\n" + bytes(60), "another protocol"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "another protocol"),
        (GREETING + b"\x02" + b"\xff" * 8, "more than"),
        (GREETING + b"\x01\x01a" + b"\x04\x01b", "middle of a message"),
    ],
)
def test_what_cannot_be_cut_is_refused(spoken: bytes, said: str) -> None:
    with pytest.raises(NoZmtpError, match=said):
        Cutter().feed(spoken)


def test_a_command_without_a_name_is_none() -> None:
    cutter = Cutter()
    cutter.feed(GREETING + b"\x04\x06\x05HELLO" + b"\x04\x06\x05READY")
    assert cutter.name is None


class Talk:
    """Says things from one transport to another, through a detour."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.one, self.two = (
            stack.enter_context(ZmqTransport(name=name, incarnation=1, token="word"))
            for name in ("one", "two")
        )
        self.detour = stack.enter_context(Detour(seed))
        endpoint = self.detour.through("two", self.two.endpoint)
        assert self.detour.through("two", self.two.endpoint) == endpoint
        self.one.connect("two", 1, endpoint)
        self.heard: list[float] = []
        self.say(0)
        self.hear(1)

    def strike(self, kind: str, seconds: Seconds = 60.0) -> None:
        probability = 0.0 if kind == "cut off" else 1.0
        blow = Blow(kind=kind, role="two", at=0.0, probability=probability)  # type: ignore[arg-type]  # one of them
        self.detour.strike(blow, now=time.monotonic(), seconds=seconds)
        time.sleep(0.05)  # until the detour has seen it in its turn

    def say(self, number: float) -> None:
        self.one.send("two", Heartbeat(state="up", counters={"n": number}))

    def hear(self, n: int, *, seconds: Seconds = 10.0) -> list[float]:
        """Return what has come, once it is so much, or no more does."""
        deadline = time.monotonic() + seconds
        while len(self.heard) < n and time.monotonic() < deadline:
            self.one.poll(0.0)
            self.two.poll(0.01)
            self.heard += [number_of(e.message) for e in self.two.receive()]
        return self.heard


def number_of(message: Message) -> float:
    assert isinstance(message, Heartbeat)
    return message.counters["n"]


@pytest.fixture
def talk() -> Iterator[Talk]:
    with ExitStack() as stack:
        yield Talk(stack, seed=0)


def test_messages_pass_in_order_if_nothing_is_done_to_them(talk: Talk) -> None:
    for number in range(1, 50):
        talk.say(number)
    assert talk.hear(50) == list(range(50))


def test_messages_are_dropped_as_a_whole(talk: Talk) -> None:
    talk.strike("drop", seconds=1.0)
    talk.say(1)
    assert talk.hear(2, seconds=0.3) == [0]
    assert talk.detour.n_dropped == 1
    time.sleep(0.8)
    talk.say(2)
    assert talk.hear(2) == [0, 2]


def test_messages_are_doubled(talk: Talk) -> None:
    talk.strike("duplicate")
    talk.say(1)
    assert talk.hear(3) == [0, 1, 1]
    assert talk.detour.n_doubled == 1


def test_who_is_cut_off_hears_everything_later(talk: Talk) -> None:
    talk.strike("cut off", seconds=0.6)
    talk.say(1)
    talk.say(2)
    assert talk.hear(3, seconds=0.2) == [0]
    assert talk.hear(3) == [0, 1, 2]


def test_who_is_not_named_is_left_alone(talk: Talk) -> None:
    blow = Blow(kind="drop", role="three", at=0.0, probability=1.0)
    talk.detour.strike(blow, now=time.monotonic(), seconds=60.0)
    talk.say(1)
    assert talk.hear(2) == [0, 1]


def test_nobody_behind_a_detour_is_nobody_at_all() -> None:
    """The way to a process that is gone ends, and nothing else does."""
    with ExitStack() as stack:
        talk = Talk(stack, seed=0)
        gone = talk.detour.through("gone", "tcp://127.0.0.1:9")
        talk.one.connect("gone", 1, gone)
        talk.one.send("gone", Heartbeat(state="up", counters={"n": 1.0}))
        talk.say(1)
        assert talk.hear(2) == [0, 1]


class Listening:
    """A supervisor that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        del now
        self.heard.append(event)
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "listening", {"heard": float(len(self.heard))}


def test_the_supervisor_is_told_of_detours_only() -> None:
    supervisor = Listening()
    with Detour(0) as detour:
        role = detour.around(supervisor)
        role.handle(Started(incarnation=1), 0.0)
        join = Join(endpoint="tcp://127.0.0.1:9", host="h", pid=1)
        joined = Received(sender=Address("shard-0"), incarnation=1, message=join)
        role.handle(joined, 1.0)
        (_, told) = supervisor.heard
        assert isinstance(told, Received)
        assert isinstance(told.message, Join)
        assert told.message.endpoint == detour.through("shard-0", join.endpoint)
        assert told.message.endpoint != join.endpoint
        assert role.status() == ("listening", {"heard": 2.0})
