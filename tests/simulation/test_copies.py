"""Shards with two copies under faults: nothing acknowledged is lost, no worker hangs.

`invariants` are checked in every run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol.role import Address
from distbelief.simulation.faults import Delay, Drop, Duplicate, Fault, Kill, Pause
from distbelief.simulation.machines import SimulatedMachine
from tests.simulation.marks import Marks, apart, each_copy_apart, small, together
from tests.simulation.workers import PLACES, PLAIN, STEP, WITH_STATE, marks_of


Hosts = Callable[[Address], str]

everywhere = pytest.mark.parametrize("hosts", [together, apart, each_copy_apart])
seeds = given(seed=st.integers(0, 2**32))
three = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]
)


N_SEEDS = max(1, settings().max_examples // 40)  # 50 in the soak


def seeds_everywhere(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = everywhere(seeds(settings(max_examples=N_SEEDS)(test)))
    return marked


PAIRS = Marks(
    n_twins=2,
    n_wanted=40,
    shard_bytes_per_second=2e7,
    client=ClientConfig(pushes=True, retry_seconds=0.1),
)


def run_of(seed: int, hosts: Hosts, scene: Marks = PAIRS) -> tuple[Marks, np.random.Generator]:
    """Return a run with a whole pair, somewhere in the middle of its work."""
    stream = np.random.default_rng(seed)
    rule: UpdateRule = WITH_STATE if stream.random() < 0.5 else PLAIN
    n_wanted = max(60, scene.n_wanted)
    run = replace(scene, seed=seed, hosts=hosts, rule=rule, n_wanted=n_wanted)
    run.until_whole()
    run.wait(float(stream.uniform(0.0, 0.2)))
    return run, stream


def no_longer_leads(run: Marks, name: Address) -> bool:
    return run.leader() != name


def kill_of(run: Marks, name: Address, stream: np.random.Generator) -> Fault:
    """Return a death between two events, or in the midst of one."""
    n_actions = int(stream.integers(8))
    after_actions = n_actions if n_actions < 5 else None
    return Kill(at=run.now, role=name, after_actions=after_actions)


# ------------------------------------------------------------------ without faults


@pytest.mark.each_value
@everywhere
@pytest.mark.parametrize("rule", [PLAIN, WITH_STATE])
def test_two_copies_are_equal_to_the_bit_at_equal_clocks(hosts: Hosts, rule: UpdateRule) -> None:
    with small():
        run = replace(PAIRS, seed=1, hosts=hosts, rule=rule)
        run.finish()
    assert run.ledger.n_issued == 120
    assert run.seen.n_twins > 20
    assert run.overseer.n_alone == 0
    assert run.election().term == 2


@everywhere
@three
def test_a_backup_syncs_from_a_primary_that_goes_on_applying_pushes(
    hosts: Hosts, seed: int
) -> None:
    with small(block_bytes=1024):
        run = replace(
            PAIRS,
            seed=seed,
            hosts=hosts,
            rule=WITH_STATE,
            n_workers=8,
            n_wanted=50,
            shard_bytes_per_second=4e6,  # 5 ms for each push
        )
        run.until_whole()
        run.wait(0.05)
        run.cluster.kill(run.second())
        run.run_until(lambda: run.election().term >= 4, within=5.0)
        leader = run.shard(run.leader())
        n_applied = leader.status()[1]["clock"]
        run.until_whole()
        assert leader.status()[1]["clock"] > n_applied
        assert not run.done()
        run.finish()
    assert run.overseer.n_alone == 0


@pytest.mark.each_value
@everywhere
@three
@pytest.mark.parametrize("rule", [PLAIN, WITH_STATE])
def test_copies_of_a_shard_whose_clients_hold_parts_are_equal_too(
    hosts: Hosts, seed: int, rule: UpdateRule
) -> None:
    """Both copies die, one after the other, while workers push parts of the tensor."""
    with small(block_bytes=1024):
        run = replace(PAIRS, seed=seed, hosts=hosts, rule=rule, n_partial=2)
        run.until_whole()
        for _ in range(2):
            run.wait(0.1)
            leader = run.leader()
            run.cluster.inject(Kill(at=run.now, role=leader))
            run.run_until(partial(no_longer_leads, run, leader), within=5.0)
            run.until_whole()
        run.finish()
    assert not run.seen.forgetful
    assert run.seen.n_twins > 10


def test_a_backup_on_the_primarys_host_needs_no_memory_but_its_values() -> None:
    run = replace(PAIRS, seed=1)
    run.finish()
    memory = run.cluster.memory(run.leader())
    second = run.second()
    owned = [name for name in memory.leases if name.startswith(f"{second}.")]
    assert owned == [f"{second}.1.values"]


# ------------------------------------------------------------------------- one fault


@seeds_everywhere
def test_whenever_the_primary_dies_nothing_acknowledged_is_lost(hosts: Hosts, seed: int) -> None:
    with small(window_pieces=2):
        run, stream = run_of(seed, hosts)
        run.cluster.inject(kill_of(run, run.leader(), stream))
        run.finish()
    assert not run.seen.forgetful


@seeds_everywhere
def test_whenever_the_backup_dies_the_primary_goes_on(hosts: Hosts, seed: int) -> None:
    with small(window_pieces=2):
        run, stream = run_of(seed, hosts)
        leader = run.leader()
        run.cluster.inject(kill_of(run, run.second(), stream))
        run.finish()
    assert run.leader() == leader
    assert not run.seen.forgetful


@seeds_everywhere
def test_a_paused_primary_is_demoted_and_acknowledges_nothing_more(hosts: Hosts, seed: int) -> None:
    """It is ended by force, but too late: for half a second there are two of them."""
    with small(window_pieces=2):
        run, _ = run_of(seed, hosts)
        leader = run.leader()
        terminates, run.overseer.terminates = run.overseer.terminates, False
        assert terminates
        run.cluster.inject(Pause(at=run.now, role=leader, seconds=1.5))
        run.finish()
        run.wait(2.0)
    assert run.overseer.n_takeovers == 1
    assert not run.seen.forgetful
    assert run.leader() != leader


@seeds_everywhere
def test_a_paused_backup_delays_the_primary_by_half_a_second(hosts: Hosts, seed: int) -> None:
    with small(window_pieces=2):
        run, _ = run_of(seed, hosts)
        leader, second = run.leader(), run.second()
        run.cluster.inject(Pause(at=run.now, role=second, seconds=1.5))
        run.finish(within=2.5)
        assert run.leader() == leader
        run.until_whole()
    assert run.overseer.n_alone > 0
    assert not run.seen.forgetful


# --------------------------------------------------------------------- many faults


@seeds_everywhere
def test_single_faults_one_after_the_other_lose_nothing(hosts: Hosts, seed: int) -> None:
    """Each strikes a pair that is whole; the workers are at it all the while."""
    with small(window_pieces=2):
        slow = SimulatedMachine(jitter=0.5, flops_per_second=STEP.flops / 0.15)
        run, stream = run_of(seed, hosts, replace(PAIRS, machine=slow))
        for _ in range(3):
            now, names = run.now, run.copies[0]
            name = names[int(stream.integers(2))]
            if stream.random() < 0.5:
                run.cluster.inject(kill_of(run, name, stream))
            else:
                seconds = float(stream.uniform(0.1, 2.5))
                run.cluster.inject(Pause(at=now, role=name, seconds=seconds))
            # Until it is over, and was noticed.
            run.cluster.run(until=now + 3.5)
            run.until_whole()
        run.finish()
    assert not run.seen.forgetful


@seeds_everywhere
def test_a_bad_network_costs_time_and_nothing_else(hosts: Hosts, seed: int) -> None:
    stream = np.random.default_rng(seed)
    coin = bool(stream.random() < 0.5)
    faults: list[Fault] = [
        Drop(probability=0.05, seconds=3.0),
        Duplicate(probability=0.1, seconds_max=0.5, seconds=3.0),
        Delay(probability=0.05, seconds_max=0.2, overtaken=coin, seconds=3.0),
    ]
    with small(window_pieces=2):
        run = replace(PAIRS, seed=seed, hosts=hosts, rule=WITH_STATE, faults=faults)
        run.cluster.run(until=0.4)
        role = run.copies[0][int(stream.integers(2))]
        run.cluster.inject(Pause(at=run.now, role=role, seconds=0.3))
        run.finish()
        run.until_whole()
    assert not run.seen.forgetful


@seeds_everywhere
def test_if_both_copies_die_only_what_came_after_the_snapshot_is_lost(
    hosts: Hosts, seed: int
) -> None:
    """That much is counted, push by push (`Marks.finish`)."""
    with small(window_pieces=2):
        run, stream = run_of(seed, hosts, replace(PAIRS, n_wanted=100))
        run.save("00001")
        run.wait(0.05)
        saved = run.newest(run.copies[0][0])
        for name in run.copies[0]:
            run.cluster.inject(kill_of(run, name, stream))
        run.finish()
    kept = -saved.arrays["values"][PLACES]
    assert (marks_of(run.shard(run.leader()))[kept == 1.0] == 1.0).all()


@seeds
@settings(max_examples=2)
def test_each_shard_is_taken_over_independently(seed: int) -> None:
    with small(window_pieces=2):
        run, stream = run_of(seed, together, replace(PAIRS, n_shards=2))
        run.until_whole(1)
        for index in range(2):
            run.cluster.inject(kill_of(run, run.leader(index), stream))
        run.finish()
    assert not run.seen.forgetful
