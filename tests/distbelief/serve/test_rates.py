"""Learning rates of a loop's own: they go with its pushes, and torch's schedulers change them.

Each against plain torch, one loop and one or more shards, to the bit.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import distbelief
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import TORCH_RULES, UpdateRule
from distbelief.parameter_server.schedules import Exponential
from distbelief.simulation.trace import SimulationFailed
from tests.distbelief.serve.loops import Server


RATE = 0.1
N_STEPS = 100


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def train(
    model: nn.Module, optimizer: Optimizer, scheduler: object = None, n: int = N_STEPS
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        inputs = torch.randn(16, 7, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :3].sin())
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(loss.detach()))
        elif isinstance(scheduler, lr_scheduler.LRScheduler):
            scheduler.step()


def assert_bits(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def torch_rule(name: str, **keywords: object) -> UpdateRule:
    return TORCH_RULES[name](**keywords)  # type: ignore[arg-type]  # as each class documents


def _numpys(step: int) -> Any:  # noqa: ANN401 -- which torch takes, whatever its types say
    return np.float32(0.99) ** step


SCHEDULERS: dict[str, Callable[[Optimizer], object]] = {
    "nothing": lambda one: lr_scheduler.LambdaLR(one, lambda _step: 1.0),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: min(step, 50) / 50),
    "numpy": lambda one: lr_scheduler.LambdaLR(one, _numpys),
    "step": lambda one: lr_scheduler.StepLR(one, 10, gamma=0.9),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, N_STEPS),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(
        one, 0.2, total_steps=N_STEPS + 1, cycle_momentum=False
    ),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 0.05, 0.2, cycle_momentum=False),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=3),
    "warm-up, then cosine": lambda one: lr_scheduler.SequentialLR(
        one,
        [lr_scheduler.LinearLR(one, 0.01, total_iters=20), lr_scheduler.CosineAnnealingLR(one, 60)],
        milestones=[20],
    ),
}


@pytest.mark.parametrize(
    ("name", "n_shards"), [*((name, 3) for name in SCHEDULERS), ("cosine", 1), ("plateau", 1)]
)
def test_a_scheduler_of_torch_does_what_it_does_to_a_local_optimizer(
    monkeypatch: pytest.MonkeyPatch, name: str, n_shards: int
) -> None:
    plain, model = net(), net()
    local = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=0.9)
    train(plain, local, SCHEDULERS[name](local))
    rule = torch_rule("SGD", learning_rate=7.0, momentum=0.9)  # a rate that never counts
    server = Server(list(model.parameters()), rule=rule, n_shards=n_shards)
    optimizer = server.optimizer(monkeypatch, model.parameters(), lr=RATE, blocking=True)
    train(model, optimizer, SCHEDULERS[name](optimizer))
    optimizer.finish()
    assert_bits(model, plain)


RULES: dict[str, tuple[UpdateRule, Callable[..., Optimizer]]] = {
    "AdamW": (
        torch_rule("AdamW", learning_rate=1.0, weight_decay=0.1),
        lambda groups: torch.optim.AdamW(groups, lr=RATE, weight_decay=0.1),
    ),
    "NAdam": (
        torch_rule("NAdam", learning_rate=1.0),
        lambda groups: torch.optim.NAdam(groups, lr=RATE),
    ),
    "RMSprop": (
        torch_rule("RMSprop", learning_rate=1.0),
        lambda groups: torch.optim.RMSprop(groups, lr=RATE),
    ),
    "Rprop": (
        torch_rule("Rprop", learning_rate=1.0),
        lambda groups: torch.optim.Rprop(groups, lr=RATE),
    ),
    "SGD": (
        torch_rule("SGD", learning_rate=1.0, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        distbelief.Adagrad(learning_rate=1.0),
        lambda groups: torch.optim.Adagrad(groups, lr=RATE, fused=True),
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("host", ["host-0", ""])
def test_groups_with_rates_of_their_own_do_what_they_do_in_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, host: str
) -> None:
    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": model[2].parameters(), "lr": 0.02}, {"params": model[0].parameters()}]

    plain, model = net(), net()
    rule, make = RULES[name]
    local = make(groups(plain))
    train(plain, local, lr_scheduler.ExponentialLR(local, 0.99))
    # The order of the groups is not that of the server: names decide.
    names = [name for name, _ in model.named_parameters()]
    server = Server(list(model.parameters()), rule=rule, names=names, host=host)
    named = [
        {**group, "params": [(f"{index}.{n}", p) for n, p in model[index].named_parameters()]}
        for index, group in zip((2, 0), groups(model), strict=True)
    ]
    optimizer = server.optimizer(monkeypatch, named, lr=RATE, blocking=True)
    train(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.99))
    optimizer.finish()
    assert_bits(model, plain)


def test_the_rates_of_groups_meet_rules_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules, two rates: biases momentum, weights SGD; the second layer slower."""
    plain, model = net(), net()
    first, last = plain[0], plain[2]
    local = torch.optim.SGD(
        [
            {"params": [first.weight], "lr": RATE},
            {"params": [first.bias], "lr": RATE, "momentum": 0.9},
            {"params": [last.weight], "lr": 0.01},
            {"params": [last.bias], "lr": 0.01, "momentum": 0.9},
        ]
    )
    train(plain, local)
    momentum = torch_rule("SGD", learning_rate=1.0, momentum=0.9)
    groups = dict.fromkeys(("000001", "000003"), momentum)
    rule = torch_rule("SGD", learning_rate=1.0, groups=groups)
    server = Server(list(model.parameters()), rule=rule, n_shards=2)
    given = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = server.optimizer(monkeypatch, given, lr=RATE, blocking=True)
    train(model, optimizer)
    optimizer.finish()
    assert_bits(model, plain)


def test_the_schedule_of_the_rule_multiplies_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [net(), net()]
    schedule = Exponential(n_pushes=10, decay=0.5)
    for model, lr, learning_rate in ((models[0], RATE, 3.0), (models[1], None, RATE)):
        rule = distbelief.SGD(learning_rate=learning_rate, schedule=schedule)
        server = Server(list(model.parameters()), rule=rule)
        optimizer = server.optimizer(monkeypatch, model.parameters(), lr=lr, blocking=True)
        train(model, optimizer, n=20)
        optimizer.finish()
    assert_bits(*models)


def test_each_worker_has_its_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1, bias=False)
    server = Server(list(model.parameters()), rule=distbelief.SGD(learning_rate=1.0), n_loops=3)
    start = model.weight.detach().flatten().clone()
    for lr in (0.5, 0.25, None):
        own = copy.deepcopy(model)
        optimizer = server.optimizer(monkeypatch, own.parameters(), lr=lr)
        own.weight.grad = torch.ones(1, 1)
        optimizer.step()
        optimizer.finish()
    assert torch.equal(server.values()[0], start - 0.5 - 0.25 - 1.0)


def test_a_rate_of_0_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    before = copy.deepcopy(model)
    server = Server(list(model.parameters()), rule=distbelief.SGD(learning_rate=1.0))
    optimizer = server.optimizer(monkeypatch, model.parameters(), lr=0.0)
    train(model, optimizer, n=3)
    optimizer.finish()
    assert_bits(model, before)


# ------------------------------------------------------------------------ refused


def refused(monkeypatch: pytest.MonkeyPatch, text: str, params: object, **options: object) -> None:
    model = net()
    policy = options.pop("policy", ExchangePolicy())
    assert isinstance(policy, ExchangePolicy)
    rule = distbelief.SGD(learning_rate=1.0)
    server = Server(list(model.parameters()), rule=rule, policy=policy)
    with pytest.raises(distbelief.JobError, match=text):
        server.optimizer(monkeypatch, params or model.parameters(), **options)


def test_wrong_rates_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for lr in (-1.0, math.nan, math.inf, True, torch.tensor(0.1)):
        refused(monkeypatch, "lr is .*; use a number, 0 or more", None, lr=lr)
    refused(monkeypatch, r"lr is tensor\(0.1000\); use", None, lr=torch.tensor(0.1))
    first, last = net()[0], net()[2]
    groups = [{"params": last.parameters()}, {"params": first.parameters(), "lr": 0.1}]
    text = "parameter group 0 has no lr, and others have: give each group one"
    refused(monkeypatch, text, groups)
    policy = ExchangePolicy(round=Round(), weight="mean", staleness=0)
    text = r"applies the pushes of many workers at once \(round\): give its rule the rate"
    refused(monkeypatch, text, None, lr=0.1, policy=policy)


def test_a_rule_that_needs_all_earlier_rates_refuses_those_of_pushes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    rule = torch_rule("ASGD", learning_rate=0.1)
    server = Server(list(model.parameters()), rule=rule)
    optimizer = server.optimizer(monkeypatch, model.parameters(), lr=0.1)
    with pytest.raises(SimulationFailed, match=r"JobError: .*'ASGD' needs all earlier ones"):
        train(model, optimizer, n=3)


def test_a_state_without_rates_is_not_loaded_into_an_optimizer_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    rule = distbelief.SGD(learning_rate=1.0)
    server = Server(list(model.parameters()), rule=rule, n_loops=3)
    with_lr = server.optimizer(monkeypatch, model.parameters(), lr=0.1)
    without = server.optimizer(monkeypatch, model.parameters())
    for one, other in ((with_lr, without), (without, with_lr)):
        with pytest.raises(distbelief.JobError, match="make both with lr, or both without"):
            one.load_state_dict(other.state_dict())
    again = server.optimizer(monkeypatch, model.parameters(), lr=0.5)
    again.load_state_dict(with_lr.state_dict())
    assert again.param_groups[0]["lr"] == 0.1
