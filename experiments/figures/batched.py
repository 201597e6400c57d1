"""Sandblaster with 2,000 replicas, put together from two runs that can be afforded.

A batch is all the data, and its gradient is summed in the order of its sets, whoever
has computed them: so what L-BFGS does next, evaluation by evaluation, does not depend
on how many replicas there are. It learns with eight (`LEARNER`), and how long one
evaluation takes is found by as many as there are to be, in a few evaluations (`pace`):
from the beginning of the second to that of the last, for at first a cluster meets, and
waits for time-outs, which do not shrink with it.

    learnt   accuracies after 1, 2, 3 ... evaluations, of one seed
    pace     seconds of the large cluster for one of them

What is learnt is the same with every code that sums alike. A pace is not: it is kept
with a fingerprint of the code that it was found with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import msgspec

from distbelief.core.memory import Memory
from distbelief.forecast.prepare import Preparation, PreparedJob
from distbelief.forecast.run import Tell
from distbelief.roles.role import ALL_MESSAGES, Action, Address, Event, Role, Seconds
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions
from experiments.figures.code import code_of
from experiments.figures.courses import Course, Point, course_of, identity, kept_course, run
from experiments.figures.entries import LEARNER, Entry
from experiments.figures.results import RESULTS, fingerprint, keep, kept
from experiments.figures.rig import Rig
from experiments.figures.task import N_TRAIN


EVALUATIONS: Final = 4
_COORDINATOR: Final = Address("coordinator")
_SEED: Final = 0
_HISTORY: Final = 10.0
_FOLDERS: Final = ("sandblaster", "distbelief/parameter_server", "distbelief/simulation")
"""The code that decides how long an evaluation takes."""


@final
class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long an evaluation takes."""

    seconds: float  # of the large cluster
    code: str  # with which that was found

    @property
    def is_stale(self) -> bool:
        return self.code != code_of(*_FOLDERS)


def composed(entry: Entry, *, setting: float, seed: int) -> Course | None:
    """Return a course of Sandblaster, if both its parts were run."""
    learnt = kept_course(LEARNER, setting=setting, seed=seed)
    known = pace(entry)
    if learnt is None or known is None:
        return None
    return at_pace(learnt, entry, known.seconds)


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


def learn(setting: float, *, seed: int, staging: Preparation, tell: Tell) -> Course:
    return course_of(LEARNER, setting=setting, seed=seed, staging=staging, tell=tell)


def find_pace(entry: Entry, *, staging: Preparation, tell: Tell) -> Pace:
    """Run a few evaluations with all replicas, unless that is kept, of this code."""
    known = pace(entry)
    if known is None or known.is_stale:
        short = msgspec.structs.replace(entry, samples=EVALUATIONS * N_TRAIN)
        host = _Timed(Rig(entry.replicas, entry.haste), [])
        run(short, setting=_HISTORY, seed=_SEED, staging=staging, tell=tell, host=host)
        seconds = round(entry.haste * interval(host.begun), 2)
        known = Pace(seconds=seconds, code=code_of(*_FOLDERS))
        keep(_path(entry), known, of=_of(entry))
    return known


def pace(entry: Entry) -> Pace | None:
    """Return how long an evaluation by all replicas takes, if that is known."""
    return kept(_path(entry), _of(entry), Pace)


def stale(entries: Sequence[Entry]) -> list[Entry]:
    return [
        entry
        for entry in entries
        if entry.kind == "l-bfgs" and (known := pace(entry)) and known.is_stale
    ]


def interval(begun: Sequence[Seconds]) -> Seconds:
    """Return the mean time between evaluations, the first left out.

    Args:
        begun: When each began, three at the least.
    """
    later = begun[1:EVALUATIONS]
    return (later[-1] - later[0]) / (len(later) - 1)


@final
@dataclass(frozen=True, slots=True)
class _Timed:
    """Machines, and when the coordinator on them began its evaluations."""

    rig: Rig
    begun: list[Seconds]

    def n_needed(self, staged: PreparedJob) -> int:
        return self.rig.n_needed(staged)

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        return self.rig.options(staged, faults=faults)

    def builders(self, staged: PreparedJob) -> dict[Address, Builder]:
        builders = self.rig.builders(staged)
        build = builders[_COORDINATOR]

        def watched(memory: Memory) -> Role:
            return _Watched(build(memory), self.begun)

        return builders | {_COORDINATOR: watched}


@final
@dataclass(frozen=True, slots=True)
class _Watched:
    """A coordinator; notes when it begins an evaluation."""

    accepts = ALL_MESSAGES

    role: Role
    begun: list[Seconds]

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        actions = self.role.handle(event, now)
        _, counters = self.role.status()
        if counters.get("evaluations", 0) > len(self.begun):
            self.begun.append(now)
        return actions

    def status(self) -> tuple[str, dict[str, float]]:
        word, counters = self.role.status()
        return word, dict(counters)


def _of(entry: Entry) -> str:
    return fingerprint(identity(entry, setting=_HISTORY), EVALUATIONS, "between", "code")


def _path(entry: Entry) -> Path:
    return RESULTS / f"pace-{entry.replicas}.json"
