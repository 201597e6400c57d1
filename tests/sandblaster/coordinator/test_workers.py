"""The workers that the coordinator knows: assignments, acknowledgements, silence."""

import msgspec
import pytest

from distbelief.protocol import Assignment, WorkReport
from distbelief.roles.role import Address, Received, Send
from sandblaster.chunks import BatchRange, ChunkSizes
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.workers import Attempt, Chunk, WorkerPool, WorkerState
from sandblaster.group_tasks import ChunkAttempts


A = Address("replica-a")
CHUNK_SIZES = ChunkSizes(mini_batch_size=10)
CONFIG = CoordinatorConfig(chunk_sizes=CHUNK_SIZES, retry_seconds=1.0, retry_seconds_max=2.0)


def received(message: WorkReport, *, incarnation: int = 1) -> Received:
    return Received(sender=A, incarnation=incarnation, message=message)


def give(worker: WorkerState, number: int) -> None:
    """Let a worker attempt a chunk."""
    chunk = Chunk(index=0, start=0, n_examples=10)
    worker.attempts[number] = Attempt(number=number, chunk=chunk, worker=worker, assigned_at=0.0)


class Talk:
    """A worker pool, and a worker that it talks to."""

    def __init__(self) -> None:
        self.pool = WorkerPool(CONFIG)
        self.attempts = ChunkAttempts(CHUNK_SIZES)
        batch = BatchRange(first=0, n_examples=40)
        self.pool.begin(epoch=1, evaluation=1, versions=(), batch=batch)

    def hears(self, report: WorkReport) -> WorkerState:
        """Pass a report of the worker to the pool."""
        self.pool.take_report(received(report), report, 0.0)
        worker = self.pool.get(A)
        assert worker is not None
        return worker

    def tells(self, worker: WorkerState, *, is_dealt: int) -> Assignment:
        """Return the assignment after the worker was given a chunk."""
        worker.attempts.clear()
        give(worker, is_dealt)
        (send,) = self.pool.send_assignment(worker, 0.0)
        assert isinstance(send, Send)
        assert isinstance(send.message, Assignment)
        return send.message


@pytest.mark.parametrize("n_told", [1, 2, 3])
def test_a_replica_takes_assignments_after_it_was_removed_for_silence(n_told: int) -> None:
    """Seed 8365: a chunk never came, in a batch without backup tasks.

    The worker had been silent. An old report added it again, with the version of that
    report; but newer assignments were on their way to it. The next assignment had a
    version that it knew already.
    """
    talk = Talk()
    talk.attempts.update(talk.tells(talk.hears(talk.attempts.report()), is_dealt=1))
    before = talk.attempts.report()
    worker = talk.hears(before)
    late = [talk.tells(worker, is_dealt=2 + n) for n in range(n_told)]
    talk.pool.remove(A, is_over=False)
    again = talk.hears(before)
    for assignment in late:
        talk.attempts.update(assignment)
    assert talk.attempts.update(talk.tells(again, is_dealt=9))
    assert [one.attempt for one in talk.attempts] == [9]
    assert talk.hears(talk.attempts.report()).known == again.version
    assert talk.pool.resend(99.0) == []


def test_an_unacknowledged_assignment_is_sent_again() -> None:
    talk = Talk()
    worker = talk.hears(talk.attempts.report())
    talk.tells(worker, is_dealt=1)
    (again,) = talk.pool.resend(99.0)
    assert isinstance(again, Send)
    assert isinstance(again.message, Assignment)
    assert talk.attempts.update(again.message)
    talk.hears(talk.attempts.report())
    assert talk.pool.resend(199.0) == []


# --- reports ---


def report(version: int, *, epoch: int = 1, evaluation: int = 1) -> WorkReport:
    return WorkReport(epoch=epoch, version=version, evaluation=evaluation, n_computed=5, results=())


class Replicas:
    """A pool with one worker, in evaluation 1 of epoch 1."""

    def __init__(self) -> None:
        self.pool = WorkerPool(CONFIG)
        self.take_report(report(3, epoch=0))
        self.pool.begin(
            epoch=1, evaluation=1, versions=(), batch=BatchRange(first=0, n_examples=10)
        )

    def take_report(self, message: WorkReport, *, incarnation: int = 1, now: float = 0.0) -> bool:
        event = received(message, incarnation=incarnation)
        return self.pool.take_report(event, message, now) is not None

    @property
    def worker(self) -> WorkerState:
        worker = self.pool.get(A)
        assert worker is not None
        return worker

    def told(self, now: float) -> Assignment:
        """Return the assignment that is sent now."""
        (told,) = self.pool.send_assignment(self.worker, now)
        assert isinstance(told, Send)
        assert isinstance(told.message, Assignment)
        return told.message


def test_an_assignment_is_repeated_until_it_is_acknowledged() -> None:
    bench = Replicas()
    worker = bench.worker
    assert bench.told(0.0).version == 4  # beyond what it knew before
    assert bench.pool.resend(0.5) == []
    assert len(bench.pool.resend(1.0)) == 1
    assert bench.pool.resend(2.0) == []
    assert bench.take_report(report(4), now=2.5)
    assert worker.turnaround == 1.5
    assert bench.pool.resend(9.0) == []
    assert worker.n_computed == 5


def test_reports_of_other_evaluations_and_incarnations_change_nothing() -> None:
    bench = Replicas()
    assert not bench.take_report(report(3, epoch=9))
    assert not bench.take_report(report(3, evaluation=9))
    assert not bench.take_report(report(3), incarnation=0)
    assert bench.pool.has_restarted(received(report(0), incarnation=2), report(0))
    assert bench.pool.remove(A, is_over=True) is not None
    assert bench.pool.remove(A, is_over=True) is None
    assert not bench.take_report(report(3))  # that incarnation is over
    assert len(bench.pool) == 0
    assert bench.take_report(report(3), incarnation=2)


def test_a_model_parallel_replica_has_generations_within_an_incarnation() -> None:
    bench = Replicas()
    first, second = report(3), msgspec.structs.replace(report(3), generation=1)
    assert bench.pool.has_restarted(received(second), second)
    assert not bench.take_report(second)  # not before the former is forgotten
    assert bench.pool.remove(A, is_over=True) is not None
    assert not bench.take_report(first)
    assert bench.take_report(second)
    assert not bench.pool.has_restarted(received(first), first)
    assert not bench.take_report(first)
    told = bench.told(0.0)
    assert (told.replica_incarnation, told.replica_generation) == (1, 1)


def test_silence_counts_from_the_question() -> None:
    bench = Replicas()
    worker = bench.worker
    assert bench.pool.silent(100.0) == []  # it has nothing to do
    bench.told(100.0)
    give(worker, 1)
    assert bench.pool.silent(101.0) == []
    bench.pool.resend(104.0)
    assert bench.pool.silent(106.0) == [A]
    bench.pool.add_delay(3.0, 106.0)
    assert bench.pool.silent(106.0) == []
    assert len(bench.pool.cancel_all(106.0)) == 1
    assert bench.pool.cancel_all(106.0) == []
    assert bench.pool.chunk_seconds == 0.0
