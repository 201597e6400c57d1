"""RoleRunner with one real role: events in, actions performed, errors reported."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from distbelief.core.errors import JobError, PeerLostError, RemoteProtocolError, StorageError
from distbelief.job.hosts.agent import AgentStorage, HostAgent, HostAgentConfig
from distbelief.protocol import CheckpointSaved, Finished, Stop, role as rl
from distbelief.protocol.codec import Envelope
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.transport import node as node_module
from distbelief.transport.address import LOOPBACK
from distbelief.transport.authenticator import DirectoryAuth
from distbelief.transport.node import POSTED_MAX, BackgroundRunner, RoleRunner
from distbelief.transport.zmq_transport import ZmqTransport
from tests.distbelief.supervisor.hosts import offer_of
from tests.links import link


PATIENCE_SECONDS = 20.0
ME = rl.Address("me")

React = Callable[[rl.Event, rl.Seconds], Sequence[rl.Action]]
NEWS = rl.PeerLost(peer=rl.Address("x"), incarnation=1, reason="it ended")


class Scripted:
    """A role that runs a test's function and records its events."""

    accepts = rl.ALL_MESSAGES

    def __init__(self, react: React) -> None:
        self._react = react
        self.events: list[rl.Event] = []
        self.times: list[rl.Seconds] = []

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        self.events.append(event)
        self.times.append(now)
        return self._react(event, now)

    def status(self) -> tuple[str, dict[str, float]]:
        return "scripted", {}


Build = Callable[..., tuple[RoleRunner, Scripted]]  # a runner for a role with these reactions


@pytest.fixture
def log() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[ZmqTransport]:
    """A transport that is connected to itself."""
    with ZmqTransport(
        name=ME,
        incarnation=4,
        run="run",
        bind=f"ipc://{tmp_path}/.me.4",
        guard=DirectoryAuth(tmp_path),
        linger_seconds=0,
    ) as transport:
        transport.connect(ME, 4, transport.endpoint)
        yield transport


@pytest.fixture
def build(transport: ZmqTransport, log: list[tuple[str, str]]) -> Iterator[Build]:
    nodes: list[RoleRunner] = []

    def build(react: React, **more: object) -> tuple[RoleRunner, Scripted]:
        role, note = Scripted(react), lambda level, text: log.append((level, text))
        nodes.append(RoleRunner(role, transport=transport, log=note, **more))  # type: ignore[arg-type]
        return nodes[-1], role

    threads = set(threading.enumerate())
    yield build
    for node in nodes:
        node.close()
    assert set(threading.enumerate()) <= threads, "a thread was left behind"


def on_start(
    *actions: rl.Action, end: Callable[[rl.Event], object] = lambda _: True, at: float | None = None
) -> React:
    """React to `Started` with these actions, and to an event for which `end` holds with an exit.

    With `at`, a timer named "end" fires after so many seconds.
    """

    def react(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if isinstance(event, rl.Started):
            timer = [] if at is None else [rl.SetTimer(name="end", at=now + at)]
            return [*actions, *timer]
        return [rl.Exit()] if end(event) else []

    return react


def fail(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize("error", [None, "NaN in replica-1"])
def test_a_run_begins_with_started_and_ends_with_exit(build: Build, error: str | None) -> None:
    node, role = build(lambda _event, _now: [rl.Exit(error=error)])
    before = time.monotonic()
    assert node.run() == node.error == error
    assert node.halted
    assert role.events == [rl.Started(incarnation=4)]
    assert before <= role.times[0] <= time.monotonic()


def test_a_message_sent_arrives_as_an_event(build: Build) -> None:
    node, role = build(on_start(rl.Send(receiver=ME, message=CheckpointSaved(label="x", clock=0))))
    assert node.run() is None
    (_, arrived) = role.events
    assert isinstance(arrived, rl.Received)
    assert (arrived.sender, arrived.incarnation) == (ME, 4)
    assert isinstance(arrived.message, CheckpointSaved)


def test_the_time_of_events_is_counted_and_that_of_waiting_is_not(build: Build) -> None:
    node, _ = build(on_start(at=0.2))
    began = time.monotonic()
    assert node.run() is None
    assert 0.0 < node.seconds_handling < time.monotonic() - began


def test_what_is_sent_beside_halt_still_goes_out(build: Build, tmp_path: Path) -> None:
    with link("other", tmp_path) as other:
        connect = rl.Connect(
            peer=rl.Address("other"), incarnation=1, endpoint=other.endpoint, host=""
        )
        words = rl.Send(
            receiver=rl.Address("other"), message=CheckpointSaved(label="last words", clock=0)
        )
        node, _ = build(lambda _event, _now: [connect, rl.Exit(), words])
        assert node.run() is None
        arrived: list[Envelope] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not arrived and time.monotonic() < deadline:
            other.poll(0.05)
            arrived = list(other.receive())
    assert [type(envelope.message) for envelope in arrived] == [CheckpointSaved]


def test_nothing_is_delivered_after_halt(build: Build) -> None:
    node, role = build(lambda _event, _now: [rl.Exit()])
    for _ in range(3):
        node.post(NEWS)
    node.run()
    node.post(NEWS)  # harmless
    assert not node.pump(lambda: False, timeout_seconds=1.0)
    assert len(role.events) == 1


def test_reports_and_peers_that_cannot_be_connected_go_to_the_log(
    build: Build, log: list[tuple[str, str]]
) -> None:
    report = rl.Report(text="warm", level="warning")
    far = rl.Connect(peer=rl.Address("far"), incarnation=1, endpoint="tcp://10.0.0.1:1", host="")
    node, _ = build(lambda _event, _now: [report, far, rl.Exit()])
    assert node.run() is None
    assert log[0] == ("warning", "warm")
    assert log[1][0] == "error"
    assert "tcp://10.0.0.1:1" in log[1][1]


def test_timers_fire_in_order_once_and_never_early(build: Build) -> None:
    def react(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                return [
                    rl.SetTimer(name="late", at=now + 0.03),
                    rl.SetTimer(name="moved", at=now + 0.5),
                    rl.SetTimer(name="moved", at=now + 0.01),
                    rl.SetTimer(name="never", at=now + 0.005),
                    rl.CancelTimer(name="never"),
                ]
            case rl.TimerFired(name="late"):
                return [rl.Exit()]
            case _:
                return []

    node, role = build(react)
    assert node.run() is None
    assert role.events[1:] == [rl.TimerFired(name="moved"), rl.TimerFired(name="late")]
    start, moved, late = role.times
    assert moved >= start + 0.01
    assert late >= start + 0.03


@pytest.mark.parametrize("answer", [rl.CancelTimer(name="second"), rl.Exit()])
def test_of_two_timers_due_the_first_may_cancel_the_second_or_end_the_role(
    build: Build, answer: rl.Action
) -> None:
    def react(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                return [
                    rl.SetTimer(name="first", at=now - 2),
                    rl.SetTimer(name="second", at=now - 1),
                    rl.SetTimer(name="end", at=now + 0.01),
                ]
            case rl.TimerFired(name="first"):
                return [answer]
            case _:
                return [rl.Exit()]

    node, role = build(react)
    node.run()
    after = [] if answer == rl.Exit() else [rl.TimerFired(name="end")]
    assert role.events[1:] == [rl.TimerFired(name="first"), *after]


def test_a_timer_always_due_does_not_keep_messages_out(build: Build) -> None:
    def react(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        again = rl.SetTimer(name="greedy", at=now - 1)
        match event:
            case rl.Started():
                return [again, rl.Send(receiver=ME, message=Finished(counters={}))]
            case rl.Received():
                return [rl.Exit()]
            case _:
                return [again]

    node, _ = build(react)
    assert node.run() is None


def test_messages_are_handled_while_work_goes_on(build: Build) -> None:
    """A gradient that takes seconds must not silence the heartbeats."""
    handled = threading.Event()

    def react(event: rl.Event, _now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                work = rl.Compute(name="gradient", work=lambda: handled.wait(PATIENCE_SECONDS))
                return [work, rl.Send(receiver=ME, message=Finished(counters={}))]
            case rl.Received():
                handled.set()
                return []
            case _:
                return [rl.Exit()]

    node, role = build(react)
    assert node.run() is None
    answer = role.events[-1]
    assert isinstance(answer, rl.Computed)
    assert answer.result is True


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("executor", rl.Executor)
def test_work_is_answered_by_its_result_or_its_error(
    build: Build, executor: rl.Executor, error: BaseException
) -> None:
    good = rl.Compute(name="gradient", work=lambda: 42, executor=executor)
    bad = rl.Compute(name="batch", work=fail(error), executor=executor)
    node, role = build(on_start(good, bad, end=lambda e: isinstance(e, rl.Computed) and e.error))
    assert node.run() is None
    answers = [e for e in role.events if isinstance(e, rl.Computed)]
    assert [(e.name, e.result, e.error) for e in answers] == [
        ("gradient", 42, None),
        ("batch", None, error),
    ]


def test_two_executors_work_in_parallel_and_each_in_order(build: Build) -> None:
    meeting, busy = threading.Barrier(2), threading.Lock()
    order: list[int] = []

    def work(index: int) -> None:
        assert busy.acquire(blocking=False)
        order.append(index)
        busy.release()

    meet = partial(meeting.wait, PATIENCE_SECONDS)
    both = [rl.Compute(name=each.value, work=meet, executor=each) for each in rl.Executor]
    others = [rl.Compute(name=f"{n}", work=partial(work, n)) for n in range(50)]
    node, role = build(on_start(*both, *others, end=lambda e: e.name == "49"))  # type: ignore[union-attr]
    assert node.run() is None
    assert not [event for event in role.events if isinstance(event, rl.Computed) and event.error]
    assert order == list(range(50))


def test_work_without_an_end_is_abandoned_and_named_and_what_waits_is_dropped(
    build: Build, log: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "JOIN_SECONDS_MAX", 0.02)
    end = threading.Event()
    ran: list[int] = []

    endless = rl.Compute(name="endless", work=lambda: end.wait(PATIENCE_SECONDS))
    never = rl.Compute(name="never", work=lambda: ran.append(1))
    node, _ = build(on_start(endless, never, at=0.01))
    assert node.run() is None
    assert log == [("warning", "me: endless (compute) still runs 0.02 s after the end: abandoned")]
    end.set()
    monkeypatch.undo()
    node.close()  # waits for it
    assert ran == []


class Shelf:
    """A checkpoint storage that keeps one checkpoint, or fails."""

    def __init__(
        self,
        newest: rl.Snapshot | None = None,
        *,
        save_error: Exception | None = None,
        newest_error: Exception | None = None,
    ) -> None:
        self.saved: dict[rl.Address, rl.Snapshot] = {}
        self._newest = newest
        self._save_error = save_error
        self._newest_error = newest_error

    def save(self, role: rl.Address, snapshot: rl.Snapshot) -> None:
        if self._save_error:
            raise self._save_error
        self.saved[role] = snapshot

    def newest(self, role: rl.Address) -> rl.Snapshot | None:
        assert role == ME
        if self._newest_error:
            raise self._newest_error
        return self._newest


SNAPSHOT = rl.Snapshot(label="00412", arrays={}, facts={"clock": "7"})


@pytest.mark.parametrize(
    ("shelf", "error"),
    [
        (Shelf(), None),
        (Shelf(save_error=StorageError("disk full")), "StorageError: disk full"),
        (Shelf(save_error=OSError("disk full")), "OSError: disk full"),
        (None, "no checkpoint storage is configured"),
    ],
)
def test_a_snapshot_is_saved_under_the_roles_name_or_the_role_learns_why_not(
    build: Build, shelf: Shelf | None, error: str | None
) -> None:
    node, role = build(on_start(rl.Persist(snapshot=SNAPSHOT)), store=shelf)
    assert node.run() is None
    assert role.events == [rl.Started(incarnation=4), rl.Persisted(label="00412", error=error)]
    if shelf is not None:
        assert shelf.saved == ({} if error else {ME: SNAPSHOT})


@pytest.mark.parametrize(
    ("shelf", "started"),
    [
        (Shelf(SNAPSHOT), rl.Started(incarnation=4, restored=SNAPSHOT)),
        (
            Shelf(newest_error=StorageError("no snapshot of me is whole")),
            rl.Started(incarnation=4, unrestored="no snapshot of me is whole"),
        ),
    ],
)
def test_a_role_gets_its_newest_checkpoint_or_why_there_is_none(
    build: Build, shelf: Shelf, started: rl.Started
) -> None:
    """The role decides what follows: a shard's other copy may have the state."""
    node, role = build(lambda _event, _now: [rl.Exit()], store=shelf)
    node.run()
    assert role.events == [started]


def test_a_store_that_fails_otherwise_ends_the_role(build: Build) -> None:
    shelf = Shelf(newest_error=JobError("me cannot name a file"))
    node, role = build(lambda _event, _now: [], store=shelf)
    assert node.run() == "JobError: me cannot name a file"
    assert role.events == []


def test_what_a_peer_did_wrong_is_logged_seldom_and_dropped(
    build: Build, log: list[tuple[str, str]]
) -> None:
    def react(event: rl.Event, _now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                alive = rl.Send(receiver=ME, message=Finished(counters={}))
                last = CheckpointSaved(label="", clock=0)
                return [alive] * 20 + [rl.Send(receiver=ME, message=last)]
            case rl.Received(message=Finished()):
                raise RemoteProtocolError("me sent Finished")
            case _:
                return [rl.Exit()]

    node, role = build(react)
    assert node.run() is None
    assert len(role.events) == 22
    assert log == [
        ("warning", f"rejected a message ({n} so far): me sent Finished") for n in (1, 2, 4, 8, 16)
    ]


def test_a_message_that_the_role_does_not_accept_never_reaches_it(
    build: Build, log: list[tuple[str, str]]
) -> None:
    messages = Finished(counters={}), CheckpointSaved(label="", clock=0)
    node, role = build(on_start(*(rl.Send(receiver=ME, message=m) for m in messages)))
    role.accepts = frozenset({CheckpointSaved})
    assert node.run() is None
    assert [type(event).__name__ for event in role.events] == ["Started", "Received"]
    said = "rejected a message (1 so far): me sent me Finished, which it does not accept"
    assert log == [("warning", said)]


@pytest.mark.parametrize(
    ("error", "is_bug"),
    [(PeerLostError("shard-1 silent"), False), (JobError("no data"), False), (KeyError(1), True)],
)
def test_an_error_ends_the_role_and_only_a_bug_has_a_traceback(
    build: Build, log: list[tuple[str, str]], error: Exception, *, is_bug: bool
) -> None:
    node, _ = build(fail(error))
    said = f"{type(error).__name__}: {error}"
    assert node.run() == said
    assert log[0] == ("error", f"me failed: {said}")
    assert ["Traceback" in text and "in fail" in text for _, text in log[1:]] == [True] * is_bug


def test_a_message_that_cannot_be_sent_is_a_bug_of_ours(build: Build) -> None:
    text = CheckpointSaved(label="\udcff", clock=0)
    node, _ = build(lambda _event, _now: [rl.Send(receiver=ME, message=text)])
    error = node.run()
    assert error is not None
    assert error.startswith("LocalProtocolError: cannot send CheckpointSaved")


def test_an_event_posted_before_the_start_comes_after_started(build: Build) -> None:
    before = threading.active_count()
    node, role = build(on_start(end=lambda event: event != NEWS))
    assert node.post(NEWS)
    node.stop("Ctrl+C")
    assert threading.active_count() == before  # a runner that never runs needs no thread
    node.run()
    *first, last = role.events
    assert first == [rl.Started(incarnation=4), NEWS]
    assert isinstance(last, rl.Received)
    assert isinstance(last.message, Stop)
    assert (last.sender, last.message.reason) == (rl.USER, "Ctrl+C")


def _take_and_break(listener: socket.socket) -> None:
    listener.accept()[0].close()


@pytest.mark.parametrize("how", ["tcp", "ipc", "removed", "ending"])
def test_a_probe_tells_of_an_endpoint_at_which_nothing_listens(
    build: Build, tmp_path: Path, how: str
) -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as listener,
        socket.create_server((LOOPBACK, 0)) as one,
        socket.socket(socket.AF_UNIX) as here,
        socket.socket(socket.AF_UNIX) as gone,
        ExitStack() as stack,
    ):
        here.bind(str(tmp_path / "here"))
        here.listen()
        gone.bind(str(tmp_path / "gone"))
        gone.listen()
        gone.close()  # its file stays, as that of a process that was killed
        ending = stack.enter_context(socket.socket(socket.AF_UNIX))
        ending.bind(str(tmp_path / "ending"))
        ending.listen()
        if how == "ending":
            threading.Thread(target=_take_and_break, args=(ending,)).start()
        open_port, port = listener.getsockname()[1], one.getsockname()[1]
        one.close()
        ended = {
            "tcp": f"tcp://{LOOPBACK}:{port}",
            "ipc": f"ipc://{tmp_path}/gone",
            "removed": f"ipc://{tmp_path}/removed",
            # It takes the connection and breaks it: its sockets are closed one by one.
            "ending": f"ipc://{tmp_path}/ending",
        }
        probes = [
            rl.Probe(peer=rl.Address(name), incarnation=1, endpoint=endpoint)
            for name, endpoint in (
                ("listens", f"tcp://{LOOPBACK}:{open_port}"),
                ("of files", f"ipc://{tmp_path}/here"),
                ("none", "tcp://nowhere"),
                ("ended", ended[how]),
            )
        ]
        node, role = build(on_start(*probes, end=lambda event: isinstance(event, rl.PeerLost)))
        assert node.run() is None
    for thread in threading.enumerate():
        if thread.name == "me-probe":
            thread.join()
    (lost,) = [event for event in role.events if isinstance(event, rl.PeerLost)]
    assert (lost.peer, lost.incarnation) == ("ended", 1)


def test_a_post_from_another_thread_wakes_the_node(build: Build) -> None:
    node, role = build(on_start())
    begun = time.monotonic()
    thread = threading.Timer(0.05, node.post, (NEWS,))
    thread.start()
    assert node.run() is None  # or it would wait a minute
    thread.join()
    assert role.events[1] == NEWS
    assert time.monotonic() - begun < PATIENCE_SECONDS


def test_a_post_from_a_signal_handler_wakes_the_node(build: Build) -> None:
    kill = rl.Compute(name="kill", work=lambda: os.kill(os.getpid(), signal.SIGUSR1))
    node, role = build(on_start(kill, end=lambda event: event == NEWS))
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: node.post(NEWS))
    try:
        assert node.run() is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert NEWS in role.events


def test_a_role_far_behind_drops_what_is_posted_and_says_so(
    build: Build, log: list[tuple[str, str]]
) -> None:
    node, role = build(on_start(end=lambda event: isinstance(event, rl.TimerFired)))
    taken = [node.post(NEWS) for _ in range(POSTED_MAX + 3)]
    assert taken == [True] * POSTED_MAX + [False] * 3
    node.post(rl.TimerFired(name="too late"))
    assert node.pump(lambda: len(role.events) > POSTED_MAX, timeout_seconds=20)
    assert log == [("warning", "4 posted events were dropped")]


def test_pump_runs_the_role_until_it_is_so(build: Build) -> None:
    def react(event: rl.Event, _now: rl.Seconds) -> Sequence[rl.Action]:
        if isinstance(event, rl.Started | rl.Computed):
            return [rl.Compute(name="more", work=lambda: None)]
        return []

    node, role = build(react)
    for n_events in (3, 3, 6):

        def enough(n_events: int = n_events) -> bool:
            return len(role.events) >= n_events

        assert node.pump(enough, timeout_seconds=PATIENCE_SECONDS)
        assert enough()
    assert role.events.count(rl.Started(incarnation=4)) == 1


def test_pump_gives_up_in_time_and_when_the_role_has_ended(build: Build) -> None:
    node, _ = build(lambda event, _now: [rl.Exit(error="no shard")] if event == NEWS else [])
    begun = time.monotonic()
    assert not node.pump(lambda: False, timeout_seconds=0.02)
    assert time.monotonic() - begun >= 0.02
    assert node.error is None
    node.post(NEWS)
    assert not node.pump(lambda: False, timeout_seconds=PATIENCE_SECONDS)
    assert node.error == "no shard"


def test_a_pump_that_makes_progress_gives_up_only_when_that_ends(build: Build) -> None:
    # Four loops that fetched 167 MB each over a link of 100 Mbit/s were told after 60 s that
    # there was no answer, while it came.
    node, _ = build(lambda _event, _now: [])
    seen = iter([*range(20), *[20] * 1000])
    begun = time.monotonic()
    assert not node.pump(lambda: False, timeout_seconds=0.02, progress=lambda: next(seen))
    assert next(seen) == 20
    assert time.monotonic() - begun >= 20 * 0.02


# --------------------------------------------------------------------- in the background


def tick(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
    """Count time in steps of a millisecond."""
    if isinstance(event, rl.Started | rl.TimerFired):
        return [rl.SetTimer(name="tick", at=now + 0.001)]
    return []


@pytest.fixture
def begin(build: Build) -> Iterator[Callable[..., tuple[BackgroundRunner, RoleRunner, Scripted]]]:
    """Start a role in a background thread."""
    runners: list[tuple[BackgroundRunner, RoleRunner]] = []

    def begin(react: React = tick) -> tuple[BackgroundRunner, RoleRunner, Scripted]:
        node, role = build(react)
        background = BackgroundRunner(node, name="blocks")
        runners.append((background, node))
        with background:
            assert not role.events  # no thread before the first hold has ended
        return background, node, role

    yield begin
    for background, node in runners:
        background.end(node.close)


Begin = Callable[..., tuple[BackgroundRunner, RoleRunner, Scripted]]


def await_event(role: Scripted, n: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(role.events) < n:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_role_runs_except_while_it_is_held(begin: Begin) -> None:
    background, node, role = begin()
    for _ in range(20):
        await_event(role, len(role.events) + 2)
        with background:
            n = len(role.events)
            time.sleep(0.005)
            assert len(role.events) == n
            assert node.tell(NEWS)  # the holder may run it
            assert role.events[-1] == NEWS


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that threads may fork
def test_a_forked_child_waits_for_no_lock_that_the_thread_held(begin: Begin) -> None:
    """Regression: seldom, a child of a script that forked, as a DataLoader's, hung for ever."""
    background, _, _ = begin()
    with background._is_free._cond:  # type: ignore[attr-defined] # as a thread has it for a moment
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends the child
            with background:
                pass
            background.end(lambda: os._exit(0))  # as the end of its loop does
    assert os.waitpid(child, 0) == (child, 0)


def test_one_thread_at_a_time_handles_events(begin: Begin) -> None:
    inside: list[int] = []
    found = set[int]()

    def react(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        inside.append(threading.get_ident())
        time.sleep(0)  # lets the other thread run
        found.update(inside)
        assert len(inside) == 1
        inside.pop()
        return tick(event, now)

    background, node, _ = begin(react)
    for _ in range(300):
        with background:
            node.tell(NEWS)
    assert node.error is None
    assert threading.get_ident() in found


@pytest.mark.parametrize("error", [PeerLostError("shard-1 is silent"), RuntimeError("a bug")])
def test_an_error_in_the_thread_ends_it_and_is_found_at_the_next_hold(
    begin: Begin, error: Exception
) -> None:
    def react(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        return fail(error)() if event == NEWS else tick(event, now)

    background, node, _ = begin(react)
    node.post(NEWS)
    background._thread.join(PATIENCE_SECONDS)
    for _ in range(2):
        with background:
            assert node.error == f"{type(error).__name__}: {error}"
            assert not node.tell(NEWS)


def test_an_error_of_the_transport_in_the_thread_is_no_silence(
    begin: Begin, transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    background, node, role = begin()
    await_event(role, 2)
    monkeypatch.setattr(transport, "poll", fail(OSError("the socket is gone")))
    background._thread.join(PATIENCE_SECONDS)
    with background:
        assert node.error == "OSError: the socket is gone"


def test_a_hold_that_was_interrupted_blocks_nothing(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl+C may come anywhere, also between the two halves of taking the role."""
    background, node, role = begin()
    for interrupted in ("wake", "wait"):
        with monkeypatch.context() as patch:
            if interrupted == "wake":
                patch.setattr(node, "wake", fail(KeyboardInterrupt()))
            else:
                patch.setattr(background._is_still, "wait", fail(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt), background:
                pass
        with background:
            n = len(role.events)
        await_event(role, n + 2)


def test_the_garbage_collector_may_end_it_in_its_own_thread(begin: Begin) -> None:
    """A finalizer runs in any thread: there it must neither wait for itself nor run the role."""
    ended: list[tuple[int, bool]] = []
    amid = False

    def react(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        nonlocal amid
        amid = True
        if event == NEWS:
            background.end(last)
        amid = False
        return tick(event, now)

    def last() -> None:
        ended.append((threading.get_ident(), amid))
        node.close()

    background, node, _ = begin(react)
    thread = background._thread
    node.post(NEWS)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert ended == [(thread.ident, False)]


def test_ticks_come_in_the_callers_thread_while_nothing_happens(build: Build) -> None:
    node, _ = build(on_start())
    ticks: list[int] = []

    def on_tick() -> None:
        ticks.append(threading.get_ident())
        if len(ticks) == 3:
            node.post(NEWS)

    assert node.run(on_tick, tick_seconds=0.005) is None
    assert len(ticks) >= 4  # the last one shows the end
    assert set(ticks) == {threading.get_ident()}


def test_a_broken_display_does_not_end_the_job(build: Build, log: list[tuple[str, str]]) -> None:
    node, _ = build(on_start(at=0.02))
    assert node.run(fail(OSError("no terminal")), tick_seconds=0.001) is None
    ((_, text),) = log
    assert "no terminal" in text


class Fleet:
    """A launcher whose roles end as soon as they are launched."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self.asked: list[str] = []
        self.answers = True
        self._events: list[rl.Event] = []

    def launch(self, name: rl.Address, incarnation: int, ranks: int) -> None:  # noqa: ARG002 -- as the protocol says
        if name == "impossible":
            raise JobError("no such role")
        self.asked.append(f"launch {name} {incarnation}")
        if not self.answers:
            return
        lost = rl.PeerLost(peer=name, incarnation=incarnation, reason="exit code 1")
        self._events.append(lost)
        self._writer.send(b"x")

    def terminate(self, name: rl.Address) -> None:
        self.asked.append(f"terminate {name}")

    def fileno(self) -> int:
        return self._reader.fileno()

    def events(self) -> Sequence[rl.Event]:
        self._reader.recv(1)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def a_supervisor() -> rl.Role:
    return Supervisor(SupervisorConfig(roster=(("shard-0", "shard"),), stop=None))


def a_host() -> rl.Role:
    config = HostAgentConfig(offer=offer_of("lab"))
    return HostAgent(config, storage=AgentStorage.__new__(AgentStorage))


@pytest.mark.parametrize("make_role", [a_supervisor, a_host])
def test_only_posted_events_are_user_events(
    make_role: Callable[[], rl.Role], transport: ZmqTransport, tmp_path: Path, fleet: Fleet
) -> None:
    """Any peer that reached the port could stop a job by sending Stop as "user"."""
    role = make_role()
    fleet.answers = False
    stop = Stop(reason="Ctrl+C")
    said: list[str] = []
    node = RoleRunner(
        role, transport=transport, log=lambda _level, text: said.append(text), launcher=fleet
    )
    with node, link(rl.USER, tmp_path) as forger:
        forger.connect(ME, 4, transport.endpoint)
        forger.send(ME, stop)
        assert node.pump(lambda: transport.n_malformed == 1, timeout_seconds=PATIENCE_SECONDS)
        assert not any("Ctrl+C" in text for text in said)
        before = role.status()[0]
        node.post(rl.Received(sender=rl.USER, incarnation=0, message=stop))
        node.pump(
            lambda: node.halted or role.status()[0] != before, timeout_seconds=PATIENCE_SECONDS
        )
        assert node.halted or role.status()[0] != before


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("shard-0", ["launch shard-0 2", "terminate shard-1"], "exit code 1"),
        ("impossible", ["terminate shard-1"], "no such role"),
    ],
)
def test_roles_are_launched_and_terminated_and_their_end_is_an_event(
    build: Build, fleet: Fleet, name: str, asked: list[str], reason: str
) -> None:
    launch = rl.Launch(name=rl.Address(name), incarnation=2)
    terminate = rl.Terminate(name=rl.Address("shard-1"))
    node, role = build(on_start(launch, terminate), launcher=fleet)
    assert node.run() is None
    assert fleet.asked == asked
    assert role.events[1] == rl.PeerLost(peer=rl.Address(name), incarnation=2, reason=reason)


def test_launching_without_a_launcher_is_a_bug_of_ours(build: Build) -> None:
    launch = rl.Launch(name=rl.Address("shard-0"), incarnation=1)
    node, _ = build(on_start(launch))
    assert str(node.run()).startswith("AssertionError")
