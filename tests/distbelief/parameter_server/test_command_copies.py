"""Two copies of a shard under a coordinator: the backup repeats what the primary executed."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from distbelief.core.errors import DistBeliefError, RemoteProtocolError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.protocol import (
    AddRows,
    BackupInSync,
    BeginEvaluation,
    BeginSeries,
    Checkpoint,
    CommandDone,
    Commit,
    CommitRound,
    Execute,
    FinishEvaluation,
    GrantedChunk,
    Publish,
    Restore,
    RowsAdded,
    RowsTaken,
    SaveCheckpoint,
    Savepoint,
    ShardCommand,
    TakeRows,
    Task,
    push_fetch as pf,
    replication as rp,
)
from distbelief.protocol.role import SUPERVISOR, Action, Address, Received, Send, Snapshot
from distbelief.protocol.vector_commands import Axpy, Dot, Fill
from tests.distbelief.parameter_server.pair import CLIENT, sent
from tests.distbelief.parameter_server.shard_copies import A, B, OneCopy, kinds, only


COORDINATOR = Address("coordinator")
LAYOUT = Layout.of([TensorSpec(name="w", shape=(64,))], n_shards=1, dtype="float64")
COMPUTE = Execute(
    commands=(Fill(target="d", a=0.1), Axpy(target="d", a=0.3, x="parameters"), Dot(x="d", y="d"))
)


class Pair:
    """A primary and its backup; messages between them arrive at once, unless `cut`."""

    def __init__(self, restored: Snapshot | None = None, *, term: int = 2) -> None:
        self.restored, self.term = restored, term
        self.one = self.begin(A)
        self.two = self.begin(B)
        self.primary, self.backup = self.one, self.two
        self.cut = self.is_alone = False
        self.told: list[Send] = []  # to others
        self.settle(self.primary, self.primary.lead(term))

    def begin(self, name: Address) -> OneCopy:
        ones, restored = np.ones(LAYOUT.shard_size(0)), self.restored
        return OneCopy(name, layout=LAYOUT, initialise=lambda: ones, restored=restored)

    def settle(self, copy: OneCopy, actions: Sequence[Action]) -> None:
        """Do the work that these actions call for, and deliver what the copies send."""
        for action in copy.work_all(actions):
            if not isinstance(action, Send):
                continue
            other = {A: self.one, B: self.two}.get(action.receiver)
            if other is None:
                self.told.append(action)
            elif not self.cut:
                answer = other.receive(action.message, copy.name, life=copy.life)
                self.settle(other, answer)

    def join(self) -> None:
        """Let the backup join."""
        self.settle(self.primary, self.primary.lead(self.term + 1, self.backup.name))

    def take_over(self) -> None:
        """Let the backup take over; the former primary is dead."""
        self.primary, self.is_alone = self.backup, True
        self.settle(self.primary, self.primary.lead(self.term + 2))

    def command(
        self, number: int, task: Task, *, savepoint: Savepoint | None = None
    ) -> CommandDone | None:
        """Send a command to both copies; return the answer."""
        message = ShardCommand(series=1, number=number, task=task, savepoint=savepoint)
        self.told.clear()
        for copy in [self.primary] if self.is_alone else [self.primary, self.backup]:
            event = Received(sender=COORDINATOR, incarnation=1, message=message)
            self.settle(copy, copy._note(copy.shard.handle(event, copy.now)))
        answers = sent(self.told, CommandDone)
        assert len(answers) <= 1
        return answers[0] if answers else None

    def done(self, number: int, task: Task, *, savepoint: Savepoint | None = None) -> CommandDone:
        done = self.command(number, task, savepoint=savepoint)
        assert done is not None
        return done

    def begun(self) -> "Pair":
        self.done(1, BeginSeries())
        self.done(2, Restore(savepoint=0, whole=False))
        return self

    def push(self, sequence: int, token: int, value: float) -> None:
        """Push a chunk gradient to the primary."""
        block = pf.PushBlock(
            sequence=sequence, term=2, block_index=0, values=np.full(LAYOUT.shard_size(0), value)
        )
        push = pf.Push(
            sequence=sequence, term=2, fetched_clock=0, n_gradients=1, samples=5, commit_token=token
        )
        self.settle(self.primary, self.primary.receive(block, CLIENT))
        self.settle(self.primary, self.primary.receive(push, CLIENT))


def vectors(copy: OneCopy) -> dict[str, bytes]:
    found = copy.shard._commands._vector_store.export()
    return {name: vector.tobytes() for name, vector in found.items()}


def open_evaluation(pair: Pair, number: int) -> None:
    begin = BeginEvaluation(point="parameters", before=(), first_commit_token=1, n_staged_max=9)
    assert pair.done(number, begin).clock == 1


def finish(pair: Pair, number: int) -> CommandDone:
    after = (Dot(x="gradient", y="gradient"),)
    return pair.done(number, FinishEvaluation(gradient="gradient", n_examples=5, after=after))


def test_a_command_is_answered_once_the_backup_has_executed_it() -> None:
    pair = Pair().begun()
    pair.join()
    pair.cut = True
    assert pair.command(3, COMPUTE) is None
    assert pair.command(3, COMPUTE).number == 2  # type: ignore[union-attr] # a sign of life
    pair.cut = False
    pair.told.clear()
    pair.settle(pair.primary, pair.primary.wait(0.2))
    (done,) = sent(pair.told, CommandDone)
    assert (done.number, done.term) == (3, 2)
    assert vectors(pair.primary) == vectors(pair.backup) != {}


def test_a_primary_alone_answers_at_once() -> None:
    pair = Pair().begun()
    pair.cut = True
    pair.settle(pair.primary, pair.primary.lead(3, B))
    assert pair.done(3, COMPUTE).number == 3
    pair.cut = False
    pair.settle(pair.primary, pair.primary.wait(0.2))  # the backup joins with the vectors
    assert vectors(pair.primary) == vectors(pair.backup) != {}


def test_a_primary_that_goes_on_alone_answers_what_it_held() -> None:
    pair = Pair().begun()
    pair.join()
    pair.cut = True
    assert pair.command(3, COMPUTE) is None
    pair.settle(pair.primary, pair.primary.lead(4))
    assert [done.number for done in sent(pair.told, CommandDone)] == [3]


def test_a_backup_ignores_commands_and_a_coordinators_request_to_save() -> None:
    pair = Pair().begun()
    pair.join()
    command = ShardCommand(series=1, number=3, task=COMPUTE)
    assert pair.backup.receive(command, COORDINATOR) == []
    assert pair.backup.receive(SaveCheckpoint(label="1"), COORDINATOR) == []
    assert kinds(pair.backup.receive(SaveCheckpoint(label="1")), SUPERVISOR) == ["CheckpointSaved"]


def test_a_new_primary_goes_on_with_the_series_and_executes_no_command_twice() -> None:
    pair = Pair()
    pair.join()
    pair.begun()
    before = pair.done(3, COMPUTE)
    pair.take_over()
    again = pair.done(3, COMPUTE)
    assert (again.number, again.scalars, again.term) == (3, before.scalars, 4)
    more = Execute(commands=(Axpy(target="d", a=1.0, x="d"), Dot(x="d", y="d")))
    assert pair.done(4, more).scalars == pytest.approx((4 * before.scalars[0],))


@pytest.mark.parametrize("joins_at", [0, 1, 2, 3])
def test_staged_chunks_are_on_both_copies(joins_at: int) -> None:
    """Before the evaluation, with a chunk staged, with one committed, before the end."""
    pair = Pair().begun()
    pair.settle(pair.primary, pair.primary.hello())
    steps: list[Callable[[], object]] = [
        lambda: open_evaluation(pair, 3),
        lambda: pair.push(1, token=7, value=2.5),
        lambda: pair.done(
            4, Commit(chunks=(GrantedChunk(chunk_index=0, commit_token=7),), void=())
        ),
    ]
    for n, step in enumerate(steps):
        if n == joins_at:
            pair.join()
        step()
    if joins_at == len(steps):
        pair.join()
    pair.take_over()
    done = finish(pair, 5)
    assert (done.n_chunks, done.n_examples, done.digest) == (1, 5, 7)
    assert done.scalars == (64 * 0.25,)


def test_a_chunk_is_acknowledged_once_both_copies_hold_it() -> None:
    pair = Pair().begun()
    pair.settle(pair.primary, pair.primary.hello())
    open_evaluation(pair, 3)
    pair.join()
    pair.told.clear()
    pair.cut = True
    pair.push(1, token=7, value=2.5)
    assert not sent(pair.told, pf.PushApplied)
    pair.cut = False
    pair.settle(pair.primary, pair.primary.wait(0.2))
    assert only(pair.told, pf.PushApplied).sequence == 1


def test_savepoints_are_on_both_copies_and_on_disk_from_either() -> None:
    pair = Pair().begun()
    pair.done(3, COMPUTE)
    names = ("d", "parameters")
    pair.done(4, Execute(commands=()), savepoint=Savepoint(number=9, vectors=names))
    pair.join()
    pair.done(5, Checkpoint(label="00001", savepoint=9))
    assert [snapshot.label for snapshot in pair.primary.snapshots] == ["00001"]
    assert not pair.backup.snapshots  # the primary's file is the shard's
    on_disk = pair.backup.shard._commands._savepoints.records()
    assert {(one.savepoint, one.whole) for one in on_disk} >= {(9, True), (9, False)}
    pair.take_over()
    assert pair.done(6, Checkpoint(label="00002", savepoint=9)).error is None
    saved = pair.primary.snapshots[-1].arrays
    assert {"vector.d", "vector.parameters"} <= saved.keys()


def test_a_resumed_run_has_its_savepoint_on_both_copies_before_the_first_command() -> None:
    pair = Pair().begun()
    pair.done(3, Execute(commands=()), savepoint=Savepoint(number=9, vectors=("parameters",)))
    pair.done(4, Checkpoint(label="00001", savepoint=9))
    resumed = Pair(pair.primary.snapshots[-1], term=7)
    resumed.join()
    resumed.take_over()
    held = resumed.done(1, BeginSeries()).savepoints
    assert {(one.savepoint, one.whole) for one in held} >= {(9, True), (9, False)}
    assert resumed.done(2, Restore(savepoint=9, whole=True)).error is None


def test_a_checkpoint_that_fails_fails_on_both_copies() -> None:
    pair = Pair().begun()
    pair.join()
    pair.done(3, Execute(commands=()), savepoint=Savepoint(number=9, vectors=("parameters",)))
    pair.primary.disk_error = "disk full"
    assert pair.done(4, Checkpoint(label="00001", savepoint=9)).error == "disk full"
    pair.take_over()
    assert pair.done(4, Checkpoint(label="00001", savepoint=9)).error == "disk full"
    whole = [one.whole for one in pair.primary.shard._commands._savepoints.records()]
    assert whole.count(False) == 1  # the initial parameters


def test_publish_ends_the_control_of_both_copies() -> None:
    pair = Pair().begun()
    pair.join()
    pair.done(3, Publish(point="parameters"))
    assert not pair.primary.shard._commands.is_driven
    assert not pair.backup.shard._commands.is_driven
    assert pair.primary.values.tobytes() == pair.backup.values.tobytes()


def test_a_backup_with_another_result_ends_and_names_the_command() -> None:
    pair = Pair().begun()
    pair.join()
    pair.backup.shard._commands._vector_store.vector("parameters")[5] += 1e-16 + 1e-15
    with pytest.raises(
        DistBeliefError, match=r"shard-0b and shard-0 differ after Execute, command 3"
    ):
        pair.command(3, COMPUTE)


def test_no_command_begins_while_a_backup_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.core.vectors.BLOCK_BYTES", 128)
    monkeypatch.setattr("distbelief.parameter_server.replication.WINDOW_STATE_BLOCKS", 1)
    pair = Pair().begun()
    pair.done(3, COMPUTE)
    actions = pair.primary.lead(3, B)
    for start in sent(actions, rp.StartSync):
        actions = pair.primary.receive(only(pair.backup.receive(start, A), rp.StateAck), B)
    syncs: list[Action] = []
    while not sent(syncs, BackupInSync):
        command = ShardCommand(series=1, number=4, task=COMPUTE)
        actions = [*actions, *pair.primary.receive(command, COORDINATOR)]
        assert pair.primary.activity == "serving"  # nothing runs
        syncs, before = [], actions
        for message in (a.message for a in before if isinstance(a, Send) and a.receiver == B):
            syncs += pair.backup.receive(message, A)
        actions = []
        for answer in sent(syncs, rp.StateAck):
            actions += pair.primary.receive(answer, B)
    assert pair.primary.activity == "executing"
    pair.settle(pair.primary, actions)
    assert vectors(pair.primary) == vectors(pair.backup)
    assert len(vectors(pair.backup)) == 2


def test_a_backup_that_is_not_in_sync_repeats_no_command() -> None:
    pair = Pair()
    pair.backup.receive(rp.StartSync(term=3, receiver_incarnation=1, clock=0, clients=()), A)
    command = ShardCommand(series=1, number=1, task=BeginSeries())
    message = rp.ReplicateCommand(term=3, position=0, command=command, checksum=0)
    with pytest.raises(RemoteProtocolError, match="sent ReplicateCommand before its vectors"):
        pair.backup.receive(message, A)


def test_state_that_cannot_be_read_is_refused() -> None:
    commands = Pair().backup.shard._commands
    for arrays in ([np.ones(3)], [np.frombuffer(b"\xc0" * 7 + b"\x07", np.float64)]):
        with pytest.raises(RemoteProtocolError, match="the primary's vectors cannot be read"):
            commands.adopt(arrays)


# --- rounds ---

WORKER = Address("replica-0")
ADD = AddRows(
    series=1, number=2, token=5, part=0, n_parts=1, table="w", stop=64, values=np.ones(64)
)


def add(pair: Pair, message: AddRows = ADD) -> int:
    """Add rows; return how often the worker hears that they are staged."""
    pair.told.clear()
    for copy in [pair.primary] if pair.is_alone else [pair.primary, pair.backup]:
        pair.settle(copy, copy.receive(message, WORKER))
    return len(sent(pair.told, RowsAdded))


def committed(pair: Pair) -> Vector:
    pair.done(3, CommitRound(tokens=(5,), pulls={}))
    return np.frombuffer(vectors(pair.primary)["parameters"])[:64]


def test_rows_are_acknowledged_once_both_copies_have_staged_them() -> None:
    pair = Pair().begun()
    pair.join()
    pair.cut = True
    assert add(pair) == add(pair) == 0
    pair.cut = False
    pair.settle(pair.primary, pair.primary.wait(0.2))
    assert len(sent(pair.told, RowsAdded)) == 1
    assert add(pair) == 1  # a repetition
    pair.take_over()
    assert add(pair) == 1
    np.testing.assert_array_equal(committed(pair), 2.0)


def test_a_primary_alone_stages_rows_and_a_backup_that_joins_gets_them() -> None:
    pair = Pair().begun()
    assert add(pair) == 1
    pair.join()
    pair.take_over()
    np.testing.assert_array_equal(committed(pair), 2.0)


def test_a_primary_that_goes_on_alone_acknowledges_rows_that_it_held() -> None:
    pair = Pair().begun()
    pair.join()
    pair.cut = True
    assert add(pair) == 0
    pair.settle(pair.primary, pair.primary.lead(4))
    assert len(sent(pair.told, RowsAdded)) == 1
    np.testing.assert_array_equal(committed(pair), 2.0)


def test_rows_wait_while_a_backup_syncs_and_of_other_rounds_they_are_void() -> None:
    pair = Pair().begun()
    pair.cut = True
    pair.settle(pair.primary, pair.primary.lead(3, B))
    ack = rp.StateAck(term=3, position=0, received=0)
    pair.primary.receive(ack, B)
    assert add(pair) == 0
    assert pair.primary.shard._commands._rows is None
    other = msgspec.structs.replace(ADD, number=1)
    assert add(Pair().begun(), other) == 0
    take = TakeRows(series=1, number=2, part=1, table="w", start=3, stop=5)
    pair = Pair().begun()
    pair.settle(pair.primary, pair.primary.receive(take, WORKER))
    (taken,) = sent(pair.told, RowsTaken)
    np.testing.assert_array_equal(taken.values, 1.0)
