"""The step counters of BatchNorm, beside its averages; memory of messages."""

from dataclasses import replace

import numpy as np

from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.worker.execution.executor import as_tensor, with_counts
from distbelief.worker.execution.operations import Dataflow


def flow(*items: tuple[str, Region]) -> Dataflow:
    return Dataflow(
        operations=(),
        once=(),
        added=frozenset(),
        sent={},
        received={},
        items=items,
        losses=(),
        averages={index: index for index in range(len(items))},
        outputs=(),
        reads={},
        joined=frozenset(),
        integers=frozenset(),
    )


def test_the_rank_with_the_first_channels_counts() -> None:
    first, second = Region.of(8).cut(0, [1.0, 1.0])
    saved = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    whose = flow(("norm.running_var", first), ("norm.running_mean", first))
    found = with_counts(whose, saved)
    assert found.items[2] == ("norm.num_batches_tracked", Region.of())
    assert found.counts == {1: 2}
    other = flow(("norm.running_mean", second))
    assert with_counts(other, saved) == replace(other)


def test_a_counter_that_a_whole_layer_reads_is_kept_once() -> None:
    """Two items of one tensor overlap: every rank with a norm in an opaque module stopped."""
    read = ("norm.num_batches_tracked", Region.of())
    whose = flow(read, ("norm.running_mean", Region.of(8)))
    found = with_counts(whose, {"norm.running_mean", "norm.num_batches_tracked"})
    assert found.items == whose.items
    assert found.counts == {1: 0}


def test_what_is_not_saved_is_not_counted() -> None:
    whose = flow(("running_mean", Region.of(8)))
    assert with_counts(whose, {"running_mean"}).counts == {}
    assert with_counts(whose, {"num_batches_tracked"}).counts == {0: 1}


def test_what_arrived_is_read_where_it_lies_unless_nobody_may_write_there() -> None:
    memory = bytearray(np.arange(4, dtype=np.float32).tobytes())
    for buffer, is_shared in ((memory, True), (bytes(memory), False)):
        array: Vector = np.frombuffer(buffer, dtype=np.float32)
        array.flags.writeable = False
        seen = as_tensor(array)
        assert (seen.data_ptr() == array.ctypes.data) is is_shared
        assert seen.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not array.flags.writeable
