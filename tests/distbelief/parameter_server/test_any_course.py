"""Shards and clients in any course of events, against a reference of some lines.

Push number n adds 1 to each element i with i % N_PUSHES == n, so values tell which pushes are in
them, whether any is twice, and whether a fetch is torn.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from typing_extensions import override

from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import TensorSpec
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import SaveCheckpoint
from distbelief.protocol.push_fetch import PushApplied, SessionOpened
from distbelief.protocol.role import Address, Event, PeerLost, Received, Snapshot
from tests.distbelief.parameter_server.pair import (
    CLIENT,
    OTHER,
    TEST,
    Bench,
    full_of,
    layout_of,
    scatter,
)


N_PUSHES: Final = 50
SIZES: Final = (200, 300_000)  # one block a shard, and several
CLIENTS: Final = (CLIENT, OTHER)
which = st.integers(0, 1)


@dataclass
class Reference:
    """What one shard may hold."""

    pushed: defaultdict[Address, list[int]] = field(default_factory=lambda: defaultdict(list))
    known: set[int] = field(default_factory=set)  # its client knows that they are in
    lost: set[int] = field(default_factory=set)  # with the shard
    doubtful: set[int] = field(default_factory=set)  # in or not: nobody can tell
    saved: set[int] = field(default_factory=set)

    def check(self, found: set[int], *, wanted: set[int]) -> None:
        """Check what was fetched; `wanted` must be in it."""
        assert not found & self.lost
        assert wanted - self.lost - self.doubtful <= found
        for pushes in self.pushed.values():
            rest = [n for n in pushes if n not in self.lost | self.doubtful]
            n_in = len(found & {*rest})
            assert {*rest[:n_in]} == found & {*rest}, "a push before another of its client"

    def told(self, pushes: set[int], *, by_dead: bool) -> None:
        """A client hears that these are in, perhaps late from a shard that has died since."""
        if by_dead:
            self.doubtful |= pushes - self.known - self.lost
        else:
            self.known |= pushes - self.lost - self.doubtful

    def client_died(self, name: Address) -> None:
        self.doubtful |= {*self.pushed[name]} - self.known - self.lost

    def shard_died(self) -> None:
        """It begins again as it was saved; clients repeat what they do not know of."""
        self.lost |= self.known - self.saved
        self.known &= self.saved


@dataclass(kw_only=True)
class Heard(Bench):
    """Tells what clients hear from shards."""

    hear: Callable[[Address, Received], None]

    @override
    def deliver(self, name: Address, event: Event) -> None:
        if name in CLIENTS and isinstance(event, Received):
            self.hear(name, event)
        super().deliver(name, event)


class AnyCourse(RuleBasedStateMachine):
    """Two clients and two shards; links keep the order, and lose what they like."""

    @initialize(size=st.sampled_from(SIZES), shared=st.booleans())
    def begin(self, *, size: int, shared: bool) -> None:
        layout = layout_of((TensorSpec(name="w", shape=(size,)),), n_shards=2)
        memory = PrivateMemory(host="a" * shared, poison=True)
        self.bench = Heard(layout=layout, memory=memory, hear=self.hear)
        self.owner = torch.zeros(size, dtype=torch.float64)
        for k in (0, 1):
            scatter(layout, k, np.full(layout.shard_size(k), float(k)), [self.owner])
        self.numbers = torch.arange(size) % N_PUSHES
        self.shards = [Address("shard-0"), Address("shard-1")]
        self.references = [Reference(), Reference()]
        self.snapshots: dict[int, Snapshot] = {}
        self.n_pushes = self.n_saves = 0
        self.untold: list[PeerLost] = []
        self.n_before = dict.fromkeys(CLIENTS, 0)  # pushes of earlier lives
        self.wanted: dict[Address, list[set[int]]] = {}  # of the fetch that is under way
        for name in self.shards:
            self.bench.add_shard(name)
        for client in CLIENTS:
            self.add_client(client)
        self.bench.settle()

    def add_client(self, name: Address) -> None:
        patient = ClientConfig(pushes=True, silence_seconds_max=1e6, stall_seconds_max=1e6)
        self.bench.add_client(name, config=patient)
        self.wanted.pop(name, None)

    def hear(self, client: Address, event: Received) -> None:
        match event.message:
            case PushApplied(sequence=newest) | SessionOpened(watermark=newest):
                k, life = self.shards.index(event.sender), self.bench.incarnations[client]
                pushes = self.references[k].pushed[client][self.n_before[client] :]
                told = {*pushes[: max(newest - (life << 32), 0)]}
                is_dead = event.incarnation != self.bench.incarnations[event.sender]
                self.references[k].told(told, by_dead=is_dead)
            case _:
                pass

    @rule(client=st.sampled_from(CLIENTS))
    def push(self, client: Address) -> None:
        if self.n_pushes < N_PUSHES and self.bench.client(client).can_push:
            gradient = torch.where(self.numbers == self.n_pushes, -1.0, 0.0).double()
            for one in self.references:
                one.pushed[client].append(self.n_pushes)
            self.n_pushes += 1
            self.bench.push_tensors([gradient], [gradient], client, samples=self.n_pushes)

    @rule(client=st.sampled_from(CLIENTS))
    def fetch(self, client: Address) -> None:
        if client not in self.wanted and self.bench.client(client).ready:
            own = self.bench.client(client).unacknowledged == 0
            self.wanted[client] = [
                {*one.pushed[client]} - one.doubtful if own else set() for one in self.references
            ]
            self.bench.begin_fetch(client)

    @rule(client=st.sampled_from(CLIENTS))
    def install(self, client: Address) -> None:
        if client not in self.wanted or not self.bench.client(client).fetch_complete:
            return
        tensors = full_of(self.bench.layout, np.nan)
        if self.bench.install(tensors, client).torn:
            return
        wanted = self.wanted.pop(client)
        for k, one in enumerate(self.references):
            one.check(self.pushes_in(tensors[0], k), wanted=wanted[k])

    def pushes_in(self, values: torch.Tensor, k: int) -> set[int]:
        mine = self.owner == k
        found = set()
        for n in range(self.n_pushes):
            (value,) = values[mine & (self.numbers == n)].unique().tolist()
            assert value in {0.0, 1.0}
            if value:
                found.add(n)
        return found

    @rule(turn=st.integers(0, 7), loses=st.integers(0, 5))
    def deliver(self, turn: int, loses: int) -> None:
        """Deliver the first message of a link, or lose it."""
        links = list({(to, event.sender): None for to, event in self.bench.messages})
        if links:
            to, sender = links[turn % len(links)]
            first = next(m for m in self.bench.messages if (m[0], m[1].sender) == (to, sender))
            self.bench.messages.remove(first)
            if loses:
                self.bench.deliver(*first)

    @rule()
    def settle(self) -> None:
        self.bench.settle()

    @rule(turn=st.integers(0, 3))
    def work(self, turn: int) -> None:
        names = list({name: None for name, _ in self.bench.work})
        if names:
            while self.bench.work[0][0] != names[turn % len(names)]:
                self.bench.work.rotate(-1)
            self.bench.run_work()

    @rule(seconds=st.floats(0.01, 20.0))
    def wait(self, seconds: float) -> None:
        self.tell()
        self.bench.advance(seconds, settle=False)

    @rule(client=st.sampled_from(CLIENTS))
    def restart_client(self, client: Address) -> None:
        for one in self.references:
            one.client_died(client)
        self.n_before[client] = len(self.references[0].pushed[client])
        self.add_client(client)

    @rule(k=which)
    def save(self, k: int) -> None:
        """Save one shard, when nothing is under way."""
        self.bench.settle()
        self.bench.snapshots.clear()
        self.n_saves += 1
        self.bench.send(TEST, self.shards[k], SaveCheckpoint(label=str(self.n_saves)))
        self.bench.settle()
        (self.snapshots[k],) = self.bench.snapshots
        (values,) = full_of(self.bench.layout, np.nan)
        scatter(self.bench.layout, k, self.snapshots[k].arrays["values"], [values])
        self.references[k].saved = self.pushes_in(values, k)

    @rule(k=which, is_told=st.booleans())
    def restart_shard(self, k: int, *, is_told: bool) -> None:
        name = self.shards[k]
        life = self.bench.incarnations[name]
        self.bench.add_shard(name, restored=self.snapshots.get(k))
        self.references[k].shard_died()
        self.untold.append(PeerLost(peer=name, incarnation=life, reason="killed"))
        if is_told:
            self.tell()

    def tell(self) -> None:
        """Drivers tell of a death, sooner or later."""
        for lost in self.untold:
            for client in CLIENTS:
                self.bench.deliver(client, lost)
        self.untold.clear()

    @override
    def teardown(self) -> None:
        """At the end all is in, but for what died with a shard."""
        if not hasattr(self, "bench"):
            return
        self.tell()
        for _ in range(20):
            self.bench.settle()
            self.bench.advance(30.0)
        for client in CLIENTS:
            assert self.bench.client(client).unacknowledged == 0
            (values,) = self.bench.fetch(client)
            for k, one in enumerate(self.references):
                one.check(self.pushes_in(values, k), wanted={*range(self.n_pushes)})


AnyCourse.TestCase.settings = settings(stateful_step_count=40)
TestAnyCourse = pytest.mark.slow(AnyCourse.TestCase)
