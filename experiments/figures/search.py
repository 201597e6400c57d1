"""Which learning rate each entry takes, and of Sandblaster which size of batch.

    python -m experiments.figures.search [--run] [--only NAME]

As in the paper each method is shown at its best. So that none is given more care than
another, each entry has four candidates, tried once, all with one seed that no figure
shows. The best is the first at the target; if none comes there, the most accurate at
its end. All tries are kept in experiments/figures/results.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

from experiments.figures.courses import STOP_AT, Course, identity, run
from experiments.figures.entries import FIGURE_4, FIGURE_5, LEARNER, Entry
from experiments.figures.results import RESULTS, fingerprint, keep, kept, slug
from experiments.figures.running import Options, Runs, options_from


SEED: Final = 100

ENTRIES: Final = (
    *(e for e in dict.fromkeys((*FIGURE_4, *FIGURE_5)) if e.kind != "l-bfgs"),
    LEARNER,
)
"""What L-BFGS learns does not depend on its replicas (`batched`)."""


@final
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


def tries_of(entry: Entry, attempt: Callable[[Entry, float], Course] | None = None) -> list[Try]:
    """Return what was found for an entry; try what is missing if told how."""
    of = fingerprint([identity(entry, setting=each) for each in entry.candidates], SEED)
    path = _path(entry)
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
    """Return the best setting of an entry, if its search is over."""
    entry = LEARNER if entry.kind == "l-bfgs" else entry
    tries = tries_of(entry)
    return best(tries) if len(tries) == len(entry.candidates) else None


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_from(__doc__, arguments, entries=ENTRIES)
    entries = [entry for entry in ENTRIES if options.wants(entry)]
    with Runs(len(entries)) as runs:
        for entry in entries:
            tries = _tried(entry, options, runs)
            for each in tries:
                mark = "*" if each.setting == best(tries) else " "
                at = each.target_seconds
                when = "never" if at is None else f"{at:,.0f} s"
                runs.say(
                    f"{mark} {entry.label:26} {each.setting:<7g} at the target: {when};"
                    f" {each.held_out:.1%} after {each.seconds:,.0f} s"
                )


def _tried(entry: Entry, options: Options, runs: Runs) -> list[Try]:
    def attempt(entry: Entry, setting: float) -> Course:
        with runs.one(f"{entry.label}, {setting:g}") as tell:
            return run(
                entry, setting=setting, seed=SEED, staging=runs.staging, stop_at=STOP_AT, tell=tell
            )

    return tries_of(entry, attempt if options.run else None)


def _path(entry: Entry) -> Path:
    return RESULTS / f"search-{slug(entry.name)}-{entry.replicas}.json"


if __name__ == "__main__":
    main()
