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

from distbelief.errors import DistBeliefError, PeerLostError, RemoteProtocolError
from distbelief.messages import (
    Account,
    Begin,
    Finished,
    Performed,
    Progress,
    Save,
    Saved,
    Stop,
)
from distbelief.roles import (
    SUPERVISOR,
    Action,
    Address,
    Computed,
    Event,
    Halt,
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
)
from sandblaster.coordinator_config import CoordinatorConfig
from sandblaster.course import (
    Answered,
    Course,
    CourseSteps,
    Figures,
    Method,
    Wait,
    Wishes,
)
from sandblaster.crew import Crew
from sandblaster.journal import Journal
from sandblaster.reasons import Reason
from sandblaster.requests import Result
from sandblaster.shard_orders import TIMER as ORDERS_TIMER, ShardOrders


_EPOCH_BITS: Final = 12
"""Epochs of life i begin at i << 12: so often may shards be lost in one life."""

_TICK: Final = "coordinator:tick"
_RETRY_SAVE: Final = "coordinator:save"
_TICK_SECONDS_MIN: Final = 0.02
_N_SAVES_MAX: Final = 8


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
        self._journal = Journal(None)
        self._figures = Figures()
        self._wishes = Wishes()
        self._course: Course | None = None
        self._steps: CourseSteps | None = None
        self._wait: Wait | None = None  # that the course waits for, if not for orders
        self._incarnation = 0
        self._n_epochs = 0
        self._begun = not config.await_begin
        self._stopped_by: Address | None = None
        self._ending = False
        self._ended = False
        self._saving: int | None = None  # the cut that is being written down
        self._tick_at: Seconds | None = None
        self._crew_seen_at: Seconds = 0.0
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
                self._receive(event, now)
            case TimerFired(name=name):
                actions += self._timer(name, now)
            case Persisted():
                actions += self._persisted(event, now)
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
        figures, dealing = self._figures, self._course and self._course.dealing
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
            "sets": float(dealing.n_sets) if dealing else 0.0,
            "sets_done": float(dealing.n_counted) if dealing else 0.0,
            "epoch": float(self._orders.epoch),
            "orders": float(self._orders.n_orders),
            "reason": -1.0
            if self.result is None
            else float(list(Reason).index(self.result.reason)),
        }

    def _state(self) -> str:
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
        self._incarnation = event.incarnation
        self._journal = Journal(event.restored)

    def _receive(self, event: Received, now: Seconds) -> None:
        sender, message = event.sender, event.message
        match message:
            case Performed() if self._orders.owns(sender):
                self._orders.receive(event, message, now)
            case Account():
                self._account(event, message, now)
            case Begin():
                self._begun = True
            case Stop():
                self._stopped_by, self._wishes.stop = sender, True
            case Save(label=label):
                self._ask_to_save(label)
            case _:
                raise RemoteProtocolError(
                    f"{sender} sent the coordinator {type(message).__name__}: only "
                    "shards, replicas, and Begin, Save and Stop, speak to it"
                )

    def _ask_to_save(self, label: str) -> None:
        saves = self._wishes.saves
        if label in saves:
            return
        if len(saves) >= _N_SAVES_MAX:
            error = f"{_N_SAVES_MAX} snapshots wait to be taken already: ask less often"
            self._wishes.saved.append((label, error))
        else:
            saves.append(label)

    def _account(self, event: Received, account: Account, now: Seconds) -> None:
        if self._crew.is_new_life(event):
            self._leave(event.sender, now, is_over=True)
        member = self._crew.hear(event, account, now)
        dealing = self._course and self._course.dealing
        if member is not None and dealing:
            dealing.account(member, account, now)

    def _peer(self, event: PeerJoined | PeerLost, now: Seconds) -> Sequence[Action]:
        peer, incarnation = event.peer, event.incarnation
        if self._orders.owns(peer):
            is_new = isinstance(event, PeerJoined)
            return self._orders.joined(peer, incarnation) if is_new else []
        member = self._crew.get(peer)
        is_member = member is not None and member.incarnation <= incarnation
        if isinstance(event, PeerLost) and is_member:
            self._leave(peer, now, is_over=True)
        return []

    def _leave(self, name: Address, now: Seconds, *, is_over: bool) -> None:
        member = self._crew.leave(name, is_over=is_over)
        dealing = self._course and self._course.dealing
        if member is not None and dealing:
            dealing.lost(member, now)

    def _timer(self, name: str, now: Seconds) -> Sequence[Action]:
        if name == ORDERS_TIMER:
            return self._orders.timer(now)
        return self._tick(now) if name == _TICK else self._write()

    # ------------------------------------------------------------------- the machine

    def _advance(self, now: Seconds) -> Sequence[Action]:
        """Go on with the course as far as that can be done."""
        if not self._begun:
            return self._end() if self._wishes.stop else []
        actions: list[Action] = []
        if self._course is None or self._orders.lost is not None:
            actions += self._begin_course(now)
        while self._can_go_on():
            actions += self._go_on(now)
        actions += self._tell()
        if self.result is not None and not self._ended:
            return [*actions, *self._end()]
        return [*actions, *self._deal(now)]

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
            raise DistBeliefError(
                f"shards were lost {self._n_epochs} times: look at their logs"
            )
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
                    or not dealing.is_finite
                    or dealing.has_staged
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
            actions += self._write_if_marked()
        had_dealing = course.dealing is not None
        answered = Answered(now=now, answers=orders.answers, versions=orders.versions)
        try:
            if self._wishes.stop and not self._ending:
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
                step,
                now,
                mark=mark,
                settled=course.settled,
                on_disk=self._journal.on_disk,
            ),
        ]

    def _end(self) -> Sequence[Action]:
        self._ended = True
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        receiver = self._stopped_by or SUPERVISOR
        return [*self._tell(), Send(receiver=receiver, message=finished), Halt()]

    # ------------------------------------------------------------------------ journal

    def _write_if_marked(self) -> Sequence[Action]:
        """Write down the cut that every shard has marked by now, if there is one."""
        course = self._course
        assert course is not None
        if course.unsaved is None or course.mark is not None:
            return []
        if self._saving is not None or course.save_error is not None:
            return []
        return self._write()

    def _write(self) -> Sequence[Action]:
        course = self._course
        if course is None or course.unsaved is None or self._saving is not None:
            return []
        course.save_error = None
        self._saving = course.unsaved
        snapshot = self._journal.snapshot(incarnation=self._incarnation)
        return [Persist(snapshot=snapshot)]

    def _persisted(self, event: Persisted, now: Seconds) -> Sequence[Action]:
        saved, self._saving = self._saving, None
        course = self._course
        if course is None or course.unsaved is None:
            return []
        if saved != course.unsaved:  # of a course that was given up
            return [] if course.mark is not None else self._write()
        if event.error is not None:
            course.save_error = event.error
            text = f"the journal could not be saved, and will be later: {event.error}"
            retry = SetTimer(name=_RETRY_SAVE, at=now + self._config.retry_seconds_max)
            return [Report(text=text, level="warning"), retry]
        course.unsaved, course.settled = None, max(saved, course.settled)
        self._journal.settle(saved)
        return []

    def _tell(self) -> Sequence[Action]:
        """Tell the supervisor what there is to tell."""
        actions: list[Action] = []
        figures, course = self._figures, self._course
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
        while self._wishes.saved:
            label, error = self._wishes.saved.popleft()
            saved = Saved(label=label, clock=figures.iteration, error=error)
            actions.append(Send(receiver=SUPERVISOR, message=saved))
        return actions

    # ----------------------------------------------------------------------- replicas

    def _deal(self, now: Seconds) -> Sequence[Action]:
        """Tell replicas what they have to do now; look again after a while."""
        dealing = self._course and self._course.dealing
        if not dealing:
            self._tick_at = None
            return []
        actions: list[Action] = []
        if dealing.is_finite:
            dealing.deal(now)
        for member in dealing.changed():
            actions += self._crew.tell(member, now)
        if self._tick_at is None:
            self._crew_seen_at = now
            actions.append(self._set_tick(now))
        return actions

    def _set_tick(self, now: Seconds) -> SetTimer:
        pace = min(self._crew.set_seconds / 4, self._config.retry_seconds)
        self._tick_at = now + max(pace, _TICK_SECONDS_MIN)
        return SetTimer(name=_TICK, at=self._tick_at)

    def _tick(self, now: Seconds) -> Sequence[Action]:
        """See who is late or silent.

        Raises:
            PeerLostError: there has been no replica for too long.
        """
        if self._tick_at is None:
            return []
        late = max(0.0, now - self._tick_at)
        self._crew.excuse(late)
        self._crew_seen_at += late
        for name in self._crew.silent(now):
            self._leave(name, now, is_over=False)
        if len(self._crew):
            self._crew_seen_at = now
        elif now - self._crew_seen_at >= self._config.starved_seconds_max:
            raise PeerLostError(
                f"no replica has been there for {now - self._crew_seen_at:.1f} s "
                "(starved_seconds_max is "
                f"{self._config.starved_seconds_max:g}): look at their logs"
            )
        return [*self._crew.tell_again(now), self._set_tick(now)]
