"""DataFrames of every kind: types of columns, missing values, no rows, rows drawn by chance."""

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from distbelief.core.errors import JobError
from tests.spark import test_spark as t
from tests.spark.nets import pixels


if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from distbelief.spark.model import DistBeliefModel

import pyarrow as pa
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as f

from distbelief import spark
from distbelief.spark.columns import Columns, selected, write_rows
from distbelief.spark.rows import RowFile


pytestmark = t.pytestmark


def tensors_of(frame: "DataFrame", columns: Columns, folder: Path) -> list[torch.Tensor]:
    batches = frame.select(*selected(frame, columns)).toArrow().to_batches()
    n, _, _ = write_rows(batches, folder / "rows", columns=columns)
    return [*RowFile(folder / "rows", columns).__getitems__(range(n))]


def fit(frame: object, wanted: dict[str, object], **more: object) -> "DistBeliefModel":
    made = cast("Any", spark.fit)(frame, wanted, inputs="row", targets="one", show=False, **more)
    return cast("DistBeliefModel", made)


# --- columns ---


def test_vectors_decimals_and_bytes_are_tensors(session: "SparkSession", tmp_path: Path) -> None:
    dense, sparse = Vectors.dense([1.0, 0.0, 2.5]), Vectors.sparse(3, [1], [4.0])
    content = [b"\x01\x10", b"\x00\x08"]
    rows = [
        (dense, Decimal("1.50"), True, content[0]),
        (sparse, Decimal("2.25"), False, content[1]),
    ]
    schema = "decimal decimal(10, 2), yes boolean, image binary"
    frame = session.createDataFrame([one[1:] for one in rows], schema).coalesce(1)
    vectors = session.createDataFrame([(one[0], k) for k, one in enumerate(rows)], ["x", "k"])
    x, k = tensors_of(vectors.coalesce(1), Columns(inputs=("x",), target="k"), tmp_path)
    assert torch.equal(x, torch.tensor([[1.0, 0.0, 2.5], [0.0, 4.0, 0.0]]))
    assert k.tolist() == [0, 1]
    decimal, yes = tensors_of(frame, Columns(inputs=("decimal",), target="yes"), tmp_path)
    assert (decimal.tolist(), yes.tolist()) == ([1.5, 2.25], [1, 0])
    decode = {"image": "tests.spark.nets:pixels"}
    found, _ = tensors_of(frame, Columns(inputs=("image",), target="yes", decode=decode), tmp_path)
    assert torch.equal(found, torch.stack([pixels(one) for one in content]))


@pytest.mark.parametrize(
    ("kind", "value", "way"),
    [
        ("date", date(2012, 12, 3), "unix_date"),
        ("string", "a", "StringIndexer"),
        ("map<string,int>", {"a": 1}, "give numbers"),
        ("array<string>", ["a"], "StringIndexer"),
    ],
)
def test_a_column_that_is_no_tensor_is_refused_with_the_way(
    session: "SparkSession", kind: str, value: object, way: str
) -> None:
    frame = session.createDataFrame([(value,)], f"x {kind}")
    with pytest.raises(JobError, match=f"which is no tensor: .*{way}"):
        selected(frame, Columns(inputs=("x",)))


@pytest.mark.parametrize(
    ("rows", "schema"),
    [
        ([([1.0, None],), ([1.0, 2.0],)], "x array<double>"),
        ([(None,), ([1.0],)], "x array<double>"),
        ([(Vectors.dense([1.0]), 0), (None, 1)], ["x", "y"]),
        ([(None,), (b"1",)], "x binary"),
    ],
)
def test_a_missing_value_is_refused(
    session: "SparkSession", tmp_path: Path, rows: list[object], schema: str | list[str]
) -> None:
    frame = session.createDataFrame(rows, schema).coalesce(1)
    decode = {"x": "tests.spark.nets:pixels"} if schema == "x binary" else {}
    with pytest.raises(JobError, match=r"column 'x' has missing values"):
        tensors_of(frame, Columns(inputs=("x",), decode=decode), tmp_path)


def test_a_frame_without_rows_is_refused(session: "SparkSession", tmp_path: Path) -> None:
    frame = session.createDataFrame(pa.table(t.numbers(4)))
    for empty in (frame.limit(0), frame.filter(frame.row < 0)):
        with pytest.raises(JobError, match="has no rows"):
            fit(empty, t.counting("Counts", tmp_path / "run", 4))
    with pytest.raises(JobError, match="test has no rows"):
        fit(frame, t.counting("Counts", tmp_path / "run", 4), test=frame.limit(0))


# --- rows are counted from one computation ---


def test_random_rows_are_not_split_in_two_computations(
    session: "SparkSession", tmp_path: Path
) -> None:
    """`rand() < 0.8` for training and for testing: each action drew other rows."""
    drawn = session.range(100).withColumn("u", f.rand(1)).withColumn("one", f.lit(1.0))
    drawn = drawn.withColumnRenamed("id", "row")
    wanted = t.counting("Counts", tmp_path / "run", 100)
    train, test = drawn.filter(drawn.u < 0.8), drawn.filter(drawn.u >= 0.8)
    with pytest.raises(JobError, match=r"computed apart.*parquet"):
        fit(train, wanted, test=test)
    kept = drawn.persist()
    spark.training.check_split(kept.filter(kept.u < 0.8), kept.filter(kept.u >= 0.8))
    kept.unpersist()
