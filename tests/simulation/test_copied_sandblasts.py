"""Sandblaster on shards with two copies: whichever copy dies, the series goes on."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest

from tests.simulation.copied_sandblasts import BOUNDED, DIRECTED, CopiedSandblast, drawn, play
from tests.simulation.copied_variants import VARIANTS
from tests.simulation.test_seeds import chunks, name, play_seeds
from tests.simulation.variants import failure_of


FILE = "tests/simulation/test_copied_sandblasts.py"


def play_all(seeds: range) -> None:
    seldom = ("primaries killed", "backups killed", "saved") if len(seeds) >= 100 else ()
    play_seeds(seeds, lambda seed: play(drawn(seed)).checker.sights, file=FILE, seldom=seldom)


def test_a_killed_primary_costs_no_restart_and_no_bit() -> None:
    play_all(range(5))


def test_a_backup_has_the_bounds_of_its_primary() -> None:
    for seed in range(2):
        assert play(replace(drawn(seed), method=BOUNDED)).n_compared


@pytest.mark.soak
@pytest.mark.parametrize("seeds", chunks(range(5, 2_005), 100), ids=name)
def test_the_series_and_its_bits_are_the_same_for_two_thousand_seeds(seeds: range) -> None:
    play_all(seeds)


@pytest.mark.parametrize("directed", DIRECTED)
def test_a_death_just_after_the_work_costs_nothing(directed: Callable[[], CopiedSandblast]) -> None:
    play(directed())


N_SEEDS = 20  # one of them must catch each variant


@pytest.mark.slow
@pytest.mark.timeout(300)  # if a scenario has changed, and the seed is looked for
@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_without_one_of_their_rules_are_caught(variant: str) -> None:
    scenes = chain([VARIANTS.caught_by[variant]()], (drawn(seed) for seed in range(N_SEEDS)))
    caught = (failure_of(VARIANTS[variant], partial(play, scene)) for scene in scenes)
    assert any(caught), "nothing notices"
