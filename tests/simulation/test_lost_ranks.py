"""Ranks of split replicas that are lost and come back, where workers wait for each other."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import pytest

from distbelief.config.load import parse_job
from distbelief.plans.cluster import Machine, Outages, uniform
from distbelief.simulation.forecast.placed_cluster import PlacedCluster
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.run import run_simulated
from distbelief.simulation.forecast.sweep import Outcome


N_STEPS: Final = 160
BATCH: Final = 8
N_MACHINES: Final = 12
SECONDS_MAX: Final = 45.0  # of virtual time
RULE: Final = 'rule = { name = "adagrad", learning_rate = 0.02 }'
INNER: Final = 'inner = { name = "AdamW", lr = 1e-3 }\nexchange = { every = 2 }'
EXCHANGES: Final[Mapping[str, str]] = {
    "local": f'preset = "local"\n{INNER}',
    "diloco": f'preset = "diloco"\n{INNER}',
    "decoupled": f'preset = "decoupled-diloco"\n{INNER}',
    "rounds": f"{RULE}\nexchange = {{ staleness = 0, round = {{}} }}",
    "quorum": f"{RULE}\nexchange = {{ staleness = 1, round = {{ quorum = 0.6 }} }}",
    "in step": f"{RULE}\nexchange = {{ staleness = 0 }}",
    "stale": f"{RULE}\nn_push = 2\nexchange = {{ staleness = 1 }}",
    "free": RULE,
}
# Each role has a machine, which is lost every minute; a job takes 9 to 14 s without losses.
MACHINE: Final = Machine(
    flops=1.5e5, memory_rate=1e10, bandwidth=1.25e8, preemptions=Outages(mean_time=60.0, away=1.0)
)


def text(exchange: str) -> str:
    return f"""
[model]
factory = "experiments.benchmarks.simulated.task:net"
initial = "seed"
[data]
train = {{ factory = "experiments.benchmarks.many_replicas:rows" }}
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = {BATCH}
{EXCHANGES[exchange]}
[cluster]
replicas = 4
partitions = 2
shards = 3
[stop]
steps = {N_STEPS}
[output]
directory = "unused"
"""


def played(exchange: str, seeds: Iterable[int]) -> Iterator[Outcome]:
    cluster = uniform("lost", MACHINE, N_MACHINES, latency=1e-3)
    host = PlacedCluster(cluster=cluster, reference=MACHINE, rates=None, together=False)
    with Preparation() as preparation:
        job = parse_job(text(exchange), path="lost.toml")
        prepared = host.formed(preparation.stage(job))
        for seed in seeds:
            outages = host.outages(prepared, seed=seed)
            yield run_simulated(prepared, host, seed=seed, outages=outages).outcome


@pytest.mark.parametrize(
    ("exchange", "seeds"),
    [
        # A rank repeats a push of the last tick: the others had ended it.
        ("diloco", [1, 6]),
        # A rank of a replica without samples begins again, and pushes before it is placed.
        ("diloco", [10]),
        # A rank comes back to a floor behind the other ranks of its replica.
        ("in step", [1, 5]),
        *(pytest.param(name, range(10), marks=pytest.mark.soak) for name in EXCHANGES),
    ],
)
def test_a_lost_rank_stops_nobody(exchange: str, seeds: Iterable[int]) -> None:
    """These jobs stood still until another rank was lost: for minutes, or for ever."""
    for outcome in played(exchange, seeds):
        assert outcome.error is None
        assert outcome.samples == N_STEPS * BATCH
        assert outcome.seconds < SECONDS_MAX
