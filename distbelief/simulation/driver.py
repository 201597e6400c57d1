"""The driver: delivers events to simulated processes and performs their actions.

Compute, Persist -> Executors -> Computed, Persisted
SetTimer -> Timers -> TimerFired
Send -> MessageSizing -> Network -> Received
Launch -> a new SimulatedProcess -> Started; when it ends, PeerLost to its launcher
"""

from collections.abc import Sequence
from functools import partial
from typing import assert_never

from distbelief.errors import DistBeliefError, LocalProtocolError, RemoteProtocolError
from distbelief.roles.role import (
    Action,
    AssignName,
    CancelTimer,
    Compute,
    Computed,
    Connect,
    Cost,
    Event,
    Executor,
    Exit,
    Launch,
    Persist,
    Persisted,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Snapshot,
    Terminate,
    check_accepted,
)
from distbelief.simulation.cpu import Demand, Work
from distbelief.simulation.machines import ONE
from distbelief.simulation.network import Encoded, MessageSizing, Network, Packet, PassedOn
from distbelief.simulation.processes import ProcessTable, SimulatedProcess
from distbelief.simulation.storage import NO_SPACE, checksums, size_of
from distbelief.simulation.world import HandledEvent, World


class Driver:
    """Does for all simulated roles what `distbelief.transport.node` does for a real one."""

    def __init__(self, world: World) -> None:
        self.processes = ProcessTable(world, self.deliver, self._handle)
        self._known = self.processes.known
        self.network = Network(
            world.event_queue, world.streams, deliver=self._arrive, lose=self._lose
        )
        self._world = world
        # Aliases: they are used for every event, and each attribute access costs time.
        self._event_queue = world.event_queue
        self._note = world.trace.event
        self._observers, self._checks = world.observers, world.checks
        self._counts = world.counts
        run = f"simulation-{world.seed}"
        self._sizing: MessageSizing = Encoded(run) if world.options.codec else PassedOn(run)

    # --- events ---

    def deliver(self, process: SimulatedProcess, event: Event) -> None:
        """Pass an event to a process: now, or after earlier events and its pause."""
        if process.event_loop is None:
            self._handle(process, event)
        elif process.alive:
            process.event_loop.add(event)

    def _handle(self, process: SimulatedProcess, event: Event) -> None:
        if not process.alive:
            return
        if process.paused_until is not None:
            process.waiting.append(event)
            return
        now = self._event_queue.now
        self._note(now, process.name, process.incarnation, event)
        try:
            try:
                if type(event) is Received and type(event.message) not in process.accepts:
                    check_accepted(process.role, event, name=process.name)
                actions = process.role.handle(event, now)
            except Exception as error:  # noqa: BLE001 - `_actions_after` distinguishes them
                actions = self._actions_after(process, error)
            n_performed = self._perform_all(process, actions) if actions else 0
        except LocalProtocolError as error:  # from the codec or the event queue
            raise self._blame(process, error) from error
        if self._observers:
            handled = HandledEvent(
                name=process.name,
                incarnation=process.incarnation,
                role=process.role,
                event=event,
                actions=actions[:n_performed],
            )
            for observer in self._observers:
                observer(handled)
        for check in self._checks:
            check()

    def _actions_after(self, process: SimulatedProcess, error: Exception) -> Sequence[Action]:
        match error:
            case RemoteProtocolError():
                self._world.counts.refused += 1
                self._world.note(process.name, process.incarnation, f"refused: {error}")
                return ()
            case LocalProtocolError():
                raise error  # a bug: end the run instead of restarting the role
            case DistBeliefError():
                return (Exit(error=f"{type(error).__name__}: {error}"),)
            case _:
                raise self._blame(process, error) from error

    def _blame(self, process: SimulatedProcess, error: Exception) -> Exception:
        return self._world.failure(
            f"{process.name}#{process.incarnation} raised {type(error).__name__}: {error}"
        )

    def _arrive(self, packet: Packet) -> None:
        path = packet.path
        receiver, incarnation = path.receiver, path.incarnation
        # Arrays that the sender lends are read as late as allowed: on arrival.
        event = self._sizing.received(packet.payload)
        process = self._known.get((receiver, incarnation))
        if process is not None and process.alive:
            self._counts.delivered += 1
            if process.handles_slowly:
                self._deliver_in_sequence(process, event, packet.n_bytes)
            elif process.event_loop is None:
                self._handle(process, event)
            else:
                process.event_loop.add(event)
        elif receiver not in self._world.builders:
            self._world.keep_for_test(receiver, event)
        elif self._is_misrouted():
            self.processes.deliver_to_next(receiver, incarnation, event)
        else:
            self._lose(packet, "no such process")

    def _deliver_in_sequence(
        self, process: SimulatedProcess, event: Received, n_bytes: float
    ) -> None:
        # A process without an event loop handles messages in sequence: the cost of a message
        # delays those behind it. Its own delay is already part of the link's latency.
        event_queue, machine = self._event_queue, process.machine
        begins, now = process.handles_until, event_queue.now
        takes = machine.handling_seconds + n_bytes / machine.handling_bytes_per_second
        if begins <= now:
            process.handles_until = now + takes
            self._handle(process, event)
        else:
            process.handles_until = begins + takes
            event_queue.at(begins, partial(self._handle, process, event))

    def _is_misrouted(self) -> bool:
        port_reuse = self._world.options.port_reuse
        return bool(port_reuse and self._world.streams.faults.random() < port_reuse)

    def _lose(self, packet: Packet, reason: str) -> None:
        self._world.counts.lost += 1
        path = packet.path
        self._world.note(path.receiver, path.incarnation, f"lost, from {path.sender}: {reason}")

    # --- actions ---

    def _perform_all(self, process: SimulatedProcess, actions: Sequence[Action]) -> int:
        # Stops when an action ends the process; returns how many were performed.
        n_last, n_performed = process.last_actions, 0
        for action in actions if n_last is None else actions[:n_last]:
            if type(action) is Send:  # the most frequent one, without the match statement
                self._send(process, action)
            else:
                self._perform(process, action)
            n_performed += 1
            if not process.alive:
                return n_performed
        if n_last is not None:
            self.processes.end(process, f"killed after {n_last} actions of this event")
        return n_performed

    def _perform(self, process: SimulatedProcess, action: Action) -> None:
        match action:
            case Send():
                self._send(process, action)
            case SetTimer():
                process.timers.set(action.name, action.at)
            case CancelTimer():
                process.timers.cancel(action.name)
            case Compute():
                self._compute(process, action)
            case Persist():
                self._persist(process, action.snapshot)
            case Report():
                self._world.reports.append((process.name, action))
                text = f"{action.level}: {action.text}"
                self._world.note(process.name, process.incarnation, text)
            case Connect():
                self.processes.connect(process, action.peer, action.incarnation)
            case Launch():
                self.processes.launch(action.name, incarnation=action.incarnation, launcher=process)
            case AssignName():
                pass  # simulated roles need no proof of identity
            case Terminate():
                self.processes.terminate(action.name, f"terminated by {process.name}")
            case Exit():
                process.halted, process.error = True, action.error
                self.processes.end(process, f"halted: {action.error or 'as planned'}")
            case _:
                assert_never(action)

    def _send(self, process: SimulatedProcess, action: Send) -> None:
        sizing, receiver = self._sizing, action.receiver
        payload = sizing.sent(action, sender=process.name, incarnation=process.incarnation)
        path = process.paths.get(receiver) or self.processes.path(process, receiver)
        if path is None:
            self._counts.lost += 1
            text = f"lost, not connected to {receiver}"
            self._world.note(process.name, process.incarnation, text)
            return
        header, arrays = sizing.size
        n_bytes = header + round(arrays * path.frame_scale) if arrays else header
        self.network.send(path, payload, n_bytes)

    def _compute(self, process: SimulatedProcess, action: Compute) -> None:
        machine, cost = process.machine, action.cost
        if process.scale is not ONE:
            cost = process.scale.of(cost, action.executor)

        def demand() -> Demand:
            left = cost
            if action.remaining is not None:
                part = action.remaining()
                left = Cost(
                    flops=part * cost.flops,
                    n_bytes=part * cost.n_bytes,
                    waiting=part * cost.waiting,
                )
            modelled = machine.seconds_of(left, self._world.streams.schedule)
            slowness = self._world.slowness(process.name)  # a slowed role leaves cores to others
            threads = machine.threads if action.executor is Executor.COMPUTE else 1
            return machine.demand(cost, modelled * slowness, threads / slowness)

        def end(seconds: Seconds) -> None:
            if action.executor is Executor.COMPUTE:
                busy = self._world.busy
                busy[process.name] = busy.get(process.name, 0.0) + seconds
            result: object = None
            failed: Exception | None = None
            try:
                result = action.work()
            except Exception as error:  # noqa: BLE001 - reported to the role, as `node` does
                failed = error
            result_event = Computed(name=action.name, result=result, error=failed, seconds=seconds)
            self._deliver_result(process, result_event)

        process.executors.add(action.executor, Work(demand=demand, end=end))

    def _deliver_result(
        self, process: SimulatedProcess, result_event: Computed | Persisted
    ) -> None:
        if process.event_loop is None:
            self._handle(process, result_event)
        elif process.alive:
            process.event_loop.deliver_result(result_event)

    def _persist(self, process: SimulatedProcess, snapshot: Snapshot) -> None:
        world = self._world
        sums: dict[str, int] = {}

        def begin() -> None:
            # Compared at the end: a role must not change arrays while they are written.
            sums.update(checksums(snapshot))

        def demand() -> Demand:
            n_bytes = size_of(snapshot) * process.scale.n_bytes
            modelled = process.machine.seconds_to_save(n_bytes, world.streams.disk)
            return Demand(seconds=modelled * world.slowness(process.name))

        def end(_: Seconds) -> None:
            if checksums(snapshot) != sums:
                raise world.failure(
                    f"{process.name}#{process.incarnation} changed its arrays while they "
                    f"were being saved as {snapshot.label!r}"
                )
            error = NO_SPACE if world.disk.full else None
            if error is None:
                world.disk.save(process.name, snapshot)
            self._deliver_result(process, Persisted(label=snapshot.label, error=error))

        def cut_short() -> None:
            if process.tears:
                world.disk.save(process.name, snapshot, whole=False)

        work = Work(demand=demand, begin=begin, end=end, cut_short=cut_short)
        process.executors.add(Executor.COMPUTE, work)
