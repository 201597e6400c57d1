"""Shares of the workers' time: by their reports and the coordinator's clock."""

import pytest

from distbelief.protocol import ChunkResult, WorkReport
from distbelief.protocol.role import Address, Received, Seconds
from distbelief.simulation.faults import DiskFull
from sandblaster.chunks import ChunkSizes
from sandblaster.coordinator.workers import CoordinatorConfig, TimeShares, WorkerPool
from tests.simulation.sandblasts import Sandblast, play


def crew_of(*names: str, now: Seconds = 0.0) -> WorkerPool:
    pool = WorkerPool(CoordinatorConfig(chunk_sizes=ChunkSizes(mini_batch_size=1)))
    for name in names:
        join(pool, name, now=now)
    return pool


def join(pool: WorkerPool, name: str, *, now: Seconds) -> None:
    report = WorkReport(series=0, version=0, evaluation=0, n_computed=0, results=())
    event = Received(sender=Address(name), incarnation=1, message=report)
    pool.take_report(event, report, now)


def computed(pool: WorkerPool, name: str, *, seconds: float, elapsed: float) -> None:
    worker = pool.get(Address(name))
    assert worker is not None
    result = ChunkResult(attempt=1, n_examples=1, loss=0.0, seconds=seconds, staged=False)
    pool.record(worker, result, elapsed=elapsed)


def begin(pool: WorkerPool, shares: TimeShares, *, now: Seconds) -> None:
    shares.evaluation_begins(pool, now)
    pool.begin(series=1, evaluation=1, versions=(), n_examples=4)


def test_every_second_of_an_evaluation_has_a_share() -> None:
    """10 s of two replicas, then 2 s of algebra, of which 0.5 s were a snapshot.

    replica-0   1 s fetching, 4 s, 0.5 s staging, 4 s, 0.5 s waiting
    replica-1   it comes after 6 s: 1 s fetching, 3 s
    """
    shares, pool = TimeShares(), crew_of("replica-0")
    assert set(shares.counters().values()) == {0.0}
    begin(pool, shares, now=100.0)
    computed(pool, "replica-0", seconds=4.0, elapsed=5.0)
    computed(pool, "replica-0", seconds=4.0, elapsed=4.5)
    join(pool, "replica-1", now=106.0)
    computed(pool, "replica-1", seconds=3.0, elapsed=4.0)
    shares.evaluation_ends(pool, 110.0)
    shares.saved(pool, since=111.0, now=111.5)
    begin(pool, shares, now=112.0)
    total = 10.0 + 4.0 + 2 * 2.0
    assert shares.counters() == pytest.approx(
        {
            "computing_share": 11.0 / total,
            "fetching_share": 2.0 / total,
            "staging_share": 0.5 / total,
            "waiting_share": 0.5 / total,
            "algebra_share": 3.0 / total,
            "saving_share": 1.0 / total,
        }
    )


def test_dropped_evaluations_have_no_share() -> None:
    shares, pool = TimeShares(), crew_of("replica-0")
    begin(pool, shares, now=0.0)
    computed(pool, "replica-0", seconds=1.0, elapsed=1.0)
    shares.evaluation_ends(pool, 1.0)
    shares.run_begins()
    shares.saved(pool, since=1.0, now=50.0)
    begin(pool, shares, now=100.0)
    assert shares.counters()["computing_share"] == 1.0


def test_a_run_reports_its_shares() -> None:
    counters = play(Sandblast(n_replicas=2)).coordinator.status()[1]
    shares = [value for name, value in counters.items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1.0)
    assert counters["computing_share"] > 0.3


def test_snapshots_asked_for_too_often_wait() -> None:
    """They took 9 % of the time of a large model, at one in 30 s as by default."""
    often = tuple(0.02 + 0.001 * k for k in range(6))
    run = play(Sandblast(n_replicas=2, saves=often))
    assert [saved.error for saved in run.checker.saved].count(None) >= 1
    assert len(run.checker.saved) < len(often)
    full = DiskFull(at=0.0, seconds=10.0)
    run = play(Sandblast(n_replicas=2, saves=often, faults=(full,)))
    assert all(saved.error for saved in run.checker.saved)
