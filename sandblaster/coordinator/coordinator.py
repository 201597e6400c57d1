"""The coordinator: Algorithm 1.2 of Dean et al. 2012, "Coordinator main".

It drives an optimiser over the shards, and deals the portions of each batch to the
replicas. It never sees a parameter: it holds names of vectors, scalars and counts.

    course      what is done, one thing after the other: a generator
    orders      what the shards are told, and whether all have answered
    dealing     which replica computes which set; crew: what replicas are told
    journal     from where another life of this role goes on

Rules:

* One epoch is one course. When a shard has begun a new life, which has forgotten what
  it was told, the course is given up, and the next one begins at the newest cut that
  all shards share. Epochs rise from life to life, and shards obey the highest alone.
* A cut is settled when every shard has marked it and the journal of it is on disk.
* Whoever is told to stop leaves the last point that was accepted.
"""

from collections.abc import Mapping, Sequence
from typing import Final, assert_never, final

from distbelief.errors import DistBeliefError, PeerLostError, RemoteProtocolError, StorageError
from distbelief.protocol import (
    CheckpointSaved,
    CommandDone,
    Finished,
    Progress,
    SaveCheckpoint,
    StartTraining,
    Stop,
    WorkReport,
)
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    Computed,
    Event,
    Exit,
    PeerJoined,
    PeerLost,
    Persist,
    Persisted,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.journal import Journal
from sandblaster.coordinator.metrics import CoordinatorMetrics, StopWishes
from sandblaster.coordinator.run import Answered, CoordinatorRun, CourseSteps, Method, Wait
from sandblaster.coordinator.shard_commands import TIMER as ORDERS_TIMER, CommandBroadcast
from sandblaster.coordinator.warm_start import TIMER as WARM_TIMER, WarmSaves, WarmStartRun
from sandblaster.coordinator.work_queue import WorkQueue
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.optimizers.base import Result
from sandblaster.optimizers.termination import Reason


# What a coordinator has to do with its replicas, from word to word and tick to tick.
#
# Account      taken, and what follows from it dealt
# tick         who is silent is given up for now; what nobody answered is said again

TICK: Final = "coordinator:tick"

_TICK_SECONDS_MIN: Final = 0.02


@final
class WorkerTicks:
    """The replicas of one coordinator, and its ticks while there is work.

    Args:
        config: How it works.
        crew: Who is there.
    """

    def __init__(self, config: CoordinatorConfig, crew: WorkerPool) -> None:
        self._config = config
        self._crew = crew
        self._tick_at: Seconds | None = None  # None: there is no work
        self._seen_at: Seconds = 0.0  # when there was anybody

    def hear(
        self, event: Received, account: WorkReport, dealing: WorkQueue | None, now: Seconds
    ) -> None:
        """A replica says how it stands."""
        if self._crew.is_new_life(event, account):
            self.leave(event.sender, dealing, now, is_over=True)
        member = self._crew.hear(event, account, now)
        if dealing is None:
            return
        if member is not None:
            dealing.account(member, account, now)
        elif (known := self._crew.get(event.sender)) is not None:
            dealing.heard(known)

    def lost(
        self, name: Address, incarnation: int, dealing: WorkQueue | None, now: Seconds
    ) -> None:
        """A life of a replica is over."""
        member = self._crew.get(name)
        if member is not None and member.incarnation <= incarnation:
            self.leave(name, dealing, now, is_over=True)

    def leave(
        self, name: Address, dealing: WorkQueue | None, now: Seconds, *, is_over: bool
    ) -> None:
        """Deal what it has again; if its life `is_over`, listen to it no more."""
        member = self._crew.leave(name, is_over=is_over)
        if member is not None and dealing is not None:
            dealing.lost(member, now)

    def deal(self, dealing: WorkQueue | None, now: Seconds) -> list[Action]:
        """Tell replicas what they have to do now; look again after a while."""
        if dealing is None:
            self._tick_at = None
            return []
        actions: list[Action] = []
        if dealing.sets.is_finite:
            dealing.deal(now)
        for member in dealing.changed():
            actions += self._crew.tell(member, now)
        if self._tick_at is None:
            self._seen_at = now
            actions.append(self._set_tick(now))
        return actions

    def tick(self, dealing: WorkQueue | None, now: Seconds) -> list[Action]:
        """See who is late or silent.

        Raises:
            PeerLostError: there has been no replica for too long.
        """
        if self._tick_at is None:
            return []
        late = max(0.0, now - self._tick_at)  # nobody drove this role meanwhile
        self._crew.excuse(late)
        self._seen_at += late
        for name in self._crew.silent(now):
            self.leave(name, dealing, now, is_over=False)
        if len(self._crew):
            self._seen_at = now
        elif now - self._seen_at >= self._config.starved_seconds_max:
            raise PeerLostError(
                f"no replica has been there for {now - self._seen_at:.1f} s "
                "(starved_seconds_max is "
                f"{self._config.starved_seconds_max:g}): look at their logs"
            )
        return [*self._crew.tell_again(now), self._set_tick(now)]

    def _set_tick(self, now: Seconds) -> SetTimer:
        pace = min(self._crew.set_seconds / 4, self._config.retry_seconds)
        self._tick_at = now + max(pace, _TICK_SECONDS_MIN)
        return SetTimer(name=TICK, at=self._tick_at)


# Between a coordinator and its supervisor: snapshots asked for, progress told of.

_N_SAVES_MAX: Final = 8


@final
class SupervisorRequests:
    """What the supervisor has asked for, and what it is told.

    Args:
        wishes: What was asked for, for courses to see.
        figures: Of all courses.
    """

    def __init__(self, wishes: StopWishes, figures: CoordinatorMetrics) -> None:
        self._wishes = wishes
        self._figures = figures

    def ask_to_save(self, label: str) -> None:
        """A snapshot of this name is to be taken, at the next accepted point."""
        saves = self._wishes.saves
        if label in saves:
            return
        if len(saves) >= _N_SAVES_MAX:
            error = f"{_N_SAVES_MAX} snapshots wait to be taken already: ask less often"
            self._wishes.saved.append((label, error))
        else:
            saves.append(label)

    def tell(self, course: CoordinatorRun | None) -> Sequence[Action]:
        """Tell what there is to tell."""
        actions: list[Action] = []
        figures, saved = self._figures, self._wishes.saved
        while course is not None and course.progress:
            iterated = course.progress.popleft()
            progress = Progress(
                step=figures.offset + iterated.iteration,
                samples=figures.samples,
                loss=iterated.loss,
                seconds_computing=0.0,
                seconds_waiting=0.0,
            )
            actions.append(Send(receiver=SUPERVISOR, message=progress))
        if course is not None and course.note:
            actions.append(Report(text=course.note, level="warning"))
            course.note = ""
        while saved:
            label, error = saved.popleft()
            message = CheckpointSaved(label=label, clock=figures.iteration, error=error)
            actions.append(Send(receiver=SUPERVISOR, message=message))
        return actions


# Writes the journal down, whenever every shard has marked a cut.

TIMER: Final = "coordinator:save"


@final
class JournalWriter:
    """The journal of one life on its way to the disk, one cut at a time.

    Args:
        config: Of the coordinator.
        journal: What is written.
        incarnation: Whose.
    """

    def __init__(self, config: CoordinatorConfig, journal: Journal, *, incarnation: int) -> None:
        self._config = config
        self._journal = journal
        self._incarnation = incarnation
        self._saving: int | None = None  # the cut that is being written down

    def if_marked(self, course: CoordinatorRun) -> Sequence[Action]:
        """Write down the cut that every shard has marked by now, if there is one."""
        if course.unsaved is None or course.mark is not None:
            return []
        if self._saving is not None or course.save_error is not None:
            return []
        return self.write(course)

    def write(self, course: CoordinatorRun | None) -> Sequence[Action]:
        """Write it down, unless that is under way."""
        if course is None or course.unsaved is None or self._saving is not None:
            return []
        course.save_error = None
        self._saving = course.unsaved
        snapshot = self._journal.snapshot(incarnation=self._incarnation)
        return [Persist(snapshot=snapshot)]

    def persisted(
        self, event: Persisted, course: CoordinatorRun | None, now: Seconds
    ) -> Sequence[Action]:
        """It is on disk, or is not."""
        saved, self._saving = self._saving, None
        if course is None or course.unsaved is None:
            return []
        if saved != course.unsaved:  # of a course that was given up
            return [] if course.mark is not None else self.write(course)
        if event.error is not None:
            course.save_error = event.error
            text = f"the journal could not be saved, and will be later: {event.error}"
            retry = SetTimer(name=TIMER, at=now + self._config.retry_seconds_max)
            return [Report(text=text, level="warning"), retry]
        course.unsaved, course.settled = None, max(saved, course.settled)
        self._journal.settle(saved)
        return []


_EPOCH_BITS: Final = 12
"""Epochs of life i begin at i << 12: so often may shards be lost in one life."""


CoordinatorMessage = (
    CommandDone | WorkReport | Finished | StartTraining | Stop | SaveCheckpoint | CheckpointSaved
)


@final
class Coordinator:
    """The role `coordinator`.

    Args:
        config: How it works.
        method: The algorithm.
        shards: Their addresses, shard 0 first.
        n_examples: Of the training data.

    Attributes:
        result: How the run ended, once it has.
    """

    accepts: Final = message_types(CoordinatorMessage)

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        method: Method,
        shards: Sequence[Address],
        n_examples: int,
    ) -> None:
        self._config = config
        self._method = method
        self._n_examples = n_examples
        self._orders = CommandBroadcast(config, shards=shards)
        self._crew = WorkerPool(config)
        self._replicas = WorkerTicks(config, self._crew)
        self._journal = Journal(None, goal=config.goal)
        self._writing = JournalWriter(config, self._journal, incarnation=0)
        self._figures = CoordinatorMetrics()
        self._wishes = StopWishes()
        self._supervision = SupervisorRequests(self._wishes, self._figures)
        self._course: CoordinatorRun | None = None
        self._steps: CourseSteps | None = None
        self._warming: WarmStartRun | None = None
        if config.n_warm:
            self._warming = WarmStartRun(config.n_warm, retry_seconds=config.retry_seconds)
        self._warm_saves = WarmSaves(shards)
        self._wait: Wait | None = None  # that the course waits for, if not for orders
        self._incarnation = 0
        self._n_epochs = 0
        self._begun = not config.await_begin
        self._stopped_by: Address | None = None
        self._ending = False
        self._ended = False
        self.result: Result | None = None

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            DistBeliefError: the run cannot go on.
        """
        if self._ended:
            return []
        actions: list[Action] = []
        match event:
            case Started():
                self._start(event)
            case Received():
                actions += self._receive(event, now)
            case TimerFired(name=name):
                actions += self._timer(name, now)
            case Persisted():
                actions += self._writing.persisted(event, self._course, now)
            case PeerJoined() | PeerLost():
                actions += self._peer(event, now)
            case Computed():
                pass  # nothing is ever computed here
            case _:
                assert_never(event)
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters.

        `wasted` are examples computed in vain, of evaluations that came to their end.
        """
        figures, dealing = self._figures, self._dealing
        last = figures.iterated
        return self._state(), {
            "iteration": float(figures.iteration),
            "evaluations": float(figures.n_evaluations),
            "loss": float("nan") if last is None else last.loss,
            "gradient_norm": float("nan") if last is None else last.gradient_norm,
            "step_length": 0.0 if last is None else last.step_length,
            "samples": float(figures.samples),
            "wasted": float(figures.n_wasted),
            "backups": float(figures.n_backups),
            "replicas": float(len(self._crew)),
            "sets": float(dealing.sets.n_sets) if dealing else 0.0,
            "sets_done": float(dealing.sets.n_counted) if dealing else 0.0,
            "epoch": float(self._orders.epoch),
            "orders": float(self._orders.n_orders),
            "reason": -1.0
            if self.result is None
            else float(list(Reason).index(self.result.reason)),
            **figures.shares.counters(),
        }

    @property
    def _dealing(self) -> WorkQueue | None:
        """Of the evaluation under way."""
        return None if self._course is None else self._course.dealing

    def _state(self) -> str:
        if self._course is None and self._warming is not None and self._begun:
            return "warm start"
        if self._course is None:
            return "waiting for begin" if self.result is None else "ended"
        waiting = self._orders.waiting_for
        if waiting is not None:
            return f"waiting for {waiting}"
        if self._wait is Wait.SETS and not len(self._crew):
            return "waiting for replicas"
        return "ordering" if self._wait is None else self._wait.value

    # ------------------------------------------------------------------------ events

    def _start(self, event: Started) -> None:
        if event.unrestored is not None:
            raise StorageError(event.unrestored)
        self._incarnation = event.incarnation
        journal = Journal(event.restored, goal=self._config.goal)
        self._journal = journal
        self._writing = JournalWriter(self._config, journal, incarnation=event.incarnation)
        if self._journal.base_clocks is not None:
            self._warming = None  # the life before has seen it over

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        sender, message = event.sender, event.message
        match message:
            case CommandDone() if self._orders.owns(sender):
                self._orders.receive(event, message, now)
            case WorkReport() | Finished():
                return self._hear(event, message, now)
            case StartTraining():
                self._begun = True
            case Stop():
                self._stopped_by, self._wishes.stop = sender, True
            case SaveCheckpoint(label=label) if self._warming is not None and self._begun:
                return self._warm_saves.ask(label)
            case SaveCheckpoint(label=label):
                self._supervision.ask_to_save(label)
            case CheckpointSaved() if self._orders.owns(sender):
                return self._warm_saves.answered(sender, message)
            case _:
                raise RemoteProtocolError(
                    f"{sender} sent the coordinator {type(message).__name__}: only "
                    "shards, replicas, and Begin, Save and Stop, speak to it"
                )
        return []

    def _hear(
        self, event: Received, message: WorkReport | Finished, now: Seconds
    ) -> Sequence[Action]:
        """A replica speaks."""
        warming = self._warming
        if isinstance(message, Finished):
            return warming.finished(event.sender, now) if warming else []
        if warming is not None and not warming.is_done(event.sender):
            return warming.heard(event.sender, now)
        self._replicas.hear(event, message, self._dealing, now)
        return []

    def _peer(self, event: PeerJoined | PeerLost, now: Seconds) -> Sequence[Action]:
        peer, incarnation = event.peer, event.incarnation
        if self._orders.owns(peer):
            is_new = isinstance(event, PeerJoined)
            return self._orders.joined(peer, incarnation) if is_new else []
        if isinstance(event, PeerLost):
            self._replicas.lost(peer, incarnation, self._dealing, now)
            if self._warming is not None:
                self._warming.lost(peer)
        return []

    def _timer(self, name: str, now: Seconds) -> Sequence[Action]:
        if name == ORDERS_TIMER:
            return self._orders.timer(now)
        if name == WARM_TIMER:
            return self._warming.timer(now) if self._warming else []
        if name == TICK:
            return self._replicas.tick(self._dealing, now)
        return self._writing.write(self._course)

    # ------------------------------------------------------------------- the machine

    def _advance(self, now: Seconds) -> Sequence[Action]:
        """Go on with the course as far as that can be done."""
        if not self._begun:
            return self._end() if self._wishes.stop else []
        if self._warming is not None:
            if not self._warming.is_over:
                return self._end() if self._wishes.stop else []
            self._warming = None
        actions: list[Action] = []
        if self._course is None or self._orders.lost is not None:
            actions += self._begin_course(now)
        while self._can_go_on():
            actions += self._go_on(now)
        actions += self._supervision.tell(self._course)
        if self.result is not None and not self._ended:
            return [*actions, *self._end()]
        return [*actions, *self._replicas.deal(self._dealing, now)]

    def _begin_course(self, now: Seconds) -> Sequence[Action]:
        """Begin an epoch.

        Raises:
            DistBeliefError: shards were lost too often.
        """
        actions: list[Action] = []
        if self._orders.lost is not None:
            text = f"{self._orders.lost} has begun a new life: going on from a cut"
            actions.append(Report(text=text, level="warning"))
        self._n_epochs += 1
        if self._n_epochs >> _EPOCH_BITS:
            raise DistBeliefError(f"shards were lost {self._n_epochs} times: look at their logs")
        epoch = (self._incarnation << _EPOCH_BITS) + self._n_epochs
        self._course = CoordinatorRun(
            self._config,
            method=self._method,
            n_examples=self._n_examples,
            epoch=epoch,
            crew=self._crew,
            journal=self._journal,
            figures=self._figures,
            wishes=self._wishes,
        )
        self._crew.dismissed()
        self._steps = self._course.run()
        next(self._steps)
        self._wait, self._ending = None, False
        return [*actions, *self._orders.attach(epoch, now)]

    def _can_go_on(self) -> bool:
        """Return whether what the course waits for has come."""
        course = self._course
        if self.result is not None or course is None or not self._orders.complete:
            return False
        match self._wait:
            case Wait.SETS:
                dealing = course.dealing
                return (
                    self._wishes.stop
                    or dealing is None
                    or not dealing.sets.is_finite
                    or dealing.sets.has_staged
                )
            case Wait.SAVED:
                return course.unsaved is None or course.save_error is not None
            case None:
                return True

    def _go_on(self, now: Seconds) -> Sequence[Action]:
        """Let the course take its next step."""
        course, steps, orders = self._course, self._steps, self._orders
        assert course is not None
        assert steps is not None
        actions: list[Action] = []
        if self._wait is None:
            actions += self._writing.if_marked(course)
        had_dealing = course.dealing is not None
        course.now = now
        answered = Answered(now=now, answers=orders.answers, versions=orders.versions)
        try:
            # A course that has just begun must come to a point first: without one the
            # shards would stay in its hands, and could not be saved.
            if self._wishes.stop and course.has_point and not self._ending:
                self._ending = True
                steps.close()
                steps = self._steps = course.end_early()
                step = next(steps)
            else:
                step = steps.send(answered)
        except StopIteration as end:
            self.result = end.value
            return actions
        if had_dealing and course.dealing is None:
            actions += self._crew.dismiss(now)
        if isinstance(step, Wait):
            self._wait = step
            return actions
        self._wait = None
        mark, course.mark = course.mark, None
        return [
            *actions,
            *orders.give(
                step, now, mark=mark, settled=course.settled, on_disk=self._journal.on_disk
            ),
        ]

    def _end(self) -> Sequence[Action]:
        self._ended = True
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        receiver = self._stopped_by or SUPERVISOR
        return [
            *self._supervision.tell(self._course),
            Send(receiver=receiver, message=finished),
            Exit(),
        ]
