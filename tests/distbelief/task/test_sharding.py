import numpy as np
from hypothesis import given, strategies as st

from distbelief.task.data import BatchCursor, DataShard, start_positions


def shards_of(n_samples: int, n_replicas: int, *, seed: int = 0) -> list[DataShard]:
    return [
        DataShard(n_samples, replica_index=r, n_replicas=n_replicas, seed=seed)
        for r in range(n_replicas)
    ]


cuts = st.integers(1, 12).flatmap(
    lambda n_replicas: st.tuples(st.integers(n_replicas, 200), st.just(n_replicas))
)


@given(cuts)
def test_subsets_are_disjoint_and_cover_the_data(cut: tuple[int, int]) -> None:
    n_samples, n_replicas = cut
    parts = shards_of(n_samples, n_replicas)
    together = [i for part in parts for i in part.order(0).tolist()]
    assert sorted(together) == list(range(n_samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(cuts, st.integers(0, 3), st.integers(0, 5))
def test_every_pass_has_its_own_order(cut: tuple[int, int], seed: int, epoch: int) -> None:
    for part in shards_of(*cut, seed=seed):
        order = part.order(epoch)
        assert sorted(order.tolist()) == sorted(part.order(0).tolist())


@given(st.integers(0, 1000), st.sampled_from([2, 4, 10]))
def test_data_sorted_by_class_are_shuffled_so_that_each_replica_has_all_classes(
    seed: int, n_replicas: int
) -> None:
    """Each replica read a contiguous part of the data: of an image folder, few classes.

    Counts of a class lie within 5.5 standard deviations of a fair draw.
    """
    classes = np.arange(1000) // 100
    for part in shards_of(1000, n_replicas, seed=seed):
        counts = np.bincount(classes[part.order(0)], minlength=10)
        mean = len(part) / 10
        deviation = (mean * 0.9 * (1 - 1 / n_replicas)) ** 0.5
        assert np.abs(counts - mean).max() < 5.5 * deviation


def test_the_parts_depend_on_the_seed() -> None:
    one, same, other = (shards_of(100, 2, seed=s)[0].order(0) for s in (1, 1, 2))
    assert one.tolist() == same.tolist()
    assert sorted(one.tolist()) != sorted(other.tolist())


def test_a_pass_of_many_samples_is_read_as_it_is_ordered() -> None:
    """Samples are dealt a few thousand at a time; batches go across these."""
    part = shards_of(20_000, 2, seed=3)[1]
    seen = walk(part, batch_size=48, begin=10_000, end=20_000)
    assert seen == part.order(1).tolist()
    assert BatchCursor(part).batch(14_100, 48).tolist() == seen[4_100:4_148]


def test_each_pass_and_each_seed_has_another_order() -> None:
    part, other = shards_of(100, 1, seed=3)[0], shards_of(100, 1, seed=4)[0]
    assert part.order(0).tolist() != part.order(1).tolist()
    assert part.order(0).tolist() != other.order(0).tolist()
    assert part.order(7).tolist() == part.order(7).tolist()
    assert part.order(0).dtype == np.int64


def walk(part: DataShard, *, batch_size: int, begin: int, end: int) -> list[int]:
    cursor, position, seen = BatchCursor(part), begin, list[int]()
    while position < end:
        indices = cursor.batch(position, batch_size)
        assert 1 <= len(indices) <= batch_size + 1
        seen += indices.tolist()
        position += len(indices)
    assert position == end
    return seen


@given(st.integers(1, 60), st.integers(1, 20))
def test_every_sample_is_read_once_per_pass(n_samples: int, batch_size: int) -> None:
    part = shards_of(n_samples, 1, seed=1)[0]
    for epoch in range(3):
        seen = walk(
            part, batch_size=batch_size, begin=epoch * n_samples, end=(epoch + 1) * n_samples
        )
        assert seen == part.order(epoch).tolist()


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 30))
def test_a_position_is_enough_to_continue(n_samples: int, batch_size: int, n_batches: int) -> None:
    part = shards_of(n_samples, 1, seed=1)[0]
    cursor, position = BatchCursor(part), 0
    for _ in range(n_batches):
        position += len(cursor.batch(position, batch_size))
    resumed = BatchCursor(part)
    for _ in range(10):
        indices = cursor.batch(position, batch_size)
        assert resumed.batch(position, batch_size).tolist() == indices.tolist()
        position += len(indices)


def test_a_single_sample_left_over_joins_the_batch_before_it() -> None:
    cursor = BatchCursor(shards_of(5, 1)[0])
    assert len(cursor.batch(0, 2)) == 2
    assert len(cursor.batch(2, 2)) == 3  # BatchNorm cannot train on one sample
    ones = BatchCursor(shards_of(3, 1)[0])
    assert [len(ones.batch(i, 1)) for i in range(3)] == [1, 1, 1]


# -------------------------------------------------------- another number of replicas


@given(cuts, st.integers(0, 10**6))
def test_fresh_positions_add_up_and_are_the_same_share_of_every_part(
    cut: tuple[int, int], n_consumed: int
) -> None:
    n_samples, n_replicas = cut
    positions = start_positions(n_consumed, n_samples=n_samples, n_replicas=n_replicas)
    assert sum(positions) == n_consumed
    passes = n_consumed / n_samples
    for part, position in zip(shards_of(*cut), positions, strict=True):
        assert abs(position - passes * len(part)) < 1


@given(cuts, st.integers(0, 1000))
def test_between_passes_every_replica_begins_anew(cut: tuple[int, int], n_passes: int) -> None:
    n_samples, n_replicas = cut
    positions = start_positions(n_passes * n_samples, n_samples=n_samples, n_replicas=n_replicas)
    assert list(positions) == [n_passes * len(part) for part in shards_of(*cut)]


def test_one_replica_that_goes_on_alone_stays_where_it_was() -> None:
    assert start_positions(77, n_samples=10, n_replicas=1) == (77,)
