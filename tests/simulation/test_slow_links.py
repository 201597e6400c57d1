"""Clients whose blocks take longer than the pause before a repetition."""

import pytest

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.protocol import PushBlock
from distbelief.protocol.role import Address
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Card, SwitchedNetwork
from tests.simulation.scene import sends
from tests.simulation.workers import WIDTH, Ledger, Worker, shard_of


N_WORKERS, N_PUSHES, N_ROWS = 4, 6, 128


def test_blocks_on_a_slow_shared_card_are_seldom_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: four clients at one card of 100 Mbit/s sent six times as much as they had.

    The shard answers every fourth block. With four clients that took 1.3 s, and after 0.5 s each of
    them sent its whole window again, which held up the answers to all.
    """
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 1 << 10)  # stands for 1 MiB
    layout = Layout.of([TensorSpec(name="marks", shape=(N_ROWS, WIDTH))], n_shards=1)
    names = [Address(f"worker-{index}") for index in range(N_WORKERS)]
    shard, ledger = Address("shard-0"), Ledger()

    def worker(memory: Memory) -> Worker:
        return Worker(layout, memory, ledger=ledger, n_wanted=N_PUSHES)

    builders: dict[Address, Builder] = {shard: lambda memory: shard_of(0, layout, memory)}
    builders |= dict.fromkeys(names, worker)
    cards = {str(name): Card(bytes_per_second=12.5e3) for name in builders}
    machines = {name: SimulatedMachine(host=name) for name in builders}
    options = ClusterOptions(introduce=True, machines=machines, fabric=SwitchedNetwork(cards=cards))
    cluster = SimulatedCluster(builders, seed=1, options=options)
    sent: list[tuple[Address, int, int]] = []

    def see(happening: HandledEvent) -> None:
        for _, block in sends(happening, PushBlock):
            sent.append((happening.name, block.sequence, block.block_index))

    cluster.observe(see)
    cluster.run(until=600.0)
    n_blocks = vectors.n_blocks(N_ROWS * WIDTH, itemsize=layout.dtype.itemsize)
    assert len(set(sent)) == N_WORKERS * N_PUSHES * n_blocks
    assert len(sent) < 1.1 * len(set(sent))
