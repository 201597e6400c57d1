"""A job broken in virtual time: the same seed gives the same run, event by event.

The machines are nobody's: as fast as makes the job about a minute long if nothing
breaks. So the supervisor's patience (a silence of 3 s is told, one of 10 s is a death)
matters as it does in a job of any length, and nothing depends on the machine this runs
on. How fast that is is found by trying: a job ends when the supervisor next hears from
its replicas, and on machines that are far too fast all of it is over by then. A job
that ends by the clock is as long as it says.
"""

from dataclasses import dataclass, field
from typing import Final, final

from rich.console import Console

from distbelief.chaos.report import (
    ChaosReport,
    IterationCount,
    ReportLine,
    end_line,
    in_order,
    report_lines,
    restarts_of,
)
from distbelief.chaos.schedule import FaultEvent, faults_of, schedule
from distbelief.display.progress import WaitProgress
from distbelief.forecast.prepare import PreparedJob
from distbelief.forecast.run import N_EVENTS_MAX, Tell, report_until_over, view_of
from distbelief.roles.role import SUPERVISOR, Computed, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions, Machine
from distbelief.simulation.world import HandledEvent
from distbelief.supervisor.view import JobView


LENGTH_SECONDS: Final = 60.0
"""Of training, undisturbed."""

NEAR: Final = 1.5
"""Times longer or shorter than that a job may be."""

N_TRIES: Final = 4
"""Undisturbed runs at most; the last one is taken as it is."""

N_RUNS: Final = N_TRIES + 1
"""Of a job, at most, with the one that is broken."""

PATIENCE: Final = 60.0
"""Times the undisturbed length; a job that takes longer is given up."""

_FLOPS: Final = 1e9
_MEMORY_RATE: Final = 1e9
_MEMORY_RATE_MIN: Final = 1e6
"""Else shards would write few values for seconds, while replicas try every 2 ms."""
_STEPS: Final = frozenset({"replica:step"})


@final
@dataclass(slots=True)
class _SimulatedChaos:
    """One run, and what is counted in it."""

    simulation: SimulatedCluster
    n_steps: int = 0
    iterations: IterationCount = field(default_factory=IterationCount)

    def observe(self, happening: HandledEvent) -> None:
        event = happening.event
        if happening.name == SUPERVISOR:
            self.iterations.heard(event)
        if isinstance(event, Computed) and event.name in _STEPS:
            # Without a result it met an update of its parameters, and did nothing.
            self.n_steps += event.result is not None

    @property
    def view(self) -> JobView:
        return view_of(self.simulation)


def run_simulated_chaos(
    staged: PreparedJob, *, seed: int, waiting: WaitProgress | None = None
) -> ChaosReport:
    """Break a job by the schedule of a seed.

    Args:
        staged: The job.
        seed: Of the schedule, and of all chance.
        waiting: For `N_RUNS` runs: told how far each is.

    Raises:
        SimulationFailed: a role broke an assertion, or the job does not end.
    """
    waiting = waiting or WaitProgress(Console(quiet=True), n_runs=N_RUNS)
    roles = [entry.name for entry in staged.roster]
    blows = schedule(seed, roles)
    slowness, undisturbed = _undisturbed(staged, seed=seed, waiting=waiting)
    horizon = undisturbed.seconds
    waiting.begin(f"{staged.job.name}, seed {seed}")
    course = _run(
        staged, seed=seed, slowness=slowness, blows=blows, horizon=horizon, tell=waiting.tell
    )
    waiting.end()
    return _story(staged, course, undisturbed, seed=seed, blows=blows, horizon=horizon)


def _undisturbed(staged: PreparedJob, *, seed: int, waiting: WaitProgress) -> tuple[float, JobView]:
    """Return how slow machines make the job about a minute long, and its last view."""
    until, slowness, n_left = staged.job.stop.seconds, 1.0, N_TRIES
    waiting.begin(f"{staged.job.name}, undisturbed")
    while True:
        n_left -= 1
        view = _run(staged, seed=seed, slowness=slowness, tell=waiting.tell).view
        waiting.end()
        took = max(view.training_seconds, 1e-3)
        by_the_clock = until is not None and took >= until
        if by_the_clock or not n_left or 1 / NEAR <= took / LENGTH_SECONDS <= NEAR:
            break
        slowness *= LENGTH_SECONDS / took
    for _ in range(n_left):
        waiting.end()
    return slowness, view


def _run(
    staged: PreparedJob,
    *,
    seed: int,
    slowness: float,
    blows: tuple[FaultEvent, ...] = (),
    horizon: Seconds = 1.0,
    tell: Tell | None = None,
) -> _SimulatedChaos:
    roles = [entry.name for entry in staged.roster]
    machine = Machine(
        host="host-0" if staged.job.cluster.shared_memory else "",
        flops_per_second=_FLOPS / slowness,
        bytes_per_second=max(_MEMORY_RATE / slowness, _MEMORY_RATE_MIN),
    )
    faults = [
        fault
        for blow in blows
        for fault in faults_of(blow, horizon=horizon, roles=[*roles, SUPERVISOR])
    ]
    simulation = SimulatedCluster(
        staged.builders(),
        seed=seed,
        options=ClusterOptions(machine=machine, start=(SUPERVISOR,), faults=tuple(faults)),
    )
    course = _SimulatedChaos(simulation)
    simulation.observe(course.observe)
    is_over = report_until_over(simulation, tell)
    within = PATIENCE * max(LENGTH_SECONDS, horizon) if blows else 1e7
    simulation.run_until(is_over, within=within, max_events=N_EVENTS_MAX)
    return course


def _story(
    staged: PreparedJob,
    course: _SimulatedChaos,
    undisturbed: JobView,
    *,
    seed: int,
    blows: tuple[FaultEvent, ...],
    horizon: Seconds,
) -> ChaosReport:
    view, simulation = course.view, course.simulation
    error = simulation.halted[SUPERVISOR]
    struck = [blow for blow in blows if blow.at * horizon <= view.seconds]
    lines = [
        ReportLine(seconds=blow.at * horizon, what="blow", text=blow.text(horizon))
        for blow in struck
    ]
    lines += [*report_lines(view), end_line(view, error)]
    has_coordinator = "coordinator" in staged.kinds.values()
    iterations = course.iterations if has_coordinator else None
    return ChaosReport(
        job=staged.job.name,
        seed=seed,
        real=False,
        horizon=horizon,
        blows=blows,
        lines=in_order(lines),
        error=error,
        exit_code=0 if error is None else 1,
        samples=view.samples,
        metric_name=view.metric_name,
        metric=view.metric,
        undisturbed_seconds=undisturbed.seconds,
        seconds=view.seconds,
        pushes_applied=view.pushes_applied,
        pushes_lost=view.pushes_lost or 0,  # known, of a new run
        pushes_refused=view.pushes_refused,
        messages_lost=simulation.counts.lost,
        restarts=restarts_of(view),
        steps_again=None
        if has_coordinator or staged.plan is not None
        else max(course.n_steps - view.step, 0),
        iterations_again=None if iterations is None else iterations.n_again,
        iterations_lost=None if iterations is None else iterations.n_lost,
        digest=simulation.trace.digest,
    )
