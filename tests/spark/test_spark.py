"""Jobs on a real Spark cluster of two executors on this machine; all tests share it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import distbelief
from distbelief.config import algorithms
from distbelief.config.load import job_of
from distbelief.core.errors import JobError
from distbelief.supervisor.view import JobView
from tests.spark import nets
from tests.spark.nets import Counts, problem


pytest.importorskip("pyspark", reason="needs pyspark: pip install '.[spark]'")
pytest.importorskip("pandas", reason="needs pandas: pip install '.[spark]'")
pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[spark]'")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("needs Java 17", allow_module_level=True)

from pyspark.errors import PythonException  # noqa: E402 -- skipped without
from pyspark.ml import Pipeline, PipelineModel  # noqa: E402 -- skipped without
from pyspark.ml.feature import VectorAssembler  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402
from safetensors.torch import save  # noqa: E402

from distbelief import spark  # noqa: E402
from distbelief.job.hosts.host_task import file_of  # noqa: E402
from distbelief.spark import training  # noqa: E402
from distbelief.spark.columns import Columns, write_rows  # noqa: E402
from distbelief.spark.model import DistBeliefModel, Saved  # noqa: E402
from distbelief.spark.rows import Partitions, RowFile  # noqa: E402
from distbelief.spark.stages import DistBelief  # noqa: E402


if TYPE_CHECKING:
    from pyspark.core.rdd import RDD

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # of pyspark and pandas
]

ROOT = Path(__file__).parents[2]
MASTER = "local-cluster[2,1,1024]"
OPTIONS = {
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "256",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def new_session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*sys.path, str(ROOT))))
    builder: SparkSession.Builder = SparkSession.builder.master(MASTER)
    for name, value in OPTIONS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def job(model: str, directory: Path, /, **tables: Mapping[str, object]) -> dict[str, object]:
    usual: dict[str, dict[str, object]] = {
        "model": {"factory": f"tests.spark.nets:{model}"},
        "algorithm": {
            "name": "downpour",
            "loss": "cross_entropy",
            "batch_size": 16,
            "rule": {"name": "adagrad", "learning_rate": 0.05},
        },
        "stop": {"epochs": 3},
        "output": {"directory": str(directory)},
        "source": {"file": "test", "import_paths": [str(ROOT)]},
    }
    return {**usual, **{name: {**usual.get(name, {}), **tables[name]} for name in tables}}


def frame_of(session: SparkSession, columns: Mapping[str, object], parts: list[int]) -> DataFrame:
    """Return rows whose partitions have these sizes."""
    table = pa.table(columns)
    stops = np.cumsum(parts)
    chunks = [table.slice(stop - n, n).to_pylist() for n, stop in zip(parts, stops, strict=True)]
    numbered = session.sparkContext.parallelize([*enumerate(chunks)], len(chunks))
    spread = cast("RDD[object]", numbered.partitionBy(len(chunks), lambda key: key))
    schema = session.createDataFrame(table.slice(0, 1)).schema
    rows = spread.flatMap(lambda one: [tuple(row.values()) for row in one[1]])
    return session.createDataFrame(rows, schema)


def counting(model: str, directory: Path, n: int, **more: object) -> dict[str, object]:
    algorithm = {
        "loss": "tests.spark.nets:minus_sum",
        "batch_size": 10,
        "order": "dealt",
        "rule": {"name": "sgd", "learning_rate": 1.0},
    }
    arguments = {"arguments": {"n": n, **more}}
    return job(model, directory, model=arguments, algorithm=algorithm)


def numbers(n: int) -> dict[str, object]:
    return {"row": np.arange(n), "one": np.ones(n)}


# --- one replica: the bits of a local job ---


@pytest.mark.soak
def test_one_blocking_replica_has_the_bits_of_a_local_job(
    session: SparkSession, tmp_path: Path
) -> None:
    data = problem(400)
    frame = frame_of(session, data, [400])
    wanted = job("linear", tmp_path / "spark", algorithm={"blocking": True})
    model = spark.fit(frame, wanted, inputs="features", targets="label", show=False)
    assert model.run is not None
    assert (model.run.exit_code, model.run.summary.samples) == (0, 1200)
    wanted["output"] = {"directory": str(tmp_path / "local")}
    local = {"factory": "tests.spark.nets:local_data", "arguments": {"n": 400}}
    plain = distbelief.train({**wanted, "data": {"train": local}}, show=False)
    for one, other in zip(plain.model.parameters(), model.module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not [*Path(session.sparkContext._temp_dir).glob("distbelief-rows-*")]


# --- every row counts once ---


def test_rows_of_uneven_partitions_count_once_an_epoch(
    session: SparkSession, tmp_path: Path
) -> None:
    n = 440
    frame = frame_of(session, numbers(n), [40, 400])
    wanted = counting("Counts", tmp_path / "run", n)
    model = spark.fit(frame, wanted, inputs="row", targets="one", show=False)
    assert cast("Counts", model.module).weight.mean(0).tolist() == [3.0] * n


def test_an_exchange_of_an_epoch_is_one_push_of_each_host_in_it(
    session: SparkSession, tmp_path: Path
) -> None:
    """Dpplee3's `frequency="epoch"`: each of two hosts pushes once it has read its rows."""
    n = 400
    wanted = counting("Counts", tmp_path / "run", n)
    algorithm = cast("dict[str, object]", wanted["algorithm"])
    del algorithm["rule"]  # the preset's adds differences
    algorithm |= {"preset": "dpplee3-asgd", "inner": {"name": "SGD", "lr": 1.0}}
    algorithm["exchange"] = {"every": "1 epoch"}
    frame = frame_of(session, numbers(n), [200, 200])
    model = spark.fit(frame, wanted, inputs="row", targets="one", show=False)
    assert cast("Counts", model.module).weight.mean(0).tolist() == [3.0] * n
    assert model.run is not None
    assert model.run.summary.pushes_applied == 2 * 3


def test_transform_has_the_bits_of_the_module_and_a_pipeline_is_saved(
    session: SparkSession, tmp_path: Path
) -> None:
    data = problem(600)
    x: np.ndarray[tuple[int, int], np.dtype[np.float32]] = np.array(data.pop("features"))
    names = [f"x{k}" for k in range(20)]
    wide = {**data, **{name: x[:, k].astype(np.float64) for k, name in enumerate(names)}}
    frame = frame_of(session, wide, [100, 500])
    estimator = DistBelief(
        job=job("linear", tmp_path / "run", stop={"epochs": 30}),
        inputs="features",
        targets="label",
        batchSize=64,
        show=False,
    )
    assembled = VectorAssembler(inputCols=names, outputCol="features")
    fitted = Pipeline(stages=[assembled, estimator]).fit(frame)
    found = fitted.transform(frame).select("label", "prediction").toArrow()
    model = cast("DistBeliefModel", fitted.stages[-1])
    outputs = np.array(found["prediction"].to_pylist(), np.float32)
    # Batches are those of Spark (256 rows), in pieces of 64.
    starts = [0, 64, *[100 + 256 * k + 64 * i for k in range(2) for i in range(4)]]
    stops = [*starts[1:], 600]
    with torch.inference_mode():
        plain = [model.module(torch.from_numpy(x[a:b])) for a, b in zip(starts, stops, strict=True)]
    assert np.array_equal(outputs, torch.cat(plain).numpy())
    assert (outputs.argmax(1) == np.array(found["label"])).mean() > 0.9
    fitted.save(str(tmp_path / "saved"))
    again = PipelineModel.load(str(tmp_path / "saved"))
    assert found.equals(again.transform(frame).select("label", "prediction").toArrow())
    estimator.save(str(tmp_path / "estimator"))
    loaded = DistBelief.load(str(tmp_path / "estimator"))
    assert loaded.getOrDefault("job") == estimator.getOrDefault("job")
    assert isinstance(model.module, nn.Module)


def untrained(
    name: str, directory: Path, inputs: str, dtype: str, shape: tuple[int, ...]
) -> DistBeliefModel:
    local = {"train": {"factory": "tests.spark.nets:local_data", "arguments": {"n": 4}}}
    made = job_of({**job(name, directory), "data": local}, user="test", overrides={})
    saved = Saved(
        job=made.to_json().decode(), columns=Columns(inputs=(inputs,)), dtype=dtype, shape=shape
    )
    return DistBeliefModel(saved, save(nets.grid().state_dict()))


def test_outputs_of_several_dimensions_are_nested_lists(
    session: SparkSession, tmp_path: Path
) -> None:
    """A user's model gave a grid for each row: pandas had no column for it."""
    model = untrained("grid", tmp_path, "odd `name`", "float32", (2, 3))
    frame = session.createDataFrame(pa.table({"odd `name`": [*range(10)] * 100}))
    found = model.transform(frame).toArrow()
    outputs = np.array(found["prediction"].to_pylist(), np.float32)
    with torch.inference_mode():
        assert np.array_equal(outputs, model.module(torch.arange(10).repeat(100)).numpy())
    assert model.transform(frame.limit(0)).toArrow().num_rows == 0


def test_transform_refuses_what_it_would_guess(session: SparkSession, tmp_path: Path) -> None:
    """A missing whole number came to the model as a float, a missing float as NaN."""
    model = untrained("grid", tmp_path, "x", "float32", (2, 3))
    frame = session.createDataFrame(pa.table({"x": [1, None, 3]}))
    with pytest.raises(PythonException, match=r"column 'x' has missing values"):
        model.transform(frame).collect()
    with pytest.raises(JobError, match="a column 'prediction' already"):
        model.transform(frame.withColumn("prediction", frame.x))
    # To Spark "X" is "x", which it would replace.
    for name, value, why in (
        ("predictionCol", "X", "a column 'x' already"),
        ("predictionCol", None, "predictionCol is None; use the name"),
        ("batchSize", -5, "batchSize is -5; use a whole number from 1"),
        ("batchSize", 2.5, "batchSize is 2.5"),
    ):
        with pytest.raises(JobError, match=why):
            model.transform(frame, {model.getParam(name): value})
    two = untrained("grid", tmp_path, "x", "a tuple", ())
    with pytest.raises(JobError, match="returns a tuple, of which transform makes no column"):
        two.transform(frame)


def test_stages_keep_the_conventions_of_pipelines(session: SparkSession, tmp_path: Path) -> None:
    """Params by their names, maps of params for one call, copies, and what is saved twice."""
    estimator = DistBelief(job=job("linear", tmp_path), inputs="x", targets="y")
    assert {one.name for one in estimator.params} > {"job", "inputs", "predictionCol", "batchSize"}
    assert "batchSize: rows of one call of the model (default: 1024" in estimator.explainParams()
    other = estimator.copy({estimator.targets: "other"})
    assert (other.getOrDefault("targets"), estimator.getOrDefault("targets")) == ("other", "y")
    frame = session.createDataFrame(pa.table({"x": [1, 2], "y": [0, 1]}))
    with pytest.raises(JobError, match="there is no column 'other'"):
        estimator.fit(frame, {estimator.targets: "other"})
    with pytest.raises(JobError, match="has no param 'epochs': the job says it"):
        DistBelief(epochs=3)
    with pytest.raises(JobError, match="has no param 'mode': It is preset of"):
        DistBelief(mode="asynchronous")
    with pytest.raises(JobError, match="has no param 'input': it has batchSize, cores"):
        DistBelief(input="x")
    model = untrained("grid", tmp_path, "x", "float32", (2, 3))
    found = model.transform(frame, {model.predictionCol: "grid"})
    assert found.columns == ["x", "y", "grid"]
    assert model.getOrDefault("predictionCol") == "prediction"
    for _ in range(2):
        model.write().overwrite().save(str(tmp_path / "model"))
    again = DistBeliefModel.load(str(tmp_path / "model"))
    assert (again.uid, again.saved, again.values) == (model.uid, model.saved, model.values)


@pytest.mark.soak
def test_an_empty_partition_has_no_host(session: SparkSession, tmp_path: Path) -> None:
    frame = frame_of(session, numbers(60), [60, 0])
    wanted = counting("Counts", tmp_path / "run", 60)
    model = spark.fit(frame, wanted, inputs="row", targets="one", show=False)
    assert cast("Counts", model.module).weight.mean(0).tolist() == [3.0] * 60
    assert "has joined" in (tmp_path / "run" / "logs" / "supervisor.log").read_text()


def executors(part: int | None = None) -> list[int]:
    """Return the Java processes of this session's executors, or of the one that has this part."""
    ours = [*children(os.getpid())]
    for process in ours:
        ours += children(process)
    command = {process: Path(f"/proc/{process}/cmdline").read_bytes() for process in ours}
    found = [one for one in ours if b"CoarseGrainedExecutorBackend" in command[one]]
    if part is None:
        return found
    name = f"distbelief-rows-*/{file_of(part)}"
    return [
        one
        for one in found
        for daemon in children(one)
        for worker in children(daemon)
        for agent in children(worker)
        if [*Path(f"/proc/{agent}/cwd").glob(name)]
    ]


def children(process: int) -> list[int]:
    with suppress(OSError):  # it has ended
        tasks = [*Path(f"/proc/{process}/task").glob("*/children")]
        return [int(word) for task in tasks for word in task.read_text().split()]
    return []


class KillsAnExecutor:
    """Kills the Java process of the executor that has a part, once some samples are trained."""

    def __init__(self, part: int = 0) -> None:
        self.part = part
        self.killed = 0

    def on_step(self, view: JobView) -> None:
        if not self.killed and view.samples > 150:
            (self.killed,) = executors(self.part)
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("part", [0, 1])
def test_rows_of_a_killed_executor_are_read_again(
    session: SparkSession, tmp_path: Path, part: int
) -> None:
    """With part 1, Spark gave the slot of the new executor to part 0, which was not lost."""
    n, kills = 400, KillsAnExecutor(part)
    frame = frame_of(session, numbers(n), [200, 200])
    wanted = counting("Counts", tmp_path / "run", n, seconds=0.1)
    model = spark.fit(frame, wanted, inputs="row", targets="one", callbacks=[kills], show=False)
    assert kills.killed
    assert cast("Counts", model.module).weight.mean(0).tolist() == [3.0] * n


# --- Ctrl+C ---

DRIVER = """
import sys
from pathlib import Path
from tests.spark import test_spark as t
from distbelief import spark
if __name__ == "__main__":
    session = t.new_session()
    frame = t.frame_of(session, t.numbers(400), [200, 200])
    job = t.counting("Counts", Path(sys.argv[1]), 400, seconds=0.1)
    job["stop"] = {"epochs": 1000}
    job["cluster"] = {"patience": "30 s"}  # of shards whose driver is killed
    model = spark.fit(frame, job, inputs="row", targets="one")
    print("ended", model.run.exit_code, model.run.summary.samples, flush=True)
    weight = model.module.weight.mean(0)
    print("counted", int(weight.sum()), flush=True)
"""


def agents() -> list[str]:
    found = subprocess.run(
        ["pgrep", "-f", "distbelief.job.hosts.host_task"], capture_output=True, check=False
    )
    return found.stdout.decode().split()


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_ends_leaves_no_host(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    log = tmp_path / "out"
    with log.open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path / "run")],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    metrics = tmp_path / "run" / "status.json"
    try:
        until(lambda: metrics.exists() and b'"samples":0' not in metrics.read_bytes())
        os.kill(driver.pid, number)
        driver.wait(120)
    finally:
        driver.kill()
    text = log.read_text()
    if number == signal.SIGINT:
        assert "ended 130" in text, text
        # Spark's own progress may stand before them in their lines.
        ended, counted = (
            int(re.findall(rf"{word} (\d+)", text)[-1]) for word in ("ended 130", "counted")
        )
        assert ended == counted > 0
    until(lambda: not agents())


# --- what is refused ---


@pytest.mark.parametrize(
    ("inputs", "values", "why"),
    [
        ("text", ["a", "b"], "no tensor"),
        ("x", [[1.0], [1.0, 2.0]], "arrays of 1 and of 2 numbers"),
        ("x", pa.array([[], []], pa.list_(pa.float32())), "arrays of 0 numbers"),
        ("x", [1.0, None], "missing values"),
        ("picture", [b"a", b"b"], "has bytes: give decode"),
    ],
)
def test_columns_that_are_no_tensors_are_refused(
    session: SparkSession, tmp_path: Path, inputs: str, values: object, why: str
) -> None:
    frame = session.createDataFrame(pa.table({inputs: values, "y": [0, 1]})).coalesce(1)
    with pytest.raises(JobError, match=why):
        spark.fit(frame, job("linear", tmp_path / "run"), inputs=inputs, targets="y", show=False)
    assert not (tmp_path / "run").exists()


# --- columns ---


def test_files_of_rows_give_the_tensors_of_their_rows(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    n = 1000
    x = generator.normal(size=(n, 3, 4)).astype(np.float32)
    content = [generator.integers(0, 17, 5, dtype=np.uint8).tobytes() for _ in range(n)]
    y = generator.integers(0, 9, n)
    arrays = pa.array(x.reshape(n * 3, 4).tolist(), pa.list_(pa.float32()))
    nested = pa.ListArray.from_arrays(pa.array(np.arange(0, 3 * n + 1, 3), pa.int32()), arrays)
    for column, expected, decode in (
        (nested, torch.from_numpy(x), {}),
        (
            pa.array(content),
            torch.stack([torch.tensor([*one]) / 16 for one in content]),
            {"picture": "tests.spark.nets:pixels"},
        ),
    ):
        columns = Columns(inputs=("picture",), target="y", decode=decode)
        table = pa.table({"input-0": column, "target": y})
        file = tmp_path / "rows"
        count, checksum, _ = write_rows(table.to_batches(max_chunksize=77), file, columns=columns)
        assert count == n
        assert (
            checksum != write_rows(table.slice(1).to_batches(), tmp_path / "b", columns=columns)[1]
        )
        rows = generator.permutation(n)[:100]
        found = RowFile(file, columns)
        inputs, targets = found.__getitems__(rows.tolist())
        assert torch.equal(inputs, expected[rows])
        assert torch.equal(targets, torch.tensor(y[rows]))
        pieces = Partitions(tmp_path, {"rows": n, "elsewhere": 3}, checksum, columns)
        assert pieces.here() == ["rows"]
        assert torch.equal(pieces.read("rows", [5])[0], expected[5:6])


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_resumed_job_finds_rows_where_the_earlier_one_had_them(
    tmp_path: Path, *, is_ours: bool
) -> None:
    """What an earlier job of other data calls a directory is not touched."""
    before, rows, run = (tmp_path / name for name in ("before", "rows", "run"))
    for folder in (before, rows, run):
        folder.mkdir()
    (before / "old").touch()
    (rows / "new").touch()
    factory = "distbelief.spark.rows:dataframe" if is_ours else "nets:rows"
    tables = job("linear", run)
    data = {"train": {"factory": factory, "arguments": {"directory": str(before)}}}
    made = job_of({**tables, "data": data}, user="test")
    (run / "job.toml").write_text(made.to_toml())
    with ExitStack() as stack:
        found = training._linked(run, rows, stack)
        assert found == (before if is_ours else rows)
        assert [file.name for file in found.iterdir()] == ["new"]
    assert before.exists() != is_ours


# --- digits ---


@pytest.mark.soak
def test_digits_from_a_dataframe_reach_the_accuracy_of_the_plain_job(
    session: SparkSession, tmp_path: Path
) -> None:
    from experiments.digits import digits  # noqa: PLC0415 -- needs scikit-learn

    train, test = (
        {"pixels": [one.tolist() for one in x.numpy()], "digit": y.numpy()}
        for x, y in (digits.images(part).tensors for part in ("train", "test"))
    )
    wanted = job(
        "digits",
        tmp_path / "run",
        model={"factory": "experiments.digits.digits:net"},
        algorithm={"batch_size": 32, "rule": {"name": "adagrad", "learning_rate": 0.03}},
        stop={"epochs": 12},
    )
    model = spark.fit(
        frame_of(session, train, [700, 737]),
        wanted,
        inputs="pixels",
        targets="digit",
        test=frame_of(session, test, [360]),
        show=False,
    )
    local = {
        name: {"factory": "experiments.digits.digits:images", "arguments": {"part": name}}
        for name in ("train", "test")
    }
    cluster = {"replicas": 2}
    directory = {"directory": str(tmp_path / "local")}
    plain = distbelief.train(
        {**wanted, "data": local, "cluster": cluster, "output": directory}, show=False
    )
    assert model.run is not None
    assert model.run.summary.metric is not None
    assert plain.summary.metric is not None
    assert model.run.summary.metric > plain.summary.metric - 0.03


# --- speech ---


@pytest.mark.soak
def test_speech_from_parquet_files_reaches_the_accuracy_of_the_plain_job(
    session: SparkSession, tmp_path: Path
) -> None:
    """1.8 minutes of synthetic speech, 16,261 frames, in files of 1 : 3; two replicas each."""
    from pyarrow import parquet  # noqa: PLC0415 -- skipped without

    from experiments.speech.data import frames  # noqa: PLC0415 -- synthesises

    del session  # the one that reads a path
    hours = {"cache": str(tmp_path / "cache"), "survey_hours": 0.03}
    (tmp_path / "train").mkdir()
    data = frames("train", hours=0.03, **cast("Any", hours))
    quarter = len(data) // 4
    for k, rows in enumerate((range(quarter), range(quarter, len(data)))):
        x, y = data.__getitems__(rows)
        flat = pa.FixedSizeListArray.from_arrays(pa.array(x.numpy().ravel()), x.shape[1])
        table = pa.table({"frame": flat, "state": y.numpy()})
        parquet.write_table(table, tmp_path / "train" / f"{k}.parquet")
    local = {
        part: {
            "factory": "experiments.speech.data:frames",
            "arguments": {"part": part, "hours": n, **hours},
        }
        for part, n in (("train", 0.03), ("test", 0.01))
    }
    wanted = job(
        "linear",
        tmp_path / "run",
        model={
            "factory": "experiments.speech.model:acoustic_net",
            "arguments": {"hidden": [128], "states": 210, "activation": "relu"},
        },
        algorithm={"batch_size": 64, "rule": {"name": "adagrad", "learning_rate": 0.01}},
        data={"test": local["test"]},
    )
    model = spark.fit(str(tmp_path / "train"), wanted, inputs="frame", targets="state", show=False)
    alone = {"data": local, "cluster": {"replicas": 2}}
    alone["output"] = {"directory": str(tmp_path / "local")}
    plain = distbelief.train({**wanted, **alone}, show=False)
    assert model.run is not None
    assert model.run.summary.samples == plain.summary.samples == 3 * len(data)
    assert model.run.summary.metric is not None
    assert plain.summary.metric is not None
    assert plain.summary.metric > 0.1  # of 210 states
    assert model.run.summary.metric > plain.summary.metric - 0.03


# --- hosts for a job with data of its own ---


@pytest.mark.soak
def test_executors_train_a_job_file_from_the_command_line(tmp_path: Path) -> None:
    command = ("train", ROOT / "experiments/digits/digits.toml", "--on", "spark", "--hosts", "2")
    ended = subprocess.run(
        [Path(sys.executable).with_name("distbelief"), *command],
        cwd=tmp_path,  # the job's functions lie elsewhere
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": "--master local[2] --conf spark.ui.enabled=false pyspark-shell",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 hosts joined" in re.sub(r"\s+", " ", ended.stdout)
    until(lambda: not agents())


def test_an_exchange_of_an_epoch_counts_the_steps_of_a_share_of_the_rows(tmp_path: Path) -> None:
    """Replicas come and go with executors: a share is that of those that were asked for."""
    exchange = {"every": "1 epoch"}
    tables = {
        "model": {"factory": "nets:net"},
        "data": {"train": {"factory": "nets:rows"}},
        "algorithm": {
            "name": "downpour",
            "preset": "dpplee3-asgd",
            "loss": "cross_entropy",
            "batch_size": 10,
            "exchange": exchange,
        },
        "stop": {"epochs": 2},
        "output": {"directory": str(tmp_path / "run")},
    }
    for replicas, cores, every in ((4, 1, 26), (1, 1, 51), (1, 2, 26), (6, 9, 17)):
        job = job_of(tables | {"cluster": {"replicas": replicas}}, user="test")
        found, _ = training.on_hosts(job, 2, 1015, cores=cores)
        settings = algorithms.facts_of(found).policy
        assert settings is not None
        assert settings.every == every, (replicas, cores)
    none = cast("DataFrame", None)
    for option, hint in {"mode": "it is preset of", "worker_num": "it is hosts"}.items():
        given: dict[str, Any] = {"inputs": "x", "targets": "y", option: 2}
        with pytest.raises(JobError, match=rf"spark.fit has no option '{option}': {hint}"):
            spark.fit(none, {}, **given)
