"""Hundreds of scenarios, each drawn from one seed, under every invariant at once.

`scenarios` defines what a seed stands for, `invariants` what must hold. Replay a failing seed with
SIMULATION_SEEDS=FIRST:STOP; `make soak` runs 10,000 seeds, or those.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from distbelief.simulation.trace import SimulationFailed
from tests.elsewhere import answers
from tests.simulation.scenarios import Scenario, play


HERE = "tests.simulation.test_seeds"
FILE = "tests/simulation/test_seeds.py"
VARIABLE = "SIMULATION_SEEDS"

SELDOM = (
    "duplicates acknowledged again",
    "kept waiting",
    "leases expired",
    "pushes lost",
    "restored from a snapshot",
    "seconds that are mute",
    "shards restarted",
    "shards that forgot",
    "snapshots",
    "takeovers",
    "torn reads",
    "torn snapshots",
    "words of the superseded",
    "workers restarted",
)
"""What happens in one of 25 seeds at the least, or too little is tried: of 200 seeds
each of these in more than a tenth."""


def chunks(seeds: range, size: int) -> list[range]:
    """Return these seeds, or those that the environment names, in parts."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        first, _, stop = named.partition(":")
        seeds = range(int(first), int(stop or int(first) + 1))
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]


def name(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop - 1}"


def played(seed: int) -> Scenario:
    """Play it; if that fails, once more, to report what each event said."""
    try:
        return play(seed, trace="order")
    except SimulationFailed:
        return play(seed)


def play_seeds(
    seeds: range,
    sights: Callable[[int], Mapping[str, int]],
    *,
    file: str,
    seldom: Sequence[str],
    share: float = 0.04,
) -> None:
    """Play every seed; of 25 or more, each of these things must have happened in this share."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            found = sights(seed)
        except Exception as error:
            raise AssertionError(
                f"seed {seed} fails; alone: {VARIABLE}={seed} .venv/bin/python -m "
                f"pytest -n 0 {file} -k whatever"
            ) from error
        seen.update(what for what, n in found.items() if n)
    if len(seeds) >= 25:
        too_seldom = {what: seen[what] for what in seldom if seen[what] < share * len(seeds)}
        assert not too_seldom, f"of {len(seeds)} seeds, all in all: {dict(seen)}"


def play_all(seeds: range) -> None:
    play_seeds(seeds, lambda seed: played(seed).sights, file=FILE, seldom=SELDOM)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(range(25), 25), ids=name)
def test_under_any_fault_every_invariant_holds_and_all_end(seeds: range) -> None:
    play_all(seeds)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", chunks(range(25, 10_025), 100), ids=name)
def test_every_invariant_holds_for_ten_thousand_seeds(seeds: range) -> None:
    play_all(seeds)


def test_a_former_primary_survives_that_its_successor_refuses_its_copies() -> None:
    """Regression: the successor had restarted since, and took forwarded blocks for a client's.

    Its SessionRefused is for no shard: a driver rejects it, and the shard lives on.
    """
    played(1039)


# --------------------------------------------------------------------- reproducibility


REPRODUCED = (1, 2, 5)  # one copy, two, and block messages


def digests() -> list[str]:
    return [play(seed).cluster.trace.digest for seed in REPRODUCED]


@pytest.mark.slow
def test_equal_seeds_have_equal_traces_in_any_process() -> None:
    """So with another PYTHONHASHSEED: nothing depends on the order of a set."""
    others = answers(HERE, "t.digests()")
    assert digests() == others
    assert len(set(others)) == len(REPRODUCED)
