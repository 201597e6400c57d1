"""One machine of a group that computes one model together: the role.

    gathering     a new life: give up the step under way, let pushes settle
    gathered      told the leader so
    running       take the steps that are granted, one after the other
    ended         the last is taken, and all that was pushed is applied

A step: what it begins with (samples read, parameters fetched), then the operations of
the program as their inputs arrive (`stepping`), then what is done with the result
(`Duty`: train, or measure). That may depend on all machines (`Vote`): whether the
gradient is finite, and how long it is; then the step is over once all have said so.
Messages leave as soon as what they hold is computed. They
carry the number of the life, so those of a life that is over are refused, and those for
a step that has not begun here are kept.

Whoever waits names whom: `status()` says "waiting for replica-0.3".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from distbelief.errors import (
    DistBeliefError,
    JobError,
    LocalProtocolError,
    RemoteProtocolError,
)
from distbelief.messages import (
    Begin,
    Evaluate,
    Finished,
    Gather,
    Gathered,
    Proceed,
    Stepped,
    Stop,
    Taken,
    Transfer,
)
from distbelief.parameter_server.client import ParameterClient
from distbelief.roles import (
    SUPERVISOR,
    Action,
    Compute,
    Computed,
    Event,
    Halt,
    PeerJoined,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from distbelief.runtime.courier import Courier
from distbelief.runtime.course import Chosen, Course
from distbelief.runtime.duty import Duty, Vote
from distbelief.runtime.ending import Ending
from distbelief.runtime.execution import Found
from distbelief.runtime.leading import Leader, Outgoing
from distbelief.runtime.living import Living, Phase
from distbelief.runtime.machine_names import member_names
from distbelief.runtime.portions import READ, PortionsAhead
from distbelief.runtime.renewing import Renewing
from distbelief.runtime.stepping import CHAIN, Ran, Stepping
from distbelief.runtime.whereabouts import Whereabouts


REMIND: Final = "machine:remind"
SETTLE: Final = "machine:settle"

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
@dataclass(frozen=True, slots=True)
class _Ballot:
    """A step that is computed, until all have said what they have of it."""

    vote: Vote
    found: Found
    chosen: Chosen


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
        self._config = config
        self._names = member_names(config.group, config.n_machines)
        self._places = {name: index for index, name in enumerate(self._names)}
        self._client = client
        self._stepping = stepping
        self._couriers = couriers
        self._course = course
        self._portions = portions
        self._duty = duty
        self._parameters = [
            value.view(shape) for value, shape in zip(duty.values, shapes, strict=True)
        ]
        self._leader = leader
        self._incarnation = 0
        self._living = Living(self._names[config.machine], plan=config.plan)
        self._lane = ""  # the work under way in the compute lane
        self._whereabouts = Whereabouts(
            self._names,
            config.machine,
            client=client,
            stepping=stepping,
            living=self._living,
            leader=leader,
        )
        self._renewing = Renewing(client, duty)
        self._ending = Ending(self._names, living=self._living, leader=leader)
        self._halted = False
        self._chosen: Chosen | None = None  # of the step under way
        self._ballot: _Ballot | None = None  # of the step that is computed
        self._square = 0.0  # what was said of it

    # ------------------------------------------------------------------------- events

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or learning rate make it impossible to go on.
            PeerLostError: a shard has been silent for too long.
        """
        if self._halted:
            return []
        if self._client.owns(event):
            actions: Sequence[Action] = self._client.handle(event, now)
        else:
            actions = self._happened(event, now)
        begun = self._advance(now)
        # A chain changes nothing that is sent: the machine computes on meanwhile.
        both = (begun, actions) if self._lane == CHAIN else (actions, begun)
        return [*both[0], *both[1], *self._lead(now)]

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
                return self._computed(event, now)
            case PeerJoined():
                return self._joined(event, now)
            case _:
                pass
        return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and: the client's counters, the duty's, its own."""
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
        counts = self._ballot is not None
        return self._whereabouts.state(self._lane, counts=counts), figures

    def _start(self, incarnation: int, now: Seconds) -> list[Action]:
        self._incarnation = incarnation
        actions = self._client.start(incarnation, now)
        if self._leader is not None:
            self._leader.joined(0, incarnation, now)
            actions += self._tell(self._leader.start(incarnation, now), now)
        return [*actions, *self._remind(now)]

    def _joined(self, event: PeerJoined, now: Seconds) -> list[Action]:
        machine = self._places.get(event.peer)
        if self._leader is None or machine is None:
            return []
        return self._tell(self._leader.joined(machine, event.incarnation, now), now)

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        message = event.message
        machine = self._places.get(event.sender)
        match message:
            case Begin() | Evaluate() | Stop():
                return self._command(message, now)
            case Gathered() | Stepped() if self._leader and machine is not None:
                heard = self._leader.hear(machine, event.incarnation, message, now)
                return self._tell(heard, now)
            case Gather() | Proceed() if machine == 0:
                return self._obey(message, now)
            case Transfer() if machine is not None and machine in self._couriers:
                return self._stepping.take(machine, message, now)
            case Taken() if machine is not None and machine in self._couriers:
                return self._stepping.taken(machine, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent {self._names[self._config.machine]} "
                    f"{type(message).__name__}, which is not for it"
                )

    def _command(self, message: Begin | Evaluate | Stop, now: Seconds) -> list[Action]:
        if self._leader is None:  # who is told too, and decides
            if isinstance(message, Stop):
                self._ending.stop(now)
            return []
        return self._tell(self._duty.command(self._leader, message, now), now)

    def _computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        if event.error is not None:
            raise _failure(event.error, step=self._stepping.step)
        if event.name == READ:
            self._portions.have_read(event.result)
            return []
        if event.name != self._lane:
            raise LocalProtocolError(f"nobody asked for {event.name!r}")
        self._lane = ""
        match event.name:
            case "machine:install":
                return self._renewing.installed(event, now)
            case "machine:chain":
                return self._ran(event.result, now)
            case "machine:settle":
                assert self._ballot is not None
                ballot, self._ballot = self._ballot, None
                return self._duty.closed(event.result, ballot.found, ballot.chosen, now)
            case _:
                return self._duty.computed(event, now)

    def _ran(self, result: object, now: Seconds) -> Sequence[Action]:
        """Send what a chain has for others; account for a step that is over."""
        assert isinstance(result, Ran), result
        actions = self._stepping.ran(result, now)
        if result.found is None:
            return actions
        assert self._chosen is not None
        chosen, self._chosen = self._chosen, None
        is_over = result.life != self._stepping.life
        if isinstance(result.closed, Vote):
            if is_over:
                return actions  # nobody counts the votes; the duty drops it
            self._square = result.closed.square
            self._ballot = _Ballot(result.closed, result.found, chosen)
        else:
            # Of a life that is over too: it is as good as any, if it is whole.
            actions += self._duty.closed(result.closed, result.found, chosen, now)
            if is_over:
                return actions
        self._living.add(result.found, len(chosen.indices))
        return [*actions, *self._say_stepped(now)]

    # -------------------------------------------------------------------------- leader

    def _tell(self, out: Outgoing, now: Seconds) -> list[Action]:
        """Send what the leader says; what it says to itself is obeyed at once."""
        actions: list[Action] = []
        for machine, message in out:
            if machine != self._config.machine:
                actions.append(Send(receiver=self._names[machine], message=message))
            else:
                assert isinstance(message, Gather | Proceed), message
                actions += self._obey(message, now)
        return actions

    def _say(self, message: Gathered | Stepped, now: Seconds) -> list[Action]:
        """Say something to the leader, who may be this machine."""
        if self._leader is None:
            return [Send(receiver=self._names[0], message=message)]
        heard = self._leader.hear(0, self._incarnation, message, now)
        return self._tell(heard, now)

    def _lead(self, now: Seconds) -> Sequence[Action]:
        if self._leader is None or self._halted:
            return []
        actions, out = self._duty.report(self._leader, now, final=False)
        if not out:
            return actions
        return [*actions, *self._tell(out, now), *self._advance(now)]

    def _remind(self, now: Seconds) -> list[Action]:
        """Say again what may have been lost."""
        actions: list[Action] = [SetTimer(name=REMIND, at=now + REMIND_SECONDS)]
        for courier in self._couriers.values():
            actions += courier.remind(now)
        if self._leader is not None:
            actions += self._tell(self._leader.remind(now), now)
        return [*actions, *self._say_again(now)]

    def _say_again(self, now: Seconds) -> list[Action]:
        match self._living.phase:
            case Phase.ALONE if self._ending.is_left(now):
                return self._go()
            case Phase.ALONE if self._leader is None:
                return self._say(Gathered(life=0, pushes=False, samples=0), now)
            case Phase.GATHERED:
                return self._say_gathered(now)
            case Phase.RUNNING | Phase.ENDED if not self._may_step or self._ballot:
                return self._say_stepped(now)
            case _:
                return []

    @property
    def _may_step(self) -> bool:
        return self._stepping.step < self._living.granted

    # ----------------------------------------------------------------------- obedience

    def _obey(self, message: Gather | Proceed, now: Seconds) -> list[Action]:
        living = self._living
        if isinstance(message, Gather):
            if living.gather(message):
                self._stepping.begin(message.life)
                self._renewing.begin(message.life)
            elif living.phase is Phase.GATHERED:
                return self._say_gathered(now)
            return []
        if not living.proceed(message):
            return []
        self._course.start(message.position)
        self._portions.begin(message.life)
        self._duty.begin(message.position, now)
        return self._stepping.place(now)

    def _settle(self, now: Seconds) -> list[Action]:
        """Answer the leader once nothing is under way; the lane is idle."""
        self._chosen = self._ballot = None
        self._duty.drop()
        if not (self._client.ready and self._duty.is_settled):
            return []
        self._living.phase = Phase.GATHERED
        return self._say_gathered(now)

    def _say_gathered(self, now: Seconds) -> list[Action]:
        return self._say(self._living.gathered(self._duty.pushed), now)

    def _say_stepped(self, now: Seconds) -> list[Action]:
        steps, clock = self._stepping.step, self._duty.clock
        said = self._living.stepped(steps, clock=clock, square=self._square)
        return self._say(said, now)

    # ----------------------------------------------------------------------- the steps

    def _advance(self, now: Seconds) -> list[Action]:
        """Begin what can begin; the compute lane has one thing at a time."""
        if self._lane or self._renewing.waits:
            return []
        match self._living.phase:
            case Phase.GATHERING:
                return self._settle(now)
            case Phase.RUNNING:
                return self._go_on(now)
            case Phase.ENDED:
                return self._leave(now)
            case _:
                return []

    def _go_on(self, now: Seconds) -> list[Action]:
        if self._ballot is not None:
            return self._count(self._ballot)
        if self._stepping.is_open:
            return self._occupy(self._stepping.chain())
        return self._between(now)

    def _occupy(self, actions: Sequence[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Compute):
                self._lane = action.name
        return list(actions)

    def _count(self, ballot: "_Ballot") -> list[Action]:
        """Do with the result of a step what all have agreed on, if they have."""
        if self._living.agreed < self._stepping.step:
            return []
        work = partial(ballot.vote.settle, self._living.square)
        return self._occupy([Compute(name=SETTLE, work=work, cost=ballot.vote.cost)])

    def _between(self, now: Seconds) -> list[Action]:
        """Do what comes between two steps; begin the next one."""
        step = self._stepping.step
        over = self._living.is_over(step)
        work = self._occupy(self._duty.work(final=over))
        if work or self._duty.is_due:
            return work
        if over:
            return self._end(now)
        stop = self._living.granted if self._living.is_last else step + 2
        actions = self._portions.read_ahead(step, stop=stop)
        actions += self._renewing.fetch(step, now, ahead=False)
        if not self._may_step or not self._client.ready:
            return actions
        if self._renewing.lacks(step):
            return [*actions, *self._occupy(self._renewing.install(step))]
        return [*actions, *self._open(step, now)]

    def _open(self, step: int, now: Seconds) -> list[Action]:
        """Begin a step, if its samples are there."""
        portion = self._portions.take(step)
        if portion is None:
            return []
        self._chosen = self._course.batch(step)
        self._stepping.open(
            portion,
            self._parameters,
            put=self._duty.open(step, self._chosen, portion),
            close=self._duty.close,
        )
        actions = self._occupy(self._stepping.chain())
        actions += self._portions.read_ahead(step + 1, stop=step + 2)
        if not self._living.is_over(step + 1):
            actions += self._renewing.fetch(step + 1, now, ahead=True)
        return actions

    # ------------------------------------------------------------------------- the end

    def _end(self, now: Seconds) -> list[Action]:
        """End once all that was pushed is known to be applied."""
        if not self._duty.is_settled:
            return []
        self._living.phase = Phase.ENDED
        self._ending.end(now)
        return [*self._say_stepped(now), *self._leave(now)]

    def _leave(self, now: Seconds) -> list[Action]:
        """Go once all have taken the last step: nobody needs this machine any more."""
        if not self._ending.may_go(now):
            return []
        actions: list[Action] = []
        if self._leader is not None:
            last, _ = self._duty.report(self._leader, now, final=True)
            actions += last
        return [*actions, *self._ending.farewell(), *self._go()]

    def _go(self) -> list[Action]:
        self._halted = True
        _, figures = self.status()
        finished = Finished(counters=dict(figures))
        return [Send(receiver=SUPERVISOR, message=finished), Halt()]


def _failure(error: BaseException, *, step: int) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"step {step} failed: {type(error).__name__}: {error}")
