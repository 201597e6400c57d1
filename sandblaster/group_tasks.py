"""What the leader of a replica of several machines does for the coordinator.

    coordinator     foreman                              machines
      | Assignment -> |  a life about the first set ------> |  (leader: Gather, Proceed)
      | <---- Account |  <------------------- all have taken all steps
      | Assignment -> |  PushChunk ------------------------> |
      | <---- Account |  <----------------------------- ChunkStaged of all

To the coordinator the replica is one worker. Rules:

* A set is computed when every machine has taken all steps of one life about it, and its
  grant is pushed when every machine says that its shards hold its part.
* If a machine has begun anew, what it had summed is lost: all tries are forgotten, and
  the replica is another one, by the `life` that it tells of. What others still push is
  void. It speaks when all have gathered.
* While a machine is silent, so is the foreman: the sets are dealt to others.
* A set that is not named any more is given up at once, by another life.
"""

import math
from collections.abc import Sequence
from typing import Final, final

from distbelief.data.sharding import Samples
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Assignment, ChunkOrder, Evaluate, PushChunk, StartTraining, Stop
from distbelief.roles.role import Action, Report, Seconds, Send, SetTimer
from distbelief.worker.batches import BatchIndices
from distbelief.worker.group_leader import GroupLeader, Outgoing
from sandblaster.chunks import COORDINATOR, ChunkSizes
from sandblaster.worker import (
    N_CHUNKS_HELD,
    BatchWorkerConfig,
    ChunkAttempt,
    ChunkAttempts,
    ChunkSum,
    MiniBatchOutcome,
)


# Which samples the machines of a replica compute: in each life, those of one set.


@final
class ChunkBatchPlan:
    """The portions of the set that a life is about, one in each step.

    Args:
        samples: The order of the data.
        portion_size: Examples of a portion; the last of a set may have fewer.

    Attributes:
        order: What the present life is about; None if about nothing.
    """

    def __init__(self, samples: Samples, *, mini_batch_size: int) -> None:
        self.order: ChunkOrder | None = None
        self._samples = samples
        self._portion_size = mini_batch_size
        self._generation = 0
        self._next: ChunkOrder | None = None  # of the life that begins

    def set_order(self, life: int, order: ChunkOrder | None) -> None:
        """A life is about this; words of older lives say nothing.

        Raises:
            RemoteProtocolError: no set is like that.
        """
        n_samples = self._samples.n_samples
        if order is not None and not 0 < order.stop - order.start <= n_samples:
            raise RemoteProtocolError(
                f"a set of positions {order.start} to {order.stop} was ordered, of "
                f"{n_samples} samples"
            )
        if life > self._generation:
            self._generation, self._next = life, order

    def start(self, position: int) -> None:
        """Begin the life that is known of."""
        del position  # the order says it
        self.order = self._next

    def n_steps(self, order: ChunkOrder) -> int:
        """Return how many steps a life about this has."""
        return -(-(order.stop - order.start) // self._portion_size)

    def is_last(self, step: int) -> bool:
        """Return whether the present life ends with this step."""
        return self.order is not None and step == self.n_steps(self.order) - 1

    def batch(self, step: int) -> BatchIndices:
        """Return the samples of this step; none beyond the last."""
        order = self.order
        start = stop = 0
        if order is not None:
            start = min(order.start + step * self._portion_size, order.stop)
            stop = min(start + self._portion_size, order.stop)
        position = start % self._samples.n_samples
        return BatchIndices(position=position, indices=self._samples.at(start, stop))


TIMER: Final = "foreman:say"

_SILENT_PERIODS: Final = 4.0
"""Times the pause between two words: a machine that is silent for so long is missed."""

_SUM_ON_RANKS = ChunkSum((), ())


@final
class GroupTasks:
    """The tries of one replica, and how far its machines have come.

    Args:
        config: How it works.
        course: Of the leader's own machine.
        n_machines: Of the replica, the leader included.
        await_begin: Wait for `StartTraining` before it asks for work.
    """

    def __init__(
        self, config: BatchWorkerConfig, *, plan: ChunkBatchPlan, n_ranks: int, await_begin: bool
    ) -> None:
        self._config = config
        self._plan = plan
        self._n_ranks = n_ranks
        # Its machines cut a set into portions: to it a set is one.
        self._attempts = ChunkAttempts(ChunkSizes(mini_batch_size=config.chunk_sizes.chunk_size))
        self._begun = not await_begin
        self._stopping = False
        self._incarnation = 0
        self._replica_generation = 0  # rises when a machine has begun anew
        self._generation = 0  # of the group
        self._is_ready = False  # have all gathered, since a machine began anew?
        self._heard_at: dict[int, Seconds] = {}
        self._current: ChunkAttempt | None = None  # what the group's life is about
        self._began_at: Seconds | None = None  # when its first portion was begun
        self._waiting: dict[int, set[int]] = {}  # by grant: machines not done with it
        self._is_due = True  # something is to be said

    # -------------------------------------------------------------------------- events

    def start(self, incarnation: int) -> None:
        """Begin."""
        self._incarnation = incarnation

    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        """Obey the supervisor."""
        match message:
            case StartTraining():
                self._begun = self._is_due = True
            case Stop():
                self._stopping = True
                return leader.stop(now)
            case Evaluate():
                pass  # the evaluators are asked
        return []

    def take(self, message: Assignment) -> None:
        """The coordinator says what is to be done.

        Raises:
            RemoteProtocolError: that cannot be.
        """
        attempts = self._attempts
        life = message.replica_incarnation, message.replica_life
        if life != (self._incarnation, self._replica_generation):
            return  # meant for another life
        if message.epoch < attempts.epoch:
            return  # of a coordinator that is over
        try:
            attempts.update(message)
        except ValueError as error:
            raise RemoteProtocolError(f"an impossible assignment: {error}") from None
        self._is_due = True

    def note_alive(self, rank: int, now: Seconds) -> None:
        """A machine lives."""
        self._heard_at[rank] = now

    def staged(self, rank: int, grants: Sequence[int]) -> None:
        """Of these grants a machine's parts are on all shards that it pushes to."""
        for one in self._attempts:
            waiting = self._waiting.get(one.grant)
            if waiting is None or one.grant not in grants:
                continue
            waiting.discard(rank)
            if not waiting:
                del self._waiting[one.grant]
                one.total, one.staged = None, True
                self._is_due = True

    def request_report(self) -> None:
        """Let it say how it stands."""
        self._is_due = True

    # ----------------------------------------------------------------------- the group

    def report(
        self, leader: GroupLeader, now: Seconds, *, has_opened: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Return what follows from what the group has done.

        Args:
            leader: Of the group.
            now: The time.
            has_opened: Whether the first portion of this life was begun.
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
        elif current is not None:
            self._current = None
            out = self._begin(leader, now)
        if self._current is None and leader.is_running and self._to_compute:
            out = self._begin(leader, now)
        return actions, [*out, *self._pushes()]

    def _check_generation(self, leader: GroupLeader, now: Seconds) -> Outgoing:
        """See whether a machine has begun anew, and whether all are there."""
        out: Outgoing = []
        if leader.life != self._generation:
            is_first = not self._generation
            self._generation = leader.life
            self._replica_generation += 1
            self._attempts.clear()
            self._waiting.clear()
            self._current, self._is_ready = None, False
            if not is_first:
                out = self._new_generation(leader, now, None)
        if leader.is_running and not self._is_ready:
            self._is_ready = self._is_due = True
            self._heard_at = dict.fromkeys(range(1, self._n_ranks), now)
        return out

    def _finish_chunk(
        self, one: ChunkAttempt, leader: GroupLeader, now: Seconds
    ) -> Sequence[Action]:
        """All machines have taken all steps: the set is summed."""
        done = leader.life_done()
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
            "finite: look at the model and its loss there, or at what the machines say"
        )
        return [Report(text=text, level="warning")]

    @property
    def _to_compute(self) -> Sequence[ChunkAttempt]:
        return self._attempts.to_compute(n_held_max=N_CHUNKS_HELD)

    def _begin(self, leader: GroupLeader, now: Seconds) -> Outgoing:
        """Begin a life about the next set, or about none."""
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
        out = leader.new_life(now, position=position, limit=n_steps, order=order)
        self._generation = leader.life
        plan.set_order(self._generation, order)
        return out

    # ---------------------------------------------------------------------- the pushes

    def _pushes(self) -> Outgoing:
        """Return the words that let a sum be pushed that was granted just now."""
        out: Outgoing = []
        for one in self._with_token:
            if one.grant not in self._waiting:
                self._waiting[one.grant] = set(range(self._n_ranks))
                out += self._push(one)
        grants = {one.grant for one in self._with_token}
        for grant in [grant for grant in self._waiting if grant not in grants]:
            del self._waiting[grant]  # not wanted any more
        return out

    @property
    def _with_token(self) -> list[ChunkAttempt]:
        return [one for one in self._attempts if one.grant and one.total is not None]

    def _push(self, one: ChunkAttempt) -> Outgoing:
        message = PushChunk(epoch=self._attempts.epoch, attempt=one.attempt, grant=one.grant)
        return [(m, message) for m in sorted(self._waiting[one.grant])]

    # ----------------------------------------------------------------------- the words

    def resend(self) -> Outgoing:
        """Return what machines have to hear again: what they have not answered."""
        self._is_due = True
        return [
            message
            for one in self._with_token
            if one.grant in self._waiting
            for message in self._push(one)
        ]

    def due_report(self, now: Seconds) -> Sequence[Action]:
        """Tell the coordinator how it stands, if that is due; and after a while."""
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
        silent = now - _SILENT_PERIODS * self._config.retry_seconds
        return all(at >= silent for at in self._heard_at.values())
