"""Clients whose blocks take longer than the pause before a repetition."""

from functools import partial

import pytest

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.core.vectors import n_blocks as n_blocks_in
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.shard import Shard
from distbelief.protocol import PushBlock
from distbelief.protocol.role import Address
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Card, SwitchedNetwork
from tests.simulation.scene import sends
from tests.simulation.workers import WIDTH, Ledger, Worker, shard_of


Block = tuple[Address, Address, int, int]  # from, to, of which push, and which

N_WORKERS, N_PUSHES, N_ROWS = 4, 6, 128


def blocks_of(*, n_workers: int, n_shards: int, n_pushes: int, n_rows: int) -> list[Block]:
    """Return all blocks of pushes that clients send to shards which share a card."""
    layout = Layout.of([TensorSpec(name="marks", shape=(n_rows, WIDTH))], n_shards=n_shards)
    names = [Address(f"worker-{index}") for index in range(n_workers)]
    shards, ledger = [Address(f"shard-{k}") for k in range(n_shards)], Ledger()

    def worker(memory: Memory) -> Worker:
        return Worker(layout, memory, ledger=ledger, n_wanted=n_pushes)

    def shard(k: int, memory: Memory) -> Shard:
        return shard_of(k, layout, memory)

    builders: dict[Address, Builder] = {name: partial(shard, k) for k, name in enumerate(shards)}
    builders |= dict.fromkeys(names, worker)
    hosts = dict.fromkeys(shards, "shards") | {name: str(name) for name in names}
    cards = {host: Card(bytes_per_second=12.5e3) for host in hosts.values()}
    machines = {name: SimulatedMachine(host=host) for name, host in hosts.items()}
    options = ClusterOptions(introduce=True, machines=machines, fabric=SwitchedNetwork(cards=cards))
    cluster = SimulatedCluster(builders, seed=1, options=options)
    sent: list[Block] = []

    def see(happening: HandledEvent) -> None:
        for receiver, block in sends(happening, PushBlock):
            sent.append((happening.name, receiver, block.sequence, block.block_index))

    cluster.observe(see)
    cluster.run(until=600.0)
    n_blocks = sum(n_blocks_in(layout.shard_size(k), itemsize=4) for k in range(n_shards))
    assert len(set(sent)) == n_workers * n_pushes * n_blocks
    return sent


def test_blocks_on_a_slow_shared_card_are_seldom_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: four clients at one card of 100 Mbit/s sent six times as much as they had.

    The shard answers every fourth block. With four clients that took 1.3 s, and after 0.5 s each of
    them sent its whole window again, which held up the answers to all.
    """
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 1 << 10)  # stands for 1 MiB
    sent = blocks_of(n_workers=N_WORKERS, n_shards=1, n_pushes=N_PUSHES, n_rows=N_ROWS)
    assert len(sent) < 1.1 * len(set(sent))


@pytest.mark.parametrize(
    ("n_workers", "n_shards", "n_rows"),
    [(2, 4, 40), (3, 3, 66), (4, 2, 40), (4, 2, 80), (6, 1, 40), (6, 1, 54)],
)
def test_of_blocks_that_come_late_all_but_the_first_are_sent_once(
    monkeypatch: pytest.MonkeyPatch, n_workers: int, n_shards: int, n_rows: int
) -> None:
    """Three replicas and three shards behind a card of 72 Mbit/s sent all blocks twice for ever.

    After a repetition the rest of a fetch, which it had asked for once more, counted as the answer
    to what was sent since, and came at once: the pause was short again. And acknowledgements of the
    last blocks of a push, after which no more are sent, were no progress.
    """
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 1 << 10)
    sent = blocks_of(n_workers=n_workers, n_shards=n_shards, n_pushes=16, n_rows=n_rows)
    first = min(sequence for _, _, sequence, _ in sent)
    late = [block for block in sent if block[2] >= first + 5]
    assert len(late) == len(set(late))
