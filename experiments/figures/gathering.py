"""The courses of a figure: those that are kept, and those that are run now."""

from collections.abc import Sequence

from experiments.figures.batched import composed, find_pace, learn, stale
from experiments.figures.courses import Course, check_warm_starts, course_of, kept_course, show
from experiments.figures.entries import Entry
from experiments.figures.running import Options, Runs
from experiments.figures.search import setting_of


def gather(entries: Sequence[Entry], options: Options, runs: Runs) -> list[Course]:
    """Return all courses of these entries, seed by seed.

    Entries whose search is not over are left out, and said to be.

    Raises:
        ValueError: courses of one seed began from different warm starts.
    """
    if options.only and not options.run:
        runs.say("--only chooses what --run runs; all that is kept is drawn")
    settings: dict[Entry, float] = {}
    for entry in entries:
        setting = setting_of(entry)
        if setting is None:
            runs.say(f"{entry.label}: no setting yet: run experiments.figures.search")
        else:
            settings[entry] = setting
    _look_at_paces([*settings], options, runs)
    courses: list[Course] = []
    for seed in range(options.seeds):
        for entry, setting in settings.items():
            known = _kept(entry, setting, seed)
            if known is None and options.run and options.wants(entry):
                known = _run(entry, setting, seed, runs)
            if known is None:
                runs.say(f"{entry.label} seed {seed}: not run with these settings yet")
            else:
                courses.append(known)
    check_warm_starts(courses)
    return courses


def _look_at_paces(entries: Sequence[Entry], options: Options, runs: Runs) -> None:
    """Find paces of another code anew, if wanted; else say of which they are."""
    for entry in stale(entries):
        if options.run and options.wants(entry):
            with runs.one(f"{entry.label}, its pace") as tell:
                find_pace(entry, staging=runs.staging, tell=tell)
        else:
            runs.say(
                f"{entry.label}: its pace was found with another code: --run --only "
                f'"[{entry.replicas}]" finds it anew'
            )


def _kept(entry: Entry, setting: float, seed: int) -> Course | None:
    if entry.kind == "l-bfgs":
        return composed(entry, setting=setting, seed=seed)
    return kept_course(entry, setting=setting, seed=seed)


def _run(entry: Entry, setting: float, seed: int, runs: Runs) -> Course | None:
    with runs.one(f"{entry.label}, seed {seed}") as tell:
        if entry.kind == "l-bfgs":
            learn(setting, seed=seed, staging=runs.staging, tell=tell)
            find_pace(entry, staging=runs.staging, tell=tell)
            return _kept(entry, setting, seed)
        found = course_of(entry, setting=setting, seed=seed, staging=runs.staging, tell=tell)
    show(found, runs.say)
    return found
