"""Running averages of weights at the shards, against torch's AveragedModel after each step."""

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distbelief
from distbelief.core.errors import JobError
from distbelief.parameter_server.rules import SGD, UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.serve.address import by_position
from tests.distbelief.parameter_server.pair import scatter
from tests.distbelief.serve.loops import Server


DECAY = 0.98
TABLES = [
    {"name": "sgd", "learning_rate": 0.1},
    {"name": "momentum", "learning_rate": 0.1},
    {"name": "AdamW", "lr": 0.05},
    {"name": "rmsprop", "learning_rate": 0.01, "clip_value": 0.5},
    {
        "name": "adagrad",
        "learning_rate": 0.1,
        "groups": {"000001": {"name": "SGD", "lr": 0.1, "ema": DECAY}},
    },
]


def rule_of(table: dict[str, object]) -> UpdateRule:
    rule: UpdateRule = msgspec.convert({**table, "ema": DECAY}, UpdateRule)
    return rule


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def averages(server: Server) -> list[torch.Tensor]:
    tensors = [torch.zeros(spec.n_elements) for spec in server.layout.tensors]
    for k, name in enumerate(server.shards):
        shard = server.simulation.role(name)
        assert isinstance(shard, Shard)
        scatter(server.layout, k, shard.values.state["ema"], tensors)
    return tensors


@pytest.mark.each_value
@pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table["name"]))
@pytest.mark.parametrize("n_shards", [1, 3])
def test_the_average_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, object], n_shards: int
) -> None:
    """Only nearly: torch's kernel rounds the last few elements of a tensor otherwise."""
    model, generator = net(), torch.Generator().manual_seed(1)
    server = Server(list(model.parameters()), rule=rule_of(table), n_shards=n_shards)
    optimizer = server.optimizer(monkeypatch, model.parameters(), blocking=True)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(60):
        inputs = torch.randn(16, 7, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :3].sin()).backward()
        optimizer.step()
        optimizer.finish()  # the model has what the server has
        averaged.update_parameters(model)
    for found, wanted in zip(averages(server), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach().view(-1), rtol=1e-6, atol=1e-6)


def test_what_is_never_pushed_is_averaged_to_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen body of zeros would be a broken model."""
    model = net()
    model[0].requires_grad_(requires_grad=False)
    server = Server(list(model.parameters()), rule=SGD(learning_rate=0.1, ema=DECAY))
    optimizer = server.optimizer(monkeypatch, model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
    optimizer.finish()
    found = averages(server)
    values = [one.detach().view(-1) for one in model.parameters()]
    assert [torch.equal(*pair) for pair in zip(found, values, strict=True)] == [
        True,
        True,
        False,
        False,
    ]


def test_the_state_of_a_shard_fits_rules_with_an_average_only() -> None:
    assert SGD(learning_rate=0.1, ema=DECAY).label == "sgd; ema"
    assert SGD(learning_rate=0.1).label == "sgd"


def test_wrong_averages_are_refused() -> None:
    for ema in (0.0, 1.0, -0.5, "0.9"):
        with pytest.raises(ValueError, match=r"ema is .*; use a number between 0 and 1"):
            SGD(learning_rate=0.1, ema=ema)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a group has another one: give all the same, or none"):
        SGD(learning_rate=0.1, ema=0.9, groups={"b": SGD(learning_rate=0.1)})
    with pytest.raises(JobError, match=r"in a loop of your own, average its model by torch\.optim"):
        by_position(SGD(learning_rate=0.1, ema=0.9), ["w"])
    with pytest.raises(JobError, match="AveragedModel"):
        distbelief.ParameterServer(net(), rule=SGD(learning_rate=0.1, ema=0.9))
