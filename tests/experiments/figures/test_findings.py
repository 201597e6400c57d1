import math

import pytest

from experiments.figures.batched import at_pace, interval
from experiments.figures.courses import TARGET
from experiments.figures.entries import FIGURE_4
from experiments.figures.findings import crossing_cores, crossing_lines, order_lines, times_of
from experiments.figures.rig import CORES
from experiments.figures.task import N_TRAIN
from tests.experiments.figures.courses import course


HIT = TARGET + 0.01
ADAGRAD, FIXED, SANDBLASTER = ("Downpour + Adagrad", "Downpour", "Sandblaster L-BFGS")


def test_a_target_that_was_missed_took_for_ever() -> None:
    courses = [course("SGD", 1, [0.0]), course("SGD", 1, [HIT], seed=1)]
    assert times_of(courses) == {0: math.inf, 1: 100.0}


def test_the_order_is_counted_seed_by_seed() -> None:
    lines = list(
        order_lines(
            [
                course("SGD", 1, [0.0, HIT]),
                course(FIXED, 20, [HIT]),
                course("SGD", 1, [HIT], seed=1),
                course(FIXED, 20, [0.0, HIT], seed=1),
            ]
        )
    )
    assert lines[-1].endswith("as in the paper: 1 of 2 seeds")
    assert "0.042 h (0.028 h to 0.056 h)" in lines[0]


def test_a_crossing_is_where_the_line_of_sandblaster_meets_the_best() -> None:
    """Ten times the cores are ten times as fast: 200 s, 20 s, so 2 s at 100 times."""
    courses = [
        course(SANDBLASTER, 10, [HIT], seconds=200.0),
        course(SANDBLASTER, 100, [HIT], seconds=20.0),
        course(ADAGRAD, 10, [HIT], seconds=2.0),
        course(ADAGRAD, 20, [HIT], seconds=5.0),
    ]
    assert crossing_cores(courses) == pytest.approx(2 * 1000 * CORES)


def test_there_is_no_crossing_without_gain_or_without_two_times() -> None:
    best = course(ADAGRAD, 10, [HIT], seconds=2.0)
    slow = course(SANDBLASTER, 10, [HIT], seconds=20.0)
    slower = course(SANDBLASTER, 100, [HIT], seconds=30.0)
    assert crossing_cores([best, slow]) is None
    assert crossing_cores([best, slow, slower]) is None
    assert crossing_cores([slow, slower]) is None


def test_the_crossings_name_who_is_first_with_few_cores() -> None:
    lines = list(
        crossing_lines(
            [
                course(FIXED, 5, [0.0, 0.0]),
                course(ADAGRAD, 10, [HIT]),
                course(ADAGRAD, 500, [HIT], seconds=1.0),
            ]
        )
    )
    assert lines[0].endswith("never (never to never), missed by 1 of 1")
    assert "first with at most 2000 cores: Downpour + Adagrad [10]" in lines


def test_sandblaster_takes_its_time_from_the_evaluations_it_needs() -> None:
    learnt = course(SANDBLASTER, 8, [0.1, 0.2])
    found = at_pace(learnt, FIGURE_4[4], 20.0)
    assert found.replicas == 2000
    assert found.points[1].held_out == 0.2
    assert found.points[1].seconds == round(20.0 * 2000 / N_TRAIN, 1)


def test_the_pace_is_that_between_evaluations() -> None:
    """How long 2,000 replicas took to meet was once counted as a part of each."""
    assert interval([100.0, 140.0, 141.0, 143.0, 150.0]) == 1.5
