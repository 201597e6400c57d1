"""Assignments to workers, and their acknowledgement."""

import pytest

from distbelief.protocol import Assignment, WorkReport
from distbelief.roles.role import Address, Received, Send
from sandblaster.chunks import BatchRange, ChunkSizes
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.workers import ChunkCopy, WorkerPool, WorkerState
from sandblaster.worker import ChunkAttempts


A = Address("replica-a")
CHUNK_SIZES = ChunkSizes(mini_batch_size=10)


class Talk:
    """A worker pool, and a worker that it talks to."""

    def __init__(self) -> None:
        self.pool = WorkerPool(CoordinatorConfig(chunk_sizes=CHUNK_SIZES))
        self.attempts = ChunkAttempts(CHUNK_SIZES)
        batch = BatchRange(first=0, n_examples=40)
        self.pool.begin(epoch=1, evaluation=1, versions=(), batch=batch)

    def hears(self, report: WorkReport) -> WorkerState:
        """Pass a report of the worker to the pool."""
        event = Received(sender=A, incarnation=1, message=report)
        self.pool.take_report(event, report, 0.0)
        worker = self.pool.get(A)
        assert worker is not None
        return worker

    def tells(self, worker: WorkerState, *, is_dealt: int) -> Assignment:
        """Return the assignment after the worker was given a chunk."""
        worker.copies = {
            is_dealt: ChunkCopy(chunk_index=0, attempt=is_dealt, n_examples=10, assigned_at=0.0)
        }
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
    talk.attempts.update(talk.tells(talk.hears(talk.attempts.report), is_dealt=1))
    before = talk.attempts.report
    worker = talk.hears(before)
    late = [talk.tells(worker, is_dealt=2 + n) for n in range(n_told)]
    talk.pool.remove(A, is_over=False)
    again = talk.hears(before)
    for assignment in late:
        talk.attempts.update(assignment)
    assert talk.attempts.update(talk.tells(again, is_dealt=9))
    assert [one.attempt for one in talk.attempts] == [9]
    assert talk.hears(talk.attempts.report).known == again.version
    assert talk.pool.resend(99.0) == []


def test_an_unacknowledged_assignment_is_sent_again() -> None:
    talk = Talk()
    worker = talk.hears(talk.attempts.report)
    talk.tells(worker, is_dealt=1)
    (again,) = talk.pool.resend(99.0)
    assert isinstance(again, Send)
    assert isinstance(again.message, Assignment)
    assert talk.attempts.update(again.message)
    talk.hears(talk.attempts.report)
    assert talk.pool.resend(199.0) == []
