import pytest

from experiments.figures.courses import check_warm_starts, identity, reached
from experiments.figures.entries import FIGURE_4
from tests.experiments.figures.courses import course


def test_the_target_is_reached_when_two_of_three_evaluations_are_there() -> None:
    points = course("SGD", 1, [0.1, 0.3, 0.1, 0.1, 0.3, 0.2, 0.3]).points
    assert reached(points, 0.25) == 500.0


def test_one_lucky_evaluation_is_not_the_target() -> None:
    points = course("SGD", 1, [0.1, 0.3, 0.1, 0.1]).points
    assert reached(points, 0.25) is None


def test_a_course_that_ends_at_the_target_has_reached_it() -> None:
    assert reached(course("SGD", 1, [0.1, 0.3]).points, 0.25) == 200.0


def test_courses_of_one_seed_must_have_one_warm_start() -> None:
    one = course("SGD", 1, [0.1], warm_start="a")
    other = course("Downpour", 20, [0.1], warm_start="b")
    check_warm_starts([one, course("Downpour", 20, [0.1], warm_start="a")])
    check_warm_starts([one, course("SGD", 1, [0.1], seed=1, warm_start="b")])
    with pytest.raises(ValueError, match=r"Downpour \[20\] began from warm start b"):
        check_warm_starts([one, other])


def test_another_rate_is_another_course() -> None:
    entry = FIGURE_4[0]
    assert identity(entry, setting=0.1) != identity(entry, setting=0.2)
    assert identity(entry, setting=0.1) != identity(FIGURE_4[1], setting=0.1)
