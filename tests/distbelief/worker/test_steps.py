"""Transfers that a machine takes, keeps for later, or refuses."""

import numpy as np
import pytest
import torch

from distbelief.data.sharding import DataShard
from distbelief.errors import RemoteProtocolError
from distbelief.execution.dataflow import dataflow
from distbelief.execution.executor import PartitionExecutor
from distbelief.program.compiler import compile_plan
from distbelief.program.placement import Placement
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.roles.reliable import ReliableSender
from distbelief.roles.role import Address
from distbelief.worker.batches import BatchSlice, TrainingPlan
from distbelief.worker.steps import StepRunner
from tests.distbelief.program.plans import chain


GENERATION = 9


def second_of_two() -> tuple[StepRunner, int]:
    """Machine 1 of a net of two layers, and the index of what machine 0 sends it."""
    graph = chain([6, 5, 4])
    places = {
        "fc0": Placement(cuts=((),), machines=(0,)),
        "fc1": Placement(cuts=((),), machines=(1,)),
    }
    compiled = compile_plan(graph, places, batch=3, n_machines=2)
    flow = dataflow(compiled, 1, loss="fc1")
    shard = DataShard(30, replica_index=0, n_replicas=1, seed=0)
    course = TrainingPlan(shard, batch_size=3)
    course.start(0)
    stepping = StepRunner(
        PartitionExecutor(flow),
        couriers={0: ReliableSender(Address("replica-0.0"))},
        course=course,
        micro_batches=1,
        training=True,
        seed=(0,),
    )
    stepping.begin(GENERATION)
    ((way, sender),) = flow.received
    assert sender == 0
    return stepping, way


def transfer(
    way: int, *, step: int = 0, life: int = GENERATION, micro_batch: int = 0, n: int = 15
) -> TransferBlock:
    return TransferBlock(
        life=life,
        sequence=step,
        taken=0,
        step=step,
        micro_batch=micro_batch,
        way=way,
        block_index=0,
        values=np.ones(n, np.float32),
    )


def open_step(stepping: StepRunner) -> None:
    stepping.open(
        BatchSlice(life=GENERATION, step=0),
        [torch.ones(4, 5), torch.ones(4)],
        put=lambda _item, _gradient: None,
        close=lambda found: found,
    )


def test_what_comes_early_is_kept_for_its_step() -> None:
    stepping, way = second_of_two()
    stepping.take(0, transfer(way), 0.0)  # it is not known yet where the life begins
    stepping.place(0.0)
    stepping.take(0, transfer(way, step=1), 0.0)
    open_step(stepping)
    assert stepping.is_open
    assert stepping.awaited is None
    assert stepping.chain()


def awaited(stepping: StepRunner) -> int | None:
    return stepping.awaited


def test_who_is_waited_for_is_known() -> None:
    stepping, way = second_of_two()
    stepping.place(0.0)
    assert stepping.chain() == []
    open_step(stepping)
    assert awaited(stepping) == 0
    stepping.chain()
    assert stepping.chain() == []
    stepping.take(0, transfer(way), 0.0)
    assert awaited(stepping) is None
    assert stepping.chain()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"life": GENERATION - 1}, "transfer of generation 8; the current one is 9"),
        ({"step": 2}, "step is too far ahead"),
        ({"micro_batch": 1}, "micro-batch 1 of a step of 1"),
        ({"n": 14}, "has 14 numbers"),
    ],
)
def test_what_is_not_of_the_program_is_refused(changes: dict[str, int], text: str) -> None:
    stepping, way = second_of_two()
    stepping.place(0.0)
    with pytest.raises(RemoteProtocolError, match=text):
        stepping.take(0, transfer(way, **changes), 0.0)
    with pytest.raises(RemoteProtocolError, match="no such message"):
        stepping.take(0, transfer(way + 1), 0.0)


def test_words_of_another_life_are_not_heard() -> None:
    stepping, _ = second_of_two()
    assert stepping.taken(0, TransferAck(life=GENERATION - 1, taken=5), 0.0) == []
    with pytest.raises(RemoteProtocolError, match="has taken 5"):
        stepping.taken(0, TransferAck(life=GENERATION, taken=5), 0.0)
