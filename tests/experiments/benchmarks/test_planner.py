import pytest

from tests.experiments.benchmarks.runs import figures_of


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_plans_are_compared_and_the_last_line_has_the_ratios() -> None:
    figures = figures_of(*("planner", "--machines", "1", "8", "--nets", "speech", "--tries", "20"))
    assert figures["best_machines_speech"] == 8
    assert figures["speed_up_images_8"] > figures["speed_up_speech_8"] > 2
    assert 0 < figures["seconds_8"] < figures["seconds_table_images"]
    assert figures["worst_over_even"] <= 1
    assert figures["worst_over_whole_layer"] <= 1
    assert figures["worst_over_search"] >= 1 - 1e-9  # the search begins with the plan
