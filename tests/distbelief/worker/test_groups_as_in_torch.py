"""Groups of parameters by patterns, of inner optimizers and of rules: against torch's own groups.

200 steps, to the bit.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

from distbelief.config.load import parse_job
from distbelief.core.errors import JobError, SettingError
from distbelief.core.muon import Muon
from distbelief.job.launch import preflight
from distbelief.parameter_server.rules import SGD
from distbelief.serve.address import by_position, rule_from
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.inner_optimizer import InnerOptimizer
from tests.distbelief.jobs import small
from tests.distbelief.serve.loops import Server


N_STEPS = 200


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 3))


def points() -> TensorDataset:
    return TensorDataset(torch.randn(9, 7), torch.zeros(9, dtype=torch.int64))


def groups_of(model: nn.Sequential, *, lr: float) -> list[dict[str, object]]:
    """As people write them for torch: no decay for biases and norms, another rate for the head."""
    first, norm, head = model
    return [
        {"params": [first.weight]},
        {"params": [first.bias, norm.weight, norm.bias, head.bias], "weight_decay": 0.0},
        {"params": [head.weight], "lr": lr},
    ]


TABLE = {"*.bias": {"weight_decay": 0.0}, "1.*": {"weight_decay": 0.0}, "2.weight": {"lr": 0.02}}


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    inputs = torch.randn(16, 7, generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs[:, :3].sin())


def trained_plainly(make: Callable[[list[dict[str, object]]], Optimizer]) -> nn.Module:
    model, generator = net(), torch.Generator().manual_seed(1)
    optimizer = make(groups_of(model, lr=0.02))
    scheduler = lr_scheduler.StepLR(optimizer, 50, gamma=0.5)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(model, generator).backward()
        optimizer.step()
        scheduler.step()
    return model


def assert_bits(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("AdamW", lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)),
        ("SGD", lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.3)),
        ("Muon", lambda groups: Muon(groups, lr=0.1, weight_decay=0.3)),
    ],
)
def test_inner_groups_do_what_those_of_torch_do(
    name: str, make: Callable[[list[dict[str, object]]], Optimizer]
) -> None:
    model, generator = net(), torch.Generator().manual_seed(1)
    table = {
        "name": name,
        "lr": 0.1,
        "weight_decay": 0.3,
        "groups": TABLE,
        "schedule": {"name": "StepLR", "step_size": 50, "gamma": 0.5},
    }
    parameters = dict(model.named_parameters())
    inner = InnerOptimizer(
        table,
        {item: one.detach().view(-1) for item, one in enumerate(parameters.values())},
        shapes=[one.shape for one in parameters.values()],
        names=list(parameters),
    )
    for number in range(N_STEPS):
        model.zero_grad()
        loss_of(model, generator).backward()
        gradients = {
            item: one.grad.view(-1)
            for item, one in enumerate(parameters.values())
            if one.grad is not None
        }
        inner.step(gradients, number)
    assert_bits(model, trained_plainly(make))


def test_groups_of_a_rule_have_its_keys_but_for_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = {"name": "step", "n_pushes": 50, "decay": 0.5}
    table = {"name": "AdamW", "lr": 0.1, "weight_decay": 0.3, "schedule": schedule}
    rule = rule_from({**table, "groups": TABLE}, user="ParameterServer")
    model, generator = net(), torch.Generator().manual_seed(1)
    names = [name for name, _ in model.named_parameters()]
    server = Server(list(model.parameters()), rule=by_position(rule, names), n_shards=2)
    optimizer = server.optimizer(monkeypatch, model.parameters(), blocking=True)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        loss_of(model, generator).backward()
        optimizer.step()
    optimizer.finish()
    plain = trained_plainly(lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3))
    assert_bits(model, plain)


def test_a_job_file_completes_groups_without_a_name() -> None:
    rule = {
        "name": "sgd",
        "learning_rate": 0.1,
        "weight_decay": 0.5,
        "groups": {"*.bias": {"weight_decay": 0.0}, "2.*": {"name": "sgd", "learning_rate": 1.0}},
    }
    job = parse_job(small("m:net", "m:points", algorithm={"rule": rule}), path="job.toml")
    assert isinstance(job.algorithm, DownpourSettings)
    assert job.algorithm.rule.groups == {
        "*.bias": SGD(learning_rate=0.1),
        "2.*": SGD(learning_rate=1.0),
    }
    again = parse_job(job.to_toml(), path="job.toml")
    assert msgspec.to_builtins(again.algorithm) == msgspec.to_builtins(job.algorithm)


INNER = {"name": "SGD", "lr": 0.1}


def job_of(tmp_path: Path, groups: object) -> None:
    algorithm = {
        "rule": {"name": "sgd", "learning_rate": 1.0},
        "inner": {**INNER, "groups": groups},
        "exchange": {"send": "delta", "every": 4},
    }
    text = small(f"{__name__}:net", f"{__name__}:points", algorithm=algorithm)
    job = parse_job(text, path=tmp_path / "job.toml")
    preflight.answer_to(job, initial_file=str(tmp_path / "initial.safetensors"), plan="")


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ({"*.bias": {"weigth_decay": 0.0}}, "groups '\\*.bias': SGD has no keyword 'weigth_decay'"),
        ({"*.bias": {"weight_decay": -1.0}}, "groups '\\*.bias': Invalid weight_decay"),
        ({"*.bias": {"name": "AdamW"}}, "has a name or schedule: all groups have the same"),
        ({"*.bais": {"lr": 0.0}}, r"inner\.groups has '\*\.bais', and no parameter's name is like"),
        (["*.bias"], "groups is .*; use a table of patterns and keywords"),
    ],
)
def test_wrong_inner_groups_are_refused(tmp_path: Path, groups: object, text: str) -> None:
    with pytest.raises(JobError, match=text):
        job_of(tmp_path, groups)


def test_right_inner_groups_pass_the_check(tmp_path: Path) -> None:
    job_of(tmp_path, {"*.bias": {"lr": 0.0}})


def test_a_wrong_group_of_a_rule_is_refused() -> None:
    for groups, text in (
        ({"*.bias": {"weigth_decay": 0.0}}, "weigth_decay"),
        ({"*.bias": 3}, "groups"),
    ):
        with pytest.raises((JobError, SettingError), match=text):
            rule_from({"name": "sgd", "learning_rate": 0.1, "groups": groups}, user="Server")
