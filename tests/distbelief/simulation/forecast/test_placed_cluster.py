"""A forecast describes the placement that `train` makes on such hosts."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from distbelief import protocol as wire
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.rules import SGD, Adagrad, Adam, Momentum, UpdateRule
from distbelief.plans.cluster import Cluster, Machine, uniform
from distbelief.protocol import role as rl
from distbelief.protocol.hosts import Offer
from distbelief.simulation.forecast.placed_cluster import PlacedCluster, memory_of, vectors_of_shard
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.supervisor.hosts import HERE, ClusterConfig
from distbelief.supervisor.supervisor import Supervisor
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.simulation.forecast.jobs import TEXT, small


MACHINE = Machine(flops=4e10, memory_rate=1e10, memory=1e10, bandwidth=1.25e8, cores=4)
POLICIES = ("here", "spread", "beside replicas")


@pytest.fixture(scope="module")
def preparation() -> Iterator[Preparation]:
    with Preparation() as found:
        yield found


def cluster_of(*bandwidths: float, flops: tuple[float, ...] = ()) -> Cluster:
    plain = uniform("mixed", MACHINE, len(bandwidths), latency=1e-4)
    return msgspec.structs.replace(
        plain,
        machines=tuple(
            msgspec.structs.replace(
                MACHINE, bandwidth=bandwidth, flops=flops[k] if flops else MACHINE.flops
            )
            for k, bandwidth in enumerate(bandwidths)
        ),
    )


def forecast_of(cluster: Cluster, prepared: PreparedJob) -> dict[str, int]:
    placed = PlacedCluster(cluster=cluster, reference=MACHINE, rates=None, together=False)
    return {str(name): place for name, place in placed.placement(prepared).items()}


def trained_on(cluster: Cluster, prepared: PreparedJob) -> dict[str, int]:
    """Return where a supervisor on the last machine starts the roles; all others have joined."""
    n_joined, threads = len(cluster) - 1, prepared.job.cluster.threads
    config = ClusterConfig.of(prepared.job, prepared.layout, slots_here=0)
    supervisor = Supervisor(prepared.config(), replace(config, run="r", n_hosts=n_joined))
    supervisor.handle(rl.Started(incarnation=1), 0.0)
    for index, machine in enumerate(cluster.machines[:-1]):
        offer = wire.Offer(
            incarnation=1,
            label=f"{index}",
            endpoint="",
            cores=threads,
            memory_bytes=1,
            devices=(),
            flops=machine.flops / machine.cores,
        )
        report = wire.HostReport(
            incarnation=1,
            ready=True,
            leaving=False,
            refusal=None,
            ended=(),
            bandwidth=cluster.rate(n_joined, index),
        )
        for message in (offer, report):
            name = rl.Address(f"host-{index}")
            supervisor.handle(rl.Received(sender=name, incarnation=1, message=message), 0.1)
    found = {"supervisor": n_joined}
    for record in supervisor.members:
        host = supervisor.scheduler.hosts.at(record.name)
        assert host is not None, record.name
        found[record.name] = n_joined if host.name == HERE else int(host.label)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_a_forecast_describes_what_a_job_runs(preparation: Preparation, seed: int) -> None:
    stream = np.random.default_rng(seed)
    n_replicas, n_shards = (int(n) for n in stream.integers(1, 5, size=2))
    prepared = preparation.stage(
        small(
            f"cluster.replicas={n_replicas}",
            f"cluster.shards={n_shards}",
            f"cluster.shard_copies={stream.integers(1, 3)}",
            f"cluster.threads={stream.integers(1, 3)}",
            f"cluster.placement={POLICIES[seed % 3]}",
        )
    )
    n_machines = 1 + n_replicas + int(stream.integers(0, 6))
    cluster = cluster_of(
        *stream.choice([1.25e7, 1.2e8, 1.25e8, 1.25e9], size=n_machines),
        flops=tuple(stream.choice([1e10, 4e10, 1e12], size=n_machines)),
    )
    placed = PlacedCluster(cluster=cluster, reference=MACHINE, rates=None, together=False)
    used = cluster.first(placed.n_needed(prepared))
    assert forecast_of(cluster, prepared) == trained_on(used, prepared)


def test_shards_are_spread_by_bandwidth(preparation: Preparation) -> None:
    """One on each host, then where there are the fewest bytes for the bandwidth."""
    prepared = preparation.stage(
        small("cluster.replicas=1", "cluster.shards=5", "cluster.placement=spread")
    )
    found = forecast_of(cluster_of(1e8, 3e8, 1e9), prepared)
    assert found["replica-0"] == 1  # the fastest, by flops and link
    # The supervisor's host has no link to itself, and counts as the fastest; it has no replica.
    assert [found[f"shard-{k}"] for k in range(5)] == [2, 1, 0, 2, 1]


@pytest.mark.parametrize("policy", ["spread", "beside replicas"])
def test_copies_of_a_shard_are_on_two_machines(preparation: Preparation, policy: str) -> None:
    job = small("cluster.shard_copies=2", "cluster.shards=4", f"cluster.placement={policy}")
    found = forecast_of(cluster_of(1e8, 1e8, 1e8), preparation.stage(job))
    for k in range(4):
        assert found[f"shard-{k}"] != found[f"shard-{k}b"]


def test_shards_beside_replicas_take_turns(preparation: Preparation) -> None:
    job = small("cluster.replicas=2", "cluster.shards=4", "cluster.placement=beside replicas")
    found = forecast_of(cluster_of(*[1e8] * 6), preparation.stage(job))
    assert [found[f"shard-{k}"] for k in range(4)] == [0, 1, 0, 1]
    assert found["evaluator"] == found["supervisor"] == 2


@pytest.mark.parametrize("n_replicas", [1, 2, 20])
def test_a_shard_holds_two_push_buffers_of_each_replica(
    preparation: Preparation, n_replicas: int
) -> None:
    """Its memory was foretold as if it had one replica: 16 bytes a parameter, not 8 + 8 R."""
    job = small(f"cluster.replicas={n_replicas}", "cluster.shards=2")
    prepared = preparation.stage(job)
    assert isinstance(prepared.job.algorithm, DownpourSettings)
    n_state = len(prepared.job.algorithm.rule.state(0, "f"))
    n_bytes = 4 * sum(prepared.layout.shard_size(k) for k in range(2)) / 2
    shard = rl.Address("shard-0")
    together, apart = (memory_of(prepared, by_blocks=each)[shard] for each in (False, True))
    assert together == (1 + n_state + 2 * n_replicas) * n_bytes
    assert apart == together + min(n_replicas, 2) * n_bytes


def test_threads_of_a_replica_take_cores_and_have_gradients_of_their_own(
    preparation: Preparation,
) -> None:
    rule = 'rule = { name = "adagrad", learning_rate = 0.05 }'
    text = TEXT.replace(rule, 'preset = "hogwild"')
    one, four = (
        preparation.stage(small(f"algorithm.lockfree.threads={n}", text=text)) for n in (1, 4)
    )
    replica = rl.Address("replica-0")
    need, more = (memory_of(each, by_blocks=False)[replica] for each in (one, four))
    assert more == need * (4 + 2 * 3) / 4
    config = ClusterConfig.of(four.job, four.layout, slots_here=0)
    offer = Offer(incarnation=1, label="a", endpoint="", cores=9, memory_bytes=1, devices=("cpu",))
    assert config.slots_of(offer) == 2


def test_the_state_of_all_rules_counts() -> None:
    rule = Momentum(learning_rate=1.0, groups={"*.bias": Adam(learning_rate=1.0)})
    assert (
        vectors_of_shard(rule, n_clients=1, by_blocks=False)
        == 1 + len(rule.state(0, "f")) + len(Adam(learning_rate=1.0).state(0, "f")) + 2
    )
    rule = msgspec.convert({"name": "AdamW", "amsgrad": True}, UpdateRule)
    assert vectors_of_shard(rule, n_clients=1, by_blocks=False) == 1 + 3 + 2
    assert vectors_of_shard(SGD(learning_rate=1.0), n_clients=4, by_blocks=False) == 9
    assert vectors_of_shard(Adagrad(learning_rate=1.0), n_clients=4, by_blocks=True) == 12


def test_a_shard_holds_the_words_of_encoded_pushes_and_not_their_numbers() -> None:
    """Of 20 clients with dense pushes: 168 bytes per parameter, and copies to read from."""
    rule = Adagrad(learning_rate=1.0)

    def bytes_of(**policy: object) -> float:
        exchange = msgspec.convert(policy, ExchangePolicy)
        return 4 * vectors_of_shard(rule, n_clients=20, by_blocks=False, policy=exchange)

    assert bytes_of() == 168
    assert bytes_of(push={"codec": "int4"}) == 48  # at the end; 8 + 20 * 0.53 before
    assert bytes_of(push={"codec": "int8"}) == 48
    assert bytes_of(push={"codec": "top-k", "share": 0.5}) == 88
    assert bytes_of(push={"codec": "bfloat16"}, fetch="changed") == 48 + 6
    assert bytes_of(push={"codec": "bfloat16"}, fetch={"codec": "int4"}) == 48 + 12
