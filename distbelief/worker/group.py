"""A step that is computed, until all machines have said what they have of it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, Protocol, final

import torch

from distbelief.errors import JobError, RemoteProtocolError
from distbelief.execution.executor import Put, StepResult
from distbelief.parameter_server.client.buffers import FetchResult
from distbelief.protocol import (
    Evaluate,
    Finished,
    GrantSteps,
    RankReady,
    StartEpoch,
    StartTraining,
    StepsDone,
    Stop,
)
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Exit,
    Report,
    Seconds,
    Send,
)
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.group_leader import GroupLeader, Outgoing


# What a machine computes for: training, or measuring. The role asks; see `machine`.

Install = Callable[[], FetchResult]
"""Copies what was fetched into a duty's tensors, in the compute lane."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What a machine has of something that all of a step's machines decide together.

    Attributes:
        square: Sum of the squares of its part of the gradient; NaN if that is not
            finite.
        settle: Work: given the sum over all machines, and the sample that one of them
            blames, does with the result of the step what is to be done.
        cost: Of that.
        sample: Of the data set: this machine sees that it is not finite.
    """

    square: float
    settle: Callable[[float, int | None], object]
    cost: Cost
    sample: int | None = None


class Objective(Protocol):
    """What a machine computes for."""

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """Flat tensors, one per item: what is fetched is copied into them."""
        ...

    @property
    def pushed(self) -> int | None:
        """Samples of what the shards have from it; None if it pushes nothing."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether nothing that it pushed is under way."""
        ...

    def may_fetch(self, *, ahead: bool) -> bool:
        """Return whether a fetch may begin now, `ahead`: while a step is under way."""
        ...

    def begin(self, position: int, now: Seconds) -> None:
        """A life begins there in the data."""
        ...

    def drop(self) -> None:
        """Give up the step under way, and what has accrued; the lane is idle."""
        ...

    def fetches_at(self, step: int) -> bool:
        """Return whether this step begins with a fetch."""
        ...

    def installing(self, work: Install) -> Install:
        """Return the work of an install, and what it is to do before and after it."""
        ...

    def fetched(self, seconds: Seconds) -> bool:
        """A fetch was installed; return whether it is what was wanted."""
        ...

    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        """A step begins; return what takes its gradients, in the compute lane."""
        ...

    def close(self, step_result: StepResult) -> object:
        """Do with the result of a step what is to be done in the compute lane.

        Returns:
            What `closed` is given; or a `Vote`, and then it is given what comes of
            that.
        """
        ...

    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        """A step is over."""
        ...

    def work(self, *, final: bool) -> Sequence[Action]:
        """Return what is to be computed before the next step, or the end."""
        ...

    @property
    def is_due(self) -> bool:
        """Whether it cannot go on yet, but has nothing to compute either."""
        ...

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Something that `work` asked for is done."""
        ...

    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        """The supervisor has told the leader something."""
        ...

    def report(
        self, leader: GroupLeader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Return what the leader tells the supervisor, and does next."""
        ...

    @property
    def clock(self) -> float | None:
        """Mean clock of the values in use; None if it keeps none."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Return counters."""
        ...


# A machine in the life of its group: what it was told, and what it has done.


class Phase(Enum):
    """Where in a life a machine is."""

    ALONE = "waiting for its leader"
    GATHERING = "gathering"
    GATHERED = "gathered"
    RUNNING = "running"
    ENDED = "finishing"


@dataclass(slots=True)
class _Sums:
    """What this machine knows of the loss, in one life."""

    loss: float = 0.0
    samples: int = 0
    no_loss: int = 0


@final
class GroupState:
    """One machine's life.

    Args:
        name: Of the machine.
        plan: Hash of its plan.

    Attributes:
        life: The present one; 0 before the first.
        phase: Where in it.
        n_lives: So far.
        granted: Steps of this life that may be taken.
        is_last: There will be no others.
        has_ended: And the leader knows that they are taken.
        agreed: Steps of this life that all machines have computed.
        square: Of the gradient of the last of them, over all machines.
        sample: To blame for it, if one of them blames one.
    """

    def __init__(self, name: str, *, plan: str) -> None:
        self.generation = 0
        self.phase = Phase.ALONE
        self.n_lives = 0
        self.granted = 0
        self.is_last = False
        self.has_ended = False
        self.n_reduced = 0
        self.square = 0.0
        self.sample: int | None = None
        self._name = name
        self._plan = plan
        self._sums = _Sums()

    def is_over(self, step: int) -> bool:
        """Return whether the step before this one was the last."""
        return self.is_last and step >= self.granted

    def start_epoch(self, message: StartEpoch) -> bool:
        """Obey the leader; return whether a new life begins.

        Raises:
            RemoteProtocolError: it is of a life that is over.
            JobError: the leader has another plan.
        """
        self._check(message)
        if message.plan != self._plan:
            raise JobError(
                f"the leader of {self._name} has plan {message.plan}, {self._name} has "
                f"{self._plan}: start all machines of a replica with one plan"
            )
        if message.life == self.generation:
            return False
        self.generation, self.phase = message.life, Phase.GATHERING
        self.n_lives += 1
        self.granted, self.is_last, self.has_ended = 0, False, False
        self.n_reduced, self.square, self.sample = 0, 0.0, None
        self._sums = _Sums()
        return True

    def grant(self, message: GrantSteps) -> bool:
        """Obey the leader; return whether the first step may be taken now.

        Raises:
            RemoteProtocolError: it is of another life, or too early.
        """
        self._check(message)
        ready = self.phase not in {Phase.ALONE, Phase.GATHERING}
        if message.life > self.generation or not ready:
            raise RemoteProtocolError(
                f"{self._name} was granted steps of generation {message.life} before it was ready"
            )
        self.granted = max(self.granted, message.steps)
        self.is_last |= message.is_last
        self.has_ended |= message.ended
        if message.agreed > self.n_reduced:
            self.n_reduced, self.square = message.agreed, message.square
            self.sample = message.sample
        begins = self.phase is Phase.GATHERED
        if begins:
            self.phase = Phase.RUNNING
        return begins

    def add(self, step_result: StepResult, n_samples: int) -> None:
        """Add what a step has found of the loss, if this machine computes it."""
        if step_result.loss is None:
            return
        sums = self._sums
        if math.isfinite(step_result.loss):
            sums.loss += step_result.loss
            sums.samples += n_samples
        else:
            sums.no_loss += n_samples

    def ready_message(self, pushed: int | None) -> RankReady:
        """Return what the leader is told: so many samples are pushed."""
        return RankReady(life=self.generation, pushes=pushed is not None, samples=pushed or 0)

    def steps_message(
        self, steps: int, *, clock: float | None, square: float, sample: int | None = None
    ) -> StepsDone:
        """Return what the leader is told: so many steps are taken."""
        return StepsDone(
            life=self.generation,
            steps=steps,
            loss=self._sums.loss,
            samples=self._sums.samples,
            no_loss=self._sums.no_loss,
            clock=-1.0 if clock is None else clock,
            ended=self.phase is Phase.ENDED,
            square=square,
            sample=sample,
        )

    def _check(self, message: StartEpoch | GrantSteps) -> None:
        if message.life < self.generation:
            raise RemoteProtocolError(
                f"{self._name} was sent {type(message).__name__} of generation "
                f"{message.life}, after generation {self.generation} had begun"
            )


# When a machine may go: its last step is taken, and nobody needs it any more.

END_SECONDS: Final = 30.0
"""After its end, until a machine that hears nothing of its leader is gone."""


@final
class RankShutdown:
    """The end of one machine.

    Args:
        names: Of all machines of the group.
        living: Its life.
        duty: What it computes for, which tells the supervisor the last.
        leader: If it leads.
        figures: Its counters.

    Attributes:
        is_gone: Whether it has gone.
    """

    def __init__(
        self,
        names: Sequence[Address],
        *,
        state: GroupState,
        objective: Objective,
        leader: GroupLeader | None,
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        self.is_gone = False
        self._names = names
        self._state = state
        self._objective = objective
        self._leader = leader
        self._metrics = metrics
        self._ended_at: Seconds = 0.0
        self._stopped_at: Seconds | None = None
        self._is_orphan = False

    def end(self, now: Seconds) -> None:
        """Its last step is taken, and all that it pushed is applied."""
        self._ended_at = now

    def stop(self, now: Seconds) -> None:
        """The supervisor has told it to stop: not its leader, who decides."""
        if self._stopped_at is None:
            self._stopped_at = now

    def leader_lost(self) -> None:
        """Its leader will not come back: nobody will grant another step."""
        self._is_orphan = True

    def is_left(self, now: Seconds, *, is_idle: bool) -> bool:
        """Return whether there is nothing it could wait for.

        Its leader has ended for good, or it seems that all others had ended before this
        life of it began.

        Args:
            now: The time.
            is_idle: Whether it computes nothing.
        """
        if self._is_orphan:
            return is_idle and self._objective.is_settled
        is_late = self._stopped_at is not None and now - self._stopped_at > END_SECONDS
        return is_late and self._state.phase is Phase.ALONE

    def leave(self, now: Seconds) -> list[Action]:
        """Go once all have taken the last step: nobody needs this machine any more."""
        if not self._may_go(now):
            return []
        actions: list[Action] = []
        if self._leader is not None:
            last, _ = self._objective.report(self._leader, now, final=True)
            actions += last
        return [*actions, *self._missing_report(), *self.go()]

    def go(self) -> list[Action]:
        """Go now."""
        self.is_gone = True
        finished = Finished(counters=dict(self._metrics()))
        return [Send(receiver=SUPERVISOR, message=finished), Exit()]

    def _may_go(self, now: Seconds) -> bool:
        """Whether all have taken the last step; or the leader has gone without it."""
        others = self._leader is None or self._leader.all_ended
        done = others and self._state.has_ended
        return done or (self._leader is None and now - self._ended_at > END_SECONDS)

    def _missing_report(self) -> list[Action]:
        """Return what the leader says of those without whom the end was made."""
        if self._leader is None or not self._leader.missing:
            return []
        names = ", ".join(self._names[m] for m in sorted(self._leader.missing))
        text = f"ended without {names}: no word from there"
        return [Report(text=text, level="warning")]


# Names of machines: machine M of replica R is "replica-R.M"; one place that knows.
#
# Machine 0 of a group leads it. The machines that evaluate are a group too: "evaluator"
# (whom the supervisor asks), "evaluator.1", "evaluator.2", ...

EVALUATORS: Final = "evaluator"

_NAME: Final = re.compile(r"(replica-\d+)\.(\d+)|(evaluator)(?:\.([1-9]\d*))?")


@final
@dataclass(frozen=True, slots=True)
class GroupRank:
    """One machine of a group.

    Attributes:
        group: "replica-3", or "evaluator".
        machine: Which of its machines; 0 leads.
    """

    group: str
    machine: int

    @property
    def replica(self) -> int | None:
        """Which replica the group is; None if it evaluates."""
        _, dash, index = self.group.partition("-")
        return int(index) if dash else None


def rank_name(replica: int, rank: int) -> Address:
    """Return the name of a machine of a model replica."""
    return member_name(f"replica-{replica}", rank)


def evaluator_name(rank: int) -> Address:
    """Return the name of a machine that evaluates."""
    return member_name(EVALUATORS, rank)


def member_name(group: str, rank: int) -> Address:
    """Return the name of a machine of this group."""
    if group == EVALUATORS and rank == 0:
        return Address(EVALUATORS)
    return Address(f"{group}.{rank}")


def member_names(group: str, n_ranks: int) -> list[Address]:
    """Return the names of all machines of a group, its leader first."""
    return [member_name(group, rank) for rank in range(n_ranks)]


def group_rank_of(name: str) -> GroupRank | None:
    """Return which machine is called so; None if none is."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return GroupRank(match[1] or match[3], int(match[2] or match[4] or 0))


SETTLE: Final = "machine:settle"


@final
@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is computed.

    Attributes:
        vote: What this machine has of it.
        found: Its result.
        chosen: Its samples.
    """

    local: Vote
    step_result: StepResult
    batch: BatchIndices


@final
class NormReduction:
    """One machine's votes.

    Args:
        living: Its life, which knows what all have agreed on.

    Attributes:
        square: What was said last.
        sample: Likewise, of who is to blame.
    """

    def __init__(self, state: GroupState) -> None:
        self.square = 0.0
        self.sample: int | None = None
        self._state = state
        self._pending: PendingStep | None = None

    @property
    def is_open(self) -> bool:
        """Whether a step waits for what all have of it."""
        return self._pending is not None

    def start(self, pending: PendingStep) -> None:
        """Vote on a step."""
        self.square, self.sample = pending.local.square, pending.local.sample
        self._pending = pending

    def drop(self) -> None:
        """Forget the step: its life is over."""
        self._pending = None

    def when_reduced(self, step: int) -> Sequence[Compute]:
        """Return what is done with the result, once all have agreed on it.

        Args:
            step: The next one.
        """
        pending = self._pending
        if pending is None or self._state.n_reduced < step:
            return []
        state = self._state
        work = partial(pending.local.settle, state.square, state.sample)
        return [Compute(name=SETTLE, work=work, cost=pending.local.cost)]

    def take(self) -> PendingStep:
        """Return the step that was counted; none is open any more."""
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending
