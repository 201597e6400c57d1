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
from distbelief.simulation.cpu import EventLoop, Executors, Host
from distbelief.simulation.event_queue import Call, Timers
from distbelief.simulation.machines import CostScale, Machine, frame_scale, scale_of
from distbelief.simulation.network import Path
from distbelief.simulation.storage import HostMemory, LentMemory
from distbelief.simulation.world import World


N_MISROUTED_MAX = 1000  # messages for a future incarnation; the limit of ZeroMQ's queues


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedProcess:
    """One incarnation of one role, with all state that is lost when it ends."""

    name: Address
    incarnation: int
    role: Role
    accepts: frozenset[type]  # by the role
    machine: Machine
    scale: CostScale
    memory: LentMemory
    executors: Executors
    timers: Timers
    launcher: "SimulatedProcess | None"
    paths: dict[Address, Path] = field(default_factory=dict)
    alive: bool = True
    event_loop: EventLoop | None = None  # None if handling events takes no time
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
        self._misrouted: dict[Address, deque[Event]] = {}  # for future incarnations
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
            self._report_build_failure(name, number, launcher, error)
            return
        event_queue, options = self._world.event_queue, self._world.options
        machine = options.machine_of(name)
        host = self._world.hosts.get(machine.host)
        handles = host is not None and machine.event_seconds > 0
        host = host or Host(event_queue)
        wake_seconds = machine.wake_seconds if handles else 0.0
        process = SimulatedProcess(
            name=name,
            incarnation=number,
            role=role,
            accepts=role.accepts,
            machine=machine,
            scale=scale_of(options.scales, name),
            handles_slowly=machine.handles_slowly,
            memory=memory,
            executors=Executors(host, wake_seconds=wake_seconds),
            timers=Timers(event_queue, lambda timer: self._fire(process, timer)),
            launcher=launcher,
        )
        if handles:
            process.event_loop = EventLoop(
                host,
                event_seconds=machine.event_seconds,
                wake_seconds=wake_seconds,
                handle=partial(self._handle, process),
                slowness=partial(self._world.slowness, name),
            )
        self.newest[name] = self.known[name, number] = process
        if options.introduce and number > 1:
            self._redirect_to_newest(name, number)
        restored = self._world.disk.newest(name)
        self._deliver(process, Started(incarnation=number, restored=restored))
        for event in self._misrouted.pop(name, ()):
            self._deliver(process, event)
        if self._world.options.introduce:
            self._introduce(process)

    def _redirect_to_newest(self, name: Address, incarnation: int) -> None:
        # Drop the paths to older incarnations, so that senders connect to the new one.
        for process in self.known.values():
            path = process.paths.get(name)
            if path is not None and path.incarnation != incarnation:
                del process.paths[name]

    def launch(self, name: Address, *, incarnation: int, launcher: SimulatedProcess) -> None:
        """Start an incarnation of `name` after the time that a process needs to start."""
        launch = _Launch(name=name, incarnation=incarnation, launcher=launcher)
        self._launches.append(launch)
        event_queue = self._world.event_queue
        begins = event_queue.now + self._world.options.launch_seconds
        event_queue.at(begins, partial(self._finish_launch, launch))

    def _finish_launch(self, launch: "_Launch") -> None:
        name, number = launch.name, launch.incarnation
        again = partial(self._finish_launch, launch)
        if launch.cancelled is None and self._waits_for_machine(name, again):
            return
        self._launches.remove(launch)
        if launch.cancelled is None:
            self.start(name, incarnation=number, launcher=launch.launcher)
        else:
            self._report_loss(launch.launcher, name, number, launch.cancelled)

    def _waits_for_machine(self, name: Address, call: Call) -> bool:
        # True if the machine of `name` is in an outage; then `call` is made at its end.
        event_queue = self._world.event_queue
        back_at = self._world.away_until.get(name, 0.0)
        if back_at <= event_queue.now:
            return False
        event_queue.at(back_at, call)
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

    def _report_build_failure(
        self, name: Address, number: int, launcher: SimulatedProcess | None, error: Exception
    ) -> None:
        reason = f"could not be built: {error}"
        if launcher is None:
            raise self._world.failure(f"{name}#{number} {reason}") from error
        self._world.note(name, number, reason)
        self._report_loss(launcher, name, number, reason)

    def _fire(self, process: SimulatedProcess, timer: str) -> None:
        self._deliver(process, TimerFired(name=timer))

    def _introduce(self, process: SimulatedProcess) -> None:
        joined = PeerJoined(peer=process.name, incarnation=process.incarnation)
        acquainted = self._world.options.acquainted
        others = [other for other in self.newest.values() if other is not process]
        for other in others:
            if other.alive and (not acquainted or acquainted(process.name, other.name)):
                self._deliver(other, joined)
                known = PeerJoined(peer=other.name, incarnation=other.incarnation)
                self._deliver(process, known)

    # --- end ---

    def end(self, process: SimulatedProcess, reason: str) -> None:
        """End a process: by its own `Exit` (sent messages still leave), or by a kill."""
        if not process.alive:
            return
        self._world.note(process.name, process.incarnation, reason)
        process.alive = False
        process.timers.close()
        process.executors.close(cut_short=not process.halted)
        if process.event_loop is not None:
            process.event_loop.close()
        process.waiting.clear()
        if not process.halted:
            for path in process.paths.values():
                path.broken_at = self._world.event_queue.now
        if self.newest[process.name] is not process:
            process.memory.release_all()
        if process.launcher is not None:
            self._report_loss(process.launcher, process.name, process.incarnation, reason)
        if process.restart_after is not None and not process.halted:
            event_queue = self._world.event_queue
            event_queue.at(event_queue.now + process.restart_after, partial(self._restart, process))

    def _restart(self, process: SimulatedProcess) -> None:
        if self._waits_for_machine(process.name, partial(self._restart, process)):
            return
        if self.newest[process.name] is process:
            self.start(process.name)

    def terminate(self, name: Address, reason: str) -> None:
        """Kill all incarnations of `name`, the oldest first, and cancel its launches."""
        for launch in self._launches:
            if launch.name == name:
                launch.cancelled = reason
        for process in list(self.known.values()):
            if process.name == name:
                self.end(process, reason)

    def _report_loss(
        self, launcher: SimulatedProcess, name: Address, incarnation: int, reason: str
    ) -> None:
        lost = PeerLost(peer=name, incarnation=incarnation, reason=reason)
        event_queue = self._world.event_queue
        event_queue.at(
            event_queue.now + self._world.options.notice_seconds,
            partial(self._deliver, launcher, lost),
        )

    # --- pause ---

    def pause(self, process: SimulatedProcess, seconds: Seconds) -> None:
        """Stop a process for `seconds`: its events wait, its work ends later."""
        event_queue = self._world.event_queue
        until = event_queue.now + seconds
        stands_until = event_queue.now if process.paused_until is None else process.paused_until
        if not process.alive or until <= stands_until:
            return
        self._world.note(process.name, process.incarnation, f"paused until {until!r}")
        process.executors.hold(held=True)
        if process.event_loop is not None:
            process.event_loop.hold(held=True)
        process.paused_until = until
        event_queue.at(until, partial(self._resume, process))

    def _resume(self, process: SimulatedProcess) -> None:
        if process.paused_until is None or process.paused_until > self._world.event_queue.now:
            return  # paused again, for longer
        process.paused_until = None
        process.executors.hold(held=False)
        if process.event_loop is not None:
            process.event_loop.hold(held=False)
        waiting, process.waiting = process.waiting, []
        self._world.event_queue.before_all(
            partial(self._deliver, process, event) for event in waiting
        )

    # --- connections ---

    def deliver_to_next(self, name: Address, incarnation: int, event: Event) -> None:
        """Deliver a message for an ended incarnation to the next one (see `port_reuse`)."""
        newest = self.newest.get(name)
        if newest is not None and newest.alive and newest.incarnation > incarnation:
            self._deliver(newest, event)
        else:
            held = self._misrouted.setdefault(name, deque(maxlen=N_MISROUTED_MAX))
            held.append(event)

    def connect(self, process: SimulatedProcess, peer: Address, incarnation: int) -> Path:
        """Connect a process to this incarnation of `peer`."""
        path = process.paths.get(peer)
        if path is None or path.incarnation != incarnation:
            path = process.paths[peer] = self._new_path(process, peer, incarnation)
        return path

    def _new_path(self, process: SimulatedProcess, peer: Address, incarnation: int) -> Path:
        world, ends = self._world, (process.name, peer)
        options = world.options
        path = Path(
            options.link_of(process.name, peer),
            sender=process.name,
            receiver=peer,
            incarnation=incarnation,
        )
        ports = world.ports.between(process.machine.host, options.machine_of(peer).host)
        if ports:
            path.use_ports(ports, world.ports.network)
        path.add_latency(options.machine_of(peer).handling_seconds)
        path.frame_scale = frame_scale(options.scales, process.name, peer)
        path.traffic = world.traffic.setdefault(ends, [0, 0])
        return path

    def path(self, process: SimulatedProcess, receiver: Address) -> Path | None:
        """Return the connection to `receiver`, or None if there is none."""
        introduced = self._world.options.introduce
        known = process.paths.get(receiver)
        if known is not None:
            return known
        if receiver not in self._world.builders:
            return self.connect(process, receiver, 0)
        if not introduced and receiver != SUPERVISOR:
            return None
        newest = self.newest.get(receiver)
        # 1: the receiver starts at the same time, but after its peer.
        return self.connect(process, receiver, newest.incarnation if newest else 1)
