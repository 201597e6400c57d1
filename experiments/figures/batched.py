"""Sandblaster with 2,000 replicas, put together from two runs that can be afforded.

A batch is all the data, and its gradient is summed in the order of its sets, whoever
has computed them: so what L-BFGS does next, evaluation by evaluation, does not depend
on how many replicas there are. It learns with eight (`LEARNER`), and how long one
evaluation takes is found by as many as there are to be, in a few evaluations (`pace`).

    learnt   accuracies after 1, 2, 3 ... evaluations, of one seed
    pace     seconds of the large cluster for one of them
"""

from pathlib import Path
from typing import Final

import msgspec

from distbelief.forecast.staging import Staging
from distbelief.forecast.watching import Tell
from experiments.figures.courses import (
    Course,
    Point,
    course_of,
    identity,
    kept_course,
    run,
)
from experiments.figures.entries import LEARNER, Entry
from experiments.figures.results import RESULTS, fingerprint, keep, kept
from experiments.figures.rig import Rig
from experiments.figures.task import N_TRAIN


EVALUATIONS: Final = 4
_SEED: Final = 0
_HISTORY: Final = 10.0


def composed(entry: Entry, *, setting: float, seed: int) -> Course | None:
    """Return a course of Sandblaster, if both its parts were run."""
    learnt = kept_course(LEARNER, setting=setting, seed=seed)
    seconds = pace(entry)
    if learnt is None or seconds is None:
        return None
    return at_pace(learnt, entry, seconds)


def at_pace(learnt: Course, entry: Entry, seconds: float) -> Course:
    """Return what was learnt as if every evaluation had taken so long.

    Args:
        learnt: By however many replicas.
        entry: How many there are to be.
        seconds: Of one evaluation, by those.
    """
    points = tuple(
        Point(
            round(seconds * point.samples / N_TRAIN, 1),
            point.samples,
            point.trained,
            point.held_out,
        )
        for point in learnt.points
    )
    return Course(
        name=entry.name,
        replicas=entry.replicas,
        machines=Rig(entry.replicas, entry.haste).n_machines,
        seed=learnt.seed,
        setting=learnt.setting,
        warm_start=learnt.warm_start,
        points=points,
        seconds=round(seconds * learnt.samples / N_TRAIN, 1),
        samples=learnt.samples,
        staleness=None,
        ended=learnt.ended,
    )


def learn(setting: float, *, seed: int, staging: Staging, tell: Tell) -> Course:
    """Run what is learnt, unless it is kept."""
    return course_of(LEARNER, setting=setting, seed=seed, staging=staging, tell=tell)


def find_pace(entry: Entry, *, staging: Staging, tell: Tell) -> float:
    """Run a few evaluations with all replicas, unless that is kept."""
    known = pace(entry)
    if known is None:
        short = msgspec.structs.replace(entry, samples=EVALUATIONS * N_TRAIN)
        found = run(short, setting=_HISTORY, seed=_SEED, staging=staging, tell=tell)
        known = round(found.seconds * N_TRAIN / found.samples, 2)
        keep(_path(entry), known, of=_of(entry))
    return known


def pace(entry: Entry) -> float | None:
    """Return the seconds of one evaluation by all replicas, if they are known."""
    return kept(_path(entry), _of(entry), float)


def _of(entry: Entry) -> str:
    return fingerprint(identity(entry, setting=_HISTORY), EVALUATIONS)


def _path(entry: Entry) -> Path:
    return RESULTS / f"pace-{entry.replicas}.json"
