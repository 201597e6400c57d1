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
from typing import Final, final, get_args

import msgspec
from msgspec.structs import replace

from distbelief import protocol as wire
from distbelief.core import formatting
from distbelief.core.errors import RemoteProtocolError
from distbelief.core.reliable import Silence
from distbelief.core.spans import Spans
from distbelief.protocol import role as rl
from distbelief.protocol.log_events import LogEvent
from distbelief.supervisor.allowances import Allowances
from distbelief.supervisor.dealer import MISSING_SECONDS_MAX
from distbelief.supervisor.failover import ShardFailover
from distbelief.supervisor.handover import LOST, Handover, start_roles
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.supervisor.make_view import make_view
from distbelief.supervisor.membership import FEW, Kind, Membership, Presence, RoleRecord, Seldom
from distbelief.supervisor.metrics import JobMetrics
from distbelief.supervisor.output import Output
from distbelief.supervisor.periodic_requests import Checkpoints, Evaluations
from distbelief.supervisor.ring_generations import RingGenerations
from distbelief.supervisor.role_placement import PlacementPolicy, RolePlacement
from distbelief.supervisor.scheduler import HostToSupervisor, Scheduler
from distbelief.supervisor.shutdown import Shutdown, ShutdownStage
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView, Phase


TICK_SECONDS: Final = 0.25
TICKS_EACH: Final = 4  # of more than a few roles, between two looks at how long they are silent
N_SHOWN: Final = 5  # pieces in a message
N_RECORDS_MAX: Final = 1024
INTRODUCE_SECONDS: Final = 5.0  # between two `Peers` to one role: messages may be lost
LAST_MESSAGES_SECONDS: Final = 0.1  # they may come after the news that their process has ended
LAST_SAVE_SECONDS: Final = 10.0  # for repeating a failed save of the last checkpoint

_TICK: Final = "supervisor:tick"
_DEADLINE: Final = "supervisor:deadline"
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
    | wire.SamplesApplied
    | wire.Stop
)


@final
class Supervisor:
    """The role `supervisor`: a pure state machine, events in, actions out."""

    accepts: Final = rl.message_types(RoleToSupervisor | HostToSupervisor)

    def __init__(
        self,
        config: SupervisorConfig,
        cluster: ClusterConfig | None = None,
        *,
        policy: PlacementPolicy | None = None,
        handover: Handover | None = None,  # of a supervisor that was killed
    ) -> None:
        self._config, self._handover = config, handover
        # Seldom of thousands, as their heartbeats are.
        self._introduce_seconds = max(INTRODUCE_SECONDS, 10 * config.heartbeat_seconds)
        patience = None if cluster is None else cluster.pieces_seconds_max
        self._pieces_seconds_max = MISSING_SECONDS_MAX if patience is None else patience
        self.members = Membership(
            config.roster,
            incarnation=config.first_incarnation,
            admits_guests=config.admits_guests,
            in_ring=config.in_ring,
        )
        self.metrics = JobMetrics(
            metric_name=config.metric_name,
            higher_is_better=config.higher_is_better,
            judged_by=config.judged_by,
            before=config.before,
            min_delta=config.min_delta,
            others=config.other_metrics,
        )
        self.out = Output(self.metrics)
        self.failover = ShardFailover(
            self.members, self.out, first=config.first_incarnation, clocks=config.before.clocks
        )
        self.evaluations = Evaluations(
            every=config.evaluate_every,
            first=config.first_evaluation,
            n_samples=config.evaluate_samples,
        )
        self.checkpoints = Checkpoints(every=config.snapshot_every, first=config.first_label)
        self.shutdown = Shutdown()
        self.allowances = Allowances(self.members, self.metrics, config)
        self.scheduler = Scheduler(
            self.members,
            self.out,
            self.shutdown,
            stable_seconds=config.stable_seconds,
            on_end=self._ended,
            failover=self.failover,
            cluster=cluster,
            policy=policy or RolePlacement.of(cluster),
        )
        self._ring = RingGenerations(self.members, self.out) if config.in_ring else None
        self.has_begun = False
        self._n_ticks = 0
        self._clock = Silence()  # our own tick, and the progress of all replicas
        self._requested_end: str | None = None
        self._report_at: rl.Seconds = 0.0
        self._records: list[JobView] = []
        self._to_introduce: dict[rl.Address, RoleRecord] = {}  # at the next tick
        self._stops_again = Seldom()
        self._draining: list[RoleRecord] | None = None  # trainers that may still be alive
        self._missing: set[str] = set()  # pieces that no host has, as was said

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        self.out.begin(now)
        match event:
            case rl.Started():
                self._start()
            case rl.Received(sender=sender) if sender.startswith(rl.HOST):
                self.scheduler.receive(event)
            case rl.Received():
                self._receive(event)
            case rl.TimerFired(name=name) if name == _TICK:
                self._tick()
            case rl.TimerFired(name=name) if name.startswith(LOST):
                self._confirm_death(rl.Address(name.removeprefix(LOST)))
            case rl.PeerJoined():
                self._process_begins(event)
            case rl.PeerLost():
                self.scheduler.ended(event)
                self._ended(event.peer, event.incarnation, event.reason)
            case _:
                pass
        self._begin_if_due()
        self._advance()
        self.scheduler.place()
        return self.out.actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        metrics = self.metrics
        return self.phase, {"samples": float(metrics.samples), "steps": float(metrics.step)}

    @property
    def _now(self) -> rl.Seconds:
        return self.out.now

    @property
    def _runs(self) -> bool:
        return self.shutdown.stage is ShutdownStage.RUN

    def request_stop(self, reason: str) -> None:
        self._requested_end = self._requested_end or reason

    def take_records(self) -> list[JobView]:
        """Return the views to append to the metrics file, and forget them."""
        records, self._records = self._records, []
        return records

    # --- start and tick

    def _start(self) -> None:
        self.metrics.started_at = self._now
        for record in self.members:
            record.presence = Presence.WAITING
        self.scheduler.start()
        self._set_tick()

    def _begin_if_due(self) -> None:
        if self.has_begun or not self._runs or not (self._handover or self.scheduler.may_begin()):
            return
        self.has_begun = True
        self.metrics.started_at = self._now
        self._clock.heard(self._now)
        self._report_at = self._now + self._config.report_every
        start_roles(self, self._handover, self._now)
        if self.metrics.training_since is not None:  # under the supervisor before this one
            self._begin_requests()

    def _set_tick(self) -> None:
        self.out.add(rl.SetTimer(name=_TICK, at=self._clock.expect(self._now + TICK_SECONDS)))

    def _tick(self) -> None:
        late = self._clock.woke(self._now)
        if late <= TICK_SECONDS:
            late = TICK_SECONDS if self.scheduler.seems_cut_off() else 0.0
        if late:  # this process was suspended, or cut off: the roles may not be silent at all
            self.members.add_delay(late)
            self.shutdown.add_delay(late)
        self._set_tick()
        self.scheduler.tick(late=late)
        self.allowances.tick()
        to_introduce, self._to_introduce = self._to_introduce, {}
        for record in to_introduce.values():
            if record.has_joined:
                self._introduce(record)
        if self.shutdown.stage < ShutdownStage.CLOSE and not self.shutdown.interrupted:
            for record in self.failover.tick():
                self._handle_death(record, f"silent for {self._now - record.heard_at:.1f} s")
        if self.shutdown.stage < ShutdownStage.CLOSE or not self.shutdown.interrupted:
            self._check_silence()
        if self._ring is not None and self.has_begun:
            self._ring.tick()
        if self._runs:
            self._send_due_requests()
            self._report_stall()
            self._report_missing()
            self._part_copies()
            self._end_if_due()
        if self._now >= self._report_at and self.metrics.training_since is not None:
            self._record()

    def _part_copies(self) -> None:
        """Move the backup of a primary on the same host once another host is free."""
        for record in self.scheduler.copies_together():
            primary = self.failover.primary(record.shard)
            if primary is not None and primary is not record and primary.has_joined:
                self.scheduler.move(record)

    def _send_due_requests(self) -> None:
        self._evaluate_if_due()
        if self.failover.all_have_primary:
            if self._config.stop is None and not self.checkpoints.has_begun:
                self.checkpoints.begin(self._now)  # a standalone server gets no Progress
            if self.checkpoints.is_due(self._now):
                self._save()

    def _evaluate_if_due(self) -> None:
        evaluator = self.members.evaluator
        if evaluator is not None and evaluator.has_joined:
            self.out.send(evaluator.name, self.evaluations.due(self._now, self.metrics.samples))

    def _report_stall(self) -> None:
        waited = self._clock.stalled(self._now)
        if self._config.stop is None or waited < self._config.stall_seconds:
            return
        self._clock.heard(self._now)  # warn once per period
        states = ", ".join(
            f"{record.label}: {record.state or 'starting'}"
            for record in self.members.of("replica")
            if record.begun
        )
        if states:
            self.out.log(LogEvent("stalled", seconds=waited, detail=states))

    def _report_missing(self) -> None:
        """Say which pieces of the data no host has, and end the job if nothing else is left."""
        dealer = self.allowances.dealer
        if dealer is None or not self.has_begun:
            return
        missing, waited = dealer.missing(self._now)
        what = f"piece {', '.join(map(repr, missing[:N_SHOWN]))}"
        what += f", ... ({len(missing)} in all)" if len(missing) > N_SHOWN else ""
        if set(missing) - self._missing:
            self.out.log(LogEvent("pieces_missing", detail=what))
        self._missing = set(missing)
        if waited > self._pieces_seconds_max:
            error = (
                f"no host has {what}, and all others are done: resume where one has them, or give "
                "the object of [data.train] fetch(piece)"
            )
            self.shutdown.begin(error, self._now, error=error)

    def _record(self) -> None:
        self._report_at = self._now + self._config.report_every
        self.metrics.close_interval(self._now)
        self._records.append(self.view(self._now))
        del self._records[:-N_RECORDS_MAX]

    # --- messages

    def _receive(self, event: rl.Received) -> None:
        message = event.message
        if event.sender == rl.USER:
            self._stop_by_user(message)
            return
        record = self.members.admit(event.sender, event.incarnation, self._now)
        if record is None:
            raise RemoteProtocolError(
                f"{event.sender} is not a member of the job: {type(message).__name__} ignored"
            )
        if event.incarnation != record.incarnation or not record.is_alive:
            return  # from an earlier incarnation
        if isinstance(message, wire.Failed):
            host = self.scheduler.to_blame(record, message)
            if host is not None:
                self.scheduler.reject(host, f"{record.label} there: {message.error}")
                return
        self._heard(record)
        self._dispatch(record, message)

    def _stop_by_user(self, message: wire.Message) -> None:
        if not isinstance(message, wire.Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self.shutdown.interrupted:  # a second Ctrl+C: end at once
            self._halt()
            return
        if self._config.stop is None and self._runs:
            self.shutdown.begin(message.reason, self._now)  # a standalone server's normal end
        else:
            self.shutdown.interrupt(message.reason, self._now)
        self.out.log(LogEvent("stopping", reason=message.reason))

    def _dispatch(self, record: RoleRecord, message: wire.Message) -> None:
        match message:
            case wire.Join():
                self._joined(record, message)
            case wire.Heartbeat():
                self._heartbeat(record, message)
            case wire.Finished():
                self._finished(record, message)
            case wire.Failed():
                self._failed(record, message)
            case wire.Progress() if record.kind in {"replica", "coordinator"}:
                self._progressed(record, message)
            case wire.EvaluationDone() if record.kind == "evaluator":
                self._evaluated(message)
            case wire.CheckpointSaved() if record.kind in {"shard", "coordinator"}:
                error = self.checkpoints.answered(record.shard, message, self._now)
                if error:
                    self.out.log(LogEvent("not_saved", record.name, reason=error))
                self.scheduler.saved(record, message)
            case wire.SamplesApplied() if record.kind == "shard":
                self._applied(record, message)
            case wire.BackupUnresponsive() | wire.BackupInSync() if record.kind == "shard":
                self.failover.reported(record, message)
            case _:
                raise RemoteProtocolError(
                    f"{record.name} sent the supervisor {type(message).__name__}, which is not for "
                    f"a {record.kind} to send"
                )

    def _progressed(self, record: RoleRecord, message: wire.Progress) -> None:
        if self.metrics.training_since is None:
            self._begin_requests()
        self.allowances.progressed(record, message)
        self._clock.heard(self._now)
        self.metrics.progress(record, message, self._now)
        record.progressed = True
        if message.counters is not msgspec.UNSET and self._runs:
            record.report(record.counters | message.counters)
            self._record()
        if self.allowances.dealer is not None and message.skipped:
            self.allowances.dealer.skipped(record, message.skipped)
            self._count_dealt()
        if self._runs:
            self._end_if_due()
        if self._runs:
            self.out.send(record.name, self.allowances.after_progress(record))
        if self._runs and self.evaluations.n_samples is not None:
            self._evaluate_if_due()

    def _applied(self, record: RoleRecord, message: wire.SamplesApplied) -> None:
        dealer = self.allowances.dealer
        if dealer is None or not self.failover.is_primary(record):
            return
        has_waited = not dealer.knows_all
        dealer.applied(record.shard, message.spans)
        self._count_dealt()
        if has_waited and self._runs:
            for replica in self.members.of("replica"):
                self.out.send(replica.name, self.allowances.after_progress(replica))

    def _count_dealt(self) -> None:
        dealer = self.allowances.dealer
        if dealer is not None and dealer.knows_all:
            self.metrics.dealt = dealer.n_done
            if self._runs:
                self._end_if_due()

    def _begin_requests(self) -> None:
        self.evaluations.begin(self._now, self.metrics.samples)
        self.checkpoints.begin(self._now)

    def _evaluated(self, message: wire.EvaluationDone) -> None:
        if self.evaluations.answered(message):
            self.metrics.measured(message, self._now, counts=self._runs)
            if message.unsaved is not None:
                self.out.log(LogEvent("not_kept", reason=message.unsaved))
            if self._runs:
                self._record()
                self._end_if_due()

    def _finished(self, record: RoleRecord, message: wire.Finished) -> None:
        if self.scheduler.finished(record):
            return
        record.report(record.counters | message.counters)
        record.has_finished = True
        self.failover.count(record)
        self._end_role(record)

    def _failed(self, record: RoleRecord, message: wire.Failed) -> None:
        error = formatting.plain(message.error)
        record.failure = error
        goes_on = message.restart_helps and not message.culprit_is_job
        if goes_on or record.kind == "guest":
            return  # its process ends now; the launcher reports that (PeerLost)
        if message.culprit_is_job:
            reason = f"{record.label}: {error}"
            self.shutdown.begin(reason, self._now, error=reason)
        self._leave_out(
            record, LogEvent("role_failed", record.name, record.incarnation, reason=error)
        )
        if record.kind == "shard":
            was_primary = self.failover.was_primary(record)
            self._take_over(record, f"failed: {error}", was_primary=was_primary)
        elif record.kind == "coordinator" and not message.culprit_is_job:
            self._fail("the coordinator", record, f"failed: {error}")
        self._cancel_requests(record)

    # --- membership and heartbeats

    def _joined(self, record: RoleRecord, message: wire.Join) -> None:
        endpoint, host = message.endpoint, message.host
        if not ((endpoint + host).isascii() and (endpoint + host).isprintable()):
            raise RemoteProtocolError(f"{record.name} joins from {endpoint!a}")
        if not record.join(message):
            self._introduce(record)
            return
        self.out.add(
            rl.Connect(
                peer=record.name,
                incarnation=record.incarnation,
                endpoint=endpoint,
                host=host,
                watched=record.kind == "guest",  # of others the launcher tells the end
            )
        )
        # Those of a first incarnation were shown before the start.
        for warning in message.warnings if record.restarts else ():
            self.out.log(LogEvent("role_warns", record.name, reason=warning))
        # The primary is chosen first: clients wait for it.
        promotions = self.failover.joined(record)
        self._notify_peers(record)
        self._introduce(record)
        self.out.add(*promotions)

    def _introduce(self, record: RoleRecord) -> None:
        is_client = record.kind != "shard" and record.introduced_at is None
        if is_client and not self.failover.all_have_primary:
            return  # a client waits until all shards are there
        record.introduced_at = self._now
        self.out.send(record.name, self.members.peers_of(record))

    def _notify_peers(self, record: RoleRecord) -> None:
        for other in self.members.near(record):
            if not (other.has_joined and record.needs(other)):
                continue
            if len(self.members) > FEW and other.kind in {"shard", "coordinator"}:
                self._to_introduce[other.name] = other  # it gets a list of thousands: once a tick
            else:
                self._introduce(other)

    def _heard(self, record: RoleRecord) -> None:
        was_away = record.presence is Presence.AWAY
        silence = self._now - record.heard_at
        record.heard_at, record.presence = self._now, Presence.PRESENT
        if record.silence_reported:
            record.silence_reported = False
            self.out.log(LogEvent("role_back", record.name, seconds=silence))
        if was_away:
            self._notify_peers(record)

    def _heartbeat(self, record: RoleRecord, message: wire.Heartbeat) -> None:
        samples = record.counters.get("samples", 0.0)
        record.state = formatting.plain(message.state)
        record.report(message.counters)
        if message.pieces is not msgspec.UNSET:
            record.pieces = Spans.from_wire(message.pieces)
        if record.trains and record.counters.get("samples", 0.0) > samples:
            self._clock.heard(self._now)  # a large batch makes progress without a step
        self._count(record)
        if record.has_joined:
            self.out.send(record.name, wire.HeartbeatAck())
            self.failover.heartbeat(record)
            at = record.introduced_at
            if at is not None and self._now - at >= self._introduce_seconds:
                self._introduce(record)
        self._repeat_requests(record)

    def _count(self, record: RoleRecord) -> None:
        counter = "pushes_applied" if record.kind == "shard" else "samples"
        if record.kind == "shard" and record.state != _RESTORING:
            self.failover.count(record)
        count = record.counters.get(counter, 0.0)
        # Under a coordinator replicas send no Progress; thousands of replicas send it seldom.
        is_due = self.members.coordinator is not None or record.rate.lacks(self._now, count)
        is_due = record.kind == "replica" and is_due
        if is_due or (record.kind == "shard" and counter in record.counters):
            record.rate.add(self._now, count)

    def _repeat_requests(self, record: RoleRecord) -> None:
        if record.stopped:
            self.out.send(record.name, self._stop_message())
        elif record.begun:
            self.out.send(record.name, self.allowances.repeat(record))
        is_primary = record.kind == "shard" and self.failover.is_primary(record)
        if is_primary or record.kind == "coordinator":
            self.out.send(record.name, self.checkpoints.repeat(record.shard, self._now))
        elif record.kind == "evaluator":
            self.out.send(record.name, self.evaluations.repeat(self._now))

    def _check_silence(self) -> None:
        self._n_ticks += 1
        if len(self.members) > FEW and self._n_ticks % TICKS_EACH:
            return
        dead: list[tuple[RoleRecord, str]] = []
        limits = {kind: self._config.silence_max(kind) for kind in get_args(Kind)}
        for record in list(self.members):
            # A primary whose backup cannot take over holds what nobody else has. So if both copies
            # are silent, the backup is killed first.
            alone = self.failover.is_irreplaceable(record)
            silent_after, dead_after = limits[record.kind]
            dead_after *= 2 if alone else 1
            why = self._config.cause_of_death(record, self._now, dead_after=dead_after)
            if why is not None:
                dead.append((record, why))
            elif record.presence is Presence.PRESENT:
                self._report_if_silent(record, silent_after, dead_after=dead_after)
        for record, why in dead:
            self._handle_death(record, why)

    def _report_if_silent(
        self, record: RoleRecord, silent_after: rl.Seconds, *, dead_after: rl.Seconds
    ) -> None:
        silence, is_guest = self._now - record.heard_at, record.kind == "guest"
        limit = self._config.dead_seconds if is_guest else silent_after
        if record.silence_reported or silence <= limit:
            return
        if is_guest:
            self._away(record, f"silent for {silence:.1f} s")
            return
        record.silence_reported = True
        name, incarnation = record.name, record.incarnation
        self.out.log(LogEvent("role_silent", name, incarnation, seconds=silence, limit=dead_after))

    def _away(self, guest: RoleRecord, why: str) -> None:
        """Let others go on without a guest, which may come back."""
        guest.presence, guest.end = Presence.AWAY, None
        self.out.log(LogEvent("guest_away", guest.name, reason=why))
        self._notify_peers(guest)

    def _process_begins(self, event: rl.PeerJoined) -> None:
        record = self.members.get(event.peer)
        if record is None or event.incarnation != record.incarnation:
            return
        if record.presence is Presence.LAUNCHED and not record.begins:
            record.begins, record.launched_at, record.heard_at = True, self._now, self._now

    # --- deaths

    def _ended(
        self, name: rl.Address, incarnation: int, reason: str, *, at_once: bool = False
    ) -> None:
        """Handle the end of a process; its last messages may still come, unless `at_once`."""
        record = self.members.get(name)
        if record is None or incarnation != record.incarnation or not record.is_alive:
            return
        record.end = reason
        if at_once or self.shutdown.interrupted or self.shutdown.stage >= ShutdownStage.CLOSE:
            self._confirm_death(name)
        else:
            self.out.add(rl.SetTimer(name=f"{LOST}{name}", at=self._now + LAST_MESSAGES_SECONDS))

    def _confirm_death(self, name: rl.Address) -> None:
        record = self.members.get(name)
        if record is not None and record.end is not None and record.is_alive:
            why = f"failed ({record.failure})" if record.failure else record.end
            self._handle_death(record, why)

    def _handle_death(self, record: RoleRecord, why: str) -> None:
        stage = self.shutdown.stage
        if self.shutdown.interrupted or (stage >= ShutdownStage.CLOSE and record.end):
            self._end_role(record)
            return
        if record.kind == "guest":
            if record.presence is not Presence.AWAY:
                self._away(record, why)
            return
        if stage >= ShutdownStage.CLOSE or (record.trains and stage is not ShutdownStage.RUN):
            self.out.log(LogEvent("role_died_at_end", record.name, reason=why))
            self.scheduler.terminate(record.name)
            self._end_role(record)
            return
        was_primary = self.failover.was_primary(record)
        self._restart(record, why)
        if record.kind == "shard":
            self._take_over(record, why, was_primary=was_primary)
        if not record.is_alive:
            self._cancel_requests(record)
            if record.kind == "coordinator":
                self._fail("the coordinator", record, why)

    def _restart(self, record: RoleRecord, why: str) -> None:
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
            self._leave_out(record, event)
            return
        record.restarts_in_a_row = 1 + (0 if stable else record.restarts_in_a_row)
        record.restarts += 1
        self.out.log(self.failover.restart_event(record, why, self.checkpoints))
        # Copies of a shard share their incarnation numbers: they restore each other's
        # checkpoints, which must always come from a lower incarnation.
        copies = [record, *self.failover.copies(record.shard)]
        self.scheduler.terminate(record.name)  # the process may only be silent
        record.begin_incarnation(1 + max(copy.incarnation for copy in copies), self._now)
        self.scheduler.launch(record)
        self._notify_peers(record)

    def _leave_out(self, record: RoleRecord, event: LogEvent) -> None:
        """Continue without this role, and without the ranks of its model-parallel group."""
        self.out.log(event)
        group = [r for r in self.members.ranks_with(record) if r.is_alive]
        if group:
            names = tuple(other.name for other in group)
            self.out.log(LogEvent("group_left_out", record.name, roles=names))
        for each in (record, *group):
            each.presence = Presence.LEFT_OUT
            self.scheduler.terminate(each.name)
            self._notify_peers(each)

    def _end_role(self, record: RoleRecord) -> None:
        record.presence = Presence.FINISHED
        if record.kind == "guest":
            self.members.leave(record)
        self._notify_peers(record)
        if record.kind == "shard" and not self.failover.is_primary(record):
            self.failover.lost(record)  # its primary need not wait for it

    def _take_over(self, record: RoleRecord, why: str, *, was_primary: bool) -> None:
        """Let the other copy of a shard take over from a dead one, if there is another."""
        self.failover.lost(record)
        if was_primary and self.allowances.dealer is not None:
            self.allowances.dealer.lost(record.shard)
        primary = self.failover.primary(record.shard)
        if was_primary and primary is not None and primary is not record:
            save = self.checkpoints.repeat(record.shard, self._now, at_once=True)
            self.out.send(primary.name, save)
        if record.is_alive:
            return
        others = [copy for copy in self.failover.copies(record.shard) if copy.is_alive]
        if not others:
            self._fail(record.shard.replace("-", " "), record, why)
        elif primary is None and others[0].has_joined:
            # It is out of sync: only a new incarnation, with a checkpoint, can become primary.
            why = f"is not in sync, and {record.label} will not come back"
            self._handle_death(others[0], why)

    def _fail(self, what: str, record: RoleRecord, why: str) -> None:
        error = f"{what} {why}"
        if record.restarts_in_a_row:
            error = (
                f"{what} cannot be kept alive after {record.restarts_in_a_row} restarts, none of "
                f"which lasted {self._config.stable_seconds:g} s: it {why}"
            )
        self.shutdown.begin(error, self._now, error=error)

    def _cancel_requests(self, record: RoleRecord) -> None:
        if record.kind in {"evaluator", "rank"} and not record.trains:
            self.evaluations.give_up()
        if not any(copy.is_alive for copy in self.failover.copies(record.shard)):
            self.checkpoints.forget(record.shard)

    # --- phases: when training begins, and why it ends

    def _advance(self) -> None:
        if self._runs:
            for name, begin in self.allowances.release():
                self.out.send(name, begin)
            self._follow_coordinator()
            self._end_without_replicas()
        if not self._runs:
            before = self.shutdown.stage
            self._pursue_shutdown()
            if before <= ShutdownStage.KEEP < self.shutdown.stage:
                self._record()  # the last point of the curve
        if ShutdownStage.RUN < self.shutdown.stage < ShutdownStage.OVER:
            self.out.add(rl.SetTimer(name=_DEADLINE, at=self.shutdown.deadline))

    def _follow_coordinator(self) -> None:
        coordinator = self.members.coordinator
        if coordinator is None:
            return
        if coordinator.begun and self.metrics.training_since is None:
            self.metrics.training_since = self._now
            self._clock.heard(self._now)
            self._begin_requests()
        if coordinator.has_finished:
            # The job ends with its coordinator, whose counters say whether it succeeded.
            verdict = self._config.verdict(coordinator.counters)
            error = verdict.reason if verdict.failed else None
            self.shutdown.begin(verdict.reason, self._now, error=error)

    def _end_without_replicas(self) -> None:
        replicas = self.members.of("replica")
        if self.has_begun and (why := self.scheduler.why_without_hosts()) is not None:
            self.shutdown.begin(why, self._now, error=why)
        if not replicas or any(replica.is_alive for replica in replicas):
            return
        if any(replica.presence is Presence.FINISHED for replica in replicas):
            self.shutdown.begin("every replica has taken all its steps", self._now)
            return
        ranks = [*replicas, *self.members.of("rank")]
        whys = sorted({rank.failure for rank in ranks if rank.failure})
        error = ": ".join(["every replica is lost", *([", ".join(whys)] if whys else [])])
        self.shutdown.begin(error, self._now, error=error)

    def _end_if_due(self) -> None:
        if self._requested_end is not None:
            self.shutdown.begin(self._requested_end, self._now)
        if self._config.stop is not None:
            reason = self._config.stop.reason(self.metrics.view(self._now))
            if reason is not None:
                self.shutdown.begin(reason, self._now)

    # --- shutdown: what is asked of each role, and when the next stage begins

    def _pursue_shutdown(self) -> None:
        steps = {
            ShutdownStage.DRAIN: self._drain,
            ShutdownStage.KEEP: self._keep,
            ShutdownStage.CLOSE: self._close,
        }
        before = ShutdownStage.RUN
        while self.shutdown.stage > before:
            before = self.shutdown.stage
            if before in steps:
                steps[before]()

    def _drain(self) -> None:
        # Every rank gets a Stop: one that is still being built ends at once.
        if self._stops_again.is_due(len(self.members)):
            self._stop([*self.members.of("coordinator"), *self.members.training])
        evaluator = self.members.evaluator
        if self.shutdown.interrupted and evaluator is not None:
            self._stop([evaluator])
        if self._draining is None:
            self._draining = self.members.training
        while self._draining and not self._draining[-1].is_alive:  # nobody comes back
            self._draining.pop()
        if self._draining and self._now < self.shutdown.deadline:
            return
        left = [replica for replica in self.members.training if replica.is_alive]
        self._kill(left, "its last step and push")
        self.shutdown.enter(ShutdownStage.KEEP, self._now)
        self._begin_keep()

    def _begin_keep(self) -> None:
        self.evaluations.give_up()
        self.checkpoints.give_up()
        if self.members.of("replica") and self.metrics.training_since is None:
            return  # nothing has changed
        coordinator = self.members.coordinator
        if coordinator is not None and not coordinator.has_finished:
            # The shards may hold a trial point of a line search, so no checkpoint is taken.
            event = LogEvent("ended_early")
            if not self.shutdown.interrupted:
                self.shutdown.error = self.shutdown.error or event.text
            self.out.log(event)
            return
        self._save()
        evaluator = self.members.evaluator
        if (
            evaluator is not None
            and evaluator.is_alive
            and not evaluator.stopped
            and self.shutdown.error is None
        ):
            self.out.send(evaluator.name, self.evaluations.ask(self._now, whole=True))

    def _save(self) -> None:
        """Begin a round of checkpoints; a shard that is down is asked when it is back."""
        # Only the coordinator knows when the shards hold a point to resume from.
        coordinator = self.members.coordinator
        if coordinator is not None and coordinator.is_alive:
            self.out.send(coordinator.name, self.checkpoints.ask([coordinator.name], self._now))
            return
        shards = sorted({shard.shard for shard in self.members.of("shard") if shard.is_alive})
        last = self.shutdown.stage is ShutdownStage.KEEP
        retry = LAST_SAVE_SECONDS if last and not self.shutdown.interrupted else 0.0
        save = self.checkpoints.ask(shards, self._now, retry_seconds=retry, last=last)
        for primary in map(self.failover.primary, shards):
            if primary is not None:
                self.out.send(primary.name, save)

    def _keep(self) -> None:
        late = self.checkpoints.waiting
        waiting = [*late, *([rl.Address("evaluator")] * self.evaluations.waits)]
        if waiting and self._now < self.shutdown.deadline:
            return
        if waiting:
            self.out.log(LogEvent("no_answer", roles=tuple(waiting)))
            self.evaluations.give_up()
        # A job whose last checkpoint is not on disk has failed.
        unsaved = self.checkpoints.errors | dict.fromkeys(late, "it did not answer in time")
        if unsaved and not self.shutdown.interrupted:
            name, why = min(unsaved.items())
            text = f"the last checkpoint of {name.replace('-', ' ')} could not be saved: {why}"
            self.shutdown.error = self.shutdown.error or text
        self.shutdown.enter(ShutdownStage.CLOSE, self._now)

    def _close(self) -> None:
        self._stop(list(self.members))
        ours = [r for r in self.members if r.is_alive and r.kind != "guest"]
        if ours and self._now < self.shutdown.deadline:
            return
        if not self.shutdown.interrupted:
            self._kill(ours, "its end")
        self._halt()

    def _stop_message(self) -> wire.Stop:
        return wire.Stop(reason=(self.shutdown.reason or "the job ends")[:1024])

    def _stop(self, records: Sequence[RoleRecord]) -> None:
        for record in records:
            if not record.is_alive or record.stopped:
                continue
            if record.has_joined:
                record.stopped = True
                self.out.send(record.name, self._stop_message())
            elif record.kind != "guest":
                self.scheduler.terminate(record.name)
                self._end_role(record)

    def _kill(self, records: Sequence[RoleRecord], what: str) -> None:
        for record in records:
            self.scheduler.terminate(record.name)
            if not self.shutdown.interrupted:
                self.out.log(LogEvent("role_killed", record.name, detail=what))
            self._end_role(record)

    def _halt(self) -> None:
        """End the job at once: kill what is left."""
        for record in self.members:
            if record.is_alive and record.kind != "guest":
                self.scheduler.terminate(record.name)
        self.shutdown.stage = ShutdownStage.OVER
        self.metrics.ended_at = self._now
        self.scheduler.release_all()
        error = "interrupted" if self.shutdown.interrupted else self._error
        self.out.add(rl.Exit(error=error))

    @property
    def _error(self) -> str | None:  # roles and hosts have worded parts of it
        error = self.shutdown.error
        return None if error is None else formatting.plain(error)

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
        if self._config.stop is None and self.has_begun and self.failover.all_have_primary:
            return "training"  # a standalone parameter server that is ready
        alive = [replica for replica in replicas if replica.is_alive]
        if alive and all(r.presence is Presence.WAITING for r in alive):
            return "waiting for hosts"
        return "resuming" if self.metrics.samples else "starting"

    def view(self, now: rl.Seconds) -> JobView:
        view = make_view(
            self._config, self.members, self.failover, self.metrics, self.scheduler.hosts, now
        )
        return replace(
            view,
            phase=self.phase,
            stop_reason=self.shutdown.reason and formatting.plain(self.shutdown.reason),
            error=None if self.shutdown.interrupted else self._error,
            n_checkpoints=self.checkpoints.n_complete,
            messages=tuple(self.out.messages),
        )
