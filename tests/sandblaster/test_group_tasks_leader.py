"""The leader of a replica of two ranks, as coordinator and ranks see it."""

import math
from collections.abc import Sequence

import msgspec
import pytest

from distbelief import protocol as wire
from distbelief.protocol.role import Action, Report, Send
from distbelief.task.data import Samples
from distbelief.worker.batches import Limits
from distbelief.worker.group import GroupLeader, Outgoing
from sandblaster.chunks import COORDINATOR, ChunkSizes
from sandblaster.group_tasks import ChunkBatchPlan, GroupTasks, WorkerConfig


CHUNK_SIZES = ChunkSizes(mini_batch_size=2, mini_batches_per_chunk=2)
VERSIONS = (wire.ShardVersion(incarnation=1, clock=7),)


def assignment(
    version: int, *tasks: tuple[int, int, int], generation: int = 0, **keys: int
) -> wire.Assignment:
    """Return an assignment of these (chunk, attempt, token)."""
    return wire.Assignment(
        **{"series": 1, "replica_incarnation": 1, "evaluation": 1, "n_examples": 11, **keys},
        version=version,
        versions=VERSIONS,
        tasks=tuple(wire.ChunkTask(chunk_index=s, attempt=a, commit_token=g) for s, a, g in tasks),
        replica_generation=generation,
    )


class Bench:
    """Group tasks and their leader; the test does the rest."""

    def __init__(self, *, await_begin: bool = False) -> None:
        plan = ChunkBatchPlan(Samples(11), mini_batch_size=CHUNK_SIZES.mini_batch_size)
        self.group_tasks = GroupTasks(
            WorkerConfig(chunk_sizes=CHUNK_SIZES, retry_seconds=1.0, retry_seconds_max=9.0),
            plan=plan,
            n_ranks=2,
            await_begin=await_begin,
        )
        self.leader = GroupLeader(2, plan="p", limits=Limits(first=0), begins=True)
        self.group_tasks.start(1)
        self.leader.joined(0, 1, 0.0)
        self.leader.start(1, 0.0)
        self.actions: list[Action] = []
        self.report()
        self.gather()

    def report(self, *, now: float = 0.0, has_opened: bool = False) -> Outgoing:
        actions, out = self.group_tasks.report(self.leader, now, has_opened=has_opened)
        self.actions += actions
        return out

    def gather(self, *, incarnations: tuple[int, int] = (1, 1)) -> Outgoing:
        """Let both ranks be ready."""
        for machine, incarnation in enumerate(incarnations):
            said = wire.RankReady(generation=self.leader.generation, pushes=False, samples=0)
            self.leader.hear(machine, incarnation, said, 0.0)
        return self.report()

    def step(
        self,
        steps: int,
        *,
        losses: Sequence[float] = (2.0, 0.0),
        squares: Sequence[float] = (0.0, 0.0),
        now: float = 0.0,
    ) -> Outgoing:
        """Let both ranks take so many steps of this generation."""
        for machine, (loss, square) in enumerate(zip(losses, squares, strict=True)):
            said = wire.StepsDone(
                generation=self.leader.generation,
                steps=steps,
                loss=loss,
                samples=2 * steps,
                no_loss=0,
                clock=-1.0,
                ended=False,
                square=square,
            )
            self.leader.hear(machine, 1, said, now)
        return self.report(now=now)

    def work_report(self, now: float = 0.0) -> wire.WorkReport | None:
        """Return the report to the coordinator, if one is due."""
        sends = [a for a in self.group_tasks.due_report(now) if isinstance(a, Send)]
        assert all(send.receiver == COORDINATOR for send in sends)
        messages = [send.message for send in sends]
        assert all(isinstance(message, wire.WorkReport) for message in messages)
        return messages[0] if messages else None  # type: ignore[return-value] # seen


def gathers(out: Outgoing) -> list[wire.StartGeneration]:
    return [m for machine, m in out if machine == 1 and isinstance(m, wire.StartGeneration)]


def test_a_chunk_is_one_generation_from_assignment_to_staging() -> None:
    bench = Bench()
    first = bench.work_report()
    assert first is not None
    assert (first.generation, first.results, first.n_computed) == (0, (), 0)
    assert bench.work_report() is None  # reported once
    bench.group_tasks.take(assignment(1, (1, 5, 0), (2, 6, 0)))
    (gather,) = gathers(bench.report())
    chunk = gather.chunk
    assert chunk is not None
    assert (chunk.series, chunk.evaluation, chunk.attempt) == (1, 1, 5)
    assert (chunk.start, chunk.stop, chunk.keeps) == (4, 8, ())
    assert chunk.versions == VERSIONS
    assert bench.gather() == []
    bench.report(now=3.0, has_opened=True)
    assert bench.step(1) == []
    (gather,) = gathers(bench.step(2, now=4.5))
    assert gather.chunk is not None
    assert (gather.chunk.attempt, gather.chunk.keeps) == (6, (5,))
    assert (gather.chunk.start, gather.chunk.stop) == (8, 11)
    said = bench.work_report()
    assert said is not None
    (result,) = said.results
    assert (result.attempt, result.n_examples, result.loss) == (5, 4, 2.0)
    assert (result.seconds, result.staged, said.n_computed) == (1.5, False, 4)
    # With a token, and pushed by both.
    bench.group_tasks.take(assignment(2, (1, 5, 77), (2, 6, 0)))
    push = wire.PushChunk(series=1, attempt=5, commit_token=77)
    assert repr(bench.report()) == repr([(0, push), (1, push)])
    assert bench.report() == []
    bench.group_tasks.staged(0, (77,))
    assert repr(bench.group_tasks.resend()) == repr([(1, push)])
    bench.group_tasks.staged(1, (3,))
    bench.group_tasks.staged(1, (3, 77))
    assert bench.group_tasks.resend() == []
    said = bench.work_report()
    assert said is not None
    assert said.results[0].staged


def test_a_chunk_that_is_no_longer_assigned_is_dropped_at_once() -> None:
    bench = Bench()
    bench.group_tasks.take(assignment(1, (0, 1, 0), (1, 2, 0)))
    bench.report()
    bench.gather()
    bench.group_tasks.take(assignment(2, (1, 2, 0)))
    (gather,) = gathers(bench.report())
    assert gather.chunk is not None
    assert gather.chunk.attempt == 2
    bench.group_tasks.take(assignment(3))
    (gather,) = gathers(bench.report())
    assert gather.chunk is None
    bench.gather()
    assert bench.report() == []


def test_attempts_of_different_series_differ() -> None:
    """Of 170 seeds three hung: a new coordinator counts attempts from 1 again.

    The ranks continued the chunk of an earlier coordinator, and waited for
    the version of its parameters for ever.
    """
    bench = Bench()
    bench.group_tasks.take(assignment(1, (0, 1, 0)))
    bench.report()
    bench.gather()
    bench.group_tasks.take(assignment(1, (2, 1, 0), series=2))
    (gather,) = gathers(bench.report())
    chunk = gather.chunk
    assert chunk is not None
    assert (chunk.series, chunk.attempt, chunk.start) == (2, 1, 8)


def test_a_token_that_is_no_longer_assigned_is_not_repeated() -> None:
    bench = Bench()
    bench.group_tasks.take(assignment(1, (0, 1, 0)))
    bench.report()
    bench.gather()
    bench.step(2)
    bench.group_tasks.take(assignment(2, (0, 1, 9)))
    assert bench.report()
    bench.group_tasks.take(assignment(3))
    bench.report()
    assert bench.group_tasks.resend() == []
    bench.group_tasks.staged(0, (9,))
    bench.group_tasks.staged(1, (9,))


def test_a_restarted_rank_makes_it_another_replica() -> None:
    bench = Bench()
    bench.group_tasks.take(assignment(1, (0, 1, 0), (1, 2, 0)))
    bench.report()
    bench.gather()
    bench.step(2)
    assert bench.work_report() is not None
    bench.leader.joined(1, 2, 0.0)
    (gather,) = gathers(bench.report())
    assert gather.chunk is None
    bench.group_tasks.request_report()
    assert bench.work_report() is None  # not before all have gathered
    bench.group_tasks.take(assignment(2, (0, 1, 5)))  # meant for what it was
    bench.gather(incarnations=(1, 2))
    said = bench.work_report()
    assert said is not None
    assert (said.generation, said.results, said.n_computed) == (1, (), 0)
    bench.group_tasks.take(assignment(3, (0, 9, 0), generation=1))
    (gather,) = gathers(bench.report())
    assert gather.chunk is not None
    assert gather.chunk.attempt == 9


@pytest.mark.parametrize(
    ("losses", "squares"), [((math.nan, 0.0), (0.0, 0.0)), ((2.0, 0.0), (0.0, math.nan))]
)
def test_a_loss_or_part_that_is_not_finite_is_reported(
    losses: Sequence[float], squares: Sequence[float]
) -> None:
    bench = Bench()
    bench.group_tasks.take(assignment(1, (0, 1, 0)))
    bench.report()
    bench.gather()
    if math.isnan(losses[0]):  # as a rank reports it
        squares = (math.nan, 0.0)
    bench.step(2, losses=[0.0, 0.0], squares=squares)
    said = bench.work_report()
    assert said is not None
    assert math.isnan(said.results[0].loss)
    (report,) = bench.actions
    assert isinstance(report, Report)
    assert report.text.startswith("loss or gradient of positions 0 to 3 of the data is")


def test_after_stop_it_begins_no_generation_and_is_silent() -> None:
    bench = Bench()
    assert bench.group_tasks.command(bench.leader, wire.Stop(reason="over"), 0.0)
    bench.group_tasks.take(assignment(1, (0, 1, 0)))
    assert bench.report() == []
    assert bench.work_report() is None


def test_while_a_rank_is_silent_so_is_the_leader() -> None:
    bench = Bench()
    assert bench.work_report(3.9) is not None
    bench.group_tasks.request_report()
    assert bench.work_report(4.1) is None
    bench.group_tasks.note_alive(1, 4.2)
    bench.group_tasks.request_report()
    assert bench.work_report(4.3) is not None


@pytest.mark.parametrize(
    "message",
    [
        assignment(1, (0, 1, 0), generation=1),
        msgspec.structs.replace(assignment(1, (0, 1, 0)), replica_incarnation=2),
    ],
)
def test_messages_for_another_incarnation_are_ignored(message: wire.Assignment) -> None:
    bench = Bench()
    bench.group_tasks.take(message)
    assert bench.report() == []
