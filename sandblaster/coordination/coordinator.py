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

from distbelief.errors import DistBeliefError, RemoteProtocolError, StorageError
from distbelief.messages import Account, Begin, Finished, Performed, Save, Saved, Stop
from distbelief.roles import (
    SUPERVISOR,
    Action,
    Address,
    Computed,
    Event,
    Halt,
    PeerJoined,
    PeerLost,
    Persisted,
    Received,
    Report,
    Seconds,
    Send,
    Started,
    TimerFired,
)
from sandblaster.coordination.coordinator_config import CoordinatorConfig
from sandblaster.coordination.course import Answered, Course, CourseSteps, Method, Wait
from sandblaster.coordination.crew import Crew
from sandblaster.coordination.dealing import Dealing
from sandblaster.coordination.figures import Figures, Wishes
from sandblaster.coordination.journal import Journal
from sandblaster.coordination.oversight import TICK, Oversight
from sandblaster.coordination.shard_orders import TIMER as ORDERS_TIMER, ShardOrders
from sandblaster.coordination.supervision import Supervision
from sandblaster.coordination.warming import TIMER as WARM_TIMER, Warming, WarmSaves
from sandblaster.coordination.writing import Writing
from sandblaster.reasons import Reason
from sandblaster.requests import Result


_EPOCH_BITS: Final = 12
"""Epochs of life i begin at i << 12: so often may shards be lost in one life."""


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
        self._orders = ShardOrders(config, shards=shards)
        self._crew = Crew(config)
        self._replicas = Oversight(config, self._crew)
        self._journal = Journal(None, goal=config.goal)
        self._writing = Writing(config, self._journal, incarnation=0)
        self._figures = Figures()
        self._wishes = Wishes()
        self._supervision = Supervision(self._wishes, self._figures)
        self._course: Course | None = None
        self._steps: CourseSteps | None = None
        self._warming: Warming | None = None
        if config.n_warm:
            self._warming = Warming(config.n_warm, retry_seconds=config.retry_seconds)
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
    def _dealing(self) -> Dealing | None:
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
        self._writing = Writing(self._config, journal, incarnation=event.incarnation)
        if self._journal.base_clocks is not None:
            self._warming = None  # the life before has seen it over

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        sender, message = event.sender, event.message
        match message:
            case Performed() if self._orders.owns(sender):
                self._orders.receive(event, message, now)
            case Account() | Finished():
                return self._hear(event, message, now)
            case Begin():
                self._begun = True
            case Stop():
                self._stopped_by, self._wishes.stop = sender, True
            case Save(label=label) if self._warming is not None and self._begun:
                return self._warm_saves.ask(label)
            case Save(label=label):
                self._supervision.ask_to_save(label)
            case Saved() if self._orders.owns(sender):
                return self._warm_saves.answered(sender, message)
            case _:
                raise RemoteProtocolError(
                    f"{sender} sent the coordinator {type(message).__name__}: only "
                    "shards, replicas, and Begin, Save and Stop, speak to it"
                )
        return []

    def _hear(self, event: Received, message: Account | Finished, now: Seconds) -> Sequence[Action]:
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
        self._course = Course(
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
            Halt(),
        ]
