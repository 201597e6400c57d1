"""Chaos in simulation: a job under faults in virtual time; a seed gives the same run each time.

The speed of the simulated machines is chosen so that the undisturbed job takes about a minute.
Then the supervisor's timeouts (3 s of silence are reported, 10 s mean that a role is dead)
matter as in a long job, and nothing depends on this host. The speed is found by undisturbed
runs. A job with a time limit takes as long as the limit.
"""

from dataclasses import dataclass, field
from typing import Final, final

from rich.console import Console

from distbelief.job.display.progress import WaitProgress
from distbelief.protocol.role import SUPERVISOR, Computed, Seconds
from distbelief.simulation.chaos.chaos_report import (
    ChaosReport,
    IterationCount,
    ReportLine,
    completed,
)
from distbelief.simulation.chaos.schedule import FaultEvent, faults_of, schedule
from distbelief.simulation.cluster import N_EVENTS_TOGETHER, SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.forecast.prepare import PreparedJob
from distbelief.simulation.forecast.run import N_EVENTS_MAX, Tell, report_until_over, view_of
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.supervisor.view import JobView


LENGTH_SECONDS: Final = 60.0  # wanted training time of the undisturbed job
NEAR: Final = 1.5  # the job may be longer or shorter by this factor
N_TRIES: Final = 4  # undisturbed runs at most; the last one is used as it is
N_RUNS: Final = N_TRIES + 1  # at most, with the run under faults
PATIENCE: Final = 60.0  # a job that takes so many times the undisturbed length has failed

_FLOPS: Final = 1e9
_MEMORY_RATE: Final = 1e9
# With less, shards need seconds to write a few values, while replicas poll every 2 ms.
_MEMORY_RATE_MIN: Final = 1e6
_STEPS: Final = frozenset({"replica:step"})


@final
@dataclass(slots=True)
class _SimulatedChaos:
    simulation: SimulatedCluster
    n_steps: int = 0
    iterations: IterationCount = field(default_factory=IterationCount)

    def observe(self, handled: HandledEvent) -> None:
        event = handled.event
        if handled.name == SUPERVISOR:
            self.iterations.count(event)
        if isinstance(event, Computed) and event.name in _STEPS:
            # A step without a result was cancelled by an update of its parameters.
            self.n_steps += event.result is not None

    @property
    def view(self) -> JobView:
        return view_of(self.simulation)


def run_simulated_chaos(
    prepared: PreparedJob, *, seed: int, progress: WaitProgress | None = None
) -> ChaosReport:
    """Simulate a job under the fault schedule of a seed; `progress` is for `N_RUNS` runs.

    SimulationFailed if a role broke an assertion, or the job does not end.
    """
    progress = progress or WaitProgress(Console(quiet=True), n_runs=N_RUNS)
    roles = [entry.name for entry in prepared.roster]
    fault_events = schedule(seed, roles)
    slowness, undisturbed = _undisturbed(prepared, seed=seed, progress=progress)
    horizon = undisturbed.seconds
    progress.begin(f"{prepared.job.name}, seed {seed}")
    run = _run(
        prepared,
        seed=seed,
        slowness=slowness,
        fault_events=fault_events,
        horizon=horizon,
        tell=progress.tell,
    )
    progress.end()
    view, simulation = run.view, run.simulation
    error = simulation.halted[SUPERVISOR]
    counts_steps = "coordinator" not in prepared.kinds.values() and not prepared.preflight.plans
    report = ChaosReport(
        job=prepared.job.name,
        seed=seed,
        real=False,
        horizon=horizon,
        fault_events=fault_events,
        error=error,
        exit_code=0 if error is None else 1,
        undisturbed_seconds=undisturbed.seconds,
        messages_lost=simulation.counts.lost,
        steps_again=max(run.n_steps - view.step, 0) if counts_steps else None,
        digest=simulation.trace.digest,
    )
    faults = [
        ReportLine(seconds=event.at * horizon, what="fault", text=event.text(horizon))
        for event in fault_events
        if event.at * horizon <= view.seconds
    ]
    return completed(report, view, view, faults=faults, iterations=run.iterations)


def _undisturbed(
    prepared: PreparedJob, *, seed: int, progress: WaitProgress
) -> tuple[float, JobView]:
    # The slowness of machines on which the job takes about a minute, and its last view. A run
    # on machines that are far too fast ends before the supervisor's first report from its
    # replicas, so the slowness must be found in several tries.
    until, slowness, n_left = prepared.job.stop.seconds, 1.0, N_TRIES
    progress.begin(f"{prepared.job.name}, undisturbed")
    while True:
        n_left -= 1
        view = _run(prepared, seed=seed, slowness=slowness, tell=progress.tell).view
        progress.end()
        took = max(view.training_seconds, 1e-3)
        by_the_clock = until is not None and took >= until
        if by_the_clock or not n_left or 1 / NEAR <= took / LENGTH_SECONDS <= NEAR:
            break
        slowness *= LENGTH_SECONDS / took
    for _ in range(n_left):
        progress.end()
    return slowness, view


def _run(
    prepared: PreparedJob,
    *,
    seed: int,
    slowness: float,
    fault_events: tuple[FaultEvent, ...] = (),
    horizon: Seconds = 1.0,
    tell: Tell | None = None,
) -> _SimulatedChaos:
    roles = [entry.name for entry in prepared.roster]
    machine = SimulatedMachine(
        host="host-0" if prepared.job.cluster.shared_memory else "",
        flops_per_second=_FLOPS / slowness,
        bytes_per_second=max(_MEMORY_RATE / slowness, _MEMORY_RATE_MIN),
    )
    faults = [
        fault
        for event in fault_events
        for fault in faults_of(event, horizon=horizon, roles=[*roles, SUPERVISOR])
    ]
    simulation = SimulatedCluster(
        prepared.builders(),
        seed=seed,
        options=ClusterOptions(machine=machine, start=(SUPERVISOR,), faults=tuple(faults)),
    )
    run = _SimulatedChaos(simulation)
    simulation.observe(run.observe)
    is_over = report_until_over(simulation, tell)
    within = PATIENCE * max(LENGTH_SECONDS, horizon) if fault_events else 1e7
    simulation.run_until(is_over, within=within, max_events=N_EVENTS_MAX, every=N_EVENTS_TOGETHER)
    return run
