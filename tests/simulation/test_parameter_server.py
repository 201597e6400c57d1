"""Shards and clients under faults: every push is applied once, and every worker ends."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from distbelief.core.memory import Memory
from distbelief.parameter_server.shard import Shard
from distbelief.roles.role import Address, PeerLost
from distbelief.simulation.cluster import SimulatedCluster
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
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from tests.simulation.invariants import Scene, times_applied, watch
from tests.simulation.random_faults import random_faults
from tests.simulation.workers import N_MARKS, Ledger, Worker, config_of, layout_of, shard_of


SHARDS = tuple(Address(f"shard-{k}") for k in range(2))
WORKERS = tuple(Address(f"worker-{k}") for k in range(3))
N_WANTED = 12
HORIZON = 0.2  # seconds of faults: about as long as the work takes without any
SHARD_BYTES = 4 * N_MARKS * 8  # values, and two push buffers for each of few clients


class Run:
    """Three workers, two shards; on one host, or each on its own."""

    def __init__(
        self,
        seed: int,
        *,
        shared: bool,
        faults: Sequence[Fault] = (),
        n_wanted: int = N_WANTED,
        absence_seconds_max: float = 300.0,
    ) -> None:
        self.ledger = Ledger()
        layout = layout_of(len(SHARDS))

        def build_worker(memory: Memory) -> Worker:
            return Worker(layout, memory, ledger=self.ledger, n_wanted=n_wanted)

        def build_shard(index: int, memory: Memory) -> Shard:
            config = config_of(index, layout, absence_seconds_max=absence_seconds_max)
            return shard_of(index, layout, memory, config)

        builders = {
            name: partial(build_shard, index) for index, name in enumerate(SHARDS)
        } | dict.fromkeys(WORKERS, build_worker)
        machine = SimulatedMachine(host="one" if shared else "", jitter=0.5)
        self.cluster = SimulatedCluster(
            builders,
            seed=seed,
            options=ClusterOptions(
                introduce=True, machine=machine, faults=tuple(faults), port_reuse=0.5
            ),
        )
        self.observer = watch(
            Scene(
                cluster=self.cluster,
                shards={name: index for index, name in enumerate(SHARDS)},
                workers=WORKERS,
                ledger=self.ledger,
                host_bytes_max=20 * SHARD_BYTES,
            )
        )

    def finish(self, *, within: float = 300.0) -> None:
        self.cluster.run_until(self.done, within=within)
        self.observer.at_end()

    def done(self) -> bool:
        return all(
            self.worker(name).state == "done" and self.cluster.is_alive(name) for name in WORKERS
        )

    def worker(self, name: Address) -> Worker:
        role = self.cluster.role(name)
        assert isinstance(role, Worker)
        return role


@pytest.mark.parametrize("shared", [True, False])
def test_without_faults_every_push_is_applied_on_every_shard(*, shared: bool) -> None:
    run = Run(1, shared=shared)
    run.finish()
    assert run.ledger.n_issued == N_WANTED * len(WORKERS)
    for name in SHARDS:
        assert times_applied(run.cluster, name).sum() == run.ledger.n_issued
    assert run.cluster.counts.lost == 0


def test_a_torn_or_late_network_changes_nothing_but_the_time() -> None:
    faults = (
        Drop(probability=0.2, seconds=1.0),
        Duplicate(probability=0.3, seconds_max=0.5, seconds=1.0),
        Delay(probability=0.2, seconds_max=0.3, overtaken=True, seconds=1.0),
        CutOff(at=0.1, a=SHARDS[0], seconds=0.2),
        Pause(at=0.05, role=WORKERS[1], seconds=0.5),
    )
    run = Run(5, shared=False, faults=faults)
    run.finish()
    for name in SHARDS:
        assert times_applied(run.cluster, name).sum() == N_WANTED * len(WORKERS)


def test_a_paused_worker_delays_no_other() -> None:
    """DB-12: all other replicas continue."""
    run = Run(2, shared=True, faults=[Pause(at=0.02, role=WORKERS[0], seconds=50.0)])
    others = WORKERS[1:]
    run.cluster.run_until(
        lambda: all(run.cluster.role(name).status()[0] == "done" for name in others), within=5.0
    )
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
    run = Run(seed, shared=shared, faults=faults, absence_seconds_max=1e-3)
    for n in range(1, 12):
        run.cluster.run(until=0.02 * n)
        for name in SHARDS:
            for worker in WORKERS:
                run.cluster.post(name, lost(worker))
    run.finish()
    for name in SHARDS:
        assert times_applied(run.cluster, name).sum() == run.ledger.n_issued
    for name in WORKERS:
        assert run.worker(name).client.counters()["pushes_lost"] == 0


def test_push_buffers_of_dead_clients_are_released() -> None:
    run = Run(3, shared=True, absence_seconds_max=5.0)
    run.finish()
    for name in SHARDS:
        run.cluster.post(name, lost(WORKERS[0]))
    run.cluster.run(until=run.cluster.now + 4.9)
    n_bytes = [run.cluster.role(name).status()[1]["push_buffer_bytes"] for name in SHARDS]
    run.cluster.run(until=run.cluster.now + 0.2)
    for name, before in zip(SHARDS, n_bytes, strict=True):
        after = run.cluster.role(name).status()[1]["push_buffer_bytes"]
        assert after * len(WORKERS) == before * (len(WORKERS) - 1)


def lost(worker: Address) -> PeerLost:
    return PeerLost(peer=worker, incarnation=1, reason="silent")
