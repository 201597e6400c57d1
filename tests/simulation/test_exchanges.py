"""Random policies under every fault; without any one rule of theirs, some run breaks an invariant.

    SIMULATION_VARIANTS=1 .venv/bin/python -m pytest -n 0 -k broken_rule -rA FILE

searches the first such seed of every variant and prints the table.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest

from distbelief.parameter_server.policy import ExchangePolicy, Round
from tests.distbelief.worker import test_exchange_state as of_one_replica
from tests.simulation.exchanges import (
    VARIANTS,
    play_any,
    play_under,
    policy_of,
    with_late_messages,
    without_one,
)
from tests.simulation.marks import apart
from tests.simulation.scenarios import scenario_of
from tests.simulation.test_seeds import SELDOM, chunks, name, play_seeds
from tests.simulation.variants import assert_noticed, failure_of
from tests.simulation.workers import PLAIN


FILE = "tests/simulation/test_exchanges.py"

GATED = ExchangePolicy(send="delta", staleness=1)
BY_SCENES: dict[str, Callable[[], object]] = {
    "the gone hold the floor": partial(without_one, GATED),
    "late open session enters again": with_late_messages,
    "inner state is kept across a lost anchor": (
        of_one_replica.test_a_restart_drops_steps_and_state
    ),
}
"""What random runs do not tell, or seldom: there all that die come back, steps have no state."""

CHOICES = (
    "delta",
    "many local steps",
    "bfloat16",
    "sparse",
    "changed",
    "gate",
    "round",
    "quorum",
    "weights",
    "damping",
)


def choices(policy: ExchangePolicy) -> Mapping[str, int]:
    is_delta = policy.send == "delta"
    return {
        "delta": is_delta,
        "many local steps": is_delta and policy.every != 1,
        "bfloat16": policy.fetched == "bfloat16",
        "sparse": policy.push is not None,
        "changed": policy.fetched == "changed",
        "gate": policy.staleness is not None,
        "round": policy.round is not None,
        "quorum": policy.round is not None and policy.round.quorum < 1.0,
        "weights": policy.weight != "sum",
        "damping": policy.damping != "none",
    }


def play_all(seeds: range) -> None:
    def sights(seed: int) -> Mapping[str, int]:
        return {**play_any(seed).sights, **choices(policy_of(seed))}

    play_seeds(seeds, sights, file=FILE, seldom=(*SELDOM, *CHOICES), share=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(range(25), 25), ids=name)
def test_under_any_policy_and_fault_every_invariant_holds_and_all_end(seeds: range) -> None:
    """E2 to E5, with kills, two copies, takeovers and local steps that are ones: exact sums."""
    play_all(seeds)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", chunks(range(25, 10_025), 100), ids=name)
def test_any_policy_holds_for_ten_thousand_seeds(seeds: range) -> None:
    play_all(seeds)


@pytest.mark.slow
@pytest.mark.timeout(300)  # a changed scenario makes the test search for a new seed
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    if name in BY_SCENES:
        assert failure_of(VARIANTS[name], BY_SCENES[name]), "nothing notices"
        return
    assert_noticed(name, VARIANTS, play_any)


def test_policies_are_drawn_from_all_choices() -> None:
    drawn: Counter[str] = Counter()
    for seed in range(200):
        drawn.update(choice for choice, n in choices(policy_of(seed)).items() if n)
    assert min(drawn[choice] for choice in CHOICES) > 20, drawn


# ------------------------------------------------------------------------- regressions


@pytest.mark.parametrize("seed", [0, 4])
def test_shards_that_leave_out_different_workers_end_all_the_same(seed: int) -> None:
    """Regression: with three shards and a quorum of three in four, all waited for ever.

    One shard had folded its round without worker 0, the next without 1, the last without 2. Each
    of them waited for its acknowledgement and pushed nothing, so no shard had a quorum again.
    """
    policy = ExchangePolicy(send="delta", every=2, round=Round(quorum=0.75), weight="samples")
    scenario = replace(
        scenario_of(seed),
        n_workers=4,
        n_shards=3,
        n_twins=1,
        n_wanted=16,
        hosts=apart,
        rule=PLAIN,
        faults=(),
        saves=(),
    )
    play_under(policy, scenario)


@pytest.mark.parametrize(("seed", "staleness", "quorum"), [(965, 1, 0.75), (1207, 3, 1.0)])
def test_a_push_that_is_late_on_one_shard_does_not_hold_up_all_workers(
    seed: int, staleness: int, quorum: float
) -> None:
    """Regression: after a takeover one shard was a round ahead of the other.

    Each waited for the push of a worker that waited for the other one's acknowledgement.
    """
    rounds = Round(quorum=quorum)
    policy = ExchangePolicy(staleness=staleness, round=rounds, weight="mean")
    play_under(policy, scenario_of(seed))


@pytest.mark.parametrize("seed", [653, 1667])
def test_the_first_push_of_a_restarted_worker_has_its_weight(seed: int) -> None:
    """Regression: with weight "samples" it could count zero times in its round.

    A takeover opened the session again, and the new primary had meanwhile applied the last push of
    the worker's former incarnation: the first push had as many samples fewer.
    """
    play_any(seed)
