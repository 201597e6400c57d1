"""Cost scales: a small model with the bytes, times and blocks of a large one; copies of arrays."""

from dataclasses import replace

import numpy as np
import pytest

from distbelief.protocol import PushBlock
from distbelief.protocol.role import Address, Compute, Cost, Received, Send
from distbelief.simulation.machines import ClusterOptions, CostScale, frame_scale, scale_of
from distbelief.simulation.network import Link
from tests.distbelief.simulation.toys import STEADY, A, B, Scripted, cluster_of, on_start


SHARD, REPLICA = Address("shard-1"), Address("replica-0")


def test_a_backup_has_the_scale_of_its_primary() -> None:
    scales = {SHARD: CostScale(frame_bytes=3.0)}
    assert scale_of(scales, Address("shard-1b")) == scales[SHARD]
    assert scale_of(scales, Address("evaluator")) == CostScale()


def test_of_two_ends_the_shard_counts() -> None:
    scales = {SHARD: CostScale(frame_bytes=3.0), REPLICA: CostScale(frame_bytes=2.0)}
    assert frame_scale(scales, SHARD, REPLICA) == 3.0
    assert frame_scale(scales, REPLICA, SHARD) == 3.0
    assert frame_scale(scales, REPLICA, Address("replica-1")) == 2.0


def test_virtual_time_and_bytes_are_those_of_the_large_net() -> None:
    work = Compute(name="work", work=lambda: None, cost=Cost(flops=1.0))
    values = np.zeros(100, np.float32)
    message = PushBlock(sequence=1, term=1, block_index=0, values=values)
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


@pytest.mark.parametrize("codec", [False, True])
@pytest.mark.parametrize("lent", [False, True])
def test_every_array_arrives_as_a_copy(lent: bool, codec: bool) -> None:  # noqa: FBT001
    """What is lent is read when it arrives, as late as a network may; anything else when sent."""
    values = np.zeros(4, np.float32)
    message = PushBlock(sequence=1, term=1, block_index=0, values=values)
    send = Send(receiver=B, message=message, lent=lent)
    change = Compute(name="change", work=lambda: values.fill(7.0))
    machine = replace(STEADY, host="", flops_per_second=1e12)
    link = Link(latency_seconds=1.0)
    options = ClusterOptions(introduce=True, machine=machine, link=link, codec=codec)
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
