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
from sandblaster.coordinator.metrics import CoordinatorMetrics, PendingRequests
from sandblaster.coordinator.run import Answered, CoordinatorRun, Method, RunSteps, Wait
from sandblaster.coordinator.shard_commands import TIMER as COMMANDS_TIMER, CommandBroadcast
from sandblaster.coordinator.warm_start import TIMER as WARM_TIMER, WarmSaves, WarmStartRun
from sandblaster.coordinator.work_queue import WorkQueue
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.optimizers.base import Result
from sandblaster.optimizers.termination import Reason


TICK: Final = "coordinator:tick"

_TICK_SECONDS_MIN: Final = 0.02


@final
class WorkerTicks:
    """Takes reports of workers, and checks on a timer which are silent while there is work."""

    def __init__(self, config: CoordinatorConfig, pool: WorkerPool) -> None:
        self._config = config
        self._pool = pool
        self._tick_at: Seconds | None = None  # None: there is no work
        self._seen_at: Seconds = 0.0  # when there was any worker

    def take_report(
        self, event: Received, report: WorkReport, queue: WorkQueue | None, now: Seconds
    ) -> None:
        if self._pool.has_restarted(event, report):
            self.remove(event.sender, queue, now, is_over=True)
        worker = self._pool.take_report(event, report, now)
        if queue is None:
            return
        if worker is not None:
            queue.take_report(worker, report, now)
        elif (known := self._pool.get(event.sender)) is not None:
            queue.touch(known)

    def lost(self, name: Address, incarnation: int, queue: WorkQueue | None, now: Seconds) -> None:
        worker = self._pool.get(name)
        if worker is not None and worker.incarnation <= incarnation:
            self.remove(name, queue, now, is_over=True)

    def remove(
        self, name: Address, queue: WorkQueue | None, now: Seconds, *, is_over: bool
    ) -> None:
        """Put a worker's chunks back; if its incarnation `is_over`, ignore it from now on."""
        worker = self._pool.remove(name, is_over=is_over)
        if worker is not None and queue is not None:
            queue.lost(worker, now)

    def assign(self, queue: WorkQueue | None, now: Seconds) -> list[Action]:
        """Send workers what has changed for them, and keep the timer running."""
        if queue is None:
            self._tick_at = None
            return []
        actions: list[Action] = []
        if queue.commits.is_finite:
            queue.assign(now)
        for worker in queue.changed():
            actions += self._pool.send_assignment(worker, now)
        if self._tick_at is None:
            self._seen_at = now
            actions.append(self._set_tick(now))
        return actions

    def tick(self, queue: WorkQueue | None, now: Seconds) -> list[Action]:
        """Remove silent workers; resend assignments that are not answered.

        Raises:
            PeerLostError: there has been no worker for too long.
        """
        if self._tick_at is None:
            return []
        # If our own timer came late, this process stood still: do not blame the workers.
        late = max(0.0, now - self._tick_at)
        self._pool.adjust_for_delay(late)
        self._seen_at += late
        for name in self._pool.silent(now):
            self.remove(name, queue, now, is_over=False)
        if len(self._pool):
            self._seen_at = now
        elif now - self._seen_at >= self._config.starved_seconds_max:
            raise PeerLostError(
                f"no replica has reported for {now - self._seen_at:.1f} s "
                f"(starved_seconds_max is {self._config.starved_seconds_max:g}): check their logs"
            )
        return [*self._pool.resend(now), self._set_tick(now)]

    def _set_tick(self, now: Seconds) -> SetTimer:
        pace = min(self._pool.chunk_seconds / 4, self._config.retry_seconds)
        self._tick_at = now + max(pace, _TICK_SECONDS_MIN)
        return SetTimer(name=TICK, at=self._tick_at)


# --- supervisor ---

_N_SAVES_MAX: Final = 8


@final
class SupervisorRequests:
    """Takes requests of the supervisor and reports progress and checkpoints to it."""

    def __init__(self, requests: PendingRequests, metrics: CoordinatorMetrics) -> None:
        self._requests = requests
        self._metrics = metrics

    def request_save(self, label: str) -> None:
        """Request a checkpoint with this label at the next accepted point."""
        saves = self._requests.saves
        if label in saves:
            return
        if len(saves) >= _N_SAVES_MAX:
            error = f"{_N_SAVES_MAX} checkpoints are pending already: request them less often"
            self._requests.saved.append((label, error))
        else:
            saves.append(label)

    def report(self, run: CoordinatorRun | None) -> Sequence[Action]:
        actions: list[Action] = []
        metrics, saved = self._metrics, self._requests.saved
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
        while saved:
            label, error = saved.popleft()
            message = CheckpointSaved(label=label, clock=metrics.iteration, error=error)
            actions.append(Send(receiver=SUPERVISOR, message=message))
        return actions


# --- journal ---

TIMER: Final = "coordinator:save"


@final
class JournalWriter:
    """Saves the journal of one incarnation, one savepoint at a time."""

    def __init__(self, config: CoordinatorConfig, journal: Journal, *, incarnation: int) -> None:
        self._config = config
        self._journal = journal
        self._incarnation = incarnation
        self._saving: int | None = None  # the savepoint that is being saved

    def write_if_taken(self, run: CoordinatorRun) -> Sequence[Action]:
        """Save the newest savepoint, if every shard has taken it and it is not saved yet."""
        if run.unsaved is None or run.savepoint is not None:
            return []
        if self._saving is not None or run.save_error is not None:
            return []
        return self.write(run)

    def write(self, run: CoordinatorRun | None) -> Sequence[Action]:
        if run is None or run.unsaved is None or self._saving is not None:
            return []
        run.save_error = None
        self._saving = run.unsaved
        snapshot = self._journal.snapshot(incarnation=self._incarnation)
        return [Persist(snapshot=snapshot)]

    def persisted(
        self, event: Persisted, run: CoordinatorRun | None, now: Seconds
    ) -> Sequence[Action]:
        saved, self._saving = self._saving, None
        if run is None or run.unsaved is None:
            return []
        if saved != run.unsaved:  # of an earlier run
            return [] if run.savepoint is not None else self.write(run)
        if event.error is not None:
            run.save_error = event.error
            text = f"the coordinator's journal could not be saved: {event.error}; retrying"
            retry = SetTimer(name=TIMER, at=now + self._config.retry_seconds_max)
            return [Report(text=text, level="warning"), retry]
        # Every shard has taken the savepoint and its journal is on disk: older ones may go.
        run.unsaved, run.settled = None, max(saved, run.settled)
        self._journal.confirm(saved)
        return []


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
        self._worker_ticks = WorkerTicks(config, self._pool)
        self._journal = Journal(None, goal=config.goal)
        self._journal_writer = JournalWriter(config, self._journal, incarnation=0)
        self._metrics = CoordinatorMetrics()
        self._requests = PendingRequests()
        self._supervisor = SupervisorRequests(self._requests, self._metrics)
        self._run: CoordinatorRun | None = None
        self._steps: RunSteps | None = None
        self._warm_start: WarmStartRun | None = None
        if config.n_warm:
            self._warm_start = WarmStartRun(config.n_warm, retry_seconds=config.retry_seconds)
        self._warm_saves = WarmSaves(shards)
        self._wait: Wait | None = None  # what the run waits for, other than commands
        self._incarnation = 0
        self._n_epochs = 0
        self._begun = not config.await_begin
        self._stopped_by: Address | None = None
        self._is_ending = False
        self._has_ended = False
        self.result: Result | None = None  # how the run ended, once it has

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            DistBeliefError: the run cannot go on.
        """
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
                actions += self._journal_writer.persisted(event, self._run, now)
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
            "sets": float(queue.commits.n_chunks) if queue else 0.0,
            "sets_done": float(queue.commits.n_counted) if queue else 0.0,
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
        if self._run is None and self._warm_start is not None and self._begun:
            return "warm start"
        if self._run is None:
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
        journal = Journal(event.restored, goal=self._config.goal)
        self._journal = journal
        self._journal_writer = JournalWriter(self._config, journal, incarnation=event.incarnation)
        if self._journal.base_clocks is not None:
            self._warm_start = None  # an earlier incarnation saw its end

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        sender, message = event.sender, event.message
        match message:
            case CommandDone() if self._commands.owns(sender):
                self._commands.receive(event, message, now)
            case WorkReport() | Finished():
                return self._from_replica(event, message, now)
            case StartTraining():
                self._begun = True
            case Stop():
                self._stopped_by, self._requests.stop = sender, True
            case SaveCheckpoint(label=label) if self._warm_start is not None and self._begun:
                return self._warm_saves.request(label)
            case SaveCheckpoint(label=label):
                self._supervisor.request_save(label)
            case CheckpointSaved() if self._commands.owns(sender):
                return self._warm_saves.shard_answered(sender, message)
            case _:
                raise RemoteProtocolError(
                    f"{sender} sent the coordinator {type(message).__name__}: only "
                    "shards, workers and the supervisor send it messages"
                )
        return []

    def _from_replica(
        self, event: Received, message: WorkReport | Finished, now: Seconds
    ) -> Sequence[Action]:
        warm_start = self._warm_start
        if isinstance(message, Finished):
            return warm_start.replica_finished(event.sender, now) if warm_start else []
        if warm_start is not None and not warm_start.is_done(event.sender):
            return warm_start.replica_joined(event.sender, now)
        self._worker_ticks.take_report(event, message, self._queue, now)
        return []

    def _peer(self, event: PeerJoined | PeerLost, now: Seconds) -> Sequence[Action]:
        peer, incarnation = event.peer, event.incarnation
        if self._commands.owns(peer):
            is_new = isinstance(event, PeerJoined)
            return self._commands.joined(peer, incarnation) if is_new else []
        if isinstance(event, PeerLost):
            self._worker_ticks.lost(peer, incarnation, self._queue, now)
            if self._warm_start is not None:
                self._warm_start.lost(peer)
        return []

    def _timer(self, name: str, now: Seconds) -> Sequence[Action]:
        if name == COMMANDS_TIMER:
            return self._commands.timer(now)
        if name == WARM_TIMER:
            return self._warm_start.timer(now) if self._warm_start else []
        if name == TICK:
            return self._worker_ticks.tick(self._queue, now)
        return self._journal_writer.write(self._run)

    # --- the run ---

    def _advance(self, now: Seconds) -> Sequence[Action]:
        if not self._begun:
            return self._end() if self._requests.stop else []
        if self._warm_start is not None:
            if not self._warm_start.is_over:
                return self._end() if self._requests.stop else []
            self._warm_start = None
        actions: list[Action] = []
        if self._run is None or self._commands.lost is not None:
            actions += self._begin_run(now)
        while self._can_step():
            actions += self._step_run(now)
        actions += self._supervisor.report(self._run)
        if self.result is not None and not self._has_ended:
            return [*actions, *self._end()]
        return [*actions, *self._worker_ticks.assign(self._queue, now)]

    def _begin_run(self, now: Seconds) -> Sequence[Action]:
        actions: list[Action] = []
        if self._commands.lost is not None:
            text = f"{self._commands.lost} has restarted: continuing from a savepoint"
            actions.append(Report(text=text, level="warning"))
        self._n_epochs += 1
        if self._n_epochs >> _EPOCH_BITS:
            raise DistBeliefError(f"shards restarted {self._n_epochs} times: check their logs")
        epoch = (self._incarnation << _EPOCH_BITS) + self._n_epochs
        self._run = CoordinatorRun(
            self._config,
            method=self._method,
            n_examples=self._n_examples,
            epoch=epoch,
            pool=self._pool,
            journal=self._journal,
            metrics=self._metrics,
            requests=self._requests,
        )
        self._pool.clear_tasks()
        self._steps = self._run.steps()
        next(self._steps)
        self._wait, self._is_ending = None, False
        return [*actions, *self._commands.begin_epoch(epoch, now)]

    def _can_step(self) -> bool:
        run = self._run
        if self.result is not None or run is None or not self._commands.complete:
            return False
        match self._wait:
            case Wait.CHUNKS:
                queue = run.queue
                return (
                    self._requests.stop
                    or queue is None
                    or not queue.commits.is_finite
                    or queue.commits.has_staged
                )
            case Wait.SAVED:
                return run.unsaved is None or run.save_error is not None
            case None:
                return True

    def _step_run(self, now: Seconds) -> Sequence[Action]:
        run, steps, commands = self._run, self._steps, self._commands
        assert run is not None
        assert steps is not None
        actions: list[Action] = []
        if self._wait is None:
            actions += self._journal_writer.write_if_taken(run)
        had_queue = run.queue is not None
        run.now = now
        answered = Answered(now=now, answers=commands.answers, versions=commands.versions)
        try:
            # A run that has just begun must reach a point first: until it publishes one,
            # the shards stay bound to it and cannot be saved.
            if self._requests.stop and run.has_point and not self._is_ending:
                self._is_ending = True
                steps.close()
                steps = self._steps = run.end_early()
                step = next(steps)
            else:
                step = steps.send(answered)
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

    def _end(self) -> Sequence[Action]:
        self._has_ended = True
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        receiver = self._stopped_by or SUPERVISOR
        return [
            *self._supervisor.report(self._run),
            Send(receiver=receiver, message=finished),
            Exit(),
        ]
