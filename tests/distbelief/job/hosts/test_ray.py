"""What a job wants of a Ray cluster."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from distbelief.core.errors import JobError
from distbelief.job.hosts import task_hosts
from distbelief.job.hosts.host_task import HostTask, Report, run_blocks
from distbelief.job.hosts.ray import RayTasks, connect, hosts_of
from tests.distbelief.jobs import speech


ADDRESS = f"tcp://127.0.0.1:1?secret={'5f' * 32}"


class Cluster(ModuleType):
    """Ray, as far as it is used: two nodes, and this machine is one of them."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        self.addresses = {"10.0.0.1": True, "10.0.0.2": True, "10.0.0.3": False}
        self.options: dict[str, object] = {}  # of the tasks
        self.starts = threading.Event()  # what was asked for
        self.starts.set()
        self.cancelled: list[object] = []
        self.threads = ThreadPoolExecutor()

    def init(self, **_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def nodes(self) -> list[dict[str, object]]:
        return [
            {"NodeManagerAddress": number, "Alive": alive}
            for number, alive in self.addresses.items()
        ]

    def remote(self, **options: object) -> object:
        self.options = options

        def of(function: Callable[..., object]) -> object:
            def begin(*arguments: object) -> Future[object]:
                def run() -> object:
                    self.starts.wait()
                    return function(*arguments)

                return self.threads.submit(run)

            return SimpleNamespace(remote=begin)

        return of

    def get(self, running: Sequence[Future[object]]) -> list[object]:
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
        return []

    def cancel(self, one: object, *, force: bool) -> None:
        assert force
        self.cancelled.append(one)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    yield cluster
    cluster.starts.set()
    cluster.threads.shutdown()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"distbelief\[ray\]"):
        connect(is_local=True)


@pytest.mark.usefixtures("ray")
def test_ray_does_not_take_the_signals() -> None:
    """From then on SIGTERM ended the job at once: nothing was pushed, or saved."""
    before = signal.getsignal(signal.SIGTERM)
    connect(is_local=False)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("ray")
def test_a_host_from_ray_is_as_nice_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of Ray are at 15: on a busy machine a host took minutes to import torch."""
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    connect(is_local=False)
    assert os.environ.pop("RAY_worker_niceness") == "0"
    found: list[tuple[int, int, int]] = []

    def set_priority(*wanted: int) -> None:
        found.append(cast("tuple[int, int, int]", wanted))
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", set_priority)
    monkeypatch.setattr(HostTask, "run", lambda *_, **_more: None)
    run_blocks(HostTask(door=("127.0.0.1", 1), key=b"", write=None), 0, None)
    assert found == [(os.PRIO_PROCESS, 0, 0)]


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError])
def test_a_wrong_address_of_a_cluster_is_a_mistake(
    ray: Cluster, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:

    def init(**_: object) -> None:
        raise kind("Invalid address format: nonsense")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(JobError, match="cannot connect to a Ray cluster: Invalid address"):
        connect(is_local=True)


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://localhost:{}"])
def test_an_absent_cluster_is_not_tried_long(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Ray did: four times 40 s, and more, with warnings of its own only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = form.format(server.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", address)
        connect(is_local=False)
    with pytest.raises(JobError, match=f"nothing answers at RAY_ADDRESS={address}"):
        connect(is_local=False)


@pytest.mark.usefixtures("ray")
def test_nodes_that_cannot_reach_the_job_are_not_waited_for(ray: Cluster) -> None:
    """They dialled 127.0.0.1, each its own, and the job waited for ten minutes."""
    with pytest.raises(JobError, match=r"10\.0\.0\.2 cannot reach .* at this host only"):
        connect(is_local=True)
    ray.addresses = {"10.0.0.1": True}
    connect(is_local=True)


@pytest.mark.parametrize(
    ("n_hosts", "n_machines", "here", "cores"),
    [(1, 1, 0, 16), (3, 1, 2, 4), (8, 1, 8, 2), (4, 4, 0, 16)],
)
def test_ray_adds_what_a_host_lacks(
    ray: Cluster, *, n_hosts: int, n_machines: int, here: int, cores: int
) -> None:
    ray.starts.clear()
    job = speech("cluster.replicas=8", "cluster.threads=2")
    wanted = hosts_of(
        job, n_hosts=n_hosts, n_processes=8 * n_machines - here, keys="", host="127.0.0.1"
    )
    assert (wanted.n_parts, wanted.cores) == (n_hosts, cores)
    while not ray.options:
        pass
    assert ray.options["num_cpus"] == cores
    ray.starts.set()
    wanted.close()


def test_missing_ray_resources_are_reported_after_a_while(ray: Cluster) -> None:
    """The job waited for its machines, ten minutes by default, and said no more."""
    ray.starts.clear()
    job = speech("cluster.replicas=6")
    hosts = hosts_of(job, n_hosts=2, n_processes=6, keys="", host="127.0.0.1")
    said = [text for now in range(0, 90, 10) for text in hosts.news(float(now))]
    assert len(said) == 1
    assert said[0].startswith("Ray runs 0 of 2 hosts: each needs 3 free cores until the job ends")
    ray.starts.set()
    hosts.close()


def test_why_a_host_cannot_be_had_is_reported_and_the_others_end(
    ray: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the task raised stayed with Ray: the job waited for who never came."""

    def run(_task: HostTask, _batches: object, report: Report, **_: object) -> None:
        if report.part == 1:
            raise RuntimeError("ModuleNotFoundError: No module named 'distbelief'")

    monkeypatch.setattr(HostTask, "run", run)
    monkeypatch.setattr(task_hosts, "AGAIN_SECONDS", 60.0)
    hosts = hosts_of(speech(), n_hosts=3, n_processes=3, keys="", host="127.0.0.1")
    hosts.start(ADDRESS, directory=tmp_path)
    said: list[str] = []
    while not said:
        said = hosts.news(0.0)
    why = "ModuleNotFoundError: No module named 'distbelief'"
    assert said == [f"Ray has ended the hosts ({why}); starting them again"]
    assert len(ray.cancelled) == 3
    hosts.close()


def test_blocks_go_to_their_tasks(ray: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, list[object]] = {}

    def run(_task: HostTask, batches: Iterator[object], report: Report, **_: object) -> None:
        found[report.part] = [*batches]

    monkeypatch.setattr(HostTask, "run", run)
    task = HostTask(door=("127.0.0.1", 1), key=b"", write=None)
    RayTasks([("a", "b"), (), ("c",)], read=list).run(task, cores=2)
    assert found == {0: ["a", "b"], 1: [], 2: ["c"]}
    assert (ray.options["num_cpus"], ray.options["scheduling_strategy"]) == (2, "DEFAULT")
    assert not ray.cancelled
