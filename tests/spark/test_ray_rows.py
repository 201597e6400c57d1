"""Blocks of a Ray Dataset as rows; `tests/processes/test_ray_dataset.py` has a Ray cluster."""

from pathlib import Path

import numpy as np
import pytest
import torch

from distbelief.core.errors import JobError
from distbelief.spark.columns import Columns, cast_blocks, write_rows
from distbelief.spark.rows import RowFile


pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[spark]'")


def tensors_of(columns: Columns, folder: Path, **block: object) -> list[torch.Tensor]:
    n, _, _ = write_rows(cast_blocks([pa.table(block)], columns), folder / "rows", columns=columns)
    return [*RowFile(folder / "rows", columns).__getitems__(range(n))]


def test_columns_of_blocks_are_tensors(tmp_path: Path) -> None:
    x = np.arange(24).reshape(4, 3, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(x.astype(np.float64))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8) % 2 == 1), 2)
    halves = pa.array(np.array([1, 2, 3, 4], np.float16))
    for column, expected in (
        (tensors, torch.from_numpy(x).float()),
        (tensors[1:], torch.from_numpy(x[1:]).float()),
        (fixed, torch.tensor([[0, 1]] * 4)),
        (fixed[1:3], torch.tensor([[0, 1]] * 2)),
        (pa.array([[[1.5], [2]]] * 4, pa.large_list(pa.list_(pa.float64()))), [[[1.5], [2.0]]] * 4),
        (halves, torch.tensor([1.0, 2.0, 3.0, 4.0])),
    ):
        y = np.arange(len(column))
        found, targets = tensors_of(Columns(inputs=("x",), target="y"), tmp_path, x=column, y=y)
        assert torch.equal(found, torch.as_tensor(expected))
        assert torch.equal(targets, torch.from_numpy(y))
    two = Columns(inputs=("a", "b"), target="y")
    found, _ = tensors_of(two, tmp_path, a=[1, 2], b=[0.5, 1.5], y=[0, 1])
    assert torch.equal(found, torch.tensor([[1.0, 0.5], [2.0, 1.5]]))
    decode = Columns(inputs=("x",), target="y", decode={"x": "tests.spark.nets:pixels"})
    found, _ = tensors_of(decode, tmp_path, x=[b"\x08", b"\x10"], y=[0, 1])
    assert torch.equal(found, torch.tensor([[0.5], [1.0]]))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["a", "b"], "no tensor"),
        ([1, None], "missing values"),
        ([[1, None], [2, 3]], "missing values"),
        ([[1.0], [1.0, 2.0]], "arrays of 1 and of 2 numbers"),
        (pa.array([[], []], pa.list_(pa.float32())), "arrays of 0 numbers"),
        ([b"a", b"b"], "decode is for columns of bytes"),
        (np.array([1.0, 2.0, 1e300]), "row 2 of a batch is infinite, or was beyond float32"),
        ([[1.0, 2.0], [3.0, float("-inf")]], "row 1 of a batch is infinite"),
        (np.array([1, 2**63], np.uint64), "Integer value 9223372036854775808 not in range"),
        (np.array(["2012-12-03", "2012-12-06"], "datetime64[s]"), "no tensor"),
    ],
)
def test_columns_of_blocks_that_are_no_tensors_are_refused(
    tmp_path: Path, values: object, why: str
) -> None:
    with pytest.raises(JobError, match=f"column 'x'.*{why}"):
        tensors_of(Columns(inputs=("x",)), tmp_path, x=values)
    with pytest.raises(JobError, match="there is no column 'z': the Dataset has x"):
        tensors_of(Columns(inputs=("z",)), tmp_path, x=values)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(JobError, match="several columns are called 'x'"):
        next(cast_blocks([twice], Columns(inputs=("x",))))
