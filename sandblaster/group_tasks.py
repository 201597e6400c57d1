"""Coordinator's protocol on the leader of a model-parallel replica: one worker made of ranks.

    coordinator     leader                               ranks
      | Assignment -> | StartEpoch, GrantSteps ----------> |  one generation per chunk
      | <- WorkReport | <------------- all steps are done  |
      | Assignment -> | PushChunk -----------------------> |  with the commit token
      | <- WorkReport | <------------------- ChunkStaged   |  of all ranks

A chunk is computed when all ranks have taken all steps of its generation. While a rank
is silent the leader reports nothing, so the chunks go to other workers. A chunk that an
assignment no longer names is dropped at once, by a new generation.
"""

import math
from collections.abc import Sequence
from typing import Final, final

from distbelief.core.reliable import Silence
from distbelief.data.sharding import Samples
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Assignment, ChunkOrder, Evaluate, PushChunk, StartTraining, Stop
from distbelief.roles.role import Action, Report, Seconds, Send, SetTimer
from distbelief.worker.batches import BatchIndices
from distbelief.worker.group import GroupLeader, Outgoing
from sandblaster.chunks import COORDINATOR, ChunkSizes
from sandblaster.worker import (
    N_CHUNKS_HELD,
    BatchWorkerConfig,
    ChunkAttempt,
    ChunkAttempts,
    ChunkSum,
    MiniBatchOutcome,
)


@final
class ChunkBatchPlan:
    """The mini-batches of the chunk of one generation, one in each step."""

    def __init__(self, samples: Samples, *, mini_batch_size: int) -> None:
        # The chunk of the present generation; None if there is none.
        self.order: ChunkOrder | None = None
        self._samples = samples
        self._mini_batch_size = mini_batch_size
        self._generation = 0
        self._next: ChunkOrder | None = None  # of the generation that begins

    def set_order(self, generation: int, order: ChunkOrder | None) -> None:
        """Note the chunk of a generation; messages of older generations change nothing.

        Raises:
            RemoteProtocolError: the positions cannot be those of a chunk.
        """
        n_samples = self._samples.n_samples
        if order is not None and not 0 < order.stop - order.start <= n_samples:
            raise RemoteProtocolError(
                f"invalid chunk: positions {order.start} to {order.stop} of {n_samples} samples"
            )
        if generation > self._generation:
            self._generation, self._next = generation, order

    def start(self, position: int) -> None:
        del position  # the order has it
        self.order = self._next

    def n_steps(self, order: ChunkOrder) -> int:
        return -(-(order.stop - order.start) // self._mini_batch_size)

    def is_last(self, step: int) -> bool:
        return self.order is not None and step == self.n_steps(self.order) - 1

    def batch(self, step: int) -> BatchIndices:
        order = self.order
        start = stop = 0
        if order is not None:
            start = min(order.start + step * self._mini_batch_size, order.stop)
            stop = min(start + self._mini_batch_size, order.stop)
        position = start % self._samples.n_samples
        return BatchIndices(position=position, indices=self._samples.at(start, stop))


TIMER: Final = "group:report"

_SILENT_PERIODS: Final = 4.0
"""Report periods after which a silent rank counts as missing."""

_SUM_ON_RANKS = ChunkSum((), ())


@final
class GroupTasks:
    """Tracks the attempts of one model-parallel replica and how far its ranks are.

    Args:
        config: Settings of the worker.
        plan: The batch plan of the leader's own rank.
        n_ranks: Ranks of the replica, the leader included.
        await_begin: Wait for `StartTraining` before it asks for work.
    """

    def __init__(
        self, config: BatchWorkerConfig, *, plan: ChunkBatchPlan, n_ranks: int, await_begin: bool
    ) -> None:
        self._config = config
        self._plan = plan
        self._n_ranks = n_ranks
        # The ranks divide a chunk into mini-batches: here each chunk is one of them.
        self._attempts = ChunkAttempts(ChunkSizes(mini_batch_size=config.chunk_sizes.chunk_size))
        self._begun = not await_begin
        self._stopping = False
        self._incarnation = 0
        self._replica_generation = 0  # rises when a rank has restarted
        self._generation = 0  # of the group
        self._is_ready = False  # are all ranks ready, since one restarted?
        self._silences: dict[int, Silence] = {}  # of the other ranks
        self._current: ChunkAttempt | None = None  # the chunk of the group's generation
        self._began_at: Seconds | None = None  # when its first mini-batch began
        self._waiting: dict[int, set[int]] = {}  # by token: ranks that have not staged it
        self._is_due = True  # whether a report is due

    def start(self, incarnation: int) -> None:
        self._incarnation = incarnation

    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        match message:
            case StartTraining():
                self._begun = self._is_due = True
            case Stop():
                self._stopping = True
                return leader.stop(now)
            case Evaluate():
                pass  # evaluators do that
        return []

    def take(self, message: Assignment) -> None:
        """Take an assignment.

        Raises:
            RemoteProtocolError: it names a chunk that the batch does not have.
        """
        attempts = self._attempts
        generation = message.replica_incarnation, message.replica_generation
        if generation != (self._incarnation, self._replica_generation):
            return  # for another incarnation of the leader, or before a rank restarted
        if message.epoch < attempts.epoch:
            return  # from an earlier coordinator
        try:
            attempts.update(message)
        except ValueError as error:
            raise RemoteProtocolError(f"invalid assignment: {error}") from None
        self._is_due = True

    def note_alive(self, rank: int, now: Seconds) -> None:
        self._silences.setdefault(rank, Silence()).heard(now)

    def staged(self, rank: int, commit_tokens: Sequence[int]) -> None:
        for one in self._attempts:
            waiting = self._waiting.get(one.commit_token)
            if waiting is None or one.commit_token not in commit_tokens:
                continue
            waiting.discard(rank)
            if not waiting:
                del self._waiting[one.commit_token]
                one.total, one.staged = None, True
                self._is_due = True

    def request_report(self) -> None:
        self._is_due = True

    # --- the group ---

    def report(
        self, leader: GroupLeader, now: Seconds, *, has_opened: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Return what follows from the state of the group.

        Args:
            leader: The leader of the group.
            now: The time.
            has_opened: Whether the first mini-batch of this generation has begun.
        """
        if self._stopping:
            return [], []
        actions: list[Action] = []
        out = self._check_generation(leader, now)
        current = self._current
        if current is not None and has_opened and self._began_at is None:
            self._began_at = now
        if current is not None and current in self._attempts:
            if leader.is_complete:
                actions += self._finish_chunk(current, leader, now)
        elif current is not None:  # no longer assigned
            self._current = None
            out = self._begin(leader, now)
        if self._current is None and leader.is_running and self._to_compute:
            out = self._begin(leader, now)
        return actions, [*out, *self._pushes()]

    def _check_generation(self, leader: GroupLeader, now: Seconds) -> Outgoing:
        out: Outgoing = []
        # A restarted rank has lost its part of all sums: the replica is another worker
        # then, and tokens of pushes that are still in flight are void.
        if leader.generation != self._generation:
            is_first = not self._generation
            self._generation = leader.generation
            self._replica_generation += 1
            self._attempts.clear()
            self._waiting.clear()
            self._current, self._is_ready = None, False
            if not is_first:
                out = self._new_generation(leader, now, None)
        if leader.is_running and not self._is_ready:
            self._is_ready = self._is_due = True
            self._silences = {rank: Silence(heard_at=now) for rank in range(1, self._n_ranks)}
        return out

    def _finish_chunk(
        self, one: ChunkAttempt, leader: GroupLeader, now: Seconds
    ) -> Sequence[Action]:
        done = leader.generation_done()
        start, stop = one.next_mini_batch
        is_finite = math.isfinite(leader.square) and not done.no_loss
        loss = done.loss if is_finite else math.nan
        total = _SUM_ON_RANKS if is_finite else None
        began_at = now if self._began_at is None else self._began_at
        one.computed(MiniBatchOutcome(loss=loss, total=total), seconds=now - began_at)
        self._attempts.n_computed += stop - start
        self._current, self._is_due = None, True
        if is_finite:
            return []
        text = (
            f"loss or gradient of positions {start} to {stop - 1} of the data is not "
            "finite: check the model and its loss there, and the logs of the ranks"
        )
        return [Report(text=text, level="warning")]

    @property
    def _to_compute(self) -> Sequence[ChunkAttempt]:
        return self._attempts.to_compute(n_held_max=N_CHUNKS_HELD)

    def _begin(self, leader: GroupLeader, now: Seconds) -> Outgoing:
        to_compute = self._to_compute
        if not to_compute:
            return self._new_generation(leader, now, None)
        attempts = self._attempts
        self._current, self._began_at = to_compute[0], None
        start, stop = to_compute[0].next_mini_batch
        keeps = tuple(one.attempt for one in attempts if one.total is not None)
        order = ChunkOrder(
            epoch=attempts.epoch,
            evaluation=attempts.evaluation,
            versions=attempts.versions,
            attempt=to_compute[0].attempt,
            start=start,
            stop=stop,
            keeps=keeps,
        )
        return self._new_generation(leader, now, order)

    def _new_generation(
        self, leader: GroupLeader, now: Seconds, order: ChunkOrder | None
    ) -> Outgoing:
        plan = self._plan
        n_steps = 0 if order is None else plan.n_steps(order)
        position = 0 if order is None else order.start
        out = leader.new_generation(now, position=position, limit=n_steps, order=order)
        self._generation = leader.generation
        plan.set_order(self._generation, order)
        return out

    # --- pushes ---

    def _pushes(self) -> Outgoing:
        out: Outgoing = []
        for one in self._with_token:
            if one.commit_token not in self._waiting:
                self._waiting[one.commit_token] = set(range(self._n_ranks))
                out += self._push(one)
        commit_tokens = {one.commit_token for one in self._with_token}
        for commit_token in [
            commit_token for commit_token in self._waiting if commit_token not in commit_tokens
        ]:
            del self._waiting[commit_token]  # no longer wanted
        return out

    @property
    def _with_token(self) -> list[ChunkAttempt]:
        return [one for one in self._attempts if one.commit_token and one.total is not None]

    def _push(self, one: ChunkAttempt) -> Outgoing:
        message = PushChunk(
            epoch=self._attempts.epoch, attempt=one.attempt, commit_token=one.commit_token
        )
        return [(m, message) for m in sorted(self._waiting[one.commit_token])]

    # --- reports ---

    def resend(self) -> Outgoing:
        """Return the messages that ranks have not answered."""
        self._is_due = True
        return [
            message
            for one in self._with_token
            if one.commit_token in self._waiting
            for message in self._push(one)
        ]

    def due_report(self, now: Seconds) -> Sequence[Action]:
        """Return the report to the coordinator, if one is due, and the timer of the next."""
        if not self._is_due:
            return []
        self._is_due = False
        config = self._config
        is_idle = not any(True for _ in self._attempts)
        pause = config.retry_seconds_max if is_idle else config.retry_seconds
        actions: list[Action] = [SetTimer(name=TIMER, at=now + pause)]
        if self._begun and self._is_ready and not self._stopping and self._all_alive(now):
            report = self._attempts.report_of(self._replica_generation)
            actions.append(Send(receiver=COORDINATOR, message=report))
        return actions

    def _all_alive(self, now: Seconds) -> bool:
        longest = _SILENT_PERIODS * self._config.retry_seconds
        return all(silence.silent(now) <= longest for silence in self._silences.values())
