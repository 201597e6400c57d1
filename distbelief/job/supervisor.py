"""The supervisor of a job: starts its roles, keeps them going, and ends them in order.

    Launch all -> Join ... -> Peers -> Begin replica 0 -> (warm start) -> Begin the rest
    Heartbeat, Progress, Measured, Saved ... until a rule of [stop] is met
    Stop replicas -> Save, Evaluate(whole) -> Stop the others -> Halt

It never sees a parameter. Rules:

* Replicas begin when all shards are there; all but the first only after
  `warm_start_steps` steps of that one (Dean et al. 2012, section 4.1).
* A dead replica is restarted, and after too many deaths left out, while the others
  train on (DB-12). A dead shard comes back from its newest snapshot. Only if every
  replica is gone, a shard cannot be had, or the user's own code fails, the job does.
* What is asked of a role is asked again, at its heartbeats, until it is done.
* Every wait has a bound, and whoever outlasts it is named (`lives`, `ending`).
"""

from collections.abc import Mapping, Sequence
from typing import final

from distbelief.errors import RemoteProtocolError
from distbelief.job.ending import Ending, Stage, listed
from distbelief.job.figures import Figures, role_view, staleness, total
from distbelief.job.lives import Lives
from distbelief.job.membership import Membership, Presence, RoleRecord
from distbelief.job.rounds import Evaluations, Saves
from distbelief.job.supervisor_config import SupervisorConfig
from distbelief.job.view import Phase, SupervisorView
from distbelief.messages import (
    Begin,
    Failed,
    Finished,
    Heartbeat,
    Join,
    Measured,
    Message,
    Progress,
    Saved,
    Stop,
)
from distbelief.roles import (
    Action,
    Address,
    Event,
    Halt,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Terminate,
    TimerFired,
)


USER = Address("user")
"""Who sends `Stop` when the user presses Ctrl+C."""

TICK_SECONDS = 0.25
N_RECORDS_MAX = 1024

_TICK = "supervisor:tick"
_DEADLINE = "supervisor:deadline"
_LOST = "supervisor:lost:"

LAST_WORDS_SECONDS = 0.1
"""What a role said last may arrive after the news of its end."""


@final
class Supervisor:
    """The role `supervisor`."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._members = Membership(
            config.roster,
            incarnation=config.first_incarnation,
            admits_guests=config.admits_guests,
        )
        self._figures = Figures(metric_name=config.metric_name, before=config.before)
        self._evaluations = Evaluations(every=config.evaluate_every)
        self._saves = Saves(every=config.snapshot_every, first=config.first_label)
        self._lives = Lives(
            config, self._members, saves=self._saves, figures=self._figures
        )
        self._ending = Ending()
        self._warm = config.warm_start_steps == 0 or len(self._replicas) < 2
        self._warm_steps = 0  # of replica 0, in all its lives
        self._tick_at: Seconds = 0.0
        self._report_at: Seconds = 0.0
        self._progress_at: Seconds = 0.0
        self._records: list[SupervisorView] = []

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                actions = self._start(now)
            case Received():
                actions = self._receive(event, now)
            case TimerFired(name=name) if name == _TICK:
                actions = self._tick(now)
            case TimerFired(name=name) if name.startswith(_LOST):
                actions = self._lost_for_good(Address(name.removeprefix(_LOST)), now)
            case PeerLost():
                actions = self._lost_peer(event, now)
            case _:
                actions = []
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the phase, and: samples and steps of all replicas."""
        figures = self._figures
        return self._phase, {
            "samples": float(figures.samples),
            "steps": float(figures.step),
        }

    # -------------------------------------------------------------- for the driver

    @property
    def interrupted(self) -> bool:
        """Whether the user ended the job."""
        return self._ending.interrupted

    @property
    def error(self) -> str | None:
        """Why the job has failed, if it has."""
        return self._ending.error

    def take_records(self) -> list[SupervisorView]:
        """Return the views that belong in the metrics, and forget them."""
        records, self._records = self._records, []
        return records

    def view(self, now: Seconds) -> SupervisorView:
        """Return what is to be shown of the job now."""
        figures, members, ending = self._figures, self._members, self._ending
        reached, stop = figures.reached(now), self._config.stop
        shards, replicas = members.of("shard"), members.of("replica")
        mean, p95, largest = staleness(shards)
        return SupervisorView(
            now=now,
            seconds=figures.seconds(now),
            training_seconds=figures.training_seconds(now),
            phase=self._phase,
            stop_reason=ending.reason,
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
            bytes_in=total(shards, "bytes_in"),
            bytes_out=total(shards, "bytes_out"),
            pushes_applied=total(shards, "pushes_applied"),
            pushes_refused=total(shards, "pushes_refused"),
            pushes_lost=total(replicas, "pushes_lost"),
            roles=tuple(role_view(record, now) for record in members),
            history=tuple(figures.history),
            messages=tuple(figures.messages),
        )

    @property
    def _phase(self) -> Phase:
        if self._ending.stage is Stage.OVER:
            return "done"
        if self._ending.stage is not Stage.RUN:
            return "stopping"
        if not any(replica.begun for replica in self._replicas):
            served = self._config.stop is None and self._members.shards_are_there
            return "training" if served else "starting"
        return "training" if self._warm else "warm start"

    @property
    def _replicas(self) -> list[RoleRecord]:
        return self._members.of("replica")

    # ------------------------------------------------------------------------ time

    def _start(self, now: Seconds) -> list[Action]:
        self._figures.started_at = self._progress_at = now
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
            self._progress_at += late
        actions: list[Action] = [self._next_tick(now)]
        if self._ending.stage < Stage.CLOSE:
            said, dead = self._lives.silent(now)
            actions += said
            for record, why in dead:
                actions += self._lost(record, why, now)
        if self._ending.stage is Stage.RUN:
            actions += self._ask(now)
            actions += self._tell_stall(now)
            self._stop_if_due(now)
        if now >= self._report_at and self._figures.training_since is not None:
            self._record(now)
        return actions

    def _ask(self, now: Seconds) -> list[Action]:
        """Ask for the evaluation and the snapshot that are due."""
        actions: list[Action] = []
        evaluator = self._members.evaluator
        if evaluator is not None and evaluator.has_joined:
            request = self._evaluations.due(now)
            if request is not None:
                actions.append(Send(receiver=evaluator.name, message=request))
        if self._members.shards_are_there:
            if self._config.stop is None and not self._saves.has_begun:
                self._saves.begin(now)  # a standing server hears of no progress
            if self._saves.is_due(now):
                actions += self._save(now)
        return actions

    def _save(self, now: Seconds) -> list[Action]:
        """Begin a round of snapshots; who is not there yet is asked when it is."""
        shards = {shard.name for shard in self._members.of("shard") if shard.is_alive}
        save = self._saves.ask(shards, now)
        return [Send(receiver=name, message=save) for name in sorted(shards)]

    def _tell_stall(self, now: Seconds) -> list[Action]:
        waited = now - self._progress_at
        if self._config.stop is None or waited < self._config.stall_seconds:
            return []
        self._progress_at = now  # it is told once per so long
        begun = [replica for replica in self._replicas if replica.begun]
        states = listed(f"{r.label}: {r.state or 'starting'}" for r in begun)
        if not states:
            return []
        text = f"no step in the last {waited:.0f} s ({states})"
        return [self._figures.tell(text, now, "warning")]

    def _stop_if_due(self, now: Seconds) -> None:
        if self._config.stop is not None:
            reason = self._config.stop.reason(self._figures.reached(now))
            if reason is not None:
                self._ending.begin(reason, now)

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
                f"{event.sender} is no member of this job, but sent "
                f"{type(event.message).__name__}"
            )
        if event.incarnation != record.incarnation or not record.is_alive:
            return []  # of a former life
        return [
            *self._lives.heard(record, now),
            *self._hear(record, event.message, now),
        ]

    def _user(self, message: Message, now: Seconds) -> list[Action]:
        if not isinstance(message, Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self._ending.interrupted:  # asked twice: not a moment longer
            return self._halt(now)
        if self._config.stop is None and self._ending.stage is Stage.RUN:
            self._ending.begin(message.reason, now)  # that is how serving ends
        else:
            self._ending.interrupt(message.reason, now)
        return [self._figures.tell(f"{message.reason}: stopping", now)]

    def _hear(self, record: RoleRecord, message: Message, now: Seconds) -> list[Action]:
        match message:
            case Join():
                return self._lives.joined(record, message, now)
            case Heartbeat():
                beaten = self._lives.beaten(record, message, now)
                return [*beaten, *self._ask_again(record, now)]
            case Progress():
                self._progressed(record, message, now)
            case Measured():
                self._measured(message, now)
            case Saved():
                return self._saved(record, message, now)
            case Finished():
                return self._finished(record, message, now)
            case Failed():
                return self._failed(record, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{record.name} sent the supervisor {type(message).__name__}"
                )
        return []

    def _ask_again(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Repeat what this role was asked for and has not answered."""
        messages: list[Message | None] = []
        if record.stopped:
            messages.append(self._stop_message())
        elif record.begun and not record.progressed:
            messages.append(Begin())
        if record.kind == "shard":
            messages.append(self._saves.again(record.name, now))
        elif record.kind == "evaluator":
            messages.append(self._evaluations.again(now))
        return [Send(receiver=record.name, message=m) for m in messages if m]

    def _progressed(self, record: RoleRecord, message: Progress, now: Seconds) -> None:
        if record.kind != "replica":
            raise RemoteProtocolError(
                f"{record.name} sent Progress, but does not train"
            )
        if self._figures.training_since is None:
            self._evaluations.begin(now)
            self._saves.begin(now)
        if record.index == 0:
            self._warm_steps += max(0, message.step - record.step)
        self._progress_at = now
        self._figures.progress(record, message, now)
        record.progressed = True
        if self._ending.stage is Stage.RUN:
            self._stop_if_due(now)

    def _measured(self, message: Measured, now: Seconds) -> None:
        request = self._evaluations.answered(message)
        if request is None:
            return
        self._figures.measured(message, now, whole=request.whole)
        if self._ending.stage is Stage.RUN:
            self._record(now)
            self._stop_if_due(now)

    def _saved(self, record: RoleRecord, message: Saved, now: Seconds) -> list[Action]:
        error = self._saves.answered(record.name, message, now)
        if error is None:
            return []
        text = f"{record.label} could not save its snapshot: {error}"
        return [self._figures.tell(text, now, "error")]

    def _finished(
        self, record: RoleRecord, message: Finished, now: Seconds
    ) -> list[Action]:
        record.counters.update(message.counters)
        return self._lives.finished(record, now)

    def _failed(
        self, record: RoleRecord, message: Failed, now: Seconds
    ) -> list[Action]:
        record.failure = message.error
        if message.culprit_is_job and record.kind != "guest":
            error = f"{record.label}: {message.error}"
            self._ending.begin(error, now, error=error)
            return self._lives.leave_out(record, f"failed: {message.error}", now)
        return []  # its process ends now; the launcher tells when

    # ---------------------------------------------------------------------- deaths

    def _lost_peer(self, event: PeerLost, now: Seconds) -> list[Action]:
        record = self._members.get(event.peer)
        if (
            record is None
            or event.incarnation != record.incarnation
            or not record.is_alive
        ):
            return []
        record.end = event.reason
        if self._ending.interrupted or self._ending.stage >= Stage.CLOSE:
            return self._lost_for_good(record.name, now)
        timer = SetTimer(name=f"{_LOST}{record.name}", at=now + LAST_WORDS_SECONDS)
        return [timer]

    def _lost_for_good(self, name: Address, now: Seconds) -> list[Action]:
        """A process has ended, and what it had to say has come."""
        record = self._members.get(name)
        if record is None or record.end is None or not record.is_alive:
            return []
        why = f"failed ({record.failure})" if record.failure else record.end
        return self._lost(record, why, now)

    def _lost(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """A role is dead: restart it, unless it is not needed any more."""
        ending = self._ending
        if ending.interrupted or ending.stage >= Stage.CLOSE:
            return self._lives.finished(record, now)
        if record.kind == "replica" and ending.stage is not Stage.RUN:
            text = f"{record.label} {why} while it was stopping"
            said = self._figures.tell(text, now, "warning")
            return [
                said,
                Terminate(name=record.name),
                *self._lives.finished(record, now),
            ]
        actions = self._lives.restart(record, why, now)
        if record.kind == "shard" and not record.is_alive:
            error = f"{record.label} cannot be kept alive: it {why}"
            ending.begin(error, now, error=error)
        if record.kind == "evaluator" and not record.is_alive:
            self._evaluations.give_up()
        return actions

    # ------------------------------------------------------------------ the course

    def _advance(self, now: Seconds) -> list[Action]:
        """Go on to whatever can be done now."""
        ending = self._ending
        actions: list[Action] = []
        if ending.stage is Stage.RUN:
            actions += self._release()
            self._end_without_replicas(now)
        before = Stage.OVER
        while ending.stage not in {Stage.RUN, before}:
            before = ending.stage
            actions += self._pursue(now)
        if Stage.RUN < ending.stage < Stage.OVER:
            actions.append(SetTimer(name=_DEADLINE, at=ending.deadline))
        return actions

    def _release(self) -> list[Action]:
        """Let replicas begin: the first, and after the warm start the others."""
        replicas = self._replicas
        if not self._warm:
            first = replicas[0]
            self._warm = (
                self._warm_steps >= self._config.warm_start_steps or not first.is_alive
            )
        actions: list[Action] = []
        for replica in replicas if self._warm else replicas[:1]:
            if replica.introduced_at is not None and not replica.begun:
                replica.begun = replica.is_alive
                actions.append(Send(receiver=replica.name, message=Begin()))
        return actions

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

    def _pursue(self, now: Seconds) -> list[Action]:
        """Do what the present stage of the end asks for, and go on if that is done."""
        match self._ending.stage:
            case Stage.DRAIN:
                return self._drain(now)
            case Stage.KEEP:
                return self._keep(now)
            case Stage.CLOSE:
                return self._close(now)
            case _:
                return []

    def _drain(self, now: Seconds) -> list[Action]:
        ending = self._ending
        actions = self._stop(self._replicas, now)
        if ending.interrupted and self._members.evaluator is not None:
            actions += self._stop([self._members.evaluator], now)
        left = [replica for replica in self._replicas if replica.is_alive]
        if left and now < ending.deadline:
            return actions
        actions += self._outlasted(left, "its last step and push", now)
        ending.enter(Stage.KEEP, now)
        return [*actions, *self._begin_keep(now)]

    def _begin_keep(self, now: Seconds) -> list[Action]:
        """Ask for the last snapshot, and the evaluation of everything."""
        self._evaluations.give_up()
        self._saves.give_up()
        if self._figures.training_since is None and self._config.stop is not None:
            return []  # nothing has changed
        actions = self._save(now)
        evaluator = self._members.evaluator
        if (
            evaluator is not None
            and evaluator.is_alive
            and not evaluator.stopped
            and self._ending.error is None
        ):
            request = self._evaluations.ask(now, whole=True)
            actions.append(Send(receiver=evaluator.name, message=request))
        return actions

    def _keep(self, now: Seconds) -> list[Action]:
        ending = self._ending
        waits = self._saves.waits or self._evaluations.waits
        if waits and now < ending.deadline:
            return []
        actions: list[Action] = []
        if waits:
            late = [*self._saves.waiting, *(["evaluator"] * self._evaluations.waits)]
            names = listed(name.replace("-", " ") for name in late)
            text = f"{names} not done in time: ending without its last answer"
            actions.append(self._figures.tell(text, now, "warning"))
            self._evaluations.give_up()
        ending.enter(Stage.CLOSE, now)
        self._record(now)
        return actions

    def _close(self, now: Seconds) -> list[Action]:
        ending = self._ending
        actions = self._stop(list(self._members), now)
        ours = [r for r in self._members if r.is_alive and r.kind != "guest"]
        if ours and now < ending.deadline:
            return actions
        if not ending.interrupted:
            actions += self._outlasted(ours, "to end", now)
        return [*actions, *self._halt(now)]

    def _stop(self, records: Sequence[RoleRecord], now: Seconds) -> list[Action]:
        """Tell these to end, each once; those who cannot hear it are ended."""
        actions: list[Action] = []
        for record in records:
            if not record.is_alive or record.stopped or record.kind == "guest":
                continue
            if record.has_joined:
                record.stopped = True
                stop = self._stop_message()
                actions.append(Send(receiver=record.name, message=stop))
            else:
                actions.append(Terminate(name=record.name))
                actions += self._lives.finished(record, now)
        return actions

    def _stop_message(self) -> Stop:
        return Stop(reason=(self._ending.reason or "the job ends")[:1024])

    def _outlasted(
        self, records: Sequence[RoleRecord], what: str, now: Seconds
    ) -> list[Action]:
        """End by force whoever has not ended in time, and name it."""
        actions: list[Action] = []
        for record in records:
            actions.append(Terminate(name=record.name))
            if not self._ending.interrupted:
                text = f"{record.label} takes too long for {what}: ended by force"
                actions.append(self._figures.tell(text, now, "warning"))
            actions += self._lives.finished(record, now)
        return actions

    def _halt(self, now: Seconds) -> list[Action]:
        """Nothing is left, or nothing is to be."""
        actions: list[Action] = [
            Terminate(name=record.name)
            for record in self._members
            if record.is_alive and record.kind != "guest"
        ]
        self._ending.stage = Stage.OVER
        self._figures.ended_at = now
        error = "interrupted" if self._ending.interrupted else self._ending.error
        return [*actions, Halt(error=error)]
