"""The step counters of BatchNorm, beside its averages."""

from dataclasses import replace

from distbelief.execution.executor import with_counts
from distbelief.execution.operations import Dataflow
from distbelief.graph.region import Region


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


def test_what_is_not_saved_is_not_counted() -> None:
    whose = flow(("running_mean", Region.of(8)))
    assert with_counts(whose, {"running_mean"}).counts == {}
    assert with_counts(whose, {"num_batches_tracked"}).counts == {0: 1}
