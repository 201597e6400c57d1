"""A member of a job: joining, heartbeats, peers, the end of its supervisor."""

from collections.abc import Callable, Mapping, Sequence

import pytest
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import (
    DistBeliefError,
    JobError,
    PeerLostError,
    RemoteProtocolError,
    RestoreError,
)
from distbelief.protocol import role as rl
from distbelief.worker.member import (
    BUILD,
    SAVE_SECONDS_MAX,
    TIMER,
    JobMember,
    JobMemberConfig,
    heartbeat_seconds,
)


KILLED = rl.PeerLost(peer=rl.SUPERVISOR, incarnation=0, reason="the supervisor was killed")


class Inner:
    """Records events; logs "heard" for each; fails on request."""

    accepts = rl.ALL_MESSAGES

    def __init__(self) -> None:
        self.events: list[rl.Event] = []
        self.error: Exception | None = None
        self.refuses: rl.Event | None = None
        self.last: list[rl.Action] = []  # what it answers, if it ends

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        if self.error is not None:
            raise self.error
        if event == self.refuses:
            raise RemoteProtocolError("of another life")
        self.events.append(event)
        return self.last or [rl.Report(text="heard")]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "busy", {"n": float(len(self.events))}


class Driver:
    """One started member and its actions."""

    def __init__(
        self,
        build: Callable[[], rl.Role] | None = None,
        *,
        name: str = "replica-0",
        patience: rl.Seconds = 15.0,
        heartbeat: rl.Seconds = 0.5,
        warning: str = "",
        counted: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.inner = Inner()
        config = JobMemberConfig(
            name=name,
            endpoint="tcp://here",
            host="h",
            pid=7,
            heartbeat_seconds=heartbeat,
            patience_seconds=patience,
        )
        self.member = JobMember(config, build=build or (lambda: self.inner), counted=counted)
        self.now = 100.0
        self.actions: list[rl.Action] = []
        if warning:
            self.member.warn(warning)
        self.handle(rl.Started(incarnation=2))

    def handle(self, event: rl.Event) -> list[rl.Action]:
        actions = list(self.member.handle(event, self.now))
        self.actions += actions
        return actions

    def build(self) -> list[rl.Action]:
        """Do the work that the member has asked for."""
        (compute,) = [a for a in self.actions if isinstance(a, rl.Compute)]
        try:
            return self.handle(rl.Computed(name=BUILD, result=compute.work()))
        except (DistBeliefError, ZeroDivisionError) as error:
            return self.handle(rl.Computed(name=BUILD, error=error))

    def running(self, *names: str) -> "Driver":
        """Build the role and introduce it to these peers."""
        self.build()
        self.say(peers(*names))
        self.inner.events.clear()
        return self

    def say(self, message: wire.Message, *, sender: str = rl.SUPERVISOR) -> list[rl.Action]:
        return self.handle(said(message, sender))

    def beat(self, *, after: rl.Seconds = 0.5, n: int = 1) -> list[rl.Action]:
        """Let time pass; return the actions, without timers, of the last heartbeats."""
        actions = []
        for _ in range(n):
            self.now += after
            actions += self.handle(rl.TimerFired(name=TIMER))
        return actions


def said(message: wire.Message, sender: str = "shard-0") -> rl.Received:
    return rl.Received(sender=rl.Address(sender), incarnation=1, message=message)


def messages(actions: Sequence[rl.Action]) -> list[wire.Message]:
    return [action.message for action in actions if isinstance(action, rl.Send)]


def exits(actions: Sequence[rl.Action]) -> list[str | None]:
    return [action.error for action in actions if isinstance(action, rl.Exit)]


def connected(actions: Sequence[rl.Action]) -> list[str]:
    return [action.peer for action in actions if isinstance(action, rl.Connect)]


def peers(*names: str, incarnation: int = 1) -> wire.Peers:
    return wire.Peers(
        entries=tuple(
            wire.PeerEntry(name=name, incarnation=incarnation, endpoint=f"at-{name}", host="h")
            for name in names
        )
    )


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_member_joins_and_sends_heartbeats_while_it_is_built() -> None:
    driver = Driver(warning="snapshot 00005 is damaged")
    join, heartbeat = messages(driver.actions)
    assert isinstance(join, wire.Join)
    assert (join.endpoint, join.host, join.pid) == ("tcp://here", "h", 7)
    assert join.warnings == ("snapshot 00005 is damaged",)
    assert isinstance(heartbeat, wire.Heartbeat)
    assert heartbeat.state == "building"
    assert rl.SetTimer(name=TIMER, at=100.5) in driver.actions


def test_join_is_repeated_until_peers_are_known(driver: Driver) -> None:
    assert isinstance(messages(driver.beat())[0], wire.Join)
    driver.say(peers("shard-0"))
    (heartbeat,) = messages(driver.beat())
    assert isinstance(heartbeat, wire.Heartbeat)


@pytest.mark.parametrize("is_built_first", [True, False])
def test_the_wrapped_role_starts_once_built_and_introduced(
    driver: Driver, *, is_built_first: bool
) -> None:
    if is_built_first:
        driver.build()
        assert driver.member.status()[0] == "joining"
    actions = driver.say(peers("shard-0"))
    at = rl.Connect(peer=rl.Address("shard-0"), incarnation=1, endpoint="at-shard-0", host="h")
    assert actions[0] == at
    if not is_built_first:
        assert driver.inner.events == []
        driver.build()
    joined = rl.PeerJoined(peer=rl.Address("shard-0"), incarnation=1, host="h")
    assert driver.inner.events == [rl.Started(incarnation=2), joined]
    assert isinstance(messages(driver.beat())[0], wire.Heartbeat)
    assert driver.member.status() == ("busy", {"n": 2.0})


def test_early_messages_wait_and_a_rejected_one_drops_no_other(driver: Driver) -> None:
    """Regression: a restarted leader got a transfer for its earlier incarnation while being built.

    The rejection discarded its first OpenSession and every timer, so its replica hung for ever.
    """
    driver.inner.refuses = said(wire.Finished(counters={}), "replica-0.1")
    fine = said(wire.CheckpointSaved(label="x", clock=0))
    for early in (driver.inner.refuses, fine):
        driver.handle(early)
    driver.say(wire.StartTraining())
    driver.say(peers("shard-0"))
    reports = [a.text for a in driver.build() if isinstance(a, rl.Report)]
    assert reports == ["heard", "refused: of another life", *["heard"] * 4]
    started, *others = driver.inner.events
    assert started == rl.Started(incarnation=2)
    assert [e.sender for e in others if isinstance(e, rl.Received)] == ["shard-0", "supervisor"]
    assert [e.peer for e in others if isinstance(e, rl.PeerLost)] == ["replica-0.1"]  # not listed


def test_a_message_that_the_role_within_does_not_accept_never_reaches_it(driver: Driver) -> None:
    driver.inner.accepts = frozenset({wire.StartTraining})
    driver.running("shard-0")
    with pytest.raises(RemoteProtocolError, match="shard-0 sent replica-0 Finished"):
        driver.say(wire.Finished(counters={}), sender="shard-0")
    assert driver.inner.events == []


def test_the_wrapped_role_learns_of_changed_peers(driver: Driver) -> None:
    driver.running("shard-0", "shard-1")
    assert not connected(driver.say(peers("shard-0", "shard-1")))
    driver.inner.events.clear()
    driver.say(peers("shard-1"))
    (lost,) = driver.inner.events
    assert isinstance(lost, rl.PeerLost)
    assert lost.peer == "shard-0"
    driver.inner.events.clear()
    both = peers("shard-0", "shard-1", incarnation=2)
    assert connected(driver.say(both)) == ["shard-0", "shard-1"]
    assert [type(event) for event in driver.inner.events] == [rl.PeerJoined, rl.PeerJoined]
    assert not connected(driver.say(peers("shard-0", "shard-1")))  # older news


def test_a_peer_whose_last_message_comes_late_is_lost_anew() -> None:
    """Its shard took it for one that is there, and let the others wait for it for ever."""
    driver = Driver(name="shard-0").running("replica-0", "replica-1")
    driver.say(peers("replica-0"))
    driver.inner.events.clear()
    for sender in ("replica-0", "replica-1"):
        driver.say(wire.Finished(counters={}), sender=sender)
    for _ in range(2):
        driver.say(peers("replica-0"))
    _, _, lost = driver.inner.events  # once, and not the other one
    assert isinstance(lost, rl.PeerLost)
    assert (lost.peer, lost.incarnation) == ("replica-1", 1)
    driver.say(wire.Finished(counters={}), sender="replica-1")
    driver.inner.events.clear()
    driver.say(peers("replica-0", "replica-1"))  # it was silent, and is back
    assert [type(event) for event in driver.inner.events] == [rl.PeerJoined]


def test_a_peer_lost_for_good_is_reported_once(driver: Driver) -> None:
    """Also if it never joined while this incarnation ran."""
    driver.running("replica-0.1")
    for _ in range(2):
        driver.say(wire.Peers(entries=(), gone=("replica-0.1", "replica-0.2")))
    lost = [e for e in driver.inner.events if isinstance(e, rl.PeerLost)]
    told = [(e.peer, e.incarnation, e.for_good) for e in lost]
    assert told == [("replica-0.1", 1, True), ("replica-0.2", 0, True)]


def test_a_member_waits_minutes_for_a_silent_supervisor() -> None:
    """Regression: every role exited after 15 s without a message.

    The supervisor had been paused for 25 s, or waited for a disk: 9,773
    acknowledged pushes were lost.
    """
    driver = Driver(patience=JobMemberConfig(name="replica-0").patience_seconds)
    driver.say(wire.HeartbeatAck())
    assert not exits(driver.beat(n=2 * 300))


def test_a_shard_without_supervisor_saves_and_then_exits() -> None:
    """Regression: it exited at once and lost every push since its last checkpoint."""
    driver = Driver(name="shard-0").running()
    driver.beat(n=50)  # 10 s longer than others: for their last pushes
    assert driver.inner.events == []
    actions = driver.beat(n=11)
    (lost,) = driver.inner.events  # once
    assert isinstance(lost, rl.PeerLost)
    assert (lost.peer, lost.for_good) == (rl.SUPERVISOR, True)
    assert lost.reason == "no message from the supervisor for 25.5 s"
    assert not exits(actions)


def test_a_role_without_supervisor_completes_its_step_before_it_exits(driver: Driver) -> None:
    driver.running()
    assert not exits(driver.beat(n=31 + 19))
    (stop,) = driver.inner.events  # once
    assert isinstance(stop, rl.Received)
    text = "no message from the supervisor for 15.5 s"
    assert isinstance(stop.message, wire.Stop)
    assert (stop.sender, stop.message.reason) == (rl.SUPERVISOR, text)
    assert exits(driver.beat()) == ["no message from the supervisor for 25.5 s"]  # it does not end


class Ending(Inner):
    """Ends at its first message."""

    @override
    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if not isinstance(event, rl.Received):
            return []
        return [rl.Send(receiver=rl.SUPERVISOR, message=wire.Finished(counters={})), rl.Exit()]


def test_counters_of_the_process_are_told_with_those_of_the_role() -> None:
    """With the last ones, too: a run that has ended is judged by these."""
    driver = Driver(counted=lambda: {"pages_read_again": 7.0})
    driver.running()
    counted = [one.counters for one in messages(driver.beat()) if isinstance(one, wire.Heartbeat)]
    assert counted == [{"n": 0.0, "pages_read_again": 7.0}]
    driver.inner.last = [
        rl.Send(receiver=rl.SUPERVISOR, message=wire.Finished(counters={"n": 1.0})),
        rl.Exit(),
    ]
    (last,) = messages(driver.say(wire.Stop(reason="")))
    assert isinstance(last, wire.Finished)
    assert last.counters == {"n": 1.0, "pages_read_again": 7.0}


def test_a_role_that_has_ended_waits_for_the_next_supervisor() -> None:
    """After a takeover it counted as lost, and took all its steps again."""
    driver = Driver(build=Ending).running()
    driver.beat(n=10)
    assert not exits(driver.say(wire.CheckpointSaved(label="x", clock=0), sender="shard-0"))
    assert not exits(driver.beat(n=4))
    end = driver.say(wire.HeartbeatAck())
    assert isinstance(messages(end)[-1], wire.Finished)
    assert exits(end) == [None]


def test_a_role_that_has_ended_does_not_wait_for_ever() -> None:
    driver = Driver(build=Ending).running()
    driver.beat(n=10)
    driver.say(wire.CheckpointSaved(label="x", clock=0), sender="shard-0")
    assert exits(driver.beat(n=60))[0] is not None


def test_a_coordinator_without_supervisor_saves_before_it_exits() -> None:
    """Under the next label: what it and its shards have done since the last one would be lost."""
    driver = Driver(name="coordinator").running()
    driver.say(wire.SaveCheckpoint(label="00011"))
    driver.inner.events.clear()
    driver.beat(n=31)
    (save,) = driver.inner.events
    assert isinstance(save, rl.Received)
    assert isinstance(save.message, wire.SaveCheckpoint)
    assert save.message.label == "00012"


def test_a_role_joins_again_when_its_supervisor_is_silent(driver: Driver) -> None:
    """Another one may have taken over, and does not know where it listens."""
    driver.running()
    kinds = [type(message) for message in messages(driver.beat(n=11))]
    assert kinds == [wire.Heartbeat] * 10 + [wire.Join, wire.Heartbeat]


def test_a_shard_that_cannot_save_in_time_exits_anyway() -> None:
    driver = Driver(name="shard-0").running()
    driver.handle(KILLED)
    while not (errors := exits(driver.beat())):
        assert driver.now < 100.0 + SAVE_SECONDS_MAX + 1.0
    assert errors == ["the last checkpoint was not saved in 300 s"]


@pytest.mark.parametrize("name", ["replica-0", "evaluator", "coordinator", "shard-0"])
def test_a_role_without_values_exits_without_its_supervisor(name: str) -> None:
    driver = Driver(name=name)
    if name != "shard-0":  # which has not started
        driver.running()
    assert driver.handle(KILLED) == [rl.Exit(error="the supervisor was killed")]
    assert driver.inner.events == []


def test_a_member_exits_when_the_supervisor_is_silent_and_not_before(driver: Driver) -> None:
    for _ in range(100):
        driver.say(wire.HeartbeatAck())
        assert not exits(driver.beat())
    driver.say(wire.HeartbeatAck())
    assert not exits(driver.beat(n=30))
    (error,) = exits(driver.beat())
    assert "no message from the supervisor for 15." in (error or "")


def test_time_in_which_the_member_was_paused_does_not_count(driver: Driver) -> None:
    """A laptop that slept, or Ctrl+Z."""
    assert not exits(driver.beat(after=3600.0))


@pytest.mark.parametrize(
    ("error", "text", "culprit_is_job", "restart_helps"),
    [
        (JobError("[model] no good"), "[model] no good", True, True),
        (PeerLostError("shard-0 silent"), "PeerLostError: shard-0 silent", False, True),
        (RestoreError("index is 1"), "RestoreError: index is 1", False, False),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug", False, True),
    ],
)
def test_a_failing_role_reports_why(
    error: Exception, text: str, *, culprit_is_job: bool, restart_helps: bool
) -> None:
    def build() -> rl.Role:
        raise error

    builds, runs = Driver(build), Driver().running()
    failures = [builds.build()]
    if not isinstance(error, ZeroDivisionError):  # a bug of a running role is the driver's business
        runs.inner.error = error
        failures.append(runs.say(wire.StartTraining()))
    for send, halt in failures:
        (failed,) = messages([send])
        assert isinstance(failed, wire.Failed)
        assert (failed.error, failed.culprit_is_job) == (text, culprit_is_job)
        assert failed.restart_helps == restart_helps
        assert halt == rl.Exit(error=text)
    assert builds.member.reported_failure


def test_protocol_errors_of_peers_are_left_to_the_driver(driver: Driver) -> None:
    driver.running().inner.error = RemoteProtocolError("nonsense")
    with pytest.raises(RemoteProtocolError):
        driver.say(wire.StartTraining())


def test_stop_ends_a_role_that_has_not_started_and_is_passed_on_to_one_that_has(
    driver: Driver,
) -> None:
    actions = driver.say(wire.Stop(reason="enough"))
    assert isinstance(messages(actions)[0], wire.Finished)
    assert actions[-1] == rl.Exit()
    assert Driver().running().say(wire.Stop(reason="enough")) == [rl.Report(text="heard")]


def test_thousands_send_at_most_1000_heartbeats_a_second_to_the_supervisor() -> None:
    beats = [heartbeat_seconds("replica-0", 1, n) for n in (1, 1000, 2000, 5000, 10_000)]
    assert beats == [0.5, 1.0, 2.0, 5.0, 10.0]
    assert heartbeat_seconds("shard-0", 1, 10_000) == 0.5


def test_a_member_with_few_heartbeats_waits_for_two_answers() -> None:
    """With a patience of 2 s, it would end between two of them."""
    driver = Driver(heartbeat=5.0, patience=2.0).running("shard-0")
    driver.say(wire.HeartbeatAck())
    kinds = [[type(m) for m in messages(driver.beat(after=5.0))] for _ in range(3)]
    assert kinds == [[wire.Heartbeat], [wire.Heartbeat], [wire.Join, wire.Heartbeat]]
