"""Exchanges that wait for their pushes, over one card for all shards (PO-1, PO-2)."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import pytest
import torch
from typing_extensions import override

from distbelief.core import vectors
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.protocol import Fetch, PushBlock
from distbelief.protocol.role import Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Delay, Drop, Duplicate
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Card, SwitchedNetwork
from tests.simulation.scene import sends
from tests.simulation.test_downpour import (
    COUNTING,
    LEARNING,
    Cluster,
    counting,
    downpour,
    gradient_sum,
    plain,
    same,
)


WIDTH = 1 << 17
BYTES = 4 * WIDTH
WIDE = msgspec.structs.replace(
    COUNTING,
    model=msgspec.structs.replace(COUNTING.model, arguments={"width": WIDTH}),
    train=msgspec.structs.replace(COUNTING.train, arguments={"width": WIDTH, "n_samples": 8}),
)
RATE = 5e6  # bytes per second of a card: a push takes much longer than a step
BLOCK = 1 << 13  # bytes, for 1 MiB; smaller messages do not wait for each other


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "BLOCK_BYTES", BLOCK)


@dataclass(eq=False)
class Slow(Cluster):
    """Each replica has a card of its own, and all shards share one."""

    @override
    def options(self) -> ClusterOptions:
        hosts = {name: str(name) for name in self.names} | dict.fromkeys(self.shards, "servers")
        return ClusterOptions(
            introduce=True,
            machines={
                name: SimulatedMachine(host=host, shares_memory=False, jitter=0.0)
                for name, host in hosts.items()
            },
            fabric=SwitchedNetwork(
                cards={host: Card(bytes_per_second=RATE) for host in hosts.values()}
            ),
        )


def seconds_per_step(n_shards: int) -> Seconds:
    n_steps = 10
    cluster = Slow(WIDE, counting(max_steps=n_steps, blocking=True), n_shards=n_shards)
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -gradient_sum(cluster, task=WIDE))
    ends = 2 * BYTES / RATE  # a fetch before the first step, and a push after the last one
    return (cluster.ended_at - ends) / (n_steps - 1)


@pytest.mark.parametrize("n_shards", [1, 2, 4])
def test_a_step_takes_a_push_and_the_fetch_from_one_shard(n_shards: int) -> None:
    """PO-1: the values of a shard come while the pushes to the next ones are under way."""
    expected = BYTES / RATE * (1 + 1 / n_shards)
    assert seconds_per_step(n_shards) == pytest.approx(expected, rel=0.08)


def test_values_come_from_the_first_shard_before_the_last_one_has_its_push() -> None:
    cluster = Slow(WIDE, counting(max_steps=2, blocking=True), n_shards=4)
    order: list[tuple[str, str]] = []

    def see(happening: HandledEvent) -> None:
        if happening.name == "replica-0":
            for kind in (PushBlock, Fetch):
                order.extend((kind.__name__, to) for to, _ in sends(happening, kind))

    cluster.cluster.observe(see)
    cluster.run()
    order = order[order.index(("PushBlock", "shard-0")) :]
    assert order.index(("Fetch", "shard-0")) < order.index(("PushBlock", "shard-3"))


@pytest.mark.parametrize("n_shards", [1, 2, 3, 4])
def test_one_replica_is_sequential_training_to_the_bit_shard_by_shard(n_shards: int) -> None:
    """PO-2: the same bits as at the end of the step, for any number of shards."""
    job = downpour(blocking=True, max_steps=25)
    cluster = Slow(LEARNING, job, n_shards=n_shards)
    cluster.run()
    assert same(cluster.values(), plain(job, task=LEARNING))


@pytest.mark.parametrize("exchange", [ExchangePolicy(staleness=0, round=Round(), weight="mean")])
def test_rounds_have_the_same_bits_for_any_number_of_shards(exchange: ExchangePolicy) -> None:
    """PO-2, and E11."""
    found = []
    for n_shards in (1, 3):
        job = msgspec.structs.replace(downpour(max_steps=12), exchange=exchange)
        cluster = Slow(LEARNING, job, n_replicas=3, n_shards=n_shards)
        cluster.run()
        found.append(cluster.values())
    assert same(*found)


EXCHANGES: Mapping[str, Mapping[str, object]] = {
    "blocking": {"blocking": True},
    "sums": {"n_push": 2, "n_fetch": 2},
    "ssp": {"exchange": ExchangePolicy(staleness=1)},
    "rounds": {"exchange": ExchangePolicy(staleness=0, round=Round())},
}


@pytest.mark.each_value
@pytest.mark.parametrize("seed", [0, 2, 3, 5])  # 1: loses four messages in a row, in 60 s
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_each_push_counts_once_shard_by_shard(
    exchange: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PO-2, on links that repeat, delay, reorder and lose messages."""
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 32)  # 21 blocks for each shard
    faults: list[Delay | Drop | Duplicate] = [
        Duplicate(probability=0.1, seconds_max=1.0),
        Delay(probability=0.1, seconds_max=1.0, overtaken=seed % 2 == 1),
    ]
    if exchange in {"blocking", "sums"}:  # elsewhere nobody tells shards again that one has left
        faults.append(Drop(probability=0.05))
    job = counting(max_steps=6, **EXCHANGES[exchange])
    cluster = Slow(COUNTING, job, n_replicas=2, n_shards=3, seed=seed, faults=faults)
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -gradient_sum(cluster))
