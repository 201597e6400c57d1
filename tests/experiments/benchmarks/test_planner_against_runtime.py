"""Predicted against measured: that it runs."""

import pytest

from tests.experiments.benchmarks.runs import figures_of


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_plans_are_run_and_the_last_line_says_how_wrong_predictions_are() -> None:
    figures = figures_of(
        *("planner_against_runtime", "--small", "--rounds=1", "--steps=1"),
        *("--nets", "speech"),
    )
    assert figures["plans_speech"] >= 8
    assert figures["error_speech"] >= 0
    assert -1 <= figures["rank_speech"] <= 1
