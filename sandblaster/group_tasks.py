"""What a worker, by its leader, does for the coordinator: attempts at chunks, one after the other.

    coordinator     leader                               ranks
      | Assignment -> | StartGeneration, GrantSteps -----> |  one generation per chunk
      | <- WorkReport | <------------- all steps are done  |
      | Assignment -> | PushChunk -----------------------> |  with the commit token
      | <- WorkReport | <------------------- ChunkStaged   |  of all ranks

A chunk is computed when all ranks have taken all steps of its generation. While a rank
is silent the leader reports nothing, so the chunks go to other workers. A chunk that an
assignment no longer names is dropped at once, by a new generation. A worker that holds the
whole model is a group of one rank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from distbelief import protocol as wire
from distbelief.core.errors import RemoteProtocolError
from distbelief.core.reliable import Backoff, Silence
from distbelief.protocol.role import Action, Report, Seconds, Send, SetTimer
from distbelief.task.data import Samples
from distbelief.worker.batches import BatchIndices
from distbelief.worker.group import Outgoing
from distbelief.worker.replica import Leader
from sandblaster.chunks import COORDINATOR, ChunkSizes


TIMER: Final = "group:report"

N_CHUNKS_HELD: Final = 2  # sums that a worker holds at most

_SILENT_PERIODS: Final = 4.0
"""Report periods after which a silent rank counts as missing."""


@final
@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    chunk_sizes: ChunkSizes  # how batches are divided; the coordinator must have the same
    retry_seconds: Seconds = 0.5  # seconds after which a busy worker repeats its report
    retry_seconds_max: Seconds = 4.0  # seconds after which an idle worker does


# --- mini-batches ---


@final
class ChunkBatchPlan:
    """The mini-batches of the chunk of one generation, one in each step."""

    def __init__(self, samples: Samples, *, mini_batch_size: int) -> None:
        # The chunk of the present generation; None if there is none.
        self.chunk: wire.GroupChunk | None = None
        # Where known, positions [start, stop) of the chunks that come after it.
        self.ahead: Sequence[tuple[int, int]] = ()
        self._samples = samples
        self._mini_batch_size = mini_batch_size
        self._generation = 0
        self._next: wire.GroupChunk | None = None  # of the generation that begins

    def set_chunk(self, generation: int, chunk: wire.GroupChunk | None) -> None:
        """Note a generation's chunk, unless it is old, or raise RemoteProtocolError."""
        n_samples = self._samples.n_samples
        if chunk is not None and not 0 < chunk.stop - chunk.start <= n_samples:
            raise RemoteProtocolError(
                f"invalid chunk: positions {chunk.start} to {chunk.stop} of {n_samples} samples"
            )
        if generation > self._generation:
            self._generation, self._next = generation, chunk

    def start(self, position: int) -> None:
        del position  # the chunk has it
        self.chunk = self._next

    def n_steps(self, start: int, stop: int) -> int:
        return -(-(stop - start) // self._mini_batch_size)

    def n_examples(self, n_steps: int, start: int, stop: int) -> int:
        """Return how many examples so many steps of a chunk take."""
        return min(n_steps * self._mini_batch_size, stop - start)

    def is_last(self, step: int) -> bool:
        chunk = self.chunk
        return chunk is not None and step == self.n_steps(chunk.start, chunk.stop) - 1

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a step; steps after the last are read ahead."""
        if self.chunk is None:
            return 0, 0
        for start, stop in ((self.chunk.start, self.chunk.stop), *self.ahead):
            n_steps = self.n_steps(start, stop)
            if step < n_steps:
                first = start + step * self._mini_batch_size
                return first, min(first + self._mini_batch_size, stop)
            step -= n_steps
        return stop, stop

    def batch(self, step: int) -> BatchIndices:
        start, stop = self.bounds(step)
        position = start % self._samples.n_samples
        return BatchIndices(position=position, indices=self._samples.at(start, stop))


# --- attempts ---


@final
@dataclass(slots=True, kw_only=True, eq=False)
class ChunkAttempt:
    """One attempt at one chunk: assigned, computed, held, pushed under its token, staged."""

    attempt: int
    start: int  # positions [start, stop)
    stop: int
    commit_token: int = 0
    loss: float | None = None  # once computed; NaN if it or the gradient is not finite
    seconds: Seconds = 0.0
    is_held: bool = False  # the ranks hold its sum: it is computed, and not staged yet
    is_pushed: bool = False  # of the only rank: its memory is free for another sum
    staged: bool = False


@final
class ChunkAttempts:
    def __init__(self, chunk_sizes: ChunkSizes) -> None:
        self._chunk_sizes = chunk_sizes
        self._version = 0
        self._attempts: dict[int, ChunkAttempt] = {}  # by attempt, in the order to compute
        self.series = 0  # of the coordinator
        self.evaluation = 0  # its number
        # Versions of the shards' values at which it is computed.
        self.versions: tuple[wire.ShardVersion, ...] = ()
        self.n_computed = 0  # examples computed for this evaluation

    @property
    def key(self) -> tuple[int, int]:
        return self.series, self.evaluation

    def __iter__(self) -> Iterator[ChunkAttempt]:
        return iter(self._attempts.values())

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, one: ChunkAttempt) -> bool:
        # Each series counts attempts from 1: the same number may be another attempt.
        return self._attempts.get(one.attempt) is one

    def update(self, message: wire.Assignment) -> bool:
        """Take an assignment; return whether it is newer. ValueError if a chunk does not exist."""
        if (message.series, message.version) <= (self.series, self._version):
            return False
        is_new = (message.series, message.evaluation) != self.key
        attempts: dict[int, ChunkAttempt] = {}
        for task in message.tasks:
            # An attempt that is already here keeps what it has computed.
            known = None if is_new else self._attempts.get(task.attempt)
            if known is None:
                start, stop = self._chunk_sizes.chunk_bounds(task.chunk_index, message.n_examples)
                known = ChunkAttempt(attempt=task.attempt, start=start, stop=stop)
            known.commit_token = task.commit_token
            attempts[task.attempt] = known
        self._attempts = attempts
        if is_new:
            self.n_computed = 0
        self.series, self._version = message.series, message.version
        self.evaluation, self.versions = message.evaluation, message.versions
        return True

    def clear(self) -> None:
        self._attempts = {}
        self.n_computed = 0

    @property
    def held(self) -> Sequence[ChunkAttempt]:
        return [one for one in self if one.is_held]

    @property
    def with_token(self) -> Sequence[ChunkAttempt]:
        return [one for one in self.held if one.commit_token]

    @property
    def to_compute(self) -> Sequence[ChunkAttempt]:
        if sum(not one.is_pushed for one in self.held) >= N_CHUNKS_HELD:
            return ()
        return [one for one in self if one.loss is None]

    def report(self, generation: int = 0) -> wire.WorkReport:
        results = tuple(
            wire.ChunkResult(
                attempt=one.attempt,
                n_examples=one.stop - one.start,
                loss=one.loss,
                seconds=one.seconds,
                staged=one.staged,
            )
            for one in self
            if one.loss is not None
        )
        return wire.WorkReport(
            generation=generation,
            series=self.series,
            version=self._version,
            evaluation=self.evaluation,
            n_computed=self.n_computed,
            results=results,
        )


# --- the leader ---


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOutcome:
    """What came of a chunk on the only rank of a worker."""

    loss: float  # sum over its examples; NaN if it or the gradient is not finite
    bad: tuple[int, int] = (0, 0)  # positions [start, stop) where that happened
    blame: str | None = None  # which sample causes it, if one is known


@final
class GroupTasks:
    """Tracks a worker's attempts and its `n_ranks` ranks; `plan` is that of the leader's own."""

    def __init__(
        self, config: WorkerConfig, *, plan: ChunkBatchPlan, n_ranks: int, await_begin: bool
    ) -> None:
        self._config = config
        self._plan = plan
        self._n_ranks = n_ranks
        self._attempts = ChunkAttempts(config.chunk_sizes)
        self._begun = not await_begin
        self._stopping = False
        self._incarnation = 0
        self._replica_generation = 0  # rises when a rank has restarted
        self._generation = 0  # of the group
        self._is_ready = False  # are all ranks ready, since one restarted?
        self._silences: dict[int, Silence] = {}  # of the other ranks
        self._current: ChunkAttempt | None = None  # the chunk of the group's generation
        self._n_counted = 0  # its examples that are counted as computed
        self._outcome: ChunkOutcome | None = None  # if this is the only rank
        self._began_at: Seconds | None = None  # when its first mini-batch began
        self._waiting: dict[int, set[int]] = {}  # by token: ranks that have not staged it
        self._is_due = True  # whether a report is due
        self._is_repeat = False  # and says nothing new
        # The coordinator bears twice the longest silence of a busy worker.
        self._backoff = Backoff(config.retry_seconds, config.retry_seconds_max / 2)

    def start(self, incarnation: int) -> None:
        self._incarnation = incarnation

    @property
    def idle(self) -> str | None:
        """The status word if there is nothing to do."""
        if not self._begun:
            return "waiting for begin"
        has_work = self._current is not None or self._attempts.to_compute
        return None if has_work else "waiting for work"

    def command(
        self, leader: Leader, message: wire.StartTraining | wire.Evaluate | wire.Stop, now: Seconds
    ) -> Outgoing:
        match message:
            case wire.StartTraining():
                self._begun = self._is_due = True
            case wire.Stop():
                self._stopping = True
                return leader.stop(now)
            case wire.Evaluate():
                pass  # evaluators do that
        return []

    def take(self, message: wire.Assignment) -> None:
        """Take an assignment; RemoteProtocolError if it names a chunk beyond the batch."""
        attempts = self._attempts
        generation = message.replica_incarnation, message.replica_generation
        if generation != (self._incarnation, self._replica_generation):
            return  # for another incarnation of the leader, or before a rank restarted
        if message.series < attempts.series:
            return  # from an earlier coordinator
        try:
            attempts.update(message)
        except ValueError as error:
            raise RemoteProtocolError(f"invalid assignment: {error}") from None
        self._is_due = True
        self._look_ahead()

    def note_alive(self, rank: int, now: Seconds) -> None:
        self._silences.setdefault(rank, Silence()).heard(now)

    def computed(self, outcome: ChunkOutcome) -> None:
        """The only rank of the worker has taken the last step of a chunk."""
        self._outcome = outcome

    def pushed(self, commit_token: int) -> None:
        """The only rank of the worker has sent the sum with this token."""
        for one in self._attempts.with_token:
            one.is_pushed |= one.commit_token == commit_token
        self._look_ahead()

    def staged(self, rank: int, commit_tokens: Sequence[int]) -> None:
        for one in self._attempts:
            waiting = self._waiting.get(one.commit_token)
            if waiting is None or one.commit_token not in commit_tokens:
                continue
            waiting.discard(rank)
            if not waiting:
                del self._waiting[one.commit_token]
                one.is_held, one.staged = False, True
                self._is_due = True

    def request_report(self) -> None:
        self._is_due = True

    # --- the group ---

    def report(
        self, leader: Leader, now: Seconds, *, has_opened: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Return what to report; `has_opened`: the generation's first mini-batch has begun."""
        if self._stopping:
            return [], []
        actions: list[Action] = []
        out = self._check_generation(leader, now)
        current = self._current
        if current is not None:
            self._count(current, leader)
            if has_opened and self._began_at is None:
                self._began_at = now
        if current is not None and current in self._attempts:
            if leader.is_complete:
                actions += self._finish_chunk(current, leader, now)
        elif current is not None:  # no longer assigned
            self._current = None
            out = self._begin(leader, now)
        if self._current is None and leader.is_running and self._attempts.to_compute:
            out = self._begin(leader, now)
        return actions, [*out, *self._pushes()]

    def _check_generation(self, leader: Leader, now: Seconds) -> Outgoing:
        out: Outgoing = []
        if not self._generation:
            self._generation = leader.generation
        # A restarted rank has lost its part of all sums: the replica is another worker
        # then, and tokens of pushes that are still in flight are void.
        if leader.generation != self._generation:
            self._replica_generation += 1
            self._attempts.clear()
            self._waiting.clear()
            self._current, self._is_ready = None, False
            out = self._new_generation(leader, now, None)
        if leader.is_running and not self._is_ready:
            self._is_ready = self._is_due = True
            self._silences = {rank: Silence(heard_at=now) for rank in range(1, self._n_ranks)}
        return out

    def _count(self, one: ChunkAttempt, leader: Leader) -> None:
        n_done = self._plan.n_examples(leader.steps, one.start, one.stop)
        self._attempts.n_computed += n_done - self._n_counted
        self._n_counted = n_done

    def _finish_chunk(self, one: ChunkAttempt, leader: Leader, now: Seconds) -> Sequence[Action]:
        outcome = self._outcome or _outcome_of_group(one, leader)
        one.loss, one.is_held = outcome.loss, math.isfinite(outcome.loss)
        one.seconds = 0.0 if self._began_at is None else now - self._began_at
        self._current, self._is_due = None, True
        if one.is_held:
            return []
        start, stop = outcome.bad
        text = (
            f"loss or gradient of positions {start} to {stop - 1} of the data is not finite: "
            f"{outcome.blame or 'check the model and its loss there'}"
        )
        return [Report(text=text, level="warning")]

    def _begin(self, leader: Leader, now: Seconds) -> Outgoing:
        attempts = self._attempts
        if not attempts.to_compute:
            return self._new_generation(leader, now, None)
        one = self._current = attempts.to_compute[0]
        self._began_at = self._outcome = None
        self._n_counted = 0
        chunk = wire.GroupChunk(
            series=attempts.series,
            evaluation=attempts.evaluation,
            versions=attempts.versions,
            attempt=one.attempt,
            start=one.start,
            stop=one.stop,
            keeps=tuple(held.attempt for held in attempts.held),
        )
        self._look_ahead()
        return self._new_generation(leader, now, chunk)

    def _look_ahead(self) -> None:
        # Other ranks know no chunk but the current one, and all read the same.
        if self._n_ranks == 1:
            left = (one for one in self._attempts.to_compute if one is not self._current)
            self._plan.ahead = [(one.start, one.stop) for one in left]

    def _new_generation(
        self, leader: Leader, now: Seconds, chunk: wire.GroupChunk | None
    ) -> Outgoing:
        plan = self._plan
        n_steps = 0 if chunk is None else plan.n_steps(chunk.start, chunk.stop)
        position = 0 if chunk is None else chunk.start
        out = leader.new_generation(now, position=position, limit=n_steps, chunk=chunk)
        self._generation = leader.generation
        plan.set_chunk(self._generation, chunk)
        return out

    # --- pushes ---

    def _pushes(self) -> Outgoing:
        out: Outgoing = []
        commit_tokens: set[int] = set()
        for one in self._attempts.with_token:
            commit_tokens.add(one.commit_token)
            if one.commit_token not in self._waiting:
                self._waiting[one.commit_token] = set(range(self._n_ranks))
                out += self._push(one)
        for commit_token in self._waiting.keys() - commit_tokens:
            del self._waiting[commit_token]  # no longer wanted
        return out

    def _push(self, one: ChunkAttempt) -> Outgoing:
        message = wire.PushChunk(
            series=self._attempts.series, attempt=one.attempt, commit_token=one.commit_token
        )
        return [(m, message) for m in sorted(self._waiting[one.commit_token])]

    # --- reports ---

    def resend(self) -> Outgoing:
        """Return the messages that ranks have not answered."""
        self._is_due = self._is_repeat = True
        return [
            message
            for one in self._attempts.with_token
            if one.commit_token in self._waiting
            for message in self._push(one)
        ]

    def due_report(self, now: Seconds) -> Sequence[Action]:
        """Return the report to the coordinator, if one is due, and the timer of the next."""
        if not self._is_due:
            return []
        if self._is_repeat:
            self._backoff.repeat(now)
        else:
            self._backoff.start(now)
        self._is_due = self._is_repeat = False
        due = self._backoff.due if self._attempts else now + self._config.retry_seconds_max
        actions: list[Action] = [SetTimer(name=TIMER, at=due)]
        if self._begun and self._is_ready and not self._stopping and self._all_alive(now):
            report = self._attempts.report(self._replica_generation)
            actions.append(Send(receiver=COORDINATOR, message=report))
        return actions

    def _all_alive(self, now: Seconds) -> bool:
        longest = _SILENT_PERIODS * self._config.retry_seconds
        return all(silence.silent(now) <= longest for silence in self._silences.values())


def _outcome_of_group(one: ChunkAttempt, leader: Leader) -> ChunkOutcome:
    done = leader.generation_done()
    is_finite = math.isfinite(leader.square) and not done.no_loss
    blame = "check the model and its loss there, and the logs of the ranks"
    loss = done.loss if is_finite else math.nan
    return ChunkOutcome(loss=loss, bad=(one.start, one.stop), blame=blame)
