"""Schedules in epochs, samples or steps of all replicas, and those of torch and transformers."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import distbelief
from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.schedules import Schedule
from distbelief.parameter_server.shard import Shard
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
        ("3 epochs", 1, 38),  # 300 samples, 8 of each push
        ("3 epochs", 2, 19),
        ("0.5 epochs", 1, 6),
        ("50000 samples", 1, 6250),
        ("2000 steps", 1, 2000),
        ("2000 steps", 4, 500),
        ("1 sample", 4, 1),
        (12, 4, 12),
    ],
)
def test_epochs_samples_and_steps_become_pushes(count: object, n_push: int, n_pushes: int) -> None:
    found = settings(
        {"name": "cosine", "n_pushes": count, "n_warm_up": "80 samples"}, n_push=n_push
    )
    schedule = found.in_pushes(100).rule.schedule
    assert isinstance(schedule, distbelief.Cosine)
    assert (schedule.n_pushes, schedule.n_warm_up) == (n_pushes, math.ceil(10 / n_push - 0.5))


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
