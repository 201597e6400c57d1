"""Replicas that compute on a device: the same bits as in the host's memory.

"cpu:0" stands in for a GPU: the module has tensors of its own, to which values are copied before
each step, and from which gradients and buffers come back.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.task.task import BuildContext, ModelSpec, TaskSpec
from distbelief.worker.downpour_settings import DownpourSettings
from tests.simulation.test_buffers import Counting, task
from tests.simulation.test_downpour import Cluster, downpour


class Dropping(Counting):
    """Draws in its forward pass, too."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


def dropping(*, width: int = 40) -> torch.nn.Module:
    return Dropping(width=width)


@dataclass(eq=False)
class Elsewhere(Cluster):
    """Replicas and evaluator compute on a device."""

    @override
    def context(self, memory: Memory, task: TaskSpec | None = None) -> BuildContext:
        return dataclasses.replace(super().context(memory, task), device="cpu:0")


DELTAS = ExchangePolicy(send="delta", every=4, weight="mean")
LOCAL = replace(downpour(max_steps=12), exchange=DELTAS, inner={"name": "AdamW", "lr": 0.01})


@pytest.mark.parametrize(
    "settings",
    [
        downpour(max_steps=12),
        downpour(max_steps=12, n_push=3, n_fetch=2),
        replace(downpour(max_steps=12), clip_norm=0.1),
        LOCAL,
    ],
    ids=["every step", "sums", "clipped", "local steps"],
)
def test_the_bits_are_those_of_the_host(settings: DownpourSettings) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for kind in (Cluster, Elsewhere):
        model = ModelSpec(factory=f"{__name__}:dropping", initial="seed")
        cluster = kind(replace(task(), model=model), settings, n_replicas=2, n_shards=2, host="a")
        cluster.run()
        found.append(cluster.values())
    expected, values = found
    assert expected.keys() == values.keys()
    assert expected["net.1.num_batches_tracked"] > 0
    for name, value in expected.items():
        assert torch.equal(value, values[name]), name
