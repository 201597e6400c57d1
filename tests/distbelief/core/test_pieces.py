"""Where pieces are in an epoch, and how pushes end with them."""

import numpy as np
import pytest

from distbelief.core.pieces import PieceOrder, Pieces
from distbelief.core.spans import Epochs, Spans


def order_of(rows: list[int], *, seed: int = 0) -> PieceOrder:
    named = {f"{k:03d}": n for k, n in enumerate(rows)}
    return PieceOrder(Pieces.of(named, is_placed=True, can_fetch=False), seed=seed)


ROWS = [[7], [0, 3, 0, 5], [1, 10, 100, 2], [4] * 9, [2, 0]]


@pytest.mark.parametrize("rows", ROWS)
def test_every_position_is_of_one_piece(rows: list[int]) -> None:
    order, n = order_of(rows), sum(rows)
    for epoch in (0, 1, 5):
        found = [order.at_position(position) for position in range(epoch * n, (epoch + 1) * n)]
        for position, (_, (start, stop)) in enumerate(found, epoch * n):
            assert start <= position < stop
        assert [sum(piece == k for piece, _ in found) for k in range(len(rows))] == rows
        for k in range(len(rows)):
            assert order.spans(epoch, [(k, k + 1)]) == sorted({s for p, s in found if p == k}) or (
                not rows[k]
            )
        assert Spans(order.spans(epoch, [(0, len(rows))])) == Spans([(epoch * n, epoch * n + n)])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = [tuple(order_of([3] * 20, seed=s).at(e)[0]) for s in (0, 0, 1) for e in (0, 1)]
    assert orders[:2] == orders[2:4]
    assert len({*orders}) == 4


def test_pieces_need_not_be_asked_for_in_order() -> None:
    order, other = order_of([3, 4, 5]), order_of([3, 4, 5])
    expected = [order.at(epoch)[0].tolist() for epoch in range(20)]
    drawn = np.random.default_rng(0).integers(20, size=100).tolist()
    assert [other.at(epoch)[0].tolist() for epoch in drawn] == [expected[e] for e in drawn]


@pytest.mark.parametrize("n_push", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("rows", ROWS)
def test_pushes_cut_each_piece_without_gaps(rows: list[int], batch_size: int, n_push: int) -> None:
    order, n = order_of(rows), sum(rows)
    epochs = Epochs(n_samples=n, batch_size=batch_size, n_push=n_push, pieces=order)
    position, n_pushes, n_batches = n, 0, 0
    while position < 2 * n:
        stop, whole = epochs.stop(position), epochs.whole(position)
        assert {epochs.start(p) for p in range(position, stop)} == {position}
        assert {epochs.stop(p) for p in range(position, stop)} == {stop}
        assert whole[0] <= position < stop <= whole[1]
        # Batch normalisation cannot train on one sample.
        assert stop - position > 1 or 1 in {batch_size, whole[1] - whole[0]}
        n_pushes += 1
        while position < stop:
            position += epochs.batch(stop - position)
            n_batches += 1
    assert position == 2 * n
    assert (epochs.n_pushes, epochs.n_batches(n, 2 * n)) == (n_pushes, n_batches)
    assert sum(epochs.n_batches(*span) for span in order.spans(1, [(0, len(rows))])) == n_batches


def test_the_first_piece_that_differs_is_named() -> None:
    there, here = (
        Pieces.of(rows, is_placed=True, can_fetch=False)
        for rows in ({"a": 3, "b": 4, "c": 1}, {"a": 3, "b": 5, "d": 1})
    )
    assert there.difference(here) == "piece 'b': 5 rows here, 4 rows where the job began"
    without = Pieces.of({"a": 3}, is_placed=True, can_fetch=False)
    assert without.difference(there) == "piece 'b': 4 rows here, no rows where the job began"
