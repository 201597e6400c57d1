"""The state that all parts of a simulation share: clock, random numbers, disk, trace, counts."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from distbelief.core.memory import Memory
from distbelief.roles.role import Action, Address, Event, Received, Report, Role, Seconds
from distbelief.simulation.cpu import Host
from distbelief.simulation.event_queue import EventQueue, RandomStreams
from distbelief.simulation.faults import Slow
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.network import Ports, SwitchedNetwork
from distbelief.simulation.storage import Disk
from distbelief.simulation.trace import SimulationFailed, Trace


Builder = Callable[[Memory], Role]


class HandledEvent(msgspec.Struct, kw_only=True, eq=False):
    """An event that a simulated process has handled, and the actions it performed."""

    name: Address
    incarnation: int
    role: Role  # of that incarnation, which need not be the newest
    event: Event
    actions: Sequence[Action]  # only those performed: a kill may cut them short


Observer = Callable[[HandledEvent], None]

N_REMEMBERED = 100_000  # reports, and messages to each outsider


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of messages so far."""

    delivered: int = 0
    lost: int = 0
    refused: int = 0  # events dropped because of a RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The shared state of one simulation."""

    builders: Mapping[Address, Builder]
    seed: int
    options: ClusterOptions
    streams: RandomStreams
    trace: Trace
    event_queue: EventQueue = field(default_factory=EventQueue)
    disk: Disk = field(default_factory=Disk)
    counts: Counts = field(default_factory=Counts)
    slow: list[Slow] = field(default_factory=list)  # active now
    ports: Ports = field(default_factory=lambda: Ports(SwitchedNetwork(cards={})))
    hosts: Mapping[str, Host] = field(default_factory=dict)  # with processors that roles share
    # Messages and bytes sent, by sender and receiver.
    traffic: dict[tuple[Address, Address], list[float]] = field(default_factory=dict)
    busy: dict[Address, Seconds] = field(default_factory=dict)  # of compute executors
    away_until: dict[Address, Seconds] = field(default_factory=dict)  # outages
    checks: list[Callable[[], None]] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)
    reports: deque[tuple[Address, Report]] = field(
        default_factory=lambda: deque(maxlen=N_REMEMBERED)
    )
    # Messages to names without a builder: the test plays these roles itself.
    outside: dict[Address, deque[Received]] = field(default_factory=dict)

    @staticmethod
    def of(builders: Mapping[Address, Builder], *, seed: int, options: ClusterOptions) -> "World":
        event_queue = EventQueue()
        return World(
            builders=dict(builders),
            seed=seed,
            options=options,
            streams=RandomStreams.of(seed),
            trace=Trace(
                n_kept=options.n_lines_kept,
                full=options.full_trace,
                order_only=options.trace == "order",
            ),
            event_queue=event_queue,
            ports=Ports(options.fabric or SwitchedNetwork(cards={})),
            hosts={
                name: Host(event_queue, processor) for name, processor in options.processors.items()
            },
        )

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

    def keep_for_test(self, name: Address, event: Received) -> None:
        """Keep a message to a name without a builder."""
        self.trace.event(self.event_queue.now, name, 0, event)
        if name not in self.outside:
            self.outside[name] = deque(maxlen=N_REMEMBERED)
        self.outside[name].append(event)

    def failure(self, reason: str) -> SimulationFailed:
        return SimulationFailed(reason, seed=self.seed, now=self.event_queue.now, trace=self.trace)
