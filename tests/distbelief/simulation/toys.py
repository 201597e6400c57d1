"""Small roles that do one thing each, and record their events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.protocol import Heartbeat, ParameterBlock, Push, PushApplied, Stop, role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine


A, B, C = rl.Address("a"), rl.Address("b"), rl.Address("c")
TESTER = rl.Address("tester")  # no role: the test itself

STEADY = SimulatedMachine(jitter=0.0, overhead_seconds=0.0, flops_per_second=1.0)

Handler = Callable[[rl.Event, rl.Seconds], Sequence[rl.Action]]


@dataclass
class Scripted:
    """Answers every event as a function says; remembers (time, event)."""

    accepts = rl.ALL_MESSAGES

    answer: Handler = lambda *_: ()
    seen: list[tuple[rl.Seconds, rl.Event]] = field(default_factory=list)

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        self.seen.append((now, event))
        return self.answer(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "scripted", {"events": len(self.seen)}

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for _, event in self.seen]

    @property
    def sequences(self) -> list[int]:
        """Of every numbered message received."""
        return [
            event.message.sequence
            for _, event in self.seen
            if isinstance(event, rl.Received) and isinstance(event.message, Push)
        ]


@dataclass
class Echo:
    """Sends every push back as an acknowledgement."""

    accepts = rl.ALL_MESSAGES

    n_received: int = 0

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        if not (isinstance(event, rl.Received) and isinstance(event.message, Push)):
            return ()
        self.n_received += 1
        return [
            rl.Send(
                receiver=event.sender,
                message=PushApplied(
                    sequence=event.message.sequence, term=1, clock=self.n_received, staleness=0
                ),
            )
        ]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "echoing", {"received": self.n_received}


@dataclass
class Pinger:
    """Sends push after push to a peer, each when the one before is acknowledged.

    Retries every half second, so that it gets through whatever is lost.
    """

    accepts = rl.ALL_MESSAGES

    peer: rl.Address
    n_wanted: int
    sequence: int = 1

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started() | rl.TimerFired():
                return self._ping(now)
            case rl.Received(message=message) if isinstance(message, PushApplied):
                if message.sequence == self.sequence:
                    self.sequence += 1
                    return self._ping(now)
        return ()

    def _ping(self, now: rl.Seconds) -> Sequence[rl.Action]:
        if self.sequence > self.n_wanted:
            return [rl.Exit()]
        return [
            rl.Send(receiver=self.peer, message=push(self.sequence)),
            rl.SetTimer(name="retry", at=now + 0.5),
        ]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "pinging", {"sequence": self.sequence}


class Counter:
    """Counts the pushes it gets; saves the count at every third; restores it."""

    accepts = rl.ALL_MESSAGES

    def __init__(self) -> None:
        self.count = np.zeros(1, np.int64)

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        match event:
            case rl.Started(restored=rl.Snapshot(arrays=arrays)):
                self.count[:] = arrays["count"]
            case rl.Received(message=message) if isinstance(message, Push):
                self.count += 1
                if self.count[0] % 3 == 0:
                    return [rl.Persist(snapshot=counted(int(self.count[0])))]
            case rl.Received(message=message) if isinstance(message, Stop):
                return [rl.Exit()]
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "counting", {"count": float(self.count[0])}


def counted(count: int) -> rl.Snapshot:
    return rl.Snapshot(
        label=f"{count:05}",
        arrays={"count": np.array([count], np.int64)},
        facts={"what": "a count"},
    )


@dataclass
class Summer:
    """Sums random numbers in its compute lane, again and again."""

    accepts = rl.ALL_MESSAGES

    seed: int
    n_wanted: int
    total: float = 0.0
    n_done: int = 0

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        if isinstance(event, rl.TimerFired) or self.n_done == self.n_wanted:
            return ()
        if not isinstance(event, rl.Started):
            self.n_done += 1
        return [rl.Compute(name="sum", work=self._add, cost=rl.Cost(flops=1e6))]

    def _add(self) -> float:
        stream = np.random.default_rng([self.seed, self.n_done])
        self.total += float(stream.standard_normal(100).sum())
        return self.total

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "summing", {"done": self.n_done}


def push(sequence: int) -> Push:
    return Push(sequence=sequence, term=1, fetched_clock=0, n_gradients=1, samples=sequence)


def block(values: Vector) -> ParameterBlock:
    return ParameterBlock(request=1, term=1, block_index=0, clock=0, values=values)


def heartbeat(state: str) -> Heartbeat:
    return Heartbeat(state=state, counters={})


def from_tester(message: Push | Stop | Heartbeat) -> rl.Received:
    return rl.Received(sender=TESTER, incarnation=1, message=message)


def on_start(*actions: rl.Action) -> Handler:
    """Answer `Started` with these actions, anything else with nothing."""
    return lambda event, _: actions if isinstance(event, rl.Started) else ()


def cluster_of(
    roles: Mapping[rl.Address, Scripted], *, seed: int = 1, options: ClusterOptions | None = None
) -> SimulatedCluster:
    """Return a cluster whose roles are these objects, in every life the same one."""

    def always(role: Scripted) -> Callable[[Memory], Scripted]:
        return lambda _: role

    if options is None:
        options = ClusterOptions(introduce=True, machine=STEADY)
    builders = {name: always(role) for name, role in roles.items()}
    return SimulatedCluster(builders, seed=seed, options=options)
