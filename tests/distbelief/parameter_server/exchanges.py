"""Shards in float32, and clients of theirs: all of the model, or parts; copies; lossy links."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from typing_extensions import override

from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import SGD, UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig
from distbelief.protocol import Message, Promote
from distbelief.protocol.role import Address
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, READER, TEST, Bench, Loop, gather


Tensors = list[torch.Tensor]

SPECS = (
    TensorSpec(name="b", shape=(33,)),
    TensorSpec(name="m", shape=(5,), kind="buffer"),
    TensorSpec(name="w", shape=(700, 500)),  # two blocks and more
)
ONE = SGD(learning_rate=1.0)


def noise(seed: int, layout: Layout) -> Tensors:
    stream = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.n_elements, generator=stream) for spec in layout.tensors]


def bench_of(
    n_shards: int = 1, *, rule: UpdateRule = ONE, host: str = "", kind: type[Bench] = Bench
) -> Bench:
    """Return shards that begin with `noise(0)`."""
    layout = Layout.of(SPECS, n_shards=n_shards)
    bench = kind(layout=layout, memory=PrivateMemory(host=host, poison=True))
    for k in range(n_shards):
        bench.add_shard(Address(f"shard-{k}"), rule=rule, initialise=partial(first, layout, k))
    return bench


def first(layout: Layout, k: int) -> Vector:
    vector = np.zeros(layout.shard_size(k), np.float32)
    gather(layout, k, noise(0, layout), vector)
    return vector


def push(bench: Bench, tensors: Tensors, name: Address = CLIENT) -> bool:
    """Push gradients, and the values of buffers."""
    return bench.push_tensors(tensors, tensors, name).finite


def fetch(bench: Bench, name: Address = CLIENT, *, exact: bool = False) -> Tensors:
    client = bench.client(name)
    tensors = [torch.full((spec.n_elements,), torch.nan) for spec in client._specs]
    bench.perform(name, client.begin_fetch(bench.now, exact=exact))
    bench.settle()
    assert bench.install(tensors, name).torn == ()
    return tensors


def served(bench: Bench) -> Tensors:
    """Return the values of the shards, as a client without rounding fetches them."""
    if READER not in bench.roles:
        bench.add_client(READER)
        bench.settle()
    return fetch(bench, READER)


def assert_same(one: Tensors, other: Tensors) -> None:
    for left, right in zip(one, other, strict=True):
        assert left.numpy().tobytes() == right.numpy().tobytes()


ITEMS = {
    CLIENT: [
        ("w", Region(((0, 700), (0, 201)))),
        ("b", Region(((0, 10),))),
        ("m", Region(((0, 2),))),
    ],
    OTHER: [
        ("m", Region(((2, 5),))),
        ("w", Region(((0, 700), (201, 500)))),
        ("b", Region(((10, 33),))),
    ],
}


@dataclass(kw_only=True)
class Lossy(Bench):
    """Loses a third of all messages, and sends another third twice."""

    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    is_lossy: bool = False

    @override
    def send(self, sender: Address, receiver: Address, message: Message, *, life: int = 0) -> None:
        for _ in range(int(self.random.integers(3)) if self.is_lossy else 1):
            super().send(sender, receiver, message, life=life)


class Pair(Bench):
    """A shard of two copies without shared memory, and clients that push as `config` says."""

    config: ClientConfig = ClientConfig(pushes=True)
    policy: ExchangePolicy = DOWNPOUR

    A, B = Address("shard-0"), Address("shard-0b")

    def begin(self, *, rule: UpdateRule, n_clients: int = 1) -> None:
        for name in (self.A, self.B):
            self.start_copy(name, rule=rule)
        self.lead(self.A, term=1)
        self.settle()
        self.lead(self.A, term=2, backup=self.B)
        for name in (CLIENT, OTHER)[:n_clients]:
            client = ParameterClient(
                self.config,
                PartialView(self.layout, ITEMS[name] if n_clients > 1 else None),
                memory=self.memory,
                shard_copies=2,
            )
            self.start(name, Loop(client))
        self.settle()

    def start_copy(self, name: Address, *, rule: UpdateRule) -> None:
        config = ShardConfig(
            index=0,
            layout=self.layout,
            rule=rule,
            policy=self.policy,
            name=name,
            is_replicated=True,
        )
        size = self.layout.shard_size(0)
        shard = Shard(config, memory=self.memory, initialise=lambda: np.zeros(size, np.float32))
        self.start(name, shard)

    def lead(self, name: Address, *, term: int, backup: str = "") -> None:
        promote = Promote(
            term=term, receiver_incarnation=1, backup=backup, backup_incarnation=1 if backup else 0
        )
        self.send(TEST, name, promote)

    def copy(self, name: Address) -> Shard:
        shard = self.roles[name]
        assert isinstance(shard, Shard)
        return shard
