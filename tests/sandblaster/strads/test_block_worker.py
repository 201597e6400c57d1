"""A block worker alone: which messages of shards are of its own tasks."""

import numpy as np

from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.protocol import Assignment, ChunkTask, Message, RowsTaken, TakeRows
from distbelief.protocol.role import Address, Compute, Received, Send, Started
from sandblaster.chunks import COORDINATOR
from sandblaster.strads.method import task_content
from sandblaster.strads.program import Task
from sandblaster.strads.worker import BlockWorker
from tests.sandblaster.strads.mixing import Mix, Mixing


SHARD = Address("shard-0")


def taking(row: int, *, incarnation: int) -> tuple[BlockWorker, TakeRows]:
    """Return a worker whose task takes one row, and what it asks its shard."""
    program = Mixing(staleness=0)
    specs = [TensorSpec(name=name, shape=one.shape) for name, one in program.tables.items()]
    worker = BlockWorker(
        program, layout=Layout.of(specs, n_shards=1, dtype="float64"), await_begin=False
    )
    worker.handle(Started(incarnation=incarnation), 0.0)
    task: Task[object] = Task(block=0, argument=Mix(row, 0.0), takes={"long": np.array([row])})
    chunk = ChunkTask(
        chunk_index=0,
        attempt=1 + row,
        commit_token=0,
        content=task_content(task, {"long": 90}),
        after=2,
        adds_after=2,
    )
    message = Assignment(
        series=1,
        replica_incarnation=incarnation,
        version=1,
        evaluation=1,
        versions=(),
        n_examples=1,
        tasks=(chunk,),
    )
    sent = worker.handle(received(COORDINATOR, message), 0.0)
    (asked,) = [one.message for one in sent if isinstance(one, Send) and one.receiver == SHARD]
    assert isinstance(asked, TakeRows)
    return worker, asked


def received(sender: Address, message: Message) -> Received:
    return Received(sender=sender, incarnation=1, message=message)


def test_a_worker_takes_no_rows_that_its_earlier_incarnation_has_asked_for() -> None:
    """A worker was declared dead and ran on. Both asked shards, which answer to a name, and both
    counted what they ask for from 1: the new one took the rows of the other's task for its own, if
    they were as many, and the tables had other bits without a word."""
    _, of_first = taking(7, incarnation=1)
    second, of_second = taking(11, incarnation=2)
    for asked, begins in [(of_first, False), (of_second, True)]:
        answer = RowsTaken(series=1, number=2, part=asked.part, values=np.array([float(begins)]))
        actions = second.handle(received(SHARD, answer), 0.0)
        assert any(isinstance(one, Compute) for one in actions) is begins
