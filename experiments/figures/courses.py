"""Courses of training in virtual time, at the price of the paper's speech net.

The job is an ordinary one, and its roles are the real ones; only machines and clock are
those of `rig`. A course that was run is kept, and not run again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief.config.load import parse_job
from distbelief.forecast.prepare import Preparation
from distbelief.forecast.run import RunHost, Tell, run_simulated
from experiments.figures import task
from experiments.figures.entries import Entry
from experiments.figures.results import RESULTS, fingerprint, keep, kept, slug
from experiments.figures.rig import N_SHARDS, Rig
from experiments.figures.warm_start import SETTINGS, warm_start


TARGET: Final = 0.23
"""Held out, of Figure 5: what one replica of SGD takes more than an hour for."""

STOP_AT: Final = 0.236
"""Where a course ends that is only asked when it reached the target: some way above it,
for one measurement may be lucky."""


@final
class Point(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation: seconds of the large cluster, samples, and accuracies."""

    seconds: float
    samples: int
    trained: float
    held_out: float


@final
class Course(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

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


def course_of(
    entry: Entry, *, setting: float, seed: int, staging: Preparation, tell: Tell | None = None
) -> Course:
    """Run an entry once; what was run before is read from its file.

    Args:
        entry: Method and replicas.
        setting: Of the method.
        seed: Of the warm start, of the order of samples, of the machines' jitter.
        staging: Keeps what the jobs of one seed have in common.
        tell: Told how far it is.
    """
    known = kept_course(entry, setting=setting, seed=seed)
    if known is not None:
        return known
    found = run(
        entry,
        setting=setting,
        seed=seed,
        staging=staging,
        stop_at=STOP_AT if entry.stops else None,
        tell=tell,
    )
    keep(_path(entry, seed), found, of=_identity(entry, setting, seed))
    return found


def kept_course(entry: Entry, *, setting: float, seed: int) -> Course | None:
    """Return what was run before of just this, if it was."""
    return kept(_path(entry, seed), _identity(entry, setting, seed), Course)


def run(
    entry: Entry,
    *,
    setting: float,
    seed: int,
    staging: Preparation,
    stop_at: float | None = None,
    tell: Tell | None = None,
    host: RunHost | None = None,
) -> Course:
    """Run an entry once, whatever is kept; to the end, or to an accuracy held out.

    Its machines are those of `Rig`, unless another `host` is given.
    """
    begin = warm_start(seed)
    every = entry.every / entry.haste
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
    rig = Rig(entry.replicas, entry.haste)
    job = parse_job(text, path="figure.toml")
    host = rig if host is None else host
    outcome = run_simulated(staging.stage(job), host, seed=seed, tell=tell).outcome
    begun = outcome.seconds - outcome.training_seconds
    points: list[Point] = []
    for point in outcome.history:
        if point.metric is None:
            continue
        trained, held_out = task.parts_of(point.metric)
        accuracies = (round(trained, 4), round(held_out, 4))
        if points and (points[-1].trained, points[-1].held_out) == accuracies:
            continue  # the same evaluation
        seconds = max(0.0, point.seconds - begun) * entry.haste
        points.append(Point(round(seconds, 1), point.samples, *accuracies))
    return Course(
        name=entry.name,
        replicas=entry.replicas,
        machines=rig.n_machines,
        seed=seed,
        setting=setting,
        warm_start=begin.of,
        points=tuple(points),
        seconds=round(outcome.training_seconds * entry.haste, 1),
        samples=outcome.samples,
        staleness=outcome.staleness_mean,
        ended=outcome.error or outcome.ended or "",
    )


def check_warm_starts(courses: Sequence[Course]) -> None:
    """Refuse courses of one seed that did not begin from one warm start.

    Raises:
        ValueError: naming two of them.
    """
    first: dict[int, Course] = {}
    for course in courses:
        other = first.setdefault(course.seed, course)
        if other.warm_start != course.warm_start:
            raise ValueError(
                f"seed {course.seed}: {course.name} [{course.replicas}] began from "
                f"warm start {course.warm_start}, {other.name} [{other.replicas}] from "
                f"{other.warm_start}: remove one of them from {RESULTS}"
            )


def show(course: Course, tell: Callable[[str], None] = print) -> None:
    last, at = course.points[-1] if course.points else None, course.target_seconds
    tell(
        f"{course.name} [{course.replicas}] seed {course.seed} setting "
        f"{course.setting:g}: {TARGET:.0%} "
        + ("not reached" if at is None else f"after {at:,.0f} s")
        + ("" if last is None else f", {last.held_out:.1%} after {last.seconds:,.0f} s")
        + (f", staleness {course.staleness:.1f}" if course.staleness else "")
        + f"; {course.ended}"
    )


def identity(entry: Entry, *, setting: float) -> str:
    """Return a fingerprint of all that decides a course, but for its seed and data."""
    machine = Rig(entry.replicas, entry.haste).machine
    parts = (entry.algorithm(setting, squares=0.0), entry.replicas, entry.haste)
    return fingerprint(parts, machine, task.identity(), SETTINGS)


def _identity(entry: Entry, setting: float, seed: int) -> str:
    return fingerprint(identity(entry, setting=setting), entry.samples, entry.every, seed)


def _path(entry: Entry, seed: int) -> Path:
    return RESULTS / f"{slug(entry.name)}-{entry.replicas}-{seed}.json"
