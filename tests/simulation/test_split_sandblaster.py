"""Sandblaster with model-parallel replicas, under faults: same sums, same end.

`split_sandblasts` says what a seed stands for and what is checked. A seed that fails is
played alone by SIMULATION_SEEDS=FIRST:STOP.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from distbelief.protocol import Assignment, ChunkStaged, Message, PushChunk
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Drop, Duplicate, Kill, Pause
from tests.simulation.scene import sends
from tests.simulation.split_sandblasts import SplitSandblast, undisturbed
from tests.simulation.split_scenes import (
    LEADER,
    WORKER,
    drawn,
    half_pushed,
    moment,
    play,
    stands_still,
)
from tests.simulation.split_variants import VARIANTS
from tests.simulation.test_seeds import chunks, name, play_seeds
from tests.simulation.variants import failure_of


FILE = "tests/simulation/test_split_sandblaster.py"


def play_all(seeds: range) -> None:
    sights, seldom = (lambda seed: play(drawn(seed)).checker.sights), ("machines restarted",)
    play_seeds(seeds, sights, file=FILE, seldom=seldom, share=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(range(2), 2), ids=name)
def test_whatever_breaks_the_sums_and_the_end_are_the_same(seeds: range) -> None:
    play_all(seeds)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", chunks(range(2, 2002), 100), ids=name)
def test_sums_and_end_are_the_same_for_two_thousand_seeds(seeds: range) -> None:
    play_all(seeds)


def play_shared(seeds: range) -> None:
    def sights(seed: int) -> Counter[str]:
        return play(replace(drawn(seed), hosts="told")).checker.sights

    play_seeds(seeds, sights, file=FILE, seldom=("machines restarted",), share=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(range(1), 1), ids=name)
def test_ranks_that_share_memory_end_where_blocks_end(seeds: range) -> None:
    play_shared(seeds)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", chunks(range(1, 501), 100), ids=name)
def test_ranks_that_share_memory_end_where_blocks_end_for_five_hundred_seeds(seeds: range) -> None:
    play_shared(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("n_machines", [1, 2, 3])
def test_it_ends_where_replicas_of_one_process_end(n_machines: int) -> None:
    whole = undisturbed(0, None, 2, 1)
    split = undisturbed(0, n_machines, 2, 1)
    assert split.checker.n_sealed == whole.checker.n_sealed > 3  # each was checked
    torch.testing.assert_close(split.checker.losses, whole.checker.losses, rtol=1e-10, atol=0.0)
    for tensor, values in whole.values.items():
        torch.testing.assert_close(split.values[tensor], values, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------- deaths with a name


def tell(run: SplitSandblast, kind: type[Message]) -> list[Address]:
    """Play it; return the receivers of messages of this kind."""
    told: list[Address] = []

    def see(happening: HandledEvent) -> None:
        told.extend(receiver for receiver, _ in sends(happening, kind))

    run.cluster.observe(see)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("after", [1e-6, 3e-4])
def test_a_rank_that_dies_while_pushing_costs_one_generation(after: Seconds) -> None:
    scene = SplitSandblast(n_machines=2, hosts="own")
    at = moment(scene, WORKER, PushChunk) + after
    run = play(
        SplitSandblast(
            n_machines=2, hosts="own", faults=(Kill(at=at, role=WORKER, restart_after=0.01),)
        )
    )
    assert run.checker.sights["machines restarted"] == 1
    wasted = run.coordinator.metrics.n_wasted
    assert wasted <= 4 * run.coordinator._config.chunk_sizes.chunk_size  # what it was assigned


def test_a_leader_that_dies_restarts() -> None:
    at = moment(SplitSandblast(), LEADER, ChunkStaged) + 1e-6
    run = play(SplitSandblast(faults=(Kill(at=at, role=LEADER, restart_after=0.01),)))
    assert run.checker.sights["machines restarted"] == 1


@pytest.mark.slow
def test_chunks_of_a_replica_with_a_silent_rank_go_to_others() -> None:
    at = moment(SplitSandblast(), LEADER, Assignment) + 1e-4
    for fault in (
        Kill(at=at, role=WORKER, restart_after=60.0),
        Pause(at=at, role=WORKER, seconds=60.0),
    ):
        run = play(SplitSandblast(faults=(fault,), backups=False))
        assert run.cluster.now < 30.0


def test_lost_or_duplicated_messages_change_nothing() -> None:
    faults = (
        Drop(probability=0.1, seconds=0.2),
        Duplicate(probability=0.3, seconds_max=0.01, seconds=1.0),
    )
    run = SplitSandblast(faults=faults)
    told = tell(run, PushChunk)
    run.play()
    plain = undisturbed(0, 2, 2, 1)
    assert run.bits_of(buffers=True) == plain.bits_of(buffers=True)
    assert set(told) >= {WORKER}


# ---------------------------------------------------------------------- broken variants


def patience(scene: SplitSandblast) -> Seconds:
    """Return in which time it ends, if nothing is broken."""
    return 6.0 if scene in {stands_still(), half_pushed()} else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_protocol_without_one_of_its_rules_is_caught(variant: str) -> None:
    scene = VARIANTS.caught_by[variant]()
    _ = scene.undisturbed  # is kept as it is when nothing is broken
    run = partial(play, scene, within=patience(scene))
    assert failure_of(VARIANTS[variant], run), "nothing notices"


@pytest.mark.slow
@pytest.mark.parametrize("scene", dict.fromkeys(VARIANTS.caught_by.values()))
def test_nothing_is_caught_where_nothing_is_broken(scene: Callable[[], SplitSandblast]) -> None:
    play(scene(), within=patience(scene()))
