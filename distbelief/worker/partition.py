"""One machine of a group that computes one model together: the role.

    gathering     a new life: give up the step under way, let pushes settle
    gathered      told the leader so
    running       take the steps that are granted, one after the other
    ended         the last is taken, and all that was pushed is applied

A step: what it begins with (samples read, parameters fetched), then the operations of
the program as their inputs arrive (`stepping`), then what is done with the result
(`Duty`: train, or measure). That may depend on all machines (`voting`): whether the
gradient is finite, and how long it is; then the step is over once all have said so.
Messages leave as soon as what they hold is computed. They carry the number of the life,
so those of a life that is over are refused, and those for a step that has not begun
here are kept.

The role takes events to its parts (`equipment`): `following` talks with the leader,
`advancing` has the compute lane, `ending` knows when to go.

Whoever waits names whom: `status()` says "waiting for replica-0.3".
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
from distbelief.roles.reliable import ReliableSender
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
    NormReduction,
    NormSum,
    Objective,
    Phase,
    RankShutdown,
    Vote,
    member_names,
)
from distbelief.worker.group_leader import GroupLeader, Outgoing
from distbelief.worker.steps import CHAIN, INSTALL, ParameterPrefetch, StepOutcome, StepRunner


# What a machine of a group has: given whole to each part that acts for it.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """All that one machine has.

    Attributes:
        names: Of all machines of the group, its leader first.
        machine: Which of them.
        client: Of the shards that hold what it keeps.
        stepping: Its steps.
        couriers: Its links to the other machines.
        course: The samples of each step.
        portions: Its part of them.
        duty: What it computes for.
        parameters: Per item that it keeps, (*region.shape).
        living: Where in the life of the group it is.
        renewing: Its fetches.
        voting: What it says of a step, and all have.
        ending: When it may go.
        leader: If it leads.
    """

    names: Sequence[Address]
    machine: int
    client: ParameterClient
    stepping: StepRunner
    couriers: Mapping[int, ReliableSender]
    course: BatchPlan
    portions: SlicePrefetch
    duty: Objective
    parameters: Sequence[torch.Tensor]
    living: GroupState
    renewing: ParameterPrefetch
    voting: NormReduction
    ending: RankShutdown
    leader: GroupLeader | None

    @property
    def may_step(self) -> bool:
        """Whether the leader has granted the step under way, or the next."""
        return self.stepping.step < self.living.granted


# What a machine hears from its leader, and says to it; the leader is a machine too.
#
#     Gather      a new life: give up the step under way     -> Gathered, once nothing is
#     Proceed     begin, or go on; so many steps in all      -> Stepped, after each
#
# What machine 0 says to itself it obeys at once; to the others it is sent. Whatever may
# have been lost is said again from time to time.


@final
class GroupMember:
    """One machine's talk with its leader.

    Args:
        own: All that the machine has.

    Attributes:
        incarnation: Of the machine.
    """

    def __init__(self, own: RankParts) -> None:
        self.incarnation = 0
        self._own = own

    # -------------------------------------------------------------------------- spoken

    def tell(self, out: Outgoing, now: Seconds) -> list[Action]:
        """Send what the leader says; what it says to itself is obeyed at once."""
        own = self._own
        actions: list[Action] = []
        for machine, message in out:
            if machine != own.machine:
                actions.append(Send(receiver=own.names[machine], message=message))
            else:
                assert isinstance(message, StartEpoch | GrantSteps), message
                actions += self.obey(message, now)
        return actions

    def gathered(self, now: Seconds) -> list[Action]:
        """Say that nothing is under way, and what is pushed."""
        own = self._own
        return self._say(own.living.gathered(own.duty.pushed), now)

    def stepped(self, now: Seconds) -> list[Action]:
        """Say how many steps are taken, and what this machine has of the last."""
        own = self._own
        said = own.living.stepped(
            own.stepping.step,
            clock=own.duty.clock,
            square=own.voting.square,
            sample=own.voting.sample,
        )
        return self._say(said, now)

    def say_again(self, now: Seconds) -> Sequence[Action]:
        """Say again what may have been lost."""
        own = self._own
        match own.living.phase:
            case Phase.ALONE if own.leader is None:
                return self._say(RankReady(life=0, pushes=False, samples=0), now)
            case Phase.GATHERED:
                return self.gathered(now)
            case Phase.RUNNING | Phase.ENDED:
                waits = own.voting.is_open or not own.may_step
                return self.stepped(now) if waits else []
            case _:
                return []

    def _say(self, message: RankReady | StepsDone, now: Seconds) -> list[Action]:
        """Say something to the leader, who may be this machine."""
        leader = self._own.leader
        if leader is None:
            return [Send(receiver=self._own.names[0], message=message)]
        return self.tell(leader.hear(0, self.incarnation, message, now), now)

    # --------------------------------------------------------------------------- heard

    def obey(self, message: StartEpoch | GrantSteps, now: Seconds) -> list[Action]:
        """Do what the leader says.

        Raises:
            RemoteProtocolError: it is of a life that is over, or too early.
            JobError: the leader has another plan.
        """
        own, living = self._own, self._own.living
        if isinstance(message, StartEpoch):
            if living.gather(message):
                own.stepping.begin(message.life)
                own.renewing.begin(message.life)
            elif living.phase is Phase.GATHERED:
                return self.gathered(now)
            return []
        if not living.proceed(message):
            return []
        own.course.start(message.position)
        own.portions.begin(message.life)
        own.duty.begin(message.position, now)
        return own.stepping.place(now)


# What a machine's compute lane does next, one thing at a time, and what came of it.
#
# gathering   settle: nothing of the former life is under way any more
# running     chain after chain of the step; count the votes; what the duty wants
#             between two steps; install what was fetched; open the next
# ended       leave, once all have taken the last step


@final
class StepLoop:
    """One machine's compute lane.

    Args:
        own: All that the machine has.
        following: Its talk with its leader.

    Attributes:
        lane: The work under way, or "".
    """

    def __init__(self, own: RankParts, following: GroupMember) -> None:
        self.lane = ""
        self._own = own
        self._following = following
        self._chosen: BatchIndices | None = None  # of the step under way

    # ---------------------------------------------------------------------------- done

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Account for work that is done.

        Raises:
            JobError: model or data make it impossible to go on.
            LocalProtocolError: nobody asked for it.
        """
        own = self._own
        if event.error is not None:
            raise _failure(event.error, step=own.stepping.step)
        if event.name == READ:
            own.portions.have_read(event.result)
            return []
        if event.name != self.lane:
            raise LocalProtocolError(f"nobody asked for {event.name!r}")
        self.lane = ""
        if event.name == INSTALL:
            return own.renewing.installed(event, now)
        if event.name == CHAIN:
            return self._ran(event.result, now)
        if event.name == SETTLE:
            done = own.voting.settled()
            return own.duty.closed(event.result, done.found, done.chosen, now)
        return own.duty.computed(event, now)

    def _ran(self, result: object, now: Seconds) -> Sequence[Action]:
        """Send what a chain has for others; account for a step that is over."""
        own = self._own
        assert isinstance(result, StepOutcome), result
        actions = own.stepping.ran(result, now)
        if result.found is None:
            return actions
        assert self._chosen is not None
        chosen, self._chosen = self._chosen, None
        is_over = result.life != own.stepping.life
        if isinstance(result.closed, Vote):
            if is_over:
                return actions  # nobody counts the votes; the duty drops it
            own.voting.cast(NormSum(result.closed, result.found, chosen))
        else:
            # Of a life that is over too: it is as good as any, if it is whole.
            actions += own.duty.closed(result.closed, result.found, chosen, now)
            if is_over:
                return actions
        own.living.add(result.found, len(chosen.indices))
        return [*actions, *self._following.stepped(now)]

    # ---------------------------------------------------------------------------- next

    def advance(self, now: Seconds) -> Sequence[Action]:
        """Begin what can begin."""
        own = self._own
        if self.lane or own.renewing.waits:
            return []
        match own.living.phase:
            case Phase.GATHERING:
                return self._settle(now)
            case Phase.RUNNING:
                return self._go_on(now)
            case Phase.ENDED:
                return own.ending.leave(now)
            case _:
                return []

    def _settle(self, now: Seconds) -> list[Action]:
        """Answer the leader once nothing is under way; the lane is idle."""
        own = self._own
        self._chosen = None
        own.voting.drop()
        own.duty.drop()
        if not (own.client.ready and own.duty.is_settled):
            return []
        own.living.phase = Phase.GATHERED
        return self._following.gathered(now)

    def _go_on(self, now: Seconds) -> list[Action]:
        own = self._own
        if own.voting.is_open:
            return self._occupy(own.voting.count(own.stepping.step))
        if own.stepping.is_open:
            return self._occupy(own.stepping.chain())
        return self._between(now)

    def _occupy(self, actions: Sequence[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Compute):
                self.lane = action.name
        return list(actions)

    def _between(self, now: Seconds) -> list[Action]:
        """Do what comes between two steps; begin the next one."""
        own, step = self._own, self._own.stepping.step
        living, renewing = own.living, own.renewing
        over = living.is_over(step)
        work = self._occupy(own.duty.work(final=over))
        if work or own.duty.is_due:
            return work
        if over:
            return self._end(now)
        stop = living.granted if living.is_last else step + 2
        actions = own.portions.read_ahead(step, stop=stop)
        actions += renewing.fetch(step, now, ahead=False)
        if not own.may_step or not own.client.ready:
            return actions
        if renewing.lacks(step):
            return [*actions, *self._occupy(renewing.install(step))]
        return [*actions, *self._open(step, now)]

    def _open(self, step: int, now: Seconds) -> list[Action]:
        """Begin a step, if its samples are there."""
        own = self._own
        portion = own.portions.take(step)
        if portion is None:
            return []
        self._chosen = own.course.batch(step)
        own.stepping.open(
            portion,
            own.parameters,
            put=own.duty.open(step, self._chosen, portion),
            close=own.duty.close,
        )
        actions = self._occupy(own.stepping.chain())
        actions += own.portions.read_ahead(step + 1, stop=step + 2)
        if not own.living.is_over(step + 1):
            actions += own.renewing.fetch(step + 1, now, ahead=True)
        return actions

    def _end(self, now: Seconds) -> list[Action]:
        """End once all that was pushed is known to be applied."""
        own = self._own
        if not own.duty.is_settled:
            return []
        own.living.phase = Phase.ENDED
        own.ending.end(now)
        return [*self._following.stepped(now), *own.ending.leave(now)]


def _failure(error: BaseException, *, step: int) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"step {step} failed: {type(error).__name__}: {error}")


# What a machine is doing, in a word, and whom it waits for, by name.

_IDLE: Final = {Phase.GATHERED: "waiting for begin", Phase.RUNNING: "reading"}


@final
class RankStatus:
    """Tells of one machine.

    Args:
        own: All that the machine has.
    """

    def __init__(self, own: RankParts) -> None:
        self._own = own

    def state(self, lane: str) -> str:
        """Return what it is doing.

        Args:
            lane: The work under way in the compute lane, or "".
        """
        own = self._own
        if lane and lane != CHAIN:
            return lane.removeprefix("machine:")
        if own.leader is not None and own.leader.is_held:
            return "waiting for more samples"
        machine = self._awaited(lane)
        if machine is not None and machine != own.machine:
            return f"waiting for {own.names[machine]}"
        if lane or own.stepping.is_open:
            return "computing"
        waited = own.client.waiting_for
        if waited is not None:
            return f"waiting for {waited}"
        phase = own.living.phase
        return _IDLE.get(phase, phase.value)

    def _awaited(self, lane: str) -> int | None:
        """Return the machine that this one waits for, if it does."""
        own, leader = self._own, self._own.leader
        match own.living.phase:
            case Phase.RUNNING if own.stepping.is_open:
                return None if lane else own.stepping.awaited
            case Phase.RUNNING if own.voting.is_open or not own.may_step:
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
    """Which machine it is.

    Attributes:
        group: Its replica, or the evaluators.
        machine: Which of them; 0 leads.
        n_machines: How many they are.
        plan: Hash of the plan: all have the same.
        await_begin: The leader waits for `StartTraining` before the first step.
    """

    group: str
    machine: int
    n_machines: int
    plan: str
    await_begin: bool = True


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
    """The role "replica-R.M", or "evaluator.M".

    Args:
        config: Which it is.
        client: Of the shards that hold what it keeps.
        stepping: Its steps.
        couriers: Its links to the other machines, which `stepping` uses too.
        course: The samples of each step.
        portions: Its part of them.
        duty: What it computes for.
        leader: What it does besides, if it is machine 0.
    """

    accepts: Final = message_types(RankMessage)

    def __init__(  # noqa: PLR0913 -- one call site; each is a thing of its own
        self,
        config: RankConfig,
        *,
        client: ParameterClient,
        stepping: StepRunner,
        couriers: Mapping[int, ReliableSender],
        course: BatchPlan,
        portions: SlicePrefetch,
        duty: Objective,
        shapes: Sequence[tuple[int, ...]],
        leader: GroupLeader | None,
    ) -> None:
        self._names = member_names(config.group, config.n_machines)
        self._places = {name: index for index, name in enumerate(self._names)}
        self._name = self._names[config.machine]
        self._client = client
        self._stepping = stepping
        self._couriers = couriers
        self._duty = duty
        self._leader = leader
        living = GroupState(self._name, plan=config.plan)
        self._renewing = ParameterPrefetch(client, duty)
        self._voting = NormReduction(living)
        self._ending = RankShutdown(
            self._names, living=living, duty=duty, leader=leader, figures=self._figures
        )
        own = RankParts(
            names=self._names,
            machine=config.machine,
            client=client,
            stepping=stepping,
            couriers=couriers,
            course=course,
            portions=portions,
            duty=duty,
            parameters=[
                value.view(shape) for value, shape in zip(duty.values, shapes, strict=True)
            ],
            living=living,
            renewing=self._renewing,
            voting=self._voting,
            ending=self._ending,
            leader=leader,
        )
        self._following = GroupMember(own)
        self._advancing = StepLoop(own, self._following)
        self._whereabouts = RankStatus(own)
        self._living = living

    # ------------------------------------------------------------------------- events

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or learning rate make it impossible to go on.
            PeerLostError: a shard has been silent for too long.
        """
        if self._ending.is_gone:
            return []
        if self._client.owns(event):
            actions: Sequence[Action] = self._client.handle(event, now)
        else:
            actions = self._happened(event, now)
        begun = self._advancing.advance(now)
        # A chain changes nothing that is sent: the machine computes on meanwhile.
        is_chain = self._advancing.lane == CHAIN
        both = (begun, actions) if is_chain else (actions, begun)
        return [*both[0], *both[1], *self._lead(now)]

    def wake(self, now: Seconds) -> Sequence[Action]:
        """Look again at what the duty wants, which has heard of something itself."""
        if self._ending.is_gone:
            return []
        return [*self._advancing.advance(now), *self._lead(now)]

    def _happened(self, event: Event, now: Seconds) -> Sequence[Action]:
        match event:
            case Started():
                return self._start(event.incarnation, now)
            case Received():
                return self._receive(event, now)
            case TimerFired(name=name) if name == REMIND:
                return self._remind(now)
            case TimerFired():
                self._renewing.waits = False
            case Computed():
                return self._advancing.computed(event, now)
            case PeerJoined() | PeerLost():
                return self._peer(event, now)
            case _:
                pass
        return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and: the client's counters, the duty's, its own."""
        return self._whereabouts.state(self._advancing.lane), self._figures()

    def _figures(self) -> Mapping[str, float]:
        figures = {
            **self._client.counters(),
            **self._duty.figures(),
            "life": float(self._stepping.life & 0xFFFFFFFF),
            "lives": float(self._living.n_lives),
            "messages_out": float(sum(c.n_out for c in self._couriers.values())),
            "messages_again": float(sum(c.n_again for c in self._couriers.values())),
        }
        for machine, courier in self._couriers.items():
            if courier.n_bytes:
                figures[f"bytes_to_{machine}"] = float(courier.n_bytes)
        return figures

    def _start(self, incarnation: int, now: Seconds) -> list[Action]:
        self._following.incarnation = incarnation
        actions = self._client.start(incarnation, now)
        if self._leader is not None:
            self._leader.joined(0, incarnation, now)
            out = self._leader.start(incarnation, now)
            actions += self._following.tell(out, now)
        return [*actions, *self._remind(now)]

    def _peer(self, event: PeerJoined | PeerLost, now: Seconds) -> list[Action]:
        machine = self._places.get(event.peer)
        if machine is None:
            return []
        if isinstance(event, PeerJoined):
            if self._leader is None:
                return []
            out = self._leader.joined(machine, event.incarnation, now)
            return self._following.tell(out, now)
        return self._lost(machine, now) if event.for_good else []

    def _lost(self, machine: int, now: Seconds) -> list[Action]:
        if self._leader is not None:
            return self._following.tell(self._leader.lost(machine, now), now)
        if machine == 0:
            self._ending.leader_lost()
        return []

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        message = event.message
        machine = self._places.get(event.sender)
        match message:
            case StartTraining() | Evaluate() | Stop():
                return self._command(message, now)
            case RankReady() | StepsDone() if self._leader and machine is not None:
                heard = self._leader.hear(machine, event.incarnation, message, now)
                return self._following.tell(heard, now)
            case StartEpoch() | GrantSteps() if machine == 0:
                return self._following.obey(message, now)
            case TransferBlock() if machine is not None and machine in self._couriers:
                return self._stepping.take(machine, message, now)
            case TransferAck() if machine is not None and machine in self._couriers:
                return self._stepping.taken(machine, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent {self._name} "
                    f"{type(message).__name__}, which is not for it"
                )

    def _command(self, message: StartTraining | Evaluate | Stop, now: Seconds) -> list[Action]:
        if self._leader is None:  # who is told too, and decides
            if isinstance(message, Stop):
                self._ending.stop(now)
            return []
        out = self._duty.command(self._leader, message, now)
        return self._following.tell(out, now)

    def _lead(self, now: Seconds) -> Sequence[Action]:
        if self._leader is None or self._ending.is_gone:
            return []
        actions, out = self._duty.report(self._leader, now, final=False)
        if not out:
            return actions
        told = self._following.tell(out, now)
        return [*actions, *told, *self._advancing.advance(now)]

    def _remind(self, now: Seconds) -> list[Action]:
        """Say again what may have been lost."""
        actions: list[Action] = [SetTimer(name=REMIND, at=now + REMIND_SECONDS)]
        for courier in self._couriers.values():
            actions += courier.remind(now)
        if self._leader is not None:
            actions += self._following.tell(self._leader.remind(now), now)
        if self._ending.is_left(now, is_idle=not self._advancing.lane):
            return [*actions, *self._ending.go()]
        return [*actions, *self._following.say_again(now)]
