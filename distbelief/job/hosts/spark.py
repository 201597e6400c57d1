"""Hosts from a Spark cluster: one task per executor runs a host.

    distbelief train speech.toml --on spark --hosts 4

Spark runs the task of a lost executor again on another one. If shuffled rows were lost with it,
Spark runs all tasks again, beside those that still run: as a slot is free, the first of them
starts, which may have a partition that is there. So the older task of that partition ends, and its
slot is free for the one that is missing. What tasks do is in `task_hosts`.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, final

from distbelief.config.algorithms import cores_of
from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.core.signals import handlers_kept
from distbelief.job.hosts.host_task import HostTask, Report
from distbelief.job.hosts.task_hosts import TaskHosts
from distbelief.transport.address import LOOPBACK, own_address


if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession


def connect() -> "SparkSession":
    """Return Spark's session in this process, started as Spark's configuration says."""
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise JobError(
            f"--on spark: pyspark is not installed here ({error}): pip install 'distbelief[spark]'"
        ) from None
    try:
        with handlers_kept():  # Spark's handler of SIGINT would end its tasks, not the job
            session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
            _ = session.sparkContext
    except Exception as error:
        why = str(error).strip().partition("\n")[0][:300]
        raise JobError(
            f"--on spark: cannot start a Spark session here: {why}: it needs Java 17 (JAVA_HOME), "
            "and a session with a SparkContext (no Spark Connect)"
        ) from error
    return session


def executors_of(session: "SparkSession") -> list[str]:
    """Return the host of each executor; of a local session that of the driver."""
    status = session.sparkContext._jsc.sc().statusTracker()  # noqa: SLF001 -- pyspark has no other way
    found = [info.host() for info in status.getExecutorInfos()]
    driver = session.sparkContext.getConf().get("spark.driver.host") or ""
    # The driver is among them.
    if len(found) > 1 and driver in found:
        found.remove(driver)
    return found


def check_reach(session: "SparkSession", *, is_local: bool) -> None:
    """Raise JobError if executors cannot reach a job that listens at this host only."""
    driver = session.sparkContext.getConf().get("spark.driver.host") or ""
    others = sorted({*executors_of(session)} - {driver, LOOPBACK, "localhost", own_address()})
    if is_local and others:
        raise JobError(
            f"--on spark: {', '.join(others[:3])} cannot reach a job that listens at this host "
            "only: use --listen tcp://0.0.0.0:7700 --keys DIR, with keys on all hosts"
        )


def cores_each(session: "SparkSession") -> int:
    """Return the cores of an executor."""
    context, n = session.sparkContext, len(executors_of(session))
    given = context.getConf().get("spark.executor.cores")
    return int(given or context.defaultParallelism // n or 1)


@final
@dataclass(frozen=True)
class _Partition:
    """What Spark runs in a task."""

    task: HostTask

    def __call__(self, batches: "Iterator[RecordBatch]") -> "Iterator[RecordBatch]":
        from pyspark import SparkFiles, TaskContext  # noqa: PLC0415 -- an extra

        context = TaskContext.get()
        assert context is not None
        report = Report(
            part=context.partitionId(), stage=context.stageId(), task=context.taskAttemptId()
        )
        # Spark removes these directories with the executor, whatever happens.
        places = os.environ.get("SPARK_LOCAL_DIRS") or os.environ.get("LOCAL_DIRS") or ""
        self.task.run(
            batches, report, files=SparkFiles.getRootDirectory(), place=places.split(",")[0]
        )
        yield from ()


@final
class SparkTasks:
    """Implements `task_hosts.Tasks`: one for each partition of a DataFrame."""

    name = "Spark"

    def __init__(self, dataframe: "DataFrame") -> None:
        self._frame = dataframe
        self._group = f"distbelief-{secrets.token_hex(8)}"

    def run(self, task: HostTask, *, cores: int) -> None:
        context = self._frame.sparkSession.sparkContext
        context.setJobGroup(self._group, "distbelief: a job's hosts", interruptOnCancel=True)
        profile = None
        if cores > 1 and not re.fullmatch(r"local(\[.*\])?", context.master):  # it has executors
            from pyspark import resource  # noqa: PLC0415 -- an extra

            wanted = resource.TaskResourceRequests().cpus(cores)
            profile = resource.ResourceProfileBuilder().require(wanted).build
        self._frame.mapInArrow(_Partition(task), "host long", profile=profile).collect()

    def cancel(self) -> None:
        self._frame.sparkSession.sparkContext.cancelJobGroup(self._group)

    def runs_again(self, stage: int) -> bool:
        with suppress(Exception):  # Spark may have ended
            tracker = self._frame.sparkSession.sparkContext.statusTracker()
            info = tracker.getStageInfo(stage)
            return info is not None and info.currentAttemptId > 0
        return False


def hosts_of(job: Job, *, n_hosts: int, n_processes: int, keys: str, host: str) -> TaskHosts:
    """Return as many hosts, for the processes beyond those on the supervisor's own host."""
    session = connect()
    cores = min(ceil(max(1, n_processes) / n_hosts) * cores_of(job), cores_each(session))
    tasks = SparkTasks(session.range(0, n_hosts, 1, n_hosts).toDF("id"))
    hosts = TaskHosts(tasks, host=host, keys=keys)
    hosts.job = job
    hosts.begin(n_parts=n_hosts, cores=cores)
    return hosts
