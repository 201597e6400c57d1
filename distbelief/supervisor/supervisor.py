"""The supervisor of a job: starts its roles, restarts them when they die, and stops them in order.

    Launch all -> Join ... -> Peers -> StartTraining to replica 0 -> (warm start) -> to the rest
    Heartbeat, Progress, EvaluationDone, CheckpointSaved ... until a rule of [stop] is met
    Stop to replicas -> SaveCheckpoint, Evaluate(whole) -> Stop to the others -> Exit

* It never sees a parameter. Every request is repeated at the role's heartbeats until it is done,
  and every wait has a bound.
* Every start of a role is a new incarnation; messages of an older one are ignored.
* A silent role is reported at once; longer silence counts as death, and its process is killed.
* A dead replica is restarted and, after too many restarts, left out: the others train on (DB-12).
  A dead shard restarts from its newest checkpoint, or its other copy takes over.
* If all replicas are lost, a shard cannot be kept alive, or the user's code fails, the job fails.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

from distbelief import protocol as wire
from distbelief.core import formatting
from distbelief.core.reliable import Silence
from distbelief.errors import RemoteProtocolError
from distbelief.roles.log_events import LogEvent
from distbelief.roles.role import (
    HOST,
    USER,
    Action,
    Address,
    Connect,
    Event,
    Exit,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from distbelief.supervisor.allowances import Allowances
from distbelief.supervisor.config import SupervisorConfig
from distbelief.supervisor.failover import ShardFailover
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.supervisor.job_view import job_view
from distbelief.supervisor.membership import Membership, Presence, RoleRecord
from distbelief.supervisor.metrics import JobMetrics
from distbelief.supervisor.rounds import Checkpoints, Evaluations
from distbelief.supervisor.scheduler import (
    HostToSupervisor,
    PlacementPolicy,
    ReplicasAnywhere,
    Scheduler,
)
from distbelief.supervisor.shutdown import Shutdown, ShutdownStage
from distbelief.supervisor.view import JobView, Phase


TICK_SECONDS: Final = 0.25
N_RECORDS_MAX: Final = 1024
INTRODUCE_SECONDS: Final = 5.0  # between two `Peers` to one role: messages may be lost
LAST_MESSAGES_SECONDS: Final = 0.1  # they may come after the news that their process has ended
LAST_SAVE_SECONDS: Final = 10.0  # for repeating a failed save of the last checkpoint

_TICK: Final = "supervisor:tick"
_DEADLINE: Final = "supervisor:deadline"
_LOST: Final = "supervisor:lost:"
_RESTORING: Final = "starting"  # state of a shard without values yet: its clock is 0

RoleToSupervisor = (
    wire.Join
    | wire.Heartbeat
    | wire.Finished
    | wire.Failed
    | wire.Progress
    | wire.EvaluationDone
    | wire.CheckpointSaved
    | wire.BackupUnresponsive
    | wire.BackupInSync
    | wire.Stop
)


@final
class Supervisor:
    """The role `supervisor`: a pure state machine, events in, actions out.

    Args:
        config: Of the job.
        cluster: How it uses hosts that join; None: all roles run on this host.
        policy: Decides which host runs a role.
    """

    accepts: Final = message_types(RoleToSupervisor | HostToSupervisor)

    def __init__(
        self,
        config: SupervisorConfig,
        cluster: ClusterConfig | None = None,
        *,
        policy: PlacementPolicy | None = None,
    ) -> None:
        self._config = config
        self.members = Membership(
            config.roster, incarnation=config.first_incarnation, admits_guests=config.admits_guests
        )
        self.failover = ShardFailover(
            self.members, first=config.first_incarnation, clocks=config.before.clocks
        )
        self.metrics = JobMetrics(
            metric_name=config.metric_name,
            higher_is_better=config.higher_is_better,
            before=config.before,
        )
        self.evaluations = Evaluations(every=config.evaluate_every)
        self.checkpoints = Checkpoints(every=config.snapshot_every, first=config.first_label)
        self.shutdown = Shutdown()
        self.allowances = Allowances(self.members, self.metrics, config)
        self.scheduler = Scheduler(
            self.members,
            self.metrics,
            self.shutdown,
            stable_seconds=config.stable_seconds,
            on_end=self._ended,
            cluster=cluster,
            policy=policy or ReplicasAnywhere(),
        )
        self._has_begun = False
        self._clock = Silence()  # our own tick, and the progress of all replicas
        self._requested_end: str | None = None
        self._report_at: Seconds = 0.0
        self._records: list[JobView] = []

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                actions = self._start(now)
            case Received(sender=sender) if sender.startswith(HOST):
                actions = self.scheduler.receive(event, now)
            case Received():
                actions = self._receive(event, now)
            case TimerFired(name=name) if name == _TICK:
                actions = self._tick(now)
            case TimerFired(name=name) if name.startswith(_LOST):
                actions = self._confirm_death(Address(name.removeprefix(_LOST)), now)
            case PeerLost():
                self.scheduler.ended_here(event.peer, event.incarnation)
                actions = self._ended(event.peer, event.incarnation, event.reason, now)
            case _:
                actions = []
        actions += self._begin_if_due(now)
        actions += self._advance(now)
        return [*actions, *self.scheduler.place(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the phase, and the samples and steps of all replicas."""
        metrics = self.metrics
        return self.phase, {"samples": float(metrics.samples), "steps": float(metrics.step)}

    @property
    def _runs(self) -> bool:
        return self.shutdown.stage is ShutdownStage.RUN

    @property
    def interrupted(self) -> bool:
        return self.shutdown.interrupted

    @property
    def error(self) -> str | None:
        return self.shutdown.error

    def request_stop(self, reason: str) -> None:
        """End the job at the next tick."""
        self._requested_end = self._requested_end or reason

    def take_records(self) -> list[JobView]:
        """Return the views to append to the metrics file, and forget them."""
        records, self._records = self._records, []
        return records

    def _log(self, now: Seconds, event: LogEvent) -> Action:
        return self.metrics.log(event, now)

    # --- start and tick

    def _start(self, now: Seconds) -> list[Action]:
        self.metrics.started_at = now
        for record in self.members:
            record.presence = Presence.WAITING
        return [*self.scheduler.start(now), self._set_tick(now)]

    def _begin_if_due(self, now: Seconds) -> list[Action]:
        if self._has_begun or not self._runs:
            return []
        self._has_begun, actions = self.scheduler.may_begin(now)
        if self._has_begun:
            self.metrics.started_at = now
            self._clock.heard(now)
            self._report_at = now + self._config.report_every
            for record in self.members:
                record.begin_incarnation(record.incarnation, now)
                self.scheduler.launch(record)
        return actions

    def _set_tick(self, now: Seconds) -> Action:
        return SetTimer(name=_TICK, at=self._clock.expect(now + TICK_SECONDS))

    def _tick(self, now: Seconds) -> list[Action]:
        late = self._clock.woke(now)
        if late > TICK_SECONDS:  # this process was suspended: the roles may not be silent at all
            self.members.add_delay(late)
            self.shutdown.add_delay(late)
        actions: list[Action] = [self._set_tick(now)]
        actions += self.scheduler.tick(now, late=late if late > TICK_SECONDS else 0.0)
        if self.shutdown.stage < ShutdownStage.CLOSE and not self.shutdown.interrupted:
            sends, demoted = self.failover.tick(now)
            actions += sends
            for record in demoted:
                why = f"silent for {now - record.heard_at:.1f} s"
                actions += self._handle_death(record, why, now)
        if self.shutdown.stage < ShutdownStage.CLOSE or not self.shutdown.interrupted:
            actions += self._check_silence(now)
        if self._runs:
            actions += self._due_requests(now)
            actions += self._report_stall(now)
            self._end_if_due(now)
        if now >= self._report_at and self.metrics.training_since is not None:
            self._record(now)
        return actions

    def _due_requests(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        evaluator = self.members.evaluator
        if evaluator is not None and evaluator.has_joined:
            request = self.evaluations.due(now)
            if request is not None:
                actions.append(Send(receiver=evaluator.name, message=request))
        if self.failover.all_have_primary:
            if self._config.stop is None and not self.checkpoints.has_begun:
                self.checkpoints.begin(now)  # a standalone server gets no Progress
            if self.checkpoints.is_due(now):
                actions += self._save(now)
        return actions

    def _report_stall(self, now: Seconds) -> list[Action]:
        waited = self._clock.stalled(now)
        if self._config.stop is None or waited < self._config.stall_seconds:
            return []
        self._clock.heard(now)  # warn once per period
        states = ", ".join(
            f"{record.label}: {record.state or 'starting'}"
            for record in self.members.of("replica")
            if record.begun
        )
        event = LogEvent("stalled", seconds=waited, detail=states)
        return [self._log(now, event)] if states else []

    def _record(self, now: Seconds) -> None:
        self._report_at = now + self._config.report_every
        self.metrics.close_interval(now)
        self._records.append(self.view(now))
        del self._records[:-N_RECORDS_MAX]

    # --- messages

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        message = event.message
        if event.sender == USER:
            return self._user(message, now)
        record = self.members.admit(event.sender, event.incarnation, now)
        if record is None:
            raise RemoteProtocolError(
                f"{event.sender} is not a member of the job: {type(message).__name__} ignored"
            )
        if event.incarnation != record.incarnation or not record.is_alive:
            return []  # from an earlier incarnation
        if isinstance(message, wire.Failed):
            host = self.scheduler.to_blame(record, message)
            if host is not None:
                return self.scheduler.reject(host, f"{record.label} there: {message.error}", now)
        return [*self._heard(record, now), *self._dispatch(record, message, now)]

    def _user(self, message: wire.Message, now: Seconds) -> list[Action]:
        if not isinstance(message, wire.Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self.interrupted:  # a second Ctrl+C: end at once
            return self._halt(now)
        if self._config.stop is None and self._runs:
            self.shutdown.begin(message.reason, now)  # the normal end of a standalone server
        else:
            self.shutdown.interrupt(message.reason, now)
        return [self._log(now, LogEvent("stopping", reason=message.reason))]

    def _dispatch(self, record: RoleRecord, message: wire.Message, now: Seconds) -> list[Action]:
        match message:
            case wire.Join():
                actions = self._joined(record, message, now)
            case wire.Heartbeat():
                actions = self._heartbeat(record, message, now)
            case wire.Finished():
                actions = self._finished(record, message, now)
            case wire.Failed():
                actions = self._failed(record, message, now)
            case wire.Progress() if record.kind in {"replica", "coordinator"}:
                actions = self._progressed(record, message, now)
            case wire.EvaluationDone() if record.kind == "evaluator":
                actions = self._evaluated(message, now)
            case wire.CheckpointSaved() if record.kind in {"shard", "coordinator"}:
                error = self.checkpoints.answered(record.shard, message, now)
                event = LogEvent("not_saved", record.name, reason=error or "")
                actions = [self._log(now, event)] if error else []
            case wire.BackupUnresponsive() | wire.BackupInSync() if record.kind == "shard":
                news, sends = self.failover.reported(record, message, now)
                actions = [*sends, *([self._log(now, news)] if news else [])]
            case _:
                raise RemoteProtocolError(
                    f"{record.name} sent the supervisor {type(message).__name__}, which is not for "
                    f"a {record.kind} to send"
                )
        return actions

    def _progressed(self, record: RoleRecord, message: wire.Progress, now: Seconds) -> list[Action]:
        if self.metrics.training_since is None:
            self._begin_rounds(now)
        self.allowances.progressed(record, message)
        self._clock.heard(now)
        self.metrics.progress(record, message, now)
        record.progressed = True
        if self._runs:
            self._end_if_due(now)
        begin = self.allowances.after_progress(record) if self._runs else None
        return [Send(receiver=record.name, message=begin)] if begin else []

    def _begin_rounds(self, now: Seconds) -> None:
        self.evaluations.begin(now)
        self.checkpoints.begin(now)

    def _evaluated(self, message: wire.EvaluationDone, now: Seconds) -> list[Action]:
        if self.evaluations.answered(message):
            self.metrics.measured(message, now)
            if self._runs:
                self._record(now)
                self._end_if_due(now)
        return []

    def _finished(self, record: RoleRecord, message: wire.Finished, now: Seconds) -> list[Action]:
        moves = self.scheduler.finished(record, now)
        if moves is not None:
            return moves
        record.counters.update(message.counters)
        record.has_finished = True
        self.failover.count(record)
        return self._end_role(record, now)

    def _failed(self, record: RoleRecord, message: wire.Failed, now: Seconds) -> list[Action]:
        error = formatting.without_control_characters(message.error)
        record.failure = error
        if not message.culprit_is_job or record.kind == "guest":
            return []  # its process ends now; the launcher reports that (PeerLost)
        reason = f"{record.label}: {error}"
        self.shutdown.begin(reason, now, error=reason)
        failed = LogEvent("role_failed", record.name, record.incarnation, reason=error)
        actions = self._leave_out(record, failed, now)
        if record.kind == "shard":
            was_primary = self.failover.was_primary(record)
            actions += self._take_over(record, f"failed: {error}", now, was_primary=was_primary)
        self._cancel_requests(record)
        return actions

    # --- membership and heartbeats

    def _joined(self, record: RoleRecord, message: wire.Join, now: Seconds) -> list[Action]:
        if not (message.endpoint + message.host).isascii():
            raise RemoteProtocolError(f"{record.name} joins from {message.endpoint!a}")
        if not record.join(message):
            return self._introduce(record, now)
        connect = Connect(
            peer=record.name,
            incarnation=record.incarnation,
            endpoint=message.endpoint,
            host=message.host,
        )
        # Those of a first incarnation were shown before the start.
        warnings = message.warnings if record.restarts else ()
        # The primary is chosen first: clients wait for it.
        promotions = self.failover.joined(record, now)
        return [
            connect,
            *(self._log(now, LogEvent("role_warns", record.name, reason=w)) for w in warnings),
            *self._notify_peers(record, now),
            *self._introduce(record, now),
            *promotions,
        ]

    def _introduce(self, record: RoleRecord, now: Seconds) -> list[Action]:
        if (
            record.kind != "shard"
            and record.introduced_at is None
            and not self.failover.all_have_primary
        ):
            return []  # a client waits until all shards are there
        record.introduced_at = now
        return [Send(receiver=record.name, message=self.members.peers_of(record))]

    def _notify_peers(self, record: RoleRecord, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for other in self.members:
            if other.has_joined and record.needs(other):
                actions += self._introduce(other, now)
        return actions

    def _heard(self, record: RoleRecord, now: Seconds) -> list[Action]:
        was_away = record.presence is Presence.AWAY
        silence = now - record.heard_at
        record.heard_at, record.presence = now, Presence.PRESENT
        actions: list[Action] = []
        if record.silence_reported:
            record.silence_reported = False
            event = LogEvent("role_back", record.name, seconds=silence)
            actions.append(self._log(now, event))
        return [*actions, *(self._notify_peers(record, now) if was_away else [])]

    def _heartbeat(self, record: RoleRecord, message: wire.Heartbeat, now: Seconds) -> list[Action]:
        samples = record.counters.get("samples", 0.0)
        record.state = formatting.without_control_characters(message.state)
        record.counters = message.counters
        if record.trains and record.counters.get("samples", 0.0) > samples:
            self._clock.heard(now)  # a large batch makes progress without a step
        self._count(record, now)
        actions: list[Action] = []
        if record.has_joined:
            actions.append(Send(receiver=record.name, message=wire.HeartbeatAck()))
            actions += self.failover.heartbeat(record, now)
            at = record.introduced_at
            if at is not None and now - at >= INTRODUCE_SECONDS:
                actions += self._introduce(record, now)
        return [*actions, *self._repeated_requests(record, now)]

    def _count(self, record: RoleRecord, now: Seconds) -> None:
        counter = "pushes_applied" if record.kind == "shard" else "samples"
        if record.kind == "shard" and record.state != _RESTORING:
            self.failover.count(record)
        # Under a coordinator replicas send no Progress.
        driven = record.kind == "replica" and self.members.coordinator is not None
        if driven or (record.kind == "shard" and counter in record.counters):
            record.rate.add(now, record.counters.get(counter, 0.0))

    def _repeated_requests(self, record: RoleRecord, now: Seconds) -> list[Action]:
        messages: list[wire.Message | None] = []
        if record.stopped:
            messages.append(self._stop_message())
        elif record.begun:
            messages.append(self.allowances.repeat(record))
        is_primary = record.kind == "shard" and self.failover.is_primary(record)
        if is_primary or record.kind == "coordinator":
            messages.append(self.checkpoints.repeat(record.shard, now))
        elif record.kind == "evaluator":
            messages.append(self.evaluations.repeat(now))
        return [Send(receiver=record.name, message=m) for m in messages if m]

    def _check_silence(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        dead: list[tuple[RoleRecord, str]] = []
        for record in list(self.members):
            # A primary whose backup cannot take over holds what nobody else has. So if both copies
            # are silent, the backup is killed first.
            alone = self.failover.is_irreplaceable(record, now)
            dead_after = self._config.dead_seconds * (2 if alone else 1)
            why = self._config.cause_of_death(record, now, dead_after=dead_after)
            if why is not None:
                dead.append((record, why))
            elif record.presence is Presence.PRESENT:
                actions += self._report_if_silent(record, now, dead_after=dead_after)
        for record, why in dead:
            actions += self._handle_death(record, why, now)
        return actions

    def _report_if_silent(
        self, record: RoleRecord, now: Seconds, *, dead_after: Seconds
    ) -> list[Action]:
        silence, is_guest = now - record.heard_at, record.kind == "guest"
        limit = self._config.dead_seconds if is_guest else self._config.silent_seconds
        if record.silence_reported or silence <= limit:
            return []
        if is_guest:
            record.presence = Presence.AWAY
            away = LogEvent("guest_away", record.name, seconds=silence)
            return [self._log(now, away), *self._notify_peers(record, now)]
        record.silence_reported = True
        event = LogEvent(
            "role_silent", record.name, record.incarnation, seconds=silence, limit=dead_after
        )
        return [self._log(now, event)]

    # --- deaths

    def _ended(
        self, name: Address, incarnation: int, reason: str, now: Seconds, *, at_once: bool = False
    ) -> list[Action]:
        """Handle the end of a process; its last messages may still come, unless `at_once`."""
        record = self.members.get(name)
        if record is None or incarnation != record.incarnation or not record.is_alive:
            return []
        record.end = reason
        if at_once or self.interrupted or self.shutdown.stage >= ShutdownStage.CLOSE:
            return self._confirm_death(name, now)
        return [SetTimer(name=f"{_LOST}{name}", at=now + LAST_MESSAGES_SECONDS)]

    def _confirm_death(self, name: Address, now: Seconds) -> list[Action]:
        record = self.members.get(name)
        if record is None or record.end is None or not record.is_alive:
            return []
        why = f"failed ({record.failure})" if record.failure else record.end
        return self._handle_death(record, why, now)

    def _handle_death(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Handle the death of a role: restart it unless the job no longer needs it."""
        stage = self.shutdown.stage
        if self.interrupted or (stage >= ShutdownStage.CLOSE and record.end):
            return self._end_role(record, now)
        if stage >= ShutdownStage.CLOSE or (record.trains and stage is not ShutdownStage.RUN):
            event = LogEvent("role_died_at_end", record.name, reason=why)
            ended = self.scheduler.terminate(record.name)
            return [self._log(now, event), *ended, *self._end_role(record, now)]
        was_primary = self.failover.was_primary(record)
        actions = self._restart(record, why, now)
        if record.kind == "shard":
            actions += self._take_over(record, why, now, was_primary=was_primary)
        if not record.is_alive:
            self._cancel_requests(record)
            if record.kind == "coordinator":
                self._fail("the coordinator", record, why, now)
        return actions

    def _restart(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Start a new incarnation of a dead role, or leave it out if it died too often."""
        config = self._config
        stable = record.was_stable(config.stable_seconds)
        n_max = config.restarts_max(record.kind, trains=record.trains)
        if record.restarts_in_a_row >= n_max and not (stable and n_max):
            event = LogEvent(
                "role_left_out",
                record.name,
                record.incarnation,
                reason=why,
                n=record.restarts_in_a_row,
                limit=config.stable_seconds,
            )
            return self._leave_out(record, event, now)
        record.restarts_in_a_row = 1 + (0 if stable else record.restarts_in_a_row)
        record.restarts += 1
        event = self.failover.restart_event(record, why, self.checkpoints, now)
        reported = self._log(now, event)
        # Copies of a shard share their incarnation numbers: they restore each other's
        # checkpoints, which must always come from a lower incarnation.
        copies = [record, *self.failover.copies(record.shard)]
        ended = self.scheduler.terminate(record.name)  # the process may only be silent
        record.begin_incarnation(1 + max(copy.incarnation for copy in copies), now)
        self.scheduler.launch(record)
        return [reported, *ended, *self._notify_peers(record, now)]

    def _leave_out(self, record: RoleRecord, event: LogEvent, now: Seconds) -> list[Action]:
        """Continue without this role, and without the ranks of its model-parallel group."""
        actions: list[Action] = [self._log(now, event)]
        group = [r for r in self.members.ranks_with(record) if r.is_alive]
        if group:
            names = tuple(other.name for other in group)
            event = LogEvent("group_left_out", record.name, roles=names)
            actions.append(self._log(now, event))
        for each in (record, *group):
            each.presence = Presence.LEFT_OUT
            actions += self.scheduler.terminate(each.name)
            actions += self._notify_peers(each, now)
        return actions

    def _end_role(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Handle the planned end of a role."""
        record.presence = Presence.FINISHED
        if record.kind == "guest":
            self.members.leave(record)
        actions = self._notify_peers(record, now)
        if record.kind == "shard" and not self.failover.is_primary(record):
            actions += self.failover.lost(record)  # its primary need not wait for it
        return actions

    def _take_over(
        self, record: RoleRecord, why: str, now: Seconds, *, was_primary: bool
    ) -> list[Action]:
        """Let the other copy of a shard take over from a dead one, if there is another."""
        actions: list[Action] = [*self.failover.lost(record)]
        primary = self.failover.primary(record.shard)
        if was_primary and primary is not None and primary is not record:
            save = self.checkpoints.repeat(record.shard, now, at_once=True)
            actions += [Send(receiver=primary.name, message=save)] if save else []
        if record.is_alive:
            return actions
        others = [copy for copy in self.failover.copies(record.shard) if copy.is_alive]
        if not others:
            self._fail(record.shard.replace("-", " "), record, why, now)
        elif primary is None and others[0].has_joined:
            # It is out of sync: only a new incarnation, with a checkpoint, can become primary.
            why = f"is not in sync, and {record.label} will not come back"
            actions += self._handle_death(others[0], why, now)
        return actions

    def _fail(self, what: str, record: RoleRecord, why: str, now: Seconds) -> None:
        error = (
            f"{what} cannot be kept alive after {record.restarts_in_a_row} restarts, none of which "
            f"lasted {self._config.stable_seconds:g} s: it {why}"
        )
        self.shutdown.begin(error, now, error=error)

    def _cancel_requests(self, record: RoleRecord) -> None:
        """Cancel requests to a role that is gone for good."""
        if record.kind in {"evaluator", "machine"} and not record.trains:
            self.evaluations.give_up()
        if not any(copy.is_alive for copy in self.failover.copies(record.shard)):
            self.checkpoints.forget(record.shard)

    # --- phases: when training begins, and why it ends

    def _advance(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        if self._runs:
            actions += self.allowances.release()
            self._follow_coordinator(now)
            self._end_without_replicas(now)
        if not self._runs:
            before = self.shutdown.stage
            actions += self._pursue_shutdown(now)
            if before <= ShutdownStage.KEEP < self.shutdown.stage:
                self._record(now)  # the last point of the curve
        if ShutdownStage.RUN < self.shutdown.stage < ShutdownStage.OVER:
            actions.append(SetTimer(name=_DEADLINE, at=self.shutdown.deadline))
        return actions

    def _follow_coordinator(self, now: Seconds) -> None:
        coordinator = self.members.coordinator
        if coordinator is None:
            return
        if coordinator.begun and self.metrics.training_since is None:
            self.metrics.training_since = now
            self._clock.heard(now)
            self._begin_rounds(now)
        if coordinator.has_finished:
            # The job ends with its coordinator, whose counters say whether it succeeded.
            verdict = self._config.verdict(coordinator.counters)
            error = verdict.reason if verdict.failed else None
            self.shutdown.begin(verdict.reason, now, error=error)

    def _end_without_replicas(self, now: Seconds) -> None:
        replicas = self.members.of("replica")
        if not replicas or any(replica.is_alive for replica in replicas):
            return
        if any(replica.presence is Presence.FINISHED for replica in replicas):
            self.shutdown.begin("every replica has taken all its steps", now)
            return
        whys = sorted({r.failure for r in replicas if r.failure})
        error = ": ".join(["every replica is lost", *([", ".join(whys)] if whys else [])])
        self.shutdown.begin(error, now, error=error)

    def _end_if_due(self, now: Seconds) -> None:
        """End the job if the driver asked for that or a rule of [stop] is met."""
        if self._requested_end is not None:
            self.shutdown.begin(self._requested_end, now)
        if self._config.stop is not None:
            reason = self._config.stop.reason(self.metrics.reached(now))
            if reason is not None:
                self.shutdown.begin(reason, now)

    # --- shutdown: what is asked of each role, and when the next stage begins

    def _pursue_shutdown(self, now: Seconds) -> list[Action]:
        steps = {
            ShutdownStage.DRAIN: self._drain,
            ShutdownStage.KEEP: self._keep,
            ShutdownStage.CLOSE: self._close,
        }
        actions: list[Action] = []
        before = ShutdownStage.RUN
        while self.shutdown.stage > before:
            before = self.shutdown.stage
            actions += steps[before](now) if before in steps else []
        return actions

    def _drain(self, now: Seconds) -> list[Action]:
        # Every rank gets a Stop: one that is still being built ends at once.
        actions = self._stop([*self.members.of("coordinator"), *self.members.training], now)
        evaluator = self.members.evaluator
        if self.interrupted and evaluator is not None:
            actions += self._stop([evaluator], now)
        left = [replica for replica in self.members.training if replica.is_alive]
        if left and now < self.shutdown.deadline:
            return actions
        actions += self._kill(left, "its last step and push", now)
        self.shutdown.enter(ShutdownStage.KEEP, now)
        return [*actions, *self._begin_keep(now)]

    def _begin_keep(self, now: Seconds) -> list[Action]:
        self.evaluations.give_up()
        self.checkpoints.give_up()
        if self.members.of("replica") and self.metrics.training_since is None:
            return []  # nothing has changed
        coordinator = self.members.coordinator
        if coordinator is not None and not coordinator.has_finished:
            # The shards may hold a trial point of a line search, so no checkpoint is taken.
            event = LogEvent("ended_early")
            if not self.interrupted:
                self.shutdown.error = self.shutdown.error or event.text
            return [self._log(now, event)]
        actions = self._save(now)
        evaluator = self.members.evaluator
        if (
            evaluator is not None
            and evaluator.is_alive
            and not evaluator.stopped
            and self.shutdown.error is None
        ):
            request = self.evaluations.ask(now, whole=True)
            actions.append(Send(receiver=evaluator.name, message=request))
        return actions

    def _save(self, now: Seconds) -> list[Action]:
        """Begin a round of checkpoints; a shard that is down is asked when it is back."""
        # Only the coordinator knows when the shards hold a point to resume from.
        coordinator = self.members.coordinator
        if coordinator is not None and coordinator.is_alive:
            save = self.checkpoints.ask([coordinator.name], now)
            return [Send(receiver=coordinator.name, message=save)]
        shards = sorted({shard.shard for shard in self.members.of("shard") if shard.is_alive})
        last = self.shutdown.stage is ShutdownStage.KEEP
        retry = LAST_SAVE_SECONDS if last and not self.interrupted else 0.0
        save = self.checkpoints.ask(shards, now, retry_seconds=retry, last=last)
        primaries = [self.failover.primary(name) for name in shards]
        return [Send(receiver=r.name, message=save) for r in primaries if r is not None]

    def _keep(self, now: Seconds) -> list[Action]:
        late = self.checkpoints.waiting
        waiting = [*late, *([Address("evaluator")] * self.evaluations.waits)]
        if waiting and now < self.shutdown.deadline:
            return []
        actions: list[Action] = []
        if waiting:
            actions.append(self._log(now, LogEvent("no_answer", roles=tuple(waiting))))
            self.evaluations.give_up()
        # A job whose last checkpoint is not on disk has failed.
        unsaved = self.checkpoints.errors | dict.fromkeys(late, "it did not answer in time")
        if unsaved and not self.interrupted:
            name, why = min(unsaved.items())
            text = f"the last checkpoint of {name.replace('-', ' ')} could not be saved: {why}"
            self.shutdown.error = self.shutdown.error or text
        self.shutdown.enter(ShutdownStage.CLOSE, now)
        return actions

    def _close(self, now: Seconds) -> list[Action]:
        actions = self._stop(list(self.members), now)
        ours = [r for r in self.members if r.is_alive and r.kind != "guest"]
        if ours and now < self.shutdown.deadline:
            return actions
        if not self.interrupted:
            actions += self._kill(ours, "its end", now)
        return [*actions, *self._halt(now)]

    def _stop_message(self) -> wire.Stop:
        return wire.Stop(reason=(self.shutdown.reason or "the job ends")[:1024])

    def _stop(self, records: Sequence[RoleRecord], now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for record in records:
            if not record.is_alive or record.stopped:
                continue
            if record.has_joined:
                record.stopped = True
                actions.append(Send(receiver=record.name, message=self._stop_message()))
            elif record.kind != "guest":
                actions += self.scheduler.terminate(record.name)
                actions += self._end_role(record, now)
        return actions

    def _kill(self, records: Sequence[RoleRecord], what: str, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for record in records:
            actions += self.scheduler.terminate(record.name)
            if not self.interrupted:
                event = LogEvent("role_killed", record.name, detail=what)
                actions.append(self._log(now, event))
            actions += self._end_role(record, now)
        return actions

    def _halt(self, now: Seconds) -> list[Action]:
        """End the job at once: kill what is left."""
        actions: list[Action] = []
        for record in self.members:
            if record.is_alive and record.kind != "guest":
                actions += self.scheduler.terminate(record.name)
        self.shutdown.stage = ShutdownStage.OVER
        self.metrics.ended_at = now
        error = "interrupted" if self.interrupted else self.error
        return [*actions, *self.scheduler.releases(), Exit(error=error)]

    # --- view

    @property
    def phase(self) -> Phase:
        if not self._runs:
            return self.shutdown.phase
        replicas = self.members.of("replica")
        for record in [*self.members.of("coordinator"), *replicas]:
            works = record.begun and (record.progressed or record.state == "computing")
            if works and record.presence is Presence.PRESENT:
                return "training" if self.allowances.warm_start_is_over else "warm start"
        if self._config.stop is None and self._has_begun and self.failover.all_have_primary:
            return "training"  # a standalone parameter server that is ready
        alive = [replica for replica in replicas if replica.is_alive]
        if alive and all(r.presence is Presence.WAITING for r in alive):
            return "waiting for hosts"
        return "resuming" if self.metrics.samples else "starting"

    def view(self, now: Seconds) -> JobView:
        """Return the view of the whole job at one moment."""
        return job_view(
            self._config,
            self.members,
            self.failover,
            self.metrics,
            self.shutdown,
            self.scheduler.hosts,
            phase=self.phase,
            now=now,
        )
