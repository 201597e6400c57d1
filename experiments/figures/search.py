"""Which learning rate each entry takes, and of Sandblaster how many pairs it remembers.

As in the paper each method is shown at its best. So that none is given more care than another,
each entry has four candidates, tried once, all with one seed that no figure shows. The best is the
first at the target; if none comes there, the most accurate at its end. All tries are kept.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from distbelief.forecast.prepare import Preparation
from distbelief.forecast.run import Tell
from experiments.figures.courses import STOP_AT, Course, identity, run
from experiments.figures.entries import FIGURE_4, FIGURE_5, LEARNER, Entry
from experiments.figures.results import RESULTS, fingerprint, keep, kept, slug


SEED: Final = 100

ENTRIES: Final = (
    *(e for e in dict.fromkeys((*FIGURE_4, *FIGURE_5)) if e.kind != "l-bfgs"),
    LEARNER,  # what L-BFGS learns does not depend on its replicas (`batched`)
)


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """How one candidate did."""

    setting: float  # the candidate
    target_seconds: float | None  # when it was at the target, if it was
    held_out: float  # accuracy: the mean of its last three evaluations
    seconds: float  # of its end


def best(tries: Sequence[Try]) -> float:
    """Return the setting first at the target; of several, the most accurate."""

    def rank(each: Try) -> tuple[float, float]:
        at = each.target_seconds
        return math.inf if at is None else at, -each.held_out

    return min(tries, key=rank).setting


def run_candidate(entry: Entry, setting: float, *, preparation: Preparation, tell: Tell) -> Course:
    return run(
        entry, setting=setting, seed=SEED, preparation=preparation, stop_at=STOP_AT, tell=tell
    )


def tries_of(entry: Entry, attempt: Callable[[Entry, float], Course] | None = None) -> list[Try]:
    """Return what was found for an entry; with `attempt`, what is missing is tried."""
    of = fingerprint([identity(entry, setting=each) for each in entry.candidates], SEED)
    path = RESULTS / f"search-{slug(entry.name)}-{entry.replicas}.json"
    found = kept(path, of, list[Try]) or []
    for setting in entry.candidates[len(found) :]:
        if attempt is None:
            break
        course = attempt(entry, setting)
        last = [point.held_out for point in course.points[-3:]]
        found.append(
            Try(
                setting=setting,
                target_seconds=course.target_seconds,
                held_out=round(sum(last) / max(1, len(last)), 4),
                seconds=course.points[-1].seconds if course.points else 0.0,
            )
        )
        keep(path, found, of=of)
    return found


def setting_of(entry: Entry) -> float | None:
    entry = LEARNER if entry.kind == "l-bfgs" else entry
    tries = tries_of(entry)
    return best(tries) if len(tries) == len(entry.candidates) else None
