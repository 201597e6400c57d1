"""What a job wants of a Ray cluster."""

import signal
import sys
from types import ModuleType

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


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"distbelief\[ray\]"):
        connect()
    RayHosts(RayWanted(n_hosts=1, cores=1, keys="", allowed=())).close()


def test_ray_does_not_take_the_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on SIGTERM ended the job at once: nothing was pushed, or saved."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    ray = ModuleType("ray")
    monkeypatch.setattr(ray, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    before = signal.getsignal(signal.SIGTERM)
    connect()
    assert signal.getsignal(signal.SIGTERM) == before
