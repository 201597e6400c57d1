"""Replicas of different numbers of ranks, which push to the same shards: jobs in virtual time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from distbelief.config.job import Job
from distbelief.core.errors import JobFileError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.checkpoint import restore
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.protocol.role import Address
from distbelief.simulation.faults import Fault, Kill
from distbelief.simulation.forecast.placed_cluster import HostCosts
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.run import FinishedRun, run_simulated
from distbelief.simulation.forecast.simulate import SimulationRequest, run_request
from tests.distbelief.simulation.forecast.jobs import small


RACK = """
latency = "60 us"
[[machines]]
count = 8
flops = "200 kFLOP/s"
memory_rate = "10 MB/s"
bandwidth = "1 Gbit/s"
memory = "1 GiB"
"""
RULE = SGD(learning_rate=0.1)
# Every step is one mean of all replicas: how long each takes makes no difference.
TOGETHER = (
    "algorithm.preset=horovod",
    "algorithm.exchange.route=server",  # the only one for split replicas
    "algorithm.rule={name='sgd', learning_rate=0.1}",
    "algorithm.max_steps=10",
    "model.initial=seed",
    "stop.samples=1000",
    "algorithm.order=parts",  # the only one of replicas with unlike ranks
)


@pytest.fixture
def rack(tmp_path: Path) -> str:
    (tmp_path / "rack.toml").write_text(RACK)
    return str(tmp_path / "rack.toml")


@pytest.fixture
def preparation() -> Iterator[Preparation]:
    with Preparation() as made:
        yield made


def job(partitions: str, *overrides: str) -> Job:
    return small(*TOGETHER, f"cluster.partitions={partitions}", *overrides)


def run(a_job: Job, preparation: Preparation, rack: str, *faults: Fault) -> FinishedRun:
    hosts = HostCosts(rack, machines=None, measures=False)
    prepared = preparation.stage(a_job)
    return run_simulated(prepared, hosts.hosting(a_job, tell=print), seed=0, faults=faults)


def values(found: FinishedRun, a_job: Job, preparation: Preparation) -> Vector:
    """Return what the shards' last checkpoints have."""
    vectors, layout = [], preparation.stage(a_job).layout
    for k in range(layout.n_shards):
        snapshot = found.simulation.disk.newest(Address(f"shard-{k}"))
        assert snapshot is not None
        config = ShardConfig(index=k, layout=layout, rule=RULE)
        vectors.append(restore(snapshot, config=config, incarnation=99).values)
    return np.concatenate(vectors)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_replicas_of_any_ranks_learn_the_same(preparation: Preparation, rack: str) -> None:
    whole = run(job("1"), preparation, rack)
    expected = values(whole, job("1"), preparation)
    for partitions in ("[1, 2]", "[3, 1]"):
        mixed = run(job(partitions), preparation, rack)
        assert mixed.outcome.error is None
        assert mixed.view.samples == whole.view.samples == 80
        found = values(mixed, job(partitions), preparation)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=partitions)
        # Each replica pushes the whole gradient, whichever ranks have its parts.
        pushed = [mixed.simulation.traffic.between(f"replica-{r}", "shard") for r in range(2)]
        assert pushed[0] == pytest.approx(pushed[1], rel=0.05), partitions


def test_a_lost_rank_restarts_and_no_rank_of_another_replica(
    preparation: Preparation, rack: str
) -> None:
    mixed = run(job("[1, 2]"), preparation, rack, Kill(at=0.56, role=Address("replica-1.1")))
    restarts = {role.name: role.restarts for role in mixed.view.roles if role.restarts}
    assert restarts == {"replica-1.1": 1}
    assert mixed.view.samples == 80


@pytest.mark.parametrize("partitions", ["[1, 3]", "{max=3}"])
def test_a_forecast_shows_the_machines_of_unlike_replicas(partitions: str, rack: str) -> None:
    """One machine of the rack is large; the last one is the supervisor's."""
    latency, _, machines = RACK.partition("[[machines]]")
    large = machines.replace("count = 8", "count = 1").replace("200 k", "600 k")
    others = machines.replace("count = 8", "count = 3").replace("1 GiB", "1900 B")
    ones = machines.replace("count = 8", "count = 1")
    Path(rack).write_text(f"{latency}[[machines]]{large}[[machines]]{others}[[machines]]{ones}")
    a_job = job(partitions, f"cluster.machines={rack}", "cluster.placement=here")
    asked = SimulationRequest(job=a_job, cluster=rack, measures=False)
    (variant,) = run_request(asked, console=Console(quiet=True)).variants
    found = {name: sorted(machines) for name, machines in variant.replicas.items()}
    assert found == {"replica-0": [0], "replica-1": [1, 2, 3]}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("cluster.partitions=[1, 2, 3]",),
            "partitions = [1, 2, 3] is for 3 replicas, and replicas = 2: list as many",
        ),
        (
            ("cluster.partitions=[1, 2]", "cluster.plan='plan.json'"),
            "partitions = [1, 2] and plan = ",
        ),
        (
            ("cluster.partitions=[1, 2]", "cluster.replicas={min=2, max=2}"),
            "partitions = [1, 2] is for 2 replicas, and replicas = ",
        ),
        (("cluster.partitions=[]",), "partitions = [] is for 0 replicas"),
        (("cluster.partitions=[1, 0]",), "partitions"),
    ],
)
def test_lists_that_fit_no_job_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(JobFileError) as caught:
        small(*overrides)
    assert said in str(caught.value), caught.value
