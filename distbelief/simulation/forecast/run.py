"""One forecast run: a prepared job, simulated from its first process to its last.

* `Timeline` records the work of all roles.
* `run_simulated` runs a job until its supervisor has ended.
* `Trial` is one variant of a sweep that can be run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, cast, final

import msgspec

from distbelief.config.algorithms import facts_of
from distbelief.core.errors import JobError
from distbelief.job.display.progress import WaitProgress
from distbelief.job.launch.supervised_job import warnings_of
from distbelief.protocol.role import SUPERVISOR, Address, Compute, Computed, Executor, Seconds
from distbelief.simulation.cluster import N_EVENTS_TOGETHER, SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.faults import Fault, Outage
from distbelief.simulation.forecast.placed_cluster import PlacedCluster
from distbelief.simulation.forecast.prepare import PreparedJob
from distbelief.simulation.forecast.sweep import Outcome, Resource, Variant, reached_at, short
from distbelief.simulation.machines import ClusterOptions
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.view import JobView, filled


N_SPANS_MAX: Final = 500_000  # of a timeline: trace viewers fail on many more


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    role: Address
    executor: Executor
    name: str
    ends: Seconds  # when the role handled the result; the executor may have ended earlier
    seconds: Seconds  # duration


@final
@dataclass(slots=True, kw_only=True)
class Timeline:
    """The work of all roles: an observer of the simulation."""

    spans: list[Span] = field(default_factory=list)  # in the order of their results
    n_lost: int = 0  # beyond N_SPANS_MAX
    _executors: dict[tuple[Address, str], Executor] = field(default_factory=dict)

    def observe(self, handled: HandledEvent, now: Seconds) -> None:
        name, event = handled.name, handled.event
        for action in handled.actions:
            if isinstance(action, Compute):
                self._executors[name, action.name] = action.executor
        if not isinstance(event, Computed):
            return
        if len(self.spans) >= N_SPANS_MAX:
            self.n_lost += 1
            return
        executor = self._executors.get((name, event.name), Executor.COMPUTE)
        self.spans.append(
            Span(role=name, executor=executor, name=event.name, ends=now, seconds=event.seconds)
        )


# --- runs ---

N_EVENTS_MAX: Final = 10**10
N_EVENTS_BETWEEN: Final = 2000  # between two reports of progress
N_EVENTS_OF_ROLE: Final = 20  # or so many for each role, which each report shows


Tell = Callable[[JobView], None]


def view_of(simulation: SimulatedCluster) -> JobView:
    supervisor = cast("Supervisor", simulation.role(SUPERVISOR))
    return supervisor.view(simulation.now)


def report_until_over(simulation: SimulatedCluster, tell: Tell | None) -> Callable[[], bool]:
    """Return a condition for `run_until` that holds when the job has ended.

    It is for every N_EVENTS_TOGETHER events, and calls `tell` with the view of the job after
    N_EVENTS_BETWEEN of them or more.
    """
    n_events, n_between = 0, N_EVENTS_BETWEEN

    def is_over() -> bool:
        nonlocal n_events, n_between
        n_events += N_EVENTS_TOGETHER
        # Nobody reads these: of thousands of roles they would fill the memory.
        cast("Supervisor", simulation.role(SUPERVISOR)).take_records()
        if tell is not None and n_events >= n_between:
            view = view_of(simulation)
            n_events, n_between = 0, max(N_EVENTS_BETWEEN, N_EVENTS_OF_ROLE * len(view.roles))
            tell(view)
        # `halted` goes through all roles; the first condition keeps it out of most events.
        return not simulation.is_alive(SUPERVISOR) and SUPERVISOR in simulation.halted

    return is_over


SECONDS_MAX: Final = 366 * 86400.0  # virtual: a job that runs for a year never ends


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    outcome: Outcome
    view: JobView  # the last one
    timeline: Timeline  # empty if the run keeps no spans
    simulation: SimulatedCluster


class RunHost(Protocol):
    """The machines for a run, such as a `PlacedCluster`."""

    def n_needed(self, prepared: PreparedJob) -> int: ...

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions: ...

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]: ...


def run_simulated(
    prepared: PreparedJob,
    placed: RunHost,
    *,
    seed: int,
    faults: Sequence[Fault] = (),
    outages: Iterable[Outage] = (),  # of machines, in order of time
    tell: Tell | None = None,
    keeps_spans: bool = False,  # single pieces of work, for a timeline
) -> FinishedRun:
    """Run a job in virtual time until it ends.

    JobError if the job does not fit the cluster; SimulationFailed if the job does not end, or a
    role broke an assertion.
    """
    simulation = SimulatedCluster(
        placed.builders(prepared), seed=seed, options=placed.options(prepared, faults=faults)
    )
    simulation.play(iter(outages))
    timeline = Timeline()
    if keeps_spans:
        simulation.observe(lambda handled: timeline.observe(handled, simulation.now))
    is_over = report_until_over(simulation, tell)
    simulation.run_until(
        is_over, within=SECONDS_MAX, max_events=N_EVENTS_MAX, every=N_EVENTS_TOGETHER
    )
    view = view_of(simulation)
    if tell is not None:
        tell(view)
    return FinishedRun(
        outcome=_outcome(
            prepared, view, simulation, seed=seed, n_machines=placed.n_needed(prepared)
        ),
        view=view,
        timeline=timeline,
        simulation=simulation,
    )


def _outcome(
    prepared: PreparedJob,
    view: JobView,
    simulation: SimulatedCluster,
    *,
    seed: int,
    n_machines: int,
) -> Outcome:
    training, kinds = view.training_seconds, prepared.kinds
    together = "coordinator" in kinds.values()  # its replicas take each step together
    n_trainers = 1 if together else prepared.job.cluster.n_replicas
    own: dict[str, object] = {
        "seed": seed,
        "error": simulation.halted[SUPERVISOR],
        "n_machines": n_machines,
        "step_seconds": training * n_trainers / view.step if view.step else None,
        "samples_per_second": view.samples / training if training else None,
        "target_seconds": reached_at(
            prepared.job, view, higher_is_better=prepared.preflight.higher_is_better
        ),
        "traffic": traffic_of(simulation, kinds={first_word(name) for name in kinds}),
        "utilisation": _utilisation(simulation, kinds),
        "resources": _resources(simulation),
        "machine_hours": n_machines * view.seconds / 3600.0,
        "restarts": sum(role.restarts for role in view.roles),
        "n_messages": simulation.counts.delivered,
        "digest": simulation.trace.digest,
    }
    return filled(Outcome, own, view)


def first_word(name: Address) -> str:
    """Return "replica" for "replica-3" and for "replica-3.1"."""
    return name.partition("-")[0].partition(".")[0]


def traffic_of(simulation: SimulatedCluster, *, kinds: set[str]) -> dict[str, float]:
    """Return the bytes of messages between kinds of roles, both directions together."""
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


def _utilisation(simulation: SimulatedCluster, kinds: Mapping[Address, str]) -> dict[str, float]:
    seconds = simulation.now
    totals: dict[str, list[float]] = {}
    for name, kind in kinds.items():
        if kind != "supervisor" and seconds > 0:
            totals.setdefault(kind, []).append(simulation.busy(name) / seconds)
    return {kind: sum(shares) / len(shares) for kind, shares in totals.items()}


def _resources(simulation: SimulatedCluster) -> tuple[Resource, ...]:
    found = [
        Resource(kind=kind, name=name, share=min(seconds / simulation.now, 1.0))
        for (kind, name), seconds in simulation.used.items()
    ]
    return tuple(sorted(found, key=lambda resource: (-resource.share, resource.name)))


def with_outcomes(variant: Variant, outcomes: Sequence[Outcome]) -> Variant:
    """Return the variant with these; it warns if the runs ended before the first exchange.

    `warnings_of` knows that only where [stop] counts samples.
    """
    policy, n = facts_of(variant.job).policy, variant.job.cluster.n_replicas
    warnings, every = variant.warnings, 1 if policy is None else policy.every
    n_steps = max((run.step for run in outcomes), default=0) / n
    told = any(text.startswith("every") for text in warnings)
    # The end of an epoch may end an exchange; each replica's last push comes with the end.
    exchanges = max((run.pushes_applied for run in outcomes), default=0) > n
    exchanges |= every == 1 or n == 1
    if isinstance(every, int) and 0 < n_steps < every and not (told or exchanges):
        text = (
            f"every = {every:,} steps, and each of {n:,} replicas took about {n_steps:.3g}: they "
            f"exchange nothing before the end. Use every = {max(1, int(n_steps / 10)):,} or fewer, "
            "or a longer job"
        )
        warnings = (*warnings, text)
    return msgspec.structs.replace(variant, outcomes=tuple(outcomes), warnings=warnings)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A variant of a sweep that can be run."""

    settings: Mapping[str, str]  # value by key of the job file
    job: PreparedJob
    host: PlacedCluster

    @property
    def name(self) -> str:
        """The settings as text, or the name of the job."""
        return short(self.settings) or self.job.job.name

    def variant(self, *, machines: int | None = None) -> Variant:
        """Return the variant without outcomes; `left_out` says why if it cannot be run."""
        n_machines, left_out = self.host.n_needed(self.job), None
        replicas: dict[str, list[int]] = {}
        if machines is not None and n_machines > machines:
            left_out = f"needs {n_machines} machines"
        else:
            try:
                self.host.options(self.job)
                if len({*self.job.preflight.ranks}) > 1:
                    for name, place in self.host.placement(self.job).items():
                        if name.startswith("replica"):
                            replicas.setdefault(name.partition(".")[0], []).append(place)
            except JobError as error:
                left_out = str(error)
        return Variant(
            settings=self.settings,
            job=self.job.job,
            n_machines=n_machines,
            left_out=left_out,
            replicas=replicas,
            warnings=(
                *warnings_of(self.job.job, self.job.preflight),
                *(self.host.late(self.job) if not left_out and self.host.loses_machines else ()),
            ),
        )

    def completed(
        self, variant: Variant, *, seeds: Iterable[int], progress: WaitProgress
    ) -> Variant:
        """Return the variant with an outcome of each seed; left out if a run is refused."""
        try:
            ended = [self.run(seed=seed, progress=progress, keeps_spans=False) for seed in seeds]
        except JobError as error:
            return msgspec.structs.replace(variant, left_out=str(error))
        return with_outcomes(variant, [one.outcome for one in ended])

    def run(self, *, seed: int, progress: WaitProgress, keeps_spans: bool) -> FinishedRun:
        """Run it once, with its machines' outages; JobError if it is longer than their trace."""
        host, begun = self.host, list[Outage]()

        def outages() -> Iterator[Outage]:
            for outage in host.outages(self.job, seed=seed):
                begun.append(outage)
                yield outage

        progress.begin(f"{self.name}, seed {seed}")
        ended = run_simulated(
            self.job,
            host,
            seed=seed,
            outages=outages() if host.loses_machines else (),
            tell=progress.tell,
            keeps_spans=keeps_spans,
        )
        progress.end()
        seconds, trace = ended.outcome.seconds, host.cluster.trace
        if trace is not None and trace.covers < seconds:
            raise JobError(
                f"--cluster {host.cluster.name}: its trace ends early: it covers {trace.covers:g} "
                f"of {seconds:g} s: give a longer one, or simulate less time"
            )
        price = host.price(self.job, begun, seconds=seconds)
        return replace(ended, outcome=msgspec.structs.replace(ended.outcome, price=price))
