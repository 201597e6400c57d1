"""A simulated run as data: roles, faults and checks. Each family of scenes has fields of its own.

scene = Marks(n_shards=2, faults=[Kill(at=0.1, role=SHARD)])
scene.cluster             is built when it is first used
replace(scene, seed=7)    another run, which has not begun
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from distbelief.protocol import Message
from distbelief.protocol.role import SUPERVISOR, Address, Event, Received, Seconds, Send, Snapshot
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.faults import Fault, Pause
from distbelief.simulation.machines import ClusterOptions, TraceKind


M = TypeVar("M", bound=Message)
R = TypeVar("R")
Check = Callable[[HandledEvent], None]


@dataclass(kw_only=True, eq=False)
class Scene:
    """What a run consists of, and how a test drives it. A family defines `roles` and `options`."""

    seed: int = 0
    faults: Sequence[Fault] = ()
    trace: TraceKind = "content"

    def roles(self) -> Mapping[Address, Builder]:
        raise NotImplementedError

    def options(self) -> ClusterOptions:
        """Return the machines and links; faults are added."""
        raise NotImplementedError

    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        """Return what looks at every event."""
        del cluster
        return ()

    @cached_property
    def cluster(self) -> SimulatedCluster:
        options = replace(self.options(), faults=tuple(self.faults), trace=self.trace)
        cluster = SimulatedCluster(self.roles(), seed=self.seed, options=options)
        for check in self.checks(cluster):
            cluster.observe(check)
        return cluster

    # --- time ---

    @property
    def now(self) -> Seconds:
        return self.cluster.now

    def wait(self, seconds: Seconds) -> None:
        self.cluster.run(until=self.now + seconds)

    def run_until(self, condition: Callable[[], bool], *, within: Seconds = 60.0) -> None:
        self.cluster.run_until(condition, within=within)

    def pause(self, name: Address, seconds: Seconds) -> None:
        self.cluster.inject(Pause(at=self.now, role=name, seconds=seconds))

    # --- roles and messages ---

    def role(self, name: str, kind: type[R]) -> R:
        """Return the role of the newest incarnation of this name."""
        role = self.cluster.role(Address(name))
        assert isinstance(role, kind)
        return role

    def status(self, name: str) -> dict[str, float]:
        return dict(self.cluster.role(Address(name)).status()[1])

    def newest(self, name: Address) -> Snapshot:
        """Return the newest snapshot that this role has saved."""
        snapshot = self.cluster.disk.newest(name)
        assert snapshot is not None, f"{name} has saved nothing"
        return snapshot

    def tell(self, name: str, message: Message, *, sender: Address = SUPERVISOR) -> None:
        """Deliver a message now, as if `sender` had sent it."""
        event = Received(sender=sender, incarnation=1, message=message)
        self.cluster.post(Address(name), event)

    def told(self, kind: type[M]) -> list[M]:
        """Return the messages to the supervisor, of one type."""
        heard = self.cluster.sent_to(SUPERVISOR)
        return [event.message for event in heard if isinstance(event.message, kind)]


def sends(happening: HandledEvent, kind: type[M]) -> Iterator[tuple[Address, M]]:
    """Yield the messages of one type that were just sent, with their receivers."""
    for action in happening.actions:
        if isinstance(action, Send) and isinstance(action.message, kind):
            yield action.receiver, action.message


def heard(event: Event, kind: type[M]) -> M | None:
    """Return the message that this event brings, if it is of this type."""
    if isinstance(event, Received) and isinstance(event.message, kind):
        return event.message
    return None
