"""A shard under a coordinator: commands in, answers out."""

from collections.abc import Sequence

import numpy as np
import pytest

from distbelief.core.errors import LocalProtocolError
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.slices import NOTHING
from distbelief.protocol import (
    BeginEvaluation,
    BeginSeries,
    Checkpoint,
    CheckpointSaved,
    CommandDone,
    Commit,
    Execute,
    FinishEvaluation,
    GrantedChunk,
    Publish,
    Restore,
    SaveCheckpoint,
    Savepoint,
    ShardCommand,
    Stop,
    Task,
)
from distbelief.protocol.role import (
    SUPERVISOR,
    Action,
    Address,
    Computed,
    Event,
    Exit,
    PeerLost,
    Received,
    Send,
    Snapshot,
)
from distbelief.protocol.vector_commands import Axpy, Dot, Fill
from tests.distbelief.parameter_server.shard_copies import A, OneCopy


COORDINATOR = Address("coordinator")
LAYOUT = Layout.of([TensorSpec(name="w", shape=(64,))], n_shards=1, dtype="float64")


class Bench(OneCopy):
    """One shard, whose work is done at once, or when the test says so."""

    def __init__(self, *, restored: Snapshot | None = None) -> None:
        super().__init__(
            A,
            layout=LAYOUT,
            initialise=lambda: np.ones(LAYOUT.shard_size(0)),
            restored=restored,
            life=1 if restored is None else 2,
            is_replicated=False,
        )
        self.holds = False

    def happen(self, event: Event) -> list[Action]:
        """Let it happen, and the work that it calls for; return all actions."""
        actions = self._note(self.shard.handle(event, self.now))
        return actions if self.holds else self.work_all(actions)

    def command(
        self, number: int, task: Task, *, series: int = 1, savepoint: Savepoint | None = None
    ) -> CommandDone | None:
        """Give a command; return the answer."""
        message = ShardCommand(series=series, number=number, task=task, savepoint=savepoint)
        answers = answers_in(
            self.happen(Received(sender=COORDINATOR, incarnation=1, message=message))
        )
        assert len(answers) <= 1
        return answers[0] if answers else None

    def answer(
        self, number: int, task: Task, *, series: int = 1, savepoint: Savepoint | None = None
    ) -> CommandDone:
        answer = self.command(number, task, series=series, savepoint=savepoint)
        assert answer is not None
        return answer

    def error(self, number: int, task: Task) -> str:
        error = self.answer(number, task).error
        assert error is not None
        return error

    def begun(self) -> "Bench":
        self.command(1, BeginSeries())
        self.command(2, Restore(savepoint=0, whole=False))
        return self


def answers_in(actions: Sequence[Action]) -> list[CommandDone]:
    return [
        action.message
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, CommandDone)
    ]


def drives(bench: Bench) -> bool:
    return bench.shard._commands.is_driven


MEASURE = Execute(commands=(Dot(x="parameters", y="parameters"),))
DOUBLE = Execute(commands=(Axpy(target="parameters", a=1.0, x="parameters"),))


def test_a_repeated_command_is_answered_again_and_not_executed_again() -> None:
    bench = Bench().begun()
    first, again = bench.command(3, DOUBLE), bench.command(3, DOUBLE)
    assert first == again
    assert bench.command(2, MEASURE) is None  # an older one
    assert bench.command(5, DOUBLE) is None  # one that came before its predecessor
    measured = bench.answer(4, MEASURE)
    assert measured.scalars == (4.0 * 64,)


def test_a_running_command_is_answered_with_the_last_answer() -> None:
    bench = Bench().begun()
    bench.holds = True
    assert bench.command(3, DOUBLE) is None
    alive = bench.answer(3, DOUBLE)
    assert alive.number == 2
    (answer,) = answers_in(bench.work())
    assert answer.number == 3


def test_a_command_waits_for_running_work() -> None:
    bench = Bench()
    bench.holds = True
    bench.happen(Received(sender=SUPERVISOR, incarnation=1, message=SaveCheckpoint(label="1")))
    assert bench.command(1, BeginSeries()) is None
    alive = bench.answer(1, BeginSeries())
    assert alive.number == 0
    actions = bench.work_all()
    assert any(isinstance(a, Send) and isinstance(a.message, CheckpointSaved) for a in actions)
    (answer,) = answers_in(actions)
    assert answer.number == 1
    assert [record.savepoint for record in answer.savepoints] == [0]


def test_an_older_series_is_answered_with_the_current_one() -> None:
    bench = Bench().begun()
    bench.command(1, BeginSeries(), series=5)
    answer = bench.answer(3, DOUBLE)
    assert (answer.series, answer.number) == (5, 1)


def test_no_command_runs_before_begin_series() -> None:
    answer = Bench().answer(4, DOUBLE)
    assert (answer.series, answer.number) == (0, 0)


def test_what_another_series_began_is_not_answered() -> None:
    bench = Bench().begun()
    bench.holds = True
    bench.command(3, DOUBLE)
    assert bench.command(1, BeginSeries(), series=2) is None
    (answer,) = answers_in(bench.work_all())
    assert (answer.series, answer.number) == (2, 1)


def test_a_command_that_fails_changes_nothing() -> None:
    bench = Bench().begun()
    bad = Execute(commands=(Fill(target="parameters", a=5.0), Dot(x="a", y="a")))
    assert "needs vector 'a'" in bench.error(3, bad)
    measured = bench.answer(4, MEASURE)
    assert measured.scalars == (64.0,)


def test_an_evaluation_of_nothing_is_nothing() -> None:
    """No examples say that the loss is not a number."""
    bench = Bench().begun()
    opened = bench.answer(
        3,
        BeginEvaluation(
            point="trial",
            before=(Fill(target="trial", a=3.0),),
            first_commit_token=1,
            n_staged_max=2,
        ),
    )
    assert opened.clock == 1
    assert bench.shard.values.vector[0] == 3.0
    assert bench.shard.status()[1]["commands"] == 3.0
    missing = bench.answer(
        4, Commit(chunks=(GrantedChunk(chunk_index=0, commit_token=1),), void=(2,))
    )
    assert missing.error is not None
    assert "0 of 4 examples" in bench.error(
        5, FinishEvaluation(gradient="g", n_examples=4, after=())
    )
    after = (Dot(x="g", y="g"),)
    sealed = bench.answer(6, FinishEvaluation(gradient="g", n_examples=0, after=after))
    assert np.isnan(sealed.scalars[0])


def test_what_is_not_there_cannot_be_published() -> None:
    bench = Bench().begun()
    assert "cannot publish vector 'trial'" in bench.error(3, Publish(point="trial"))


def test_publish_ends_the_coordinators_control() -> None:
    bench = Bench().begun()
    assert drives(bench)
    bench.command(3, DOUBLE)
    bench.command(4, Publish(point="parameters"))
    assert not drives(bench)
    assert bench.shard.values.vector[0] == 2.0


def test_a_savepoint_is_saved_with_its_vectors_and_restored() -> None:
    bench = Bench().begun()
    bench.command(3, DOUBLE)
    savepoint = Savepoint(number=9, vectors=("parameters",))
    kept = bench.answer(4, Checkpoint(label="00001", savepoint=9), savepoint=savepoint)
    assert kept.error is None
    (snapshot,) = bench.snapshots
    assert snapshot.arrays["values"][0] == 2.0  # the parameters, not a trial point
    other = Bench(restored=snapshot)
    attached = other.answer(1, BeginSeries(), series=2)
    held = [(9, True), (0, False), (9, False)]
    assert [(r.savepoint, r.whole) for r in attached.savepoints] == held
    other.command(2, Restore(savepoint=9, whole=True), series=2)
    measured = other.answer(3, MEASURE, series=2)
    assert measured.scalars == (4.0 * 64,)


def test_a_failed_save_of_a_savepoint_is_reported() -> None:
    bench = Bench().begun()
    bench.disk_error = "no space"
    savepoint = Savepoint(number=9, vectors=("parameters",))
    kept = bench.answer(3, Checkpoint(label="00001", savepoint=9), savepoint=savepoint)
    assert kept.error == "no space"
    bench.error(4, Checkpoint(label="00002", savepoint=8))
    begun = bench.answer(1, BeginSeries(), series=2)
    assert [(one.savepoint, one.whole) for one in begun.savepoints] == [
        (9, True),
        (0, False),
    ]  # not on disk


def test_a_push_outside_any_evaluation_is_accepted_and_dropped() -> None:
    bench = Bench()
    assert "chunks_refused" not in bench.shard.status()[1]
    commands = bench.begun().shard._commands
    work, _ = commands.stage_work(np.zeros(64), token=5, n_examples=1, shard_slice=NOTHING)
    work()
    assert bench.shard.status()[1]["chunks_refused"] == 1.0
    assert bench.shard.status()[1]["sum_vectors"] == 0.0


def test_no_command_starts_after_stop() -> None:
    bench = Bench().begun()
    bench.happen(Received(sender=SUPERVISOR, incarnation=1, message=Stop(reason="")))
    assert bench.command(3, DOUBLE) is None


def test_without_a_supervisor_a_driven_shard_saves_no_point_on_trial() -> None:
    """Only snapshots that the coordinator has asked all shards for fit together."""
    bench = Bench().begun()
    bench.command(3, DOUBLE)
    gone = PeerLost(peer=SUPERVISOR, incarnation=0, reason="gone", for_good=True)
    assert bench.happen(gone)[-1] == Exit(error="gone")
    assert bench.snapshots == []


def test_answers_of_nobodys_work_are_a_bug() -> None:
    with pytest.raises((AssertionError, LocalProtocolError)):
        Bench().happen(Computed(name="command", result=None))
