"""A job and the machines that join it, in one thread: links, processes, the time.

Roles are dummies: once begun they join, and say twice a second that they live, if the
link from their machine is up.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from distbelief.config.job import StopTable
from distbelief.core.errors import RemoteProtocolError
from distbelief.job.hosts.agent import HostAgent, HostAgentConfig
from distbelief.job.launch.local import PREPARE
from distbelief.protocol import (
    Failed,
    FileChunk,
    Finished,
    Heartbeat,
    Join,
    Message,
    Offer,
    Stop,
    role as rl,
)
from distbelief.protocol.codec import Codec
from distbelief.supervisor.hosts import HERE, ClusterConfig
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.role_placement import PlacementPolicy
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig


STEP = 0.25


class Site:
    """What a host is told, and whether it likes it."""

    def __init__(self, wrong: str | None = None, *, patience: float) -> None:
        self.brief = b""
        self.wrong = wrong
        self.patience = patience

    def store_job_spec(self, brief: bytes) -> float:
        self.brief = brief
        return self.patience

    def verdict(self) -> str | None:
        return self.wrong


@dataclass
class Machine:
    """One process that drives a role, and the processes of other roles beside it."""

    name: rl.Address
    role: rl.Role
    timers: dict[str, float] = field(default_factory=dict)
    processes: dict[rl.Address, int] = field(default_factory=dict)
    is_cut: bool = False
    is_dead: bool = False
    has_power: bool = True  # if it is dead, its system still answers
    is_paused: bool = False
    waiting: deque[rl.Event] = field(default_factory=deque)  # meanwhile
    halted: bool = False
    error: str | None = None


class Town:
    def __init__(
        self,
        roster: Sequence[tuple[str, Kind]],
        config: ClusterConfig | None = None,
        policy: PlacementPolicy | None = None,
    ) -> None:
        self.policy = policy
        self.places: dict[rl.Address, rl.Address] = {}  # who may use each name
        self.now = 100.0
        self.machines: dict[rl.Address, Machine] = {}
        self.lossy = ""  # a document of which no piece arrives
        self.slow_words = False  # what roles say last comes after their machine's word
        self.late: deque[tuple[rl.Address, int, rl.Address, Message]] = deque()
        self.mail: deque[tuple[rl.Address, int, rl.Address, Message]] = deque()
        self.answers: list[rl.PeerLost] = []  # to probes
        self.wire = Codec(run="t")
        self.begin_another(roster, config or config_of())

    # --------------------------------------------------------------- for the tests

    def come(
        self,
        name: str,
        *,
        cores: int = 2,
        memory_bytes: int = 1 << 30,
        wrong: str | None = None,
        config: HostAgentConfig | None = None,
        patience: float = 15.0,
    ) -> Machine:
        config = config or HostAgentConfig(
            offer=offer_of(name, cores=cores, memory_bytes=memory_bytes)
        )
        host = HostAgent(config, storage=Site(wrong, patience=patience))
        machine = self._begin(rl.Address(f"host-{name}"), host)
        self.pass_time(2.0)
        return machine

    def begin_another(self, roster: Sequence[tuple[str, Kind]], config: ClusterConfig) -> None:
        """A supervisor begins; at the place of the one before, if there was one."""
        stop = StopRules(StopTable(epochs=1e9), n_train=100)
        self.supervisor = Supervisor(
            SupervisorConfig(roster=tuple(roster), stop=stop, stable_seconds=1.0),
            config,
            policy=self.policy,
        )
        self.here = self._begin(HERE, self.supervisor)

    def pause(self, machine: Machine, seconds: float) -> None:
        """Its process stands still for a while (SIGSTOP)."""
        machine.is_paused = True
        self.pass_time(seconds)
        machine.is_paused = False
        self.pass_time(STEP)  # timers first, as the driver does
        while machine.waiting:
            self._deliver(machine, machine.waiting.popleft())
        self._carry()

    def leave(self, machine: Machine) -> None:
        stop = Stop(reason="Ctrl+C")
        self._deliver(machine, rl.Received(sender=rl.USER, incarnation=0, message=stop))

    def kill(self, machine: Machine, *, has_power: bool = False) -> None:
        machine.is_dead, machine.has_power = True, has_power
        machine.processes.clear()

    def die(self, machine: Machine, name: str) -> None:
        incarnation = machine.processes.pop(rl.Address(name))
        lost = rl.PeerLost(peer=rl.Address(name), incarnation=incarnation, reason="died")
        self._deliver(machine, lost)

    def fail(self, name: str, error: str) -> None:
        """A role cannot go on, and says that this is no fault of its process."""
        lives = (m.processes.get(rl.Address(name)) for m in self.machines.values())
        incarnation = next(incarnation for incarnation in lives if incarnation is not None)
        failed = Failed(error=error, culprit_is_job=True)
        self.mail.append((rl.Address(name), incarnation, rl.SUPERVISOR, failed))
        self.pass_time(5.0)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self._beat()
            running = [m for m in self.machines.values() if not m.is_paused]
            for machine in running:
                due = [n for n, at in machine.timers.items() if at <= self.now]
                for name in due:
                    del machine.timers[name]
                    self._deliver(machine, rl.TimerFired(name=name))
            while self.answers:
                self._deliver(self.here, self.answers.pop())
            self._carry()
            self.mail += self.late
            self.late.clear()

    def runs(self) -> dict[str, list[str]]:
        return {
            str(name): sorted(map(str, machine.processes))
            for name, machine in self.machines.items()
            if not (machine.halted or machine.is_dead)
        }

    @property
    def said(self) -> list[str]:
        return [m.text for m in self.supervisor.out.messages]

    # ---------------------------------------------------------------------- inside

    def _begin(self, name: rl.Address, role: rl.Role) -> Machine:
        machine = self.machines[name] = Machine(name, role)
        self._deliver(machine, rl.Started(incarnation=1))
        self._carry()
        return machine

    def _beat(self) -> None:
        for machine in self.machines.values():
            for role, incarnation in machine.processes.items():
                join = Join(endpoint=f"at-{machine.name}", host=machine.name, pid=1)
                beat = Heartbeat(state="busy", counters={"samples": 1.0})
                for message in (join, beat):
                    if not (machine.is_cut or role == PREPARE):
                        self.mail.append((role, incarnation, rl.SUPERVISOR, message))

    def _carry(self) -> None:
        while self.mail:
            sender, incarnation, receiver, message = self.mail.popleft()
            frames = self.wire.encode(message, sender=sender, incarnation=incarnation)
            copy = self.wire.decode(frames).message
            if isinstance(copy, FileChunk) and copy.document == self.lossy:
                continue
            event = rl.Received(sender=sender, incarnation=incarnation, message=copy)
            if receiver == rl.SUPERVISOR:
                self._deliver(self.here, event)
            elif receiver in self.machines:
                self._deliver(self.machines[receiver], event)
            elif isinstance(message, Stop):
                self._stop(receiver)

    def _stop(self, role: rl.Address) -> None:
        """A role does what it is told: it ends."""
        for machine in self.machines.values():
            if role in machine.processes and not machine.is_cut:
                incarnation = machine.processes[role]
                done = Finished(counters={})
                words = self.late if self.slow_words else self.mail
                words.append((role, incarnation, rl.SUPERVISOR, done))
                self.die(machine, role)

    def _deliver(self, machine: Machine, event: rl.Event) -> None:
        if machine.is_dead or machine.halted:
            return
        if machine.is_paused:
            machine.waiting.append(event)
            return
        if machine.is_cut and isinstance(event, rl.Received) and event.sender != rl.USER:
            return
        with suppress(RemoteProtocolError):  # as the driver does
            for action in machine.role.handle(event, self.now):
                self._perform(machine, action)

    def _perform(self, machine: Machine, action: rl.Action) -> None:
        match action:
            case rl.Send() if not machine.is_cut:
                sender = rl.SUPERVISOR if machine is self.here else machine.name
                self.mail.append((sender, 1, action.receiver, action.message))
            case rl.SetTimer():
                machine.timers[action.name] = action.at
            case rl.AssignName(name=name, to=to):
                self.places[name] = to
            case rl.Probe(peer=peer, incarnation=incarnation):
                if self.machines[peer].is_dead and self.machines[peer].has_power:
                    lost = rl.PeerLost(peer=peer, incarnation=incarnation, reason="refused")
                    self.answers.append(lost)
            case rl.Launch(name=name):
                assert name not in machine.processes, "begun twice"
                machine.processes[name] = action.incarnation
                if name == PREPARE:
                    self.die(machine, PREPARE)
            case rl.Terminate(name=name) if name in machine.processes:
                self.die(machine, name)
            case rl.Compute():
                result = action.work()
                self._deliver(machine, rl.Computed(name=action.name, result=result))
            case rl.Exit():
                machine.halted, machine.error = True, action.error
                machine.processes.clear()
            case _:
                pass


def offer_of(
    label: str,
    incarnation: int = 1,
    *,
    cores: int = 1,
    memory_bytes: int = 1 << 30,
    flops: float = 0.0,
    domain: str = "",
) -> Offer:
    return Offer(
        incarnation=incarnation,
        label=label,
        endpoint="",
        cores=cores,
        memory_bytes=memory_bytes,
        devices=(),
        flops=flops,
        domain=domain,
    )


def config_of(
    *, n_hosts: int = 0, hosts_seconds_max: float = 600.0, slots_here: int = 1, run: str = "r"
) -> ClusterConfig:
    return ClusterConfig(
        run=run,
        job_spec=b"b" * 10,
        n_hosts=n_hosts,
        hosts_seconds_max=hosts_seconds_max,
        slots_here=slots_here,
    )
