"""A group of ranks, each with one partition of a model: their names, and what the leader grants.

Rank M of replica R is called "replica-R.M". The ranks that evaluate form a group too:
"evaluator" (which the supervisor asks), "evaluator.1", "evaluator.2", ...

    leader (on rank 0)         every rank (itself too)
      | StartGeneration ------>  |   new generation: drop the current step
      | <------------ RankReady  |   all my pushes up to this sample are applied
      | GrantSteps ----------->  |   begin at this position, take two steps
      | <------------ StepsDone  |   one is done; its gradient has this sum of squares here
      | GrantSteps ----------->  |   one more; the gradient of the finished one has this norm
      | GrantSteps (last) ---->  |   no more after these
      | <---- StepsDone (ended)  |   and all my pushes are applied

No rank exits before all have ended; a rank lost for good means that the others can only end.
"""

import re
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.reliable import Silence
from distbelief.protocol import (
    GrantSteps,
    GroupChunk,
    Message,
    RankReady,
    StartGeneration,
    StepsDone,
)
from distbelief.protocol.role import Address, Seconds
from distbelief.worker.batches import DealtPlan, Limits


EVALUATORS: Final = "evaluator"
_NAME: Final = re.compile(r"(replica-\d+)\.(\d+)|(evaluator)(?:\.([1-9]\d*))?")


@final
@dataclass(frozen=True, slots=True)
class GroupRank:
    group: str  # "replica-3" or "evaluator"
    index: int  # within the group; 0 leads

    @property
    def replica(self) -> int | None:
        _, dash, index = self.group.partition("-")
        return int(index) if dash else None


def rank_name(replica: int, rank: int) -> Address:
    return member_name(f"replica-{replica}", rank)


def member_name(group: str, rank: int) -> Address:
    if group == EVALUATORS and rank == 0:
        return Address(EVALUATORS)
    return Address(f"{group}.{rank}")


def member_names(group: str, n_ranks: int) -> list[Address]:
    """Return the names of all ranks of a group, its leader first."""
    return [member_name(group, rank) for rank in range(n_ranks)]


def group_rank_of(name: str) -> GroupRank | None:
    """Return the group and rank of a role; None if the name is not one of a rank."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return GroupRank(match[1] or match[3], int(match[2] or match[4] or 0))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    steps: int = 0
    position: int = 0  # in the data, of its first step
    loss: float = 0.0  # sum over `samples`
    samples: int = 0  # those with a finite loss
    no_loss: int = 0  # those without


# Generation k of the leader's incarnation i is i << 32 | k, so that all are distinct.
GENERATION_BITS: Final = 32
# A rank may be this many steps ahead of the slowest, so that computing and waiting overlap. The
# messages of so many lie in shared memory.
AHEAD: Final = 2
# After a Stop, the group ends without the ranks that report nothing for this time.
STOP_SECONDS: Final = 20.0

Outgoing = list[tuple[int, Message]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What a generation is for."""

    position: int | None = None  # where to begin; None: where the shortest of the pushes end
    chunk: GroupChunk | None = None  # the chunk to compute instead of the next samples


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduced:
    """What all ranks have computed in a generation."""

    steps: int = 0
    square: float = 0.0  # of the gradient of the last of them
    sample: int | None = None  # a bad sample, if that is not finite


@final
class GroupLeader:
    """Coordinates the ranks of one group."""

    def __init__(
        self,
        n_ranks: int,  # rank 0 included
        *,
        plan: str = "",  # its hash
        limits: Limits | None = None,
        deal: DealtPlan | None = None,  # where samples are dealt
        begins: bool = False,  # without being asked to
    ) -> None:
        self._n_ranks = n_ranks
        self._plan = plan
        self._limits = limits or Limits()
        self._deal = deal
        self._first_position: int | None = None  # of the first generation
        self.generation = 0
        self._is_begun = begins
        self.is_stopping = False
        self.is_running = False  # all ranks are ready and have their position
        self._silence = Silence()  # of the group: since it made progress
        self._incarnations: dict[int, int] = {}
        self._ready: dict[int, RankReady] = {}
        self._done: dict[int, StepsDone] = {}
        self._ended: set[int] = set()
        self._released: set[int] = set()  # ended ranks that may exit
        self._missing: set[int] = set()
        self._reduced = _Reduced()
        self._n_before = 0  # steps of earlier generations
        self._position = 0  # of this generation's first step
        self._wanted = _Wanted()

    def start(self, incarnation: int, now: Seconds) -> Outgoing:
        self.generation = incarnation << GENERATION_BITS
        return self.new_generation(now, limit=self._limits.first)

    def new_generation(
        self,
        now: Seconds,
        *,
        position: int | None = None,  # where to begin; None: where the shortest of the pushes end
        limit: int | None = None,  # steps of this generation
        chunk: GroupChunk | None = None,  # the chunk to compute instead of the next samples
    ) -> Outgoing:
        """Start a new generation: ask all ranks to drop their step and report ready.

        If a rank is lost the chunk is dropped: the next generation has none.
        """
        self._n_before += self.steps
        self.generation += 1
        self.is_running = False
        self._reduced = _Reduced()
        self._limits.last_step = 0 if self.is_stopping else None
        self._limits.generation = limit
        self._wanted = _Wanted(position=position, chunk=chunk)
        self._silence.start(now)
        self._ready.clear()
        self._done.clear()
        # Released ranks may have exited already.
        self._ended &= self._released
        return self._start_epoch()

    def begin(self, now: Seconds, *, samples: int | None = None) -> Outgoing:
        """Allow steps once all ranks are ready, up to a number of samples if one is given."""
        granted = self.granted
        self._is_begun, self._limits.samples_allowed = True, samples
        if self.is_running:
            return self._grant_all() if self.granted > granted else []
        return self._grant_if_ready(now)

    def stop(self, now: Seconds) -> Outgoing:
        if not self.is_stopping:
            # Granted steps may have begun.
            self._limits.last_step = self.granted
        self.is_stopping = True
        self._silence.start(now)
        return self._grant_all() if self.is_running else self._grant_if_ready(now)

    def joined(self, rank: int, incarnation: int, now: Seconds) -> Outgoing:
        """A rank has started, or has restarted as a new incarnation."""
        known = self._incarnations.get(rank, 0)
        if incarnation <= known:
            return []
        self._incarnations[rank] = incarnation
        if not known:
            return self._start_epoch({rank})
        self._missing.discard(rank)
        self._ended.discard(rank)
        self._released.discard(rank)
        position, limit = self._wanted.position, self._limits.generation
        return self.new_generation(now, position=position, limit=limit)

    def lost(self, rank: int, now: Seconds) -> Outgoing:
        """A rank is lost for good: the group can take no further step."""
        if rank in self._released or rank in self._missing:
            return []
        # If the last step was done anyway, nothing is repeated.
        are_taken = self.is_running and self.is_last and self.steps >= self.granted
        self._missing.add(rank)
        self.is_stopping = True
        return self._grant_all() if are_taken else self.new_generation(now)

    def hear(self, rank: int, incarnation: int, message: Message, now: Seconds) -> Outgoing:
        """Handle a message of a rank, or raise RemoteProtocolError."""
        out = self.joined(rank, incarnation, now)
        # A late message of an earlier incarnation.
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
        """Repeat unanswered messages; after a Stop, end without ranks that stay silent."""
        if self.is_stopping and self._silence.stalled(now) > STOP_SECONDS:
            if self.is_running and not self.all_ended:
                return self.new_generation(now)  # one without steps
            if not self.is_running:
                self._missing |= self.waiting_for
                return self._grant_if_ready(now)
        return [] if self.is_running else self._start_epoch()

    def _on_rank_ready(self, rank: int, message: RankReady, now: Seconds) -> Outgoing:
        if message.generation == self.generation and self.is_running:
            return [(rank, self._grant_for(rank))]  # the grant was lost
        if message.generation == self.generation:
            self._ready.setdefault(rank, message)
            return self._grant_if_ready(now)
        # It reports for an earlier generation, or has just started.
        return [] if rank in self._ready else self._start_epoch({rank})

    def _on_steps_done(self, rank: int, message: StepsDone, now: Seconds) -> Outgoing:
        if message.generation != self.generation or not self.is_running:
            return []
        before, granted = self._done.get(rank), self.granted
        if before is not None and message.steps < before.steps:
            return []
        self._done[rank] = message
        self._silence.start(now)
        if message.ended:
            self._ended.add(rank)
            if self._all_taken and not self._released:
                return self._grant_all()
            return [(rank, self._grant_for(rank))]
        if self._reduce() or self.granted > granted:
            return self._grant_all()
        # A repeated report means that the grant was lost.
        repeated = before is not None and message.steps == before.steps
        return [(rank, self._grant_for(rank))] if repeated else []

    def _reduce(self) -> bool:
        if self.steps <= self._reduced.steps:
            return False
        # In the order of ranks, never of arrival: floating-point sums must not vary.
        messages = [self._done[rank] for rank in sorted(self._done)]
        seen = (message.sample for message in messages)
        self._reduced = _Reduced(
            steps=self.steps,
            square=sum((message.square for message in messages), start=0.0),
            sample=next((sample for sample in seen if sample is not None), None),
        )
        return True

    @property
    def square(self) -> float:
        """Squared norm of the gradient of the last step that all ranks have computed."""
        return self._reduced.square

    @property
    def steps(self) -> int:
        return min(self._taken.values()) if self.is_running else 0

    @property
    def granted(self) -> int:
        if not (self.is_running and self._is_begun):
            return 0
        bounds = self._limits.bounds(self._position, n_before=self._n_before)
        return min([self.steps + AHEAD, *bounds])

    @property
    def is_held(self) -> bool:
        pauses = self._limits.samples_allowed is not None and self.is_running
        return pauses and self.steps >= self.granted

    @property
    def is_last(self) -> bool:
        granted, n_before = self.granted, self._n_before
        is_last = self._limits.is_last(granted, self._position, n_before=n_before)
        return self.is_stopping or (self.is_running and is_last)

    @property
    def is_complete(self) -> bool:
        return self.is_running and self.steps == self._limits.generation

    @property
    def clock(self) -> float:
        clocks = [s.clock for s in self._done.values() if s.clock >= 0]
        return sum(clocks) / len(clocks) if clocks else 0.0

    @property
    def waiting_for(self) -> set[int]:
        return set(range(self._n_ranks)) - {*self._ready, *self._released, *self._missing}

    @property
    def slowest(self) -> int | None:
        taken = self._taken
        return min(taken, key=lambda rank: (taken[rank], rank)) if self.is_running else None

    @property
    def _taken(self) -> dict[int, int]:
        """The steps that each rank has taken, without ranks that are lost for good."""
        here = sorted(set(range(self._n_ranks)) - self._missing)
        return {rank: self._done[rank].steps if rank in self._done else 0 for rank in here}

    @property
    def all_ended(self) -> bool:
        return len(self._released | self._missing) == self._n_ranks

    @property
    def _all_taken(self) -> bool:
        return len(self._ended | self._missing) == self._n_ranks

    @property
    def missing(self) -> set[int]:
        return self._missing - self._ended

    def generation_done(self) -> GroupProgress:
        """Return what the group did in this generation; the loss may be a step ahead."""
        # In the order of ranks, never of arrival: floating-point sums must not vary.
        messages = [self._done[rank] for rank in sorted(self._done)]
        return GroupProgress(
            steps=self.steps,
            position=self._position,
            loss=sum(message.loss for message in messages),
            samples=sum(message.samples for message in messages),
            no_loss=sum(message.no_loss for message in messages),
        )

    def _start_epoch(self, ranks: set[int] | None = None) -> Outgoing:
        wanted = self.waiting_for if ranks is None else ranks
        message = StartGeneration(
            generation=self.generation, plan=self._plan, chunk=self._wanted.chunk
        )
        return [(rank, message) for rank in sorted(wanted)]

    def _grant_if_ready(self, now: Seconds) -> Outgoing:
        ready = self._is_begun or self.is_stopping
        if self.is_running or not ready or self.waiting_for:
            return []
        self.is_running = True
        self._silence.start(now)
        pushed = [message.samples for message in self._ready.values() if message.pushes]
        # Unpushed work is repeated: begin where the rank that has pushed least left off; ranks that
        # have pushed more push nothing until they are past that point.
        if self._wanted.position is not None:
            self._position = self._wanted.position
        elif pushed and self._deal is not None:
            # Shards know which positions they have. So all ranks push anew what one has not pushed.
            if self._first_position is not None:
                self._deal.restart(max(min(pushed) - self._position, 0))
            self._position = max(pushed)
        elif pushed:
            self._position = min(pushed)
        if self._first_position is None:
            self._first_position = self._position
        elif self._limits.n_steps is not None and self._deal is None:
            # Steps that were not pushed are repeated.
            self._n_before = self._limits.n_steps(self._first_position, self._position)
        return self._grant_all()

    def _grant_all(self) -> Outgoing:
        return [(rank, self._grant_for(rank)) for rank in self._taken]

    def _grant_for(self, rank: int) -> GrantSteps:
        # If one rank exited early, the others could not repeat a step when one restarts.
        if self._all_taken:
            self._released.add(rank)
        deal = None if rank == 0 else self._deal
        return GrantSteps(
            generation=self.generation,
            position=self._position,
            steps=self.granted,
            is_last=self.is_last,
            ended=rank in self._released,
            agreed=self._reduced.steps,
            square=self._reduced.square,
            sample=self._reduced.sample,
            dealt=msgspec.UNSET if deal is None else deal.from_step(self.steps),
        )
