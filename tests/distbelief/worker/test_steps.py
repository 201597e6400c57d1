"""Transfers that a rank takes, keeps for later, or rejects."""

import numpy as np
import pytest
import torch
from torch import nn

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.graph.capture import InputSpec, capture
from distbelief.plans.compiler import compile_plan
from distbelief.plans.placement import Placement
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.protocol.role import Address, Compute
from distbelief.task.data import DataShard
from distbelief.worker.batches import BatchSlice, TrainingPlan
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.executor import PartitionExecutor
from distbelief.worker.steps import StepRunner, links_of
from tests.distbelief.plans.plans import chain


GENERATION = 9


def rank_1_of_2() -> tuple[StepRunner, int]:
    """Return rank 1 of a model of two layers, and the index of the message from rank 0."""
    graph = chain([6, 5, 4])
    places = {
        "fc0": Placement(cuts=((),), machines=(0,)),
        "fc1": Placement(cuts=((),), machines=(1,)),
    }
    compiled = compile_plan(graph, places, batch=3, n_machines=2)
    flow = dataflow(compiled, 1, loss="fc1")
    shard = DataShard(30, replica_index=0, n_replicas=1, seed=0)
    batch_plan = TrainingPlan(shard, batch_size=3)
    batch_plan.start(0)
    execution, names = PartitionExecutor(flow), [Address(f"replica-0.{rank}") for rank in range(2)]
    runner = StepRunner(
        execution,
        links=links_of(
            execution, names, 1, memory=PrivateMemory(host=""), batch=3, micro_batches=1
        ),
        batch_plan=batch_plan,
        micro_batches=1,
        training=True,
        seed=(0,),
    )
    runner.begin(GENERATION)
    ((way, sender),) = flow.received
    assert sender == 0
    return runner, way


def transfer(
    way: int, *, step: int = 0, generation: int = GENERATION, micro_batch: int = 0, n: int = 15
) -> TransferBlock:
    return TransferBlock(
        generation=generation,
        sequence=step,
        taken=0,
        step=step,
        micro_batch=micro_batch,
        way=way,
        block_index=0,
        values=np.ones(n, np.float32),
    )


def open_step(runner: StepRunner) -> None:
    runner.open(
        BatchSlice(generation=GENERATION, step=0),
        [torch.ones(4, 5), torch.ones(4)],
        put=lambda _item, _gradient: None,
        close=lambda found: found,
    )


def test_early_transfers_are_kept_for_their_step() -> None:
    runner, way = rank_1_of_2()
    runner.take(0, 1, transfer(way), 0.0)  # it is not known yet where the life begins
    runner.place(0.0)
    runner.take(0, 1, transfer(way, step=1), 0.0)
    open_step(runner)
    assert runner.is_open
    assert runner.awaited is None
    assert runner.chain()


def awaited(runner: StepRunner) -> int | None:
    return runner.awaited


def test_the_awaited_rank_is_known() -> None:
    runner, way = rank_1_of_2()
    runner.place(0.0)
    assert runner.chain() == []
    open_step(runner)
    assert awaited(runner) == 0
    runner.chain()
    assert runner.chain() == []
    runner.take(0, 1, transfer(way), 0.0)
    assert awaited(runner) is None
    assert runner.chain()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"generation": GENERATION - 1}, "transfer of generation 8; the current one is 9"),
        ({"step": 2}, "step is too far ahead"),
        ({"micro_batch": 1}, "micro-batch 1 of a step of 1"),
        ({"n": 14}, "has 14 numbers"),
    ],
)
def test_transfers_outside_the_program_are_rejected(changes: dict[str, int], text: str) -> None:
    runner, way = rank_1_of_2()
    runner.place(0.0)
    with pytest.raises(RemoteProtocolError, match=text):
        runner.take(0, 1, transfer(way, **changes), 0.0)
    with pytest.raises(RemoteProtocolError, match="no such message"):
        runner.take(0, 1, transfer(way + 1), 0.0)


def test_acknowledgements_of_another_generation_are_ignored() -> None:
    runner, _ = rank_1_of_2()
    assert runner.receive(0, 1, TransferAck(generation=GENERATION - 1, taken=5), 0.0) == []
    with pytest.raises(RemoteProtocolError, match="acknowledged all items before 5"):
        runner.receive(0, 1, TransferAck(generation=GENERATION, taken=5), 0.0)


def gradients_of_steps(first: int, n_steps: int) -> list[list[float]]:
    """Return the gradients of steps that begin at a position, all of equal inputs."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    graph = capture(net, [InputSpec(shape=(8,))])
    places = {layer.name: Placement.whole(1, 0) for layer in graph.computed}
    compiled = compile_plan(graph, places, batch=3, n_machines=1)
    flow = dataflow(compiled, 0, loss=graph.outputs[-1])
    shard = DataShard(30, replica_index=0, n_replicas=1, seed=0)
    batch_plan = TrainingPlan(shard, batch_size=3)
    batch_plan.start(first)
    runner = StepRunner(
        PartitionExecutor(flow),
        links={},
        batch_plan=batch_plan,
        micro_batches=1,
        training=True,
        seed=(0,),
    )
    runner.begin(GENERATION)
    runner.place(0.0)
    inputs = {name: [torch.ones(3, 8)] * len(regions) for name, regions in flow.reads.items()}
    values = [torch.ones(*region.shape) for _, region in flow.items]
    found: list[list[float]] = []
    for step in range(n_steps):
        gradients: dict[int, torch.Tensor] = {}
        portion = BatchSlice(generation=GENERATION, step=step, inputs=inputs)
        work: list[Compute] = runner.open(
            portion, values, put=gradients.__setitem__, close=lambda _: None
        )
        while work:
            runner.ran(work[0].work(), 0.0)  # type: ignore[arg-type]  # a StepOutcome
            work = runner.chain()
        found.append([float(one.sum()) for _, one in sorted(gradients.items())])
    return found


def test_a_step_draws_the_masks_of_its_samples_in_any_generation() -> None:
    """One by its number would repeat the masks of the first steps after each restart."""
    steps = gradients_of_steps(0, 4)
    assert steps[0] != steps[2]
    assert gradients_of_steps(6, 2) == steps[2:]
