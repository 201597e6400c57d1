"""Trains a job on rows where a cluster has them: `distbelief.spark.fit`, and what Ray's shares.

    part 0 -> task -> file of rows, agent --+
    part 1 -> task -> file of rows, agent --+--> replicas, which are dealt the rows beside them
    driver: supervisor, shards, evaluator --+

A task writes its part once, and stays as a host until the job ends. So there are as many parts as
hosts: partitions are joined (coalesced) without moving rows between executors. Training begins with
the first host, once all tasks have counted their rows.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from distbelief.config.algorithms import cores_of
from distbelief.config.job import Elastic, Job
from distbelief.config.load import job_of, load_job
from distbelief.config.presets import KNOBS
from distbelief.core.arguments import checked
from distbelief.core.errors import JobError, StorageError
from distbelief.job.hosts.host_task import file_of
from distbelief.job.hosts.join_server import JoinServer
from distbelief.job.hosts.spark import SparkTasks, check_reach, connect, cores_each, executors_of
from distbelief.job.hosts.task_hosts import TaskHosts, Tasks
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.result import Run
from distbelief.job.trainer import run_job
from distbelief.serve.options import ANY_PORT, join_server
from distbelief.spark.columns import Columns, selected, write_rows
from distbelief.spark.rows import HELD_OUT, PATH, RowFile
from distbelief.task.data import DataShard
from distbelief.task.imports import check_is_no_import
from distbelief.transport.listen_config import ListenConfig
from distbelief.worker.downpour_settings import DownpourSettings


if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame

    from distbelief.spark.model import DistBeliefModel

Names = str | Sequence[str]
# Names of other libraries' options, and what they are here
ELSEWHERE: Final = {
    **KNOBS,
    **dict.fromkeys(("features", "feature_cols", "featuresCol"), "it is inputs"),
    **dict.fromkeys(("label", "labels", "label_cols", "labelCol", "target"), "it is targets"),
    **dict.fromkeys(("num_proc", "num_processes", "num_workers", "worker_num"), "it is hosts"),
    **dict.fromkeys(("epochs", "batch_size", "loss"), "the job says it, or overrides"),
}


@checked("spark.fit", ELSEWHERE)
def fit(  # noqa: PLR0913 -- options of one call
    dataframe: "DataFrame | str | os.PathLike[str]",
    job: str | os.PathLike[str] | Mapping[str, object],
    *,
    inputs: Names,
    targets: str,
    decode: Mapping[str, str] | None = None,
    dtype: str = "float32",
    test: "DataFrame | str | os.PathLike[str] | None" = None,
    hosts: int | None = None,
    cores: int | None = None,
    listen: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    overrides: Mapping[str, object] | None = None,
    callbacks: Sequence[object] = (),
    resume: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> "DistBeliefModel":
    """Train the model of a job on the rows of a DataFrame, on Spark's executors.

    Args:
        dataframe: Rows, one sample each, or the path of parquet files. They stay on the executors
            that compute them.
        job: The path of a job file, or its tables; the rows take the place of [data.train]. Its
            functions must be importable on the executors. [cluster] replicas is a multiple of the
            hosts with rows, or left out: as many as fit.
        inputs: The column of inputs: numbers, an array, a vector of pyspark.ml, or bytes; or
            several columns of numbers, which become one vector.
        targets: The column of targets.
        decode: For columns of bytes the import path of a function (bytes) -> tensor.
        dtype: Of numbers that are no whole numbers: "float32" or "float64".
        test: Held-out rows, or their path, which are brought to the driver; else those of the job's
            [data.test].
        hosts: Hosts to use, one in each executor; by default as many as there are executors now.
        cores: Of each host; by default those of an executor. A replica takes [cluster] threads.
        listen: Where executors reach this process, as "tcp://0.0.0.0:7700"; with `keys`, a
            directory of keys that is there on all executors, or `insecure`.
        keys: See there.
        insecure: See there.
        overrides: Values of single keys of the job.
        callbacks: As of `train`.
        resume: Run directory of an earlier call with the same rows.
        show: Whether to show progress.

    Returns:
        The trained model, which transforms DataFrames; `model.run` has its figures and files.

    Raises:
        JobError: this cannot be run, or the job failed. What it saved is kept.
    """
    check_is_no_import("distbelief.spark.fit")
    try:
        from distbelief.spark.model import DistBeliefModel  # noqa: PLC0415 -- pyspark
    except ImportError as error:
        raise JobError(f"spark.fit: {error}: pip install 'distbelief[spark]'") from None

    columns = columns_of(inputs, targets, decode=decode, dtype=dtype, user="spark.fit")
    check_counts("spark.fit", hosts=hosts, cores=cores)
    frame = frame_of(dataframe, "dataframe")
    held_out = None
    if test is not None:
        tried = frame_of(test, "test")
        check_split(frame, tried)
        table = tried.select(*selected(tried, columns)).toArrow()
        held_out = table.to_batches(max_chunksize=1 << 16)
    rows = frame.select(*selected(frame, columns))
    session = frame.sparkSession
    reach = reached(listen, keys=keys, insecure=insecure)
    check_reach(session, is_local=reach.is_local)
    n_hosts = max(1, min(hosts or len(executors_of(session)), rows.rdd.getNumPartitions()))
    # Spark's JVM removes what lies there, even if this process is killed.
    place = Path(session.sparkContext._temp_dir)  # noqa: SLF001 -- pyspark has no other way
    run, some = train_on_rows(
        SparkTasks(rows.coalesce(n_hosts)),
        job,
        user="spark.fit",
        columns=columns,
        test=held_out,
        n_hosts=n_hosts,
        cores=cores or cores_each(session),
        reach=reach,
        directory=place / f"distbelief-rows-{secrets.token_hex(8)}",
        overrides=overrides,
        callbacks=callbacks,
        resume=resume,
        show=show,
    )
    try:
        return DistBeliefModel.of(run, columns, some)
    except StorageError as error:  # Ctrl+C before the first step
        ended = run.summary.stop_reason
        raise JobError(f"spark.fit: the job ended ({ended}) without a model: {error}") from None


def frame_of(given: object, name: str) -> "DataFrame":
    """Return a DataFrame, or that of parquet files; JobError if `given` is neither."""
    from pyspark.errors import AnalysisException  # noqa: PLC0415 -- an extra
    from pyspark.sql.classic.dataframe import DataFrame  # noqa: PLC0415 -- an extra

    if isinstance(given, str | os.PathLike):
        try:
            return connect().read.parquet(os.fspath(given))
        except AnalysisException as error:
            why = str(error).partition("\n")[0]
            raise JobError(f"spark.fit: {name} is {os.fspath(given)!r}: {why}") from None
    if not isinstance(given, DataFrame):
        raise JobError(
            f"spark.fit: {name} is of {kind_of(given)}; use a DataFrame of Spark (no Spark "
            "Connect; session.createDataFrame makes one of pandas), or the path of parquet files"
        )
    if given.isStreaming:
        raise JobError(f"spark.fit: {name} is a stream, which has no end: write it to parquet")
    return given


def kind_of(given: object) -> str:
    """Return the type of what is given in the place of something else."""
    kind = type(given)
    return f"type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def check_counts(user: str, **counts: object) -> None:
    """Raise JobError for a number that counts nothing."""
    for name, n in counts.items():
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise JobError(f"{user}: {name} is {n!r}; use a whole number from 1, or leave it out")


def check_split(dataframe: "DataFrame", test: "DataFrame") -> None:
    """Raise JobError if both are drawn by chance: each is computed on its own."""
    # With what is kept in memory in the place of what made it.
    plans = [one._jdf.queryExecution().withCachedData() for one in (dataframe, test)]  # noqa: SLF001 -- pyspark has no other way
    if not any(plan.deterministic() for plan in plans):
        raise JobError(
            "spark.fit: dataframe and test are computed apart, and both draw by chance (rand, "
            "uuid, monotonically_increasing_id), so a row may be in both: write the whole to "
            "parquet, read it, and split that; or persist() it"
        )


def reached(
    listen: str | None, *, keys: str | os.PathLike[str] | None, insecure: bool
) -> ListenConfig:
    """Return where hosts reach this process, by the options of `fit`."""
    return join_server(
        listen or ANY_PORT,
        keys=None if keys is None else Path(keys),
        insecure=insecure,
        n_hosts=1,
        hosts_seconds=600.0,
        cores=0,
    ).reach


def train_on_rows(  # noqa: PLR0913 -- options of `fit`
    tasks: Tasks,
    job: str | os.PathLike[str] | Mapping[str, object],
    *,
    user: str,
    columns: Columns,
    test: "Iterable[RecordBatch] | None",
    n_hosts: int,
    cores: int,
    reach: ListenConfig,
    directory: Path,
    overrides: Mapping[str, object] | None,
    callbacks: Sequence[object],
    resume: str | os.PathLike[str] | None,
    show: bool,
) -> tuple[Run, torch.Tensor]:
    """Train a job on the rows that so many tasks write; return the run, and inputs of some rows.

    `directory`, a new one, has rows that this process needs; it is removed.
    """
    directory.mkdir(mode=0o700)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        place = directory if resume is None else _linked(resume, directory, stack)
        held_out = None
        if test is not None:
            held_out = directory / "held-out.arrow"
            if not write_rows(test, held_out, columns=columns)[0]:
                raise JobError(f"{user}: test has no rows")
        source = TaskHosts(
            tasks,
            host=reach.host,
            write=partial(write_rows, columns=columns),
            keys="" if reach.keys is None else reach.keys.directory,
        )
        stack.callback(source.close)
        launcher = stack.enter_context(LocalLauncher())  # it imports while rows are written
        source.begin(n_parts=n_hosts, cores=cores)
        source.wait(print if show else str)
        full = {part: each for part, each in sorted(source.parts.items()) if each.rows}
        if not full:
            raise JobError(f"{user}: the training data has no rows")
        # This process tries the job on rows, too.
        least = min(full, key=lambda part: full[part].rows)
        source.copy_rows(least, directory / file_of(least))
        data = {
            "directory": str(place),
            "rows": {file_of(part): each.rows for part, each in full.items()},
            "fingerprint": " ".join(each.checksum for each in full.values()),
            "columns": msgspec.to_builtins(columns),
        }
        found = _job(job, data, overrides or {}, held_out, user=user)
        n_rows = sum(each.rows for each in full.values())
        source.job, source.cores = on_hosts(found, len(full), n_rows, cores=cores)
        source.rows_as = place.name
        run = run_job(
            source.job,
            resume=resume,
            show=show,
            callbacks=[*callbacks, source],
            launcher=launcher,
            hosting=JoinServer(reach=reach, n_hosts=1, cores=0, started=source),
        ).unless_failed(user)
        some, _ = RowFile(directory / file_of(least), columns).__getitems__([0, 1])
    return run, some


def _linked(resume: str | os.PathLike[str], directory: Path, stack: ExitStack) -> Path:
    """Return where the earlier job had its rows, now a link: it goes on as the same job."""
    earlier = load_job(RunDirectory.open(resume, write=False).job_file).data.train
    if earlier.factory != PATH:
        return directory
    place = Path(str(earlier.arguments["directory"]))
    if place.is_dir() and not place.is_symlink():  # of a driver that was killed
        shutil.rmtree(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(directory)
    stack.callback(place.unlink)
    return place


def columns_of(
    inputs: Names, target: str, *, decode: Mapping[str, str] | None, dtype: str, user: str
) -> Columns:
    """Return the columns that the options of `fit` name."""
    names = [inputs] if isinstance(inputs, str) else [*inputs]
    if not names:
        raise JobError(f"{user}: inputs has no column: name at least one")
    if not isinstance(target, str):
        raise JobError(f"{user}: targets is {target!r}; use the name of one column")
    if any(not isinstance(path, str) for path in (decode or {}).values()):
        raise JobError(f"{user}: decode has a function; use its import path, 'module:function'")
    if dtype not in {"float32", "float64"}:
        raise JobError(f'{user}: dtype is {dtype!r}; use "float32" or "float64"')
    tables = {"inputs": names, "target": target, "decode": dict(decode or {}), "dtype": dtype}
    try:
        return msgspec.convert(tables, Columns)
    except msgspec.ValidationError as error:
        raise JobError(f"{user}: {error}") from None


def _job(
    job: str | os.PathLike[str] | Mapping[str, object],
    data: Mapping[str, object],
    overrides: Mapping[str, object],
    held_out: Path | None,
    *,
    user: str,
) -> Job:
    """Return the job, whose [data] are these rows."""
    given = dict(overrides) | {"data.train": {"factory": PATH, "arguments": data}}
    if held_out is not None:
        shared = {key: data[key] for key in ("directory", "columns")}
        arguments = shared | {"file": held_out.name}
        given["data.test"] = {"factory": HELD_OUT, "arguments": arguments}
    if not isinstance(job, Mapping):
        return load_job(job, overrides=given)
    return job_of({"data": {}} | dict(job), user=user, overrides=given)


def on_hosts(job: Job, n_hosts: int, n_rows: int, *, cores: int) -> tuple[Job, int]:
    """Return the job, and the cores that each host offers: every host with rows gets replicas."""
    replicas = job.cluster.replicas
    if isinstance(replicas, Elastic) or n_hosts == replicas == 1:
        return job, cores
    if replicas > 1:
        if replicas % n_hosts:
            raise JobError(
                f"[cluster] replicas = {replicas}, and rows lie on {n_hosts} hosts: give a "
                "multiple of that, leave it out, or give hosts"
            )
        cores = replicas // n_hosts * cores_of(job)
    n_each, settings = cores // cores_of(job), job.algorithm
    if isinstance(settings, DownpourSettings):
        n = max(n_hosts * n_each, 1)
        share = DataShard(n_rows, replica_index=0, n_replicas=n, seed=0)
        settings = settings.in_steps(share, n_replicas=n)
    # The first replica moves from a lost host at once. Then the next host needs another replica.
    cluster = msgspec.structs.replace(job.cluster, replicas=Elastic(max=n_hosts * (n_each + 1)))
    return msgspec.structs.replace(job, cluster=cluster, algorithm=settings), cores
