"""The proxy: faults affect whole messages or none."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from distbelief.chaos.schedule import FaultEvent, Kind
from distbelief.chaos.tcp_proxy import FrameSplitter, NotZmtpError, TcpProxy, ThreadLoop
from distbelief.protocol import Heartbeat, HeartbeatAck, Join, Message
from distbelief.protocol.codec import Codec
from distbelief.roles.role import ALL_MESSAGES, Action, Address, Event, Received, Seconds, Started
from tests.links import link


GREETING = b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53)
READY = b"\x04\x06\x05READY"
N_POLLS_MAX = 1000  # 10 s
HEADER = bytes(Codec(run="r").encode(HeartbeatAck(), sender="one", incarnation=1)[0])
MESSAGE = bytes([1, len(HEADER)]) + HEADER + b"\x02" + (3).to_bytes(8, "big") + b"cde"


def test_what_is_said_is_cut_into_messages_however_it_comes() -> None:
    spoken = GREETING + READY + MESSAGE + b"\x00\x01x"
    pieces = [(GREETING, False), (READY, False), (MESSAGE, True), (b"\x00\x01x", True)]
    whole = FrameSplitter()
    assert whole.feed(spoken) == pieces
    assert whole.name == "one"
    slow = FrameSplitter()
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
        (GREETING + b"\x00\x01a", "unreadable header"),
    ],
)
def test_what_cannot_be_cut_is_refused(spoken: bytes, said: str) -> None:
    with pytest.raises(NotZmtpError, match=said):
        FrameSplitter().feed(spoken)


def test_who_has_said_nothing_has_no_name() -> None:
    splitter = FrameSplitter()
    splitter.feed(GREETING + READY)
    assert splitter.name is None


class Talk:
    """Sends messages from one transport to another, through the proxy."""

    def __init__(self, stack: ExitStack, seed: int, folder: Path) -> None:
        self.one, self.two = (stack.enter_context(link(name, folder)) for name in ("one", "two"))
        self.now = 0.0  # clock for the end of faults
        self.proxy = TcpProxy(seed, clock=lambda: self.now)
        stack.enter_context(self.proxy.turns)
        endpoint = self.proxy.through("two", self.two.endpoint)
        assert self.proxy.through("two", self.two.endpoint) == endpoint
        self.one.connect("two", 1, endpoint)
        self.count: list[float] = []
        self.say(0)
        self.hear(1)

    def inject(self, kind: Kind, seconds: Seconds = 60.0, role: str = "two") -> None:
        probability = 0.0 if kind == "cut off" else 1.0
        event = FaultEvent(kind=kind, role=role, at=0.0, probability=probability)
        self.proxy.inject(event, now=self.now, seconds=seconds)
        self.proxy.turns.await_next()

    def wait(self, seconds: Seconds) -> None:
        self.now += seconds
        self.proxy.turns.await_next()

    def say(self, number: float) -> None:
        self.one.send("two", Heartbeat(state="up", counters={"n": number}))

    def hear(self, n: int) -> list[float]:
        """Return what has come, once it is so much, or no more does."""
        return self.listen(lambda: len(self.count) >= n)

    def listen(self, until: Callable[[], bool]) -> list[float]:
        """Return what has come until then."""
        for _ in range(N_POLLS_MAX):
            if until():
                break
            self.one.poll(0.0)
            self.two.poll(0.01)
            self.count += [number_of(e.message) for e in self.two.receive()]
        return self.count


def number_of(message: Message) -> float:
    assert isinstance(message, Heartbeat)
    return message.counters["n"]


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    with ExitStack() as stack:
        yield Talk(stack, 0, tmp_path)


def test_messages_pass_in_order_if_nothing_is_done_to_them(talk: Talk) -> None:
    for number in range(1, 50):
        talk.say(number)
    assert talk.hear(50) == list(range(50))


def test_messages_are_dropped_as_a_whole(talk: Talk) -> None:
    talk.inject("drop", seconds=1.0)
    talk.say(1)
    assert talk.listen(lambda: talk.proxy.n_dropped == 1) == [0]
    talk.wait(1.0)
    talk.say(2)
    assert talk.hear(2) == [0, 2]


def test_messages_are_doubled(talk: Talk) -> None:
    talk.inject("duplicate")
    talk.say(1)
    assert talk.hear(3) == [0, 1, 1]
    assert talk.proxy.n_doubled == 1


def test_who_is_cut_off_hears_everything_later(talk: Talk) -> None:
    talk.inject("cut off", seconds=0.6)
    talk.say(1)
    talk.say(2)
    polls = iter(range(10))
    assert talk.listen(lambda: next(polls, None) is None) == [0]
    talk.wait(0.6)
    assert talk.hear(3) == [0, 1, 2]


def test_who_is_not_named_is_left_alone(talk: Talk) -> None:
    talk.inject("drop", role="three")
    talk.say(1)
    assert talk.hear(2) == [0, 1]


def test_nobody_behind_a_detour_is_nobody_at_all(tmp_path: Path) -> None:
    """The way to a process that is gone ends, and nothing else does."""
    with ExitStack() as stack:
        talk = Talk(stack, 0, tmp_path)
        gone = talk.proxy.through("gone", f"ipc://{tmp_path}/.gone.1")
        talk.one.connect("gone", 1, gone)
        talk.one.send("gone", Heartbeat(state="up", counters={"n": 1.0}))
        talk.say(1)
        assert talk.hear(2) == [0, 1]


class Listening:
    """A supervisor that keeps what it is told."""

    accepts = ALL_MESSAGES

    def __init__(self) -> None:
        self.count: list[Event] = []

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        del now
        self.count.append(event)
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "listening", {"heard": float(len(self.count))}


def test_the_supervisor_sees_only_proxy_endpoints(tmp_path: Path) -> None:
    supervisor = Listening()
    proxy = TcpProxy(0)
    with proxy.turns:
        role = proxy.around(supervisor)
        role.handle(Started(incarnation=1), 0.0)
        join = Join(endpoint=f"ipc://{tmp_path}/.shard-0.1", host="h", pid=1)
        joined = Received(sender=Address("shard-0"), incarnation=1, message=join)
        role.handle(joined, 1.0)
        (_, told) = supervisor.count
        assert isinstance(told, Received)
        assert isinstance(told.message, Join)
        assert told.message.endpoint == proxy.through("shard-0", join.endpoint)
        assert told.message.endpoint != join.endpoint
        assert role.status() == ("listening", {"heard": 2.0})


def test_what_fails_in_a_turn_is_raised_at_the_end() -> None:
    """A thread that dies unnoticed leaves a job that seems to survive every fault."""
    failed = threading.Event()
    ended: list[str] = []

    def fail() -> None:
        failed.set()
        raise OSError("no more sockets")

    with (
        pytest.raises(OSError, match="no more sockets"),
        ThreadLoop(fail, at_end=lambda: ended.append("so")),
    ):
        assert failed.wait(60.0)
    assert ended == ["so"]


def test_what_fails_in_a_turn_does_not_hide_what_fails_beside_it() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("no more sockets")

    def interrupt() -> None:
        assert failed.wait(60.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ThreadLoop(fail):
        interrupt()


def test_a_turn_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.chaos.tcp_proxy.AWAITED_SECONDS_MAX", 0.01)
    with pytest.raises(TimeoutError, match=r"within 0.01 s"):
        ThreadLoop(lambda: None).await_next()
