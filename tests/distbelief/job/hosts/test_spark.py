"""What a job wants of a Spark cluster; tests/spark has a real one."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

import distbelief.spark
from distbelief.core.errors import JobError
from distbelief.job.callbacks import Callbacks
from distbelief.job.hosts import host_task, spark, task_hosts
from distbelief.job.hosts.host_task import Answer, Options
from distbelief.job.hosts.spark import SparkTasks, check_reach, connect
from distbelief.job.hosts.task_hosts import TaskHosts
from distbelief.supervisor.view import JobView
from tests.distbelief.jobs import speech


ADDRESS = f"tcp://127.0.0.1:1?secret={'5f' * 32}"
LOCAL = threading.local()  # the partition of the task in this thread, and its number


Part = Callable[[Iterator[object]], Iterator[object]]


class Cluster:
    """Spark, as far as it is used: a DataFrame whose tasks run in threads."""

    def __init__(self, n_parts: int) -> None:
        self.n_parts = n_parts
        self.sparkSession = SimpleNamespace(sparkContext=self)
        self.master = "local-cluster[2,1,1024]"
        self.hosts = ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
        self.cancelled: list[str] = []
        self.attempts: list[int] = []  # parts whose task runs twice
        self.stage_attempt = 0
        self.failures = 0  # of the whole, after the tasks
        self.again = threading.Event()  # which do so from then on
        self.again.set()
        self.errors: list[tuple[Exception, int]] = []  # with the number of the task

    # --- its context ---

    def getConf(self) -> dict[str, str]:  # noqa: N802 -- Spark's
        return {"spark.driver.host": "10.0.0.1"}

    @property
    def _jsc(self) -> object:
        infos = [SimpleNamespace(host=lambda host=host: host) for host in self.hosts]
        tracker = SimpleNamespace(getExecutorInfos=lambda: infos)
        return SimpleNamespace(sc=lambda: SimpleNamespace(statusTracker=lambda: tracker))

    def statusTracker(self) -> object:  # noqa: N802 -- Spark's
        info = SimpleNamespace(currentAttemptId=self.stage_attempt)
        return SimpleNamespace(getStageInfo=lambda _stage: info)

    defaultParallelism = 4  # noqa: N815 -- Spark's

    def setJobGroup(self, *_: object, **_more: object) -> None:  # noqa: N802 -- Spark's
        pass

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802 -- Spark's
        self.cancelled.append(group)

    # --- the frame ---

    def mapInArrow(self, task: Part, _schema: str, **_: object) -> object:  # noqa: N802 -- Spark's
        def run(number: int, part: int) -> None:
            LOCAL.part, LOCAL.number = part, number
            if number >= self.n_parts:
                self.again.wait()
            try:
                assert list(task(iter(()))) == []
            except Exception as error:  # noqa: BLE001 -- Spark reports it
                self.errors.append((error, number))

        def collect() -> None:
            parts = [*range(self.n_parts), *self.attempts]
            threads = [threading.Thread(target=run, args=one) for one in enumerate(parts)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self.failures:
                self.failures -= 1
                raise RuntimeError("Job aborted")
            if self.errors:
                raise RuntimeError(f"Traceback\ndistbelief.JobError: {self.errors[0][0]}")

        return SimpleNamespace(collect=collect)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Options, list[str]]]:
    """Return what agents were started: partition, options, files beside them."""
    started: list[tuple[int, Options, list[str]]] = []
    task = SimpleNamespace(
        partitionId=lambda: LOCAL.part, stageId=lambda: 0, taskAttemptId=lambda: LOCAL.number
    )
    context = SimpleNamespace(get=lambda: task)
    pyspark = ModuleType("pyspark")
    vars(pyspark)["TaskContext"] = context
    vars(pyspark)["SparkFiles"] = SimpleNamespace(getRootDirectory=lambda: "")
    monkeypatch.setitem(sys.modules, "pyspark", pyspark)

    def run(directory: Path, options: bytes, _link: object) -> None:
        files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*.arrow"))
        started.append((LOCAL.part, msgspec.json.decode(options, type=Options), files))

    monkeypatch.setattr(host_task, "_agent", lambda directory, _files: nullcontext(directory))
    monkeypatch.setattr(host_task, "_run", run)
    return started


Write = Callable[[Iterable[object], Path], tuple[int, str, str]]


def writing(rows: Callable[[], list[tuple[int, str, str]]]) -> Write:
    def write(_batches: Iterable[object], file: Path) -> tuple[int, str, str]:
        file.write_bytes(b"rows of %d" % LOCAL.part)
        part: int = LOCAL.part
        return rows()[part]

    return write


def hosts(cluster: Cluster, write: Write | None = None, cores: int = 1) -> TaskHosts:
    made = TaskHosts(SparkTasks(cluster), host="127.0.0.1", write=write)
    made.job, made.rows_as = speech(), "rows-1"
    made.begin(n_parts=cluster.n_parts, cores=cores)
    return made


def test_tasks_write_rows_and_are_hosts_then(
    agents: list[tuple[int, Options, list[str]]], tmp_path: Path
) -> None:
    cluster = Cluster(3)
    form = "x: float32[2]"
    made = hosts(cluster, writing(lambda: [(4, "a", form), (0, "", ""), (2, "b", form)]))
    made.wait(pytest.fail)
    assert {part: report.rows for part, report in made.parts.items()} == {0: 4, 1: 0, 2: 2}
    made.copy_rows(2, tmp_path / "rows")
    assert (tmp_path / "rows").read_bytes() == b"rows of 2"
    assert agents == []
    made.start(ADDRESS, directory=tmp_path)
    made.close()
    made.close()
    found = {part: (options, files) for part, options, files in agents}
    assert {part: files for part, (_, files) in found.items()} == {
        0: ["rows-1/part-00000.arrow"],
        2: ["rows-1/part-00002.arrow"],
    }
    assert found[0][0].address == ADDRESS
    assert found[0][0].allowed == ("speech.model", "speech.data")
    assert not cluster.errors
    assert not cluster.cancelled


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(
    ("second", "why"), [((3, "b", "y: int64[]"), "all rows need the same"), ((5, "c", "x"), "")]
)
def test_rows_of_another_form_are_refused(second: tuple[int, str, str], why: str) -> None:
    made = hosts(Cluster(2), writing(lambda: [(3, "a", "x"), second]))
    if why:
        with pytest.raises(JobError, match=why):
            made.wait(pytest.fail)
    else:
        made.wait(pytest.fail)
    made.close()


@pytest.mark.usefixtures("agents")
def test_a_partition_that_is_read_again_must_have_the_same_rows() -> None:
    sums = iter(["a", "b"])
    cluster = Cluster(1)
    cluster.attempts = [0]
    made = hosts(cluster, writing(lambda: [(3, next(sums), "x")]))
    assert made._job is not None
    made._job.join()
    why = r"partition 0 was read again and has other rows"
    with pytest.raises(JobError, match=why):
        made.wait(pytest.fail)
    # A job in which nothing moves ends, too: all its hosts have left.
    with pytest.raises(JobError, match=why):
        Callbacks([made])(JobView(phase="training", seconds=1.0))
    made.close()


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("is_late", [False, True])
def test_of_two_tasks_of_a_partition_the_older_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_late: bool
) -> None:
    """An executor was lost with shuffled rows: the rows of others had two hosts, its own none.

    Spark ran all tasks again in the one free slot, beside those that still ran.
    """
    cluster, running = Cluster(2), threading.Semaphore(0)
    cluster.attempts, cluster.stage_attempt = [0], 1

    def run(_directory: Path, _options: bytes, link: "host_task.Link") -> None:
        running.release()
        with suppress(EOFError):
            raise JobError(msgspec.json.decode(link.recv_bytes(), type=Answer).refusal)

    monkeypatch.setattr(host_task, "_run", run)
    if is_late:
        cluster.again.clear()
    made = hosts(cluster)
    made.start(ADDRESS, directory=tmp_path)
    if is_late:
        running.acquire()
        running.acquire()
        cluster.again.set()
    while not cluster.errors:
        time.sleep(0.01)
    made.close()
    assert [(str(error), number) for error, number in cluster.errors] == [(task_hosts.OVER, 0)]


@pytest.mark.usefixtures("agents")
def test_hosts_that_spark_ends_are_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(task_hosts, "AGAIN_SECONDS", 0.0)
    cluster = Cluster(1)
    cluster.failures = 1
    made = hosts(cluster)
    made.wait(pytest.fail)
    made.start(ADDRESS, directory=tmp_path)
    assert made._job is not None
    made._job.join()
    assert made.news(0.0) == ["Spark has ended the hosts (Job aborted); starting them again"]
    assert made.news(1.0) == []
    made.close()


@pytest.mark.usefixtures("agents")
def test_too_few_executors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_hosts, "CLOSE_SECONDS", 0.5)
    cluster = Cluster(1)
    made = hosts(cluster)
    made.n_parts = 2
    said = [text for now in range(0, 90, 10) for text in made.news(float(now))]
    assert len(said) == 1
    assert "of 2 hosts: each needs 1 free cores" in said[0]
    made.close()


def test_without_spark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(JobError, match=r"distbelief\[spark\]"):
        connect()
    for name in ("model", "stages"):  # another test may have imported them
        monkeypatch.delitem(sys.modules, f"distbelief.spark.{name}", raising=False)
    with pytest.raises(JobError, match=r"^spark.fit: .*distbelief\[spark\]"):
        distbelief.spark.fit("rows.parquet", {}, inputs="x", targets="y")
    with pytest.raises(ImportError, match=r"distbelief\[spark\]"):
        _ = distbelief.spark.DistBelief


def test_executors_that_cannot_reach_the_job_are_not_waited_for() -> None:
    session = SimpleNamespace(sparkContext=Cluster(1))
    with pytest.raises(JobError, match=r"10\.0\.0\.2 cannot reach .* at this host only"):
        check_reach(session, is_local=True)
    check_reach(session, is_local=False)
    assert spark.cores_each(session) == 2


@pytest.mark.processes
def test_a_host_leaves_with_its_task_and_takes_its_files_along(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    folder.mkdir()
    options = Options(address=ADDRESS, keys="", cores=1, allowed=(), places=(), paths=())
    with subprocess.Popen(
        [sys.executable, "-P", "-m", host_task.__name__, str(tmp_path)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(msgspec.json.encode(options) + b"\n")
        host.stdin.flush()
        assert b"waits for a job" in host.stdout.readline()
        host.stdin.close()
        host.stdout.read()
    assert host.returncode == 0
    assert not folder.exists()


def test_rows_that_spark_knows_to_be_none_are_no_wait() -> None:
    """`fit(frame.limit(0))` waited for ever: Spark ran no task that could report."""
    made = TaskHosts(SparkTasks(Cluster(0)), host="127.0.0.1", write=writing(list))
    made.begin(n_parts=1, cores=1)
    made.wait(str)
    assert made.parts[0].rows == 0
    made.close()
