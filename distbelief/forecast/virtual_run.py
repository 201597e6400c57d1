"""One run of a job in virtual time, from its first process to its last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

from distbelief.forecast.ledger import Ledger
from distbelief.forecast.outcome import Outcome, reached_at, step_seconds
from distbelief.forecast.staging import StagedJob
from distbelief.forecast.watching import N_EVENTS_MAX, Tell, told_until_over, view_of
from distbelief.job.display.view import SupervisorView
from distbelief.roles import SUPERVISOR, Address, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault
from distbelief.simulation.options import ClusterOptions
from distbelief.simulation.world import Builder, Happening


SECONDS_MAX: Final = 366 * 86400.0
"""Virtual; a job that is not over after a year never is."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that is over.

    Attributes:
        outcome: Its figures.
        view: What its supervisor last knew.
        ledger: What every role did.
        simulation: As it stands.
    """

    outcome: Outcome
    view: SupervisorView
    ledger: Ledger
    simulation: SimulatedCluster


class Host(Protocol):
    """Where a job runs: see `hosting.Hosting`."""

    def n_needed(self, staged: StagedJob) -> int:
        """Return how many machines a job takes."""
        ...

    def options(self, staged: StagedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return what the simulation is to be told of them."""
        ...

    def builders(self, staged: StagedJob) -> dict[Address, Builder]:
        """Return how to build the roles of a job."""
        ...


def run_virtually(
    staged: StagedJob,
    hosting: Host,
    *,
    seed: int,
    faults: Sequence[Fault] = (),
    tell: Tell | None = None,
    keeps_spans: bool = False,
) -> Ended:
    """Run a job in virtual time, until it ends.

    Args:
        staged: The job.
        hosting: Where its roles run.
        seed: Of all chance that is not the roles' own.
        faults: What breaks, and when.
        tell: Told how far it is, now and then.
        keeps_spans: Whether single pieces of work are wanted, for a timeline.

    Raises:
        JobError: the cluster cannot hold the job.
        SimulationFailed: it does not end, or a role broke an assertion.
    """
    simulation = SimulatedCluster(
        hosting.builders(staged), seed=seed, options=hosting.options(staged, faults=faults)
    )
    ledger = Ledger(keeps_spans=keeps_spans)

    def observe(happening: Happening) -> None:
        ledger.observe(happening, simulation.now)

    simulation.observe(observe)
    is_over = told_until_over(simulation, tell)
    simulation.run_until(is_over, within=SECONDS_MAX, max_events=N_EVENTS_MAX)
    view = view_of(simulation)
    if tell is not None:
        tell(view)
    return Ended(
        outcome=_outcome(
            staged, view, ledger, simulation, seed=seed, n_machines=hosting.n_needed(staged)
        ),
        view=view,
        ledger=ledger,
        simulation=simulation,
    )


def _outcome(
    staged: StagedJob,
    view: SupervisorView,
    ledger: Ledger,
    simulation: SimulatedCluster,
    *,
    seed: int,
    n_machines: int,
) -> Outcome:
    seconds, training = view.seconds, view.training_seconds
    kinds = staged.kinds
    together = "coordinator" in kinds.values()
    n_trainers = 1 if together else staged.job.cluster.replicas
    return Outcome(
        seed=seed,
        ended=view.stop_reason,
        error=simulation.halted[SUPERVISOR],
        seconds=seconds,
        training_seconds=training,
        n_machines=n_machines,
        samples=view.samples,
        steps=view.step,
        step_seconds=step_seconds(view, n_trainers=n_trainers),
        samples_per_second=view.samples / training if training else None,
        target_seconds=reached_at(staged.job, view),
        metric_name=view.metric_name,
        metric=view.metric,
        held_out_loss=view.held_out_loss,
        loss=view.loss,
        staleness_mean=view.staleness_mean,
        staleness_p95=view.staleness_p95,
        pushed_bytes=view.bytes_in,
        fetched_bytes=view.bytes_out,
        traffic=traffic_of(simulation, kinds={first_word(name) for name in kinds}),
        utilisation=_utilisation(ledger, kinds=kinds, seconds=simulation.now),
        machine_hours=n_machines * seconds / 3600.0,
        pushes_lost=view.pushes_lost or 0,  # known, of a new run
        restarts=sum(role.restarts for role in view.roles),
        n_messages=simulation.counts.delivered,
        digest=simulation.trace.digest,
        history=view.history,
        figures=view.figures,
    )


def first_word(name: Address) -> str:
    """Return "replica" for "replica-3" and for "replica-3.1"."""
    return name.partition("-")[0].partition(".")[0]


def traffic_of(simulation: SimulatedCluster, *, kinds: set[str]) -> dict[str, float]:
    """Return the bytes of messages between kinds of roles, both ways."""
    ordered = sorted(kinds)
    found: dict[str, float] = {}
    for index, one in enumerate(ordered):
        for other in ordered[index:]:
            n_bytes = simulation.traffic.between(one, other)
            if one != other:
                n_bytes += simulation.traffic.between(other, one)
            if n_bytes:
                found[f"{one} - {other}"] = float(n_bytes)
    return found


def _utilisation(
    ledger: Ledger, *, kinds: Mapping[Address, str], seconds: Seconds
) -> dict[str, float]:
    """Return the share of its time in which a compute lane worked, by kind of role."""
    totals: dict[str, list[float]] = {}
    for name, kind in kinds.items():
        if kind != "supervisor" and seconds > 0:
            totals.setdefault(kind, []).append(ledger.busy.get(name, 0.0) / seconds)
    return {kind: sum(shares) / len(shares) for kind, shares in totals.items()}
