"""The pictures of the tutorial are drawn, and show what it says."""

from pathlib import Path

from experiments.figures import variables


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    variables.main(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"schedule.png", "descent.png"}


def test_the_schedule_has_three_rounds_as_the_tutorial_says() -> None:
    assert len(variables.draw_schedule().axes[1].get_xticks()) == 3
