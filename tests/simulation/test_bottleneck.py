"""A planted cause is found in simulated jobs, and none is named where there is none."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest
from typing_extensions import override

from distbelief.config.job import StopTable
from distbelief.dashboard.bottleneck import Finding, bottleneck
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import Adagrad
from distbelief.protocol.role import Address
from distbelief.simulation.faults import Pause
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Link
from distbelief.supervisor.view import JobView, RoleView
from distbelief.worker.batches import WholeBatches
from distbelief.worker.downpour_settings import DownpourSettings
from tests.simulation.jobs import JobCluster, seeds


CULPRIT = Address("replica-1")
SHARD = Address("shard-1")
BEGIN, END = 4.0, 12.0  # of what is looked at


@dataclass(eq=False, kw_only=True)
class Job(JobCluster):
    """Three replicas, on hosts of their own."""

    stop: StopTable = field(default_factory=lambda: StopTable(samples=10**7))
    n_replicas: int = 3
    host: str = ""
    links: Mapping[tuple[Address, Address], Link] = field(default_factory=dict)
    short_of_memory: Collection[Address] = ()

    @override
    def counted(self, name: Address) -> Mapping[str, float]:
        seconds = self.now if name in self.short_of_memory else 0.0
        return {"seconds_stalled_for_memory": 0.02 * seconds, "pages_read_again": 400.0 * seconds}

    @override
    def options(self) -> ClusterOptions:
        return replace(super().options(), links=self.links)

    def finding(self) -> Finding:
        self.cluster.run(until=BEGIN)
        before = self.view
        self.cluster.run(until=END)
        found = bottleneck(self.view, before)
        assert found is not None
        return found


def slow_links(name: Address, others: list[Address]) -> dict[tuple[Address, Address], Link]:
    slow = Link(bytes_per_second=2.5e4)
    return {pair: slow for other in others for pair in ((name, other), (other, name))}


def rounds() -> DownpourSettings:
    return DownpourSettings(
        loss="cross_entropy",
        batch_size=4,
        blocking=True,
        rule=Adagrad(learning_rate=0.05),
        exchange=ExchangePolicy(staleness=0, round=Round(), weight="mean"),
    )


@pytest.mark.parametrize("seed", seeds(2, of=10))
def test_nobody_is_blamed_in_a_healthy_job(seed: int) -> None:
    job = Job(seed=seed, settings=rounds() if seed % 2 else None, n_shards=1 + seed % 3)
    found = job.finding()
    assert (found.role, found.cause) == ("", ""), found


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_a_slow_processor(seed: int) -> None:
    job = Job(seed=seed)
    job.machines = {CULPRIT: SimulatedMachine(host="", flops_per_second=job.flops / 3)}
    found = job.finding()
    assert (found.role, found.cause) == (CULPRIT, "processor"), found


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_too_little_memory(seed: int) -> None:
    """It computes slowly, too: its processor waits for pages."""
    name = SHARD if seed == 3 else CULPRIT
    job = Job(seed=seed, settings=rounds() if seed % 2 else None)
    job.machines = {name: SimulatedMachine(host="", flops_per_second=job.flops / 3)}
    job.short_of_memory = {name}
    found = job.finding()
    assert (found.role, found.cause) == (name, "memory"), found


@pytest.mark.parametrize(
    ("stalled", "pages", "slower", "cause"),
    [
        (5.0, 4000.0, 1.0, "memory"),
        (0.1, 4000.0, 3.0, "memory"),  # Linux misses pages that are used once in a while
        (0.1, 4000.0, 1.0, ""),  # it loses no time by that
        (9.0, 0.0, 1.0, ""),  # of another process there
        (9.0, 0.0, 3.0, "processor"),
    ],
)
def test_memory_is_named_if_pages_are_read_again_and_time_is_lost(
    stalled: float, pages: float, slower: float, cause: str
) -> None:
    busy = {"spent_computing": 10.0, "samples": 500.0, "seconds_computing": 10.0}
    short = {"seconds_stalled_for_memory": stalled, "pages_read_again": pages}
    roles = (
        RoleView(name="replica-0", state="computing", counters=busy),
        RoleView(
            name=CULPRIT, state="computing", counters={**busy, **short, "samples": 500.0 / slower}
        ),
    )
    found = bottleneck(JobView(roles=roles, training_seconds=10.0))
    assert found is not None
    assert (found.role, found.cause) == (CULPRIT if cause else "", cause)


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_a_slow_link(seed: int) -> None:
    job = Job(seed=seed)
    job.links = slow_links(CULPRIT, job.shards)
    found = job.finding()
    assert (found.role, found.cause) == (CULPRIT, "link"), found


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_slow_data(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeBatches, "read_bytes", lambda *_: 2e9)
    found = Job(seed=seed).finding()
    assert found.cause == "data", found
    assert found.role.startswith("replica-")


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_a_slow_shard(seed: int) -> None:
    job = Job(seed=seed)
    job.links = slow_links(SHARD, job.replicas)
    found = job.finding()
    assert (found.role, found.cause) == (SHARD, "shard"), found


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_a_paused_shard(seed: int) -> None:
    job = Job(seed=seed)
    job.cluster.inject(Pause(at=END - 4.0, role=SHARD, seconds=60.0))
    found = job.finding()
    assert (found.role, found.cause) == (SHARD, "silent"), found


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_a_straggler_in_a_round(seed: int) -> None:
    job = Job(seed=seed, settings=rounds())
    job.machines = {CULPRIT: SimulatedMachine(host="", flops_per_second=job.flops / 3)}
    found = job.finding()
    assert (found.role, found.cause) == (CULPRIT, "processor"), found
    assert found.text.startswith("The others wait for replica-1")


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_a_round_that_waits_for_a_link(seed: int) -> None:
    job = Job(seed=seed, settings=rounds())
    job.links = slow_links(CULPRIT, job.shards)
    found = job.finding()
    assert (found.role, found.cause) == (CULPRIT, "link"), found
