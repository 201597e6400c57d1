"""[algorithm] accumulate: jobs whose push is the mean of several gradients, against plain torch."""

import msgspec
import pytest
import torch
from torch.nn import functional
from torch.optim import Optimizer

from distbelief.parameter_server.rules import UpdateRule
from distbelief.task.data import BatchCursor, DataShard
from distbelief.task.task import build_dataset, build_model
from distbelief.worker.downpour_settings import DownpourSettings
from tests.simulation.test_downpour import (
    COUNTING,
    LEARNING,
    Cluster,
    both_data_paths,
    downpour,
    drawn,
    same,
)


N_PUSHES = 80


def rule_of(table: dict[str, object]) -> UpdateRule:
    rule: UpdateRule = msgspec.convert(table, UpdateRule)
    return rule


def settings(
    accumulate: int, table: dict[str, object], *, max_steps: int, norm: float | None = None
) -> DownpourSettings:
    plain = downpour(rule=rule_of(table), max_steps=max_steps)
    return msgspec.structs.replace(plain, accumulate=accumulate, clip_norm=norm)


def accumulated(
    optimizer_of: type[Optimizer],
    lr: float,
    k: int,
    n_steps: int,
    *,
    norm: float | None = None,
    bound: float | None = None,
) -> dict[str, torch.Tensor]:
    """Return what torch's own accumulation learns: k backward passes of loss / k, and a step."""
    module = build_model(LEARNING.model)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in drawn(LEARNING).items():
            parameters[name].copy_(value.view_as(parameters[name]))
    optimizer = optimizer_of(parameters.values(), lr=lr)  # type: ignore[call-arg]  # all have it
    dataset, position = build_dataset(LEARNING.train), 0
    cursor = BatchCursor(DataShard(len(dataset), replica_index=0, n_replicas=1, seed=0))
    for step in range(n_steps):
        indices = cursor.batch(position, 4)
        position += len(indices)
        samples = [dataset[i] for i in indices]
        inputs, targets = torch.utils.data.default_collate(samples)
        n = min(k, n_steps - step // k * k)  # the last mean may be of fewer
        (functional.cross_entropy(module(inputs), targets) / n).backward()
        if step % k == k - 1 or step == n_steps - 1:
            if norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), norm)
            if bound is not None:
                torch.nn.utils.clip_grad_value_(module.parameters(), bound)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().view(-1) for name, value in parameters.items()}


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_mean_of_four_batches_has_the_bits_of_torchs_accumulation(name: str, host: str) -> None:
    job = settings(4, {"name": name, "lr": 0.05}, max_steps=4 * N_PUSHES)
    cluster = Cluster(LEARNING, job, host=host)
    cluster.run()
    expected = accumulated(getattr(torch.optim, name), 0.05, 4, 4 * N_PUSHES)
    assert same(cluster.values(), expected)
    counters = cluster.counters(0)
    assert (counters.pushes, counters.gradients) == (N_PUSHES, 4 * N_PUSHES)
    assert counters.local_steps == 0
    assert counters.fetches <= N_PUSHES + 1


def test_of_three_batches_it_differs_in_the_last_digits() -> None:
    """Torch multiplies the loss by 1/3, here the sum is divided by 3: each rounds by itself."""
    job = settings(3, {"name": "SGD", "lr": 0.05}, max_steps=100)
    cluster = Cluster(LEARNING, job)
    cluster.run()
    expected = accumulated(torch.optim.SGD, 0.05, 3, 100)
    for name, value in cluster.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


def test_the_norm_of_the_mean_is_bounded_as_torch_bounds_it() -> None:
    """Some means are within the bound, and some are not."""
    job = settings(4, {"name": "SGD", "lr": 0.05}, max_steps=4 * N_PUSHES, norm=0.3)
    cluster = Cluster(LEARNING, job, n_shards=2)
    cluster.run()
    expected = accumulated(torch.optim.SGD, 0.05, 4, 4 * N_PUSHES, norm=0.3)
    for name, value in cluster.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    unbounded = accumulated(torch.optim.SGD, 0.05, 4, 4 * N_PUSHES)
    assert not same(expected, unbounded)


@pytest.mark.parametrize("k", [1, 4])
def test_values_are_bounded_as_torch_bounds_them(k: int) -> None:
    table: dict[str, object] = {"name": "SGD", "lr": 0.05, "clip_value": 0.05}
    job = msgspec.structs.replace(settings(k, table, max_steps=k * N_PUSHES), blocking=True)
    cluster = Cluster(LEARNING, job)
    cluster.run()
    expected = accumulated(torch.optim.SGD, 0.05, k, k * N_PUSHES, bound=0.05)
    assert same(cluster.values(), expected)
    assert not same(expected, accumulated(torch.optim.SGD, 0.05, k, k * N_PUSHES))


def test_several_replicas_and_shards_lose_nothing() -> None:
    """Each sample's gradient is its inputs: the sum of means over four, four times, is exact."""
    found = []
    for k in (1, 4):
        job = settings(k, {"name": "sgd", "learning_rate": float(k)}, max_steps=20)
        cluster = Cluster(COUNTING, job, n_replicas=2, n_shards=3)
        cluster.run()
        found.append(cluster.values())
    assert same(*found)


@pytest.mark.parametrize(
    "keys",
    [
        {"n_push": 2},
        {"exchange": {"send": "delta", "every": 4}, "inner": {"name": "SGD", "lr": 0.1}},
        {"lockfree": {"threads": 2}},
        {"local_learning_rate": 0.1},
    ],
)
def test_what_says_otherwise_is_refused(keys: dict[str, object]) -> None:
    table = {"loss": "mse", "batch_size": 4, "rule": {"name": "sgd", "learning_rate": 0.1}}
    with pytest.raises(msgspec.ValidationError, match=r"accumulate is 4, and there is .*: leave"):
        msgspec.convert({**table, "accumulate": 4, **keys}, DownpourSettings)
