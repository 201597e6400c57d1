"""Downpour as a plug-in: table, roster, roles."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from distbelief.config.job import ClusterTable, Elastic
from distbelief.core.errors import JobError, LocalProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.core.tensor_files import TensorFile
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Adagrad
from distbelief.parameter_server.shard import Shard
from distbelief.protocol.role import Compute, Role, Started
from distbelief.task.task import BuildContext, DataSpec, ModelSpec, TaskSpec, build_model
from distbelief.worker import build as wb
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.evaluator import Evaluation
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.replica import Replica
from distbelief.worker.training import Training
from tests.distbelief.examples import HERE, initials_of
from tests.distbelief.parameter_server.pair import scatter


SETTINGS = DownpourSettings(loss="cross_entropy", batch_size=4, rule=SGD(learning_rate=0.1))


USUAL = {
    "loss": "cross_entropy",
    "batch_size": 256,
    "n_push": 5,
    "warm_start_steps": 200,
    "rule": {"name": "adagrad", "learning_rate": 0.02},
}


def test_the_table_of_a_job_file_is_read() -> None:
    settings = msgspec.convert(USUAL, DOWNPOUR.config)
    assert settings.rule == Adagrad(learning_rate=0.02)
    assert settings.n_push == 5
    assert settings.batch_size == 256
    # A stated local rate lets an adaptive rule have local steps.
    msgspec.convert(USUAL | {"n_fetch": 5, "local_learning_rate": 0.01}, DOWNPOUR.config)


DELTA = {"rule": {"name": "sgd", "learning_rate": 1}, "exchange": {"send": "delta"}}


@pytest.mark.parametrize(
    ("table", "claim"),
    [
        ({"n_pushes": 3}, "n_pushes"),
        ({"n_push": 0}, "n_push is 0; use 1 or more"),
        ({"batch_size": 0}, "batch_size is 0; use 1 or more"),
        ({"warm_start_steps": -1}, "warm_start_steps is -1; use 0 or more"),
        ({"seed": -1}, "seed is -1; use 0 or more"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; use a number above 0"),
        ({"local_learning_rate": 0.0}, "local_learning_rate is 0.0; use a number"),
        ({"rule": {"name": "sgd", "learning_rate": 0}}, "rule 'sgd': learning_rate is 0; use"),
        (DELTA | {"inner": {"name": "SGD", "lr": 0}}, "inner.lr is 0: no local step would move"),
        (DELTA | {"inner": {"name": "SGD", "lr": "fast"}}, "torch does not accept lr = 'fast':"),
        (DELTA | {"inner": {"name": "SGD", "lrr": 1}}, "inner SGD has no keyword 'lrr'"),
        ({"n_fetch": 5}, "n_fetch is 5 and rule 'adagrad' adapts its rate on the shar"),
        ({"n_fetch": 5}, "give local_learning_rate, or use n_fetch = 1"),
    ],
)
def test_a_mistake_in_the_table_is_named(table: dict[str, object], claim: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(USUAL | table, DOWNPOUR.config)
    assert claim in str(caught.value)


def test_the_roster_has_shards_first() -> None:
    roster = wb.roster(n_replicas=2, n_shards=2)
    assert roster == [
        ("shard-0", "shard"),
        ("shard-1", "shard"),
        ("replica-0", "replica"),
        ("replica-1", "replica"),
        ("evaluator", "evaluator"),
    ]
    # Without test data there is no evaluator.
    roster = wb.roster(n_replicas=1, n_shards=1, evaluates=False)
    assert [entry.kind for entry in roster] == ["shard", "replica"]


def test_the_copies_of_a_shard_come_together() -> None:
    roster = wb.roster(n_replicas=1, n_shards=2, shard_copies=2)
    names = [entry.name for entry in roster if entry.kind == "shard"]
    assert names == ["shard-0", "shard-0b", "shard-1", "shard-1b"]
    for entry in roster:
        build(entry.name, context(shard_copies=2))
    with pytest.raises(LocalProtocolError, match="no role 'shard-0b' in a job"):
        build("shard-0b", context())


def context(
    *, shard_copies: int = 1, test: bool = True, initial_file: TensorFile | None = None
) -> BuildContext:
    data = DataSpec(factory=f"{HERE}:frames")
    task = TaskSpec(
        model=ModelSpec(factory=f"{HERE}:net", seed=7),
        train=data,
        test=data if test else None,
        loss="cross_entropy",
    )
    model = FlatModel(build_model(task.model))
    return BuildContext(
        task=task,
        layout=Layout.of(model.specs(), n_shards=2),
        n_replicas=2,
        n_shards=2,
        shard_copies=shard_copies,
        seed=0,
        memory=PrivateMemory(),
        initials=initials_of(model.module),
        initial_file=initial_file,
    )


def build(name: str, context: BuildContext) -> Role:
    return DOWNPOUR.build(name, config=SETTINGS, context=context)


def test_a_replica_with_other_data_than_the_job_is_rejected() -> None:
    """Regression: a host that joined had 1,500 of 2,000 samples and trained without a warning."""
    built = context()
    n_train = len(built.train_data())
    build("replica-0", replace(built, n_train=n_train))
    other = replace(built, n_train=n_train + 1)
    with pytest.raises(JobError, match=rf"has {n_train} samples here but {n_train + 1}"):
        build("replica-0", other)


def test_every_role_of_the_roster_can_be_built() -> None:
    programs = {"replica": Training, "evaluator": Evaluation}
    for entry in wb.roster(n_replicas=2, n_shards=2):
        role = build(entry.name, context())
        if entry.kind == "shard":
            assert isinstance(role, Shard)
        else:
            assert isinstance(role, Replica)
            assert isinstance(role.program, programs[entry.kind])


def test_what_does_not_fit_the_job_is_rejected() -> None:
    for name in ("shard-2", "replica-x", "coordinator", "evaluator-0"):
        with pytest.raises(LocalProtocolError, match=f"no role '{name}' in a job of 2 sh"):
            build(name, context())
    with pytest.raises(JobError, match=r"needs held-out data: give \[data.test\]"):
        build("evaluator", context(test=False))


def test_a_shard_begins_with_the_values_of_the_file(tmp_path: Path) -> None:
    model = FlatModel(build_model(context().task.model))
    path = tmp_path / "initial.safetensors"
    save_file(dict(model.named_tensors()), path)
    found = [torch.zeros_like(value) for value in model.values]
    layout = context().layout
    assert layout is not None
    for k in range(2):
        shard = build(f"shard-{k}", context(initial_file=TensorFile.at(path)))
        for action in shard.handle(Started(incarnation=1), 0.0):
            if isinstance(action, Compute):
                action.work()
        assert isinstance(shard, Shard)
        scatter(layout, k, shard.values.vector, found)
    for got, value in zip(found, model.values, strict=True):
        assert torch.equal(got, value)


RING = ExchangePolicy(staleness=0, round=Round(), weight="mean", route="ring")


@pytest.mark.parametrize(
    ("changes", "cluster", "said"),
    [
        ({}, {"partitions": 2}, "[cluster] splits replicas into ranks"),
        ({}, {"replicas": Elastic(min=1, max=3)}, "[cluster] replicas has min and max"),
        ({"order": "dealt"}, {}, '[algorithm] order is "dealt"'),
        ({"warm_start_steps": 5}, {}, "[algorithm] has warm_start_steps"),
        ({"max_steps": 5}, {}, "[algorithm] has max_steps"),
    ],
)
def test_what_a_ring_does_not_know_is_refused_with_the_way_out(
    changes: dict[str, object], cluster: dict[str, object], said: str
) -> None:
    settings = msgspec.structs.replace(SETTINGS, exchange=RING, **changes)
    table = ClusterTable(**{"replicas": 2, **cluster})  # type: ignore[arg-type]
    with pytest.raises(JobError) as caught:
        DOWNPOUR.settled(settings, table)
    assert f'route is "ring" and {said}' in str(caught.value)
    assert str(caught.value).endswith('or use route = "server"')


def test_replicas_in_a_ring_have_parts_and_shards_hold_commits_only() -> None:
    settings = msgspec.structs.replace(SETTINGS, exchange=RING)
    settled = DOWNPOUR.settled(settings, ClusterTable(replicas=2))
    assert settled.order == "parts"
    assert DOWNPOUR.facts(settled).in_ring
    assert not wb.policy_of_shards(RING).counts_ticks
