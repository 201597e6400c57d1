"""Members of a ring that sum vectors, round after round, and an overseer that names them.

At the start of a generation every member begins again with the first round. So each is asked for
`n_rounds` of the newest generation; what any member got in any generation must be the plain sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.protocol.ring import RingMember, RingMembers
from distbelief.protocol.role import (
    SUPERVISOR,
    Action,
    Address,
    Event,
    PeerJoined,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from distbelief.simulation.driver import Builder
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Link
from distbelief.worker.ring import TIMER, Ring, RingMessage, chunk_of
from tests.simulation.scene import Scene


TELL_SECONDS: Final = 0.3
Contribution = Callable[[Address, int, int], Vector]  # of a member, in a round of a generation


def plain_sum(vectors: Sequence[Vector]) -> Vector:
    """Return the sum in the order of the ring: chunk c begins with member c."""
    n, total = len(vectors), vectors[0].copy()
    with np.errstate(all="ignore"):
        for chunk in range(n):
            here = slice(*chunk_of(len(total), n, chunk))
            total[here] = vectors[chunk][here]
            for step in range(1, n):
                np.add(total[here], vectors[(chunk + step) % n][here], out=total[here])
    return total


@dataclass(eq=False)
class Results:
    """What members were given as a sum, by generation and round."""

    contribution: Contribution
    members: dict[int, Sequence[Address]] = field(default_factory=dict)  # by generation
    sums: dict[tuple[int, int], bytes] = field(default_factory=dict)
    n: int = 0

    def check(
        self, generation: int, number: int, values: Vector, members: Sequence[Address]
    ) -> None:
        assert self.members.setdefault(generation, members) == members
        if (generation, number) not in self.sums:
            given = [self.contribution(one, generation, number) for one in members]
            self.sums[generation, number] = plain_sum(given).tobytes()
        assert values.tobytes() == self.sums[generation, number], (generation, number, members)
        self.n += 1


class RingMemberRole:
    """Sums one vector in each round, after a random pause."""

    accepts = message_types(RingMessage | RingMembers)

    def __init__(self, name: Address, results: Results, *, n_rounds: int, pause: Seconds) -> None:
        self.ring = Ring(name)
        self.name = name
        self.n_done = 0  # rounds of this generation
        self.n_bytes: list[int] = []  # of each round in all generations
        self._results = results
        self._n_rounds = n_rounds
        self._pause = pause
        self._rng = np.random.default_rng(0)
        self._values: Vector | None = None  # of the round under way

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        match event:
            case Started():
                self.ring.start(event.incarnation)
                self._rng = np.random.default_rng([event.incarnation, *self.name.encode()])
            case TimerFired(name="begin"):
                return self._begin(now)
            case TimerFired(name=name) if name == TIMER:
                return self.ring.woke(now)
            case Received(message=RingMembers() as message):
                return self._join(message, now)
            case Received():
                assert isinstance(event.message, RingMessage)
                return [*self.ring.receive(event, event.message, now), *self._advance(now)]
            case _:
                pass
        return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "", {}

    def _join(self, message: RingMembers, now: Seconds) -> Sequence[Action]:
        generation = self.ring.generation
        actions = self.ring.join(message)
        if self.ring.generation == generation:
            return actions
        self._values, self.n_done = None, 0
        return [*actions, *self._rest(now)]

    def _rest(self, now: Seconds) -> list[Action]:
        if not self.ring.members or self.n_done >= self._n_rounds:
            return []
        return [SetTimer(name="begin", at=now + self._pause * self._rng.random())]

    def _begin(self, now: Seconds) -> list[Action]:
        ring = self.ring
        if self._values is not None or not ring.members or ring.failure is not None:
            return []  # of the generation before
        before = ring.n_bytes
        self.n_bytes.append(before)
        self._values = self._results.contribution(self.name, ring.generation, ring.round + 1)
        actions = ring.begin(self._values, now)
        return [*actions, *self._advance(now)]

    def _advance(self, now: Seconds) -> list[Action]:
        ring = self.ring
        if self._values is None or not ring.is_complete:
            return []
        if self.n_done < ring.round:
            self._results.check(ring.generation, ring.round, self._values, tuple(ring.members))
            self.n_done = ring.round
        if not ring.is_settled:
            return []
        self._values[:] = np.nan  # nobody reads it any more
        self._values = None
        return self._rest(now)


class RingOverseer:
    """Begins a generation whenever a member comes, goes or restarts."""

    accepts = frozenset({RingMembers})

    def __init__(self, names: Sequence[Address]) -> None:
        self._names = names
        self._there: dict[Address, int] = {}
        self.generation = 0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        match event:
            case PeerJoined() if event.peer in self._names:
                self._there[event.peer] = event.incarnation
                self.generation += 1
            case PeerLost() if self._there.get(event.peer) == event.incarnation:
                del self._there[event.peer]
                self.generation += 1
            case TimerFired() | Started():
                return [*self._tell(), SetTimer(name="tell", at=now + TELL_SECONDS)]
            case _:
                return []
        return self._tell()

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "", {}

    @property
    def members(self) -> list[Address]:
        return [name for name in self._names if name in self._there]

    def _tell(self) -> list[Action]:
        members = tuple(
            RingMember(name=name, incarnation=self._there[name]) for name in self.members
        )
        message = RingMembers(generation=self.generation, members=members)
        return [Send(receiver=name, message=message) for name in self.members]


@dataclass(kw_only=True, eq=False)
class RingScene(Scene):
    n_members: int = 3
    n_elements: int = 1000
    dtype: str = "float32"
    n_rounds: int = 4
    rest: Seconds = 0.01  # at most, before a round
    lengths: Mapping[Address, int] = field(default_factory=dict)  # of members with another one
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        self.names = [Address(f"replica-{k}") for k in range(self.n_members)]
        self.results = Results(self.contribution)
        self.overseer = RingOverseer(self.names)

    def contribution(self, name: Address, generation: int, number: int) -> Vector:
        stream = np.random.default_rng([self.seed, generation, number, *name.encode()])
        n = self.lengths.get(name, self.n_elements)
        # Of all sizes, so that each order of adding has other bits.
        values = stream.standard_normal(n) * 2.0 ** stream.integers(-20, 20, n)
        return values.astype(self.dtype)

    @override
    def roles(self) -> Mapping[Address, Builder]:
        members: dict[Address, Builder] = {name: partial(self._member, name) for name in self.names}
        return {SUPERVISOR: lambda _: self.overseer, **members}

    def _member(self, name: Address, memory: Memory) -> RingMemberRole:
        del memory
        return RingMemberRole(name, self.results, n_rounds=self.n_rounds, pause=self.rest)

    @override
    def options(self) -> ClusterOptions:
        machine = SimulatedMachine(jitter=0.5)
        machines = {name: replace(machine, host=name) for name in (SUPERVISOR, *self.names)}
        return ClusterOptions(introduce=True, machines=machines, link=self.link)

    def member(self, name: Address) -> RingMemberRole:
        return self.role(name, RingMemberRole)

    def finish(self, *, within: Seconds = 120.0) -> None:
        """Let all that are there have all rounds of one generation, to the end."""
        self.run_until(self._is_done, within=within)

    def _is_done(self) -> bool:
        cluster, generation = self.cluster, self.overseer.generation
        alive = [name for name in self.names if cluster.is_alive(name)]
        return alive == self.overseer.members and all(
            (one := self.member(name)).ring.generation == generation
            and one.n_done == self.n_rounds
            and one.ring.is_settled
            for name in alive
        )
