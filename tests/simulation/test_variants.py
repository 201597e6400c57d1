"""Each rule is needed: without it, some scenario breaks an invariant.

    SIMULATION_VARIANTS=1 .venv/bin/python -m pytest -n 0 -k broken_rule -rA FILE

looks for the first such seed of every variant, known or not, and shows the table.
"""

import os
import sys
from itertools import chain

import pytest

from distbelief.simulation.trace import SimulationFailed
from tests.simulation.scenarios import play
from tests.simulation.variants import VARIANTS, broken


N_SEEDS = 400  # in which a variant is to be caught

CAUGHT_BY = {
    "no watermark": 0,
    "acknowledged before it is applied": 0,
    "lives of clients are not told apart": 1,
    "slot is used again too early": 0,
    "blocks are taken in any order": 43,
    "applied before all blocks are here": 17,
    "late hello lowers the watermark": 1,
    "late welcome is believed": 75,
    "hello does not wait for the push being applied": 11,
    "lease ends before its reader has all": 23,
    "values are even while they are written": 0,
    "torn read is believed": 0,
    "blocks of a former fetch are taken": 47,
    "watermarks are forgotten in the snapshot": 102,
    "snapshot is taken while a push is applied": 0,
    "acknowledged before the second holds it": 9,
    "leader goes on alone without leave": 15,
    "deposed leader is acknowledged": 17,
    "told to any life of that name": 307,
    "former leaders are heard": 52,
    "piece of another clock is taken": 187,
    "pushes are taken in any order": 5,
    "whole is said too early": 27,
    "second takes over that is not whole": 27,
    "second does not know the clients": 1,
}
"""A seed that is known to catch each; tried first, to save time."""


def catches(seed: int, name: str) -> str | None:
    """Return how this seed catches that variant, if it does."""
    try:
        with broken(VARIANTS[name]):
            play(seed)
    except (SimulationFailed, AssertionError) as error:
        what = str(error)
        mistakes = ("AttributeError", "TypeError", "NameError")
        assert not any(f"raised {m}" in what for m in mistakes), what
        return what.splitlines()[0]
    return None


@pytest.mark.slow
@pytest.mark.timeout(300)  # if a scenario has changed, and the seed is looked for
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    first = [CAUGHT_BY[name]] if name in CAUGHT_BY else []
    if "SIMULATION_VARIANTS" in os.environ:
        first = []
    for seed in chain(first, range(N_SEEDS)):
        how = catches(seed, name)
        if how is not None:
            sys.stdout.write(f'    "{name}": {seed},  # {how}\n')
            return
    pytest.fail(f"{name}: no seed of {N_SEEDS} notices; try harder in `scenarios`")
