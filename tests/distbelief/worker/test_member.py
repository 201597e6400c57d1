from collections.abc import Callable, Mapping, Sequence

import pytest

from distbelief import protocol as wire
from distbelief.errors import DistBeliefError, JobError, PeerLostError, RemoteProtocolError
from distbelief.roles import role as rl
from distbelief.worker.member import BUILD, SAVE_SECONDS_MAX, TIMER, JobMember, JobMemberConfig


class Inner:
    """Records events; logs "heard" for each; fails on request."""

    accepts = rl.ALL_MESSAGES

    def __init__(self) -> None:
        self.events: list[rl.Event] = []
        self.error: Exception | None = None
        self.refuses: rl.Event | None = None

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        if self.error is not None:
            raise self.error
        if event == self.refuses:
            raise RemoteProtocolError("of another life")
        self.events.append(event)
        return [rl.Report(text="heard")]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "busy", {"n": float(len(self.events))}


class Driver:
    """One member and its actions."""

    def __init__(
        self,
        build: Callable[[], rl.Role] | None = None,
        *,
        name: str = "replica-0",
        patience: rl.Seconds = 15.0,
    ) -> None:
        self.inner = Inner()
        config = JobMemberConfig(
            name=name, endpoint="tcp://here", host="h", pid=7, patience_seconds=patience
        )
        self.member = JobMember(config, build=build or (lambda: self.inner))
        self.now = 100.0
        self.actions: list[rl.Action] = []

    def handle(self, event: rl.Event) -> list[rl.Action]:
        actions = list(self.member.handle(event, self.now))
        self.actions += actions
        return actions

    def start(self) -> list[rl.Action]:
        return self.handle(rl.Started(incarnation=2))

    def build(self) -> list[rl.Action]:
        """Do the work that the member has asked for."""
        (compute,) = [a for a in self.actions if isinstance(a, rl.Compute)]
        assert compute.name == BUILD
        try:
            return self.handle(rl.Computed(name=BUILD, result=compute.work()))
        except (DistBeliefError, ZeroDivisionError) as error:
            return self.handle(rl.Computed(name=BUILD, error=error))

    def say(self, message: wire.Message) -> list[rl.Action]:
        return self.handle(rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=message))

    def beat(self, *, after: rl.Seconds = 0.5) -> list[rl.Action]:
        self.now += after
        return self.handle(rl.TimerFired(name=TIMER))


def messages(actions: Sequence[rl.Action]) -> list[wire.Message]:
    return [action.message for action in actions if isinstance(action, rl.Send)]


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


def test_a_member_joins_and_sends_heartbeats_while_it_is_built(driver: Driver) -> None:
    said = messages(driver.start())
    join, heartbeat = said
    assert isinstance(join, wire.Join)
    assert (join.endpoint, join.host, join.pid) == ("tcp://here", "h", 7)
    assert isinstance(heartbeat, wire.Heartbeat)
    assert heartbeat.state == "building"
    assert rl.SetTimer(name=TIMER, at=100.5) in driver.actions


def test_warnings_are_sent_with_join(driver: Driver) -> None:
    driver.member.warn("snapshot 00005 is damaged")
    join, _ = messages(driver.start())
    assert isinstance(join, wire.Join)
    assert join.warnings == ("snapshot 00005 is damaged",)


def test_join_is_repeated_until_peers_are_known(driver: Driver) -> None:
    driver.start()
    assert isinstance(messages(driver.beat())[0], wire.Join)
    driver.say(peers("shard-0"))
    (heartbeat,) = messages(driver.beat())
    assert isinstance(heartbeat, wire.Heartbeat)


def test_the_wrapped_role_starts_once_built_and_introduced(driver: Driver) -> None:
    driver.start()
    driver.say(peers("shard-0"))
    assert driver.inner.events == []
    driver.build()
    assert driver.inner.events == [
        rl.Started(incarnation=2),
        rl.PeerJoined(peer=rl.Address("shard-0"), incarnation=1),
    ]
    assert isinstance(messages(driver.beat())[0], wire.Heartbeat)
    assert driver.member.status() == ("busy", {"n": 2.0})


def test_the_wrapped_role_starts_once_introduced_and_built(driver: Driver) -> None:
    driver.start()
    driver.build()
    assert driver.member.status()[0] == "joining"
    actions = driver.say(peers("shard-0"))
    connect = rl.Connect(peer=rl.Address("shard-0"), incarnation=1, endpoint="at-shard-0", host="h")
    assert actions[0] == connect
    assert driver.inner.events[0] == rl.Started(incarnation=2)


def test_a_rejected_early_message_drops_no_other(driver: Driver) -> None:
    """Regression: a restarted leader got a transfer for its earlier incarnation while being built.

    The rejection discarded its first OpenSession and every timer, so its replica hung for ever.
    """
    driver.start()
    stale = rl.Received(
        sender=rl.Address("replica-0.1"), incarnation=1, message=wire.StartTraining()
    )
    driver.handle(stale)
    fine = rl.Received(sender=rl.Address("shard-0"), incarnation=1, message=wire.HeartbeatAck())
    driver.handle(fine)
    driver.inner.refuses = stale
    driver.say(peers("shard-0"))
    reports = [a.text for a in driver.build() if isinstance(a, rl.Report)]
    assert reports == ["heard", "refused: of another life", "heard", "heard"]
    assert driver.inner.events[:2] == [rl.Started(incarnation=2), fine]


def test_a_message_that_the_role_within_does_not_accept_never_reaches_it(driver: Driver) -> None:
    driver.inner.accepts = frozenset({wire.StartTraining})
    driver.start()
    driver.say(peers("shard-0"))
    driver.build()
    seen = list(driver.inner.events)
    stray = rl.Received(sender=rl.Address("shard-0"), incarnation=1, message=wire.HeartbeatAck())
    with pytest.raises(RemoteProtocolError, match="shard-0 sent replica-0 HeartbeatAck"):
        driver.handle(stray)
    assert driver.inner.events == seen


def test_early_messages_wait_for_the_wrapped_role(driver: Driver) -> None:
    driver.start()
    early = rl.Received(sender=rl.Address("shard-0"), incarnation=1, message=wire.HeartbeatAck())
    driver.handle(early)
    driver.say(wire.StartTraining())
    driver.say(peers("shard-0"))
    driver.build()
    kinds = [type(event) for event in driver.inner.events]
    assert kinds == [rl.Started, rl.Received, rl.Received, rl.PeerJoined]


def test_the_wrapped_role_learns_of_changed_peers(driver: Driver) -> None:
    driver.start()
    driver.build()
    driver.say(peers("shard-0", "shard-1"))
    assert not [a for a in driver.say(peers("shard-0", "shard-1")) if type(a) is rl.Connect]
    driver.inner.events.clear()
    driver.say(peers("shard-1"))
    (lost,) = driver.inner.events
    assert isinstance(lost, rl.PeerLost)
    assert lost.peer == "shard-0"
    driver.inner.events.clear()
    actions = driver.say(peers("shard-0", "shard-1", incarnation=2))
    assert [a.peer for a in actions if isinstance(a, rl.Connect)] == ["shard-0", "shard-1"]
    assert [type(event) for event in driver.inner.events] == [rl.PeerJoined, rl.PeerJoined]


def test_a_peer_lost_for_good_is_reported_once(driver: Driver) -> None:
    """Also if it never joined while this incarnation ran."""
    driver.start()
    driver.build()
    driver.say(peers("replica-0.1"))
    driver.inner.events.clear()
    for _ in range(2):
        driver.say(wire.Peers(entries=(), gone=("replica-0.1", "replica-0.2")))
    lost = [e for e in driver.inner.events if isinstance(e, rl.PeerLost)]
    told = [(e.peer, e.incarnation, e.for_good) for e in lost]
    assert told == [("replica-0.1", 1, True), ("replica-0.2", 0, True)]


def test_older_news_of_a_peer_is_ignored(driver: Driver) -> None:
    driver.start()
    driver.build()
    driver.say(peers("shard-0", incarnation=2))
    assert not [a for a in driver.say(peers("shard-0")) if isinstance(a, rl.Connect)]


def test_a_member_waits_minutes_for_a_silent_supervisor() -> None:
    """Regression: every role exited after 15 s without a message.

    The supervisor had been paused for 25 s, or waited for a disk: 9,773
    acknowledged pushes were lost.
    """
    driver = Driver(patience=JobMemberConfig(name="replica-0").patience_seconds)
    driver.start()
    driver.say(wire.HeartbeatAck())
    for _ in range(2 * 300):
        assert not [a for a in driver.beat() if isinstance(a, rl.Exit)]


def running(name: str) -> Driver:
    """Return a role of this name that is built, introduced, and receives nothing more."""
    driver = Driver(name=name)
    driver.start()
    driver.build()
    driver.say(peers())
    driver.inner.events.clear()
    return driver


def test_a_shard_without_supervisor_saves_and_then_exits() -> None:
    """Regression: it exited at once and lost every push since its last checkpoint."""
    driver = running("shard-0")
    for _ in range(30):
        driver.beat()
    assert driver.inner.events == []
    actions = driver.beat()
    (lost,) = driver.inner.events
    assert isinstance(lost, rl.PeerLost)
    assert (lost.peer, lost.for_good) == (rl.SUPERVISOR, True)
    assert lost.reason == "no message from the supervisor for 15.5 s"
    for _ in range(10):
        actions += driver.beat()
    assert not [a for a in actions if isinstance(a, rl.Exit)]
    assert driver.inner.events == [lost]  # once


def test_a_shard_that_cannot_save_in_time_exits_anyway() -> None:
    driver = running("shard-0")
    gone = rl.PeerLost(peer=rl.SUPERVISOR, incarnation=0, reason="the supervisor was killed")
    driver.handle(gone)
    actions: list[rl.Action] = []
    while not actions:
        actions = [a for a in driver.beat() if isinstance(a, rl.Exit)]
        assert driver.now < 100.0 + SAVE_SECONDS_MAX + 1.0
    assert actions == [rl.Exit(error="the last checkpoint was not saved in 300 s")]


@pytest.mark.parametrize("name", ["replica-0", "evaluator", "coordinator"])
def test_a_role_without_values_exits_without_its_supervisor(name: str) -> None:
    driver = running(name)
    gone = rl.PeerLost(peer=rl.SUPERVISOR, incarnation=0, reason="the supervisor was killed")
    assert driver.handle(gone) == [rl.Exit(error="the supervisor was killed")]
    assert driver.inner.events == []


def test_a_shard_that_has_not_started_exits_without_its_supervisor() -> None:
    driver = Driver(name="shard-0")
    driver.start()
    gone = rl.PeerLost(peer=rl.SUPERVISOR, incarnation=0, reason="the supervisor was killed")
    assert driver.handle(gone) == [rl.Exit(error="the supervisor was killed")]


def test_a_member_exits_when_the_supervisor_is_lost(driver: Driver) -> None:
    driver.start()
    driver.say(wire.HeartbeatAck())
    for _ in range(30):
        assert not [a for a in driver.beat() if isinstance(a, rl.Exit)]
    *_, halt = driver.beat()
    assert isinstance(halt, rl.Exit)
    assert "no message from the supervisor for 15." in (halt.error or "")


def test_a_member_runs_as_long_as_the_supervisor_answers(driver: Driver) -> None:
    driver.start()
    for _ in range(100):
        driver.say(wire.HeartbeatAck())
        assert not [a for a in driver.beat() if isinstance(a, rl.Exit)]


def test_time_in_which_the_member_was_paused_does_not_count(driver: Driver) -> None:
    """A laptop that slept, or Ctrl+Z."""
    driver.start()
    assert not [a for a in driver.beat(after=3600.0) if isinstance(a, rl.Exit)]


@pytest.mark.parametrize(
    ("error", "text", "culprit_is_job"),
    [
        (JobError("[model] no good"), "[model] no good", True),
        (PeerLostError("shard-0 silent"), "PeerLostError: shard-0 silent", False),
    ],
)
def test_a_failing_role_reports_why(
    driver: Driver, error: Exception, text: str, *, culprit_is_job: bool
) -> None:
    driver.start()
    driver.build()
    driver.say(peers())
    driver.inner.error = error
    send, halt = driver.say(wire.StartTraining())
    (failed,) = messages([send])
    assert isinstance(failed, wire.Failed)
    assert (failed.error, failed.culprit_is_job) == (text, culprit_is_job)
    assert halt == rl.Exit(error=text)
    assert driver.member.reported_failure


def test_a_role_that_cannot_be_built_reports_why() -> None:
    def build() -> rl.Role:
        raise JobError("[data.train] no such file")

    driver = Driver(build)
    driver.start()
    failed, _ = messages(driver.build()), None
    assert isinstance(failed[0], wire.Failed)
    assert failed[0].culprit_is_job


def test_a_bug_while_building_is_reported_too() -> None:
    driver = Driver(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    driver.start()
    (failed,) = messages(driver.build())
    assert isinstance(failed, wire.Failed)
    assert failed.error == "ZeroDivisionError: division by zero"
    assert not failed.culprit_is_job


def test_protocol_errors_of_peers_are_left_to_the_driver(driver: Driver) -> None:
    driver.start()
    driver.build()
    driver.say(peers())
    driver.inner.error = RemoteProtocolError("nonsense")
    with pytest.raises(RemoteProtocolError):
        driver.say(wire.StartTraining())


def test_stop_before_the_start_just_exits(driver: Driver) -> None:
    driver.start()
    actions = driver.say(wire.Stop(reason="enough"))
    assert isinstance(messages(actions)[0], wire.Finished)
    assert actions[-1] == rl.Exit()


def test_stop_after_the_start_goes_to_the_wrapped_role(driver: Driver) -> None:
    driver.start()
    driver.build()
    driver.say(peers())
    actions = driver.say(wire.Stop(reason="enough"))
    assert actions == [rl.Report(text="heard")]


def test_a_heartbeat_slower_than_the_patience_is_rejected() -> None:
    with pytest.raises(ValueError, match="heartbeat_seconds is 20"):
        JobMemberConfig(name="x", heartbeat_seconds=20.0, patience_seconds=15.0)
