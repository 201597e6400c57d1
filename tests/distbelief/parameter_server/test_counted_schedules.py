"""Schedules in epochs, samples or steps of all replicas, and those of torch and transformers."""

from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.optim import lr_scheduler

import distbelief
from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import SGD, TORCH_RULES
from distbelief.parameter_server.schedules import Schedule
from distbelief.parameter_server.shard import Shard
from distbelief.task.data import BatchCursor, DataShard
from distbelief.task.task import BuildContext
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.jobs import small
from tests.simulation.jobs import TASK


def torchs(scheduler: lr_scheduler.LRScheduler, n: int) -> list[float]:
    found = []
    for _ in range(n):
        found.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return found


def rated() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize(
    ("schedule", "scheduler"),
    [
        (distbelief.Linear(n_pushes=150), lr_scheduler.LinearLR(rated(), 1.0, 0.0, 150)),
        (
            distbelief.Linear(n_pushes=150, floor=0.25),
            lr_scheduler.LinearLR(rated(), 1.0, 0.25, total_iters=150),
        ),
        (distbelief.Step(n_pushes=30, decay=0.1), lr_scheduler.StepLR(rated(), 30, 0.1)),
        (distbelief.Exponential(n_pushes=1, decay=0.99), lr_scheduler.ExponentialLR(rated(), 0.99)),
        (distbelief.Cosine(n_pushes=199), lr_scheduler.CosineAnnealingLR(rated(), 199)),
        (
            distbelief.Constant(n_warm_up=20),
            lr_scheduler.LinearLR(rated(), 1 / 20, 1.0, total_iters=19),
        ),
    ],
)
def test_a_schedule_is_what_torch_calls_it(
    schedule: Schedule, scheduler: lr_scheduler.LRScheduler
) -> None:
    """Torch multiplies the last rate by a quotient, so its last digits differ."""
    found = [schedule.factor(clock) for clock in range(200)]
    assert found == pytest.approx(torchs(scheduler, 200), rel=1e-9, abs=1e-9)


def settings(schedule: dict[str, object], **keys: object) -> DownpourSettings:
    rule = {"name": "sgd", "learning_rate": 0.1, "schedule": schedule}
    text = small("m:net", "m:points", algorithm={"rule": rule, **keys})
    job = parse_job(text, path="job.toml")
    assert isinstance(job.algorithm, DownpourSettings)
    again = parse_job(job.to_toml(), path="job.toml")  # as it is stored
    assert again.algorithm == job.algorithm
    return job.algorithm


@pytest.mark.parametrize(
    ("count", "n_push", "n_pushes"),
    [
        ("3 epochs", 1, 39),  # 100 samples, 8 of each step, 4 of the last one
        ("3 epochs", 2, 21),
        ("3 epochs", 100, 3),  # an epoch ends its push
        ("0.5 epochs", 1, 6),
        ("50000 samples", 1, 6500),
        ("50000 samples", 100, 500),
        ("2000 steps", 1, 2000),
        ("2600 steps", 4, 800),
        ("1 sample", 4, 1),
        (12, 4, 12),
    ],
)
def test_epochs_samples_and_steps_become_pushes(count: object, n_push: int, n_pushes: int) -> None:
    found = settings(
        {"name": "cosine", "n_pushes": count, "n_warm_up": "80 samples"}, n_push=n_push
    )
    schedule = found.in_pushes(100, n_replicas=1).rule.schedule
    assert isinstance(schedule, distbelief.Cosine)
    n_warm_up = {1: 10, 2: 5, 4: 3, 100: 1}[n_push]
    assert (schedule.n_pushes, schedule.n_warm_up) == (n_pushes, n_warm_up)


@given(
    n_train=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    n_push=st.integers(1, 9),
    n_epochs=st.integers(1, 4),
    n_replicas=st.integers(1, 3),
)
@pytest.mark.parametrize("order", ["dealt", "parts"])
def test_epochs_have_as_many_pushes_as_replicas_send(
    *, n_train: int, batch_size: int, n_push: int, n_epochs: int, n_replicas: int, order: str
) -> None:
    """An epoch of less than a push, or with a short one, was taken for a part of one.

    With 100 samples in steps of 64 and n_push = 4 a schedule over "10 epochs" ended after four.
    """
    rule = SGD(learning_rate=0.1, schedule=distbelief.Linear(n_pushes=f"{n_epochs} epochs"))
    found = DownpourSettings(
        loss="mse", batch_size=batch_size, n_push=n_push, rule=rule, order=cast("Any", order)
    )
    n_each = 0
    if order == "dealt":
        epochs, position = found.epochs(n_train), 0
        while position < n_epochs * n_train:
            position, n_each = epochs.stop(position), n_each + 1
    else:  # all steps, whatever their epoch
        n_steps = 0
        for replica in range(n_replicas):
            cursor = BatchCursor(
                part := DataShard(n_train, replica_index=replica, n_replicas=n_replicas, seed=0)
            )
            position = 0
            while position < n_epochs * len(part):
                position, n_steps = position + len(cursor.batch(position, batch_size)), n_steps + 1
        n_each = max(1, round(n_steps / n_push))
    schedule = found.in_pushes(n_train, n_replicas=n_replicas).rule.schedule
    assert isinstance(schedule, distbelief.Linear)
    assert schedule.n_pushes == pytest.approx(n_each, abs=0 if order == "dealt" else 1)


@pytest.mark.parametrize("name", sorted(TORCH_RULES))
def test_a_rule_by_torch_counts_in_data_as_well(name: str) -> None:
    """Its check took steps at the rate of a schedule that no job had counted yet, and failed."""
    schedule = {"name": "cosine", "n_pushes": "1 epoch", "n_warm_up": "3 steps"}
    table = {"name": name, "lr": 0.1, "schedule": schedule, "groups": {"b": {"lr": 0.01}}}
    text = small("m:net", "m:points", algorithm={"rule": table})
    found = parse_job(text, path="job.toml").algorithm
    assert isinstance(found, DownpourSettings)
    rule = found.in_pushes(80, n_replicas=1).rule
    known = msgspec.convert(
        {"name": name, "lr": 0.1, "schedule": {**schedule, **KNOWN}}, TORCH_RULES[name]
    )
    for one, lr in ((rule, 0.1), (rule.groups["b"], 0.01)):
        expected = msgspec.structs.replace(known, learning_rate=lr)
        assert one.schedule == expected.schedule
        after = []
        for each in (one, expected):
            w, state = np.ones(64, np.float32), each.state(64, np.float32)
            for clock in range(6):
                each.apply(w, np.full(64, 0.5 - clock, np.float32), state, clock=clock)
            after.append(w)
        assert np.array_equal(after[0], after[1])


KNOWN = {"n_pushes": 10, "n_warm_up": 3}


def test_an_epoch_that_ends_early_has_fewer_pushes() -> None:
    found = settings({"name": "linear", "n_pushes": "4 epochs"}, epoch_share=0.75)
    schedule = found.in_pushes(80, n_replicas=2).rule.schedule
    assert schedule == distbelief.Linear(n_pushes=30)  # of 40


def test_the_shards_of_a_job_count_in_its_data() -> None:
    rule = SGD(
        learning_rate=0.1,
        schedule=distbelief.Linear(n_pushes="2 epochs"),
        groups={"b": SGD(learning_rate=1.0, schedule=distbelief.Cosine(n_pushes="1 epoch"))},
    )
    context = BuildContext(
        task=TASK,
        layout=Layout.of([TensorSpec(name=name, shape=(3,)) for name in "ab"], n_shards=1),
        n_replicas=1,
        n_shards=1,
        seed=0,
        memory=PrivateMemory(),
        n_train=60,
    )
    config = DownpourSettings(loss="mse", batch_size=6, rule=rule)
    shard = DOWNPOUR.build("shard-0", config=config, context=context)
    assert isinstance(shard, Shard)
    found = shard._config.rule
    assert found.schedule == distbelief.Linear(n_pushes=20)
    assert found.groups["b"].schedule == distbelief.Cosine(n_pushes=10)


@pytest.mark.parametrize("count", ["3 weeks", "epochs", "-1 epochs", "0 epochs", 0, 1.5, True])
def test_what_is_no_count_is_refused(count: object) -> None:
    with pytest.raises(JobError, match="n_pushes"):
        settings({"name": "cosine", "n_pushes": count})


@pytest.mark.parametrize(
    "exchange",
    [
        {"round": {"quorum": 0.5}, "weight": "mean"},
        {"route": "ring", "round": {}, "staleness": 0, "weight": "mean"},
        {"every": "auto", "send": "delta"},
    ],
)
def test_a_count_is_refused_where_pushes_have_no_known_length(exchange: dict[str, object]) -> None:
    text = "rule.schedule has '3 epochs', and .*: give the schedule numbers of pushes"
    with pytest.raises(JobError, match=text):
        settings(
            {"name": "cosine", "n_pushes": "3 epochs"},
            exchange=exchange,
            **({"inner": {"name": "SGD", "lr": 0.1}} if "send" in exchange else {}),
        )


def test_a_server_without_data_refuses_a_count() -> None:
    rule = SGD(learning_rate=0.1, schedule=distbelief.Cosine(n_pushes="3 epochs"))
    with pytest.raises(
        JobError, match="'3 epochs': a server does not know the data of its workers"
    ):
        distbelief.ParameterServer([nn.Parameter(torch.zeros(1))], rule=rule)
