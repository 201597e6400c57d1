"""The workers that the coordinator knows: assignments, acknowledgements, silence."""

import msgspec
import pytest

from distbelief.protocol import Assignment, WorkReport
from distbelief.protocol.role import Action, Address, Received, Send
from sandblaster.chunks import ChunkSizes
from sandblaster.coordinator.workers import (
    Attempt,
    Chunk,
    CoordinatorConfig,
    WorkerPool,
    WorkerState,
)
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


class Bench:
    """A pool, its worker in evaluation 1 of series 1, and what that worker has to do."""

    def __init__(self) -> None:
        self.pool = WorkerPool(CONFIG)
        self.attempts = ChunkAttempts(CHUNK_SIZES)
        self.take_report(report(3, series=0))
        self.pool.begin(series=1, evaluation=1, versions=(), n_examples=40)

    def take_report(self, message: WorkReport, *, incarnation: int = 1, now: float = 0.0) -> bool:
        event = received(message, incarnation=incarnation)
        return self.pool.take_report(event, message, now) is not None

    @property
    def worker(self) -> WorkerState:
        worker = self.pool.get(A)
        assert worker is not None
        return worker

    def assigned(self, *, now: float = 0.0, attempt: int | None = None) -> Assignment:
        """Return the assignment that is sent now, of this attempt, if any."""
        self.worker.attempts.clear()
        if attempt is not None:
            give(self.worker, attempt)
        (sent,) = self.pool.send_assignment(self.worker, now)
        return assignment_in(sent)


def assignment_in(action: Action) -> Assignment:
    assert isinstance(action, Send)
    assert isinstance(action.message, Assignment)
    return action.message


@pytest.mark.parametrize("n_told", [1, 2, 3])
def test_a_replica_takes_assignments_after_it_was_removed_for_silence(n_told: int) -> None:
    """Seed 8365: a chunk never came, in a batch without backup tasks.

    The worker had been silent. An old report added it again, with the version of that
    report; but newer assignments were on their way to it. The next assignment had a
    version that it knew already.
    """
    bench = Bench()
    bench.attempts.update(bench.assigned(attempt=1))
    before = bench.attempts.report()
    bench.take_report(before)
    late = [bench.assigned(attempt=2 + n) for n in range(n_told)]
    bench.pool.remove(A, is_over=False)
    bench.take_report(before)
    for assignment in late:
        bench.attempts.update(assignment)
    assert bench.attempts.update(bench.assigned(attempt=9))
    assert [one.attempt for one in bench.attempts] == [9]
    bench.take_report(bench.attempts.report())
    assert bench.worker.known == bench.worker.version
    assert bench.pool.resend(99.0) == []


def report(version: int, *, series: int = 1, evaluation: int = 1) -> WorkReport:
    return WorkReport(
        series=series, version=version, evaluation=evaluation, n_computed=5, results=()
    )


def test_an_assignment_is_repeated_until_it_is_acknowledged() -> None:
    bench = Bench()
    worker = bench.worker
    assert bench.assigned(attempt=1).version == 4  # beyond what it knew before
    assert bench.pool.resend(0.5) == []
    (again,) = bench.pool.resend(1.0)
    assert bench.attempts.update(assignment_in(again))
    assert bench.pool.resend(2.0) == []
    assert bench.take_report(report(4), now=2.5)
    assert worker.turnaround == 1.5
    assert bench.pool.resend(9.0) == []
    assert worker.n_computed == 5


def test_reports_of_other_evaluations_and_incarnations_change_nothing() -> None:
    bench = Bench()
    assert not bench.take_report(report(3, series=9))
    assert not bench.take_report(report(3, evaluation=9))
    assert not bench.take_report(report(3), incarnation=0)
    assert bench.pool.has_restarted(received(report(0), incarnation=2), report(0))
    assert bench.pool.remove(A, is_over=True) is not None
    assert bench.pool.remove(A, is_over=True) is None
    assert not bench.take_report(report(3))  # that incarnation is over
    assert len(bench.pool) == 0
    assert bench.take_report(report(3), incarnation=2)


def test_a_model_parallel_replica_has_generations_within_an_incarnation() -> None:
    bench = Bench()
    first, second = report(3), msgspec.structs.replace(report(3), generation=1)
    assert bench.pool.has_restarted(received(second), second)
    assert not bench.take_report(second)  # not before the former is forgotten
    assert bench.pool.remove(A, is_over=True) is not None
    assert not bench.take_report(first)
    assert bench.take_report(second)
    assert not bench.pool.has_restarted(received(first), first)
    assert not bench.take_report(first)
    told = bench.assigned()
    assert (told.replica_incarnation, told.replica_generation) == (1, 1)


def test_silence_counts_from_the_question() -> None:
    bench = Bench()
    worker = bench.worker
    assert bench.pool.silent(100.0) == []  # it has nothing to do
    bench.assigned(now=100.0)
    give(worker, 1)
    assert bench.pool.silent(101.0) == []
    bench.pool.resend(104.0)
    assert bench.pool.silent(106.0) == [A]
    bench.pool.add_delay(3.0, 106.0)
    assert bench.pool.silent(106.0) == []
    assert len(bench.pool.cancel_all(106.0)) == 1
    assert bench.pool.cancel_all(106.0) == []
    assert bench.pool.chunk_seconds == 0.0
