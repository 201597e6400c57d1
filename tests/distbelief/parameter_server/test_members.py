"""What shards know of all their clients: held against going through all of them each time.

Two shards get the same events. One keeps counts as its clients change, the other is a
`PlainSessions`: they must send the same messages, to the last field.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.parameter_server import shard as shard_module, staleness
from distbelief.parameter_server.layout import TensorSpec
from distbelief.parameter_server.members import Least
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.sessions import Session, Sessions
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.staleness import PartialPushes
from distbelief.protocol import OpenSession, Push, PushBlock
from distbelief.protocol.role import Action, Address, PeerLost, Send
from tests.distbelief.parameter_server.pair import layout_of
from tests.distbelief.parameter_server.plain_sessions import PlainSessions
from tests.distbelief.parameter_server.shard_copies import PLUS_ONE, A, B, OneCopy


SPECS: Final = (TensorSpec(name="w", shape=(192,)), TensorSpec(name="m", shape=(5,)))
LAYOUT: Final = layout_of(SPECS, n_buffers=1)
N: Final = LAYOUT.shard_size(0)
PARTS: Final = (None, (0, N), (0, 128), (64, 192), (128, N), None)  # what each client holds
# Two of them are ranks of one replica.
NAMES: Final = [Address(f"replica-{n}") for n in ("3", "1.0", "10", "1.1", "0", "7")]
N_CLIENTS_MAX: Final = 5  # fewer than there are
ABSENCE_SECONDS: Final = 3.0

POLICIES: Final = {
    "downpour": ExchangePolicy(),
    "mean": ExchangePolicy(weight="mean", damping="excess"),
    "samples": ExchangePolicy(weight="samples", staleness=1),
    "bounded": ExchangePolicy(staleness=2, damping="inverse"),
    "local": ExchangePolicy(send="delta", weight="mean", every=4, staleness=0, round=Round()),
    "stale": ExchangePolicy(weight="samples", staleness=2, round=Round(quorum=0.75)),
    "early": ExchangePolicy(
        send="delta", weight="mean", every=4, round=Round(quorum=0.5, grace_seconds=0.7, early=True)
    ),
}


def shown(actions: list[Action]) -> list[object]:
    """Return what the peers see of these actions."""
    return [
        (a.receiver, msgspec.json.encode(a.message, enc_hook=lambda array: array.tolist()))
        for a in actions
        if isinstance(a, Send)
    ]


class World:
    """A shard with one or two copies, and its clients; messages between copies may be lost."""

    def __init__(self, kind: type[Sessions], policy: ExchangePolicy, *, n_copies: int) -> None:
        memory = PrivateMemory()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_module, "Sessions", kind)
            self.copies = [
                OneCopy(
                    name,
                    memory=memory,
                    layout=LAYOUT,
                    rule=PLUS_ONE,
                    policy=policy,
                    is_replicated=n_copies > 1,
                    n_clients_max=N_CLIENTS_MAX,
                    absence_seconds_max=ABSENCE_SECONDS,
                )
                for name in (A, B)[:n_copies]
            ]
        self.term = 1
        self.seen: list[object] = []
        self._is_lossy = False
        if n_copies > 1:
            self.term = 2
            self.pass_on(self.copies[0].lead(2, B))

    @property
    def primary(self) -> OneCopy:
        return self.copies[0]

    @property
    def turns(self) -> list[int]:
        return [-1 if one is None else one.turn for one in map(self.session, NAMES)]

    def session(self, name: Address) -> Session | None:
        return self.primary.shard._sessions.get(name)

    def pass_on(self, actions: list[Action], sender: OneCopy | None = None) -> None:
        """Note what peers see, and give the other copy what is for it."""
        sender = sender or self.primary
        self.seen += shown(actions)
        for action in actions:
            for copy in self.copies:
                if isinstance(action, Send) and action.receiver == copy.name:
                    self.pass_on(copy.receive(action.message, sender.name), copy)

    def work(self, copy: OneCopy) -> None:
        if copy.executor:
            self.pass_on(copy.work(), copy)

    def wait(self, seconds: float) -> None:
        for copy in self.copies:
            self.pass_on(copy.wait(seconds), copy)

    def take_over(self) -> None:
        """The primary is lost; its backup, if it can, goes on alone."""
        if len(self.copies) == 1 or not self.copies[1].counters()["in_sync"]:
            return
        del self.copies[0]
        self.term += 1
        self.pass_on(self.primary.lead(self.term))


Step = Callable[[World], None]
T = TypeVar("T")


class Clients:
    """Draw what clients do next, as the shard's answers allow."""

    def __init__(self, seed: int, world: World) -> None:
        self._stream, self._world = np.random.default_rng(seed), world
        self._lives = dict.fromkeys(NAMES, 1)
        self._entries = dict.fromkeys(NAMES, 0)
        self._sent = dict.fromkeys(NAMES, 0)

    def _one_of(self, choices: Sequence[T]) -> T:
        return choices[int(self._stream.integers(len(choices)))]

    def step(self) -> Step:
        kinds: list[Callable[[Address], Step]] = [self._leave, self._lost]
        kinds += [self._hello, self._hello, self._hello, self._wait, self._wait]
        for _ in range(4):
            kinds += [self._push, self._push, self._work, self._work, self._work]
        if self._stream.random() < 0.01:
            return World.take_over
        return self._one_of(kinds)(self._one_of(NAMES))

    def _open(self, name: Address, tick: object) -> Step:
        part = PARTS[NAMES.index(name)]
        holds: Vector | None = None if part is None else IndexRanges.whole(*part).stripes()
        entries, life, sent = self._entries[name], self._lives[name], self._sent[name]
        message = msgspec.structs.replace(
            OPEN, holds=holds, entries=entries or msgspec.UNSET, tick=tick, next_sequence=sent + 1
        )
        return lambda world: world.pass_on(world.primary.receive(message, name, life=life))

    def _hello(self, name: Address) -> Step:
        session = self._world.session(name)
        if session is not None:
            self._sent[name] = max(self._sent[name], session.watermark)
        if self._stream.random() < 0.15:
            self._lives[name] += 1
            self._entries[name] = 0
        self._entries[name] += self._entries[name] % 2 == 0
        known = msgspec.UNSET if session is None else session.tick
        return self._open(name, self._one_of([msgspec.UNSET, known]))

    def _leave(self, name: Address) -> Step:
        self._entries[name] += self._entries[name] % 2
        return self._open(name, msgspec.UNSET)

    def _push(self, name: Address) -> Step:
        session = self._world.session(name)
        if session is None or not session.opened or session.incarnation != self._lives[name]:
            return self._hello(name)
        sequence = min(max(self._sent[name], session.watermark), session.confirmed + 1) + 1
        clock = self._world.primary.shard.values.clock
        is_said = session.tick is not msgspec.UNSET and self._stream.random() < 0.9
        tick = (session.tick or 0) + 1 if is_said else msgspec.UNSET
        counts: list[int | msgspec.UnsetType] = [msgspec.UNSET, 1, 3, 7]
        message = Push(
            sequence=sequence,
            term=self._world.term,
            fetched_clock=max(0, clock - self._one_of([0, 0, 1, 2, 5])),
            n_gradients=1,
            samples=10 * sequence,
            n_samples=self._one_of(counts),
            tick=tick,
        )
        values = np.full(session.shard_slice.n_elements, -float(sequence), LAYOUT.dtype)
        block = PushBlock(sequence=sequence, term=message.term, block_index=0, values=values)
        life = self._lives[name]
        self._sent[name] = max(self._sent[name], sequence)

        def push(world: World) -> None:
            for part in (block, message):
                world.pass_on(world.primary.receive(part, name, life=life))

        return push

    def _lost(self, name: Address) -> Step:
        lost = PeerLost(peer=name, incarnation=self._lives[name], reason="killed")
        return lambda world: world.pass_on(
            world.primary._note(world.primary.shard.handle(lost, world.primary.now))
        )

    def _work(self, _: Address) -> Step:
        index = self._one_of([0, 1])
        return lambda world: world.work(world.copies[index % len(world.copies)])

    def _wait(self, _: Address) -> Step:
        seconds = self._one_of([0.1, 0.5, 0.8, ABSENCE_SECONDS])
        return lambda world: world.wait(seconds)


OPEN: Final = OpenSession(layout=LAYOUT.fingerprint, pushes=True, host="", next_sequence=1)


@pytest.mark.each_value
@pytest.mark.parametrize("n_copies", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 20), marks=pytest.mark.soak)])
def test_counts_kept_are_counts_found(name: str, n_copies: int, seeds: range) -> None:
    n_seen, n_pushes = 0, 0.0
    for seed in seeds:
        plain, kept = (
            World(kind, POLICIES[name], n_copies=n_copies) for kind in (PlainSessions, Sessions)
        )
        clients = Clients(seed, plain)
        for n in range(320):
            step = clients.step()
            for world in (plain, kept):
                step(world)
            assert plain.seen == kept.seen, (seed, n)
            assert plain.primary.counters() == kept.primary.counters(), (seed, n)
            assert plain.turns == kept.turns, (seed, n)
            plain.seen.clear()
            n_seen += len(kept.seen)
            kept.seen.clear()
        np.testing.assert_array_equal(plain.primary.values, kept.primary.values)
        n_pushes += plain.primary.counters()["pushes_applied"]
    assert n_pushes > 200, "too few pushes to compare"
    assert n_seen > 1000


@given(
    own=st.integers(0, 50),
    others=st.lists(st.none() | st.integers(0, 50), max_size=6),
    n_clients=st.integers(1, 9),
    staleness=st.integers(0, 9),
)
def test_sums_of_samples_are_enough_for_a_share(
    own: int, others: list[int | None], n_clients: int, staleness: int
) -> None:
    policy = POLICIES["samples"]
    known = [own, *(own if n is None else n for n in others)]
    sums = len(others), others.count(None), sum(n or 0 for n in others)
    expected = 1.0 * (own * len(known) / (max(sum(known), 1) * n_clients))
    assert policy.scale(staleness, n_clients, own, sums) == expected


@given(
    pushes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=60),
    n_kept=st.integers(1, 40),
    since=st.integers(0, 80),
)
def test_pushes_elsewhere_are_counted_as_by_looking_at_each(
    pushes: list[tuple[int, int]], n_kept: int, since: int
) -> None:
    slices = [
        ShardSlice(N, dtype=LAYOUT.dtype, ranges=IndexRanges.whole(*ends))
        for ends in ((0, 64), (32, 96), (96, 128), (64, 192))
    ]
    partial_pushes, seen, clock = PartialPushes(), list[tuple[int, ShardSlice]](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staleness, "_N_KEPT", n_kept)
        for index, more in pushes:
            clock += more
            partial_pushes.add(slices[index], clock=clock)
            seen.append((clock, slices[index]))
    for own in slices:
        assert own.ranges is not None
        ranges = [one.ranges for at, one in seen[-n_kept:] if at >= since]
        expected = sum(one is not None and not own.ranges.overlaps(one) for one in ranges)
        assert partial_pushes.n_elsewhere(own, since=since) == expected


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.none() | st.integers(0, 3)), max_size=400))
def test_the_least_of_changing_keys(changes: list[tuple[Address, int | None]]) -> None:
    least, keys = Least[int](), dict[Address, int]()
    for name, key in changes:
        if key is None:
            keys.pop(name, None)
            least.drop(name)
        else:
            keys[name] = key
            least.put(name, key)
        assert least.first() == min(((key, name) for name, key in keys.items()), default=None)
        assert len(least) == len(keys)
    assert len(least._heap) <= 2 * len(keys) + 2 * len(NAMES) + 64
