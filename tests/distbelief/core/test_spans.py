import numpy as np
import pytest

from distbelief.core.spans import NOTHING, Epochs, Spans, in_all_parts, in_part, of_part


def positions(spans: Spans) -> set[int]:
    return {position for start, stop in spans for position in range(start, stop)}


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_sets_of_positions(seed: int) -> None:
    stream = np.random.default_rng(seed)

    def draw(stop: int) -> int:
        return int(stream.integers(stop))

    def drawn() -> Spans:
        starts = [draw(30) for _ in range(draw(6))]
        return Spans((start, start + draw(6)) for start in starts)

    for _ in range(100):
        a, b = drawn(), drawn()
        assert positions(a | b) == positions(a) | positions(b)
        assert positions(a - b) == positions(a) - positions(b)
        assert positions(a & b) == positions(a) & positions(b)
        assert a.n_positions == len(positions(a))
        assert Spans.from_wire(a.to_wire()) == a
        start = draw(30)
        span = start, start + 1 + draw(6)
        assert a.overlaps(span) == bool(positions(a) & positions(Spans([span])))
        assert a.contains(span) == (not positions(Spans([span])) - positions(a))


@pytest.mark.parametrize("seed", range(5))
def test_few_spans_less_many(seed: int) -> None:
    stream = np.random.default_rng(seed)
    many = Spans((at, at + int(stream.integers(1, 4))) for at in range(0, 400, 4))
    for _ in range(50):
        starts = stream.integers(0, 400, size=3).tolist()
        few = Spans((start, start + int(stream.integers(9))) for start in starts)
        assert positions(few - many) == positions(few) - positions(many)


@pytest.mark.parametrize("seed", range(20))
def test_few_spans_into_and_out_of_many(seed: int) -> None:
    stream = np.random.default_rng(seed)

    def drawn(n: int) -> Spans:
        starts = stream.integers(400, size=n).tolist()
        return Spans((start, start + int(stream.integers(5))) for start in starts)

    for _ in range(50):
        many, few = drawn(150), drawn(3)
        for both in (many | few, few | many):
            assert both == Spans((*many, *few))
        left = many - few
        assert positions(left) == positions(many) - positions(few)
        assert left == Spans(left)


def test_spans_need_memory_for_their_ends_alone() -> None:
    """A tuple of them asked `len` how much to allocate: the number of positions, not of spans.

    One push with these positions ended a shard, after each restart again, and an honest job would
    have met it after some 3e9 samples.
    """
    everything = Spans([(0, (1 << 63) - 1)])
    assert (Spans([(4, 6)]) | everything).to_wire() == (0, (1 << 63) - 1)
    assert tuple(everything) == ((0, (1 << 63) - 1),)
    assert Spans(everything).n_positions == (1 << 63) - 1
    assert everything
    assert not Spans()


def test_spans_that_touch_are_one() -> None:
    assert Spans([(4, 6), (0, 2), (2, 4)]).to_wire() == (0, 6)


@pytest.mark.parametrize("n_push", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("n_samples", [1, 2, 7, 12, 13, 16, 31])
def test_pushes_cut_an_epoch_without_gaps(n_samples: int, batch_size: int, n_push: int) -> None:
    epochs = Epochs(n_samples=n_samples, batch_size=batch_size, n_push=n_push)
    for epoch in (0, 3):
        position, end = epoch * n_samples, (epoch + 1) * n_samples
        while position < end:
            stop = epochs.stop(position)
            assert {epochs.start(p) for p in range(position, stop)} == {position}
            assert {epochs.stop(p) for p in range(position, stop)} == {stop}
            is_alone = stop - position == 1 and batch_size > 1
            assert not is_alone or n_samples == 1  # batch normalisation cannot train on one
            position = stop
        assert position == end


@pytest.mark.parametrize("n_push", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("n_samples", [7, 13, 16])
def test_batches_of_any_range_are_counted(n_samples: int, batch_size: int, n_push: int) -> None:
    epochs = Epochs(n_samples=n_samples, batch_size=batch_size, n_push=n_push)
    for start in range(n_samples):
        for stop in range(start + 1, n_samples + 1):
            n, position = 0, start
            while position < stop:
                end = min(epochs.stop(position), stop)
                while position < end:
                    position += epochs.batch(end - position)
                    n += 1
                assert position == end
            assert epochs.n_batches(start, stop) == n


def test_each_rank_counts_its_positions_for_itself() -> None:
    """A shard took the second rank's push of the same samples for one that it had."""
    pushed = Spans([of_part((0, 8), 0), of_part((0, 4), 1), of_part((6, 9), 1)])
    assert not pushed.overlaps(of_part((4, 6), 1))
    assert [in_part(pushed, part) for part in range(3)] == [
        Spans([(0, 8)]),
        Spans([(0, 4), (6, 9)]),
        NOTHING,
    ]
    assert in_all_parts(pushed) == Spans([(0, 4), (6, 8)])
    assert in_all_parts(Spans([(3, 5)])) == Spans([(3, 5)])
    assert in_all_parts(NOTHING) == NOTHING
