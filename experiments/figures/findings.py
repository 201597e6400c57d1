"""What the courses of Figures 4 and 5 come to, beside what the paper says in words.

Figure 4 (section 5)   slowest to fastest: `PAPERS_ORDER`.
Figure 5 (section 5)   with at most 2,000 cores Downpour with Adagrad is the fastest;
                       Downpour with a fixed rate often misses the target; Sandblaster
                       gains most from more cores, and may win with 30,000.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from experiments.figures.courses import TARGET, Course
from experiments.figures.entries import CORES, NAMES


EXTRA: Final = "Sandblaster L-BFGS [1000]"  # not in the paper: half of its 2,000
PAPERS_ORDER: Final = (
    "SGD [1]",
    "Downpour [20]",
    "Downpour + Adagrad [20]",
    "Sandblaster L-BFGS [2000]",
    "Downpour + Adagrad [200]",
)

PAPERS_CORES: Final = 2_000  # up to which Downpour with Adagrad is the fastest
PAPERS_CROSSING_CORES: Final = 30_000  # with which Sandblaster may win


def by_label(courses: Sequence[Course]) -> dict[str, list[Course]]:
    groups: dict[str, list[Course]] = defaultdict(list)
    for course in courses:
        groups[f"{course.name} [{course.replicas}]"].append(course)
    return groups


def times_of(courses: Sequence[Course]) -> dict[int, float]:
    """Return the time to the target of each seed; infinite if it was not reached."""
    return {
        course.seed: math.inf if course.target_seconds is None else course.target_seconds
        for course in courses
    }


def order_lines(courses: Sequence[Course]) -> Iterator[str]:
    times = {label: times_of(own) for label, own in by_label(courses).items()}
    for label, own in times.items():
        yield f"{label:26} {TARGET:.0%} held out after {_spread(list(own.values()))}"
    present = [label for label in PAPERS_ORDER if label in times]
    for slower, faster in pairwise(present):
        seeds = times[slower].keys() & times[faster].keys()
        n = sum(times[faster][seed] < times[slower][seed] for seed in seeds)
        yield f"{faster} before {slower}, as in the paper: {n} of {len(seeds)} seeds"


def crossing_lines(courses: Sequence[Course]) -> Iterator[str]:
    """Tell times by machines, who is first with few cores, and where curves cross."""
    for label, own in by_label(courses).items():
        machines = own[0].machines
        missed = sum(time == math.inf for time in times_of(own).values())
        yield (
            f"{label:26} {machines:5} machines, {machines * CORES:6} cores: "
            f"{_spread(list(times_of(own).values()))}, missed by {missed} of {len(own)}"
        )
    few = [c for c in courses if c.machines * CORES <= PAPERS_CORES]
    medians = {
        label: float(np.median(list(times_of(own).values())))
        for label, own in by_label(few).items()
    }
    if medians:
        first = min(medians, key=lambda label: medians[label])
        yield f"first with at most {PAPERS_CORES} cores: {first}"
    for seed in sorted({course.seed for course in courses}):
        at = crossing_cores([course for course in courses if course.seed == seed])
        yield f"seed {seed}: Sandblaster as fast as Adagrad ever is: " + (
            "its curve does not fall" if at is None else f"with {at:,.0f} cores"
        )


def crossing_cores(courses: Sequence[Course]) -> float | None:
    """Return with how many cores Sandblaster is as fast as Downpour with Adagrad ever.

    By a straight line through its times, both axes logarithmic: of one seed. None if
    it has no two times, or gains nothing by more cores.
    """
    best = min(
        (c.target_seconds for c in courses if c.name == NAMES["adagrad"] if c.target_seconds),
        default=None,
    )
    own = [
        (c.machines * CORES, c.target_seconds)
        for c in courses
        if c.name == NAMES["l-bfgs"] and c.target_seconds
    ]
    if best is None or len({cores for cores, _ in own}) < 2:
        return None
    x = np.log([cores for cores, _ in own])
    y = np.log([seconds for _, seconds in own])
    slope, intercept = np.polyfit(x, y, 1)
    if slope >= 0:
        return None
    return float(np.exp((np.log(best) - intercept) / slope))


def _spread(times: Sequence[float]) -> str:
    middle, low, high = float(np.median(times)), min(times), max(times)
    return f"{_hours(middle)} ({_hours(low)} to {_hours(high)})"


def _hours(seconds: float) -> str:
    return "never" if seconds == math.inf else f"{seconds / 3600:.3f} h"
