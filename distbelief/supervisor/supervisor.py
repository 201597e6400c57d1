"""The supervisor of a job: starts its roles, keeps them going, and ends them in order.

    Launch all -> Join ... -> Peers -> Begin replica 0 -> (warm start) -> Begin the rest
    Heartbeat, Progress, Measured, Saved ... until a rule of [stop] is met
    Stop replicas -> Save, Evaluate(whole) -> Stop the others -> Halt

It never sees a parameter. Rules:

* No replica trains beyond its bound, where [stop] has a number of samples
  (`allowances`).
* Replicas begin when all shards are there; all but the first only after
  `warm_start_steps` steps of that one (Dean et al. 2012, section 4.1).
* A dead replica is restarted, and after too many deaths left out, while the others
  train on (DB-12). A dead shard comes back from its newest snapshot. Only if every
  replica is gone, a shard cannot be had, or the user's own code fails, the job does.
* Where a shard has two copies, one leads; if it dies, or is silent for a second, the
  other one takes over, if it holds all (`pairs`). Else the shard comes back as if it
  had none.
* Where there is a coordinator, it begins with the replicas, reports their progress, and
  saves the shards, for only it knows when they hold a point to go on from. When it has
  come to its end, so has the job (`phases`).
* What is asked of a role is asked again, at its heartbeats, until it is done.
* Every wait has a bound, and whoever outlasts it is named (`lives`, `ending`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

from distbelief.core import formatting
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import (
    BackupInSync,
    BackupUnresponsive,
    CheckpointSaved,
    EvaluationDone,
    Failed,
    Finished,
    Heartbeat,
    Join,
    Message,
    Progress,
    Stop,
)
from distbelief.roles.role import (
    USER,
    Action,
    Address,
    Event,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from distbelief.supervisor import liveness
from distbelief.supervisor.allowances import Allowances
from distbelief.supervisor.liveness import Heartbeats, RestartPolicy
from distbelief.supervisor.membership import Membership, Presence, RoleRecord
from distbelief.supervisor.shutdown import Shutdown
from distbelief.supervisor.state import JobState, ShutdownStage, SupervisorConfig, listed
from distbelief.supervisor.view import JobView, Phase, RoleView


# The supervisor's view of its job, made from all that it knows.

COUNT_MAX: Final = 2.0**53
"""Beyond it a counter, which is a float, counts no more."""


def role_view(
    record: RoleRecord, now: Seconds, *, part: str | None, restarts_before: int = 0
) -> RoleView:
    """Return one role's row.

    Args:
        record: Of the role.
        now: The present.
        part: What it is in a pair of copies: "leading", ...
        restarts_before: In former lives of the run.
    """
    state = record.presence.value
    if record.presence is Presence.PRESENT:
        state = part or record.state or state
    elif record.presence is Presence.LAUNCHED and record.restarts:
        state = "restarting"
    heard = record.presence is Presence.PRESENT
    return RoleView(
        name=record.name,
        state=state,
        rate=record.rate.per_second if record.is_alive else None,
        last_heartbeat_age=max(0.0, now - record.heard_at) if heard else None,
        restarts=restarts_before + record.restarts,
        pid=record.pid if record.is_alive else None,
        # JSON has no NaN.
        counters={k: v for k, v in record.counters.items() if math.isfinite(v)},
    )


def staleness(shards: Iterable[RoleRecord]) -> tuple[float | None, ...]:
    """Return mean, p95 and maximum over shards that have applied pushes.

    The mean is weighted by pushes; the p95 is the worst shard's, since the shards tell
    no more than their own.
    """
    told = [shard.counters for shard in shards if shard.counters.get("pushes_applied")]
    if not told:
        return None, None, None
    n_pushes = sum(counters["pushes_applied"] for counters in told)
    weighted = sum(
        counters["pushes_applied"] * counters.get("staleness_mean", 0.0) for counters in told
    )
    return (
        weighted / n_pushes,
        max(counters.get("staleness_p95", 0.0) for counters in told),
        max(counters.get("staleness_max", 0.0) for counters in told),
    )


def total(records: Iterable[RoleRecord], counter: str) -> int:
    """Return a counter over these roles, in all their lives.

    It is their own word: what can be no count is none.
    """
    told = (record.total(counter) for record in records)
    return int(sum(n for n in told if 0.0 <= n <= COUNT_MAX))


def figures_of(books: JobState) -> dict[str, float]:
    """Return what the coordinator counts, if there is one, as far as it is shown."""
    coordinator = books.members.coordinator
    counters = {} if coordinator is None else coordinator.counters
    return {
        name: counters[name]
        for name in books.config.fields
        if math.isfinite(counters.get(name, math.nan))
    }


def _by_shard(members: Membership) -> Iterable[list[RoleRecord]]:
    """Return the copies of each shard."""
    found: dict[Address, list[RoleRecord]] = {}
    for record in members.of("shard"):
        found.setdefault(record.shard, []).append(record)
    return found.values()


def _applied(books: JobState) -> int:
    """Return the pushes that every shard has."""
    if books.members.coordinator is None:
        return books.pairs.pushes_applied
    # Its orders are what makes clocks rise; what is pushed waits to be folded.
    taken = (total(copies, "pushes_applied") for copies in _by_shard(books.members))
    return books.figures.before.pushes_applied + min(taken, default=0)


def view_of(books: JobState, *, phase: Phase, now: Seconds) -> JobView:
    """Return the whole job at one moment.

    What is sent and received is taken from the clients' counters: nobody tells a shard
    of reads from shared memory, and what goes to its other copy is not meant.

    A push is one push, however many shards it goes to. It is refused if some shard says
    that it came too late: at least as many as the shard has refused that refused most.

    Pushes lost are known from two sides, neither of which knows of all: replicas miss
    what they pushed in their present life, shards' clocks fall behind what was heard of
    them. The larger count is shown.
    """
    figures, members, pairs = books.figures, books.members, books.pairs
    before = figures.before
    missed = total(members.training, "pushes_lost")
    lost = max(missed, pairs.pushes_lost)
    if members.coordinator is not None:
        lost = 0  # what was pushed for a sum is pushed again, until the sum is whole
    refused = (total(copies, "pushes_refused") for copies in _by_shard(members))
    stop = books.config.stop
    reached = figures.reached(now)
    shards = members.of("shard")
    clients = [record for record in members if record.kind != "shard"]
    stale = members.coordinator is None  # else every set is of the point asked for
    mean, p95, largest = staleness([r for r in shards if pairs.leads(r) and stale])
    return JobView(
        now=now,
        seconds=figures.seconds(now),
        training_seconds=figures.training_seconds(now),
        phase=phase,
        stop_reason=books.ending.reason,
        error=None if books.ending.interrupted else books.ending.error,
        samples=figures.samples,
        total_samples=None if stop is None else stop.total_samples,
        eta_seconds=None if stop is None else stop.eta_seconds(reached),
        progress=None if stop is None else stop.progress(reached),
        step=figures.step,
        samples_per_second=figures.samples_per_second,
        loss=figures.loss,
        metric_name=figures.metric_name,
        metric=figures.metric,
        held_out_loss=figures.held_out_loss,
        best_metric=figures.best_metric,
        best_metric_seconds=figures.best_metric_seconds,
        staleness_mean=mean,
        staleness_p95=p95,
        staleness_max=largest,
        bytes_in=before.bytes_in + total(clients, "bytes_out"),
        bytes_out=before.bytes_out + total(clients, "bytes_in"),
        pushes_applied=_applied(books),
        pushes_refused=before.pushes_refused + max(refused, default=0),
        pushes_lost=None if before.pushes_lost is None else before.pushes_lost + lost,
        figures=figures_of(books),
        roles=tuple(
            role_view(
                record,
                now,
                part=pairs.part(record),
                restarts_before=before.restarts.get(record.name, 0),
            )
            for record in members
        ),
        history=tuple(figures.history),
        messages=tuple(figures.messages),
    )


# The warm start: one replica trains alone for a while, then the others are released.
#
# "Warmstarting" model training with only a single replica before unleashing the other
# replicas makes more of them usable (Dean et al. 2012, section 4.1).


@final
class WarmStartPhase:
    """Lets replicas begin.

    Args:
        members: Of the job.
        allowances: How far they may train.
        n_steps: Of replica 0, in all its lives, before the others begin.
    """

    def __init__(self, members: Membership, allowances: Allowances, *, n_steps: int) -> None:
        self._members = members
        self._allowances = allowances
        self._n_left = n_steps

    @property
    def is_over(self) -> bool:
        """Whether all replicas may train; so too if nobody is left to wait for."""
        replicas = self._members.of("replica")
        return self._n_left <= 0 or len(replicas) < 2 or not replicas[0].is_alive

    def progressed(self, record: RoleRecord, message: Progress) -> None:
        """A replica has taken steps; `record` is as it was before."""
        if record.index == 0:
            self._n_left -= max(0, message.step - record.step)

    def release(self) -> list[Action]:
        """Return what to say to those who may begin, and have not been told."""
        replicas = self._members.of("replica")
        actions: list[Action] = []
        first = self._members.of("coordinator")
        for record in first + (replicas if self.is_over else replicas[:1]):
            if record.introduced_at is None or record.begun or not record.is_alive:
                continue
            record.begun = True
            begin = self._allowances.begin(record)
            actions.append(Send(receiver=record.name, message=begin))
        return actions


# The phases of a job: when its training begins, that it stands still, and why it ends.
#
#     starting --replica 0 trains--> warm start --the rest may--> training
#            any of them --a reason--> stopping, saving --> done, failed, interrupted
#
# A reason is: a rule of [stop] is met; who drives the supervisor wants it; the
# coordinator, if there is one, has come to its end; no replica is left. What then is to
# be done is `closing`'s.


@final
class JobPhases:
    """Takes a job from its start to a reason to end."""

    def __init__(self, books: JobState) -> None:
        self._config = books.config
        self._members = books.members
        self._pairs = books.pairs
        self._figures = books.figures
        self._evaluations = books.evaluations
        self._saves = books.saves
        self._ending = books.ending
        self._warm_start = WarmStartPhase(
            books.members, books.allowances, n_steps=books.config.warm_start_steps
        )
        self._progress_at: Seconds = 0.0
        self._wanted_end: str | None = None

    @property
    def present(self) -> Phase:
        """The one that the job is in."""
        ending = self._ending
        match ending.stage:
            case ShutdownStage.OVER if ending.interrupted:
                return "interrupted"
            case ShutdownStage.OVER:
                return "done" if ending.error is None else "failed"
            case ShutdownStage.KEEP:
                return "saving"
            case ShutdownStage.DRAIN | ShutdownStage.CLOSE:
                return "stopping"
            case _:
                return self._of_running

    @property
    def _of_running(self) -> Phase:
        """The one that a job is in which is not to end yet."""
        replicas = self._replicas
        if any(r.is_at_work for r in [*self._members.of("coordinator"), *replicas]):
            return "training" if self._warm_start.is_over else "warm start"
        if self._config.stop is None and self._pairs.all_led:
            return "training"  # of a server: it serves
        alive = [replica for replica in replicas if replica.is_alive]
        if alive and all(r.presence is Presence.WAITING for r in alive):
            return "waiting for machines"
        return "resuming" if self._figures.samples else "starting"

    @property
    def _replicas(self) -> list[RoleRecord]:
        return self._members.of("replica")

    def wind_up(self, reason: str) -> None:
        """End the job in order, when `end_if_due` is asked next."""
        self._wanted_end = self._wanted_end or reason

    # -------------------------------------------------------------------- progress

    def moved(self, now: Seconds) -> None:
        """Something goes on: it does not stand still."""
        self._progress_at = now

    def excuse(self, seconds: Seconds) -> None:
        """The supervisor itself stood still."""
        self._progress_at += seconds

    def progressed(self, record: RoleRecord, message: Progress, now: Seconds) -> None:
        """A replica has taken steps, or the coordinator; `record` is as before."""
        if self._figures.training_since is None:
            self._evaluations.begin(now)
            self._saves.begin(now)
        self._warm_start.progressed(record, message)
        self.moved(now)
        self._figures.progress(record, message, now)
        record.progressed = True
        if self._ending.stage is ShutdownStage.RUN:
            self.end_if_due(now)

    def tell_stall(self, now: Seconds) -> list[Action]:
        """Tell who stands still, if nobody has taken a step for long."""
        waited = now - self._progress_at
        if self._config.stop is None or waited < self._config.stall_seconds:
            return []
        self.moved(now)  # it is told once per so long
        begun = [replica for replica in self._replicas if replica.begun]
        states = listed(f"{r.label}: {r.state or 'starting'}" for r in begun)
        if not states:
            return []
        text = f"no step in the last {waited:.0f} s ({states})"
        return [self._figures.tell(text, now, "warning")]

    # --------------------------------------------------------------------- changes

    def advance(self, now: Seconds) -> list[Action]:
        """Let those begin who may; end the job if nobody is left who trains."""
        actions = self._warm_start.release()
        self._follow_coordinator(now)
        self._end_without_replicas(now)
        return actions

    def end_if_due(self, now: Seconds) -> None:
        """End the job if somebody wants that, or a rule of [stop] is met."""
        if self._wanted_end is not None:
            self._ending.begin(self._wanted_end, now)
        if self._config.stop is not None:
            reason = self._config.stop.reason(self._figures.reached(now))
            if reason is not None:
                self._ending.begin(reason, now)

    def _follow_coordinator(self, now: Seconds) -> None:
        """Where there is one, the job begins and ends with it."""
        coordinator = self._members.coordinator
        if coordinator is None:
            return
        if coordinator.begun and self._figures.training_since is None:
            self._figures.training_since = self._progress_at = now
            self._evaluations.begin(now)
            self._saves.begin(now)
        if coordinator.farewell:
            verdict = self._config.verdict(coordinator.counters)
            error = verdict.reason if verdict.failed else None
            self._ending.begin(verdict.reason, now, error=error)

    def _end_without_replicas(self, now: Seconds) -> None:
        replicas = self._replicas
        if not replicas or any(replica.is_alive for replica in replicas):
            return
        if any(replica.presence is Presence.FINISHED for replica in replicas):
            self._ending.begin("every replica has taken all its steps", now)
            return
        whys = {r.failure for r in replicas if r.failure}
        error = "every replica is lost" + (f": {listed(sorted(whys))}" if whys else "")
        self._ending.begin(error, now, error=error)


TICK_SECONDS = 0.25
N_RECORDS_MAX = 1024

_TICK = "supervisor:tick"
_DEADLINE = "supervisor:deadline"


SupervisorMessage = (
    Join
    | Heartbeat
    | Finished
    | Failed
    | Progress
    | EvaluationDone
    | CheckpointSaved
    | BackupUnresponsive
    | BackupInSync
    | Stop
)


@final
class Supervisor:
    """The role `supervisor`."""

    accepts: Final = message_types(SupervisorMessage)

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._books = JobState.open(config)
        self._members = self._books.members
        self._pairs = self._books.pairs
        self._figures = self._books.figures
        self._evaluations = self._books.evaluations
        self._saves = self._books.saves
        self._ending = self._books.ending
        self._lives = Heartbeats(self._books)
        self._closing = Shutdown(self._books, lives=self._lives)
        self._deaths = RestartPolicy(self._books, lives=self._lives)
        self._phases = JobPhases(self._books)
        self._tick_at: Seconds = 0.0
        self._report_at: Seconds = 0.0
        self._records: list[JobView] = []

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                actions = self._start(now)
            case Received():
                actions = self._receive(event, now)
            case TimerFired(name=name) if name == _TICK:
                actions = self._tick(now)
            case TimerFired(name=name) if name.startswith(liveness.TIMER):
                role = Address(name.removeprefix(liveness.TIMER))
                actions = self._deaths.settle(role, now)
            case PeerLost():
                actions = self._deaths.told(event, now)
            case _:
                actions = []
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the phase, and: samples and steps of all replicas."""
        figures = self._figures
        return self._phases.present, {
            "samples": float(figures.samples),
            "steps": float(figures.step),
        }

    # -------------------------------------------------------------- for the driver

    @property
    def books(self) -> JobState:
        """All that it keeps, for who decides where its roles run."""
        return self._books

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the job."""
        return self._ending.interrupted

    @property
    def error(self) -> str | None:
        """Why the job has failed, if it has."""
        return self._ending.error

    def wind_up(self, reason: str) -> None:
        """End the job in order, from the next moment on."""
        self._phases.wind_up(reason)

    def take_records(self) -> list[JobView]:
        """Return the views that belong in the metrics, and forget them."""
        records, self._records = self._records, []
        return records

    def view(self, now: Seconds) -> JobView:
        """Return what is to be shown of the job now."""
        return view_of(self._books, phase=self._phases.present, now=now)

    # ------------------------------------------------------------------------ time

    def _start(self, now: Seconds) -> list[Action]:
        self._figures.started_at = now
        self._phases.moved(now)
        self._report_at = now + self._config.report_every
        return [*self._lives.launch_all(now), self._next_tick(now)]

    def _next_tick(self, now: Seconds) -> SetTimer:
        self._tick_at = now + TICK_SECONDS
        return SetTimer(name=_TICK, at=self._tick_at)

    def _tick(self, now: Seconds) -> list[Action]:
        """Look at whatever depends on time."""
        late = now - self._tick_at
        if late > TICK_SECONDS:  # this process stood still: nobody else is to blame
            self._members.excuse(late)
            self._ending.excuse(late)
            self._phases.excuse(late)
        actions: list[Action] = [self._next_tick(now)]
        stage = self._ending.stage
        if stage < ShutdownStage.CLOSE:
            actions += self._depose(now)
        if stage < ShutdownStage.CLOSE or not self._ending.interrupted:
            said, dead = self._lives.silent(now)
            actions += said
            for record, why in dead:
                actions += self._deaths.bury(record, why, now)
        if self._ending.stage is ShutdownStage.RUN:
            actions += self._ask(now)
            actions += self._phases.tell_stall(now)
            self._phases.end_if_due(now)
        if now >= self._report_at and self._figures.training_since is not None:
            self._record(now)
        return actions

    def _depose(self, now: Seconds) -> list[Action]:
        """Let seconds take over from leaders that say nothing."""
        if self._ending.interrupted:
            return []
        sends, deposed = self._pairs.tick(now)
        actions: list[Action] = [*sends]
        for record in deposed:
            why = f"silent for {now - record.heard_at:.1f} s"
            actions += self._deaths.bury(record, why, now)
        return actions

    def _ask(self, now: Seconds) -> list[Action]:
        """Ask for the evaluation and the snapshot that are due."""
        actions: list[Action] = []
        evaluator = self._members.evaluator
        if evaluator is not None and evaluator.has_joined:
            request = self._evaluations.due(now)
            if request is not None:
                actions.append(Send(receiver=evaluator.name, message=request))
        if self._pairs.all_led:
            if self._config.stop is None and not self._saves.has_begun:
                self._saves.begin(now)  # a standing server hears of no progress
            if self._saves.is_due(now):
                actions += self._closing.save(now)
        return actions

    def _record(self, now: Seconds) -> None:
        """Add a point to the curve, and a line to the metrics."""
        self._report_at = now + self._config.report_every
        self._figures.close_interval(now)
        self._records.append(self.view(now))
        del self._records[:-N_RECORDS_MAX]

    # -------------------------------------------------------------------- messages

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        if event.sender == USER:
            return self._user(event.message, now)
        record = self._members.admit(event.sender, event.incarnation, now)
        if record is None:
            raise RemoteProtocolError(
                f"{event.sender} is no member of this job, but sent {type(event.message).__name__}"
            )
        if event.incarnation != record.incarnation or not record.is_alive:
            return []  # of a former life
        return [*self._lives.heard(record, now), *self._hear(record, event.message, now)]

    def _user(self, message: Message, now: Seconds) -> list[Action]:
        if not isinstance(message, Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self._ending.interrupted:  # asked twice: not a moment longer
            return self._closing.halt(now)
        if self._config.stop is None and self._ending.stage is ShutdownStage.RUN:
            self._ending.begin(message.reason, now)  # that is how serving ends
        else:
            self._ending.interrupt(message.reason, now)
        return [self._figures.tell(f"{message.reason}: stopping", now)]

    def _hear(self, record: RoleRecord, message: Message, now: Seconds) -> list[Action]:
        match message:
            case Join():
                return self._lives.joined(record, message, now)
            case Heartbeat():
                before = record.counters.get("samples", 0.0)
                beaten = self._lives.beaten(record, message, now)
                if record.trains and record.counters.get("samples", 0.0) > before:
                    self._phases.moved(now)  # in the middle of a large batch, perhaps
                return [*beaten, *self._ask_again(record, now)]
            case Finished():
                return self._finished(record, message, now)
            case Failed():
                return self._failed(record, message, now)
            case _:
                return self._hear_of_work(record, message, now)

    def _hear_of_work(self, record: RoleRecord, message: Message, now: Seconds) -> list[Action]:
        match message:
            case Progress():
                return self._progressed(record, message, now)
            case EvaluationDone():
                self._measured(record, message, now)
            case CheckpointSaved():
                return self._saved(record, message, now)
            case BackupUnresponsive() | BackupInSync():
                return self._paired(record, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{record.name} sent the supervisor {type(message).__name__}"
                )
        return []

    def _ask_again(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Repeat what this role was asked for and has not answered."""
        messages: list[Message | None] = []
        if record.stopped:
            messages.append(self._closing.stop_message())
        elif record.begun:
            messages.append(self._books.allowances.again(record))
        leads = record.kind == "shard" and self._pairs.leads(record)
        if leads or record.kind == "coordinator":
            messages.append(self._saves.again(record.shard, now))
        elif record.kind == "evaluator":
            messages.append(self._evaluations.again(now))
        return [Send(receiver=record.name, message=m) for m in messages if m]

    def _progressed(self, record: RoleRecord, message: Progress, now: Seconds) -> list[Action]:
        if record.kind not in {"replica", "coordinator"}:
            raise RemoteProtocolError(f"{record.name} sent Progress, but does not train")
        self._phases.progressed(record, message, now)
        begin = None
        if self._ending.stage is ShutdownStage.RUN:
            begin = self._books.allowances.after_progress(record)
        return [Send(receiver=record.name, message=begin)] if begin else []

    def _measured(self, record: RoleRecord, message: EvaluationDone, now: Seconds) -> None:
        if record.kind != "evaluator":
            raise RemoteProtocolError(f"{record.name} sent EvaluationDone, but does not evaluate")
        if self._evaluations.answered(message) is None:
            return
        self._figures.measured(message, now)
        if self._ending.stage is ShutdownStage.RUN:
            self._record(now)
            self._phases.end_if_due(now)

    def _saved(self, record: RoleRecord, message: CheckpointSaved, now: Seconds) -> list[Action]:
        error = self._saves.answered(record.shard, message, now)
        if error is None:
            return []
        text = f"{record.label} could not save its snapshot: {error}"
        return [self._figures.tell(text, now, "error")]

    def _paired(
        self, record: RoleRecord, message: BackupUnresponsive | BackupInSync, now: Seconds
    ) -> list[Action]:
        if record.kind != "shard":
            raise RemoteProtocolError(
                f"{record.name} sent {type(message).__name__}, but is no shard"
            )
        text = self._pairs.news(record, message)
        actions = self._pairs.hear(record, message, now)
        return [*actions, *([self._figures.tell(text, now)] if text else [])]

    def _finished(self, record: RoleRecord, message: Finished, now: Seconds) -> list[Action]:
        record.counters.update(message.counters)
        record.farewell = True
        self._pairs.count(record)
        return self._lives.finished(record, now)

    def _failed(self, record: RoleRecord, message: Failed, now: Seconds) -> list[Action]:
        said = formatting.harmless(message.error)
        record.failure = said
        if message.culprit_is_job and record.kind != "guest":
            error = f"{record.label}: {said}"
            self._ending.begin(error, now, error=error)
            why = f"failed: {said}"
            actions = self._lives.leave_out(record, why, now)
            if record.kind == "shard":
                led = self._pairs.has_led(record)
                actions += self._deaths.replace(record, why, now, led=led)
            self._deaths.await_nothing(record)
            return actions
        return []  # its process ends now; the launcher tells when

    # ------------------------------------------------------------------ the course

    def _advance(self, now: Seconds) -> list[Action]:
        """Go on to whatever can be done now."""
        ending = self._ending
        actions: list[Action] = []
        if ending.stage is ShutdownStage.RUN:
            actions += self._phases.advance(now)
        if ending.stage is not ShutdownStage.RUN:
            before = ending.stage
            actions += self._closing.pursue(now)
            if before <= ShutdownStage.KEEP < ending.stage:
                self._record(now)  # the last point of the curve
        if ShutdownStage.RUN < ending.stage < ShutdownStage.OVER:
            actions.append(SetTimer(name=_DEADLINE, at=ending.deadline))
        return actions
