"""The driver: runs simulated processes, delivers their events and performs their actions.

Compute, Persist -> SimulatedThread -> Computed, Persisted
SetTimer -> Timers -> TimerFired
Send -> Encoded or PassedOn -> Network -> Received
Launch -> a new SimulatedProcess -> Started; when it ends, PeerLost to its launcher

An older incarnation may still run when the next one starts, if the supervisor declared it dead
while it was only paused. Its messages then carry the older incarnation number.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import msgspec

from distbelief.core.errors import DistBeliefError, LocalProtocolError, RemoteProtocolError
from distbelief.core.memory import Memory
from distbelief.protocol import role as rl
from distbelief.protocol.role import Address, Received, Role, Seconds, Send
from distbelief.simulation.cpu import Demand, EventLoop, Host, SimulatedThread, Work
from distbelief.simulation.event_queue import EventQueue, RandomStreams, Timers
from distbelief.simulation.faults import Slow
from distbelief.simulation.machines import (
    ONE,
    ClusterOptions,
    CostScale,
    SimulatedMachine,
    frame_scale,
    scale_of,
)
from distbelief.simulation.network import (
    Encoded,
    Network,
    Packet,
    PassedOn,
    Path,
    Ports,
    SwitchedNetwork,
)
from distbelief.simulation.storage import NO_SPACE, Disk, HostMemory, LentMemory, checksums, size_of
from distbelief.simulation.trace import SimulationFailed, Trace


Builder = Callable[[Memory], Role]


class HandledEvent(msgspec.Struct, kw_only=True, eq=False):
    """An event that a simulated process has handled, and the actions it performed."""

    name: Address
    incarnation: int
    role: Role  # of that incarnation, which need not be the newest
    event: rl.Event
    actions: Sequence[rl.Action]  # only those performed: a kill may cut them short


Observer = Callable[[HandledEvent], None]

N_REMEMBERED = 100_000  # reports, and messages to each outsider


@dataclass(slots=True, kw_only=True)
class Counts:
    delivered: int = 0
    lost: int = 0
    refused: int = 0  # events dropped because of a RemoteProtocolError


N_MISROUTED_MAX = 1000  # messages for a future incarnation; the limit of ZeroMQ's queues


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedProcess:
    """One incarnation of one role, with all state that is lost when it ends."""

    name: Address
    incarnation: int
    role: Role
    accepts: frozenset[type]  # by the role
    machine: SimulatedMachine
    scale: CostScale
    memory: LentMemory
    executors: Mapping[rl.Executor, SimulatedThread]
    timers: Timers
    launcher: "SimulatedProcess | None"
    paths: dict[Address, Path] = field(default_factory=dict)
    alive: bool = True
    paused_until: Seconds | None = None
    waiting: list[rl.Event] = field(default_factory=list)  # while paused
    handles_slowly: bool = False  # messages take time, although it has no event loop
    handles_until: Seconds = 0.0  # when the messages received so far are handled
    handled: Seconds = 0.0  # how long that took
    last_actions: int | None = None  # it dies after this many actions of the next event
    tears: bool = False  # a checkpoint that its death interrupts stays, damaged
    restart_after: Seconds | None = None  # after its death
    threads: list[SimulatedThread] = field(default_factory=list)
    # Pass on an event now, or after earlier events. Results of executors wake a sleeping process.
    deliver: Callable[[rl.Event], None] = field(init=False)
    deliver_result: Callable[[rl.Event], None] = field(init=False)


@dataclass(slots=True, eq=False, kw_only=True)
class _Launch:
    name: Address
    incarnation: int
    launcher: SimulatedProcess
    cancelled: str | None = None  # the reason


# Of work with notes: a step has its forward pass first, and then takes as long for a layer as that
# has parameters. Notes come with the pieces of the rest.
FORWARD = 1 / 3
N_PIECES = 8


def _pieces(
    action: rl.Compute,
    demand: Callable[[], Demand],
    run: Callable[[], rl.Computed],
    answer: Callable[[rl.Computed, Seconds], None],
    note: Callable[[object], None],
) -> Iterator[Work]:
    """Yield work that has notes in pieces; it runs at the end of the first."""
    assert action.notes is not None
    noted: deque[tuple[float, object]] = deque()
    action.notes.tell = lambda told, share: noted.append((share, told))
    whole: list[Demand] = []
    found: list[rl.Computed] = []
    taken: list[Seconds] = []

    def demand_of(index: int) -> Demand:
        if not index:
            whole.append(demand())
        share = (1.0 - FORWARD) / N_PIECES if index else FORWARD
        return msgspec.structs.replace(whole[0], seconds=share * whole[0].seconds)

    def end(index: int, seconds: Seconds) -> None:
        taken.append(seconds)
        if not index:
            found.append(run())
        while noted and (noted[0][0] * N_PIECES <= index or index == N_PIECES):
            note(noted.popleft()[1])
        if index == N_PIECES:
            answer(found[0], sum(taken))

    for index in range(N_PIECES + 1):
        yield Work(demand=partial(demand_of, index), end=partial(end, index))


class Driver:
    """Does for all simulated roles what `distbelief.transport.node` does for a real one."""

    def __init__(
        self, builders: Mapping[Address, Builder], *, seed: int, options: ClusterOptions
    ) -> None:
        self.builders = dict(builders)
        self.seed = seed
        self.options = options
        self.event_queue = EventQueue()
        self.streams = RandomStreams.of(seed)
        self.trace = Trace(n_kept=options.n_lines_kept, order_only=options.trace == "order")
        self.disk = Disk()
        self.counts = Counts()
        self.slow: list[Slow] = []  # active now
        # Messages and bytes sent, by sender and receiver.
        self.traffic: dict[tuple[Address, Address], list[float]] = {}
        self.busy: dict[Address, Seconds] = {}  # of compute executors
        self.away_until: dict[Address, Seconds] = {}  # outages
        self.observers: list[Observer] = []
        self.reports: deque[tuple[Address, rl.Report]] = deque(maxlen=N_REMEMBERED)
        # Messages to names without a builder: the test plays these roles itself.
        self.outside: dict[Address, deque[Received]] = {}
        self.newest: dict[Address, SimulatedProcess] = {}  # newest incarnation, running or ended
        self.halted: dict[Address, str | None] = {}  # newest ones that ended by themselves: error
        self.known: dict[tuple[Address, int], SimulatedProcess] = {}  # by role and incarnation
        self.network = Network(self.event_queue, self.streams, arrive=self._arrive, lose=self._lose)
        self._ports = Ports(options.fabric or SwitchedNetwork(cards={}))
        self._hosts = {  # whose cores roles share
            name: Host(self.event_queue, processor)
            for name, processor in options.processors.items()
        }
        self._memories: dict[str, HostMemory] = {}
        self._launches: list[_Launch] = []
        self._misrouted: dict[Address, deque[rl.Event]] = {}  # for future incarnations
        self._incarnations: dict[Address, int] = {}
        run = f"simulation-{seed}"
        self._sizing = Encoded(run) if options.codec else PassedOn(run)

    def slowness(self, name: Address) -> float:
        """Return the factor by which faults slow down the work of `name` now."""
        slowness = 1.0
        for fault in self.slow:
            if fault.role == name:
                slowness *= fault.factor
        return slowness

    def note(self, name: Address, incarnation: int, text: str) -> None:
        """Add a line that is not an event to the trace."""
        self.trace.note(self.event_queue.now, name, incarnation, f"-- {text}")

    @property
    def used(self) -> dict[tuple[str, str], Seconds]:
        """How long each shard, processor, card, link and switch worked, by kind and name."""
        found, of_messages = self._ports.used, dict.fromkeys(self.newest, 0.0)
        for process in self.known.values():
            of_messages[process.name] += process.handled
        for name in self.newest:
            machine = self.options.machine_of(name)
            busy, handled = self.busy.get(name, 0.0), of_messages[name]
            if name.startswith("shard"):  # its work and its messages each have a thread
                found["shard", name] = max(busy, handled)
            processor = self.options.processors.get(machine.host)
            if processor is not None:
                seconds = (busy * machine.threads + handled) / processor.cores
                key = "processor", machine.host
                found[key] = found.get(key, 0.0) + seconds
        return found

    def _keep_for_test(self, name: Address, event: Received) -> None:
        self.trace.event(self.event_queue.now, name, 0, event)
        if name not in self.outside:
            self.outside[name] = deque(maxlen=N_REMEMBERED)
        self.outside[name].append(event)

    def failure(self, reason: str) -> SimulationFailed:
        return SimulationFailed(reason, seed=self.seed, now=self.event_queue.now, trace=self.trace)

    # --- events ---

    def _handle(self, process: SimulatedProcess, event: rl.Event) -> None:
        if not process.alive:
            return
        if process.paused_until is not None:
            process.waiting.append(event)
            return
        now = self.event_queue.now
        self.trace.event(now, process.name, process.incarnation, event)
        try:
            try:
                if type(event) is Received and type(event.message) not in process.accepts:
                    rl.check_accepted(process.role, event, name=process.name)
                actions = process.role.handle(event, now)
            except Exception as error:  # noqa: BLE001 - `_actions_after` distinguishes them
                actions = self._actions_after(process, error)
            n_performed = self._perform_all(process, actions) if actions else 0
        except LocalProtocolError as error:  # from the codec or the event queue
            raise self._blame(process, error) from error
        if self.observers:
            handled = HandledEvent(
                name=process.name,
                incarnation=process.incarnation,
                role=process.role,
                event=event,
                actions=actions[:n_performed],
            )
            for observer in self.observers:
                observer(handled)

    def _actions_after(self, process: SimulatedProcess, error: Exception) -> Sequence[rl.Action]:
        match error:
            case RemoteProtocolError():
                self.counts.refused += 1
                self.note(process.name, process.incarnation, f"refused: {error}")
                return ()
            case LocalProtocolError():
                raise error  # a bug: end the run instead of restarting the role
            case DistBeliefError():
                return (rl.Exit(error=f"{type(error).__name__}: {error}"),)
            case _:
                raise self._blame(process, error) from error

    def _blame(self, process: SimulatedProcess, error: Exception) -> Exception:
        return self.failure(
            f"{process.name}#{process.incarnation} raised {type(error).__name__}: {error}"
        )

    def _arrive(self, packet: Packet) -> None:
        path, network = packet.path, self.network
        if (network.cuts or packet.departs > path.broken_at) and network.stops(packet):
            return
        # Arrays that the sender lends are read as late as allowed: on arrival.
        event = packet.payload
        if type(event) is not Received:
            event = self._sizing.received(event)
        process = self.known.get(path.ends_at)
        if process is not None and process.alive:
            self.counts.delivered += 1
            if not process.handles_slowly:
                process.deliver(event)
                return
            # Without an event loop it handles messages in sequence: the cost of a message delays
            # those behind it. Its own delay is already part of the link's latency.
            machine, now, begins = process.machine, self.event_queue.now, process.handles_until
            takes = machine.handling_seconds
            takes += packet.n_bytes / machine.handling_bytes_per_second
            process.handles_until = max(begins, now) + takes
            process.handled += takes
            if begins <= now:
                self._handle(process, event)
            else:
                self.event_queue.at(begins, self._handle, process, event)
        elif path.receiver not in self.builders:
            self._keep_for_test(path.receiver, event)
        elif self._is_misrouted():
            self.deliver_to_next(path.receiver, path.incarnation, event)
        else:
            self._lose(packet, "no such process")

    def _is_misrouted(self) -> bool:
        port_reuse = self.options.port_reuse
        return bool(port_reuse and self.streams.faults.random() < port_reuse)

    def _lose(self, packet: Packet, reason: str) -> None:
        self.counts.lost += 1
        path = packet.path
        self.note(path.receiver, path.incarnation, f"lost, from {path.sender}: {reason}")

    # --- actions ---

    def _perform_all(self, process: SimulatedProcess, actions: Sequence[rl.Action]) -> int:
        # Stops when an action ends the process; returns how many were performed.
        n_last = process.last_actions
        if n_last is not None:
            actions = actions[:n_last]
        for n_performed, action in enumerate(actions, start=1):
            if type(action) is Send:  # the most frequent one, without the match statement
                self._send(process, action)
                continue
            self._perform(process, action)
            if not process.alive:
                return n_performed
        if n_last is not None:
            self.end(process, f"killed after {n_last} actions of this event")
        return len(actions)

    def _perform(self, process: SimulatedProcess, action: rl.Action) -> None:
        match action:
            case Send():
                self._send(process, action)
            case rl.SetTimer():
                process.timers.set(action.name, action.at)
            case rl.CancelTimer():
                process.timers.cancel(action.name)
            case rl.Compute():
                self._compute(process, action)
            case rl.Persist():
                self._persist(process, action.snapshot)
            case rl.Report():
                self.reports.append((process.name, action))
                text = f"{action.level}: {action.text}"
                self.note(process.name, process.incarnation, text)
            case rl.Connect():
                self.connect(process, action.peer, action.incarnation)
            case rl.Launch():
                self.launch(action.name, incarnation=action.incarnation, launcher=process)
            case rl.AssignName() | rl.Probe():
                pass  # simulated roles need no proof of identity; hosts are lost with their power
            case rl.Terminate():
                self.terminate(action.name, process)
            case rl.Exit():
                self.end(process, f"halted: {action.error or 'as planned'}", by=action)
            case _:
                assert_never(action)

    def _send(self, process: SimulatedProcess, action: Send) -> None:
        sizing, receiver = self._sizing, action.receiver
        payload = sizing.sent(action, sender=process.name, incarnation=process.incarnation)
        path = process.paths.get(receiver) or self._first_path(process, receiver)
        if path is None:
            self.counts.lost += 1
            text = f"lost, not connected to {receiver}"
            self.note(process.name, process.incarnation, text)
            return
        header, arrays = sizing.size
        n_bytes = header + round(arrays * path.frame_scale) if arrays else header
        self.network.send(path, payload, n_bytes)

    def _compute(self, process: SimulatedProcess, action: rl.Compute) -> None:
        machine, cost = process.machine, action.cost
        if process.scale is not ONE and action.executor is rl.Executor.COMPUTE:
            cost = process.scale.of(cost)

        def demand() -> Demand:
            left = cost
            if action.remaining is not None:
                part = action.remaining()
                left = msgspec.structs.replace(
                    cost,
                    flops=part * cost.flops,
                    n_bytes=part * cost.n_bytes,
                    waiting=part * cost.waiting,
                )
            modelled = machine.seconds_of(left, self.streams.schedule)
            slowness = self.slowness(process.name)  # a slowed role leaves cores to others
            is_compute = action.executor is rl.Executor.COMPUTE
            threads = machine.threads * cost.threads if is_compute else 1
            return machine.demand(cost, modelled * slowness, threads / slowness)

        def run() -> rl.Computed:
            result: object = None
            failed: Exception | None = None
            try:
                result = action.work()
            except Exception as error:  # noqa: BLE001 - reported to the role, as `node` does
                failed = error
            return rl.Computed(name=action.name, result=result, error=failed)

        def answer(result: rl.Computed, seconds: Seconds) -> None:
            if action.executor is rl.Executor.COMPUTE:
                busy = self.busy
                busy[process.name] = busy.get(process.name, 0.0) + seconds
            process.deliver_result(msgspec.structs.replace(result, seconds=seconds))

        def note(told: object) -> None:
            process.deliver_result(rl.Computed(name=action.name, result=told, is_note=True))

        executor = process.executors[action.executor]
        if action.notes is None:
            executor.add(Work(demand=demand, end=lambda seconds: answer(run(), seconds)))
            return
        for piece in _pieces(action, demand, run, answer, note):
            executor.add(piece)

    def _persist(self, process: SimulatedProcess, snapshot: rl.Snapshot) -> None:
        sums: dict[str, int] = {}

        def begin() -> None:
            # Compared at the end: a role must not change arrays while they are written.
            sums.update(checksums(snapshot))

        def demand() -> Demand:
            n_bytes = size_of(snapshot) * process.scale.n_bytes
            modelled = process.machine.seconds_to_save(n_bytes, self.streams.disk)
            return Demand(seconds=modelled * self.slowness(process.name))

        def end(_: Seconds) -> None:
            if checksums(snapshot) != sums:
                raise self.failure(
                    f"{process.name}#{process.incarnation} changed its arrays while they "
                    f"were being saved as {snapshot.label!r}"
                )
            error = NO_SPACE if self.disk.full else None
            if error is None:
                self.disk.save(process.name, snapshot)
            process.deliver_result(rl.Persisted(label=snapshot.label, error=error))

        def cut_short() -> None:
            if process.tears:
                self.disk.save(process.name, snapshot, whole=False)

        work = Work(demand=demand, begin=begin, end=end, cut_short=cut_short)
        process.executors[rl.Executor.COMPUTE].add(work)

    # --- processes ---

    def memory_of(self, name: Address) -> HostMemory:
        machine = self.options.machine_of(name)
        host = machine.host if machine.shares_memory else ""
        # Host "" shares nothing: each role gets a memory of its own.
        key = host or f"/{name}"
        if key not in self._memories:
            n_bytes_max = self.options.host_bytes_max
            self._memories[key] = HostMemory(host, n_bytes_max=n_bytes_max)
        return self._memories[key]

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
        memory = self.memory_of(name).lend()
        try:
            role = self.builders[name](memory)
        except DistBeliefError as error:
            reason = f"could not be built: {error}"
            if launcher is None:
                raise self.failure(f"{name}#{number} {reason}") from error
            self.note(name, number, reason)
            self._report_loss(launcher, name, number, reason)
            return
        event_queue, options = self.event_queue, self.options
        machine = options.machine_of(name)
        host = self._hosts.get(machine.host)
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
            executors={
                executor: SimulatedThread(host, wake_seconds=wake_seconds)
                for executor in rl.Executor
            },
            timers=Timers(event_queue, lambda timer: process.deliver(rl.TimerFired(name=timer))),
            launcher=launcher,
        )
        process.threads.extend(process.executors.values())
        process.deliver = process.deliver_result = partial(self._handle, process)
        if handles:
            loop = EventLoop(
                host,
                event_seconds=machine.event_seconds,
                wake_seconds=wake_seconds,
                handle=partial(self._handle, process),
                slowness=partial(self.slowness, name),
            )
            process.threads.append(loop.thread)
            process.deliver, process.deliver_result = loop.add, loop.deliver_result
        self.newest[name] = self.known[name, number] = process
        self.halted.pop(name, None)
        if options.introduce and number > 1:
            self._redirect_to_newest(name, number)
        restored = self.disk.newest(name)
        process.deliver(rl.Started(incarnation=number, restored=restored))
        for event in self._misrouted.pop(name, ()):
            process.deliver(event)
        if self.options.introduce:
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
        begins = self.event_queue.now + self.options.launch_seconds
        self.event_queue.at(begins, self._finish_launch, launch)

    def _finish_launch(self, launch: "_Launch") -> None:
        name, number = launch.name, launch.incarnation
        if launch.cancelled is None and (back_at := self._away_until(name)):
            self.event_queue.at(back_at, self._finish_launch, launch)
            return
        self._launches.remove(launch)
        if launch.cancelled is None:
            self.start(name, incarnation=number, launcher=launch.launcher)
        else:
            self._report_loss(launch.launcher, name, number, launch.cancelled)

    def _away_until(self, name: Address) -> Seconds | None:
        # The end of the outage of its machine, or None.
        back_at = self.away_until.get(name, 0.0)
        return back_at if back_at > self.event_queue.now else None

    def _next_incarnation(self, name: Address, wanted: int | None) -> int:
        if name not in self.builders:
            known = ", ".join(self.builders)
            raise self.failure(f"there is no builder for {name!r}; there are builders for {known}")
        last = self._incarnations.get(name, 0)
        number = last + 1 if wanted is None else wanted
        if number <= last:
            raise self.failure(
                f"{name} is launched as incarnation {number}, but had {last} already: "
                "each start needs a higher number"
            )
        self._incarnations[name] = number
        return number

    def _introduce(self, process: SimulatedProcess) -> None:
        acquainted = self.options.acquainted
        others = [other for other in self.newest.values() if other is not process]
        for other in others:
            if other.alive and (not acquainted or acquainted(process.name, other.name)):
                other.deliver(self._joined(process))
                process.deliver(self._joined(other))

    def _joined(self, process: SimulatedProcess) -> rl.PeerJoined:
        host = process.memory.host if self.options.tells_hosts else ""
        return rl.PeerJoined(peer=process.name, incarnation=process.incarnation, host=host)

    # --- end ---

    def end(self, process: SimulatedProcess, reason: str, *, by: rl.Exit | None = None) -> None:
        """End a process: by its own `Exit` (sent messages still leave), or by a kill."""
        if not process.alive:
            return
        self.note(process.name, process.incarnation, reason)
        process.alive = False
        process.timers.close()
        running = [work for thread in process.threads if (work := thread.close()) is not None]
        process.waiting.clear()
        if by is None:
            for work in running:
                work.cut_short()
            for path in process.paths.values():
                path.broken_at = self.event_queue.now
        if self.newest[process.name] is not process:
            process.memory.release_all()
        elif by is not None:
            self.halted[process.name] = by.error
            self.event_queue.stop()  # a run that waits for this ends now
        if process.launcher is not None:
            self._report_loss(process.launcher, process.name, process.incarnation, reason)
        if process.restart_after is not None and by is None:
            again_at = self.event_queue.now + process.restart_after
            self.event_queue.at(again_at, self._restart, process)

    def _restart(self, process: SimulatedProcess) -> None:
        if back_at := self._away_until(process.name):
            self.event_queue.at(back_at, self._restart, process)
        elif self.newest[process.name] is process:
            self.start(process.name)

    def terminate(self, name: Address, by: SimulatedProcess) -> None:
        """Kill the incarnations of `name` that a role launched, oldest first, and its launches."""
        reason = f"terminated by {by.name}"
        for launch in self._launches:
            if launch.name == name and launch.launcher.name == by.name:
                launch.cancelled = reason
        for number in range(1, self._incarnations.get(name, 0) + 1):  # not all of thousands
            process = self.known.get((name, number))
            if process is not None and (process.launcher or by).name == by.name:
                self.end(process, reason)

    def _report_loss(
        self, launcher: SimulatedProcess, name: Address, incarnation: int, reason: str
    ) -> None:
        lost = rl.PeerLost(peer=name, incarnation=incarnation, reason=reason)
        noticed_at = self.event_queue.now + self.options.notice_seconds
        self.event_queue.at(noticed_at, launcher.deliver, lost)

    # --- pause ---

    def pause(self, process: SimulatedProcess, seconds: Seconds) -> None:
        """Stop a process for `seconds`: its events wait, its work ends later."""
        event_queue = self.event_queue
        until = event_queue.now + seconds
        stands_until = event_queue.now if process.paused_until is None else process.paused_until
        if not process.alive or until <= stands_until:
            return
        self.note(process.name, process.incarnation, f"paused until {until!r}")
        for thread in process.threads:
            thread.hold(held=True)
        process.paused_until = until
        event_queue.at(until, self._resume, process)

    def _resume(self, process: SimulatedProcess) -> None:
        if process.paused_until is None or process.paused_until > self.event_queue.now:
            return  # paused again, for longer
        process.paused_until = None
        for thread in process.threads:
            thread.hold(held=False)
        waiting, process.waiting = process.waiting, []
        self.event_queue.before_all(partial(process.deliver, event) for event in waiting)

    # --- connections ---

    def deliver_to_next(self, name: Address, incarnation: int, event: rl.Event) -> None:
        """Deliver a message for an ended incarnation to the next one (see `port_reuse`)."""
        newest = self.newest.get(name)
        if newest is not None and newest.alive and newest.incarnation > incarnation:
            newest.deliver(event)
        else:
            held = self._misrouted.setdefault(name, deque(maxlen=N_MISROUTED_MAX))
            held.append(event)

    def connect(self, process: SimulatedProcess, peer: Address, incarnation: int) -> Path:
        """Connect a process to this incarnation of `peer`."""
        known = process.paths.get(peer)
        if known is not None and known.incarnation == incarnation:
            return known
        options, machine = self.options, self.options.machine_of(peer)
        link = options.link_of(process.name, peer)
        path = Path(link, sender=process.name, receiver=peer, incarnation=incarnation)
        ports = self._ports.between(process.machine.host, machine.host)
        if ports:
            network = self._ports.network
            latency = network.latency(process.machine.host, machine.host)
            path.use_ports(ports, latency, network.jitter)
        path.latency_seconds += machine.handling_seconds
        path.frame_scale = frame_scale(options.scales, process.name, peer)
        path.traffic = self.traffic.setdefault((process.name, peer), [0, 0])
        process.paths[peer] = path
        return path

    def _first_path(self, process: SimulatedProcess, receiver: Address) -> Path | None:
        # Connect to `receiver`, as far as that needs no `Connect`.
        if receiver not in self.builders:
            return self.connect(process, receiver, 0)
        if not self.options.introduce and receiver != rl.SUPERVISOR:
            return None
        newest = self.newest.get(receiver)
        # 1: the receiver starts at the same time, but after its peer.
        return self.connect(process, receiver, newest.incarnation if newest else 1)
