"""Predicted against measured: how it is judged, and that it runs."""

import pytest

from experiments.benchmarks.planner_against_runtime import (
    Judged,
    Turn,
    compared,
    finalists,
    is_void,
    regret,
)
from tests.experiments.benchmarks.runs import figures_of


def test_predictions_are_judged_by_error_and_rank() -> None:
    predicted = {"a": 1.0, "b": 2.0, "c": 4.0}
    measured = {"a": 1.25, "b": 1.0, "c": 4.0}
    found = compared(predicted, measured)
    assert found["error"] == pytest.approx((0.2 + 1.0 + 0.0) / 3)
    assert found["rank"] == pytest.approx(0.5)


def test_who_is_preferred_meets_the_fastest_again() -> None:
    """The luckiest of thirteen turns is no measure of the others."""
    judged = Judged(
        predicted={"a": 1.0, "b": 2.0, "c": 4.0, "d": 3.0},
        measured={},
        brought={"a": 3.0, "b": 2.0, "c": 1.0, "d": 4.0},
        slower=[1.0],
    )
    assert finalists(judged) == ["a", "c", "b"]
    final = {"a": [2.2, 2.1, 2.0], "b": [2.5, 2.0, 2.0], "c": [2.3, 2.4, 1.0]}
    assert regret(judged, final) == pytest.approx(2.1 / 2.0 - 1.0)


@pytest.mark.parametrize(
    ("before", "after", "others", "void"),
    [
        (1.0, 1.1, 0.1, False),
        (1.0, 1.4, 0.1, True),
        (1.4, 1.0, 0.1, True),
        (2.0, 2.0, 0.1, False),
        (1.0, 1.0, 0.3, True),
    ],
)
def test_a_turn_does_not_count_if_the_machine_was_another_afterwards(
    *, before: float, after: float, others: float, void: bool
) -> None:
    turn = Turn(
        seconds=1.0,
        cpu_seconds=1.0,
        n_bytes=0,
        others=others,
        before={"layer": (0.4 * before, 0.6 * before)},
        after={"layer": (0.4 * after, 0.6 * after)},
    )
    assert is_void(turn) == void


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_plans_are_run_and_the_last_line_says_how_wrong_predictions_are() -> None:
    figures = figures_of(
        *("planner_against_runtime", "--small", "--rounds=1", "--seconds=0.2"),
        *("--nets", "speech"),
    )
    assert figures["plans_speech"] >= 8
    assert figures["error_speech"] >= 0
    assert -1 <= figures["rank_speech"] <= 1
