"""Coordinator: drives an optimizer over shards and workers (Dean et al. 2012, Algorithm 1.2).

It holds names of vectors, scalars and counts, never a parameter. Its parts:

    CoordinatorRun      one epoch, step by step: a generator
    CommandBroadcast    commands to the shards
    WorkQueue           chunks of one evaluation; WorkerPool: the workers
    Journal             where a restarted coordinator continues

One epoch is one run. When a shard restarts, the run ends and another begins, with a higher
epoch, from the newest savepoint that all shards share; shards obey the highest epoch only.
"""

from collections.abc import Mapping, Sequence
from typing import Final, assert_never, final

from distbelief.core.reliable import Silence
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
from sandblaster.coordinator.run import (
    CoordinatorMetrics,
    CoordinatorRun,
    Method,
    PendingRequests,
    RunSteps,
    Wait,
)
from sandblaster.coordinator.shard_commands import TIMER as COMMANDS_TIMER, CommandBroadcast
from sandblaster.coordinator.warm_start import TIMER as WARM_TIMER, WarmStart
from sandblaster.coordinator.work_queue import WorkQueue
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.optimizers.base import Result
from sandblaster.optimizers.termination import Reason


TICK: Final = "coordinator:tick"
SAVE: Final = "coordinator:save"

_TICK_SECONDS_MIN: Final = 0.02
_TICK_SECONDS_PER_WORKER: Final = 1e-4
"""Bounds how often workers are looked at, all of them: 2,000 took a third of a core."""

_EPOCH_BITS: Final = 12
"""Epochs of incarnation i begin at i << 12, so they rise; this bounds lost shards."""


CoordinatorMessage = (
    CommandDone | WorkReport | Finished | StartTraining | Stop | SaveCheckpoint | CheckpointSaved
)


@final
class Coordinator:
    """The role `coordinator`.

    Args:
        config: Its settings.
        method: The optimizer.
        shards: Addresses of the shards, shard 0 first.
        n_examples: Examples of the training data.
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
        self._commands = CommandBroadcast(config, shards=shards)
        self._pool = WorkerPool(config)
        self._metrics = CoordinatorMetrics()
        self._requests = PendingRequests()
        self._journal = Journal(None, goal=config.goal)
        self._saving: int | None = None  # the savepoint whose journal is being saved
        self._warm_start = WarmStart(
            config.n_warm, shards=shards, retry_seconds=config.retry_seconds
        )
        self._is_warm = config.n_warm > 0  # whether the warm start lasts
        self._run: CoordinatorRun | None = None
        self._steps: RunSteps[Result] | None = None
        self._wait: Wait | None = None  # what the run waits for, other than commands
        self._ticks = Silence()  # of all workers together; its timer runs while there is work
        self._incarnation = 0
        self._n_epochs = 0
        self._begun = not config.await_begin
        self._stopped_by: Address | None = None
        self._is_ending = False
        self._has_ended = False
        self.result: Result | None = None  # how the run ended, once it has

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        if self._has_ended:
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
                actions += self._persisted(event, now)
            case PeerJoined() | PeerLost():
                actions += self._peer(event, now)
            case Computed():
                pass  # the coordinator computes nothing
            case _:
                assert_never(event)
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters.

        `wasted` counts examples computed more than once, in evaluations that are finished.
        """
        metrics, queue = self._metrics, self._queue
        last = metrics.iterated
        return self._state(), {
            "iteration": float(metrics.iteration),
            "evaluations": float(metrics.n_evaluations),
            "loss": float("nan") if last is None else last.loss,
            "gradient_norm": float("nan") if last is None else last.gradient_norm,
            "step_length": 0.0 if last is None else last.step_length,
            "samples": float(metrics.samples),
            "wasted": float(metrics.n_wasted),
            "backups": float(metrics.n_backups),
            "replicas": float(len(self._pool)),
            "sets": float(queue.n_chunks) if queue else 0.0,
            "sets_done": float(queue.n_counted) if queue else 0.0,
            "epoch": float(self._commands.epoch),
            "orders": float(self._commands.n_commands),
            "reason": -1.0
            if self.result is None
            else float(list(Reason).index(self.result.reason)),
            **metrics.shares.counters(),
        }

    @property
    def _queue(self) -> WorkQueue | None:
        return None if self._run is None else self._run.queue

    def _state(self) -> str:
        if self._run is None:
            if self._is_warm and self._begun:
                return "warm start"
            return "waiting for begin" if self.result is None else "ended"
        waiting = self._commands.waiting_for
        if waiting is not None:
            return f"waiting for {waiting}"
        if self._wait is Wait.CHUNKS and not len(self._pool):
            return "waiting for replicas"
        return "commanding shards" if self._wait is None else self._wait.value

    # --- events ---

    def _start(self, event: Started) -> None:
        if event.unrestored is not None:
            raise StorageError(event.unrestored)
        self._incarnation = event.incarnation
        self._journal = Journal(event.restored, goal=self._config.goal)
        # An earlier incarnation may have seen the end of the warm start.
        self._is_warm = self._is_warm and self._journal.base_clocks is None

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        sender, message = event.sender, event.message
        match message:
            case CommandDone() if self._commands.owns(sender):
                self._commands.receive(event, message, now)
            case WorkReport() if self._is_warm and not self._warm_start.is_done(sender):
                return self._warm_start.replica_joined(sender, now)
            case WorkReport():
                self._take_report(event, message, now)
            case Finished():
                return self._warm_start.replica_finished(sender, now) if self._is_warm else []
            case StartTraining():
                self._begun = True
            case Stop():
                self._stopped_by, self._requests.stop = sender, True
            case SaveCheckpoint(label=label) if self._is_warm and self._begun:
                return self._warm_start.save(label)
            case SaveCheckpoint(label=label):
                self._requests.request_save(label)
            case CheckpointSaved() if self._commands.owns(sender):
                return self._warm_start.shard_saved(sender, message)
            case _:
                raise RemoteProtocolError(
                    f"{sender} sent the coordinator {type(message).__name__}: only "
                    "shards, workers and the supervisor send it messages"
                )
        return []

    def _peer(self, event: PeerJoined | PeerLost, now: Seconds) -> Sequence[Action]:
        peer, incarnation = event.peer, event.incarnation
        if self._commands.owns(peer):
            is_new = isinstance(event, PeerJoined)
            return self._commands.joined(peer, incarnation) if is_new else []
        if isinstance(event, PeerLost):
            worker = self._pool.get(peer)
            if worker is not None and worker.generation[0] <= incarnation:
                self._remove(peer, now, is_over=True)
            self._warm_start.lost(peer)
        return []

    def _timer(self, name: str, now: Seconds) -> Sequence[Action]:
        if name == COMMANDS_TIMER:
            return self._commands.timer(now)
        if name == WARM_TIMER:
            return self._warm_start.timer(now) if self._is_warm else []
        return self._tick(now) if name == TICK else self._save_journal()

    # --- workers ---

    def _take_report(self, event: Received, report: WorkReport, now: Seconds) -> None:
        if self._pool.has_restarted(event, report):
            self._remove(event.sender, now, is_over=True)
        worker = self._pool.take_report(event, report, now)
        if (queue := self._queue) is None:
            return
        if worker is not None:
            queue.take_report(worker, report, now)
        elif (known := self._pool.get(event.sender)) is not None:
            queue.touch(known)

    def _remove(self, name: Address, now: Seconds, *, is_over: bool) -> None:
        """Put a worker's chunks back; if its incarnation `is_over`, ignore it from now on."""
        worker = self._pool.remove(name, is_over=is_over)
        if worker is not None and self._queue is not None:
            self._queue.lost(worker, now)

    def _assign(self, now: Seconds) -> list[Action]:
        """Send workers what has changed for them, and keep the timer running."""
        if (queue := self._queue) is None:
            self._ticks = Silence()
            return []
        if queue.is_finite:
            queue.assign(now)
        actions: list[Action] = []
        for worker in queue.changed():
            actions += self._pool.send_assignment(worker, now)
        if self._ticks.timer_at is None:
            self._ticks.start(now)
            actions.append(self._set_tick(now))
        return actions

    def _tick(self, now: Seconds) -> list[Action]:
        """Remove silent workers; resend assignments that are not answered."""
        if self._ticks.timer_at is None or (queue := self._queue) is None:
            return []
        # If our own timer came late, this process stood still: do not blame the workers.
        if late := self._ticks.woke(now):
            self._pool.add_delay(late, now)
        for name in self._pool.silent(now):
            self._remove(name, now, is_over=False)
        if len(self._pool):
            self._ticks.heard(now)
        elif (starved := self._ticks.silent(now)) >= self._config.starved_seconds_max:
            raise PeerLostError(
                f"no replica has reported for {starved:.1f} s "
                f"(starved_seconds_max is {self._config.starved_seconds_max:g}): check their logs"
            )
        queue.rank()
        return [*self._pool.resend(now), self._set_tick(now)]

    def _set_tick(self, now: Seconds) -> SetTimer:
        pace = min(self._pool.chunk_seconds / 4, self._config.retry_seconds)
        least = max(_TICK_SECONDS_MIN, _TICK_SECONDS_PER_WORKER * len(self._pool))
        return SetTimer(name=TICK, at=self._ticks.expect(now + max(pace, least)))

    # --- the run ---

    def _advance(self, now: Seconds) -> Sequence[Action]:
        self._is_warm = self._is_warm and not (self._begun and self._warm_start.is_over)
        if not self._begun or self._is_warm:
            return self._end() if self._requests.stop else []
        actions: list[Action] = []
        if self._run is None or self._commands.lost is not None:
            actions += self._begin_run(now)
        while self._can_step():
            actions += self._step_run(now)
        actions += self._reports()
        if self.result is not None and not self._has_ended:
            return [*actions, *self._end()]
        return [*actions, *self._assign(now)]

    def _begin_run(self, now: Seconds) -> Sequence[Action]:
        actions: list[Action] = []
        if self._commands.lost is not None:
            text = f"{self._commands.lost} has restarted: continuing from a savepoint"
            actions.append(Report(text=text, level="warning"))
        self._n_epochs += 1
        if self._n_epochs >> _EPOCH_BITS:
            raise DistBeliefError(f"shards restarted {self._n_epochs} times: check their logs")
        epoch = (self._incarnation << _EPOCH_BITS) + self._n_epochs
        actions += self._commands.begin_epoch(epoch, now)
        self._run = CoordinatorRun(
            self._config,
            method=self._method,
            n_examples=self._n_examples,
            commands=self._commands,
            pool=self._pool,
            journal=self._journal,
            metrics=self._metrics,
            requests=self._requests,
        )
        self._pool.clear_tasks()
        self._steps = self._run.steps()
        next(self._steps)  # it yields the command that begins the epoch
        self._wait, self._is_ending = None, False
        return actions

    def _can_step(self) -> bool:
        run = self._run
        if self.result is not None or run is None or not self._commands.complete:
            return False
        match self._wait:
            case Wait.CHUNKS:
                queue = run.queue
                is_news = queue is None or not queue.is_finite or queue.has_staged
                return self._requests.stop or is_news
            case Wait.SAVED:
                return run.unsaved is None or run.save_error is not None
            case None:
                return True

    def _step_run(self, now: Seconds) -> Sequence[Action]:
        run, steps, commands = self._run, self._steps, self._commands
        assert run is not None
        assert steps is not None
        actions: list[Action] = []
        # Every shard has taken the newest savepoint, unless it goes with the next command.
        if self._wait is None and run.savepoint is None and run.save_error is None:
            actions += self._save_journal()
        had_queue = run.queue is not None
        run.now = now
        try:
            # A run that has just begun must reach a point first: until it publishes one,
            # the shards stay bound to it and cannot be saved.
            if self._requests.stop and run.has_point and not self._is_ending:
                self._is_ending = True
                steps.close()
                steps = self._steps = run.end_early()
                step = next(steps)
            else:
                step = steps.send(commands.answers)
        except StopIteration as end:
            self.result = end.value
            return actions
        if had_queue and run.queue is None:
            actions += self._pool.cancel_all(now)
        if isinstance(step, Wait):
            self._wait = step
            return actions
        self._wait = None
        savepoint, run.savepoint = run.savepoint, None
        return [
            *actions,
            *commands.send(
                step, now, savepoint=savepoint, settled=run.settled, on_disk=self._journal.on_disk
            ),
        ]

    # --- the journal ---

    def _save_journal(self) -> list[Action]:
        """Save the journal of the newest savepoint, if it is not saved yet."""
        run = self._run
        if run is None or run.unsaved is None or self._saving is not None:
            return []
        run.save_error = None
        self._saving = run.unsaved
        return [Persist(snapshot=self._journal.snapshot(incarnation=self._incarnation))]

    def _persisted(self, event: Persisted, now: Seconds) -> Sequence[Action]:
        saved, self._saving = self._saving, None
        run = self._run
        if run is None or run.unsaved is None:
            return []
        if saved != run.unsaved:  # of an earlier run
            return [] if run.savepoint is not None else self._save_journal()
        if event.error is not None:
            run.save_error = event.error
            text = f"the coordinator's journal could not be saved: {event.error}; retrying"
            retry = SetTimer(name=SAVE, at=now + self._config.retry_seconds_max)
            return [Report(text=text, level="warning"), retry]
        # Every shard has taken the savepoint and its journal is on disk: older ones may go.
        run.unsaved, run.settled = None, max(saved, run.settled)
        self._journal.confirm(saved)
        return []

    # --- the supervisor ---

    def _reports(self) -> list[Action]:
        """Report progress, a warning, and checkpoints."""
        actions: list[Action] = []
        run, metrics = self._run, self._metrics
        while run is not None and run.progress:
            iterated = run.progress.popleft()
            progress = Progress(
                step=metrics.offset + iterated.iteration,
                samples=metrics.samples,
                loss=iterated.loss,
                seconds_computing=0.0,
                seconds_waiting=0.0,
            )
            actions.append(Send(receiver=SUPERVISOR, message=progress))
        if run is not None and run.note:
            actions.append(Report(text=run.note, level="warning"))
            run.note = ""
        while self._requests.saved:
            label, error = self._requests.saved.popleft()
            message = CheckpointSaved(label=label, clock=metrics.iteration, error=error)
            actions.append(Send(receiver=SUPERVISOR, message=message))
        return actions

    def _end(self) -> Sequence[Action]:
        self._has_ended = True
        _, counters = self.status()
        finished = Send(
            receiver=self._stopped_by or SUPERVISOR, message=Finished(counters=dict(counters))
        )
        return [*self._reports(), finished, Exit()]
