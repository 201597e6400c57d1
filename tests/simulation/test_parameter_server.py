"""Shards and clients under faults: every push is applied once, and every worker ends."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from distbelief.protocol.role import Address, PeerLost
from distbelief.simulation.faults import (
    CutOff,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Kill,
    Pause,
    Supersede,
)
from tests.simulation.marks import Marks, apart, together
from tests.simulation.random_faults import random_faults
from tests.simulation.workers import marks_of


SHARDS = tuple(Address(f"shard-{k}") for k in range(2))
WORKERS = tuple(Address(f"worker-{k}") for k in range(3))
N_WANTED = 12
HORIZON = 0.2  # seconds of faults: about as long as the work takes without any


def run_of(
    seed: int, *, shared: bool, faults: Sequence[Fault] = (), absence_seconds_max: float = 300.0
) -> Marks:
    """Return three workers, two shards; on one host, or each on its own."""
    return Marks(
        seed=seed,
        hosts=together if shared else apart,
        n_wanted=N_WANTED,
        n_shards=len(SHARDS),
        shard_settings={"absence_seconds_max": absence_seconds_max},
        port_reuse=0.5,
        faults=faults,
    )


def n_applied(run: Marks, name: Address) -> float:
    return float(marks_of(run.shard(name)).sum())


@pytest.mark.parametrize("shared", [True, False])
def test_without_faults_every_push_is_applied_on_every_shard(*, shared: bool) -> None:
    run = run_of(1, shared=shared)
    run.finish()
    assert run.ledger.n_issued == N_WANTED * len(WORKERS)
    for name in SHARDS:
        assert n_applied(run, name) == run.ledger.n_issued
    assert run.cluster.counts.lost == 0


def test_a_torn_or_late_network_changes_nothing_but_the_time() -> None:
    faults = (
        Drop(probability=0.2, seconds=1.0),
        Duplicate(probability=0.3, seconds_max=0.5, seconds=1.0),
        Delay(probability=0.2, seconds_max=0.3, overtaken=True, seconds=1.0),
        CutOff(at=0.1, a=SHARDS[0], seconds=0.2),
        Pause(at=0.05, role=WORKERS[1], seconds=0.5),
    )
    run = run_of(5, shared=False, faults=faults)
    run.finish()
    for name in SHARDS:
        assert n_applied(run, name) == N_WANTED * len(WORKERS)


def test_a_paused_worker_delays_no_other() -> None:
    """DB-12: all other replicas continue."""
    run = run_of(2, shared=True, faults=[Pause(at=0.02, role=WORKERS[0], seconds=50.0)])
    run.run_until(partial(run.done, but=WORKERS[0]), within=5.0)
    assert run.worker(WORKERS[0]).state != "done"
    run.finish()


@pytest.mark.parametrize("shared", [True, False])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=8)
def test_push_buffers_released_too_early_cost_a_session_and_no_push(
    *, shared: bool, seed: int
) -> None:
    """Workers are taken for gone again and again, in the middle of whatever they do."""
    faults = [
        fault
        for fault in random_faults(seed, WORKERS, horizon=HORIZON, intensity=1.0)
        if not isinstance(fault, Kill | Supersede)
    ]
    run = run_of(seed, shared=shared, faults=faults, absence_seconds_max=1e-3)
    for n in range(1, 12):
        run.cluster.run(until=0.02 * n)
        for name in SHARDS:
            for worker in WORKERS:
                run.cluster.post(name, lost(worker))
    run.finish()
    for name in SHARDS:
        assert n_applied(run, name) == run.ledger.n_issued
    for name in WORKERS:
        assert run.worker(name).client.counters()["pushes_lost"] == 0


def test_push_buffers_of_dead_clients_are_released() -> None:
    run = run_of(3, shared=True, absence_seconds_max=5.0)
    run.finish()
    for name in SHARDS:
        run.cluster.post(name, lost(WORKERS[0]))
    run.wait(4.9)
    n_bytes = [run.status(name)["push_buffer_bytes"] for name in SHARDS]
    run.wait(0.2)
    for name, before in zip(SHARDS, n_bytes, strict=True):
        after = run.status(name)["push_buffer_bytes"]
        assert after * len(WORKERS) == before * (len(WORKERS) - 1)


def lost(worker: Address) -> PeerLost:
    return PeerLost(peer=worker, incarnation=1, reason="silent")
