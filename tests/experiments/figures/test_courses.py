"""Courses that nobody has run, what they come to, and how they are drawn."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.figures import courses, drawing
from experiments.figures.__main__ import main
from experiments.figures.courses import (
    TARGET,
    Course,
    Pace,
    Point,
    at_pace,
    check_warm_starts,
    identity,
    interval,
    pace,
    reached,
)
from experiments.figures.entries import CORES, FIGURE_4, NAMES
from experiments.figures.findings import (
    PAPERS_ORDER,
    crossing_cores,
    crossing_lines,
    order_lines,
    times_of,
)
from experiments.figures.results import keep
from experiments.figures.task import N_TRAIN


@pytest.mark.parametrize(
    ("held_out", "seconds"),
    [
        ([0.1, 0.3, 0.1, 0.1, 0.3, 0.2, 0.3], 500.0),  # two of three evaluations
        ([0.1, 0.3, 0.1, 0.1], None),  # a lucky one
        ([0.1, 0.3], 200.0),  # a course may end at the target
    ],
)
def test_the_target_is_reached_when_two_of_three_evaluations_are_there(
    held_out: list[float], seconds: float | None
) -> None:
    assert reached(course("SGD", 1, held_out).points, 0.25) == seconds


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


HIT = TARGET + 0.01
ADAGRAD, FIXED, SANDBLASTER = ("Downpour + Adagrad", "Downpour", "Sandblaster L-BFGS")


def test_the_order_is_counted_seed_by_seed() -> None:
    missed = [course("SGD", 1, [0.0]), course("SGD", 1, [HIT], seed=1)]
    assert times_of(missed) == {0: math.inf, 1: 100.0}  # never
    both = [
        *(course("SGD", 1, [0.0, HIT]), course(FIXED, 20, [HIT])),
        *(course("SGD", 1, [HIT], seed=1), course(FIXED, 20, [0.0, HIT], seed=1)),
    ]
    lines = list(order_lines(both))
    assert lines[-1].endswith("as in the paper: 1 of 2 seeds")
    assert "0.042 h (0.028 h to 0.056 h)" in lines[0]


def test_a_crossing_is_where_the_line_of_sandblaster_meets_the_best() -> None:
    """Ten times the cores are ten times as fast: 200 s, 20 s, so 2 s at 100 times."""
    slow = course(SANDBLASTER, 10, [HIT], seconds=200.0)
    fast = course(SANDBLASTER, 100, [HIT], seconds=20.0)
    slower = course(SANDBLASTER, 100, [HIT], seconds=300.0)
    best = course(ADAGRAD, 10, [HIT], seconds=2.0)
    others = [best, course(ADAGRAD, 20, [HIT], seconds=5.0)]
    assert crossing_cores([slow, fast, *others]) == pytest.approx(2 * 1000 * CORES)
    for without in ([best, slow], [best, slow, slower], [slow, fast]):
        assert crossing_cores(without) is None  # without gain, or without two times


def test_the_crossings_name_who_is_first_with_few_cores() -> None:
    first = [course(ADAGRAD, 10, [HIT]), course(ADAGRAD, 500, [HIT], seconds=1.0)]
    lines = list(crossing_lines([course(FIXED, 5, [0.0, 0.0]), *first]))
    assert lines[0].endswith("never (never to never), missed by 1 of 1")
    assert "first with at most 2000 cores: Downpour + Adagrad [10]" in lines


def test_sandblaster_takes_its_time_from_the_evaluations_it_needs() -> None:
    learnt = course(SANDBLASTER, 8, [0.1, 0.2])
    found = at_pace(learnt, FIGURE_4[4], 20.0)
    assert found.replicas == 2000
    assert found.points[1].held_out == 0.2
    assert found.points[1].seconds == round(20.0 * 2000 / N_TRAIN, 1)
    # How long 2,000 replicas took to meet was once counted as a part of each.
    assert interval([100.0, 140.0, 141.0, 143.0, 150.0]) == 1.5


def test_figures_are_drawn_without_those_that_missed_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "FOLDER", tmp_path)
    names = [label.rpartition(" ")[0] for label in PAPERS_ORDER]
    seeds = range(2)
    drawing.draw_methods([course(n, 20, [0.1, 0.2, 0.3], seed=s) for n in names for s in seeds])
    crossings = [
        course(name, replicas, [TARGET] if replicas < 40 else [0.0], seed=seed)
        for name in NAMES.values()
        for replicas in (10, 20, 40)
        for seed in seeds
    ]
    drawing.draw_crossings(crossings)
    for name in ("figure4.png", "figure5.png"):
        assert (tmp_path / name).stat().st_size > 1000


ENTRY = next(entry for entry in FIGURE_4 if entry.kind == "l-bfgs")


def test_a_kept_pace_is_told_with_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was called found with another code after each edit, also of what cannot change it."""
    monkeypatch.setattr(courses, "RESULTS", tmp_path)
    assert pace(ENTRY) is None
    path = tmp_path / f"pace-{ENTRY.replicas}.json"
    known = Pace(seconds=31.0, measured="2026-11-22")
    keep(path, known, of=courses.pace_fingerprint(ENTRY))
    assert pace(ENTRY) == known
    main(["methods", "--seeds", "1", "--only", ENTRY.label])
    assert f"{ENTRY.label}: its pace was measured on 2026-11-22" in capsys.readouterr().out


def course(
    name: str,
    replicas: int,
    accuracies: Sequence[float],
    *,
    seed: int = 0,
    seconds: float = 100.0,
    warm_start: str = "one",
) -> Course:
    """Return a course with an evaluation every so many seconds."""
    points = tuple(
        Point((index + 1) * seconds, 1000 * (index + 1), accuracy + 0.01, accuracy)
        for index, accuracy in enumerate(accuracies)
    )
    return Course(
        name=name,
        replicas=replicas,
        machines=2 * replicas,
        seed=seed,
        setting=0.01,
        warm_start=warm_start,
        points=points,
        seconds=len(points) * seconds,
        samples=1000 * len(points),
        staleness=None,
        ended="",
    )
