"""Buffers of a model in a job: no update of one is lost, however replicas exchange.

A fetch that does not wait for the replica's own pushes brought the shards' buffers without them,
and the next push wrote those back: of 100 steps of one replica `num_batches_tracked` counted 85,
of 100 steps of two replicas 39 instead of 50. Blocking replicas lost them too, where there were
two: each push of values takes back a part of what others had counted since the fetch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace as replace_options

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from typing_extensions import override

from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.protocol.role import Address, PeerLost
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.task.task import ModelSpec, TaskSpec
from distbelief.worker.downpour_settings import DownpourSettings
from tests.simulation.jobs import STEP_SECONDS
from tests.simulation.test_downpour import LEARNING, Cluster, both_data_paths, downpour


HERE = "tests.simulation.test_buffers"


class Counting(nn.Module):
    """Beside BatchNorm, buffers that a forward pass changes by adding, or by setting."""

    threes: torch.Tensor
    last: torch.Tensor

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.register_buffer("threes", torch.zeros((), dtype=torch.int32))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("table", torch.full((3,), 7))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.threes += 3
            self.last.copy_(x.mean(0)[:4])
        output: torch.Tensor = self.net(x)
        return output


def counting(*, width: int = 40) -> nn.Module:
    return Counting(width=width)


def task(model: str = f"{HERE}:counting") -> TaskSpec:
    return replace(LEARNING, model=ModelSpec(factory=model, initial="seed"))


def run(settings: DownpourSettings, *, n_replicas: int, host: str) -> dict[str, torch.Tensor]:
    cluster = Cluster(task(), settings, n_replicas=n_replicas, n_shards=2, host=host)
    cluster.run()
    return cluster.values()


@dataclass(eq=False)
class OneIsSlow(Cluster):
    """A cluster where replica-1 is at half its steps when the others end, and leave."""

    @override
    def run(self, *, but: Sequence[str] = ()) -> None:
        self.flops_per_second = self.model.flops(4) / STEP_SECONDS
        gone: set[Address] = set()

        def leave(_: HandledEvent) -> None:
            for name in self.cluster.halted.keys() - gone:
                gone.add(name)
                for shard in self.shards:
                    self.cluster.post(shard, PeerLost(peer=name, incarnation=1, reason="over"))

        self.cluster.observe(leave)
        super().run(but=but)

    @override
    def options(self) -> ClusterOptions:
        options = super().options()
        slow = SimulatedMachine(host=self.host, flops_per_second=self.flops_per_second / 2)
        return replace_options(options, machines={Address("replica-1"): slow})


INNER = {"name": "SGD", "lr": 0.05}
WAYS = {
    "as they come": downpour(max_steps=20),
    "blocking": downpour(max_steps=20, blocking=True),
    "seldom": downpour(max_steps=20, n_push=3, n_fetch=2),
    "overwritten": downpour(max_steps=20, n_push=2, n_fetch=3, overwrite_local_steps=True),
    "local steps": replace(
        downpour(max_steps=20), inner=INNER, exchange=ExchangePolicy(send="delta", every=4)
    ),
    "rounds": replace(
        downpour(max_steps=20), exchange=ExchangePolicy(staleness=0, round=Round(), weight="mean")
    ),
}


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("n_replicas", [1, 2])
def test_every_step_of_every_replica_is_counted(
    settings: DownpourSettings, n_replicas: int, host: str
) -> None:
    values = run(settings, n_replicas=n_replicas, host=host)
    # A mean over the replicas: so a replica that goes on alone counts as in one process.
    assert values["net.1.num_batches_tracked"].item() == pytest.approx(20, abs=1e-3)
    assert values["threes"].item() == pytest.approx(60, abs=1e-3)
    assert values["table"].tolist() == [7, 7, 7]
    assert values["mask"].tolist() == [1, 1]
    # An average stays one, also of what each step sets anew: sums of changes could diverge.
    assert bool((values["net.1.running_var"] > 0).all())
    assert float(values["last"].abs().max()) < 4.0


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("name", [name for name in WAYS if name != "rounds"])
def test_replicas_that_end_one_by_one_count_as_those_that_end_together(
    name: str, host: str
) -> None:
    """Regression: steps counted by the replicas left, and two of 20 steps made 23 to 30."""
    cluster = OneIsSlow(task(), WAYS[name], n_replicas=2, n_shards=2, host=host)
    cluster.run()
    assert cluster.values()["net.1.num_batches_tracked"].item() == pytest.approx(20, abs=1e-3)
    assert cluster.values()["threes"].item() == pytest.approx(60, abs=1e-3)


@both_data_paths
def test_the_averages_of_one_replica_are_those_of_one_process_however_it_exchanges(
    host: str,
) -> None:
    """With a rate so low that parameters hardly move, all see the same inputs."""
    ways: Sequence[DownpourSettings] = [
        replace(settings, rule=replace(settings.rule, learning_rate=1e-12))
        for name, settings in WAYS.items()
        if name != "local steps"
    ]
    found = [run(settings, n_replicas=1, host=host) for settings in ways]
    for values in found:
        for name in ("net.1.running_mean", "net.1.running_var", "last"):
            torch.testing.assert_close(values[name], found[1][name], rtol=1e-6, atol=1e-6)
