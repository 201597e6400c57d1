"""Simulated processes: each incarnation of each role, from its start to its end.

A role is built again for each incarnation, and its private state is lost when it ends. An
older incarnation may still run when the next one starts, if the supervisor declared it dead
while it was only paused. Its messages then carry the older incarnation number.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from distbelief.errors import DistBeliefError
from distbelief.roles.role import (
    SUPERVISOR,
    Address,
    Event,
    PeerJoined,
    PeerLost,
    Role,
    Seconds,
    Started,
    TimerFired,
)
from distbelief.simulation.cpu import EventLoop, Executors
from distbelief.simulation.event_queue import Call, Timers
from distbelief.simulation.machines import CostScale, Machine, frame_scale, scale_of
from distbelief.simulation.storage import HostMemory, LentMemory
from distbelief.simulation.topology import Path
from distbelief.simulation.world import World


N_ASTRAY_MAX = 1000  # messages for a future incarnation; the limit of ZeroMQ's queues


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedProcess:
    """One incarnation of one role, with all state that is lost when it ends."""

    name: Address
    incarnation: int
    role: Role
    machine: Machine
    scale: CostScale
    memory: LentMemory
    lanes: Executors
    timers: Timers
    launcher: "SimulatedProcess | None"
    paths: dict[Address, Path] = field(default_factory=dict)
    alive: bool = True
    desk: EventLoop | None = None  # None if handling events takes no time
    paused_until: Seconds | None = None
    waiting: list[Event] = field(default_factory=list)  # while paused
    handles_slowly: bool = False  # messages take time, although it has no event loop
    handles_until: Seconds = 0.0  # when the messages received so far are handled
    last_actions: int | None = None  # it dies after this many actions of the next event
    tears: bool = False  # a checkpoint that its death interrupts stays, damaged
    restart_after: Seconds | None = None  # after its death
    halted: bool = False  # it ended by itself
    error: str | None = None  # why it halted


@dataclass(slots=True, eq=False, kw_only=True)
class _Launch:
    name: Address
    incarnation: int
    launcher: SimulatedProcess
    cancelled: str | None = None  # the reason


Deliver = Callable[[SimulatedProcess, Event], None]


class ProcessTable:
    """All processes of a simulated cluster, running or ended."""

    def __init__(self, world: World, deliver: Deliver, handle: Deliver) -> None:
        self.newest: dict[Address, SimulatedProcess] = {}  # newest incarnation, running or ended
        self.known: dict[tuple[Address, int], SimulatedProcess] = {}  # by role and incarnation
        self._world = world
        self._deliver = deliver
        self._handle = handle  # immediately, without the event loop
        self._launches: list[_Launch] = []
        self._astray: dict[Address, deque[Event]] = {}  # for future incarnations
        self._incarnations: dict[Address, int] = {}
        self._hosts: dict[str, HostMemory] = {}

    def host_of(self, name: Address) -> HostMemory:
        machine = self._world.options.machine_of(name)
        host = machine.host if machine.shares_memory else ""
        # Host "" shares nothing: each role gets a memory of its own.
        key = host or f"/{name}"
        if key not in self._hosts:
            n_bytes_max = self._world.options.host_bytes_max
            self._hosts[key] = HostMemory(host, n_bytes_max=n_bytes_max)
        return self._hosts[key]

    # --- start ---

    def start(
        self,
        name: Address,
        *,
        incarnation: int | None = None,
        launcher: SimulatedProcess | None = None,
    ) -> None:
        """Start a new incarnation of `name`, by default with the next number."""
        number = self._next_incarnation(name, incarnation)
        before = self.newest.get(name)
        if before is not None and not before.alive:
            before.memory.release_all()
        memory = self.host_of(name).lend()
        try:
            role = self._world.builders[name](memory)
        except DistBeliefError as error:
            self._stillborn(name, number, launcher, error)
            return
        agenda, options = self._world.agenda, self._world.options
        machine = options.machine_of(name)
        sharing = self._world.sharings.get(machine.host)
        handling = machine.handling if sharing is not None else None
        begins = 0.0 if handling is None else handling.begins
        life = SimulatedProcess(
            name=name,
            incarnation=number,
            role=role,
            machine=machine,
            scale=scale_of(options.scales, name),
            handles_slowly=machine.handles_slowly,
            memory=memory,
            lanes=Executors(agenda, sharing, begins=begins),
            timers=Timers(agenda, lambda timer: self._fire(life, timer)),
            launcher=launcher,
        )
        if handling is not None and sharing is not None:
            life.desk = EventLoop(
                sharing,
                handling,
                partial(self._handle, life),
                slowness=partial(self._world.slowness, name),
            )
        self.newest[name] = self.known[name, number] = life
        if options.introduce and number > 1:
            self._lead_to_newest(name, number)
        restored = self._world.disk.newest(name)
        self._deliver(life, Started(incarnation=number, restored=restored))
        for event in self._astray.pop(name, ()):
            self._deliver(life, event)
        if self._world.options.introduce:
            self._introduce(life)

    def _lead_to_newest(self, name: Address, incarnation: int) -> None:
        # Drop the paths to older incarnations, so that senders connect to the new one.
        for life in self.known.values():
            path = life.paths.get(name)
            if path is not None and path.incarnation != incarnation:
                del life.paths[name]

    def launch(self, name: Address, *, incarnation: int, launcher: SimulatedProcess) -> None:
        """Start an incarnation of `name` after the time that a process needs to start."""
        launch = _Launch(name=name, incarnation=incarnation, launcher=launcher)
        self._launches.append(launch)
        agenda = self._world.agenda
        begins = agenda.now + self._world.options.launch_seconds
        agenda.at(begins, partial(self._finish_launch, launch))

    def _finish_launch(self, launch: "_Launch") -> None:
        name, number = launch.name, launch.incarnation
        again = partial(self._finish_launch, launch)
        if launch.cancelled is None and self._waits_for_machine(name, again):
            return
        self._launches.remove(launch)
        if launch.cancelled is None:
            self.start(name, incarnation=number, launcher=launch.launcher)
        else:
            self._tell(launch.launcher, name, number, launch.cancelled)

    def _waits_for_machine(self, name: Address, call: Call) -> bool:
        # True if the machine of `name` is in an outage; then `call` is made at its end.
        agenda = self._world.agenda
        back_at = self._world.away_until.get(name, 0.0)
        if back_at <= agenda.now:
            return False
        agenda.at(back_at, call)
        return True

    def _next_incarnation(self, name: Address, wanted: int | None) -> int:
        if name not in self._world.builders:
            known = ", ".join(self._world.builders)
            raise self._world.failure(
                f"there is no builder for {name!r}; there are builders for {known}"
            )
        last = self._incarnations.get(name, 0)
        number = last + 1 if wanted is None else wanted
        if number <= last:
            raise self._world.failure(
                f"{name} is launched as incarnation {number}, but had {last} already: "
                "each start needs a higher number"
            )
        self._incarnations[name] = number
        return number

    def _stillborn(
        self, name: Address, number: int, launcher: SimulatedProcess | None, error: Exception
    ) -> None:
        reason = f"could not be built: {error}"
        if launcher is None:
            raise self._world.failure(f"{name}#{number} {reason}") from error
        self._world.note(name, number, reason)
        self._tell(launcher, name, number, reason)

    def _fire(self, life: SimulatedProcess, timer: str) -> None:
        self._deliver(life, TimerFired(name=timer))

    def _introduce(self, life: SimulatedProcess) -> None:
        joined = PeerJoined(peer=life.name, incarnation=life.incarnation)
        acquainted = self._world.options.acquainted
        others = [other for other in self.newest.values() if other is not life]
        for other in others:
            if other.alive and (not acquainted or acquainted(life.name, other.name)):
                self._deliver(other, joined)
                known = PeerJoined(peer=other.name, incarnation=other.incarnation)
                self._deliver(life, known)

    # --- end ---

    def end(self, life: SimulatedProcess, reason: str) -> None:
        """End a process: by its own `Exit` (sent messages still leave), or by a kill."""
        if not life.alive:
            return
        self._world.note(life.name, life.incarnation, reason)
        life.alive = False
        life.timers.close()
        life.lanes.close(cut_short=not life.halted)
        if life.desk is not None:
            life.desk.close()
        life.waiting.clear()
        if not life.halted:
            for path in life.paths.values():
                path.broken_at = self._world.agenda.now
        if self.newest[life.name] is not life:
            life.memory.release_all()
        if life.launcher is not None:
            self._tell(life.launcher, life.name, life.incarnation, reason)
        if life.restart_after is not None and not life.halted:
            agenda = self._world.agenda
            agenda.at(agenda.now + life.restart_after, partial(self._succeed, life))

    def _succeed(self, life: SimulatedProcess) -> None:
        if self._waits_for_machine(life.name, partial(self._succeed, life)):
            return
        if self.newest[life.name] is life:
            self.start(life.name)

    def terminate(self, name: Address, reason: str) -> None:
        """Kill all incarnations of `name`, the oldest first, and cancel its launches."""
        for launch in self._launches:
            if launch.name == name:
                launch.cancelled = reason
        for life in list(self.known.values()):
            if life.name == name:
                self.end(life, reason)

    def _tell(
        self, launcher: SimulatedProcess, name: Address, incarnation: int, reason: str
    ) -> None:
        lost = PeerLost(peer=name, incarnation=incarnation, reason=reason)
        agenda = self._world.agenda
        agenda.at(
            agenda.now + self._world.options.notice_seconds, partial(self._deliver, launcher, lost)
        )

    # --- pause ---

    def pause(self, life: SimulatedProcess, seconds: Seconds) -> None:
        """Stop a process for `seconds`: its events wait, its work ends later."""
        agenda = self._world.agenda
        until = agenda.now + seconds
        stands_until = agenda.now if life.paused_until is None else life.paused_until
        if not life.alive or until <= stands_until:
            return
        self._world.note(life.name, life.incarnation, f"paused until {until!r}")
        life.lanes.delay(until - stands_until)
        if life.desk is not None:
            life.desk.hold(held=True)
        life.paused_until = until
        agenda.at(until, partial(self._resume, life))

    def _resume(self, life: SimulatedProcess) -> None:
        if life.paused_until is None or life.paused_until > self._world.agenda.now:
            return  # paused again, for longer
        life.paused_until = None
        if life.desk is not None:
            life.desk.hold(held=False)
        waiting, life.waiting = life.waiting, []
        self._world.agenda.before_all(partial(self._deliver, life, event) for event in waiting)

    # --- connections ---

    def deliver_to_next(self, name: Address, incarnation: int, event: Event) -> None:
        """Deliver a message for an ended incarnation to the next one (see `port_reuse`)."""
        newest = self.newest.get(name)
        if newest is not None and newest.alive and newest.incarnation > incarnation:
            self._deliver(newest, event)
        else:
            held = self._astray.setdefault(name, deque(maxlen=N_ASTRAY_MAX))
            held.append(event)

    def connect(self, life: SimulatedProcess, peer: Address, incarnation: int) -> Path:
        """Connect a process to this incarnation of `peer`."""
        path = life.paths.get(peer)
        if path is None or path.incarnation != incarnation:
            path = life.paths[peer] = self._new_path(life, peer, incarnation)
        return path

    def _new_path(self, life: SimulatedProcess, peer: Address, incarnation: int) -> Path:
        world, ends = self._world, (life.name, peer)
        options = world.options
        path = Path(
            options.link_of(life.name, peer),
            sender=life.name,
            receiver=peer,
            incarnation=incarnation,
        )
        route = world.ports.route(life.machine.host, options.machine_of(peer).host)
        if route is not None:
            path.lead_over(route)
        path.take_longer(options.machine_of(peer).handling_seconds)
        path.frame_scale = frame_scale(options.scales, life.name, peer)
        path.tally = world.tallies.setdefault(ends, [0, 0])
        return path

    def path(self, life: SimulatedProcess, receiver: Address) -> Path | None:
        """Return the connection to `receiver`, or None if there is none."""
        introduced = self._world.options.introduce
        known = life.paths.get(receiver)
        if known is not None:
            return known
        if receiver not in self._world.builders:
            return self.connect(life, receiver, 0)
        if not introduced and receiver != SUPERVISOR:
            return None
        newest = self.newest.get(receiver)
        # 1: the receiver starts at the same time, but after its peer.
        return self.connect(life, receiver, newest.incarnation if newest else 1)
