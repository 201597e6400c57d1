"""Checkpoints on the simulated disk survive kills, whole or not at all."""

import numpy as np
import pytest

from distbelief.protocol import Push
from distbelief.protocol.role import Action, Event, Persist, Persisted, Received, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import DiskFull, Fault, Kill, TornSnapshot
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.storage import N_KEPT, Disk
from distbelief.simulation.trace import SimulationFailed
from tests.distbelief.simulation.toys import (
    A,
    Counter,
    Scripted,
    cluster_of,
    counted,
    from_tester,
    on_start,
    push,
)


SLOW_DISK = SimulatedMachine(jitter=0.0, overhead_seconds=0.0, disk_bytes_per_second=8.0)
"""A count takes a second to be saved."""


def counting(n_pushes: int, *faults: Fault) -> SimulatedCluster:
    """A counter that gets one push a second from time 1 on, and saves at 3, 6, …"""
    cluster = SimulatedCluster(
        {A: lambda _: Counter()},
        seed=1,
        options=ClusterOptions(introduce=True, machine=SLOW_DISK, faults=faults),
    )
    for n in range(1, n_pushes + 1):
        cluster.run(until=float(n))
        cluster.post(A, from_tester(push(n)))
    return cluster


def labels(cluster: SimulatedCluster) -> list[tuple[str, bool]]:
    return [(stored.snapshot.label, stored.whole) for stored in cluster.disk.snapshots(A)]


def count(cluster: SimulatedCluster) -> float:
    return cluster.role(A).status()[1]["count"]


def test_a_new_incarnation_begins_with_the_newest_snapshot() -> None:
    cluster = counting(7)
    cluster.run()
    assert labels(cluster) == [("00003", True), ("00006", True)]
    cluster.restart(A)
    assert count(cluster) == 6
    restored = cluster.disk.newest(A)
    assert restored is not None
    assert restored.facts == {"what": "a count"}


def test_a_kill_during_persist_leaves_no_snapshot() -> None:
    cluster = counting(3, Kill(at=3.5, role=A, restart_after=1.0))
    cluster.run()
    assert labels(cluster) == []
    assert count(cluster) == 0


def test_a_kill_that_tears_leaves_a_snapshot_which_is_skipped() -> None:
    cluster = counting(6, Kill(at=6.5, role=A, restart_after=1.0, tears=True))
    cluster.run()
    assert labels(cluster) == [("00003", True), ("00006", False)]
    assert count(cluster) == 3


def test_a_damaged_snapshot_is_skipped() -> None:
    faults = (TornSnapshot(at=7.5, role=A), Kill(at=8.0, role=A, restart_after=1.0))
    cluster = counting(7, *faults)
    cluster.run()
    assert labels(cluster) == [("00003", True), ("00006", False)]
    assert count(cluster) == 3
    Disk().tear_newest(A)  # nothing there, nothing torn


def test_a_full_disk_is_reported_to_the_role_and_the_older_snapshot_stays() -> None:
    faults = (DiskFull(at=5.0, seconds=3.0), DiskFull(at=5.0, seconds=1.0))
    cluster = counting(9, *faults)
    cluster.run()
    assert labels(cluster) == [("00003", True), ("00009", True)]
    assert "Persisted(label='00006', error='no space left on device')" in cluster.trace.table()


def test_neither_the_role_nor_the_disk_sees_later_changes_of_the_others_array() -> None:
    disk = Disk()
    snapshot = counted(1)
    disk.save(A, snapshot)
    snapshot.arrays["count"][:] = 5
    restored = disk.newest(A)
    assert restored is not None
    restored.arrays["count"][:] = 6
    again = disk.newest(A)
    assert again is not None
    assert again.arrays["count"].tolist() == [1]


def test_a_role_that_changes_an_array_while_it_is_saved_is_caught() -> None:
    values = np.zeros(1, np.int64)

    def answer(event: Event, _: Seconds) -> list[Action]:
        if isinstance(event, Received) and isinstance(event.message, Push):
            values[:] = event.message.sequence
        return []

    snapshot = counted(1)
    persist = Persist(snapshot=type(snapshot)(label="1", arrays={"count": values}, facts={}))

    def begin_then(event: Event, now: Seconds) -> list[Action]:
        return [*on_start(persist)(event, now), *answer(event, now)]

    options = ClusterOptions(machine=SLOW_DISK)
    cluster = cluster_of({A: Scripted(begin_then)}, options=options)
    cluster.run(until=0.5)
    cluster.post(A, from_tester(push(4)))
    with pytest.raises(SimulationFailed, match="changed its arrays while"):
        cluster.run()


def test_only_the_newest_snapshots_are_kept() -> None:
    disk = Disk()
    for n in range(N_KEPT + 3):
        disk.save(A, counted(n))
    kept = disk.snapshots(A)
    assert len(kept) == N_KEPT
    assert kept[0].snapshot.label == "00003"


def test_each_persist_is_answered_once() -> None:
    role = Scripted(on_start(Persist(snapshot=counted(1)), Persist(snapshot=counted(2))))
    cluster_of({A: role}).run()
    assert [e for _, e in role.seen[1:]] == [Persisted(label="00001"), Persisted(label="00002")]
