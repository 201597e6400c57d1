"""A rank's view of its model-parallel group: objective, state, shutdown, names, norm reduction.

Rank M of replica R is called "replica-R.M"; rank 0 of a group leads it (`group_leader`). The
ranks that evaluate form a group too: "evaluator" (which the supervisor asks), "evaluator.1",
"evaluator.2", ...

Norm reduction: each rank reports the sum of squares of its part of the gradient, the leader
adds them, and every rank decides by the sum whether the step counts and how it is clipped.
"""

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


# Copies fetched parameters into the tensors of an objective; runs in the compute executor.
Install = Callable[[], FetchResult]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNorm:
    """One rank's part of a decision that all ranks of a step take together."""

    square: float  # sum of squares of the local gradient; NaN if it is not finite
    # Work that finishes the step, given the sum over all ranks and the index of a bad sample if a
    # rank has found one.
    settle: Callable[[float, int | None], object]
    cost: Cost  # of that work
    # Index in the data set of a sample with NaN or infinite values found here.
    sample: int | None = None


class Objective(Protocol):
    """What the steps of a rank are for: training, evaluation, or a sum over a large batch."""

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """Flat tensors, one per item; fetched parameters are copied into them."""
        ...

    @property
    def pushed(self) -> int | None:
        """Number of samples in the pushes that its shards have; None if it never pushes."""
        ...

    @property
    def all_pushes_applied(self) -> bool:
        """Whether all its pushes are applied."""
        ...

    def may_fetch(self, *, ahead: bool) -> bool:
        """Return whether a fetch may begin; `ahead`: while a step is running."""
        ...

    def begin(self, position: int, now: Seconds) -> None:
        """A generation begins at this position in the data."""
        ...

    def drop(self) -> None:
        """Drop the current step and everything accrued; no work is running."""
        ...

    def fetches_at(self, step: int) -> bool: ...

    def installing(self, work: Install) -> Install:
        """Wrap the work of an install with what must happen before and after it."""
        ...

    def fetched(self, seconds: Seconds) -> bool:
        """A fetch is installed; return whether it is the version wanted."""
        ...

    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        """A step begins; return the function that takes its gradients, as work."""
        ...

    def close(self, step_result: StepResult) -> object:
        """Use the result of a step, as work.

        Returns:
            The first argument of `closed`; or a `LocalNorm`, and then `closed` gets the result of
            its `settle`.
        """
        ...

    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        """A step is finished."""
        ...

    def work(self, *, final: bool) -> Sequence[Action]:
        """Return work to do before the next step, or before the end."""
        ...

    @property
    def is_due(self) -> bool:
        """Whether it must wait although there is no work to do now."""
        ...

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Work that `work` returned is done."""
        ...

    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        """The leader received a command of the supervisor."""
        ...

    def report(
        self, leader: GroupLeader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Return what the leader sends to the supervisor, and to its ranks."""
        ...

    @property
    def clock(self) -> float | None:
        """Mean clock of the parameters in use; None if there are none."""
        ...

    def figures(self) -> Mapping[str, float]: ...


class Phase(Enum):
    """Where in a generation a rank is; the values are its state in status tables."""

    ALONE = "waiting for its leader"
    GATHERING = "gathering"
    GATHERED = "gathered"
    RUNNING = "running"
    ENDED = "finishing"


@dataclass(slots=True)
class _Sums:
    loss: float = 0.0
    samples: int = 0
    no_loss: int = 0


@final
class GroupState:
    """What one rank knows of the current generation.

    Args:
        name: Of the rank.
        plan: Hash of its plan.
    """

    def __init__(self, name: str, *, plan: str) -> None:
        self.generation = 0  # 0 before the first
        self.phase = Phase.ALONE
        self.n_generations = 0  # generations so far
        self.granted = 0  # steps of this generation that the rank may take
        self.is_last = False  # no more steps will be granted
        self.has_ended = False  # the leader knows that all steps are done
        self.n_reduced = 0  # steps whose gradient norm is reduced over all ranks
        self.square = 0.0  # squared norm of the last of them
        self.sample: int | None = None  # index of a bad sample in that step, if a rank reported one
        self._name = name
        self._plan = plan
        self._sums = _Sums()

    def is_over(self, step: int) -> bool:
        return self.is_last and step >= self.granted

    def start_epoch(self, message: StartEpoch) -> bool:
        """Apply the leader's message; return whether a new generation begins.

        Raises:
            RemoteProtocolError: it belongs to an earlier generation.
            JobError: the leader has another plan.
        """
        self._check(message)
        if message.plan != self._plan:
            raise JobError(
                f"the leader of {self._name} has plan {message.plan}, {self._name} has "
                f"{self._plan}: start all ranks of a replica with one plan"
            )
        # The leader repeats this message until it is answered.
        if message.generation == self.generation:
            return False
        self.generation, self.phase = message.generation, Phase.GATHERING
        self.n_generations += 1
        self.granted, self.is_last, self.has_ended = 0, False, False
        self.n_reduced, self.square, self.sample = 0, 0.0, None
        self._sums = _Sums()
        return True

    def commit_token(self, message: GrantSteps) -> bool:
        """Apply the leader's message; return whether the first step may begin now.

        Raises:
            RemoteProtocolError: it belongs to another generation, or came too early.
        """
        self._check(message)
        ready = self.phase not in {Phase.ALONE, Phase.GATHERING}
        if message.generation > self.generation or not ready:
            raise RemoteProtocolError(
                f"{self._name} was granted steps of generation {message.generation} before it "
                "was ready"
            )
        # Messages may be repeated or arrive late, so values only grow.
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
        # Only the rank that holds the loss layer knows the loss.
        if step_result.loss is None:
            return
        sums = self._sums
        if math.isfinite(step_result.loss):
            sums.loss += step_result.loss
            sums.samples += n_samples
        else:
            sums.no_loss += n_samples

    def ready_message(self, pushed: int | None) -> RankReady:
        return RankReady(generation=self.generation, pushes=pushed is not None, samples=pushed or 0)

    def steps_message(
        self, steps: int, *, clock: float | None, square: float, sample: int | None = None
    ) -> StepsDone:
        return StepsDone(
            generation=self.generation,
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
        if message.generation < self.generation:
            raise RemoteProtocolError(
                f"{self._name} was sent {type(message).__name__} of generation "
                f"{message.generation}, after generation {self.generation} had begun"
            )


# A rank that has ended exits after this time without any message of its leader.
END_SECONDS: Final = 30.0


@final
class RankShutdown:
    """Decides when one rank may exit: after its last step, when no other rank needs it.

    Args:
        names: Of all ranks of the group.
        state: Of the rank.
        objective: Sends the last report to the supervisor.
        leader: Only on rank 0.
        metrics: Returns the counters for the final message.
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
        self._ended_at = now

    def stop(self, now: Seconds) -> None:
        if self._stopped_at is None:
            self._stopped_at = now

    def leader_lost(self) -> None:
        self._is_orphan = True

    def is_left(self, now: Seconds, *, is_idle: bool) -> bool:
        """Return whether there is nothing left to wait for.

        Either the leader has exited for good, or the whole group had ended before this
        incarnation of the rank started.
        """
        if self._is_orphan:
            return is_idle and self._objective.all_pushes_applied
        is_late = self._stopped_at is not None and now - self._stopped_at > END_SECONDS
        return is_late and self._state.phase is Phase.ALONE

    def leave(self, now: Seconds) -> list[Action]:
        # Another rank may still have to repeat a step, and needs this one for it.
        if not self._may_go(now):
            return []
        actions: list[Action] = []
        if self._leader is not None:
            last, _ = self._objective.report(self._leader, now, final=True)
            actions += last
        return [*actions, *self._missing_report(), *self.go()]

    def go(self) -> list[Action]:
        self.is_gone = True
        finished = Finished(counters=dict(self._metrics()))
        return [Send(receiver=SUPERVISOR, message=finished), Exit()]

    def _may_go(self, now: Seconds) -> bool:
        others = self._leader is None or self._leader.all_ended
        done = others and self._state.has_ended
        return done or (self._leader is None and now - self._ended_at > END_SECONDS)

    def _missing_report(self) -> list[Action]:
        if self._leader is None or not self._leader.missing:
            return []
        names = ", ".join(self._names[m] for m in sorted(self._leader.missing))
        text = f"ended without {names}: no message from there"
        return [Report(text=text, level="warning")]


EVALUATORS: Final = "evaluator"

_NAME: Final = re.compile(r"(replica-\d+)\.(\d+)|(evaluator)(?:\.([1-9]\d*))?")


@final
@dataclass(frozen=True, slots=True)
class GroupRank:
    """One rank of a group."""

    group: str  # "replica-3" or "evaluator"
    machine: int  # the rank within the group; 0 leads

    @property
    def replica(self) -> int | None:
        _, dash, index = self.group.partition("-")
        return int(index) if dash else None


def rank_name(replica: int, rank: int) -> Address:
    return member_name(f"replica-{replica}", rank)


def evaluator_name(rank: int) -> Address:
    return member_name(EVALUATORS, rank)


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


SETTLE: Final = "machine:settle"


@final
@dataclass(frozen=True, slots=True)
class PendingStep:
    """A computed step that waits for the norm reduction."""

    local: LocalNorm  # this rank's part of the decision
    step_result: StepResult
    batch: BatchIndices


@final
class NormReduction:
    """Holds the computed step of one rank until its gradient norm is reduced over all ranks."""

    def __init__(self, state: GroupState) -> None:
        self.square = 0.0  # the last local sum of squares, which the rank reports
        self.sample: int | None = None  # the last bad sample found here, if any
        self._state = state
        self._pending: PendingStep | None = None

    @property
    def is_open(self) -> bool:
        return self._pending is not None

    def start(self, pending: PendingStep) -> None:
        self.square, self.sample = pending.local.square, pending.local.sample
        self._pending = pending

    def drop(self) -> None:
        self._pending = None

    def when_reduced(self, step: int) -> Sequence[Compute]:
        """Return the work that finishes the step, once the leader has sent the sum."""
        pending = self._pending
        if pending is None or self._state.n_reduced < step:
            return []
        state = self._state
        work = partial(pending.local.settle, state.square, state.sample)
        return [Compute(name=SETTLE, work=work, cost=pending.local.cost)]

    def take(self) -> PendingStep:
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending
