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
        self.lives = ProcessTable(world, self.deliver, self._handle)
        self._lives = self.lives.known
        self.network = Network(world.agenda, world.streams, deliver=self._arrive, lose=self._lose)
        self._world = world
        # Aliases: they are used for every event, and each attribute access costs time.
        self._agenda = world.agenda
        self._note = world.trace.event
        self._observers, self._checks = world.observers, world.checks
        self._counts = world.counts
        run = f"simulation-{world.seed}"
        self._post: MessageSizing = Encoded(run) if world.options.codec else PassedOn(run)

    # --- events ---

    def deliver(self, life: SimulatedProcess, event: Event) -> None:
        """Pass an event to a process: now, or after earlier events and its pause."""
        if life.desk is None:
            self._handle(life, event)
        elif life.alive:
            life.desk.add(event)

    def _handle(self, life: SimulatedProcess, event: Event) -> None:
        if not life.alive:
            return
        if life.paused_until is not None:
            life.waiting.append(event)
            return
        now = self._agenda.now
        self._note(now, life.name, life.incarnation, event)
        try:
            try:
                actions = life.role.handle(event, now)
            except Exception as error:  # noqa: BLE001 - `_answer_to` distinguishes them
                actions = self._answer_to(life, error)
            n_performed = self._perform_all(life, actions) if actions else 0
        except LocalProtocolError as error:  # from the codec or the event queue
            raise self._blame(life, error) from error
        if self._observers:
            self._observe(life, event, actions[:n_performed])
        for check in self._checks:
            check()

    def _observe(self, life: SimulatedProcess, event: Event, actions: Sequence[Action]) -> None:
        happening = HandledEvent(
            name=life.name,
            incarnation=life.incarnation,
            role=life.role,
            event=event,
            actions=actions,
        )
        for observer in self._world.observers:
            observer(happening)

    def _answer_to(self, life: SimulatedProcess, error: Exception) -> Sequence[Action]:
        match error:
            case RemoteProtocolError():
                self._world.counts.refused += 1
                self._world.note(life.name, life.incarnation, f"refused: {error}")
                return ()
            case LocalProtocolError():
                raise error  # a bug: end the run instead of restarting the role
            case DistBeliefError():
                return (Exit(error=f"{type(error).__name__}: {error}"),)
            case _:
                raise self._blame(life, error) from error

    def _blame(self, life: SimulatedProcess, error: Exception) -> Exception:
        return self._world.failure(
            f"{life.name}#{life.incarnation} raised {type(error).__name__}: {error}"
        )

    def _arrive(self, packet: Packet) -> None:
        path = packet.path
        receiver, incarnation = path.receiver, path.incarnation
        # Arrays that the sender lends are read as late as allowed: on arrival.
        event = self._post.received(packet.payload)
        life = self._lives.get((receiver, incarnation))
        if life is not None and life.alive:
            self._counts.delivered += 1
            if life.handles_slowly:
                self._hand_over(life, event, packet.n_bytes)
            elif life.desk is None:
                self._handle(life, event)
            else:
                life.desk.add(event)
        elif receiver not in self._world.builders:
            self._world.hand_out(receiver, event)
        elif self._goes_astray():
            self.lives.deliver_to_next(receiver, incarnation, event)
        else:
            self._lose(packet, "no such process")

    def _hand_over(self, life: SimulatedProcess, event: Received, n_bytes: float) -> None:
        # A process without an event loop handles messages in sequence: the cost of a message
        # delays those behind it. Its own delay is already part of the link's latency.
        agenda, machine = self._agenda, life.machine
        begins, now = life.handles_until, agenda.now
        takes = machine.handling_seconds + n_bytes / machine.handling_bytes_per_second
        if begins <= now:
            life.handles_until = now + takes
            self._handle(life, event)
        else:
            life.handles_until = begins + takes
            agenda.at(begins, partial(self._handle, life, event))

    def _goes_astray(self) -> bool:
        port_reuse = self._world.options.port_reuse
        return bool(port_reuse and self._world.streams.faults.random() < port_reuse)

    def _lose(self, packet: Packet, reason: str) -> None:
        self._world.counts.lost += 1
        path = packet.path
        self._world.note(path.receiver, path.incarnation, f"lost, from {path.sender}: {reason}")

    # --- actions ---

    def _perform_all(self, life: SimulatedProcess, actions: Sequence[Action]) -> int:
        # Stops when an action ends the process; returns how many were performed.
        n_last, n_performed = life.last_actions, 0
        for action in actions if n_last is None else actions[:n_last]:
            if type(action) is Send:  # the most frequent one, without the match statement
                self._send(life, action)
            else:
                self._perform(life, action)
            n_performed += 1
            if not life.alive:
                return n_performed
        if n_last is not None:
            self.lives.end(life, f"killed after {n_last} actions of this event")
        return n_performed

    def _perform(self, life: SimulatedProcess, action: Action) -> None:
        match action:
            case Send():
                self._send(life, action)
            case SetTimer():
                life.timers.set(action.name, action.at)
            case CancelTimer():
                life.timers.cancel(action.name)
            case Compute():
                self._compute(life, action)
            case Persist():
                self._persist(life, action.snapshot)
            case _:
                self._perform_rare(life, action)

    def _perform_rare(
        self,
        life: SimulatedProcess,
        action: Report | Connect | Launch | AssignName | Terminate | Exit,
    ) -> None:
        match action:
            case Report():
                self._world.reports.append((life.name, action))
                text = f"{action.level}: {action.text}"
                self._world.note(life.name, life.incarnation, text)
            case Connect():
                self.lives.connect(life, action.peer, action.incarnation)
            case Launch():
                self.lives.launch(action.name, incarnation=action.incarnation, launcher=life)
            case AssignName():
                pass  # simulated roles need no proof of identity
            case Terminate():
                self.lives.terminate(action.name, f"terminated by {life.name}")
            case Exit():
                life.halted, life.error = True, action.error
                self.lives.end(life, f"halted: {action.error or 'as planned'}")
            case _:
                assert_never(action)

    def _send(self, life: SimulatedProcess, action: Send) -> None:
        post, receiver = self._post, action.receiver
        payload = post.sent(action, sender=life.name, incarnation=life.incarnation)
        path = life.paths.get(receiver) or self.lives.path(life, receiver)
        if path is None:
            self._counts.lost += 1
            text = f"lost, not connected to {receiver}"
            self._world.note(life.name, life.incarnation, text)
            return
        header, arrays = post.size
        n_bytes = header + round(arrays * path.frame_scale) if arrays else header
        self.network.send(path, payload, n_bytes)

    def _compute(self, life: SimulatedProcess, action: Compute) -> None:
        machine, cost = life.machine, action.cost
        if life.scale is not ONE:
            cost = life.scale.of(cost, action.lane)

        def seconds() -> Seconds:
            left = cost
            if action.remaining is not None:
                part = action.remaining()
                left = Cost(
                    flops=part * cost.flops,
                    n_bytes=part * cost.n_bytes,
                    waiting=part * cost.waiting,
                )
            modelled = machine.seconds_of(left, self._world.streams.schedule)
            return modelled * self._world.slowness(life.name)

        def demand(seconds: Seconds) -> Demand:
            threads = machine.threads if action.lane is Executor.COMPUTE else 1
            slowness = self._world.slowness(life.name)  # a slowed role leaves cores to others
            return machine.demand(cost, seconds, threads / slowness)

        def end(seconds: Seconds) -> None:
            if action.lane is Executor.COMPUTE:
                busy = self._world.busy
                busy[life.name] = busy.get(life.name, 0.0) + seconds
            result: object = None
            failed: Exception | None = None
            try:
                result = action.work()
            except Exception as error:  # noqa: BLE001 - reported to the role, as `node` does
                failed = error
            answer = Computed(name=action.name, result=result, error=failed, seconds=seconds)
            self._answer(life, answer)

        life.lanes.add(action.lane, Work(seconds=seconds, end=end, demand=demand))

    def _answer(self, life: SimulatedProcess, answer: Computed | Persisted) -> None:
        if life.desk is None:
            self._handle(life, answer)
        elif life.alive:
            life.desk.answer(answer)

    def _persist(self, life: SimulatedProcess, snapshot: Snapshot) -> None:
        world = self._world
        sums: dict[str, int] = {}

        def begin() -> None:
            # Compared at the end: a role must not change arrays while they are written.
            sums.update(checksums(snapshot))

        def seconds() -> Seconds:
            n_bytes = size_of(snapshot) * life.scale.n_bytes
            modelled = life.machine.seconds_to_save(n_bytes, world.streams.disk)
            return modelled * world.slowness(life.name)

        def end(_: Seconds) -> None:
            if checksums(snapshot) != sums:
                raise world.failure(
                    f"{life.name}#{life.incarnation} changed its arrays while they "
                    f"were being saved as {snapshot.label!r}"
                )
            error = NO_SPACE if world.disk.full else None
            if error is None:
                world.disk.save(life.name, snapshot)
            self._answer(life, Persisted(label=snapshot.label, error=error))

        def cut_short() -> None:
            if life.tears:
                world.disk.save(life.name, snapshot, whole=False)

        work = Work(seconds=seconds, begin=begin, end=end, cut_short=cut_short)
        life.lanes.add(Executor.COMPUTE, work)
