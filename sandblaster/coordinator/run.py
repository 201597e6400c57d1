"""Coordinator run: the steps of one epoch, as a generator.

    BeginEpoch --> choose a savepoint --> Restore --> requests of the optimizer:
                       VectorOps        Execute
                       Evaluate         BeginEvaluation, Commit*, FinishEvaluation
                       IterationDone    a savepoint with the next command,
                                        and Checkpoint if one is requested
                   the optimizer ends --> Publish

It yields a task for the shards and resumes when all have answered, or yields what it waits
for. A lost shard ends the run; the next one begins at the newest shared savepoint.
"""

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeVar, assert_never, final

from distbelief.errors import DistBeliefError, JobError
from distbelief.protocol import (
    BeginEpoch,
    BeginEvaluation,
    Checkpoint,
    CommandDone,
    Commit,
    Execute,
    FinishEvaluation,
    Publish,
    Restore,
    Savepoint,
    Task,
)
from distbelief.protocol.vector_commands import Batch, Scalars, combine
from distbelief.roles.role import Seconds
from sandblaster.chunks import BatchRange
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.journal import CheckpointEntry, Journal
from sandblaster.coordinator.shard_commands import CommandBroadcast
from sandblaster.coordinator.work_queue import N_VOID_MAX, EpochCounters, WorkQueue
from sandblaster.coordinator.workers import TimeShares, WorkerPool
from sandblaster.optimizers.base import (
    Evaluate,
    Evaluation,
    IterationDone,
    Reply,
    Result,
    Steps,
    VectorOps,
)
from sandblaster.optimizers.termination import Reason


PARAMETERS: Final = "parameters"
SAVING_SHARE: Final = 0.02
"""Largest share of the time that checkpoints may take, while all workers wait; one that is
requested too early is delayed. 42 million parameters with three pairs of corrections are
2 GB: writing them took 4 s, which was 9 % of the time with a checkpoint every 30 s."""
GRANT_BITS: Final = 28
"""Tokens and savepoints of epoch e begin at e << 28: no number is used twice."""


class Method(Protocol):
    """An optimizer: the settings of a method."""

    def steps(self, state: str | None = None) -> Steps[Result]: ...


class Wait(Enum):
    """What a run waits for, other than the shards."""

    CHUNKS = "computing"  # a chunk is on every shard, or the loss is not finite
    SAVED = "saving"  # the journal is on disk


Answers = Sequence[CommandDone]
"""What the shards answered to a command, shard 0 first."""

T = TypeVar("T")
RunSteps = Generator[Task | Wait, Answers, T]


@final
@dataclass(slots=True, kw_only=True)
class CoordinatorMetrics:
    """Metrics of all runs together."""

    iterated: IterationDone | None = None  # the newest iteration
    offset: int = 0  # iterations before the optimizer last restarted
    samples: int = 0  # examples of all finished evaluations
    n_wasted: int = 0  # examples computed more than once
    n_backups: int = 0  # backup tasks assigned
    n_evaluations: int = 0  # evaluations begun
    shares: TimeShares = field(default_factory=TimeShares)  # of the workers' time
    save_again_at: Seconds = 0.0  # when the next checkpoint may be taken

    @property
    def iteration(self) -> int:
        return self.offset + (self.iterated.iteration if self.iterated else 0)


_N_SAVES_MAX: Final = 8


@final
@dataclass(slots=True, kw_only=True)
class PendingRequests:
    """What the supervisor has requested."""

    saves: deque[str] = field(default_factory=deque)  # labels of checkpoints to take
    # Label and error of each that was tried.
    saved: deque[tuple[str, str | None]] = field(default_factory=deque)
    stop: bool = False  # whether to end

    def request_save(self, label: str) -> None:
        """Request a checkpoint with this label at the next accepted point."""
        if label in self.saves:
            return
        if len(self.saves) >= _N_SAVES_MAX:
            error = f"{_N_SAVES_MAX} checkpoints are pending already: request them less often"
            self.saved.append((label, error))
        else:
            self.saves.append(label)


@final
class CoordinatorRun:
    """One epoch."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        method: Method,
        n_examples: int,
        commands: CommandBroadcast,
        pool: WorkerPool,
        journal: Journal,
        metrics: CoordinatorMetrics,
        requests: PendingRequests,
    ) -> None:
        self._config = config
        self._method = method
        self._n_examples = n_examples
        self._commands = commands
        self._pool = pool
        self._journal = journal
        self._metrics = metrics
        self._requests = requests
        first = commands.epoch << GRANT_BITS
        self._counters = EpochCounters(commit_token=first)
        self._last_savepoint = first
        self._savepoint_iteration: IterationDone | None = None  # the point of the last savepoint
        self.savepoint: Savepoint | None = None  # to be sent with the next command
        # A savepoint that shards have not taken, or whose journal is not on disk.
        self.unsaved: int | None = None
        self.save_error: str | None = None  # why the journal could not be saved, if so
        self.settled = 0  # the newest savepoint that is safe everywhere
        self.has_point = False  # whether the shards hold an accepted point
        self.queue: WorkQueue | None = None  # work queue of the present evaluation
        self.progress: deque[IterationDone] = deque()  # iterations to report
        self.note = ""  # a warning to report, once
        self.now: Seconds = 0.0  # the time, set before each step

    def steps(self) -> RunSteps[Result]:
        """Start the epoch, restore a savepoint, run the optimizer to its end."""
        self._metrics.shares.run_begins()
        held = yield BeginEpoch()
        resume_point = self._journal.choose([answer.cuts for answer in held])
        if resume_point.cut == 0 and self._journal.base_clocks is None:
            self._journal.base_clocks = tuple(answer.cuts[0].clock for answer in held)
            self.unsaved = 0
        yield Restore(cut=resume_point.cut, whole=resume_point.whole)
        state, metrics = None, self._metrics
        metrics.offset, metrics.iterated = 0, None
        if (entry := resume_point.entry) is not None:
            metrics.samples = entry.samples
            metrics.n_evaluations = max(metrics.n_evaluations, entry.evaluations)
            if resume_point.whole:
                state, self.unsaved, metrics.offset = entry.state, resume_point.cut, entry.offset
            else:
                metrics.offset = entry.iteration
        if resume_point.has_other_goal:
            self.note = (
                "method, loss, l1, l2 or batch_size have changed: "
                "the method restarts at the saved parameters"
            )
        elif resume_point.cut and not resume_point.whole:
            self.note = "only parameters could be restored: the method restarts there"
        self.has_point = True
        result = yield from self._drive(self._method.steps(state))
        if metrics.iterated is None:  # it ended at its starting point
            metrics.iterated = _iterated(result)
            self.progress.append(metrics.iterated)
        yield from self._publish()
        return result

    def end_early(self) -> RunSteps[Result]:
        """Publish the last accepted point; to be run instead of the remaining steps."""
        assert self.has_point
        self.queue = None
        last = self._metrics.iterated
        if (
            self.savepoint is None
            and self._savepoint_iteration is not None
            and self._savepoint_iteration is last
        ):
            # The optimizer may be in the middle of the next iteration: restore its history.
            yield Restore(cut=self._last_savepoint, whole=True)
        yield from self._publish()
        return Result(
            reason=Reason.STOPPED,
            iteration=0 if last is None else last.iteration,
            n_evaluations=0 if last is None else last.n_evaluations,
            loss=math.nan if last is None else last.loss,
            gradient_norm=math.nan if last is None else last.gradient_norm,
            state="" if last is None else last.state,
        )

    def _publish(self) -> RunSteps[None]:
        published = yield Publish(point=PARAMETERS)
        yield from self._until_saved()
        entry = self._entry(0, iteration=self._metrics.iteration, state="")
        self._journal.end([answer.clock for answer in published], entry)
        if self.save_error is None:
            self.unsaved = self._last_savepoint
            yield Execute(commands=())  # carries the savepoint, so that the journal is saved
        yield from self._until_saved()
        self._requests.saves.clear()  # the supervisor sees the end, and saves the shards itself

    def _until_saved(self) -> RunSteps[None]:
        while self.unsaved is not None and self.save_error is None:
            yield Wait.SAVED

    def _drive(self, steps: Steps[Result]) -> RunSteps[Result]:
        try:
            request = next(steps)
            while True:
                reply: Reply
                match request:
                    case VectorOps(commands=commands):
                        reply = _combined(commands, (yield Execute(commands=commands)))
                    case Evaluate():
                        reply = yield from self._evaluate(request)
                    case IterationDone():
                        yield from self._iterated(request)
                        reply = self._requests.stop
                    case _:
                        assert_never(request)
                request = steps.send(reply)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _evaluate(self, request: Evaluate) -> RunSteps[Evaluation]:
        batch = self._batch(request)
        config, metrics, counters = self._config, self._metrics, self._counters
        opened = yield BeginEvaluation(
            point=request.point,
            before=request.before,
            first_commit_token=counters.commit_token + 1,
            n_staged_max=config.window_chunks + N_VOID_MAX,
        )
        metrics.n_evaluations += 1
        metrics.shares.evaluation_begins(self._pool, self.now)
        self._pool.begin(
            epoch=self._commands.epoch,
            evaluation=metrics.n_evaluations,
            versions=self._commands.versions,
            batch=batch,
        )
        queue = self.queue = WorkQueue(config, pool=self._pool, batch=batch, counters=counters)
        while queue.is_finite and not queue.is_complete:
            sets, void = queue.to_commit()
            if sets or void:
                yield Commit(sets=sets, void=void)
                queue.committed(sets, void, self.now)
            else:
                yield Wait.CHUNKS
        self.queue = None
        metrics.shares.evaluation_ends(self._pool, self.now)
        metrics.n_backups += queue.n_backups
        metrics.n_wasted += max(self._pool.n_computed - batch.n_examples, 0)
        metrics.samples += batch.n_examples
        # A mean over no example is NaN: so the shards know that the loss is not finite.
        n_examples = batch.n_examples if queue.is_finite else 0
        sealed = yield FinishEvaluation(
            gradient=request.gradient, n_examples=n_examples, after=request.after
        )
        if n_examples:
            _check(sealed, queue)
        before, after = _combined(request.before, opened), _combined(request.after, sealed)
        return Evaluation(
            loss=queue.loss / n_examples if n_examples else math.nan,
            n_examples=batch.n_examples,
            scalars=(*before, *after),
        )

    def _batch(self, request: Evaluate) -> BatchRange:
        examples = request.examples
        if examples is None:
            return BatchRange(first=0, n_examples=self._n_examples)
        n_examples = examples.stop - examples.start
        if not 0 < n_examples <= self._n_examples or examples.start < 0:
            raise JobError(
                f"a batch of positions {examples.start} to {examples.stop} needs 1 to "
                f"{self._n_examples} examples: choose another batch_size"
            )
        first = examples.start % self._n_examples
        return BatchRange(first=first, n_examples=n_examples)

    # --- savepoints ---

    def _iterated(self, request: IterationDone) -> RunSteps[None]:
        self._metrics.iterated = request
        self.progress.append(request)
        since = self.now
        while self._requests.saves and self.now >= self._metrics.save_again_at:
            if self.savepoint is None:
                yield from self._until_saved()
            label = self._requests.saves[0]  # stays in place if this run ends
            error = self.save_error
            if error is None:
                error = yield from self._save(label, request)
            taken = self.now - since
            self._metrics.save_again_at = self.now + taken / SAVING_SHARE
            self._requests.saves.popleft()
            self._requests.saved.append((label, error))
        self._metrics.shares.saved(self._pool, since=since, now=self.now)
        # One savepoint at a time: a point is skipped while the last one is not safe.
        if self.unsaved is None:
            self._take_savepoint(request)

    def _take_savepoint(self, request: IterationDone) -> int:
        self._last_savepoint += 1
        self._savepoint_iteration = request
        cut = self.unsaved = self._last_savepoint
        iteration = self._metrics.offset + request.iteration
        self._journal.write(self._entry(cut, iteration=iteration, state=request.state))
        self.savepoint = Savepoint(cut=cut, vectors=request.vectors)
        return cut

    def _entry(self, cut: int, *, iteration: int, state: str) -> CheckpointEntry:
        return CheckpointEntry(
            cut=cut,
            iteration=iteration,
            offset=self._metrics.offset,
            samples=self._metrics.samples,
            evaluations=self._metrics.n_evaluations,
            goal=self._config.goal,
            state=state,
        )

    def _save(self, label: str, request: IterationDone) -> RunSteps[str | None]:
        cut = self.unsaved if self.unsaved is not None else self._take_savepoint(request)
        answers = yield Checkpoint(label=label, cut=cut)
        errors = [
            f"shard {k}: {answer.error}"
            for k, answer in enumerate(answers)
            if answer.error is not None
        ]
        if not errors:
            self._journal.checkpointed(cut)
        yield from self._until_saved()
        return "; ".join(errors) or self.save_error


def _iterated(result: Result) -> IterationDone:
    return IterationDone(
        iteration=result.iteration,
        n_evaluations=result.n_evaluations,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        step_length=0.0,
        state=result.state,
        vectors=(),
    )


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
