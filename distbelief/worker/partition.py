"""The role of one rank of a model-parallel group, training or evaluating.

    gathering     a new generation: drop the current step, wait for pushes
    gathered      the leader knows
    running       take the granted steps, one after the other
    ended         the last step is done and every push is applied

A step starts once its samples and parameters are here. Its operations then run as their
inputs arrive (`steps.StepRunner`), and the `Objective` uses the result, if needed after a
reduction of the gradient norm over all ranks. Messages carry the generation: those of an
earlier one are rejected, those of a later step are kept. Each waiting rank knows for whom:
`status()` returns "waiting for replica-0.3".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from distbelief.errors import DistBeliefError, JobError, LocalProtocolError, RemoteProtocolError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.link import ShardReply
from distbelief.protocol import (
    Evaluate,
    GrantSteps,
    RankReady,
    StartEpoch,
    StartTraining,
    StepsDone,
    Stop,
    TransferAck,
    TransferBlock,
)
from distbelief.roles.role import (
    Action,
    Address,
    Compute,
    Computed,
    Event,
    PeerJoined,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from distbelief.worker.batches import READ, BatchIndices, BatchPlan, SlicePrefetch
from distbelief.worker.group import (
    SETTLE,
    GroupState,
    LocalNorm,
    NormReduction,
    Objective,
    PendingStep,
    Phase,
    RankShutdown,
    member_names,
)
from distbelief.worker.group_leader import GroupLeader, Outgoing
from distbelief.worker.steps import CHAIN, INSTALL, ParameterPrefetch, StepOutcome, StepRunner
from distbelief.worker.transfers import RankLink


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """The parts that act for one rank."""

    names: Sequence[Address]  # of all ranks of the group; the leader is first
    rank: int
    client: ParameterClient
    runner: StepRunner
    batch_plan: BatchPlan
    slices: SlicePrefetch
    objective: Objective
    parameters: Sequence[torch.Tensor]  # per item that the rank keeps, (*region.shape)
    state: GroupState
    prefetch: ParameterPrefetch
    norm_reduction: NormReduction
    shutdown: RankShutdown
    leader: GroupLeader | None  # only on rank 0

    @property
    def may_step(self) -> bool:
        return self.runner.step < self.state.granted


# StartEpoch   new generation: drop the current step    -> RankReady, once idle
# GrantSteps   take this many steps in total            -> StepsDone, after each


@final
class GroupMember:
    """Exchanges messages with the leader of the group, which may be this rank itself."""

    def __init__(self, parts: RankParts) -> None:
        self.incarnation = 0
        self._parts = parts

    # ------------------------------------------------------------------------------------- sent

    def deliver(self, out: Outgoing, now: Seconds) -> list[Action]:
        parts = self._parts
        actions: list[Action] = []
        for rank, message in out:
            # Messages of rank 0 to itself take effect at once.
            if rank != parts.rank:
                actions.append(Send(receiver=parts.names[rank], message=message))
            else:
                assert isinstance(message, StartEpoch | GrantSteps), message
                actions += self.follow(message, now)
        return actions

    def report_ready(self, now: Seconds) -> list[Action]:
        parts = self._parts
        return self._to_leader(parts.state.ready_message(parts.objective.pushed), now)

    def report_steps(self, now: Seconds) -> list[Action]:
        parts = self._parts
        message = parts.state.steps_message(
            parts.runner.step,
            clock=parts.objective.clock,
            square=parts.norm_reduction.square,
            sample=parts.norm_reduction.sample,
        )
        return self._to_leader(message, now)

    def resend(self, now: Seconds) -> Sequence[Action]:
        parts = self._parts
        match parts.state.phase:
            # A rank that starts late introduces itself to the leader.
            case Phase.ALONE if parts.leader is None:
                return self._to_leader(RankReady(generation=0, pushes=False, samples=0), now)
            case Phase.GATHERED:
                return self.report_ready(now)
            case Phase.RUNNING | Phase.ENDED:
                waits = parts.norm_reduction.is_open or not parts.may_step
                return self.report_steps(now) if waits else []
            case _:
                return []

    def _to_leader(self, message: RankReady | StepsDone, now: Seconds) -> list[Action]:
        leader = self._parts.leader
        if leader is None:
            return [Send(receiver=self._parts.names[0], message=message)]
        return self.deliver(leader.hear(0, self.incarnation, message, now), now)

    # --------------------------------------------------------------------------------- received

    def follow(self, message: StartEpoch | GrantSteps, now: Seconds) -> list[Action]:
        """Apply a message of the leader.

        Raises:
            RemoteProtocolError: it belongs to an earlier generation, or came too early.
            JobError: the leader has another plan.
        """
        parts, state = self._parts, self._parts.state
        if isinstance(message, StartEpoch):
            if state.start_epoch(message):
                parts.runner.begin(message.generation)
                parts.prefetch.begin(message.generation)
            elif state.phase is Phase.GATHERED:
                return self.report_ready(now)
            return []
        if not state.commit_token(message):
            return []
        parts.batch_plan.start(message.position)
        parts.slices.begin(message.generation)
        parts.objective.begin(message.position, now)
        return parts.runner.place(now)


# gathering   wait until nothing of the previous generation is in flight
# running     run the chains of the step; finish it once the norm is reduced; then the
#             objective's own work, an install, the next step
# ended       exit once all ranks have taken the last step


@final
class StepLoop:
    """Decides what the compute executor of one rank runs next."""

    def __init__(self, parts: RankParts, member: GroupMember) -> None:
        self.executor = ""  # name of the work in progress, or ""
        self._parts = parts
        self._member = member
        self._batch: BatchIndices | None = None  # of the current step

    # ------------------------------------------------------------------------------------- done

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Handle the result of finished work.

        Raises:
            JobError: model or data make training impossible.
            LocalProtocolError: the work was not requested.
        """
        parts = self._parts
        if event.error is not None:
            raise _failure(event.error, step=parts.runner.step)
        # Reading runs in the data executor and never occupies this one.
        if event.name == READ:
            parts.slices.have_read(event.result)
            return []
        if event.name != self.executor:
            raise LocalProtocolError(f"unexpected result of work {event.name!r}")
        self.executor = ""
        if event.name == INSTALL:
            return parts.prefetch.installed(event, now)
        if event.name == CHAIN:
            return self._ran(event.result, now)
        if event.name == SETTLE:
            done = parts.norm_reduction.take()
            return parts.objective.closed(event.result, done.step_result, done.batch, now)
        return parts.objective.computed(event, now)

    def _ran(self, result: object, now: Seconds) -> Sequence[Action]:
        parts = self._parts
        assert isinstance(result, StepOutcome), result
        actions = parts.runner.ran(result, now)
        if result.found is None:
            return actions
        assert self._batch is not None
        batch, self._batch = self._batch, None
        is_over = result.generation != parts.runner.generation
        if isinstance(result.closed, LocalNorm):
            if is_over:
                return actions  # no norm will be reduced; the objective drops the step
            parts.norm_reduction.start(PendingStep(result.closed, result.found, batch))
        else:
            # Complete, so it is valid even if its generation has ended meanwhile.
            actions += parts.objective.closed(result.closed, result.found, batch, now)
            if is_over:
                return actions
        parts.state.add(result.found, len(batch.indices))
        return [*actions, *self._member.report_steps(now)]

    # ------------------------------------------------------------------------------------- next

    def advance(self, now: Seconds) -> Sequence[Action]:
        parts = self._parts
        if self.executor or parts.prefetch.waits:
            return []
        match parts.state.phase:
            case Phase.GATHERING:
                return self._finish_settling(now)
            case Phase.RUNNING:
                return self._continue_step(now)
            case Phase.ENDED:
                return parts.shutdown.leave(now)
            case _:
                return []

    def _finish_settling(self, now: Seconds) -> list[Action]:
        parts = self._parts
        self._batch = None
        parts.norm_reduction.drop()
        parts.objective.drop()
        # Pushes in flight count for the position where the next generation begins.
        if not (parts.client.ready and parts.objective.all_pushes_applied):
            return []
        parts.state.phase = Phase.GATHERED
        return self._member.report_ready(now)

    def _continue_step(self, now: Seconds) -> list[Action]:
        parts = self._parts
        if parts.norm_reduction.is_open:
            return self._hold_lane(parts.norm_reduction.when_reduced(parts.runner.step))
        if parts.runner.is_open:
            return self._hold_lane(parts.runner.chain())
        return self._between_steps(now)

    def _hold_lane(self, actions: Sequence[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Compute):
                self.executor = action.name
        return list(actions)

    def _between_steps(self, now: Seconds) -> list[Action]:
        parts, step = self._parts, self._parts.runner.step
        state, prefetch = parts.state, parts.prefetch
        over = state.is_over(step)
        work = self._hold_lane(parts.objective.work(final=over))
        if work or parts.objective.is_due:
            return work
        if over:
            return self._end(now)
        # The leader grants two steps ahead, so two batches may be read.
        stop = state.granted if state.is_last else step + 2
        actions = parts.slices.read_ahead(step, stop=stop)
        actions += prefetch.fetch(step, now, ahead=False)
        if not parts.may_step or not parts.client.ready:
            return actions
        if prefetch.lacks(step):
            # Values are copied just before their step, so that they are as new as possible.
            return [*actions, *self._hold_lane(prefetch.install(step))]
        return [*actions, *self._start_step(step, now)]

    def _start_step(self, step: int, now: Seconds) -> list[Action]:
        parts = self._parts
        batch_slice = parts.slices.take(step)
        # Its samples are still being read.
        if batch_slice is None:
            return []
        self._batch = parts.batch_plan.batch(step)
        parts.runner.open(
            batch_slice,
            parts.parameters,
            put=parts.objective.open(step, self._batch, batch_slice),
            close=parts.objective.close,
        )
        actions = self._hold_lane(parts.runner.chain())
        actions += parts.slices.read_ahead(step + 1, stop=step + 2)
        if not parts.state.is_over(step + 1):
            actions += parts.prefetch.fetch(step + 1, now, ahead=True)
        return actions

    def _end(self, now: Seconds) -> list[Action]:
        parts = self._parts
        # The leader may let everyone exit after this report, so all pushes must be applied.
        if not parts.objective.all_pushes_applied:
            return []
        parts.state.phase = Phase.ENDED
        parts.shutdown.end(now)
        return [*self._member.report_steps(now), *parts.shutdown.leave(now)]


def _failure(error: BaseException, *, step: int) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"step {step} failed: {type(error).__name__}: {error}")


_IDLE: Final = {Phase.GATHERED: "waiting for begin", Phase.RUNNING: "reading"}


@final
class RankStatus:
    """Describes what one rank is doing."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts

    def state(self, executor: str) -> str:
        parts = self._parts
        if executor and executor != CHAIN:
            return executor.removeprefix("machine:")
        if parts.leader is not None and parts.leader.is_held:
            return "waiting for more samples"
        rank = self._awaited(executor)
        if rank is not None and rank != parts.rank:
            return f"waiting for {parts.names[rank]}"
        if executor or parts.runner.is_open:
            return "computing"
        waited = parts.client.waiting_for
        if waited is not None:
            return f"waiting for {waited}"
        phase = parts.state.phase
        return _IDLE.get(phase, phase.value)

    def _awaited(self, executor: str) -> int | None:
        parts, leader = self._parts, self._parts.leader
        match parts.state.phase:
            case Phase.RUNNING if parts.runner.is_open:
                return None if executor else parts.runner.awaited
            case Phase.RUNNING if parts.norm_reduction.is_open or not parts.may_step:
                return 0 if leader is None else leader.slowest
            case Phase.ALONE | Phase.GATHERED if leader is None:
                return 0
            case Phase.GATHERED if leader is not None and leader.waiting_for:
                return min(leader.waiting_for)
            case _:
                return None


REMIND: Final = "machine:remind"

REMIND_SECONDS: Final = 0.25


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Identity of a rank."""

    group: str  # "replica-3" or "evaluator"
    machine: int  # the rank within the group; 0 leads
    n_machines: int
    plan: str  # hash of the plan, equal on all ranks
    await_begin: bool = True  # the leader waits for `StartTraining` before the first step


RankMessage = (
    StartTraining
    | Evaluate
    | Stop
    | RankReady
    | StepsDone
    | StartEpoch
    | GrantSteps
    | TransferBlock
    | TransferAck
    | ShardReply
)


@final
class PartitionWorker:
    """The role "replica-R.M" or "evaluator.M".

    Args:
        config: Identity of the rank.
        client: Connects to the shards that hold what the rank keeps.
        runner: Runs the operations of its steps.
        streams: Reliable streams to other ranks, by rank; shared with `runner`.
        batch_plan: The samples of each step.
        slices: The rank's slices of them.
        objective: What the steps are for.
        shapes: Per item that the rank keeps.
        leader: On rank 0: grants steps to the group.
    """

    accepts: Final = message_types(RankMessage)

    def __init__(  # noqa: PLR0913 -- one call site
        self,
        config: RankConfig,
        *,
        client: ParameterClient,
        runner: StepRunner,
        streams: Mapping[int, RankLink],
        batch_plan: BatchPlan,
        slices: SlicePrefetch,
        objective: Objective,
        shapes: Sequence[tuple[int, ...]],
        leader: GroupLeader | None,
    ) -> None:
        self._names = member_names(config.group, config.n_machines)
        self._rank_of = {name: index for index, name in enumerate(self._names)}
        self._name = self._names[config.machine]
        self._client = client
        self._runner = runner
        self._streams = streams
        self._objective = objective
        self._leader = leader
        state = GroupState(self._name, plan=config.plan)
        self._prefetch = ParameterPrefetch(client, objective)
        self._norm_reduction = NormReduction(state)
        self._shutdown = RankShutdown(
            self._names, state=state, objective=objective, leader=leader, metrics=self._metrics
        )
        parts = RankParts(
            names=self._names,
            rank=config.machine,
            client=client,
            runner=runner,
            batch_plan=batch_plan,
            slices=slices,
            objective=objective,
            parameters=[
                value.view(shape) for value, shape in zip(objective.values, shapes, strict=True)
            ],
            state=state,
            prefetch=self._prefetch,
            norm_reduction=self._norm_reduction,
            shutdown=self._shutdown,
            leader=leader,
        )
        self._member = GroupMember(parts)
        self._loop = StepLoop(parts, self._member)
        self._status = RankStatus(parts)
        self._state = state

    # ----------------------------------------------------------------------------------- events

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or learning rate make training impossible.
            PeerLostError: a shard has been silent for too long.
        """
        if self._shutdown.is_gone:
            return []
        if self._client.owns(event):
            actions: Sequence[Action] = self._client.handle(event, now)
        else:
            actions = self._on_event(event, now)
        begun = self._loop.advance(now)
        # A chain does not depend on these messages, so computing starts before they are sent.
        is_chain = self._loop.executor == CHAIN
        both = (begun, actions) if is_chain else (actions, begun)
        return [*both[0], *both[1], *self._lead(now)]

    def wake(self, now: Seconds) -> Sequence[Action]:
        """Check again whether work can begin, after the objective changed its own state."""
        if self._shutdown.is_gone:
            return []
        return [*self._loop.advance(now), *self._lead(now)]

    def _on_event(self, event: Event, now: Seconds) -> Sequence[Action]:
        match event:
            case Started():
                return self._start(event.incarnation, now)
            case Received():
                return self._receive(event, now)
            case TimerFired(name=name) if name == REMIND:
                return self._remind(now)
            case TimerFired():
                self._prefetch.waits = False
            case Computed():
                return self._loop.computed(event, now)
            case PeerJoined() | PeerLost():
                return self._peer(event, now)
            case _:
                pass
        return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the state as a phrase, and the counters of client, objective and rank."""
        return self._status.state(self._loop.executor), self._metrics()

    def _metrics(self) -> Mapping[str, float]:
        metrics = {
            **self._client.counters(),
            **self._objective.figures(),
            # JSON numbers: the low 32 bits are enough to tell generations apart.
            "generation": float(self._runner.generation & 0xFFFFFFFF),
            "generations": float(self._state.n_generations),
            "messages_out": float(sum(c.n_out for c in self._streams.values())),
            "messages_resent": float(sum(c.n_again for c in self._streams.values())),
        }
        for rank, stream in self._streams.items():
            if stream.n_bytes:
                metrics[f"bytes_to_{rank}"] = float(stream.n_bytes)
        return metrics

    def _start(self, incarnation: int, now: Seconds) -> list[Action]:
        self._member.incarnation = incarnation
        actions = self._client.start(incarnation, now)
        if self._leader is not None:
            self._leader.joined(0, incarnation, now)
            out = self._leader.start(incarnation, now)
            actions += self._member.deliver(out, now)
        return [*actions, *self._remind(now)]

    def _peer(self, event: PeerJoined | PeerLost, now: Seconds) -> list[Action]:
        rank = self._rank_of.get(event.peer)
        if rank is None:
            return []
        if isinstance(event, PeerJoined):
            if self._leader is None:
                return []
            out = self._leader.joined(rank, event.incarnation, now)
            return self._member.deliver(out, now)
        return self._lost(rank, now) if event.for_good else []

    def _lost(self, rank: int, now: Seconds) -> list[Action]:
        if self._leader is not None:
            return self._member.deliver(self._leader.lost(rank, now), now)
        if rank == 0:
            self._shutdown.leader_lost()
        return []

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        message = event.message
        rank = self._rank_of.get(event.sender)
        match message:
            case StartTraining() | Evaluate() | Stop():
                return self._command(message, now)
            case RankReady() | StepsDone() if self._leader and rank is not None:
                heard = self._leader.hear(rank, event.incarnation, message, now)
                return self._member.deliver(heard, now)
            case StartEpoch() | GrantSteps() if rank == 0:
                return self._member.follow(message, now)
            case TransferBlock() if rank is not None and rank in self._streams:
                return self._runner.take(rank, message, now)
            case TransferAck() if rank is not None and rank in self._streams:
                return self._runner.taken(rank, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent {self._name} "
                    f"{type(message).__name__}, which is not for it"
                )

    def _command(self, message: StartTraining | Evaluate | Stop, now: Seconds) -> list[Action]:
        if self._leader is None:  # the leader gets the same command, and decides
            if isinstance(message, Stop):
                self._shutdown.stop(now)
            return []
        out = self._objective.command(self._leader, message, now)
        return self._member.deliver(out, now)

    def _lead(self, now: Seconds) -> Sequence[Action]:
        if self._leader is None or self._shutdown.is_gone:
            return []
        actions, out = self._objective.report(self._leader, now, final=False)
        if not out:
            return actions
        sent = self._member.deliver(out, now)
        return [*actions, *sent, *self._loop.advance(now)]

    def _remind(self, now: Seconds) -> list[Action]:
        # Repeats whatever may have been lost; the receivers ignore duplicates.
        actions: list[Action] = [SetTimer(name=REMIND, at=now + REMIND_SECONDS)]
        for stream in self._streams.values():
            actions += stream.remind(now)
        if self._leader is not None:
            actions += self._member.deliver(self._leader.remind(now), now)
        if self._shutdown.is_left(now, is_idle=not self._loop.executor):
            return [*actions, *self._shutdown.go()]
        return [*actions, *self._member.resend(now)]
