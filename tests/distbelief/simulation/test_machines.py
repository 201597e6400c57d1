"""Cost scales: a small model with the bytes, times and blocks of a large one."""

from dataclasses import replace

import numpy as np
import pytest

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.core.vectors import n_blocks
from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.protocol import PushBlock
from distbelief.roles.role import Address, Compute, Cost, Executor, Received, Role, Send
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import (
    ClusterOptions,
    CostScale,
    block_bytes_for,
    blocks_of,
    frame_scale,
    scale_of,
    scales_for,
)
from distbelief.simulation.network import Link
from tests.distbelief.simulation.toys import STEADY, A, B, Scripted, cluster_of, on_start


def layout(n: int, n_shards: int = 3) -> Layout:
    return Layout.of([TensorSpec(name="w", shape=(n,))], n_shards=n_shards)


SMALL, LARGE = layout(1000), layout(10_000_000)
SHARD, REPLICA = Address("shard-1"), Address("replica-0")


def test_a_shards_vector_stands_for_exactly_the_large_one() -> None:
    scales = scales_for(SMALL, LARGE, {REPLICA: 7.0}, data_bytes=2.0)
    for k in range(3):
        m, n = SMALL.shard_size(k) * 4, LARGE.shard_size(k) * 4
        assert round(m * scales[Address(f"shard-{k}")].frame_bytes) == n
    assert scales[REPLICA].flops == 7.0
    assert scales[REPLICA].data_bytes == 2.0
    assert scale_of(scales, Address("shard-1b")) == scales[SHARD]
    assert scale_of(scales, Address("evaluator")) == CostScale()


def test_of_two_ends_the_shard_counts() -> None:
    scales = {SHARD: CostScale(frame_bytes=3.0), REPLICA: CostScale(frame_bytes=2.0)}
    assert frame_scale(scales, SHARD, REPLICA) == 3.0
    assert frame_scale(scales, REPLICA, SHARD) == 3.0
    assert frame_scale(scales, REPLICA, Address("replica-1")) == 2.0


def test_blocks_are_about_as_many_as_of_the_large_net() -> None:
    n_bytes = block_bytes_for(SMALL, LARGE)
    wanted = [n_blocks(LARGE.shard_size(k), itemsize=4) for k in range(3)]
    with blocks_of(n_bytes):
        found = [n_blocks(SMALL.shard_size(k), itemsize=4) for k in range(3)]
    assert np.abs(np.subtract(found, wanted)).max() <= 2  # shards are not quite alike
    assert vectors.BLOCK_BYTES == 1 << 20
    with blocks_of(None):
        assert vectors.BLOCK_BYTES == 1 << 20


def test_costs_are_multiplied_executor_by_executor() -> None:
    scale = CostScale(flops=2.0, n_bytes=3.0, data_bytes=5.0)
    cost = Cost(flops=1.0, n_bytes=1.0, waiting=1.0)
    computed = Cost(flops=2.0, n_bytes=3.0, waiting=1.0)
    assert scale.of(cost, Executor.COMPUTE) == computed
    assert scale.of(cost, Executor.DATA) == Cost(flops=5.0, n_bytes=5.0, waiting=5.0)


def test_virtual_time_and_bytes_are_those_of_the_large_net() -> None:
    work = Compute(name="work", work=lambda: None, cost=Cost(flops=1.0))
    values = np.zeros(100, np.float32)
    message = PushBlock(sequence=1, shard_incarnation=1, block_index=0, values=values)
    actions = on_start(work, Send(receiver=B, message=message))
    options = ClusterOptions(
        introduce=True,
        machine=STEADY,
        scales={A: CostScale(flops=8.0, frame_bytes=1000.0)},
        codec=False,
    )
    roles = {A: Scripted(actions), B: Scripted()}
    cluster = cluster_of(roles, options=options)
    cluster.run()
    assert cluster.now == pytest.approx(8.0)
    assert cluster.busy(A) == pytest.approx(8.0)
    assert cluster.busy(B) == 0.0
    assert 400_000 < cluster.traffic.n_bytes < 400_150


def test_roles_are_built_with_blocks_of_that_size() -> None:
    seen: list[int] = []

    def build(_: Memory) -> Role:
        seen.append(vectors.BLOCK_BYTES)
        return Scripted()

    cluster = SimulatedCluster({A: build}, seed=1, options=ClusterOptions(block_bytes=96))
    cluster.run()
    cluster.run_until(lambda: True)
    assert seen == [96]
    assert vectors.BLOCK_BYTES == 1 << 20


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="2 shards"):
        scales_for(layout(1000, 2), LARGE, {})
    with pytest.raises(ValueError, match="flops"):
        CostScale(flops=-1.0)
    with pytest.raises(ValueError, match="block_bytes"):
        ClusterOptions(block_bytes=0)


@pytest.mark.parametrize("lent", [False, True])
def test_arrays_that_are_passed_on_are_copies(lent: bool) -> None:  # noqa: FBT001
    """What is lent is read when it arrives, anything else when it is sent."""
    values = np.zeros(4, np.float32)
    message = PushBlock(sequence=1, shard_incarnation=1, block_index=0, values=values)
    send = Send(receiver=B, message=message, lent=lent)
    change = Compute(name="change", work=lambda: values.fill(7.0))
    machine = replace(STEADY, host="", flops_per_second=1e12)
    link = Link(latency_seconds=1.0)
    options = ClusterOptions(introduce=True, machine=machine, link=link, codec=False)
    roles = {A: Scripted(on_start(send, change)), B: Scripted()}
    cluster_of(roles, options=options).run()
    (got,) = [
        event.message.values
        for _, event in roles[B].seen
        if isinstance(event, Received) and isinstance(event.message, PushBlock)
    ]
    assert got.tolist() == [7.0 if lent else 0.0] * 4
    assert not np.shares_memory(got, values)
    assert not got.flags.writeable
