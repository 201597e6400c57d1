"""One rank of a replica in a Sandblaster job: messages in and out."""

from collections.abc import Sequence

import msgspec
import pytest

from distbelief import protocol as wire
from distbelief.core.errors import JobError, LocalProtocolError, RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.protocol import role as rl
from distbelief.task.task import BuildContext, build_model
from distbelief.worker.replica import Replica
from sandblaster.build import build_rank
from sandblaster.chunks import COORDINATOR
from sandblaster.group_tasks import TIMER
from sandblaster.worker import STAGED_TIMER, ChunkProgram
from tests.distbelief.examples import initials_of
from tests.simulation.split_sandblasts import SETTINGS, TASK, layout_of, split_of


LEADER, WORKER = rl.Address("replica-0.0"), rl.Address("replica-0.1")


def context() -> BuildContext:
    return BuildContext(
        task=TASK,
        layout=layout_of(1),
        n_replicas=1,
        n_shards=1,
        seed=0,
        memory=PrivateMemory(host=""),
        initials=initials_of(build_model(TASK.model)),
        await_begin=False,
    )


def machine(name: rl.Address) -> Replica:
    built = build_rank(name, config=SETTINGS, context=context(), split=split_of(0, 2))
    assert isinstance(built, Replica)
    built.handle(rl.Started(incarnation=1, restored=None), 0.0)
    return built


def says(sender: rl.Address, message: object) -> rl.Event:
    return rl.Received(sender=sender, incarnation=1, message=message)  # type: ignore[arg-type] # any


def sent(actions: Sequence[rl.Action], kind: type) -> list[rl.Address]:
    return [
        action.receiver
        for action in actions
        if isinstance(action, rl.Send) and isinstance(action.message, kind)
    ]


def test_a_rank_reports_periodically() -> None:
    worker = machine(WORKER)
    actions = worker.handle(rl.TimerFired(name=STAGED_TIMER), 0.5)
    assert sent(actions, wire.ChunkStaged) == [LEADER]
    assert [a.at for a in actions if isinstance(a, rl.SetTimer) and a.name == STAGED_TIMER] == [1.0]


def test_staged_tokens_are_reported_again() -> None:
    worker = machine(WORKER)
    push = wire.PushChunk(series=1, attempt=1, commit_token=9)
    assert sent(worker.handle(says(LEADER, push), 1.0), wire.ChunkStaged) == []
    assert isinstance(worker.program, ChunkProgram)
    worker.program.pushes.staged.append(9)
    assert sent(worker.handle(says(LEADER, push), 1.0), wire.ChunkStaged) == [LEADER]


def test_a_leader_resends_what_ranks_have_not_answered() -> None:
    leader = machine(LEADER)
    actions = leader.handle(rl.PeerJoined(peer=WORKER, incarnation=1), 0.0)
    assert sent(actions, wire.StartGeneration) == [WORKER]
    actions = leader.handle(rl.TimerFired(name=TIMER), 1.0)
    assert sent(actions, wire.WorkReport) == []  # they have not gathered
    actions = leader.handle(rl.PeerJoined(peer=COORDINATOR, incarnation=1), 1.0)
    assert [a.name for a in actions if isinstance(a, rl.SetTimer)] == [TIMER]
    assert leader.handle(says(WORKER, wire.ChunkStaged(commit_tokens=(1,))), 1.0) == []


def test_a_worker_does_not_ask_for_work() -> None:
    worker = machine(WORKER)
    joined = rl.PeerJoined(peer=COORDINATOR, incarnation=1)
    assert worker.handle(joined, 1.0) == []


@pytest.mark.parametrize(
    ("sender", "message"), [(COORDINATOR, "assignment"), (LEADER, "staged"), (COORDINATOR, "push")]
)
def test_messages_for_other_roles_are_rejected(sender: rl.Address, message: str) -> None:
    assignment = wire.Assignment(
        series=1,
        replica_incarnation=1,
        version=1,
        evaluation=1,
        versions=(),
        n_examples=4,
        tasks=(),
    )
    due_report = {
        "assignment": assignment,
        "staged": wire.ChunkStaged(commit_tokens=()),
        "push": wire.PushChunk(series=1, attempt=1, commit_token=1),
    }
    with pytest.raises(RemoteProtocolError, match="which is not for it"):
        machine(WORKER).handle(says(sender, due_report[message]), 0.0)


def test_an_invalid_chunk_is_rejected_before_it_begins() -> None:
    chunk = wire.GroupChunk(
        series=1, evaluation=1, versions=(), attempt=1, start=0, stop=99, keeps=()
    )
    gather = wire.StartGeneration(generation=1 << 33, plan="p", chunk=chunk)
    with pytest.raises(RemoteProtocolError, match="0 to 99 of 26 samp"):
        machine(WORKER).handle(says(LEADER, gather), 0.0)


def test_status_is_that_of_its_rank() -> None:
    state, figures = machine(WORKER).status()
    assert state.startswith("waiting for")
    assert figures["sets_held"] == 0.0


def test_after_its_exit_it_is_silent() -> None:
    worker = machine(WORKER)
    worker.handle(says(rl.SUPERVISOR, wire.Stop(reason="over")), 0.0)
    actions = worker.handle(rl.TimerFired(name="replica:remind"), 31.0)
    assert sent(actions, wire.Finished) == [rl.SUPERVISOR]
    assert worker.handle(rl.TimerFired(name=STAGED_TIMER), 32.0) == []


def test_a_plan_for_another_mini_batch_size_is_rejected() -> None:

    config = msgspec.structs.replace(SETTINGS, portion=8)
    with pytest.raises(JobError, match="portion is 8, and the plan is for batches of"):
        build_rank(WORKER, config=config, context=context(), split=split_of(0, 2))


@pytest.mark.parametrize("name", ["replica-1.0", "replica-0.2", "coordinator"])
def test_no_other_rank_can_be_built(name: str) -> None:
    with pytest.raises(LocalProtocolError, match="no rank"):
        build_rank(name, config=SETTINGS, context=context(), split=split_of(0, 2))
