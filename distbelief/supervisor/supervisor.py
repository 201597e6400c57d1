"""The supervisor of a job: starts its roles, restarts them when they die, and stops them in order.

    Launch all -> Join ... -> Peers -> StartTraining to replica 0 -> (warm start) -> to the rest
    Heartbeat, Progress, EvaluationDone, CheckpointSaved ... until a rule of [stop] is met
    Stop to replicas -> SaveCheckpoint, Evaluate(whole) -> Stop to the others -> Exit

It never sees a parameter. Every request is repeated at the role's heartbeats until it is done,
and every wait has a bound. If all replicas are lost, a shard cannot be kept alive, or the user's
code fails, the job fails; any other loss is survived.
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


COUNT_MAX: Final = 2.0**53
"""Largest float up to which every integer is exact."""


def role_view(
    record: RoleRecord, now: Seconds, *, copy_role: str | None, restarts_before: int = 0
) -> RoleView:
    """Return one role's row of the view.

    Args:
        record: The role.
        now: The present.
        copy_role: Its state as one of two copies of a shard: "primary", ...
        restarts_before: Restarts in previous sessions of the run.
    """
    state = record.presence.value
    if record.presence is Presence.PRESENT:
        state = copy_role or record.state or state
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
    """Return mean, p95 and maximum of the staleness over shards that have applied pushes.

    The mean is weighted by pushes. The p95 is that of the worst shard: shards do not report their
    distributions.
    """
    reported = [shard.counters for shard in shards if shard.counters.get("pushes_applied")]
    if not reported:
        return None, None, None
    n_pushes = sum(counters["pushes_applied"] for counters in reported)
    weighted = sum(
        counters["pushes_applied"] * counters.get("staleness_mean", 0.0) for counters in reported
    )
    return (
        weighted / n_pushes,
        max(counters.get("staleness_p95", 0.0) for counters in reported),
        max(counters.get("staleness_max", 0.0) for counters in reported),
    )


def total(records: Iterable[RoleRecord], counter: str) -> int:
    # Roles report these numbers: negative, infinite or NaN ones are dropped.
    reported = (record.total(counter) for record in records)
    return int(sum(n for n in reported if 0.0 <= n <= COUNT_MAX))


def figures_of(job: JobState) -> dict[str, float]:
    """Return the coordinator's counters that the algorithm wants shown; empty without one."""
    coordinator = job.members.coordinator
    counters = {} if coordinator is None else coordinator.counters
    return {
        name: counters[name]
        for name in job.config.fields
        if math.isfinite(counters.get(name, math.nan))
    }


def _by_shard(members: Membership) -> Iterable[list[RoleRecord]]:
    found: dict[Address, list[RoleRecord]] = {}
    for record in members.of("shard"):
        found.setdefault(record.shard, []).append(record)
    return found.values()


def _applied(job: JobState) -> int:
    if job.members.coordinator is None:
        return job.failover.pushes_applied
    # Under a coordinator the clocks count its commands: pushes wait for their commit.
    taken = (total(copies, "pushes_applied") for copies in _by_shard(job.members))
    return job.metrics.before.pushes_applied + min(taken, default=0)


def view_of(job: JobState, *, phase: Phase, now: Seconds) -> JobView:
    """Return the view of the whole job at one moment."""
    metrics, members, failover = job.metrics, job.members, job.failover
    before = metrics.before
    # Losses are known from two sides, and neither sees all of them: replicas miss pushes of
    # their present incarnation, shards' clocks fall behind what they reported. Take the larger.
    missed = total(members.training, "pushes_lost")
    lost = max(missed, failover.pushes_lost)
    if members.coordinator is not None:
        lost = 0  # a push that is lost is repeated until the sum is complete
    # One push goes to several shards and is refused if any of them refuses it, so the true
    # number is at least that of the shard that refused most.
    refused = (total(copies, "pushes_refused") for copies in _by_shard(members))
    stop = job.config.stop
    reached = metrics.reached(now)
    shards = members.of("shard")
    # Traffic is taken from the clients' counters: a shard does not see reads from shared memory,
    # and its own counters include replication to the backup.
    clients = [record for record in members if record.kind != "shard"]
    stale = members.coordinator is None  # else every chunk is computed at the requested point
    mean, p95, largest = staleness([r for r in shards if failover.is_primary(r) and stale])
    return JobView(
        now=now,
        seconds=metrics.seconds(now),
        training_seconds=metrics.training_seconds(now),
        phase=phase,
        stop_reason=job.shutdown.reason,
        error=None if job.shutdown.interrupted else job.shutdown.error,
        samples=metrics.samples,
        total_samples=None if stop is None else stop.total_samples,
        eta_seconds=None if stop is None else stop.eta_seconds(reached),
        progress=None if stop is None else stop.progress(reached),
        step=metrics.step,
        samples_per_second=metrics.samples_per_second,
        loss=metrics.loss,
        metric_name=metrics.metric_name,
        metric=metrics.metric,
        held_out_loss=metrics.held_out_loss,
        best_metric=metrics.best_metric,
        best_metric_seconds=metrics.best_metric_seconds,
        staleness_mean=mean,
        staleness_p95=p95,
        staleness_max=largest,
        bytes_in=before.bytes_in + total(clients, "bytes_out"),
        bytes_out=before.bytes_out + total(clients, "bytes_in"),
        pushes_applied=_applied(job),
        pushes_refused=before.pushes_refused + max(refused, default=0),
        pushes_lost=None if before.pushes_lost is None else before.pushes_lost + lost,
        figures=figures_of(job),
        roles=tuple(
            role_view(
                record,
                now,
                copy_role=failover.copy_role(record),
                restarts_before=before.restarts.get(record.name, 0),
            )
            for record in members
        ),
        history=tuple(metrics.history),
        messages=tuple(metrics.messages),
    )


@final
class WarmStartPhase:
    """Lets replica 0 train alone for some steps before the other replicas begin.

    "Warmstarting model training with only a single replica before unleashing the other replicas"
    makes more replicas usable (Dean et al. 2012, section 4.1).

    Args:
        members: All roles of the job.
        allowances: Bounds of how far replicas may train.
        n_steps: Steps of replica 0, over all its incarnations, before the others begin.
    """

    def __init__(self, members: Membership, allowances: Allowances, *, n_steps: int) -> None:
        self._members = members
        self._allowances = allowances
        self._n_left = n_steps

    @property
    def is_over(self) -> bool:
        replicas = self._members.of("replica")
        # Without replica 0 nobody would ever end the warm start.
        return self._n_left <= 0 or len(replicas) < 2 or not replicas[0].is_alive

    def progressed(self, record: RoleRecord, message: Progress) -> None:
        """Count steps of replica 0; `record` is as it was before the message."""
        if record.index == 0:
            self._n_left -= max(0, message.step - record.step)

    def release(self) -> list[Action]:
        """Return `StartTraining` for every role that may begin and has not been asked to."""
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


@final
class JobPhases:
    """Decides when training begins, whether it stalls, and why it ends.

        starting --replica 0 trains--> warm start --the rest begin--> training
               any of them --a reason--> stopping, saving --> done, failed, interrupted

    A reason is: a rule of [stop] is met; the driver asks for it (`request_stop`); the coordinator
    has finished; no replica is left. `Shutdown` does what follows.
    """

    def __init__(self, job: JobState) -> None:
        self._config = job.config
        self._members = job.members
        self._failover = job.failover
        self._metrics = job.metrics
        self._evaluations = job.evaluations
        self._checkpoints = job.checkpoints
        self._shutdown_state = job.shutdown
        self._warm_start = WarmStartPhase(
            job.members, job.allowances, n_steps=job.config.warm_start_steps
        )
        self._progress_at: Seconds = 0.0
        self._requested_end: str | None = None

    @property
    def present(self) -> Phase:
        ending = self._shutdown_state
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
                return self._running_phase

    @property
    def _running_phase(self) -> Phase:
        replicas = self._replicas
        if any(r.is_at_work for r in [*self._members.of("coordinator"), *replicas]):
            return "training" if self._warm_start.is_over else "warm start"
        if self._config.stop is None and self._failover.all_have_primary:
            return "training"  # a standalone parameter server that is ready
        alive = [replica for replica in replicas if replica.is_alive]
        if alive and all(r.presence is Presence.WAITING for r in alive):
            return "waiting for hosts"
        return "resuming" if self._metrics.samples else "starting"

    @property
    def _replicas(self) -> list[RoleRecord]:
        return self._members.of("replica")

    def request_stop(self, reason: str) -> None:
        self._requested_end = self._requested_end or reason

    def note_activity(self, now: Seconds) -> None:
        self._progress_at = now

    def add_delay(self, seconds: Seconds) -> None:
        self._progress_at += seconds

    def progressed(self, record: RoleRecord, message: Progress, now: Seconds) -> None:
        """Note steps of a replica or of the coordinator; `record` is as it was before."""
        if self._metrics.training_since is None:
            self._evaluations.begin(now)
            self._checkpoints.begin(now)
        self._warm_start.progressed(record, message)
        self.note_activity(now)
        self._metrics.progress(record, message, now)
        record.progressed = True
        if self._shutdown_state.stage is ShutdownStage.RUN:
            self.end_if_due(now)

    def report_stall(self, now: Seconds) -> list[Action]:
        """Return a warning that names the replicas if none has taken a step for long."""
        waited = now - self._progress_at
        if self._config.stop is None or waited < self._config.stall_seconds:
            return []
        self.note_activity(now)  # warn once per period
        begun = [replica for replica in self._replicas if replica.begun]
        states = listed(f"{r.label}: {r.state or 'starting'}" for r in begun)
        if not states:
            return []
        text = f"no step in the last {waited:.0f} s ({states})"
        return [self._metrics.report(text, now, "warning")]

    def advance(self, now: Seconds) -> list[Action]:
        """Start the roles that may begin; end the job if no replica is left."""
        actions = self._warm_start.release()
        self._follow_coordinator(now)
        self._end_without_replicas(now)
        return actions

    def end_if_due(self, now: Seconds) -> None:
        """End the job if the driver asked for that or a rule of [stop] is met."""
        if self._requested_end is not None:
            self._shutdown_state.begin(self._requested_end, now)
        if self._config.stop is not None:
            reason = self._config.stop.reason(self._metrics.reached(now))
            if reason is not None:
                self._shutdown_state.begin(reason, now)

    def _follow_coordinator(self, now: Seconds) -> None:
        coordinator = self._members.coordinator
        if coordinator is None:
            return
        if coordinator.begun and self._metrics.training_since is None:
            self._metrics.training_since = self._progress_at = now
            self._evaluations.begin(now)
            self._checkpoints.begin(now)
        if coordinator.has_finished:
            # The job ends with its coordinator, whose counters say whether it succeeded.
            verdict = self._config.verdict(coordinator.counters)
            error = verdict.reason if verdict.failed else None
            self._shutdown_state.begin(verdict.reason, now, error=error)

    def _end_without_replicas(self, now: Seconds) -> None:
        replicas = self._replicas
        if not replicas or any(replica.is_alive for replica in replicas):
            return
        if any(replica.presence is Presence.FINISHED for replica in replicas):
            self._shutdown_state.begin("every replica has taken all its steps", now)
            return
        whys = {r.failure for r in replicas if r.failure}
        error = "every replica is lost" + (f": {listed(sorted(whys))}" if whys else "")
        self._shutdown_state.begin(error, now, error=error)


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
    """The role `supervisor`: a pure state machine, events in, actions out."""

    accepts: Final = message_types(SupervisorMessage)

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._job = JobState.open(config)
        self._members = self._job.members
        self._failover = self._job.failover
        self._metrics = self._job.metrics
        self._evaluations = self._job.evaluations
        self._checkpoints = self._job.checkpoints
        self._shutdown_state = self._job.shutdown
        self._heartbeats = Heartbeats(self._job)
        self._shutdown = Shutdown(self._job, heartbeats=self._heartbeats)
        self._restart_policy = RestartPolicy(self._job, heartbeats=self._heartbeats)
        self._phases = JobPhases(self._job)
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
                actions = self._restart_policy.confirm_death(role, now)
            case PeerLost():
                actions = self._restart_policy.process_ended(event, now)
            case _:
                actions = []
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the phase, and the samples and steps of all replicas."""
        metrics = self._metrics
        return self._phases.present, {
            "samples": float(metrics.samples),
            "steps": float(metrics.step),
        }

    @property
    def job(self) -> JobState:
        return self._job

    @property
    def interrupted(self) -> bool:
        return self._shutdown_state.interrupted

    @property
    def error(self) -> str | None:
        return self._shutdown_state.error

    def request_stop(self, reason: str) -> None:
        self._phases.request_stop(reason)

    def take_records(self) -> list[JobView]:
        """Return the views to append to the metrics file, and forget them."""
        records, self._records = self._records, []
        return records

    def view(self, now: Seconds) -> JobView:
        return view_of(self._job, phase=self._phases.present, now=now)

    def _start(self, now: Seconds) -> list[Action]:
        self._metrics.started_at = now
        self._phases.note_activity(now)
        self._report_at = now + self._config.report_every
        return [*self._heartbeats.launch_all(now), self._next_tick(now)]

    def _next_tick(self, now: Seconds) -> SetTimer:
        self._tick_at = now + TICK_SECONDS
        return SetTimer(name=_TICK, at=self._tick_at)

    def _tick(self, now: Seconds) -> list[Action]:
        late = now - self._tick_at
        if late > TICK_SECONDS:  # this process was suspended: the roles may not be silent at all
            self._members.add_delay(late)
            self._shutdown_state.add_delay(late)
            self._phases.add_delay(late)
        actions: list[Action] = [self._next_tick(now)]
        stage = self._shutdown_state.stage
        if stage < ShutdownStage.CLOSE:
            actions += self._replace_silent_primaries(now)
        if stage < ShutdownStage.CLOSE or not self._shutdown_state.interrupted:
            reports, dead = self._heartbeats.silent(now)
            actions += reports
            for record, why in dead:
                actions += self._restart_policy.handle_death(record, why, now)
        if self._shutdown_state.stage is ShutdownStage.RUN:
            actions += self._due_requests(now)
            actions += self._phases.report_stall(now)
            self._phases.end_if_due(now)
        if now >= self._report_at and self._metrics.training_since is not None:
            self._record(now)
        return actions

    def _replace_silent_primaries(self, now: Seconds) -> list[Action]:
        if self._shutdown_state.interrupted:
            return []
        sends, deposed = self._failover.tick(now)
        actions: list[Action] = [*sends]
        for record in deposed:
            why = f"silent for {now - record.heard_at:.1f} s"
            actions += self._restart_policy.handle_death(record, why, now)
        return actions

    def _due_requests(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        evaluator = self._members.evaluator
        if evaluator is not None and evaluator.has_joined:
            request = self._evaluations.due(now)
            if request is not None:
                actions.append(Send(receiver=evaluator.name, message=request))
        if self._failover.all_have_primary:
            if self._config.stop is None and not self._checkpoints.has_begun:
                self._checkpoints.begin(now)  # a standalone server gets no Progress
            if self._checkpoints.is_due(now):
                actions += self._shutdown.save(now)
        return actions

    def _record(self, now: Seconds) -> None:
        self._report_at = now + self._config.report_every
        self._metrics.close_interval(now)
        self._records.append(self.view(now))
        del self._records[:-N_RECORDS_MAX]

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        if event.sender == USER:
            return self._user(event.message, now)
        record = self._members.admit(event.sender, event.incarnation, now)
        if record is None:
            raise RemoteProtocolError(
                f"{event.sender} is not a member of the job: {type(event.message).__name__} ignored"
            )
        if event.incarnation != record.incarnation or not record.is_alive:
            return []  # from an earlier incarnation
        return [*self._heartbeats.heard(record, now), *self._dispatch(record, event.message, now)]

    def _user(self, message: Message, now: Seconds) -> list[Action]:
        if not isinstance(message, Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self._shutdown_state.interrupted:  # a second Ctrl+C: end at once
            return self._shutdown.halt(now)
        if self._config.stop is None and self._shutdown_state.stage is ShutdownStage.RUN:
            self._shutdown_state.begin(message.reason, now)  # the normal end of a standalone server
        else:
            self._shutdown_state.interrupt(message.reason, now)
        return [self._metrics.report(f"{message.reason}: stopping", now)]

    def _dispatch(self, record: RoleRecord, message: Message, now: Seconds) -> list[Action]:
        match message:
            case Join():
                return self._heartbeats.joined(record, message, now)
            case Heartbeat():
                before = record.counters.get("samples", 0.0)
                actions = self._heartbeats.heartbeat(record, message, now)
                if record.trains and record.counters.get("samples", 0.0) > before:
                    self._phases.note_activity(now)  # a large batch makes progress without a step
                return [*actions, *self._repeated_requests(record, now)]
            case Finished():
                return self._finished(record, message, now)
            case Failed():
                return self._failed(record, message, now)
            case _:
                return self._dispatch_work(record, message, now)

    def _dispatch_work(self, record: RoleRecord, message: Message, now: Seconds) -> list[Action]:
        match message:
            case Progress():
                return self._progressed(record, message, now)
            case EvaluationDone():
                self._evaluated(record, message, now)
            case CheckpointSaved():
                return self._saved(record, message, now)
            case BackupUnresponsive() | BackupInSync():
                return self._paired(record, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{record.name} sent the supervisor {type(message).__name__}"
                )
        return []

    def _repeated_requests(self, record: RoleRecord, now: Seconds) -> list[Action]:
        messages: list[Message | None] = []
        if record.stopped:
            messages.append(self._shutdown.stop_message())
        elif record.begun:
            messages.append(self._job.allowances.repeat(record))
        is_primary = record.kind == "shard" and self._failover.is_primary(record)
        if is_primary or record.kind == "coordinator":
            messages.append(self._checkpoints.repeat(record.shard, now))
        elif record.kind == "evaluator":
            messages.append(self._evaluations.repeat(now))
        return [Send(receiver=record.name, message=m) for m in messages if m]

    def _progressed(self, record: RoleRecord, message: Progress, now: Seconds) -> list[Action]:
        if record.kind not in {"replica", "coordinator"}:
            raise RemoteProtocolError(f"{record.name} sent Progress, but does not train")
        self._phases.progressed(record, message, now)
        begin = None
        if self._shutdown_state.stage is ShutdownStage.RUN:
            begin = self._job.allowances.after_progress(record)
        return [Send(receiver=record.name, message=begin)] if begin else []

    def _evaluated(self, record: RoleRecord, message: EvaluationDone, now: Seconds) -> None:
        if record.kind != "evaluator":
            raise RemoteProtocolError(f"{record.name} sent EvaluationDone, but does not evaluate")
        if self._evaluations.answered(message) is None:
            return
        self._metrics.measured(message, now)
        if self._shutdown_state.stage is ShutdownStage.RUN:
            self._record(now)
            self._phases.end_if_due(now)

    def _saved(self, record: RoleRecord, message: CheckpointSaved, now: Seconds) -> list[Action]:
        error = self._checkpoints.answered(record.shard, message, now)
        if error is None:
            return []
        text = f"{record.label} could not save its checkpoint: {error}"
        return [self._metrics.report(text, now, "error")]

    def _paired(
        self, record: RoleRecord, message: BackupUnresponsive | BackupInSync, now: Seconds
    ) -> list[Action]:
        if record.kind != "shard":
            raise RemoteProtocolError(
                f"{record.name} sent {type(message).__name__}, but is no shard"
            )
        text = self._failover.report_text(record, message)
        actions = self._failover.handle_report(record, message, now)
        return [*actions, *([self._metrics.report(text, now)] if text else [])]

    def _finished(self, record: RoleRecord, message: Finished, now: Seconds) -> list[Action]:
        record.counters.update(message.counters)
        record.has_finished = True
        self._failover.count(record)
        return self._heartbeats.finished(record, now)

    def _failed(self, record: RoleRecord, message: Failed, now: Seconds) -> list[Action]:
        error = formatting.without_control_characters(message.error)
        record.failure = error
        if message.culprit_is_job and record.kind != "guest":
            reason = f"{record.label}: {error}"
            self._shutdown_state.begin(reason, now, error=reason)
            why = f"failed: {error}"
            actions = self._heartbeats.leave_out(record, why, now)
            if record.kind == "shard":
                was_primary = self._failover.was_primary(record)
                actions += self._restart_policy.replace(record, why, now, was_primary=was_primary)
            self._restart_policy.cancel_requests(record)
            return actions
        return []  # its process ends now; the launcher reports that (PeerLost)

    def _advance(self, now: Seconds) -> list[Action]:
        ending = self._shutdown_state
        actions: list[Action] = []
        if ending.stage is ShutdownStage.RUN:
            actions += self._phases.advance(now)
        if ending.stage is not ShutdownStage.RUN:
            before = ending.stage
            actions += self._shutdown.pursue(now)
            if before <= ShutdownStage.KEEP < ending.stage:
                self._record(now)  # the last point of the curve
        if ShutdownStage.RUN < ending.stage < ShutdownStage.OVER:
            actions.append(SetTimer(name=_DEADLINE, at=ending.deadline))
        return actions
