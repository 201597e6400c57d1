"""What a job wants of a Ray cluster."""

import signal
import socket
import sys
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from distbelief.core.errors import JobError
from distbelief.job.hosts.ray import RayHosts, connect
from tests.distbelief.jobs import speech


@pytest.mark.parametrize(
    ("n_hosts", "n_machines", "here", "cores"),
    [(1, 1, 0, 16), (3, 1, 2, 4), (8, 1, 8, 2), (4, 4, 0, 16)],
)
def test_ray_adds_what_a_host_lacks(n_hosts: int, n_machines: int, here: int, cores: int) -> None:
    job = speech("cluster.replicas=8", "cluster.threads=2")
    wanted = RayHosts.of(job, n_hosts=n_hosts, n_processes=8 * n_machines - here, keys="")
    assert wanted.cores == cores
    assert wanted.allowed == ("speech.model", "speech.data")


class Cluster(ModuleType):
    """Ray, as far as it is used: two nodes, and this machine is one of them."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.addresses = {"10.0.0.1": True, "10.0.0.2": True, "10.0.0.3": False}
        self.results: dict[str, int | Exception] = {}  # that are there

    def init(self, **_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def nodes(self) -> list[dict[str, object]]:
        return [
            {"NodeManagerAddress": number, "Alive": alive}
            for number, alive in self.addresses.items()
        ]

    def remote(self, **_: object) -> object:
        n = count()

        def made() -> object:
            return SimpleNamespace(join=SimpleNamespace(remote=lambda _: f"end-{next(n)}"))

        options = SimpleNamespace(remote=made)
        return lambda _kind: SimpleNamespace(options=lambda **_: options)

    def wait(
        self, of: list[str], *, timeout: float, num_returns: int = 1
    ) -> tuple[list[str], list[str]]:
        assert timeout == 0
        ready = [name for name in of if name in self.results][:num_returns]
        return ready, [name for name in of if name not in ready]

    def get(self, name: str) -> int:
        result = self.results[name]
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster()
    group = SimpleNamespace(ready=lambda: "room")
    util = ModuleType("ray.util")
    vars(util)["placement_group"] = lambda *_, **_more: group
    strategies = ModuleType("ray.util.scheduling_strategies")
    vars(strategies)["PlacementGroupSchedulingStrategy"] = lambda *_, **_more: None
    for module in (cluster, util, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return cluster


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"distbelief\[ray\]"):
        connect(is_local=True)
    RayHosts(n_hosts=1, cores=1, keys="", allowed=()).close()


@pytest.mark.usefixtures("ray")
def test_ray_does_not_take_the_signals() -> None:
    """From then on SIGTERM ended the job at once: nothing was pushed, or saved."""
    before = signal.getsignal(signal.SIGTERM)
    connect(is_local=False)
    assert signal.getsignal(signal.SIGTERM) == before


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


def lent(tmp_path: Path, n_hosts: int) -> RayHosts:
    machines = RayHosts(n_hosts=n_hosts, cores=3, keys="", allowed=())
    machines.start(f"tcp://127.0.0.1:1?secret={'5f' * 32}", directory=tmp_path)
    return machines


def test_missing_ray_resources_are_reported_after_a_while(ray: Cluster, tmp_path: Path) -> None:
    """The job waited for its machines, ten minutes by default, and said no more."""
    machines = lent(tmp_path, 2)
    said = [text for now in range(30) for text in machines.news(float(now))]
    assert said == ["Ray has no resources for 2 x 3 cores (ray status)"]
    ray.results["room"] = 0
    machines = lent(tmp_path, 2)
    assert not any(machines.news(float(now)) for now in range(30))


def test_why_a_host_cannot_be_had_is_reported_once(ray: Cluster, tmp_path: Path) -> None:
    """What the task raised stayed with Ray: the job waited for who never came."""
    machines = lent(tmp_path, 3)
    assert machines.news(0.0) == []
    why = "No module named 'distbelief'"
    error = RuntimeError(f"Traceback: ...\nModuleNotFoundError: {why}\n")
    ray.results |= {"end-0": error, "end-1": 1, "end-2": 0, "room": 0}
    assert machines.news(1.0) == []  # not so often
    assert machines.news(2.0) == [
        f"a host from Ray cannot take part: ModuleNotFoundError: {why}",
        "a host from Ray has ended (exit code 1)",
    ]
    assert machines.news(4.0) == []
