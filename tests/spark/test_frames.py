"""DataFrames of every kind: types of columns, random ones, several fits, resume, large ones."""

import os
import signal
import subprocess
import sys
import threading
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from distbelief.core.errors import JobError
from tests.spark import test_spark as t
from tests.spark.nets import Counts, pixels


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


def counts(model: "DistBeliefModel") -> list[float]:
    return cast("list[float]", cast("Counts", model.module).weight.mean(0).tolist())


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


def test_what_is_no_dataframe_or_counts_nothing_is_refused_with_the_way(
    session: "SparkSession", tmp_path: Path
) -> None:
    """A DataFrame of pandas was "no attribute 'schema'", and hosts=0 as many as there are."""
    frame = session.createDataFrame(pa.table(t.numbers(4)))
    job = t.counting("Counts", tmp_path / "run", 4)
    table, path = frame.toPandas(), tmp_path / "none.parquet"
    stream = session.readStream.format("rate").load()
    for given, why in (
        (table, "dataframe is of type pandas.* makes one of pandas"),
        (None, "dataframe is of type NoneType; use a DataFrame of Spark"),
        (path, r"dataframe is '.*none.parquet': \[PATH_NOT_FOUND\]"),
        (stream, "dataframe is a stream"),
    ):
        with pytest.raises(JobError, match=why):
            fit(given, job)
    refused: dict[str, list[tuple[object, str]]] = {
        "test": [(table, "test is of type pandas"), (str(path), "test is .*PATH_NOT_FOUND")],
        "hosts": [(0, "hosts is 0; use a whole number from 1"), ("2", "hosts is '2'")],
        "cores": [(-1, "cores is -1"), (True, "cores is True")],
        "decode": [({"row": pixels}, "decode has a function; use its import path")],
        "dtype": [("float16", "dtype is 'float16'; use \"float32\"")],
    }
    for name, cases in refused.items():
        for value, why in cases:
            with pytest.raises(JobError, match=f"spark.fit: {why}"):
                fit(frame, job, **{name: value})
    for target in (None, ["one"]):
        with pytest.raises(JobError, match=r"targets is .*; use the name of one column"):
            cast("Any", spark.fit)(frame, job, inputs="row", targets=target)
    with pytest.raises(JobError, match=r"rename or drop it: .*AMBIGUOUS_REFERENCE"):
        fit(frame.select("row", "one", frame.row.alias("ONE")), job)
    assert not (tmp_path / "run").exists()


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


@pytest.mark.soak
def test_random_rows_of_a_lost_executor_are_refused(
    session: "SparkSession", tmp_path: Path
) -> None:
    """The new executor draws other rows: they must not count as those of before.

    Spark's own `rand` draws the same again, of the same partition; this function does not.
    """
    n = 400

    def drawn(batches: object) -> object:
        for batch in cast("list[pa.RecordBatch]", batches):
            yield batch.filter(pa.array(np.random.default_rng().random(batch.num_rows) < 0.9))

    rows = session.range(0, n, 1, 2).withColumnRenamed("id", "row").withColumn("one", f.lit(1.0))
    wanted = t.counting("Counts", tmp_path / "run", n, seconds=0.1)
    with pytest.raises(JobError, match="was read again and has other rows"):
        fit(
            rows.mapInArrow(cast("Any", drawn), rows.schema),
            wanted,
            callbacks=[t.KillsAnExecutor()],
        )


@pytest.mark.soak
def test_an_executor_is_lost_while_rows_are_written(
    session: "SparkSession", tmp_path: Path
) -> None:
    n = 60
    gate = tmp_path / "writing"

    def slowly(batches: object) -> object:
        import time  # noqa: PLC0415 -- on the executor

        for batch in cast("list[object]", batches):
            gate.touch()
            time.sleep(8.0)
            yield batch

    frame = t.frame_of(session, t.numbers(n), [30, 30])
    slow = frame.mapInArrow(slowly, frame.schema)

    def kill() -> None:
        t.until(gate.exists)
        os.kill(t.executors()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    model = fit(slow, t.counting("Counts", tmp_path / "run", n))
    killer.join()
    assert counts(model) == [3.0] * n


# --- more than one fit ---


@pytest.mark.soak
def test_two_fits_at_once_from_a_file_and_from_a_skewed_frame(
    session: "SparkSession", tmp_path: Path
) -> None:
    n, skewed = 60, 404
    t.frame_of(session, t.numbers(n), [20, 40]).write.parquet(str(tmp_path / "rows"))
    frame = t.frame_of(session, t.numbers(skewed), [4, 400]).coalesce(1)
    found: dict[str, list[float]] = {}

    def train(name: str, source: object, size: int) -> None:
        made = fit(source, t.counting("Counts", tmp_path / name, size), hosts=1)
        found[name] = counts(made)

    both = [
        threading.Thread(target=train, args=["file", str(tmp_path / "rows"), n]),
        threading.Thread(target=train, args=["frame", frame, skewed]),
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert found == {"file": [3.0] * n, "frame": [3.0] * skewed}


@pytest.mark.soak
def test_rows_of_partitions_of_1_to_100_count_once(session: "SparkSession", tmp_path: Path) -> None:
    frame = t.frame_of(session, t.numbers(404), [4, 400])
    assert counts(fit(frame, t.counting("Counts", tmp_path / "run", 404))) == [3.0] * 404


CORES = """
import sys
from pathlib import Path
from tests.spark import test_frames, test_spark as t
if __name__ == "__main__":
    t.MASTER = "local-cluster[2,2,1024]"
    session = t.new_session()
    frame = t.frame_of(session, t.numbers(240), [80, 160])
    model = test_frames.fit(frame, t.counting("Counts", Path(sys.argv[1]), 240))
    print("replicas", len(list(Path(sys.argv[1], "logs").glob("replica-*"))), flush=True)
    print("counted", set(test_frames.counts(model)), flush=True)
    session.stop()
"""


@pytest.mark.soak
def test_an_executor_of_two_cores_runs_two_replicas(tmp_path: Path) -> None:
    output = driver(CORES, tmp_path / "run")
    assert "counted {3.0}" in output, output
    log = (tmp_path / "run" / "logs" / "supervisor.log").read_text()
    assert log.count("has joined: 2 cores") == 2
    assert "replica 3: on" in log


def driver(text: str, *words: object) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", text, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(t.ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    return ended.stdout


RESUME = """
import sys
from pathlib import Path
from tests.spark import test_frames, test_spark as t
if __name__ == "__main__":
    session = t.new_session()
    frame = t.frame_of(session, t.numbers(400), [200, 200])
    job = t.counting("Counts", Path(sys.argv[1]), 400, seconds=0.05)
    job["stop"] = {"epochs": 6}
    job["output"] = {"directory": sys.argv[1], "snapshot_every": "2 s"}
    model = test_frames.fit(frame, job, resume=sys.argv[2] if len(sys.argv) > 2 else None)
    print("counted", set(test_frames.counts(model)), flush=True)
    session.stop()
"""


@pytest.mark.soak
def test_a_fit_resumes_right_after_its_driver_was_killed(tmp_path: Path) -> None:
    """Its [data] named another directory of rows, so each was refused; its shards still live."""
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", RESUME, str(run)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(t.ROOT), *sys.path])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as first:
        try:
            t.until(lambda: bool([*run.glob("snapshots/*/*.safetensors")]))
        finally:
            first.kill()
    output = driver(RESUME, run, run)
    assert "counted {6.0}" in output, output


# --- a million rows ---


@pytest.mark.soak
def test_transform_of_a_million_rows_needs_no_more_memory(
    session: "SparkSession", tmp_path: Path
) -> None:
    """Peak memory of the Python workers, at 100,000 rows and at ten times as many."""
    model = t.untrained("grid", tmp_path, "x", "float32", (2, 3))
    peaks = []
    for n in (100_000, 1_000_000):
        frame = session.range(0, n, 1, 2).select((f.col("id") % 10).alias("x"))

        def summed(batches: object) -> object:
            daemon = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
            for batch in cast("list[pa.RecordBatch]", batches):
                values = np.array(batch["prediction"].flatten().flatten())
                # Of all workers of this executor: that of the model is another process.
                texts = [
                    Path(f"/proc/{pid}/status").read_text() for pid in daemon.read_text().split()
                ]
                peak = max(int(text.partition("VmHWM:")[2].split()[0]) for text in texts)
                row = {"peak": [peak], "n": [batch.num_rows]}
                row["crc"] = [int(values.view(np.int32).astype(np.int64).sum())]
                yield pa.RecordBatch.from_pydict(row)

        found = model.transform(frame).mapInArrow(summed, "peak long, n long, crc long").toArrow()
        with torch.inference_mode():
            of = model.module(torch.arange(10)).numpy().view(np.int32).astype(np.int64).sum((1, 2))
        assert sum(found["n"].to_pylist()) == n
        assert sum(found["crc"].to_pylist()) == int(of.sum()) * (n // 10)
        peaks.append(max(found["peak"].to_pylist()))
    assert peaks[1] < 1.1 * peaks[0], peaks  # KiB
