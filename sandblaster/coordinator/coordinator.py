"""Coordinator: drives an optimizer over shards and workers (Dean et al. 2012, Algorithm 1.2).

It holds names of vectors, scalars and counts, never a parameter. One series:

    BeginSeries --> choose a savepoint --> Restore --> requests of the optimizer:
                       VectorOps        Execute
                       Evaluate         BeginEvaluation, Commit*, FinishEvaluation
                       Rounds           CommitRound*, of those that add to rows
                       IterationDone    a savepoint with the next command,
                                        and Checkpoint if one is requested
                   the optimizer ends --> Publish

When a shard restarts, another series begins, with a higher number, from the newest savepoint
that all shards share; shards obey the highest series only.
"""

import math
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeVar, assert_never, final

import msgspec

from distbelief import protocol as wire
from distbelief.core.errors import DistBeliefError, PeerLostError, RemoteProtocolError, StorageError
from distbelief.core.reliable import Silence
from distbelief.protocol import role as rl
from distbelief.protocol.vector_commands import Batch, Scalars, combine
from sandblaster.coordinator.journal import OTHER, CheckpointEntry, Journal
from sandblaster.coordinator.round_queue import RoundQueue
from sandblaster.coordinator.shard_commands import TIMER as COMMANDS_TIMER, CommandBroadcast
from sandblaster.coordinator.warm_start import TIMER as WARM_TIMER, WarmStart
from sandblaster.coordinator.work_queue import N_VOID_MAX, SeriesCounters, WorkQueue
from sandblaster.coordinator.workers import CoordinatorConfig, TimeShares, WorkerPool
from sandblaster.optimizers import base
from sandblaster.optimizers.termination import Reason


TICK: Final = "coordinator:tick"
SAVE: Final = "coordinator:save"
PARAMETERS: Final = "parameters"

SAVING_SHARE: Final = 0.02
"""Largest share of the time that checkpoints may take, while all workers wait; one that is
requested too early is delayed. 42 million parameters with three pairs of corrections are
2 GB: writing them took 4 s, which was 9 % of the time with a checkpoint every 30 s."""

_TICK_SECONDS_MIN: Final = 0.02
_TICK_SECONDS_PER_WORKER: Final = 2.5e-4
"""Bounds how often workers are looked at, all of them: 2,000 took a third of a core."""

_SERIES_BITS: Final = 12
"""Series of incarnation i begin at i << 12, so they rise; this bounds lost shards."""

_TOKEN_BITS: Final = 28
"""Tokens and savepoints of series e begin at e << 28: no number is used twice."""

_N_SAVES_MAX: Final = 8
_LAST_SAVE_SECONDS: Final = 10.0  # for repeating a failed save of the journal after the end


class Wait(Enum):
    """What a series waits for, other than the shards."""

    CHUNKS = "computing"  # a chunk is on every shard, or the loss is not finite
    SAVED = "saving"  # the journal is on disk


Answers = Sequence[wire.CommandDone]
"""What the shards answered to a command, shard 0 first."""

T = TypeVar("T")
SeriesSteps = Generator[wire.Task | Wait, Answers, T]
"""Yields a task for the shards, and resumes when all have answered, or what it waits for."""

CoordinatorMessage = (
    wire.CommandDone
    | wire.WorkReport
    | wire.Finished
    | wire.StartTraining
    | wire.Stop
    | wire.SaveCheckpoint
    | wire.CheckpointSaved
)


@final
@dataclass(slots=True, kw_only=True)
class CoordinatorMetrics:
    iterated: base.IterationDone | None = None  # the newest iteration
    offset: int = 0  # iterations before the optimizer last restarted
    samples: int = 0  # examples of all finished evaluations
    n_wasted: int = 0  # examples computed more than once
    n_backups: int = 0  # backup tasks assigned
    n_evaluations: int = 0  # evaluations begun
    shares: TimeShares = field(default_factory=TimeShares)  # of the workers' time

    @property
    def iteration(self) -> int:
        return self.offset + (self.iterated.iteration if self.iterated else 0)


@final
@dataclass(slots=True, kw_only=True)
class _Series:
    """What begins anew when a shard was lost."""

    counters: SeriesCounters
    last_savepoint: int
    savepoint_iteration: base.IterationDone | None = None  # the point of the last savepoint
    savepoint: wire.Savepoint | None = None  # to be sent with the next command
    # A savepoint that shards have not taken, or whose journal is not on disk.
    unsaved: int | None = None
    save_error: str | None = None  # why the journal could not be saved, if so
    # Of a program: the last savepoint, with its state.
    return_to: wire.Restore | None = None
    state: str = ""
    settled: int = 0  # the newest savepoint that is safe everywhere
    queue: WorkQueue | RoundQueue | None = None  # of the present evaluation or round
    wait: Wait | None = None
    has_point: bool = False  # whether the shards hold an accepted point
    is_ending: bool = False  # as the supervisor requested


@final
class Coordinator:
    """The role `coordinator`.

    Args:
        config: Settings of the coordinator.
        method: The optimizer.
        shards: Their names, shard 0 first.
        n_examples: How many the training data have.
        second_copies: Of each shard, if there are two.
    """

    accepts: Final = rl.message_types(CoordinatorMessage)

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        method: base.Runnable,
        shards: Sequence[rl.Address],
        n_examples: int,
        second_copies: Mapping[rl.Address, rl.Address] = MappingProxyType({}),
    ) -> None:
        self._config = config
        self._method = method
        self._n_examples = n_examples
        self._commands = CommandBroadcast(config, shards=shards, second_copies=second_copies)
        self._pool = WorkerPool(config)
        self.metrics = CoordinatorMetrics()
        self._journal = Journal(None, goal=config.goal)
        self._warm_start = WarmStart(
            config.n_warm,
            shards=shards,
            second_copies=second_copies,
            retry_seconds=config.retry_seconds,
        )
        self._is_warm = config.n_warm > 0  # whether the warm start lasts
        self._now: rl.Seconds = 0.0
        self._ticks = Silence()  # of all workers together; its timer runs while there is work
        self._incarnation = 0
        self._n_series = 0
        self._series = _Series(counters=SeriesCounters(), last_savepoint=0)
        self._steps: SeriesSteps[Reason] | None = None  # of the series; None before the first
        self._saving: int | None = None  # the savepoint whose journal is being saved
        self._save_labels: deque[str] = deque()  # of checkpoints to take
        self._save_again_at: rl.Seconds = 0.0  # when the next checkpoint may be taken
        self._reports: list[rl.Action] = []  # for the supervisor
        self._begun = not config.await_begin
        self._stopped_by: rl.Address | None = None
        self._has_ended = False
        self.reason: Reason | None = None  # why the run ended, once it has

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if self._has_ended:
            return []
        self._now = now
        actions: list[rl.Action] = []
        match event:
            case rl.Started():
                self._start(event)
            case rl.Received():
                actions += self._receive(event, now)
            case rl.TimerFired(name=name):
                actions += self._timer(name, now)
            case rl.Persisted():
                actions += self._persisted(event, now)
            case rl.PeerJoined() | rl.PeerLost():
                actions += self._peer(event, now)
            case rl.Computed():
                pass  # the coordinator computes nothing
            case _:
                assert_never(event)
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return state and counters; `wasted`: examples computed again, of ended evaluations."""
        metrics, queue = self.metrics, self._series.queue
        last, reasons = metrics.iterated, list(Reason)
        return self._state(), {
            "iteration": float(metrics.iteration),
            "evaluations": float(metrics.n_evaluations),
            "loss": float("nan") if last is None else last.loss,
            "gradient_norm": float("nan") if last is None else last.gradient_norm,
            "step_length": 0.0 if last is None else last.step_length,
            "samples": float(metrics.samples),
            "updates": 0.0 if last is None else float(last.n_updates),
            "wasted": float(metrics.n_wasted),
            "backups": float(metrics.n_backups),
            "replicas": float(len(self._pool)),
            "sets": float(queue.n_chunks) if queue else 0.0,
            "sets_done": float(queue.n_counted) if queue else 0.0,
            "series": float(self._commands.series),
            "orders": float(self._commands.n_commands),
            "reason": -1.0 if self.reason is None else float(reasons.index(self.reason)),
            **metrics.shares.counters(),
        }

    def _state(self) -> str:
        if self._steps is None:
            return "warm start" if self._is_warm and self._begun else "waiting for begin"
        if (waiting := self._commands.waiting_for) is not None:
            return f"waiting for {waiting}"
        wait = self._series.wait
        if wait is Wait.CHUNKS and not len(self._pool):
            return "waiting for replicas"
        return "commanding shards" if wait is None else wait.value

    # --- events ---

    def _start(self, event: rl.Started) -> None:
        if event.unrestored is not None:
            raise StorageError(event.unrestored)
        self._incarnation = event.incarnation
        config = self._config
        self._journal = Journal(event.restored, goal=config.goal, parameters_only=config.in_rounds)
        # An earlier incarnation may have seen the end of the warm start.
        self._is_warm = self._is_warm and self._journal.base_clocks is None

    def _receive(self, event: rl.Received, now: rl.Seconds) -> Sequence[rl.Action]:
        sender, message = event.sender, event.message
        match message:
            case wire.CommandDone() if sender in self._commands.shard_of:
                self._commands.receive(event, message, now)
            case wire.WorkReport() if self._is_warm and sender not in self._warm_start.done:
                return self._warm_start.replica_joined(sender, now)
            case wire.WorkReport():
                self._take_report(event, message, now)
            case wire.Finished():
                return self._warm_start.replica_finished(sender, now) if self._is_warm else []
            case wire.StartTraining():
                self._begun = True
            case wire.Stop():
                self._stopped_by = sender
            case wire.SaveCheckpoint(label=label) if self._is_warm and self._begun:
                return self._warm_start.save(label)
            case wire.SaveCheckpoint(label=label):
                self._request_save(label)
            case wire.CheckpointSaved() if sender in self._commands.shard_of:
                return self._warm_start.shard_saved(self._commands.shard_of[sender], message)
            case _:
                raise RemoteProtocolError(
                    f"{sender} sent the coordinator {type(message).__name__}: only "
                    "shards, workers and the supervisor send it messages"
                )
        return []

    def _peer(self, event: rl.PeerJoined | rl.PeerLost, now: rl.Seconds) -> Sequence[rl.Action]:
        peer, incarnation = event.peer, event.incarnation
        if peer in self._commands.shard_of:
            is_new = isinstance(event, rl.PeerJoined)
            return self._commands.joined(peer, incarnation) if is_new else []
        if isinstance(event, rl.PeerLost):
            worker = self._pool.get(peer)
            if worker is not None and worker.generation[0] <= incarnation:
                self._remove(peer, now, is_over=True)
            self._warm_start.lost(peer, for_good=event.for_good)
        return []

    def _timer(self, name: str, now: rl.Seconds) -> Sequence[rl.Action]:
        if name == COMMANDS_TIMER:
            return self._commands.timer(now)
        if name == WARM_TIMER:
            return self._warm_start.timer(now) if self._is_warm else []
        if name == TICK:
            return self._tick(now)
        # The save to repeat may have been done, or be of an earlier series; of a later savepoint
        # the shards need not have heard yet.
        return [] if self._series.save_error is None else self._save_journal()

    def _advance(self, now: rl.Seconds) -> Sequence[rl.Action]:
        self._is_warm = self._is_warm and not (self._begun and self._warm_start.is_over)
        if not self._begun or self._is_warm:
            return self._end() if self._stopped_by else []
        actions: list[rl.Action] = []
        queue = self._series.queue
        has_lost = isinstance(queue, RoundQueue) and queue.lost_block is not None
        if self._steps is None or self._commands.lost is not None or has_lost:
            actions += self._begin_series(now)
        while self.reason is None and self._commands.complete:
            actions += self._step(now)
            if self._series.wait is not None:
                break
        if self.reason is not None:
            return [*actions, *self._end()]
        reports, self._reports = self._reports, []
        return [*actions, *reports, *self._assign(now)]

    def _end(self) -> Sequence[rl.Action]:
        self._has_ended = True
        _, counters = self.status()
        finished = wire.Finished(counters=dict(counters))
        receiver = self._stopped_by or rl.SUPERVISOR
        return [*self._reports, rl.Send(receiver=receiver, message=finished), rl.Exit()]

    # --- workers ---

    def _take_report(self, event: rl.Received, report: wire.WorkReport, now: rl.Seconds) -> None:
        if self._pool.has_restarted(event, report):
            self._remove(event.sender, now, is_over=True)
        worker = self._pool.take_report(event, report, now)
        if (queue := self._series.queue) is None:
            return
        if worker is not None:
            queue.take_report(worker, report, now)
        elif (known := self._pool.get(event.sender)) is not None:
            queue.touch(known)

    def _remove(self, name: rl.Address, now: rl.Seconds, *, is_over: bool) -> None:
        """Put a worker's chunks back; if its incarnation `is_over`, ignore it from now on."""
        worker = self._pool.remove(name, is_over=is_over)
        if worker is not None and self._series.queue is not None:
            self._series.queue.lost(worker, now)

    def _assign(self, now: rl.Seconds) -> list[rl.Action]:
        if (queue := self._series.queue) is None:
            self._ticks = Silence()
            return []
        if queue.is_finite:
            queue.assign(now)
        actions: list[rl.Action] = []
        for worker in queue.changed():
            actions += self._pool.send_assignment(worker, now)
        if self._ticks.timer_at is None:
            self._ticks.start(now)
            actions.append(self._set_tick(now))
        return actions

    def _tick(self, now: rl.Seconds) -> list[rl.Action]:
        """Remove silent workers; resend assignments that are not answered."""
        if self._ticks.timer_at is None or (queue := self._series.queue) is None:
            return []
        # If our own timer came late, this process stood still: do not blame the workers.
        if late := self._ticks.woke(now):
            self._pool.add_delay(late, now)
            self._commands.add_delay(late, now)
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
        actions = [*self._commands.watch(now), *self._pool.resend(now)]
        return [*actions, self._set_tick(now)]

    def _set_tick(self, now: rl.Seconds) -> rl.SetTimer:
        pace = min(self._pool.chunk_seconds / 4, self._config.retry_seconds)
        least = max(_TICK_SECONDS_MIN, _TICK_SECONDS_PER_WORKER * len(self._pool))
        return rl.SetTimer(name=TICK, at=self._ticks.expect(now + max(pace, least)))

    # --- series ---

    def validate(self) -> None:
        """Check what holds after every event; only simulations call it."""
        if self._series.queue is not None:
            self._series.queue.validate()

    def _begin_series(self, now: rl.Seconds) -> Sequence[rl.Action]:
        actions: list[rl.Action] = []
        if self._commands.lost is not None:
            text = f"{self._commands.lost} has restarted: continuing from a savepoint"
            actions.append(rl.Report(text=text, level="warning"))
        elif self._steps is not None:
            text = "a worker has lost its block: continuing from a savepoint"
            actions.append(rl.Report(text=text, level="warning"))
        self._n_series += 1
        if self._n_series >> _SERIES_BITS:
            raise DistBeliefError(f"shards restarted {self._n_series} times: check their logs")
        number = (self._incarnation << _SERIES_BITS) + self._n_series
        actions += self._commands.begin_series(number, now)
        first = number << _TOKEN_BITS
        self._series = _Series(counters=SeriesCounters(commit_token=first), last_savepoint=first)
        self._pool.clear_tasks()
        self.metrics.shares.run_begins()
        self._steps = self._series_steps()
        next(self._steps)  # it waits for what the shards answer to `BeginSeries`
        return actions

    def _step(self, now: rl.Seconds) -> Sequence[rl.Action]:
        series, steps = self._series, self._steps
        assert steps is not None
        actions: list[rl.Action] = []
        # Every shard has taken the newest savepoint, unless it goes with the next command.
        if series.savepoint is None and series.save_error is None:
            actions += self._save_journal()
        had_queue = series.queue is not None
        try:
            # A series that has just begun must reach a point first: until it publishes one,
            # the shards stay bound to it and cannot be saved.
            is_saving = series.wait is Wait.SAVED and self._awaits_journal
            if self._stopped_by and series.has_point and not (series.is_ending or is_saving):
                series.is_ending = True
                steps.close()
                steps = self._steps = self._end_early()
                step = next(steps)
            else:
                step = steps.send(self._commands.answers)
        except StopIteration as end:
            self.reason = end.value
            return actions
        if had_queue and series.queue is None:
            actions += self._pool.cancel_all(now)
        series.wait = step if isinstance(step, Wait) else None
        if isinstance(step, Wait):
            return actions
        savepoint, series.savepoint = series.savepoint, None
        # Parameters alone are of no use to a program: shards keep those before until then.
        journal = self._journal
        on_disk = journal.recorded if self._config.in_rounds else journal.on_disk
        return [
            *actions,
            *self._commands.send(
                step, now, savepoint=savepoint, settled=series.settled, on_disk=on_disk
            ),
        ]

    def _series_steps(self) -> SeriesSteps[Reason]:
        series, journal, metrics = self._series, self._journal, self.metrics
        held = yield wire.BeginSeries()
        resume_point = journal.choose([answer.savepoints for answer in held])
        is_first = journal.base_clocks is None
        if resume_point.savepoint == 0 and is_first:
            journal.base_clocks = tuple(answer.savepoints[0].clock for answer in held)
            series.unsaved = 0
        is_start = resume_point.savepoint == 0 and resume_point.entry is None
        if self._config.in_rounds and not (resume_point.whole or is_start):
            raise StorageError(OTHER)
        has_all = resume_point.whole and resume_point.has_all
        series.return_to = wire.Restore(savepoint=resume_point.savepoint, whole=has_all)
        yield series.return_to
        state = None
        metrics.offset, metrics.iterated = 0, None
        if (entry := resume_point.entry) is not None:
            metrics.samples = entry.samples
            # A lost shard takes the parameters back, not what was counted since.
            metrics.n_evaluations = max(metrics.n_evaluations, entry.evaluations)
            metrics.n_wasted = max(metrics.n_wasted, entry.wasted)
            metrics.n_backups = max(metrics.n_backups, entry.backups)
            metrics.shares.resume(entry.seconds)
            if resume_point.whole:
                series.state = entry.state
                state, series.unsaved, metrics.offset = (
                    entry.state,
                    resume_point.savepoint,
                    entry.offset,
                )
            else:
                metrics.offset = entry.iteration
        if resume_point.has_other_goal:
            text = (
                "method, loss, l1 or l2 have changed: the method restarts at the saved parameters"
            )
            self._reports.append(rl.Report(text=text, level="warning"))
        elif is_start and not is_first:
            text = "the shards share no savepoint: continuing from the initial values"
            self._reports.append(rl.Report(text=text, level="warning"))
        elif resume_point.savepoint and not resume_point.whole:
            text = "only parameters could be restored: the method restarts there"
            self._reports.append(rl.Report(text=text, level="warning"))
        series.has_point = True
        result = yield from self._drive(self._method.steps(state))
        if self.metrics.iterated is None:  # it ended at its starting point
            self._report_progress(result)
        elif not self._config.in_rounds and series.savepoint_iteration is not self.metrics.iterated:
            yield from self._until_saved()  # it was skipped while the point before was not safe
            if series.unsaved is None:
                self._take_savepoint(result)
        yield from self._publish(result.state if self._config.in_rounds else "")
        return result.reason

    def _end_early(self) -> SeriesSteps[Reason]:
        """Publish the last accepted point; to be run instead of the remaining steps."""
        series, last = self._series, self.metrics.iterated
        series.queue = None
        if self._config.in_rounds:
            # Workers may be gone: back to where the tables belong to a state of the program.
            if series.savepoint is None and series.return_to is not None:
                yield series.return_to
            yield from self._publish(series.state)
            return Reason.STOPPED
        if series.savepoint is None and last is not None and series.savepoint_iteration is last:
            # The optimizer may be in the middle of the next iteration: restore its history.
            yield wire.Restore(savepoint=series.last_savepoint, whole=True)
        yield from self._publish()
        return Reason.STOPPED

    def _publish(self, state: str = "") -> SeriesSteps[None]:
        series, back = self._series, self._series.return_to
        assert back is not None
        # The supervisor saves the shards as soon as the coordinator has ended. Of their clocks a
        # journal on disk must know first, or a resumed run fits neither this nor what was before.
        series.is_ending = True
        series.save_error = None  # if it could not be saved: try again at once
        published = yield wire.Publish(point=PARAMETERS)
        since = self._now
        yield from self._until_last_saved(since)
        clocks = [answer.clock for answer in published]
        entry = self._entry(0, iteration=self.metrics.iteration, state=state)
        self._journal.end(clocks, entry, savepoint=back.savepoint)
        if series.unsaved is None:
            series.unsaved = series.last_savepoint
            yield wire.Execute(commands=())  # carries the savepoint, so that the journal is saved
            yield from self._until_last_saved(since)
        self._save_labels.clear()  # the supervisor sees the end, and saves the shards itself

    def _until_last_saved(self, since: rl.Seconds) -> SeriesSteps[None]:
        # A stopped run waits until the supervisor ends it: it can resume from a checkpoint then.
        # So can one that fails here: the shards are not saved. The supervisor may try it again.
        until = math.inf if self._stopped_by is not None else since + _LAST_SAVE_SECONDS
        while (series := self._series).unsaved is not None:
            if self._now >= until:
                why = f"could not be saved: {series.save_error or 'its disk does not answer'}"
                raise StorageError(
                    f"the journal of the end {why}: make room on its disk, and resume"
                )
            yield Wait.SAVED

    def _until_saved(self) -> SeriesSteps[None]:
        while self._awaits_journal:
            yield Wait.SAVED

    @property
    def _awaits_journal(self) -> bool:
        return self._series.unsaved is not None and self._series.save_error is None

    def _drive(self, steps: base.Steps[base.Result]) -> SeriesSteps[base.Result]:
        try:
            request = next(steps)
            while True:
                reply: base.Reply
                match request:
                    case base.VectorOps(commands=commands):
                        reply = _combined(commands, (yield wire.Execute(commands=commands)))
                    case base.Evaluate():
                        reply = yield from self._evaluate(request)
                    case base.Rounds():
                        reply = yield from self._compute_rounds(request)
                    case base.IterationDone():
                        yield from self._iterated(request)
                        reply = self._stopped_by is not None
                    case _:
                        assert_never(request)
                request = steps.send(reply)
        except StopIteration as end:
            result: base.Result = end.value
            return result

    def _evaluate(self, request: base.Evaluate) -> SeriesSteps[base.Evaluation]:
        config, metrics, counters = self._config, self.metrics, self._series.counters
        opened = yield wire.BeginEvaluation(
            point=request.point,
            before=request.before,
            first_commit_token=counters.commit_token + 1,
            n_staged_max=config.window_chunks + N_VOID_MAX,
        )
        metrics.n_evaluations += 1
        metrics.shares.evaluation_begins(self._pool, self._now)
        self._pool.begin(
            series=self._commands.series,
            evaluation=metrics.n_evaluations,
            versions=self._commands.versions,
            n_examples=self._n_examples,
        )
        queue = WorkQueue(config, pool=self._pool, n_examples=self._n_examples, counters=counters)
        self._series.queue = queue
        while queue.is_finite and not queue.is_complete:
            if queue.has_staged:
                chunks, void = queue.to_commit()
                yield wire.Commit(chunks=chunks, void=void)
                queue.committed(chunks, void, self._now)
            else:
                yield Wait.CHUNKS
        self._series.queue = None
        metrics.shares.evaluation_ends(self._pool, self._now)
        metrics.n_backups += queue.n_backups
        metrics.n_wasted += max(self._pool.n_computed - self._n_examples, 0)
        metrics.samples += self._n_examples
        # A mean over no example is NaN: so the shards know that the loss is not finite.
        n_examples = self._n_examples if queue.is_finite else 0
        sealed = yield wire.FinishEvaluation(
            gradient=request.gradient, n_examples=n_examples, after=request.after
        )
        if n_examples:
            _check(sealed, queue)
        before, after = _combined(request.before, opened), _combined(request.after, sealed)
        return base.Evaluation(
            loss=queue.loss / n_examples if n_examples else math.nan, scalars=(*before, *after)
        )

    def _compute_rounds(self, request: base.Rounds) -> SeriesSteps[tuple[bytes, ...]]:
        metrics, pool, series = self.metrics, self._pool, self._series
        metrics.n_evaluations += 1
        metrics.shares.evaluation_begins(pool, self._now)
        pool.begin(
            series=self._commands.series,
            evaluation=metrics.n_evaluations,
            versions=(),
            n_examples=1,
        )
        queue = series.queue = RoundQueue(
            self._config,
            pool=pool,
            request=request,
            counters=series.counters,
            command=self._commands.number,
        )
        while not queue.is_complete:
            while (tokens := queue.tokens) is None:
                yield Wait.CHUNKS
            if queue.changes_nothing:  # shards have no need to hear of it
                queue.commit()
                break
            oldest = queue.commit()
            yield wire.CommitRound(tokens=tokens, pulls=dict(request.pulls), oldest=oldest)
            queue.committed()
        series.queue = None
        metrics.shares.evaluation_ends(pool, self._now)
        metrics.n_backups += queue.n_backups
        return queue.reports

    def _iterated(self, request: base.IterationDone) -> SeriesSteps[None]:
        if self._config.in_rounds:
            self.metrics.samples += self._n_examples
        self._report_progress(request)
        if not request.state:
            return
        series, since = self._series, self._now
        while self._save_labels and self._now >= self._save_again_at:
            if series.savepoint is None:
                yield from self._until_saved()
            label = self._save_labels[0]  # stays in place if this series ends
            error = series.save_error
            if error is None:
                error = yield from self._save(label, request)
            taken = self._now - since
            self._save_again_at = self._now + taken / SAVING_SHARE
            self._save_labels.popleft()
            self._report_saved(label, error)
        self.metrics.shares.saved(self._pool, since=since, now=self._now)
        # One savepoint at a time: a point is skipped while the last one is not safe.
        if series.unsaved is None:
            self._take_savepoint(request)

    def _report_progress(self, iterated: base.IterationDone) -> None:
        metrics = self.metrics
        metrics.iterated = iterated
        progress = wire.Progress(
            step=metrics.iteration,
            samples=metrics.samples,
            loss=iterated.loss,
            seconds_computing=0.0,
            seconds_waiting=0.0,
            counters=msgspec.UNSET if self._config.in_rounds else dict(self.status()[1]),
        )
        self._reports.append(rl.Send(receiver=rl.SUPERVISOR, message=progress))

    # --- savepoints and checkpoints ---

    def _take_savepoint(self, request: base.IterationDone) -> int:
        series = self._series
        series.last_savepoint += 1
        series.savepoint_iteration = request
        number = series.unsaved = series.last_savepoint
        series.state, series.return_to = request.state, wire.Restore(savepoint=number, whole=True)
        iteration = self.metrics.offset + request.iteration
        self._journal.write(self._entry(number, iteration=iteration, state=request.state))
        series.savepoint = wire.Savepoint(number=number, vectors=request.vectors)
        return number

    def _entry(self, savepoint: int, *, iteration: int, state: str) -> CheckpointEntry:
        return CheckpointEntry(
            savepoint=savepoint,
            iteration=iteration,
            offset=self.metrics.offset,
            samples=self.metrics.samples,
            evaluations=self.metrics.n_evaluations,
            wasted=self.metrics.n_wasted,
            backups=self.metrics.n_backups,
            seconds=self.metrics.shares.seconds,
            goal=self._config.goal,
            state=state,
        )

    def _request_save(self, label: str) -> None:
        if label in self._save_labels:
            return
        if len(self._save_labels) >= _N_SAVES_MAX:
            error = f"{_N_SAVES_MAX} checkpoints are pending already: request them less often"
            self._report_saved(label, error)
        else:
            self._save_labels.append(label)

    def _report_saved(self, label: str, error: str | None) -> None:
        saved = wire.CheckpointSaved(label=label, clock=self.metrics.iteration, error=error)
        self._reports.append(rl.Send(receiver=rl.SUPERVISOR, message=saved))

    def _save(self, label: str, request: base.IterationDone) -> SeriesSteps[str | None]:
        series = self._series
        savepoint = series.unsaved if series.unsaved is not None else self._take_savepoint(request)
        answers = yield wire.Checkpoint(label=label, savepoint=savepoint)
        errors = [
            f"shard {k}: {answer.error}"
            for k, answer in enumerate(answers)
            if answer.error is not None
        ]
        if not errors:
            self._journal.checkpointed(savepoint)
        yield from self._until_saved()
        return "; ".join(errors) or series.save_error

    def _save_journal(self) -> list[rl.Action]:
        series = self._series
        if series.unsaved is None or self._saving is not None:
            return []
        series.save_error = None
        self._saving = series.unsaved
        return [rl.Persist(snapshot=self._journal.snapshot(incarnation=self._incarnation))]

    def _persisted(self, event: rl.Persisted, now: rl.Seconds) -> Sequence[rl.Action]:
        saved, self._saving = self._saving, None
        series = self._series
        if event.error is None:
            self._journal.saved()
        if series.unsaved is None:
            return []
        if saved != series.unsaved:  # of an earlier series
            # While a command is under way the shards may not have the savepoint yet.
            has_answers = series.savepoint is None and series.wait is not None
            return self._save_journal() if has_answers else []
        if event.error is not None:
            series.save_error = event.error
            text = f"the coordinator's journal could not be saved: {event.error}; retrying"
            retry = rl.SetTimer(name=SAVE, at=now + self._config.retry_seconds_max)
            return [rl.Report(text=text, level="warning"), retry]
        # Every shard has taken the savepoint and its journal is on disk: older ones may go.
        series.unsaved, series.settled = None, max(saved, series.settled)
        self._journal.confirm(saved)
        return []


def _combined(commands: Batch, answers: Answers) -> Scalars:
    return combine(commands, [answer.scalars for answer in answers])


def _check(answers: Answers, queue: WorkQueue) -> None:
    # Every shard must count the same chunks, each once and of the same attempt (DB-15).
    expected = queue.n_chunks, queue.n_examples, queue.digest
    for k, answer in enumerate(answers):
        counted = answer.n_chunks, answer.n_examples, answer.digest
        if counted != expected:
            raise DistBeliefError(
                f"shard {k} counts {counted[0]} chunks of {counted[1]} examples (tokens "
                f"{counted[2]:x}), not {expected[0]} of {expected[1]} ({expected[2]:x})"
            )
