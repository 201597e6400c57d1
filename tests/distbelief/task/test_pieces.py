"""Data sets in pieces: what users give, how it is read, and what is refused."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from distbelief.core.errors import JobError
from distbelief.task import pieces as pieces_module
from distbelief.task.data import (
    DataSource,
    dealt_samples,
    first_of,
    marks_of,
    pieces_of,
    read_batch,
    some_of,
)
from distbelief.task.pieces import PieceData
from distbelief.task.sources import source_of
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec, check_pieces
from distbelief.task.validation import check_sources
from tests.distbelief.examples import HERE, NumberedPieces, numbered_pieces


ROWS = [3, 0, 10, 1, 6]


def source(
    rows: Sequence[int] = ROWS, *, here: Sequence[int] | None = None, fetches: bool = False
) -> DataSource:
    given = numbered_pieces(rows=rows, here=here, fetches=fetches)
    return DataSource.of(source_of(given, name="numbered"))


def order(of: DataSource, epoch: int, *, seed: int = 3) -> list[int]:
    n = len(of)
    found = dealt_samples(epoch * n, epoch * n + n, n_samples=n, seed=seed, order=of.order)
    return [int(index) for index in found]


def test_an_epoch_has_each_row_once_piece_by_piece() -> None:
    data = source()
    starts = np.cumsum([0, *ROWS])
    for epoch in range(5):
        found = order(data, epoch)
        assert sorted(found) == list(range(sum(ROWS)))
        of = [int(k) for k in np.searchsorted(starts, found, side="right") - 1]
        assert len([a for a, b in pairwise(of) if a != b]) == 3  # of 4 with rows
    assert order(data, 0) != order(data, 1)
    assert order(data, 0) != order(data, 0, seed=4)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_any_ranges_give_the_same_samples(n: int) -> None:
    data, size = source(), sum(ROWS)
    cut = [
        dealt_samples(k, min(k + n, size), n_samples=size, seed=3, order=data.order)
        for k in range(0, size, n)
    ]
    assert np.concatenate(cut).tolist() == order(data, 0)


@pytest.mark.parametrize("rows", [[17], [0, 17, 0]])
def test_a_single_piece_has_the_order_of_a_data_set_without_pieces(rows: list[int]) -> None:
    plain = dealt_samples(2 * 17, 3 * 17, n_samples=17, seed=3).tolist()
    assert order(source(rows), 2) == plain


def test_a_batch_of_several_pieces_has_the_order_of_its_samples() -> None:
    wanted = [12, 0, 19, 2, 4, 13]
    batch = read_batch(source(), wanted)
    assert cast("torch.Tensor", batch.inputs).tolist() == wanted


class Finished:
    """Pieces that return finished batches of any kind."""

    def __init__(self, make: Callable[[torch.Tensor], object]) -> None:
        self.make = make

    def pieces(self) -> dict[str, int]:
        return {"b": 4, "a": np.int64(6)}  # type: ignore[dict-item]  # as of many libraries

    def read(self, piece: str, rows: Sequence[int]) -> object:
        return self.make(torch.tensor(rows) + 6.0 * (piece == "b"))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, 2 * x),
        lambda x: {"x": x, "y": {"z": 2 * x}},
        lambda x: (x.numpy(), 2 * x),
        lambda x: [(one, 2 * one) for one in x],
    ],
)
@pytest.mark.parametrize("wanted", [[1, 5, 2], [7, 0, 9, 3]])
def test_finished_batches_are_joined(
    make: Callable[[torch.Tensor], object], wanted: list[int]
) -> None:
    batch = read_batch(source_of(Finished(make), name="finished"), wanted)
    first, second = batch.tensors().values()
    assert first.tolist() == wanted
    assert second.tolist() == [2.0 * k for k in wanted]


def test_finished_batches_of_other_rows_are_refused() -> None:
    """Where `read` returned all rows of the first piece, the batch had none of the second."""
    data = source_of(Finished(lambda _: (torch.zeros(4), torch.zeros(4))), name="finished")
    with pytest.raises(JobError, match=r"returned \[4, 4\] samples .* read \[2, 2\] rows"):
        read_batch(data, [7, 0, 9, 3])
    some = Finished(lambda x: {"x": x} if x.max() < 6 else {"x": x, "y": x})
    with pytest.raises(JobError, match="other keys"):
        read_batch(source_of(some, name="finished"), [7, 0, 9, 3])


def test_samples_to_try_are_those_that_are_here() -> None:
    data = source(here=[0, 4])
    assert first_of(data, 100) == [0, 1, 2, 14, 15, 16, 17, 18, 19]
    assert some_of(data, 4) == first_of(data, 4) == [0, 1, 2, 14]
    assert marks_of(data) is None
    assert data.placed is not None
    assert data.placed.here == (0, 1, 4, 5)
    assert source().placed is None
    assert marks_of(source()) == marks_of(source())


def test_a_process_without_pieces_fetches_the_smallest_one_to_try() -> None:
    data = source(here=[], fetches=True)
    assert first_of(data, 100) == [13]
    given = cast("NumberedPieces", cast("PieceData", data.dataset)._given)
    assert cast("torch.Tensor", read_batch(data, [13]).inputs).tolist() == [13]
    assert given.near == {"piece-003"}


def test_a_piece_is_fetched_once() -> None:
    fetched: list[str] = []
    data = source_of(given(here=list, fetch=fetched.append), name="given")
    for _ in range(3):
        read_batch(data, [0, 2])
    assert fetched == ["a"]


def test_the_fingerprint_is_of_names_and_rows() -> None:
    prints = [source(rows).fingerprint for rows in ([3, 4], [3, 4], [4, 3], [3, 4, 0])]
    assert prints[0] == prints[1]
    assert len({*prints}) == 3


def given(**methods: Callable[..., object]) -> object:
    own: dict[str, Callable[..., object]] = {
        "pieces": lambda: {"a": 3},
        "read": lambda _piece, rows: [(row, row) for row in rows],
    }
    return SimpleNamespace(**own | methods)


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"pieces": lambda: ["a"]}, r"pieces\(\) returned .*: it must be a dictionary"),
        ({"pieces": lambda: {"a": -1}}, r"pieces\(\) has 'a': -1: it must"),
        ({"pieces": lambda: {"a": 1.5}}, r"pieces\(\) has 'a': 1.5: it must"),
        ({"pieces": lambda: {3: 1}}, r"pieces\(\) has 3: 1: it must"),
        ({"pieces": lambda: {"a": 0}}, "1 pieces of 0 rows"),
        ({"pieces": dict}, "0 pieces of 0 rows"),
        ({"pieces": lambda: 1 / 0}, r"pieces\(\) failed: ZeroDivisionError"),
        ({"here": lambda: ["b"]}, r"here\(\) has 'b', which pieces\(\) does not have"),
        ({"here": lambda: "a"}, r"here\(\) returned .*: it must be names"),
    ],
)
def test_what_is_no_pieces_is_refused(methods: dict[str, Callable[..., object]], text: str) -> None:
    with pytest.raises(JobError, match=text):
        source_of(given(**methods), name="given")


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"read": lambda _piece, _rows: 1 / 0}, r"read\('a', 2 rows\) failed: ZeroDivisionError"),
        ({"read": lambda _piece, rows: rows[1:]}, r"read\('a', 2 rows\) returned .*a list of as"),
        ({"here": list}, "piece 'a' does not lie on this host"),
        ({"here": list, "fetch": lambda _name: 1 / 0}, r"fetch\('a'\) failed: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_read_is_named(methods: dict[str, Callable[..., object]], text: str) -> None:
    with pytest.raises(JobError, match=text):
        read_batch(source_of(given(**methods), name="given"), [0, 2])


def test_two_kinds_of_batches_do_not_join() -> None:
    kinds = Finished(lambda x: (x, x) if x[0] < 6 else {"x": x})
    with pytest.raises(JobError, match="of one piece only"):
        read_batch(source_of(kinds, name="kinds"), [0, 8])


def test_limits_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="leave limit out"):
        source_of(numbered_pieces(rows=[3]), name="numbered", limit=2)
    with pytest.raises(JobError, match="no piece with rows lies here"):
        first_of(source(here=[1]), 3)
    monkeypatch.setattr(pieces_module, "N_PLACED_MAX", 4)
    source(ROWS)
    with pytest.raises(JobError, match="5 pieces of 20 rows: it must have 1 to 4 pieces"):
        source(here=[0])


def check(
    rows: Sequence[int],
    *,
    table: str = "data.train",
    dealt: bool = True,
    here: Sequence[int] | None = None,
    fetches: bool = False,
) -> None:
    spec = DataSpec(factory=f"{HERE}:numbered_pieces")
    model = ModelSpec(factory=f"{HERE}:net")
    task = TaskSpec(model=model, train=spec, test=spec, loss="mse")
    check_sources(
        task,
        {table: source(rows, here=here, fetches=fetches)},
        batch_size=4,
        seed=0,
        n_replicas=2,
        is_dealt=dealt,
        is_driven=False,
    )


def test_what_a_job_cannot_do_with_pieces_is_refused_before_the_start() -> None:
    check([3, 5])
    check([1, 5])  # all can read all, so batches span pieces
    check([3, 5], here=[0])
    check([3, 5], here=[0, 1], table="data.test")
    check([3, 0, 5], here=[0, 2], table="data.test")  # nothing is read of the empty one
    check([3, 5], here=[0], fetches=True, table="data.test")
    with pytest.raises(JobError, match=r'order is "parts": use order = "dealt"'):
        check([3, 5], dealt=False)
    with pytest.raises(JobError, match="has 1 row in piece 'piece-000'"):
        check([1, 5], here=[0])
    with pytest.raises(JobError, match="has 1 pieces on other hosts, and an evaluation reads all"):
        check([3, 5], here=[0], table="data.test")


def test_another_host_must_have_the_same_pieces() -> None:
    check_pieces(None, None)
    check_pieces(pieces_of(source(here=[0])), pieces_of(source(here=[2])))
    with pytest.raises(JobError, match="piece 'piece-002': 11 rows here, 10 rows where"):
        check_pieces(pieces_of(source()), pieces_of(source([3, 0, 11, 1, 6])))
    with pytest.raises(JobError, match=r"has here\(\) or fetch\(\) on some hosts only"):
        check_pieces(pieces_of(source()), pieces_of(source(here=[0])))
    for one, other in ((None, pieces_of(source())), (pieces_of(source()), None)):
        with pytest.raises(JobError, match="has pieces on some hosts only"):
            check_pieces(one, other)
