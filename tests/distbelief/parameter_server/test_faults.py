"""Clients and shards under random faults, step by step, from a seed.

Messages are lost and reordered across links, and copies of them arrive much later; work is late;
clients and shards die and restart, shards from snapshots taken at any moment. The invariants are
checked after every event, and the totals at the end.

Push number i of a run has a gradient of -1 at element i of each shard, so element i of a shard is
the number of times that push i was applied there.
"""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from distbelief.core.memory import PrivateMemory
from distbelief.graph.region import Region
from distbelief.parameter_server.client.client import ClientConfig
from distbelief.parameter_server.layout import PartialView, TensorSpec
from distbelief.parameter_server.shard import Shard
from distbelief.protocol import Message, SaveCheckpoint
from distbelief.roles.role import Address, PeerJoined, Received, Snapshot
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, SHARD, TEST, Bench, layout_of


N_MARKS = 640  # pushes of one run at most
SHARDS = (SHARD, Address("shard-1"))
CLIENTS = (CLIENT, OTHER)

WIDTH, N_COLUMNS = 64, 40  # of the tensor, and those that a partial client holds

Values = NDArray[np.float64]  # (shard_size,)


class Chaos:
    """One run."""

    def __init__(
        self, seed: int, *, shared: bool, n_blocks: int = 1, partial: bool = False
    ) -> None:
        self.stream = np.random.default_rng(seed)
        # Beyond the marks lie as many elements as make so many blocks.
        self.n_elements = max(N_MARKS, (n_blocks - 1) * 131072 + 64)
        rows = len(SHARDS) * self.n_elements // WIDTH
        tensors = (TensorSpec(name="marks", shape=(rows, WIDTH)),)
        # Of whom it is known what they hold: the first columns of every shard.
        self.partial = {OTHER: Region(((0, rows), (0, N_COLUMNS)))} if partial else {}
        self.bench = Bench(
            layout=layout_of(tensors, n_shards=len(SHARDS)),
            memory=PrivateMemory(host="here" if shared else "", poison=True),
            lose=self.lose,
        )
        self.n_marks = 0
        self.n_fetched = 0
        self.marks: dict[Address, list[int]] = {}  # of the current incarnation
        self.copies: list[tuple[Address, Received]] = []  # to arrive much later
        self.newest: dict[Address, Snapshot] = {}
        self.history: dict[tuple[Address, int], dict[int, str]] = {}  # by incarnation
        self.parts: dict[tuple[Address, int], dict[int, str]] = {}  # of what is held
        for name in SHARDS:
            self.add_shard(name)
        for name in CLIENTS:
            self.add_client(name)

    def lose(self, receiver: Address, message: Message) -> bool:
        del receiver, message
        return bool(self.stream.random() < 0.05)

    # ---------------------------------------------------------------------- roles

    def add_shard(self, name: Address) -> None:
        self.bench.add_shard(name, restored=self.newest.get(name), n_copies=1)

    def add_client(self, name: Address) -> None:
        self.marks[name] = []
        config = ClientConfig(pushes=True, credit_blocks=2, torn_seconds_max=0.5)
        region = self.partial.get(name)
        items = [] if region is None else [("marks", region)]
        selection = PartialView(self.bench.layout, items) if items else None
        self.bench.add_client(name, config=config, selection=selection)

    def cut(self, name: Address, whole: torch.Tensor) -> torch.Tensor:
        """Return what this client holds of the tensor."""
        columns = N_COLUMNS if name in self.partial else WIDTH
        return whole.reshape(-1, WIDTH)[:, :columns].reshape(-1)

    def values(self, name: Address) -> Values:
        role = self.bench.roles[name]
        assert isinstance(role, Shard)
        values: Values = role._values.vector.astype(np.float64, copy=False)
        return values

    # ---------------------------------------------------------------------- steps

    def step(self, *, kills: bool) -> None:
        luck = self.stream.random()
        client = CLIENTS[int(self.stream.integers(len(CLIENTS)))]
        if luck < 0.35:
            self.deliver_some()
        elif luck < 0.5:
            self.work()
        elif luck < 0.7:
            self.push(client)
        elif luck < 0.85:
            self.fetch(client)
        elif luck < 0.92:
            self.bench.advance(float(self.stream.exponential(0.5)), settle=False)
        elif luck < 0.96:
            self.deliver_copy()
        elif kills:
            self.kill(client)

    def deliver_some(self) -> None:
        """Deliver messages of links in any order, those of one link in theirs."""
        messages = self.bench.messages
        for _ in range(int(self.stream.integers(1, 8))):
            links = list(dict.fromkeys((r, e.sender) for r, e in messages))
            if not links:
                return
            link = links[int(self.stream.integers(len(links)))]
            index = next(i for i, (r, e) in enumerate(messages) if (r, e.sender) == link)
            receiver, event = messages[index]
            del messages[index]
            if self.stream.random() < 0.07:
                self.copies.append((receiver, event))
            self.bench.deliver(receiver, event)
            self.check()

    def deliver_copy(self) -> None:
        if self.copies:
            index = int(self.stream.integers(len(self.copies)))
            self.bench.deliver(*self.copies.pop(index))
            self.check()

    def work(self) -> None:
        if self.bench.work:
            self.bench.run_work()
            self.check()
            for snapshot in self.bench.snapshots:
                self.newest[Address(f"shard-{snapshot.facts['index']}")] = snapshot
            self.bench.snapshots.clear()

    def push(self, name: Address) -> None:
        client = self.bench.client(name)
        while name in self.partial and self.n_marks % WIDTH >= N_COLUMNS:
            self.n_marks += 1  # not among what it holds
        if not client.can_push or self.n_marks == N_MARKS:
            return
        mark, self.n_marks = self.n_marks, self.n_marks + 1
        self.marks[name].append(mark)
        gradient = torch.zeros(len(SHARDS), self.n_elements, dtype=torch.float64)
        gradient[:, mark] = -1.0
        gradients = [self.cut(name, gradient)]
        work = client.stage(gradients, gradients)
        if self.stream.random() < 0.3:
            self.deliver_some()  # while it is being staged
        outcome = work()
        if self.stream.random() < 0.3:
            self.deliver_some()
        now = self.bench.now
        actions = client.staged(outcome, n_gradients=1, samples=mark, now=now)
        self.bench.perform(name, actions)

    def fetch(self, name: Address) -> None:
        client = self.bench.client(name)
        whole = torch.full((len(SHARDS), self.n_elements), np.nan).double()
        tensors = [self.cut(name, whole)]
        self.bench.perform(name, client.begin_fetch(self.bench.now))
        # As first told: if the shard restarts, its older clocks are no longer told.
        clocks: dict[int, int] = {}
        for _ in range(int(self.stream.integers(1, 30))):
            self.deliver_some()
            self.work()
            if not client.fetch_complete:
                continue
            work = client.install(tensors)
            if self.stream.random() < 0.3:
                self.deliver_some()  # while it waits for its turn
            outcome = work()
            actions = client.installed(outcome, self.bench.now)
            self.bench.perform(name, actions)
            for k, clock in enumerate(outcome.clocks):
                if clock >= 0:
                    clocks.setdefault(k, clock)
            if not outcome.torn:
                self.n_fetched += 1
                parts = tensors[0].reshape(len(SHARDS), -1).numpy()
                for k, shard in enumerate(SHARDS):
                    histories = self.parts if name in self.partial else self.history
                    versions = histories[shard, clocks[k]]
                    assert fingerprint(parts[k]) in versions.values(), "a mixture"
                return

    def kill(self, client: Address) -> None:
        shard = SHARDS[int(self.stream.integers(len(SHARDS)))]
        match int(self.stream.integers(4)):
            case 0:
                self.add_client(client)
            case 1:
                self.add_shard(shard)
            case _:
                label = f"{self.stream.integers(10**9):09}"
                self.bench.send(TEST, shard, SaveCheckpoint(label=label))

    # ----------------------------------------------------------------------- laws

    def check(self) -> None:
        for name in SHARDS:
            state, counters = self.bench.roles[name].status()
            if state == "starting":
                continue
            values, clock = self.values(name), int(counters["clock"])
            assert np.isin(values[:N_MARKS], (0.0, 1.0)).all(), "twice, or poison"
            assert values.sum() == clock
            versions = self.history.setdefault((name, clock), {})
            life = self.bench.incarnations[name]
            if life not in versions:
                versions[life] = fingerprint(values)
                part = self.parts.setdefault((name, clock), {})
                part[life] = fingerprint(values.reshape(-1, WIDTH)[:, :N_COLUMNS])

    def finish(self) -> None:
        """Break nothing more: everybody gets through, and the totals agree."""
        bench = self.bench
        bench.lose = lambda *_: False
        for shard in SHARDS:  # whoever awaits nothing may not have noticed
            joined = PeerJoined(peer=shard, incarnation=bench.incarnations[shard])
            for client in CLIENTS:
                bench.deliver(client, joined)
        for _ in range(400):
            while bench.messages or bench.work:
                self.deliver_some()
                self.work()
            bench.advance(0.5, settle=False)
            clients = [bench.client(name) for name in CLIENTS]
            if not bench.messages and all(
                client.ready and client.unacknowledged == 0 for client in clients
            ):
                break
        else:
            pytest.fail("not everybody gets through")
        lost = sum(int(client.counters()["pushes_lost"]) for client in clients)
        issued = [mark for name in CLIENTS for mark in self.marks[name]]
        # A push is one push, however many shards miss it.
        missing = np.any([self.values(n)[issued] == 0.0 for n in SHARDS], axis=0)
        assert missing.sum() == lost


def fingerprint(values: Values) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


partly = pytest.mark.parametrize("partial", [False, True])


@pytest.mark.untraced
@partly
@pytest.mark.parametrize("shared", [True, False])
@given(seed=st.integers(0, 2**32), kills=st.booleans())
@settings(max_examples=20)
def test_every_push_is_applied_once_or_counted_as_lost_and_no_fetch_is_a_mixture(
    *, shared: bool, partial: bool, seed: int, kills: bool
) -> None:
    chaos = Chaos(seed, shared=shared, partial=partial)
    for _ in range(150):
        chaos.step(kills=kills)
    chaos.finish()
    if not (kills or partial):
        clients = [chaos.bench.client(name) for name in CLIENTS]
        assert sum(c.counters()["pushes_lost"] for c in clients) == 0
        assert chaos.n_marks > 0


@pytest.mark.untraced
@partly
@given(seed=st.integers(0, 2**32), kills=st.booleans())
@settings(max_examples=5)
def test_the_same_holds_for_pushes_and_fetches_of_many_blocks(
    *, partial: bool, seed: int, kills: bool
) -> None:
    chaos = Chaos(seed, shared=False, n_blocks=3 + partial, partial=partial)
    for _ in range(80):
        chaos.step(kills=kills)
    chaos.finish()
