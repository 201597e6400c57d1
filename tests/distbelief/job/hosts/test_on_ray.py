"""What a job wants of a Ray cluster."""

import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest

from distbelief.errors import JobError
from distbelief.job.hosts.on_ray import RayHosts, RayWanted, connect
from tests.distbelief.job.jobs import speech


@pytest.mark.parametrize(
    ("n_hosts", "n_machines", "here", "cores"),
    [(1, 1, 0, 16), (3, 1, 2, 4), (8, 1, 8, 2), (4, 4, 0, 16)],
)
def test_ray_lends_room_for_what_has_none_here(
    n_hosts: int, n_machines: int, here: int, cores: int
) -> None:
    job = speech("cluster.replicas=8", "cluster.threads=2")
    wanted = RayWanted.of(
        job, n_hosts=n_hosts, n_machines=n_machines, slots_here=here, keys=""
    )
    assert wanted.cores == cores
    assert wanted.allowed == ("speech.model", "speech.data")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A cluster of two nodes, and this machine is one of them."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def nodes() -> list[dict[str, object]]:
        numbers = {"10.0.0.1": True, "10.0.0.2": True, "10.0.0.3": False}
        return [{"NodeManagerAddress": n, "Alive": up} for n, up in numbers.items()]

    made = ModuleType("ray")
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    vars(made).update(init=init, nodes=nodes, util=util)
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"distbelief\[ray\]"):
        connect(is_local=True)
    RayHosts(RayWanted(n_hosts=1, cores=1, keys="", allowed=())).close()


@pytest.mark.usefixtures("ray")
def test_ray_does_not_take_the_signals() -> None:
    """From then on SIGTERM ended the job at once: nothing was pushed, or saved."""
    before = signal.getsignal(signal.SIGTERM)
    connect(is_local=False)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("ray")
def test_nodes_that_cannot_reach_the_job_are_not_waited_for() -> None:
    """They dialled 127.0.0.1, each its own, and the job waited for ten minutes."""
    with pytest.raises(JobError, match=r"nodes \(10.0.0.2\) cannot reach .* --listen"):
        connect(is_local=True)


def test_a_cluster_on_this_machine_only_reaches_it(ray: ModuleType) -> None:
    vars(ray)["nodes"] = lambda: [{"NodeManagerAddress": "10.0.0.1", "Alive": True}]
    connect(is_local=True)
