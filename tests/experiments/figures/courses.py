"""Courses that nobody has run."""

from collections.abc import Sequence

from experiments.figures.courses import Course, Point


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
