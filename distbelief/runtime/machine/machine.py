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

from distbelief.errors import RemoteProtocolError
from distbelief.messages import (
    Begin,
    Evaluate,
    Gather,
    Gathered,
    Proceed,
    Stepped,
    Stop,
    Taken,
    Transfer,
)
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.roles import (
    Action,
    Computed,
    Event,
    PeerJoined,
    PeerLost,
    Received,
    Seconds,
    SetTimer,
    Started,
    TimerFired,
)
from distbelief.runtime.machine.advancing import Advancing
from distbelief.runtime.machine.courier import Courier
from distbelief.runtime.machine.course import Course
from distbelief.runtime.machine.duty import Duty
from distbelief.runtime.machine.ending import Ending
from distbelief.runtime.machine.equipment import Equipment
from distbelief.runtime.machine.following import Following
from distbelief.runtime.machine.leading import Leader
from distbelief.runtime.machine.living import Living
from distbelief.runtime.machine.machine_names import member_names
from distbelief.runtime.machine.portions import PortionsAhead
from distbelief.runtime.machine.renewing import Renewing
from distbelief.runtime.machine.stepping import CHAIN, Stepping
from distbelief.runtime.machine.voting import Voting
from distbelief.runtime.machine.whereabouts import Whereabouts


REMIND: Final = "machine:remind"

REMIND_SECONDS: Final = 0.25


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """Which machine it is.

    Attributes:
        group: Its replica, or the evaluators.
        machine: Which of them; 0 leads.
        n_machines: How many they are.
        plan: Hash of the plan: all have the same.
        await_begin: The leader waits for `Begin` before the first step.
    """

    group: str
    machine: int
    n_machines: int
    plan: str
    await_begin: bool = True


@final
class Machine:
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

    def __init__(  # noqa: PLR0913 -- one call site; each is a thing of its own
        self,
        config: MachineConfig,
        *,
        client: ParameterClient,
        stepping: Stepping,
        couriers: Mapping[int, Courier],
        course: Course,
        portions: PortionsAhead,
        duty: Duty,
        shapes: Sequence[tuple[int, ...]],
        leader: Leader | None,
    ) -> None:
        self._names = member_names(config.group, config.n_machines)
        self._places = {name: index for index, name in enumerate(self._names)}
        self._name = self._names[config.machine]
        self._client = client
        self._stepping = stepping
        self._couriers = couriers
        self._duty = duty
        self._leader = leader
        living = Living(self._name, plan=config.plan)
        self._renewing = Renewing(client, duty)
        self._voting = Voting(living)
        self._ending = Ending(
            self._names, living=living, duty=duty, leader=leader, figures=self._figures
        )
        own = Equipment(
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
        self._following = Following(own)
        self._advancing = Advancing(own, self._following)
        self._whereabouts = Whereabouts(own)
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
            case Begin() | Evaluate() | Stop():
                return self._command(message, now)
            case Gathered() | Stepped() if self._leader and machine is not None:
                heard = self._leader.hear(machine, event.incarnation, message, now)
                return self._following.tell(heard, now)
            case Gather() | Proceed() if machine == 0:
                return self._following.obey(message, now)
            case Transfer() if machine is not None and machine in self._couriers:
                return self._stepping.take(machine, message, now)
            case Taken() if machine is not None and machine in self._couriers:
                return self._stepping.taken(machine, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent {self._name} "
                    f"{type(message).__name__}, which is not for it"
                )

    def _command(self, message: Begin | Evaluate | Stop, now: Seconds) -> list[Action]:
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
