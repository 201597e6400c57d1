"""Courses of training in virtual time, at the price of the paper's speech net.

The job is an ordinary one, and its roles are the real ones; only machines and clock are those of
`entries.ScaledMachines`. A course that was run is kept, and not run again.

Sandblaster with 2,000 replicas is put together from two runs. A batch is all the data, summed in a
fixed order, so what L-BFGS does next does not depend on the number of replicas: eight learn
(`LEARNER`). A run with all of them finds how long an evaluation takes (`pace`), from the beginning
of the second to that of the last: at first a cluster meets and waits for time-outs. A pace is kept
with its date: no edit tells whether it has changed, only another run.

Each method is shown at its best, as in the paper: each entry has four candidates for its setting (a
learning rate; of Sandblaster, how many pairs it remembers), tried with one seed. The best is the
first at the target; if none comes there, the most accurate at its end. All tries are kept.
"""

import datetime as dt
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.plans.cluster import Machine
from distbelief.protocol.role import Seconds
from distbelief.simulation.forecast.run import FinishedRun
from experiments.figures import task
from experiments.figures.entries import FIGURE_4, FIGURE_5, LEARNER, N_SHARDS, Entry, ScaledMachines
from experiments.figures.results import RESULTS, fingerprint, keep, kept, slug
from experiments.figures.task import N_TRAIN, SETTINGS, warm_start


TARGET: Final = 0.23  # held out, of Figure 5: what one replica of SGD takes more than an hour for

# Where a course ends that is only asked when it reached the target: some way above it, for one
# measurement may be lucky
STOP_AT: Final = 0.236


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation: seconds of the large cluster, samples, and accuracies."""

    seconds: float
    samples: int
    trained: float
    held_out: float


class Course(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the method
    replicas: int  # model replicas
    machines: int  # theirs, and the shards'
    seed: int  # of everything
    setting: float  # learning rate, or samples of a batch
    warm_start: str  # fingerprint of what it began from
    points: tuple[Point, ...]  # in order of time
    seconds: float  # of the large cluster, all in all
    samples: int  # trained on, all in all
    staleness: float | None  # mean, in pushes
    ended: str  # why

    @property
    def target_seconds(self) -> float | None:
        return reached(self.points, TARGET)


def reached(points: Sequence[Point], target: float) -> float | None:
    """Return the time of the first evaluation at the target that was no luck.

    That is, of it and the two that follow at least two are at the target.
    """
    met = [point.held_out >= target for point in points]
    for index, point in enumerate(points):
        window = met[index : index + 3]
        if met[index] and sum(window) >= min(2, len(window)):
            return point.seconds
    return None


# Simulates a job on machines, with a seed
Simulate = Callable[[Job, ScaledMachines, int], FinishedRun]


def course_of(entry: Entry, simulate: Simulate, *, setting: float, seed: int) -> Course:
    """Run an entry once; what was run before is read from its file."""
    known = kept_course(entry, setting=setting, seed=seed)
    if known is None:
        stop_at = STOP_AT if entry.stops else None
        known = run(entry, simulate, setting=setting, seed=seed, stop_at=stop_at)
        keep(_path(entry, seed), known, of=_identity(entry, setting, seed))
    return known


def kept_course(entry: Entry, *, setting: float, seed: int) -> Course | None:
    return kept(_path(entry, seed), _identity(entry, setting, seed), Course)


def run(
    entry: Entry,
    simulate: Simulate,
    *,
    setting: float,
    seed: int,
    stop_at: float | None = None,
    machines: ScaledMachines | None = None,
) -> Course:
    """Run an entry once, whatever is kept; to the end, or to an accuracy held out."""
    begin = warm_start(seed)
    every = entry.every / entry.time_scale
    text = f"""
[model]
factory = "experiments.figures.task:net"
initial = "{begin.path}"
[data.train]
factory = "experiments.figures.task:train"
[data.test]
factory = "experiments.figures.task:measured"
[algorithm]
{entry.algorithm(setting, squares=begin.squares)}
loss = "experiments.figures.task:loss"
seed = {seed}
[cluster]
replicas = {entry.replicas}
shards = {N_SHARDS}
[evaluation]
metric = "experiments.figures.task:both"
every = "{every} s"
[stop]
samples = {entry.samples}
{"" if stop_at is None else f"accuracy = {stop_at}"}
[output]
directory = "unused"
snapshot_every = "1 h"
report_every = "{every} s"
"""
    machines = machines or ScaledMachines(entry.replicas, entry.time_scale)
    outcome = simulate(parse_job(text, path="figure.toml"), machines, seed).outcome
    begun = outcome.seconds - outcome.training_seconds
    points: list[Point] = []
    for point in outcome.history:
        if point.metric is None:
            continue
        trained, held_out = task.parts_of(point.metric)
        accuracies = (round(trained, 4), round(held_out, 4))
        if points and (points[-1].trained, points[-1].held_out) == accuracies:
            continue  # the same evaluation
        seconds = max(0.0, point.seconds - begun) * entry.time_scale
        points.append(Point(round(seconds, 1), point.samples, *accuracies))
    return Course(
        name=entry.name,
        replicas=entry.replicas,
        machines=machines.n_machines,
        seed=seed,
        setting=setting,
        warm_start=begin.of,
        points=tuple(points),
        seconds=round(outcome.training_seconds * entry.time_scale, 1),
        samples=outcome.samples,
        staleness=outcome.staleness_mean,
        ended=outcome.error or outcome.stop_reason or "",
    )


def check_warm_starts(courses: Sequence[Course]) -> None:
    first: dict[int, Course] = {}
    for course in courses:
        other = first.setdefault(course.seed, course)
        if other.warm_start != course.warm_start:
            raise ValueError(
                f"seed {course.seed}: {course.name} [{course.replicas}] began from "
                f"warm start {course.warm_start}, {other.name} [{other.replicas}] from "
                f"{other.warm_start}: remove one of them from {RESULTS}"
            )


def show(course: Course, report: Callable[[str], None]) -> None:
    last, at = course.points[-1] if course.points else None, course.target_seconds
    report(
        f"{course.name} [{course.replicas}] seed {course.seed} setting "
        f"{course.setting:g}: {TARGET:.0%} "
        + ("not reached" if at is None else f"after {at:,.0f} s")
        + ("" if last is None else f", {last.held_out:.1%} after {last.seconds:,.0f} s")
        + (f", staleness {course.staleness:.1f}" if course.staleness else "")
        + f"; {course.ended}"
    )


def identity(entry: Entry, *, setting: float) -> str:
    """Return a fingerprint of all that decides a course, but for its seed and data."""
    machine = _figures_of(ScaledMachines(entry.replicas, entry.time_scale).machine)
    parts = (entry.algorithm(setting, squares=0.0), entry.replicas, entry.time_scale)
    return fingerprint(parts, machine, task.identity(), SETTINGS)


_LATER: Final = {"upload", "region", "price", "join", "leave", "preemptions"}


def _figures_of(machine: Machine) -> object:
    """Return a machine without the fields that came after the first kept results, if unused."""
    fields = [
        field
        for field in msgspec.structs.fields(machine)
        if field.name not in _LATER or getattr(machine, field.name) != field.default
    ]
    kept = msgspec.defstruct("Machine", [field.name for field in fields])
    return kept(*(getattr(machine, field.name) for field in fields))


def _identity(entry: Entry, setting: float, seed: int) -> str:
    return fingerprint(identity(entry, setting=setting), entry.samples, entry.every, seed)


def _path(entry: Entry, seed: int) -> Path:
    return RESULTS / f"{slug(entry.name)}-{entry.replicas}-{seed}.json"


EVALUATIONS: Final = 4
PACE_SEED: Final = 0
PACE_HISTORY: Final = 10.0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float  # of the large cluster
    measured: str  # the date, in UTC


def composed(entry: Entry, *, setting: float, seed: int) -> Course | None:
    learnt, known = kept_course(LEARNER, setting=setting, seed=seed), pace(entry)
    return at_pace(learnt, entry, known.seconds) if learnt and known else None


def at_pace(learnt: Course, entry: Entry, seconds: float) -> Course:
    """Return what was learnt as if every evaluation had taken so long."""
    points = tuple(
        msgspec.structs.replace(point, seconds=round(seconds * point.samples / N_TRAIN, 1))
        for point in learnt.points
    )
    return msgspec.structs.replace(
        learnt,
        name=entry.name,
        replicas=entry.replicas,
        machines=ScaledMachines(entry.replicas, entry.time_scale).n_machines,
        points=points,
        seconds=round(seconds * learnt.samples / N_TRAIN, 1),
        staleness=None,
    )


def find_pace(entry: Entry, simulate: Simulate) -> Pace:
    """Run a few evaluations with all replicas, unless that is kept."""
    known = pace(entry)
    if known is None:
        short = msgspec.structs.replace(entry, samples=EVALUATIONS * N_TRAIN)
        begun: list[Seconds] = []
        machines = ScaledMachines(entry.replicas, entry.time_scale, begun)
        run(short, simulate, setting=PACE_HISTORY, seed=PACE_SEED, machines=machines)
        seconds = round(entry.time_scale * interval(begun), 2)
        known = Pace(seconds=seconds, measured=dt.datetime.now(dt.UTC).date().isoformat())
        keep(_pace_path(entry), known, of=pace_fingerprint(entry))
    return known


def pace(entry: Entry) -> Pace | None:
    return kept(_pace_path(entry), pace_fingerprint(entry), Pace)


def interval(begun: Sequence[Seconds]) -> Seconds:
    """Return the mean time between evaluations, the first left out."""
    later = begun[1:EVALUATIONS]
    return (later[-1] - later[0]) / (len(later) - 1)


def pace_fingerprint(entry: Entry) -> str:
    return fingerprint(identity(entry, setting=PACE_HISTORY), EVALUATIONS, "between", "code")


def _pace_path(entry: Entry) -> Path:
    return RESULTS / f"pace-{entry.replicas}.json"


SEARCH_SEED: Final = 100  # that no figure shows

SEARCHED: Final = (
    *(e for e in dict.fromkeys((*FIGURE_4, *FIGURE_5)) if e.kind != "l-bfgs"),
    LEARNER,  # what L-BFGS learns does not depend on its replicas (`batched`)
)


class Try(msgspec.Struct, frozen=True, kw_only=True):
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
    """Return what was found for an entry; with `attempt`, what is missing is tried."""
    of = fingerprint([identity(entry, setting=each) for each in entry.candidates], SEARCH_SEED)
    path = RESULTS / f"search-{slug(entry.name)}-{entry.replicas}.json"
    found = kept(path, of, list[Try]) or []
    for setting in entry.candidates[len(found) :]:
        if attempt is None:
            break
        course = attempt(entry, setting)
        last = [point.held_out for point in course.points[-3:]]
        one = Try(
            setting=setting,
            target_seconds=course.target_seconds,
            held_out=round(sum(last) / max(1, len(last)), 4),
            seconds=course.points[-1].seconds if course.points else 0.0,
        )
        found.append(one)
        keep(path, found, of=of)
    return found


def setting_of(entry: Entry) -> float | None:
    entry = LEARNER if entry.kind == "l-bfgs" else entry
    tries = tries_of(entry)
    return best(tries) if len(tries) == len(entry.candidates) else None
