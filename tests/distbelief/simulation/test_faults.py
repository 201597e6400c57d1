"""Random fault schedules: reproducible, and over by their horizon."""

import pytest
from hypothesis import given, strategies as st

from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import (
    CutOff,
    Delay,
    DiskFull,
    Drop,
    Duplicate,
    Kill,
    Pause,
    Slow,
    Supersede,
    TornSnapshot,
)
from distbelief.simulation.machines import ClusterOptions
from tests.distbelief.simulation.toys import A, B, C, Counter, Echo, Pinger
from tests.simulation.random_faults import random_faults


ROLES = (A, B, C)


@given(seed=st.integers(0, 2**32))
def test_a_schedule_is_its_seeds_and_heals_by_its_horizon(seed: int) -> None:
    faults = random_faults(seed, ROLES, horizon=10.0, intensity=3.0)
    assert faults == random_faults(seed, ROLES, horizon=10.0, intensity=3.0)
    assert list(faults) == sorted(faults, key=lambda fault: fault.at)
    for fault in faults:
        match fault:
            case Kill():
                assert fault.restart_after is not None
                lasts = 2 * fault.restart_after
            case TornSnapshot() | Supersede():
                lasts = 0.0
            case _:
                lasts = fault.seconds
        assert 0 <= fault.at <= fault.at + lasts <= 10.0


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {
        type(fault) for seed in range(20) for fault in random_faults(seed, ROLES, horizon=10.0)
    }
    kinds = (Kill, Pause, Slow, Drop, Duplicate, Delay, CutOff, DiskFull, TornSnapshot)
    assert drawn == set(kinds)


def test_kills_are_left_to_the_supervisor_if_there_is_one() -> None:
    faults = random_faults(3, ROLES, horizon=10.0, intensity=9.0, restarts=False)
    kills = [fault for fault in faults if isinstance(fault, Kill)]
    assert kills
    assert all(kill.restart_after is None for kill in kills)


def test_a_schedule_for_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="random_faults needs roles"):
        random_faults(1, (), horizon=1.0)


@given(seed=st.integers(0, 10_000))
def test_whatever_breaks_a_persistent_pinger_gets_through_in_the_end(seed: int) -> None:
    """Liveness: once all has healed, there is progress."""
    cluster = SimulatedCluster(
        {A: lambda _: Pinger(B, 30), B: lambda _: Echo(), C: lambda _: Counter()},
        seed=seed,
        options=ClusterOptions(
            introduce=True, faults=random_faults(seed, ROLES, horizon=5.0, intensity=2.0)
        ),
    )
    cluster.run()
    assert cluster.halted == {A: None}
    assert set(cluster.alive) == {B, C}
