"""One variant of a job: whether its machines hold it, and a run with every seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, cast, final

import msgspec
import torch
from torch import nn

from distbelief.config.job import DataTables, Job
from distbelief.data.dataset import read_batch
from distbelief.display.progress import WaitProgress
from distbelief.errors import JobError
from distbelief.forecast.placement import PlacedCluster
from distbelief.forecast.prepare import Preparation, PreparedJob
from distbelief.forecast.result import Outcome, reached_at, step_seconds
from distbelief.forecast.sweep import Variant
from distbelief.parameter_server.layout import Layout
from distbelief.roles.role import SUPERVISOR, Address, Compute, Computed, Executor, Seconds
from distbelief.run.summary import DataFacts
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions, CostScale, block_bytes_for, scales_for
from distbelief.simulation.world import Builder, HandledEvent
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.view import JobView
from distbelief.task.task import DataSpec, ModelSpec


# What every role did in a run in virtual time: work, messages, and when.
#
# An observer of the simulation. It adds up, and keeps single pieces of work only where a
# timeline is wanted.

N_SPANS_MAX: Final = 500_000
"""Pieces of work of a timeline; a viewer does not take many more."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work.

    Attributes:
        role: Whose.
        lane: Of that role.
        name: Of the work.
        ends: When the role was told that it is done; its lane may be further by then.
        seconds: That it took.
    """

    role: Address
    lane: Executor
    name: str
    ends: Seconds
    seconds: Seconds


@final
@dataclass(slots=True, kw_only=True)
class WorkLog:
    """What was done.

    Attributes:
        keeps_spans: Whether single pieces of work are kept.
        spans: Those, in the order in which their roles were told.
        busy: Seconds of work in the compute lane, by role.
        lost_spans: How many did not fit.
    """

    keeps_spans: bool = False
    spans: list[Span] = field(default_factory=list)
    busy: dict[Address, Seconds] = field(default_factory=dict)
    lost_spans: int = 0
    _lanes: dict[tuple[Address, str], Executor] = field(default_factory=dict)

    def observe(self, happening: HandledEvent, now: Seconds) -> None:
        """Take note of an event, and of what was done in reply."""
        for action in happening.actions:
            if isinstance(action, Compute):
                self._lanes[happening.name, action.name] = action.lane
        event = happening.event
        if isinstance(event, Computed):
            self._worked(happening.name, event, now)

    def _worked(self, name: Address, event: Computed, now: Seconds) -> None:
        lane = self._lanes.get((name, event.name), Executor.COMPUTE)
        if lane is Executor.COMPUTE:
            self.busy[name] = self.busy.get(name, 0.0) + event.seconds
        if not self.keeps_spans:
            return
        if len(self.spans) >= N_SPANS_MAX:
            self.lost_spans += 1
            return
        self.spans.append(
            Span(role=name, lane=lane, name=event.name, ends=now, seconds=event.seconds)
        )


# Priced jobs: no gradient of the net is computed, times and bytes are as if it were.
#
# The job's roles run on a small stand-in (`stand_in`), and what they do and send is
# multiplied by how much larger the job's own net is (`simulation.scales`). So thousands
# of machines fit into a small one. What is learnt means nothing: accuracies and times to
# a target are not to be had.

_HOME: Final = "distbelief.forecast.run"
_LEARNT: Final = frozenset({"gradient_norm", "step_length"})
"""Figures of an algorithm's own that tell what is learnt, and not what it takes."""

_WIDTH_PER_SHARD: Final = 64
"""Elements of a tensor that cannot be divided between shards."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCluster:
    """The machines of a job, on which a stand-in costs what the job would.

    Attributes:
        hosting: The machines.
        large: The job itself.
    """

    hosting: PlacedCluster
    large: PreparedJob

    def n_needed(self, staged: PreparedJob) -> int:
        """Return how many machines a job takes."""
        return self.hosting.n_needed(staged)

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return what the simulation is to be told of machines, links and scales.

        Raises:
            JobError: the cluster cannot hold the job.
        """
        options = self.hosting.options(self.large, faults=faults)
        small, large = staged.layout, self.large.layout
        scale = self._scale(staged)
        names = {n: scale.flops for n, kind in staged.kinds.items() if kind != "shard"}
        return replace(
            options,
            scales=scales_for(small, large, names, data_bytes=scale.data_bytes),
            block_bytes=block_bytes_for(small, large),
            codec=False,
            trace="order",
        )

    def builders(self, staged: PreparedJob) -> dict[Address, Builder]:
        """Return how to build the roles of a job, with the costs that were measured."""
        return self.hosting.builders(staged, scale=self._scale(staged))

    def _scale(self, staged: PreparedJob) -> CostScale:
        """Return by what the work of all but shards is multiplied, lane by lane."""
        return CostScale(
            flops=n_parameters(self.large) / n_parameters(staged),
            data_bytes=_bytes_of_sample(self.large) / _bytes_of_sample(staged),
        )


def stand_in_for(large: PreparedJob, staging: Preparation) -> PreparedJob:
    """Return the job with a small task in place of its own.

    Raises:
        JobError: its replicas are split, or it would never end without a target.
    """
    job = large.job
    if job.cluster.is_split:
        raise JobError(
            "--priced: replicas that are split over machines are priced by `distbelief "
            "partition`: leave [cluster] partitions, plan and device out, or --priced"
        )
    stop = msgspec.structs.replace(job.stop, accuracy=None, loss=None)
    if stop.is_empty and not job.stop.is_empty:
        raise JobError(
            "--priced: nothing is learnt, so no target of [stop] is ever reached: give "
            "epochs, samples or seconds"
        )
    width = _WIDTH_PER_SHARD * job.cluster.shards
    facts = large.answer.task
    assert facts.train is not None
    return staging.stage(
        msgspec.structs.replace(
            job,
            model=ModelSpec(factory=f"{_HOME}:net", arguments={"width": width}),
            data=DataTables(
                train=_data(facts.train, width),
                test=None if facts.test is None else _data(facts.test, width),
            ),
            algorithm=msgspec.structs.replace(job.algorithm, loss="cross_entropy"),
            evaluation=msgspec.structs.replace(job.evaluation, metric=None),
            stop=stop,
        )
    )


def n_parameters(staged: PreparedJob) -> int:
    """Return how many parameters a job's net has; a step takes operations of each."""
    found = staged.answer.task.n_parameters
    assert found, "a net without parameters is refused when it is tried out"
    return found


def as_of(large: PreparedJob, small: PreparedJob, outcome: Outcome) -> Outcome:
    """Return what came of a stand-in as that of the job it stands for.

    Args:
        large: The job.
        small: The stand-in.
        outcome: Its own: bytes counted by its shards, and figures of what it learnt.
    """
    figures = {k: v for k, v in outcome.figures.items() if k not in _LEARNT}
    scale = _n_bytes(large.layout) / _n_bytes(small.layout)
    return msgspec.structs.replace(
        outcome,
        metric_name=large.answer.metric_name,
        metric=None,
        held_out_loss=None,
        loss=None,
        history=(),
        figures=figures,
        pushed_bytes=round(outcome.pushed_bytes * scale),
        fetched_bytes=round(outcome.fetched_bytes * scale),
    )


def _n_bytes(layout: Layout) -> int:
    sizes = (layout.shard_size(k) for k in range(layout.n_shards))
    return sum(sizes) * layout.dtype.itemsize


def check_learns_nothing(job: Job, *, suggests: bool) -> None:
    """Refuse to look for the shortest time to a target where none is learnt.

    Raises:
        JobError: it says what to leave out.
    """
    if suggests and (job.stop.accuracy is not None or job.stop.loss is not None):
        raise JobError(
            "--priced: nothing is learnt, so the time to the target of [stop] is "
            "unknown: leave --priced out, or the target"
        )


def _bytes_of_sample(staged: PreparedJob) -> int:
    """Return the bytes of input and target of a sample, which a batch has read."""
    parts = read_batch(staged.datasets["data.train"], [0])
    return max(1, sum(part.nbytes for part in parts))


def _data(facts: DataFacts, width: int) -> DataSpec:
    return DataSpec(
        factory=f"{_HOME}:data", arguments={"n_samples": facts.n_samples, "width": width}
    )


# A small task that stands for a large one, where only times and bytes are asked for.
#
# Logistic regression on as many samples as the large task has; every sample is one of
# 1,024. It learns something, so line searches and staleness are real, and it costs next
# to nothing, whatever the large net is.

N_ROWS: Final = 1024


def net(width: int) -> nn.Module:
    """Return a linear classifier; (n, width) -> (n, 2)."""
    return nn.Linear(width, 2)


@final
class Rows:
    """So many samples of few rows."""

    def __init__(self, n_samples: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(N_ROWS, width, generator=generator)
        self._targets = torch.randint(0, 2, (N_ROWS,), generator=generator)
        self._n_samples = n_samples

    def __len__(self) -> int:
        """Return how many samples there are."""
        return self._n_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample."""
        if not 0 <= index < self._n_samples:
            raise IndexError(f"sample {index} of {self._n_samples}")
        return self._inputs[index % N_ROWS], self._targets[index % N_ROWS]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole batch."""
        rows = torch.as_tensor(indices) % N_ROWS
        return self._inputs[rows], self._targets[rows]


def data(n_samples: int, width: int) -> Rows:
    """Return a data set of so many samples."""
    return Rows(n_samples, width)


# A simulated job, seen as its supervisor sees it, until it is over.

N_EVENTS_MAX: Final = 10**10
N_EVENTS_BETWEEN: Final = 2000
"""Events between two words about how far it is."""


Tell = Callable[[JobView], None]


def view_of(simulation: SimulatedCluster) -> JobView:
    """Return what the supervisor knows now."""
    supervisor = cast("Supervisor", simulation.role(SUPERVISOR))
    return supervisor.view(simulation.now)


def report_until_over(simulation: SimulatedCluster, tell: Tell | None) -> Callable[[], bool]:
    """Return whether the job is over: to be asked after every event.

    Args:
        simulation: Of the job.
        tell: Told now and then how far it is.
    """
    n_events = 0

    def is_over() -> bool:
        nonlocal n_events
        n_events += 1
        if tell is not None and n_events % N_EVENTS_BETWEEN == 0:
            tell(view_of(simulation))
        # Asked of every event: who has halted is found by going through all roles.
        return not simulation.is_alive(SUPERVISOR) and SUPERVISOR in simulation.halted

    return is_over


# One run of a job in virtual time, from its first process to its last.

SECONDS_MAX: Final = 366 * 86400.0
"""Virtual; a job that is not over after a year never is."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that is over.

    Attributes:
        outcome: Its figures.
        view: What its supervisor last knew.
        ledger: What every role did.
        simulation: As it stands.
    """

    outcome: Outcome
    view: JobView
    ledger: WorkLog
    simulation: SimulatedCluster


class RunHost(Protocol):
    """Where a job runs: see `hosting.Hosting`."""

    def n_needed(self, staged: PreparedJob) -> int:
        """Return how many machines a job takes."""
        ...

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return what the simulation is to be told of them."""
        ...

    def builders(self, staged: PreparedJob) -> dict[Address, Builder]:
        """Return how to build the roles of a job."""
        ...


def run_virtually(
    staged: PreparedJob,
    hosting: RunHost,
    *,
    seed: int,
    faults: Sequence[Fault] = (),
    tell: Tell | None = None,
    keeps_spans: bool = False,
) -> FinishedRun:
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
    ledger = WorkLog(keeps_spans=keeps_spans)

    def observe(happening: HandledEvent) -> None:
        ledger.observe(happening, simulation.now)

    simulation.observe(observe)
    is_over = report_until_over(simulation, tell)
    simulation.run_until(is_over, within=SECONDS_MAX, max_events=N_EVENTS_MAX)
    view = view_of(simulation)
    if tell is not None:
        tell(view)
    return FinishedRun(
        outcome=_outcome(
            staged, view, ledger, simulation, seed=seed, n_machines=hosting.n_needed(staged)
        ),
        view=view,
        ledger=ledger,
        simulation=simulation,
    )


def _outcome(
    staged: PreparedJob,
    view: JobView,
    ledger: WorkLog,
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
    ledger: WorkLog, *, kinds: Mapping[Address, str], seconds: Seconds
) -> dict[str, float]:
    """Return the share of its time in which a compute lane worked, by kind of role."""
    totals: dict[str, list[float]] = {}
    for name, kind in kinds.items():
        if kind != "supervisor" and seconds > 0:
            totals.setdefault(kind, []).append(ledger.busy.get(name, 0.0) / seconds)
    return {kind: sum(shares) / len(shares) for kind, shares in totals.items()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A variant that can be run.

    Attributes:
        settings: What was varied, by key.
        job: So, on its own data.
        runs: What is run of it: itself, or a stand-in at its price.
        hosting: Its machines.
        host: The same, as what is run sees them.
    """

    settings: Mapping[str, str]
    job: PreparedJob
    runs: PreparedJob
    hosting: PlacedCluster
    host: RunHost

    @staticmethod
    def of(
        job: PreparedJob,
        hosting: PlacedCluster,
        settings: Mapping[str, str],
        *,
        priced_by: Preparation | None = None,
    ) -> "Trial":
        """Return the trial of a job.

        Args:
            job: Made ready.
            hosting: Its machines.
            settings: What was varied.
            priced_by: Makes a stand-in ready, if nothing is to be learnt.

        Raises:
            JobError: it cannot be priced.
        """
        runs = job
        host: RunHost = hosting
        if priced_by is not None:
            runs = stand_in_for(job, priced_by)
            host = PricedCluster(hosting=hosting, large=job)
        return Trial(settings=settings, job=job, runs=runs, hosting=hosting, host=host)

    @property
    def name(self) -> str:
        """Its settings in words, or its job's name."""
        short = (f"{key.rpartition('.')[2]} {v}" for key, v in self.settings.items())
        return ", ".join(short) or self.job.job.name

    def variant(self, *, machines: int | None = None) -> Variant:
        """Return it as one that was not run, and why if it cannot be.

        Args:
            machines: The most that it may take; None: as many as there are.
        """
        n_machines, left_out = self.hosting.n_needed(self.job), None
        if machines is not None and n_machines > machines:
            left_out = f"takes {n_machines} machines"
        else:
            try:
                self.host.options(self.runs)
            except JobError as error:
                left_out = str(error)
        return Variant(
            settings=self.settings, job=self.job.job, n_machines=n_machines, left_out=left_out
        )

    def run(self, *, seed: int, waiting: WaitProgress, keeps_spans: bool) -> FinishedRun:
        """Run it once; where machines are lost, as long as it takes with that.

        Raises:
            JobError: it takes longer than is known of the machines.
        """
        name = f"{self.name}, seed {seed}"
        loses = self.hosting.loses_machines
        waiting.begin(f"{name}, before machines are lost" if loses else name)
        tell = waiting.tell if self.runs is self.job else partial(_untaught, waiting)
        ended = self._run(seed, tell, keeps_spans=keeps_spans, horizon=None)
        horizon = 0.0
        while loses and ended.outcome.seconds > horizon:
            waiting.begin(name)
            # With every outage within twice that time it may take longer still.
            trace, seconds = self.hosting.cluster.trace, ended.outcome.seconds
            known = float("inf") if trace is None else trace.covers
            horizon = max(seconds, min(2 * seconds, known))
            ended = self._run(seed, tell, keeps_spans=keeps_spans, horizon=horizon)
        waiting.end()
        if self.runs is not self.job:
            ended = replace(ended, outcome=as_of(self.job, self.runs, ended.outcome))
        return ended

    def _run(
        self, seed: int, tell: Tell, *, keeps_spans: bool, horizon: Seconds | None
    ) -> FinishedRun:
        outages = self.hosting.outages
        return run_virtually(
            self.runs,
            self.host,
            seed=seed,
            faults=() if horizon is None else outages(self.runs, seed=seed, horizon=horizon),
            tell=tell,
            keeps_spans=keeps_spans,
        )


def _untaught(waiting: WaitProgress, view: JobView) -> None:
    """Tell how far a stand-in is, but not what it has learnt."""
    waiting.tell(replace(view, metric=None))
