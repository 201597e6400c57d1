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

from collections.abc import Mapping, Sequence
from typing import final

from distbelief.errors import RemoteProtocolError
from distbelief.job.display import words
from distbelief.job.display.view import SupervisorView
from distbelief.job.supervision import deaths
from distbelief.job.supervision.books import Books
from distbelief.job.supervision.closing import Closing
from distbelief.job.supervision.deaths import Deaths
from distbelief.job.supervision.ending import Stage
from distbelief.job.supervision.lives import Lives
from distbelief.job.supervision.membership import RoleRecord
from distbelief.job.supervision.phases import Phases
from distbelief.job.supervision.supervisor_config import SupervisorConfig
from distbelief.job.supervision.viewing import view_of
from distbelief.messages import (
    Alone,
    Failed,
    Finished,
    Heartbeat,
    Join,
    Measured,
    Message,
    Progress,
    Saved,
    Stop,
    Whole,
)
from distbelief.roles import (
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
)


TICK_SECONDS = 0.25
N_RECORDS_MAX = 1024

_TICK = "supervisor:tick"
_DEADLINE = "supervisor:deadline"


@final
class Supervisor:
    """The role `supervisor`."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._books = Books.open(config)
        self._members = self._books.members
        self._pairs = self._books.pairs
        self._figures = self._books.figures
        self._evaluations = self._books.evaluations
        self._saves = self._books.saves
        self._ending = self._books.ending
        self._lives = Lives(self._books)
        self._closing = Closing(self._books, lives=self._lives)
        self._deaths = Deaths(self._books, lives=self._lives)
        self._phases = Phases(self._books)
        self._tick_at: Seconds = 0.0
        self._report_at: Seconds = 0.0
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
            case TimerFired(name=name) if name.startswith(deaths.TIMER):
                role = Address(name.removeprefix(deaths.TIMER))
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
    def books(self) -> Books:
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

    def take_records(self) -> list[SupervisorView]:
        """Return the views that belong in the metrics, and forget them."""
        records, self._records = self._records, []
        return records

    def view(self, now: Seconds) -> SupervisorView:
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
        if stage < Stage.CLOSE:
            actions += self._depose(now)
        if stage < Stage.CLOSE or not self._ending.interrupted:
            said, dead = self._lives.silent(now)
            actions += said
            for record, why in dead:
                actions += self._deaths.bury(record, why, now)
        if self._ending.stage is Stage.RUN:
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
            case Measured():
                self._measured(record, message, now)
            case Saved():
                return self._saved(record, message, now)
            case Alone() | Whole():
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
        if self._ending.stage is Stage.RUN:
            begin = self._books.allowances.after_progress(record)
        return [Send(receiver=record.name, message=begin)] if begin else []

    def _measured(self, record: RoleRecord, message: Measured, now: Seconds) -> None:
        if record.kind != "evaluator":
            raise RemoteProtocolError(f"{record.name} sent Measured, but does not evaluate")
        if self._evaluations.answered(message) is None:
            return
        self._figures.measured(message, now)
        if self._ending.stage is Stage.RUN:
            self._record(now)
            self._phases.end_if_due(now)

    def _saved(self, record: RoleRecord, message: Saved, now: Seconds) -> list[Action]:
        error = self._saves.answered(record.shard, message, now)
        if error is None:
            return []
        text = f"{record.label} could not save its snapshot: {error}"
        return [self._figures.tell(text, now, "error")]

    def _paired(self, record: RoleRecord, message: Alone | Whole, now: Seconds) -> list[Action]:
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
        said = words.harmless(message.error)
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
        if ending.stage is Stage.RUN:
            actions += self._phases.advance(now)
        if ending.stage is not Stage.RUN:
            before = ending.stage
            actions += self._closing.pursue(now)
            if before <= Stage.KEEP < ending.stage:
                self._record(now)  # the last point of the curve
        if Stage.RUN < ending.stage < Stage.OVER:
            actions.append(SetTimer(name=_DEADLINE, at=ending.deadline))
        return actions
