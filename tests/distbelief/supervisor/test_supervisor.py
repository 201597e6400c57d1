"""The supervisor alone: events in, actions out. Whole jobs: `tests/simulation`."""

import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import pytest

from distbelief import protocol as wire
from distbelief.config.job import StopTable
from distbelief.core.errors import RemoteProtocolError
from distbelief.protocol import role as rl
from distbelief.protocol.codec import Codec
from distbelief.supervisor import membership
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor import TICK_SECONDS, Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import HISTORY_MAX, JobView, RoleView
from distbelief.worker.member import heartbeat_seconds


ROSTER: tuple[tuple[str, Kind], ...] = (
    ("shard-0", "shard"),
    ("shard-1", "shard"),
    ("replica-0", "replica"),
    ("replica-1", "replica"),
    ("evaluator", "evaluator"),
)


M = TypeVar("M", bound=wire.Message)


class Desk:
    def __init__(self, config: SupervisorConfig) -> None:
        self.supervisor = Supervisor(config)
        self.now = 0.0
        self.names = [name for name, _ in config.roster]
        self.incarnations = dict.fromkeys(self.names, 1)
        self.start = self.handle(rl.Started(incarnation=1))

    def handle(self, event: rl.Event) -> list[rl.Action]:
        actions = list(self.supervisor.handle(event, self.now))
        for action in actions:
            if isinstance(action, rl.Launch):
                self.incarnations[action.name] = action.incarnation
        return actions

    def hear(
        self, name: str, message: wire.Message, *, incarnation: int | None = None
    ) -> list[rl.Action]:
        number = self.incarnations.get(name, 1) if incarnation is None else incarnation
        return self.handle(
            rl.Received(sender=rl.Address(name), incarnation=number, message=message)
        )

    def join(self, *names: str) -> list[rl.Action]:
        actions: list[rl.Action] = []
        for name in names or self.names:
            actions += self.hear(name, wire.Join(endpoint=f"at-{name}", host="h", pid=1))
        return actions

    def train(self, name: str = "replica-0") -> None:
        """Let all roles join, and this one take its first step."""
        self.join()
        self.progress(name)

    def restart(self, name: str, reason: str = "was ended by signal SIGKILL") -> None:
        self.die(name, reason)
        self.join(name)

    def finish(self, *names: str) -> list[rl.Action]:
        return [action for name in names for action in self.hear(name, wire.Finished(counters={}))]

    def saved(self, *names: str, label: str = "00001", error: str | None = None) -> list[rl.Action]:
        saved = wire.CheckpointSaved(label=label, clock=1, error=error)
        return [action for name in names for action in self.hear(name, saved)]

    def measured(self, metric: float = 0.75, *, request: int = 1) -> list[rl.Action]:
        done = wire.EvaluationDone(
            request=request, loss=0.5, metric=metric, n_samples=10, clock=3.0
        )
        return self.hear("evaluator", done)

    def beat(self, name: str, state: str = "busy", **counters: float) -> list[rl.Action]:
        return self.hear(name, wire.Heartbeat(state=state, counters=counters))

    def progress(self, name: str = "replica-0", step: int = 1) -> list[rl.Action]:
        message = wire.Progress(
            step=step, samples=10 * step, loss=1.0, seconds_computing=0.0, seconds_waiting=0.0
        )
        return self.hear(name, message)

    def pass_time(self, seconds: float, *, beats: Sequence[str] = ()) -> list[rl.Action]:
        """Let the timer fire as often as it does; these roles say that they live."""
        actions: list[rl.Action] = []
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            for name in beats:
                actions += self.beat(name)
            actions += self.handle(rl.TimerFired(name="supervisor:tick"))
        return actions

    def die(self, name: str, reason: str = "was ended by signal SIGKILL") -> list[rl.Action]:
        """A process ends, and its last words have had time to come."""
        number = self.incarnations[name]
        lost = rl.PeerLost(peer=rl.Address(name), incarnation=number, reason=reason)
        actions = self.handle(lost)
        self.now += 0.1
        return [*actions, *self.handle(rl.TimerFired(name=f"supervisor:lost:{name}"))]

    @property
    def view(self) -> JobView:
        return self.supervisor.view(self.now)

    @property
    def told(self) -> list[str]:
        return [m.text for m in self.view.messages]


def a_job(
    roster: Sequence[tuple[str, Kind]] = ROSTER, stop: StopTable | None = None, **options: object
) -> Desk:
    rules = StopRules(stop or StopTable(epochs=1000), n_train=100)
    return Desk(SupervisorConfig(roster=tuple(roster), stop=rules, **options))  # type: ignore[arg-type]


def letters(actions: Sequence[rl.Action], kind: type[M]) -> list[tuple[str, M]]:
    return [
        (action.receiver, action.message)
        for action in actions
        if isinstance(action, rl.Send) and isinstance(action.message, kind)
    ]


def sent(actions: Sequence[rl.Action], kind: type[wire.Message]) -> list[str]:
    return [receiver for receiver, _ in letters(actions, kind)]


def introduced(actions: Sequence[rl.Action]) -> dict[str, set[str]]:
    """Return whom each role was introduced to, by its newest `Peers`."""
    return {
        who: {entry.name for entry in peers.entries} for who, peers in letters(actions, wire.Peers)
    }


def ended(actions: Sequence[rl.Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, rl.Terminate)]


@pytest.fixture
def desk() -> Desk:
    return a_job()


EVERYBODY = [name for name, _ in ROSTER]


# ----------------------------------------------------------------------------- start


def test_all_start_at_once_and_clients_are_introduced_when_all_shards_are_there(desk: Desk) -> None:
    assert [a.name for a in desk.start if isinstance(a, rl.Launch)] == EVERYBODY
    assert sent(desk.join("replica-0", "evaluator", "shard-0"), wire.Peers) == ["shard-0"]
    actions = desk.join("shard-1")
    assert set(sent(actions, wire.Peers)) == {"shard-1", "replica-0", "evaluator"}
    assert sent(actions, wire.StartTraining) == ["replica-0"]
    assert isinstance(actions[0], rl.Connect)
    assert actions[0].endpoint == "at-shard-1"


def test_clients_need_shards_and_shards_need_clients(desk: Desk) -> None:
    newest = introduced(desk.join())
    assert newest["replica-0"] == {"shard-0", "shard-1"}
    assert newest["shard-0"] == {"replica-0", "replica-1", "evaluator"}
    assert sent(desk.beat("shard-0"), wire.HeartbeatAck) == ["shard-0"]
    actions = desk.join("replica-0")  # its Peers was lost
    assert sent(actions, wire.Peers) == ["replica-0"]
    assert not [action for action in actions if isinstance(action, rl.Connect)]


def test_the_process_of_a_role_is_shown_as_long_as_it_may_run(desk: Desk) -> None:
    def pid() -> int | None:
        return desk.view.roles[0].pid

    assert pid() is None
    desk.hear("shard-0", wire.Join(endpoint="here", host="h", pid=4711))
    assert pid() == 4711
    desk.die("shard-0")
    assert pid() is None
    desk.join("shard-0")
    assert pid() == 1
    desk.finish("shard-0")
    assert pid() is None


def phase(desk: Desk) -> str:
    return desk.view.phase


def test_a_job_trains_once_a_replica_does() -> None:
    """It was "training 0 %" while the replicas built their models."""
    desk = a_job(stop=StopTable(samples=1000))
    desk.join()
    for state in ("building", "joining", "waiting for shard-0"):
        desk.beat("replica-0", state)
        assert phase(desk) == "starting"
    desk.beat("replica-0", "computing")  # the first step may take minutes
    assert phase(desk) == "training"
    desk.progress("replica-0")
    desk.beat("replica-0", "waiting for shard-0")
    assert phase(desk) == "training"
    for name in ("replica-0", "replica-1"):
        desk.die(name)
    assert phase(desk) == "resuming"  # nobody trains
    desk.join()
    desk.progress("replica-1", step=100)
    assert phase(desk) == "stopping"
    desk.finish("replica-0", "replica-1")
    assert phase(desk) == "saving"
    desk.saved("shard-0", "shard-1")
    desk.measured()
    assert phase(desk) == "stopping"
    desk.finish("shard-0", "shard-1", "evaluator")
    assert phase(desk) == "done"


def test_a_job_that_fails_is_failed_and_one_that_is_interrupted_is_not_done(desk: Desk) -> None:
    """It was "done: " and the error."""
    desk.join()
    desk.hear("replica-0", wire.Failed(error="the loss is NaN", culprit_is_job=True))
    assert phase(desk) == "stopping"
    desk.pass_time(60.0)
    assert (phase(desk), desk.view.error) == ("failed", "replica 0: the loss is NaN")
    other = a_job()
    other.train()
    other.now = 7.0
    actions = other.hear(rl.USER, wire.Stop(reason="Ctrl+C"))
    assert rl.SetTimer(name="supervisor:deadline", at=7.3) in actions  # of this stage
    other.pass_time(3.0)
    view = other.view
    assert (view.phase, view.stop_reason, view.error) == ("interrupted", "Ctrl+C", None)


def test_begin_is_said_again_until_it_is_done(desk: Desk) -> None:
    desk.join()
    assert sent(desk.beat("replica-0", "waiting for begin"), wire.StartTraining) == ["replica-0"]
    desk.progress("replica-0")
    ((_, begin),) = letters(desk.beat("replica-0"), wire.StartTraining)
    assert begin.samples is not None
    assert not sent(desk.beat("replica-0", samples_allowed=begin.samples), wire.StartTraining)


def test_messages_of_strangers_and_those_that_roles_never_send_are_rejected(desk: Desk) -> None:
    with pytest.raises(RemoteProtocolError, match="is not a member"):
        desk.join("stranger")
    desk.join()
    with pytest.raises(RemoteProtocolError, match="shard-0 sent the supervisor StartTraining"):
        desk.hear("shard-0", wire.StartTraining())
    with pytest.raises(RemoteProtocolError, match="sent the supervisor Progress, which is not"):
        desk.progress("shard-0")
    # A replica of another machine could say how accurate the model is.
    done = wire.EvaluationDone(request=1, loss=0.0, metric=1.0, n_samples=9, clock=1.0)
    with pytest.raises(RemoteProtocolError, match="not for a replica to send"):
        desk.hear("replica-1", done)
    with pytest.raises(RemoteProtocolError, match="the user sent StartTraining"):
        desk.hear(rl.USER, wire.StartTraining())
    desk.die("replica-0")
    assert desk.hear("replica-0", wire.StartTraining(), incarnation=1) == []


def test_a_role_that_never_sends_anything_is_started_again(desk: Desk) -> None:
    names = EVERYBODY[:-1]
    desk.join(*names)
    actions = desk.pass_time(61.0, beats=names)
    assert rl.Launch(name=rl.Address("evaluator"), incarnation=2) in actions
    assert any("has sent nothing for 60 s" in text for text in desk.told)


def test_a_role_whose_process_cannot_begin_yet_is_importing() -> None:
    """On a loaded machine the fork server imported for more than 60 s.

    Its roles were taken for dead, and started again twice.
    """
    desk = a_job(import_seconds_max=600.0)
    names = EVERYBODY[:-1]
    desk.join(*names)
    assert not [a for a in desk.pass_time(300.0, beats=names) if isinstance(a, rl.Launch)]
    states = {role.name: role.state for role in desk.view.roles}
    assert states["evaluator"] == "importing"
    desk.handle(rl.PeerJoined(peer=rl.Address("evaluator"), incarnation=1))
    assert not [a for a in desk.pass_time(59.0, beats=names) if isinstance(a, rl.Launch)]
    actions = desk.pass_time(2.0, beats=names)
    assert rl.Launch(name=rl.Address("evaluator"), incarnation=2) in actions
    desk.handle(rl.PeerJoined(peer=rl.Address("evaluator"), incarnation=1))  # late
    assert not [a for a in desk.pass_time(600.0, beats=names) if isinstance(a, rl.Launch)]
    actions = desk.pass_time(61.0, beats=names)
    assert rl.Launch(name=rl.Address("evaluator"), incarnation=3) in actions


# ----------------------------------------------------------------- now and then


def test_it_asks_for_evaluations_and_checkpoints_once_training_has_begun(desk: Desk) -> None:
    desk.join()
    assert sent(desk.pass_time(40.0, beats=EVERYBODY), wire.SaveCheckpoint) == []
    desk.progress()
    actions = desk.pass_time(31.0, beats=EVERYBODY)
    assert sent(actions, wire.Evaluate)[0] == "evaluator"
    assert set(sent(actions, wire.SaveCheckpoint)) == {"shard-0", "shard-1"}


def test_an_unanswered_request_is_repeated_and_an_answered_one_is_not(desk: Desk) -> None:
    desk.train()
    actions = desk.pass_time(13.0, beats=EVERYBODY)
    assert [ask.request for _, ask in letters(actions, wire.Evaluate)] == [1, 1]
    desk.measured()
    assert sent(desk.pass_time(5.0, beats=EVERYBODY), wire.Evaluate) == []
    view = desk.view
    assert (view.metric, view.held_out_loss, view.best_metric) == (0.75, 0.5, 0.75)


@pytest.mark.parametrize(
    ("higher_is_better", "metrics", "best"),
    [
        (True, (0.5, 0.75, 0.9), 0.9),
        (True, (0.5, 0.75, 0.6), 0.75),
        (False, (3.0, 2.0, 1.0), 1.0),
        (False, (3.0, 0.5, 1.0), 0.5),
        (True, (float("nan"), 0.5, 0.25), 0.5),
        (True, (0.9,), 0.9),
    ],
)
def test_the_best_metric_is_the_best_of_all_that_were_measured(
    metrics: tuple[float, ...], best: float, *, higher_is_better: bool
) -> None:
    """The last evaluation never counted, nor did any of a metric of the user's own."""
    desk = a_job(
        stop=StopTable(samples=1000), metric_name="mine:figure", higher_is_better=higher_is_better
    )
    desk.train()
    for request, metric in enumerate(metrics[:-1], 1):
        desk.pass_time(11.0, beats=EVERYBODY)
        desk.measured(metric, request=request)
    desk.progress("replica-0", step=100)  # the job ends
    desk.finish("replica-0", "replica-1")
    desk.measured(metrics[-1], request=len(metrics))  # of all held-out samples
    assert (desk.view.metric, desk.view.best_metric) == (metrics[-1], best)


def test_a_checkpoint_that_fails_is_told_and_the_job_goes_on(desk: Desk) -> None:
    desk.train()
    desk.pass_time(30.0, beats=EVERYBODY)
    desk.saved("shard-1", error="no space left")
    assert desk.told == ["shard 1 could not save its checkpoint: no space left"]
    assert desk.view.phase == "training"


def test_a_late_answer_to_an_earlier_request_does_not_count_as_one_to_the_last(desk: Desk) -> None:
    """The job would end before its last checkpoint is on disk."""
    end(desk)
    desk.finish("replica-0", "replica-1")
    desk.measured()
    for label in ("", "00000", "00001"):
        assert desk.view.phase == "saving"
        desk.saved("shard-0", "shard-1", label=label)
    assert desk.view.phase == "stopping"


def test_a_job_that_takes_no_steps_is_talked_about(desk: Desk) -> None:
    desk.train()
    desk.pass_time(61.0, beats=EVERYBODY)
    assert desk.told == ["no step in the last 60 s (replica 0: busy, replica 1: busy)"]


def test_bytes_are_those_that_clients_tell_of(desk: Desk) -> None:
    """Of reads from shared memory nobody tells a shard."""
    desk.join()
    desk.beat("shard-0", bytes_in=40.0, bytes_out=0.0)
    desk.beat("replica-0", bytes_in=300.0, bytes_out=40.0)
    desk.beat("evaluator", bytes_in=100.0)
    assert (desk.view.bytes_in, desk.view.bytes_out) == (40, 400)


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1e308, 1e308])
def test_a_figure_that_is_no_count_is_not_counted(server: Desk, figure: float) -> None:
    """Of one role's word: the supervisor failed when it next drew up its view."""
    server.join("worker-1", "worker-2")
    server.beat("worker-1", bytes_in=figure, bytes_out=figure, pushes_lost=figure)
    server.beat("worker-2", bytes_in=300.0)
    view = server.view
    assert (view.bytes_in, view.bytes_out, view.pushes_lost) == (0, 300, 0)


def pushes(desk: Desk) -> tuple[int, int]:
    """Return how many are applied, and how many lost."""
    assert desk.view.pushes_lost is not None
    return desk.view.pushes_applied, desk.view.pushes_lost


def applied(desk: Desk, name: str, n: int, **counters: float) -> None:
    desk.beat(name, "busy", clock=n, pushes_applied=n, **counters)


@pytest.mark.parametrize(
    ("first", "second", "counted"),
    [
        pytest.param((800, {}), (799, {}), 799, id="its replica was killed between the two"),
        # Each machine pushes to some shards: their clocks count every part.
        pytest.param((40, {"pushes": 20}), (20, {"pushes": 20}), 20, id="of several machines"),
    ],
)
def test_a_push_is_one_push_however_many_shards_it_goes_to(
    desk: Desk,
    first: tuple[int, dict[str, float]],
    second: tuple[int, dict[str, float]],
    counted: int,
) -> None:
    """800 pushes to two shards were shown as 1,600."""
    desk.join()
    applied(desk, "shard-0", first[0], pushes_refused=2, **first[1])
    applied(desk, "shard-1", second[0], pushes_refused=3, **second[1])
    assert pushes(desk) == (counted, 0)
    assert desk.view.pushes_refused == 3


def test_what_several_shards_lose_is_counted_once_where_it_is_the_same(desk: Desk) -> None:
    desk.join()
    for name in ("shard-0", "shard-1"):
        applied(desk, name, 100)
    for name, kept in (("shard-0", 70.0), ("shard-1", 90.0)):
        desk.restart(name)
        desk.beat(name, clock=kept, pushes_applied=0.0)
    assert pushes(desk) == (70, 30)
    for name, kept in (("shard-0", 90.0), ("shard-1", 110.0)):
        desk.beat(name, clock=kept, pushes_applied=20.0)
    assert pushes(desk) == (90, 30)
    desk.restart("shard-1")
    desk.beat("shard-1", clock=105.0, pushes_applied=0.0)
    assert pushes(desk) == (85, 35)


def test_what_replicas_and_shards_know_to_be_lost_is_counted_once(desk: Desk) -> None:
    """A shard's last words are older than the last of its pushes."""
    desk.join()
    applied(desk, "shard-0", 207)
    desk.restart("shard-0")
    desk.beat("shard-0", clock=150.0, pushes_applied=0.0)
    desk.beat("replica-0", pushes_lost=40.0)
    assert pushes(desk) == (150, 57)
    desk.beat("replica-1", pushes_lost=21.0)
    assert pushes(desk) == (150, 61)


def test_steps_per_push_are_shown_where_there_are_several() -> None:
    desk = a_job(fields=("steps_per_push",))
    desk.join()
    desk.beat("replica-0", pushes=4.0, gradients_pushed=4.0)
    assert desk.view.figures == {}
    desk.beat("replica-1", pushes=4.0, gradients_pushed=256.0)
    assert desk.view.figures == {"steps_per_push": 260 / 8}


def test_waits_are_shown_by_culprit_where_replicas_wait_for_each_other() -> None:
    roster: list[tuple[str, Kind]] = [
        ("shard-0", "shard"),
        *((f"replica-{n}", "replica") for n in range(4)),
    ]
    desk = a_job(roster)
    desk.join()
    desk.beat("replica-0", "busy", clock_gap=2.0, clock_gap_max=4.0, **{"waits_replica-1": 1.5})
    desk.beat("replica-2", "busy", clock_gap=1.0, clock_gap_max=1.0, **{"waits_replica-1": 2.0})
    desk.restart("replica-2")  # what it has waited stays counted
    desk.beat("replica-2", "busy", **{"waits_replica-1": 0.5, "waits_replica-3": 7.0})
    desk.beat("replica-3", "busy", **{f"waits_replica-{n}": 0.25 for n in (0, 2, 4)})
    assert desk.view.figures == {
        "clock_gap": 2.0,
        "clock_gap_max": 4.0,
        "seconds_waited": 11.75,
        "seconds_waited_for_replica-3": 7.0,
        "seconds_waited_for_replica-1": 4.0,
        "seconds_waited_for_replica-0": 0.25,
    }


def test_what_encoded_pushes_hold_back_is_counted_as_lost_with_its_replica_or_run() -> None:
    roster: list[tuple[str, Kind]] = [("shard-0", "shard"), ("replica-0", "replica")]
    last = JobView(figures={"residual": 3.0, "residual_lost": 1.0, "compression": 4.0})
    desk = a_job(roster, before=PreviousTotals(view=last))
    desk.join()
    assert desk.view.figures == {"residual_lost": 4.0}
    encoded = {"numbers_pushed": 80.0, "words_pushed": 10.0, "clipped": 0.5}
    desk.beat("replica-0", "busy", residual=2.0, **encoded)
    figures = {"compression": 8.0, "residual": 2.0, "residual_lost": 4.0, "clipped": 0.5}
    assert desk.view.figures == figures
    desk.restart("replica-0")
    desk.beat("replica-0", "busy", residual=0.25, **encoded)
    assert desk.view.figures == figures | {"residual": 0.25, "residual_lost": 6.0, "clipped": 1.0}


def test_last_counters_of_a_shard_are_counted(desk: Desk) -> None:
    desk.join()
    applied(desk, "shard-0", 7)
    desk.hear("shard-0", wire.Finished(counters={"clock": 9.0, "pushes_applied": 9.0}))
    assert pushes(desk) == (9, 0)


def test_records_for_the_metrics_come_as_often_as_was_asked(desk: Desk) -> None:
    desk.train()
    desk.pass_time(10.1, beats=EVERYBODY)
    records = desk.supervisor.take_records()
    assert len(records) == 5
    assert records[0].loss == 1.0
    assert desk.supervisor.take_records() == []


@pytest.mark.untraced
def test_the_curve_stays_short(desk: Desk) -> None:
    desk.train()
    for step in range(2, 1000):
        desk.progress(step=step)
        desk.pass_time(2.0, beats=EVERYBODY)
    history = desk.view.history
    assert len(history) <= HISTORY_MAX
    assert history[0].seconds < 5.0
    assert history[-1].samples == 9990


# ---------------------------------------------------------------------------- deaths


def test_a_dead_role_is_restarted_and_the_others_are_notified(desk: Desk) -> None:
    desk.join()
    actions = desk.die("shard-1")
    assert rl.Launch(name=rl.Address("shard-1"), incarnation=2) in actions
    assert set(sent(actions, wire.Peers)) == {"replica-0", "replica-1", "evaluator"}
    assert set(sent(desk.join("shard-1"), wire.Peers)) >= {"replica-0", "shard-1"}
    desk.hear("replica-1", wire.Failed(error="no memory", culprit_is_job=False))
    desk.die("replica-1", "ended with status 1")
    assert desk.told[-1] == "replica 1 failed (no memory): restarting it"  # its own error


def test_a_replica_that_says_finished_has_not_died(desk: Desk) -> None:
    """The news of its end may come before its last words."""
    desk.join()
    desk.handle(rl.PeerLost(peer=rl.Address("replica-1"), incarnation=1, reason="ended"))
    desk.finish("replica-1")
    desk.now += 0.1
    assert desk.handle(rl.TimerFired(name="supervisor:lost:replica-1")) == []
    assert desk.told == []


def test_a_fault_of_the_users_code_ends_the_job(desk: Desk) -> None:
    desk.train()
    actions = desk.hear("replica-1", wire.Failed(error="the loss is NaN", culprit_is_job=True))
    assert rl.Terminate(name=rl.Address("replica-1")) in actions
    assert sent(actions, wire.Stop) == ["replica-0"]
    actions = desk.finish("replica-0")
    assert set(sent(actions, wire.SaveCheckpoint)) == {"shard-0", "shard-1"}
    assert sent(actions, wire.Evaluate) == []
    actions = desk.saved("shard-0", "shard-1")
    assert set(sent(actions, wire.Stop)) == {"shard-0", "shard-1", "evaluator"}
    actions = desk.finish("shard-0", "shard-1", "evaluator")
    assert actions[-1] == rl.Exit(error="replica 1: the loss is NaN")


def test_a_shard_that_no_restart_restores_ends_the_job_at_once(desk: Desk) -> None:
    """Two swapped folders of checkpoints took fifteen restarts, and a minute, until the end."""
    desk.train()
    wrong = "RestoreError: snapshot '00001' of shard 1 cannot be restored: index is '0', not '1'"
    failed = wire.Failed(error=wrong, culprit_is_job=False, restart_helps=False)
    actions = desk.hear("shard-1", failed)
    assert not [action for action in actions if isinstance(action, rl.Launch)]
    assert desk.supervisor.shutdown.error == f"shard 1 failed: {wrong}"


def test_text_of_others_is_no_command_to_a_terminal(desk: Desk) -> None:
    """A replica of another machine could clear the screen, and set its title."""
    desk.join()
    desk.beat("replica-0", "\x1b[2Jbusy\x9b")
    error = "line 1\n\tline 2 \x1b]0;mine\x07 \x1b[31m"
    desk.hear("replica-1", wire.Failed(error=error, culprit_is_job=True))
    view = desk.view
    shown = [*desk.told, str(desk.supervisor.shutdown.error), *(r.state for r in view.roles)]
    assert any("line 1\n\tline 2 ?]0;mine? ?[31m" in text for text in shown)
    assert "?[2Jbusy?" in shown
    assert not any(set("\x1b\x07\x9b") & set(text) for text in shown)


def test_a_replica_left_out_is_reported_with_how_long_it_lasted(desk: Desk) -> None:
    desk.train()
    for _ in range(4):
        desk.beat("replica-1", "computing")
        desk.pass_time(5.0, beats=EVERYBODY)
        desk.restart("replica-1", "ended with status 1")
    assert desk.told[-1] == (
        "replica 1 ended with status 1; left out after 3 restarts, none of which lasted 30 s"
    )


def test_a_stable_incarnation_resets_the_restart_count(desk: Desk) -> None:
    desk.train()
    names = ("replica-1", "shard-0", "evaluator")
    for _ in range(10):
        desk.pass_time(31.0, beats=EVERYBODY)
        for name in 2 * names:
            desk.restart(name)
    restarts = {role.name: role.restarts for role in desk.view.roles}
    assert all(restarts[name] == 20 for name in names)
    assert phase(desk) == "training"
    assert not any("left out" in text for text in desk.told)


def test_an_incarnation_that_never_joined_resets_nothing(desk: Desk) -> None:
    desk.train()
    others = [name for name in EVERYBODY if name != "replica-1"]
    for _ in range(4):
        for _ in range(40):
            desk.beat("replica-1", "building")
            desk.pass_time(1.0, beats=others)
        desk.restart("replica-1")
    assert "left out after 3 restarts" in desk.told[-1]


def test_a_shard_that_cannot_be_kept_alive_ends_the_job(desk: Desk) -> None:
    desk.train()
    for _ in range(6):
        desk.restart("shard-0", "ended with status 1")
    assert desk.view.phase == "stopping"
    assert desk.supervisor.shutdown.error == (
        "shard 0 cannot be kept alive after 5 restarts, none of which lasted 30 s: it "
        "ended with status 1"
    )


# ------------------------------------------------------------------------------ ends


def end(desk: Desk) -> None:
    """Bring a job to the point where its replicas have been told to stop."""
    desk.join()
    for step in range(1, 10_001, 5000):
        desk.progress("replica-0", step)
    assert set(sent(desk.progress("replica-1", 10_000), wire.Stop)) == {"replica-0", "replica-1"}


def test_the_end_waits_for_every_answer(desk: Desk) -> None:
    end(desk)
    assert sent(desk.finish("replica-0"), wire.SaveCheckpoint) == []
    actions = desk.finish("replica-1")
    assert sent(actions, wire.Evaluate) == ["evaluator"]
    assert sent(actions, wire.SaveCheckpoint) == ["shard-0", "shard-1"]
    assert sent(desk.measured(), wire.Stop) == []
    assert sent(desk.saved("shard-0"), wire.Stop) == []
    assert sent(desk.saved("shard-1"), wire.Stop) == ["shard-0", "shard-1", "evaluator"]


def test_a_replica_that_never_ends_is_told_again_then_named_and_ended_by_force(desk: Desk) -> None:
    end(desk)
    assert sent(desk.beat("replica-0"), wire.Stop) == ["replica-0"]
    desk.finish("replica-0")
    actions = desk.pass_time(121.0, beats=EVERYBODY)
    assert rl.Terminate(name=rl.Address("replica-1")) in actions
    assert sent(actions, wire.SaveCheckpoint) != []
    assert "replica 1 takes too long for its last step and push: killed" in desk.told


def test_a_shard_that_dies_in_the_end_comes_back_and_saves(desk: Desk) -> None:
    end(desk)
    desk.finish("replica-0", "replica-1")
    desk.saved("shard-0")
    desk.measured()
    assert rl.Launch(name=rl.Address("shard-1"), incarnation=2) in desk.die("shard-1")
    desk.join("shard-1")
    actions = desk.pass_time(3.0, beats=("shard-0", "shard-1", "evaluator"))
    assert set(sent(actions, wire.SaveCheckpoint)) == {"shard-1"}
    assert sent(desk.saved("shard-1"), wire.Stop) == ["shard-0", "shard-1", "evaluator"]


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_whose_end_is_not_saved_has_failed(desk: Desk, *, answers: bool) -> None:
    end(desk)
    desk.finish("replica-0", "replica-1")
    desk.measured()
    desk.saved("shard-0")
    if answers:
        desk.saved("shard-1", error="no space left")
        assert desk.supervisor.shutdown.error is None  # asked again: a full disk may heal
        desk.pass_time(11.0, beats=EVERYBODY)
        desk.saved("shard-1", error="no space left")
        why = "no space left"
    else:
        desk.pass_time(1801.0, beats=EVERYBODY)
        why = "it did not answer in time"
    assert desk.supervisor.shutdown.error == (
        f"the last checkpoint of shard 1 could not be saved: {why}"
    )


def test_a_job_without_shards_begins_at_once_and_saves_nothing() -> None:
    desk = a_job(ROSTER[2:])
    actions = desk.join("replica-0")
    assert sent(actions, wire.Peers) == sent(actions, wire.StartTraining) == ["replica-0"]
    desk.join("replica-1", "evaluator")
    desk.progress()
    assert sent(desk.pass_time(31.0, beats=EVERYBODY[2:]), wire.SaveCheckpoint) == []
    desk.finish("replica-0")
    actions = desk.finish("replica-1")
    ((_, ask),) = letters(actions, wire.Evaluate)
    assert sent(actions, wire.SaveCheckpoint) == []
    assert sent(desk.measured(request=ask.request), wire.Stop) == ["evaluator"]
    assert desk.finish("evaluator")[-1] == rl.Exit(error=None)


# --------------------------------------------------------------------------- serving


@pytest.fixture
def server() -> Desk:
    desk = Desk(SupervisorConfig(roster=ROSTER[:2], stop=None, admits_guests=True))
    desk.join("shard-0", "shard-1")
    return desk


def test_a_standing_server_admits_guests_and_forgets_those_that_are_done(server: Desk) -> None:
    assert server.supervisor.status()[0] == "training"
    for name in ("worker-1", "worker-2"):
        assert set(sent(server.join(name), wire.Peers)) == {"shard-0", "shard-1", name}
        assert sent(server.beat(name), wire.HeartbeatAck) == [name]
    server.hear("worker-1", wire.Failed(error="its loss is NaN", culprit_is_job=True))
    assert server.view.phase == "training"
    server.finish("worker-2")
    assert "worker-2" not in [role.name for role in server.view.roles]


def test_a_silent_guest_is_neither_ended_nor_restarted(server: Desk) -> None:
    server.join("worker-1")
    actions = server.pass_time(60.0, beats=("shard-0", "shard-1"))
    assert not [a for a in actions if isinstance(a, rl.Launch | rl.Terminate)]
    assert server.told == ["worker 1 silent for 10.2 s: going on without it"]
    actions = server.beat("worker-1")
    assert set(sent(actions, wire.Peers)) >= {"shard-0", "shard-1"}  # it is there again


def test_a_guest_that_was_killed_is_gone_as_soon_as_nothing_listens_there(server: Desk) -> None:
    """Regression: rounds and SSP waited for it for 10 seconds, as for one that is silent."""
    actions = server.join("worker-1")
    (connect,) = [action for action in actions if isinstance(action, rl.Connect)]
    assert connect.watched
    server.incarnations["worker-1"] = 1
    reason = "nothing listens there any more"
    actions = server.die("worker-1", reason)
    told = {a.receiver: a.message for a in actions if isinstance(a, rl.Send)}
    assert {"shard-0", "shard-1"} <= told.keys()
    assert all("worker-1" not in repr(message) for message in told.values())
    assert server.told == [f"worker 1 {reason}: going on without it"]
    server.die("worker-1", reason)  # once more: it is known
    server.pass_time(60.0, beats=("shard-0", "shard-1"))
    assert len(server.told) == 1
    assert set(sent(server.beat("worker-1"), wire.Peers)) >= {"shard-0", "shard-1"}


def test_a_guest_that_comes_again_is_a_new_incarnation(server: Desk) -> None:
    server.join("worker-1")
    join = wire.Join(endpoint="elsewhere", host="h", pid=2)
    actions = server.hear("worker-1", join, incarnation=5)
    connects = [action for action in actions if isinstance(action, rl.Connect)]
    assert [(c.endpoint, c.incarnation) for c in connects] == [("elsewhere", 5)]
    assert server.beat("worker-1") == []  # of the former life
    for name, endpoint in (("worker-\N{SNOWMAN}", "at"), ("worker-2", "at-\N{SNOWMAN}")):
        join = wire.Join(endpoint=endpoint, host="h", pid=1)
        with pytest.raises(RemoteProtocolError, match=r"is not a member|worker-2 joins from 'at-"):
            server.hear(name, join)


def test_a_late_guest_is_admitted_after_many(server: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that had seen 4,096 loops let in no other until its end."""
    monkeypatch.setattr(membership, "N_GUESTS_MAX", 2)
    shards = ("shard-0", "shard-1")
    for name in ("worker-1", "worker-2"):
        server.join(name)
        server.pass_time(11.0, beats=shards)
    assert sent(server.join("worker-3"), wire.Peers) == ["shard-0", "shard-1", "worker-3"]
    server.beat("worker-2")  # is back
    with pytest.raises(RemoteProtocolError, match="is not a member"):
        server.join("worker-4")
    names = [role.name for role in server.view.roles]
    assert names == ["shard-0", "shard-1", "worker-2", "worker-3"]


def test_as_many_guests_as_there_may_be_fit_into_one_message() -> None:
    """By 700 of them, with long names, one worker ended the server."""
    n = membership.N_GUESTS_MAX
    last = (1 << 63) - 1
    entry = wire.PeerEntry(name="n" * 128, incarnation=last, endpoint="e" * 128, host="h" * 128)
    message = wire.Peers(entries=(entry,) * n)
    Codec(run="t" * 128).encode(message, sender="s" * 128, incarnation=last)


def test_told_to_stop_a_server_saves_in_its_own_time(server: Desk) -> None:
    actions = server.hear(rl.USER, wire.Stop(reason="closed"))
    assert sent(actions, wire.SaveCheckpoint) == ["shard-0", "shard-1"]
    assert all(save.last for _, save in letters(actions, wire.SaveCheckpoint))
    assert not server.supervisor.shutdown.interrupted
    actions = server.saved("shard-0", "shard-1")
    assert server.finish("shard-0", "shard-1")[-1] == rl.Exit(error=None)


# ----------------------------------------------------------------------- earlier lives


def test_a_resumed_job_goes_on_counting() -> None:
    last = JobView(
        seconds=100.0,
        training_seconds=90.0,
        step=500,
        pushes_lost=20,
        pushes_refused=3,
        bytes_in=1000,
        bytes_out=2000,
        roles=(RoleView(name="replica-1", state="done", restarts=2),),
        best_metric=0.9,
        best_metric_seconds=80.0,
    )
    before = PreviousTotals(
        view=last,
        samples={"replica-0": 3000, "replica-1": 2000},
        clocks={"shard-0": 250, "shard-1": 240},
    )
    desk = a_job(
        stop=StopTable(samples=10_000),
        first_incarnation=4,
        first_label=8,
        before=before,
        snapshot_every=1.0,
    )
    assert rl.Launch(name=rl.Address("shard-0"), incarnation=4) in desk.start
    desk.join()
    assert phase(desk) == "resuming"  # it was "training 74 %" at once
    desk.beat("replica-1", "computing")
    assert phase(desk) == "training"
    desk.now = 10.0
    view = desk.view
    assert (view.seconds, view.training_seconds) == (110.0, 90.0)
    assert (view.samples, view.step) == (5000, 500)
    assert view.best_metric == 0.9
    assert (view.pushes_applied, view.pushes_lost, view.pushes_refused) == (240, 20, 3)
    assert (view.bytes_in, view.bytes_out) == (1000, 2000)
    assert {role.name: role.restarts for role in view.roles}["replica-1"] == 2
    desk.beat("shard-0", clock=252.0, pushes_applied=2.0)
    desk.beat("shard-1", clock=231.0, pushes_applied=1.0)  # an older snapshot did
    assert pushes(desk) == (231, 30)
    desk.progress("replica-0", step=301)
    assert desk.view.samples == 5010
    actions = desk.pass_time(1.5, beats=EVERYBODY)
    assert {save.label for _, save in letters(actions, wire.SaveCheckpoint)} == {"00008"}


def test_figures_of_the_exchange_are_of_all_sessions() -> None:
    """A resumed run had lost them from its summary."""
    waited = {"seconds_waited_for_replica-0": 9.0, "seconds_waited_for_replica-1": 1.0}
    last = JobView(
        step=300,
        pushes_applied=100,
        staleness_mean=2.0,
        staleness_p95=5.0,
        staleness_max=6.0,
        figures={"clock_gap": 3.0, "clock_gap_max": 4.0, "seconds_waited": 12.0, **waited}
        | {"steps_per_push": 3.0},
    )
    clocks = {"shard-0": 100, "shard-1": 100}
    desk = a_job(fields=("steps_per_push",), before=PreviousTotals(view=last, clocks=clocks))
    desk.join()
    kept = {name: n for name, n in last.figures.items() if name != "clock_gap"}
    assert desk.view.figures == kept
    assert (desk.view.staleness_mean, desk.view.staleness_p95) == (2.0, 5.0)
    counters = {"clock_gap": 1.0, "clock_gap_max": 2.0, "waits_replica-1": 2.0}
    desk.progress("replica-0", step=100)
    desk.beat("replica-0", "busy", pushes=20.0, gradients_pushed=100.0, **counters)
    for name in clocks:
        desk.beat(name, pushes_applied=20.0, staleness_mean=8.0, staleness_p95=9.0)
    assert desk.view.figures == {
        "steps_per_push": 400 / 120,
        "clock_gap": 1.0,
        "clock_gap_max": 4.0,
        "seconds_waited": 14.0,
        "seconds_waited_for_replica-0": 9.0,
        "seconds_waited_for_replica-1": 3.0,
    }
    view = desk.view
    assert view.staleness_mean == (100 * 2.0 + 20 * 8.0) / 120
    assert (view.staleness_p95, view.staleness_max) == (9.0, 6.0)


def test_a_period_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"report_every is 0\.0"):
        SupervisorConfig(roster=ROSTER, stop=None, report_every=0.0)


def test_what_a_restarted_shard_found_damaged_is_reported_once(desk: Desk) -> None:
    """It stood in the shard's own log, and the screen said nothing."""
    desk.join()
    warning = "snapshot 00005 is damaged and passed over"
    found = wire.Join(endpoint="elsewhere", host="h", pid=2, warnings=(warning,))
    desk.hear("shard-1", found)  # of a first life it was told beforehand
    assert not [text for text in desk.told if warning in text]
    desk.die("shard-1")
    for _ in range(2):
        desk.hear("shard-1", found)
    assert [text for text in desk.told if warning in text] == [f"shard 1: {warning}"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_counters_that_cannot_be_counted_with_are_left_out(value: float) -> None:
    """`int` of a shard's clock raised in the supervisor, and ended the job."""
    desk = a_job()
    desk.train()
    names = ("clock", "pushes", "pushes_restored", "pushes_applied", "staleness_mean")
    for name in names:
        counters = dict.fromkeys(names, 3.0) | {name: value}
        desk.hear("shard-0", wire.Heartbeat(state="busy", counters=counters))
    counters = {"samples": value, "bytes_out": value, "ranges": value, "samples_allowed": value}
    desk.hear("replica-0", wire.Heartbeat(state="busy", counters=counters))
    desk.hear("replica-1", wire.Finished(counters=counters))
    desk.pass_time(1.0, beats=desk.names)
    found = msgspec.json.decode(msgspec.json.encode(desk.view), type=JobView)
    assert found.bytes_out == 0
    assert found.pushes_applied == 3


def test_the_sum_of_steps_stays_a_number_that_files_can_hold() -> None:
    """Reports that went up and down added the largest step each time, until none was writable."""
    desk = a_job()
    desk.train()
    for _ in range(3000):
        desk.progress("replica-0", step=1 << 49)
        desk.progress("replica-0", step=0)
    assert desk.view.step == 1 << 49
    msgspec.json.encode(desk.view)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300])
def test_seconds_that_cannot_be_are_no_message(seconds: float) -> None:
    """Training that began at NaN never ended by time."""
    message = wire.Progress(
        step=1, samples=4, loss=1.0, seconds_computing=seconds, seconds_waiting=0.0
    )
    codec = Codec(run="r")
    with pytest.raises(RemoteProtocolError, match="unreadable header"):
        codec.decode(codec.encode(message, sender="replica-0", incarnation=1))


def test_of_replicas_with_few_heartbeats_a_longer_silence_is_usual() -> None:
    """Of 5,000 replicas, each would be silent for 3 s between two heartbeats."""
    desk = a_job(heartbeat_seconds=heartbeat_seconds("replica-0", 1, 5_000))
    desk.train()
    others = [name for name in desk.names if name not in {"replica-1", "shard-1"}]
    desk.pass_time(9.5, beats=others)
    assert desk.told == ["shard 1 silent for 3.2 s; counts as dead after 10 s"]
    desk.beat("shard-1")
    desk.pass_time(5.0, beats=[*others, "shard-1"])
    assert desk.told[-1] == "replica 1 silent for 10.2 s; counts as dead after 20 s"
    assert [role.silent_seconds for role in desk.view.roles if role.name in others] == [
        3.0 if name.startswith("shard") else 10.0 for name in others
    ]
