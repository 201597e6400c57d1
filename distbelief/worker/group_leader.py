"""Machine 0 of a group: it gathers the machines, and lets them take steps.

    leader                     every machine (itself too)
      | Gather --------------->  |   a new life: give up the step under way
      | <-------------- Gathered |   so far, my pushes are applied
      | Proceed -------------->  |   begin there in the data, take two steps
      | <--------------- Stepped |   one is done
      | Proceed -------------->  |   one more: nobody is ever two steps ahead;
      |                          |   and the gradient of the one done is so long
      |                          |   ...
      | Proceed (last) ------->  |   no more after these
      | <------- Stepped (ended) |   and all that I have pushed is applied

A new life begins with every new incarnation of any machine. Whatever a machine had not
pushed is computed again: the life begins where the machine that has pushed least left
off, and those that have pushed more push nothing until they are past that.

Nobody goes before all have ended; where one is lost for good the others can only end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from distbelief.errors import RemoteProtocolError
from distbelief.protocol import ChunkOrder, GrantSteps, Message, RankReady, StartEpoch, StepsDone
from distbelief.roles.role import Seconds


# How far a group of machines has come.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepsBelow:
    """What a group has done in all lives of its leader.

    Attributes:
        steps: Taken by all.
        position: In the data.
        loss: Sum over `samples`.
        samples: Those whose loss is finite.
        no_loss: Those whose loss is not.
    """

    steps: int = 0
    position: int = 0
    loss: float = 0.0
    samples: int = 0
    no_loss: int = 0


GENERATION_BITS: Final = 32
"""Life k of incarnation i of the leader is i << 32 | k: no two are equal."""

AHEAD: Final = 2
"""Steps that a machine may be ahead of the last one that all have taken."""

STOP_SECONDS: Final = 20.0
"""After a Stop, without anybody's step, until the end is made without one."""

Outgoing = list[tuple[int, Message]]


@final
class GroupLeader:
    """What machine 0 does besides its own part.

    Args:
        n_machines: Of the group, itself included.
        plan: Hash of the plan.
        steps_max: Steps of all lives, those that are taken again counted once; None:
            no end.
        n_steps: Tells how many steps there are from one position to another.
        limit: Steps of the first life; None: no end.
    """

    def __init__(
        self,
        n_machines: int,
        *,
        plan: str,
        steps_max: int | None = None,
        n_steps: Callable[[int, int], int] | None = None,
        limit: int | None = None,
    ) -> None:
        self._n_ranks = n_machines
        self._plan = plan
        self._steps_max = steps_max
        self._n_steps = n_steps
        self._first_position: int | None = None  # position of the first life
        self.life = 0
        self._is_begun = False
        self._samples_max: int | None = None  # no step begins then
        self._stopping = False
        self._last_step: int | None = None  # no steps of this life beyond
        self._running = False  # all have gathered, and been told where to begin
        self._progress_at: Seconds = 0.0
        self._incarnations: dict[int, int] = {}
        self._ready: dict[int, RankReady] = {}
        self._done: dict[int, StepsDone] = {}
        self._ended: set[int] = set()
        self._released: set[int] = set()  # of these: they know that I know
        self._missing: set[int] = set()
        self._n_reduced = 0  # steps of this life that all have computed
        self._square = 0.0  # of the gradient of the last of them
        self._sample: int | None = None  # to blame, if that is not finite
        self._n_before = 0  # steps of former lives
        self._position = 0  # of this life's first step
        self._wanted_position: int | None = None
        self._limit = limit
        self._order: ChunkOrder | None = None

    # ----------------------------------------------------------------------- commands

    def start(self, incarnation: int, now: Seconds) -> Outgoing:
        """Begin the first life."""
        self.life = incarnation << GENERATION_BITS
        return self.new_life(now, limit=self._limit)

    def new_life(
        self,
        now: Seconds,
        *,
        position: int | None = None,
        limit: int | None = None,
        order: ChunkOrder | None = None,
    ) -> Outgoing:
        """Gather all machines anew.

        Args:
            now: The time.
            position: Where to begin; None: where the machines' pushes end.
            limit: Steps of this life; None: no end.
            order: What it is about, if not about the next samples. If a machine is lost
                it is given up: the next life has none.
        """
        self._n_before += self.steps
        self.life += 1
        self._running = False
        self._n_reduced, self._square, self._sample = 0, 0.0, None
        self._last_step = 0 if self._stopping else None
        self._wanted_position, self._limit, self._order = position, limit, order
        self._progress_at = now
        self._ready.clear()
        self._done.clear()
        self._ended &= self._released
        return self._start_epoch()

    def begin(self, now: Seconds, *, samples: int | None = None) -> Outgoing:
        """Let steps be taken, if all are there; none once there are so many samples."""
        granted = self.granted
        self._is_begun, self._samples_max = True, samples
        if self._running:
            return self._grant_all() if self.granted > granted else []
        return self._grant_if_ready(now)

    def stop(self, now: Seconds) -> Outgoing:
        """Let no further steps be taken."""
        if not self._stopping:
            self._last_step = self.granted  # what is granted may have begun
        self._stopping = True
        self._progress_at = now
        return self._grant_all() if self._running else self._grant_if_ready(now)

    # ------------------------------------------------------------------------- events

    def joined(self, rank: int, incarnation: int, now: Seconds) -> Outgoing:
        """A machine lives, perhaps anew."""
        known = self._incarnations.get(rank, 0)
        if incarnation <= known:
            return []
        self._incarnations[rank] = incarnation
        if not known:
            return self._start_epoch({rank})
        self._missing.discard(rank)
        self._ended.discard(rank)
        self._released.discard(rank)
        return self.new_life(now, position=self._wanted_position, limit=self._limit)

    def lost(self, rank: int, now: Seconds) -> Outgoing:
        """A machine will not come back: without it there are no further steps."""
        if rank in self._released or rank in self._missing:
            return []
        are_taken = self._running and self.is_last and self.steps >= self.granted
        self._missing.add(rank)
        self._stopping = True
        return self._grant_all() if are_taken else self.new_life(now)

    def hear(self, rank: int, incarnation: int, message: Message, now: Seconds) -> Outgoing:
        """A machine has said something.

        Raises:
            RemoteProtocolError: it is none of what machines say to their leader.
        """
        out = self.joined(rank, incarnation, now)
        if incarnation < self._incarnations[rank]:
            return out
        match message:
            case RankReady():
                return [*out, *self._on_rank_ready(rank, message, now)]
            case StepsDone():
                return [*out, *self._on_steps_done(rank, message, now)]
            case _:
                raise RemoteProtocolError(f"rank {rank} sent its leader {type(message).__name__}")

    def remind(self, now: Seconds) -> Outgoing:
        """Ask again who has not answered; end without who does not."""
        waited = now - self._progress_at
        if self._stopping and waited > STOP_SECONDS:
            if self._running and not self.all_ended:
                return self.new_life(now)  # in which there is nothing to do but end
            if not self._running:
                self._missing |= self.waiting_for
                return self._grant_if_ready(now)
        return [] if self._running else self._start_epoch()

    def _on_rank_ready(self, rank: int, message: RankReady, now: Seconds) -> Outgoing:
        if message.life == self.life and self._running:
            return [(rank, self._grant_for(rank))]  # it has not heard of it
        if message.life == self.life:
            self._ready.setdefault(rank, message)
            return self._grant_if_ready(now)
        # It was in another life, or in none.
        return [] if rank in self._ready else self._start_epoch({rank})

    def _on_steps_done(self, rank: int, message: StepsDone, now: Seconds) -> Outgoing:
        if message.life != self.life or not self._running:
            return []
        before, granted = self._done.get(rank), self.granted
        if before is not None and message.steps < before.steps:
            return []
        self._done[rank] = message
        self._progress_at = now
        if message.ended:
            self._ended.add(rank)
            if self._all_taken and not self._released:
                return self._grant_all()
            return [(rank, self._grant_for(rank))]
        if self._reduce() or self.granted > granted:
            return self._grant_all()
        # Who says the same again has not heard of what it may do.
        repeated = before is not None and message.steps == before.steps
        return [(rank, self._grant_for(rank))] if repeated else []

    def _reduce(self) -> bool:
        """Add up what all have said of a step that all have computed, if they have."""
        if self.steps <= self._n_reduced:
            return False
        self._n_reduced = self.steps
        # Never in the order of arrival.
        messages = [self._done[rank] for rank in sorted(self._done)]
        self._square = sum((message.square for message in messages), start=0.0)
        seen = (message.sample for message in messages)
        self._sample = next((sample for sample in seen if sample is not None), None)
        return True

    # ------------------------------------------------------------------------- figures

    @property
    def steps(self) -> int:
        """Steps of this life that all machines have taken."""
        if not self._running:
            return 0
        taken = [
            self._done[rank].steps if rank in self._done else 0
            for rank in range(self._n_ranks)
            if rank not in self._missing
        ]
        return min(taken)

    @property
    def granted(self) -> int:
        """Steps of this life that may be taken."""
        if not (self._running and self._is_begun):
            return 0
        limits = [self.steps + AHEAD]
        if self._limit is not None:
            limits.append(self._limit)
        if self._steps_max is not None:
            limits.append(max(self._steps_max - self._n_before, 0))
        if self._last_step is not None:
            limits.append(self._last_step)
        if self._samples_max is not None and self._n_steps is not None:
            limits.append(self._n_steps(self._position, self._samples_max))
        return min(limits)

    @property
    def is_held(self) -> bool:
        """Whether all have taken the steps that they may so far."""
        return self._samples_max is not None and self._running and self.steps >= self.granted

    @property
    def is_last(self) -> bool:
        """Whether no further steps will be granted."""
        over = self._steps_max is not None and (self._n_before + self.granted >= self._steps_max)
        return self._stopping or over

    @property
    def is_complete(self) -> bool:
        """Whether all have taken all the steps that this life has."""
        return self._running and self.steps == self._limit

    @property
    def clock(self) -> float:
        """Mean over the machines of the clocks of the values that they use."""
        clocks = [s.clock for s in self._done.values() if s.clock >= 0]
        return sum(clocks) / len(clocks) if clocks else 0.0

    @property
    def is_running(self) -> bool:
        """Whether all have gathered."""
        return self._running

    @property
    def waiting_for(self) -> frozenset[int]:
        """Who has not gathered."""
        here = {*self._ready, *self._released, *self._missing}
        return frozenset(range(self._n_ranks)) - here

    @property
    def slowest(self) -> int | None:
        """Who has taken the fewest steps of this life."""
        here = set(range(self._n_ranks)) - self._missing
        taken = {m: self._done[m].steps if m in self._done else 0 for m in here}
        return min(taken, key=lambda m: (taken[m], m)) if self._running else None

    @property
    def all_ended(self) -> bool:
        """Whether nobody is left."""
        return len(self._released | self._missing) == self._n_ranks

    @property
    def _all_taken(self) -> bool:
        """Whether nobody has anything left to do."""
        return len(self._ended | self._missing) == self._n_ranks

    @property
    def missing(self) -> frozenset[int]:
        """Without whom the end was made."""
        return frozenset(self._missing - self._ended)

    @property
    def square(self) -> float:
        """Of the gradient of the last step that all have computed."""
        return self._square

    def life_done(self) -> StepsBelow:
        """Return what all have done in this life; its loss may be a step ahead."""
        # Never in the order of arrival: same answers, same bits.
        messages = [self._done[rank] for rank in sorted(self._done)]
        return StepsBelow(
            steps=self.steps,
            position=self._position,
            loss=sum(message.loss for message in messages),
            samples=sum(message.samples for message in messages),
            no_loss=sum(message.no_loss for message in messages),
        )

    # --------------------------------------------------------------------------- words

    def _start_epoch(self, ranks: frozenset[int] | set[int] | None = None) -> Outgoing:
        wanted = self.waiting_for if ranks is None else ranks
        message = StartEpoch(life=self.life, plan=self._plan, order=self._order)
        return [(rank, message) for rank in sorted(wanted)]

    def _grant_if_ready(self, now: Seconds) -> Outgoing:
        """Begin to take steps once all are there."""
        ready = self._is_begun or self._stopping
        if self._running or not ready or self.waiting_for:
            return []
        self._running = True
        self._progress_at = now
        pushed = [message.samples for message in self._ready.values() if message.pushes]
        if self._wanted_position is not None:
            self._position = self._wanted_position
        elif pushed:
            self._position = min(pushed)
        if self._first_position is None:
            self._first_position = self._position
        elif self._n_steps is not None:  # what is not pushed is taken again
            self._n_before = self._n_steps(self._first_position, self._position)
        return self._grant_all()

    def _grant_all(self) -> Outgoing:
        here = sorted(set(range(self._n_ranks)) - self._missing)
        return [(rank, self._grant_for(rank)) for rank in here]

    def _grant_for(self, rank: int) -> GrantSteps:
        # Nobody goes before all have ended: else steps may have to be taken again.
        if self._all_taken:
            self._released.add(rank)
        return GrantSteps(
            life=self.life,
            position=self._position,
            steps=self.granted,
            is_last=self.is_last,
            ended=rank in self._released,
            agreed=self._n_reduced,
            square=self._square,
            sample=self._sample,
        )
