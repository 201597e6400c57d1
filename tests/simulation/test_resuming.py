"""A job that resumes with another number of shards gives the same result."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from torch import nn

from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.resume import reshard_all
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.rules import SGD, Adagrad, Adam, Momentum, UpdateRule
from distbelief.protocol import SaveCheckpoint, SessionRecord
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec
from distbelief.worker.downpour_settings import DownpourSettings
from tests.simulation.test_downpour import Cluster, downpour, same


EXAMPLES = "tests.distbelief.examples"
RULES: tuple[UpdateRule, ...] = (
    SGD(learning_rate=0.1),
    Momentum(learning_rate=0.05),
    Adagrad(learning_rate=0.05),
    Adam(learning_rate=0.01),
    msgspec.convert({"name": "NAdam", "lr": 0.01}, UpdateRule),
)


def normed_net() -> nn.Module:
    """Return a net with tensors that are split, tensors that are not, and buffers of both kinds."""
    return nn.Sequential(nn.Linear(40, 200), nn.BatchNorm1d(200), nn.Tanh(), nn.Linear(200, 2))


TASK = TaskSpec(
    model=ModelSpec(factory="tests.simulation.test_resuming:normed_net", initial="seed", seed=3),
    train=DataSpec(factory=f"{EXAMPLES}:frames", arguments={"width": 40, "n_samples": 60}),
    loss="cross_entropy",
)


def trained(
    settings: DownpourSettings, n_shards: int, *, begin: CheckpointStore | None = None
) -> Cluster:
    """Run one replica to its end, from these checkpoints if there are any."""
    cluster = Cluster(TASK, settings, n_shards=n_shards)
    for name in cluster.shards if begin is not None else ():
        assert begin is not None
        snapshot = begin.newest(name)
        assert snapshot is not None
        # A new simulation counts incarnations from 1.
        facts = {**snapshot.facts, "incarnation": "0"}
        cluster.cluster.disk.save(name, replace(snapshot, facts=facts))
    cluster.run()
    return cluster


def saved(cluster: Cluster, store: CheckpointStore) -> CheckpointStore:
    """Let every shard save a checkpoint into `store`."""
    for name in cluster.shards:
        cluster.tell(name, SaveCheckpoint(label="00007"))
    cluster.wait(1.0)
    for name in cluster.shards:
        store.save(name, cluster.newest(name))
    return store


def fail(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.each_value
@pytest.mark.parametrize("n_new", [1, 3])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_one_blocking_replica_on_other_shards_goes_on_to_the_bit(
    tmp_path: Path, rule: UpdateRule, n_new: int
) -> None:
    first, rest, whole = (downpour(rule=rule, blocking=True, max_steps=n) for n in (22, 23, 45))
    before = trained(first, 2)
    source = saved(before, CheckpointStore(tmp_path / "old", report=fail))
    target = CheckpointStore(tmp_path / "new", report=fail)
    new = Layout.of(before.layout.tensors, n_shards=n_new)
    clients = (SessionRecord(name="replica-0", incarnation=1, samples=22 * 4),)
    old = before.layout
    reshard_all(source, target, old=old, new=new, rule=rule, label="00008", clients=clients)
    after = trained(rest, n_new, begin=target)
    assert after.status("replica-0")["samples"] == 45 * 4
    assert {after.status(name)["clock"] for name in after.shards} == {45.0}
    assert same(after.values(), trained(whole, 2).values())
