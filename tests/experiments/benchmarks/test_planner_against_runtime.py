import pytest

from experiments.benchmarks import planner_against_runtime
from experiments.benchmarks.planner_against_runtime import Found, Turn, compared
from tests.experiments.benchmarks.runs import figures_of


def test_predictions_are_judged_by_error_rank_and_regret() -> None:
    predicted = {"a": 1.0, "b": 2.0, "c": 4.0}
    measured = {"a": 1.25, "b": 1.0, "c": 4.0}
    found = compared(predicted, measured)
    assert found["error"] == pytest.approx((0.2 + 1.0 + 0.0) / 3)
    assert found["rank"] == pytest.approx(0.5)
    assert found["regret"] == pytest.approx(0.25)
    assert found["plans"] == 3


@pytest.mark.parametrize(
    ("probe", "others", "is_void"),
    [(1.1, 0.1, False), (1.2, 0.1, True), (0.8, 0.1, True), (1.0, 0.3, True)],
)
def test_a_turn_on_another_machine_than_the_one_that_was_measured_is_void(
    *, probe: float, others: float, is_void: bool
) -> None:
    """The first of all profiles had the say, though the median of them predicts."""
    found = Found(turns={}, parts=[0, 1, 2], probes=[1.5, 1.0, 0.9])
    turn = Turn(seconds=1.0, cpu_seconds=1.0, n_bytes=0, others=others, probe=probe)
    assert planner_against_runtime._is_void(turn, found) == is_void


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
