"""Parameters that do not train are fetched once and never pushed (deliver 1 of the exchange).

tensor     shape        elements
a          (9, 70)      630       trains
b          (200, 300)   60,000    frozen
c          (33,)        33        trains
mean       (3,)         3         a buffer
"""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import distbelief
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.policy import ExchangePolicy, Numbers
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import ParameterBlock, SaveCheckpoint
from distbelief.protocol.role import Address, PeerJoined
from distbelief.simulation.faults import Kill
from distbelief.task.task import ModelSpec, build_model
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, TEST, Bench
from tests.distbelief.serve.loops import Server
from tests.distbelief.worker.test_build import learning, sequential
from tests.simulation.test_downpour import LEARNING, Cluster, downpour, drawn


SPECS = (
    TensorSpec(name="a", shape=(9, 70)),
    TensorSpec(name="b", shape=(200, 300), kind="buffer"),
    TensorSpec(name="c", shape=(33,)),
    TensorSpec(name="mean", shape=(3,), kind="buffer"),
)
ALL, LIVE = sum(s.n_elements for s in SPECS), 630 + 33 + 3
Tensors = list[torch.Tensor]


class Clients:
    """Shards, a client to which b is frozen, and one that holds and changes everything."""

    def __init__(self, *, n_shards: int, shared: bool, numbers: Numbers = "float32") -> None:
        self.layout = Layout.of(SPECS, n_shards=n_shards)
        memory = PrivateMemory(host="here" if shared else "", poison=True)
        self.bench = Bench(layout=self.layout, memory=memory)
        self.names = [Address(f"shard-{k}") for k in range(n_shards)]
        for name in self.names:
            self.bench.add_shard(name)
        config = ClientConfig.of(ExchangePolicy(numbers=numbers))
        self.bench.add_client(config=config, view=PartialView(self.layout, frozen={"b"}))
        self.bench.add_client(OTHER)
        self.bench.settle()

    def push(self, name: Address, seed: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        pushed = [torch.randn(spec.n_elements, generator=stream) for spec in SPECS]
        self.bench.push_tensors(pushed, pushed, name)
        self.bench.settle()
        assert self.bench.client(name).unacknowledged == 0

    def fetch(self, tensors: Tensors, name: Address = CLIENT) -> Tensors:
        self.bench.begin_fetch(name)
        self.bench.settle()
        assert self.bench.install(tensors, name).torn == ()
        self.bench.settle()
        return tensors

    def counters(self, name: Address = CLIENT) -> dict[str, float]:
        return self.bench.client(name).counters()


def nothing() -> Tensors:
    return [torch.full((spec.n_elements,), torch.nan) for spec in SPECS]


@pytest.mark.each_value
@pytest.mark.parametrize("n_shards", [1, 2, 40])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("numbers", ["float32", "bfloat16"])
def test_the_first_fetch_has_all_and_later_ones_what_trains(
    n_shards: int, numbers: Numbers, *, shared: bool
) -> None:
    clients = Clients(n_shards=n_shards, shared=shared, numbers=numbers)
    clients.push(OTHER, 1)
    first = clients.fetch(nothing())
    for one, other in zip(first, clients.fetch(nothing(), OTHER), strict=True):
        assert torch.equal(one, other)  # the first one is exact, as b is not fetched again
    bytes_in = clients.counters()["bytes_in"]
    assert bytes_in >= 4 * ALL
    clients.push(CLIENT, 2)
    b = first[1].clone()
    clients.push(OTHER, 3)  # another client, which takes b for a buffer
    later = clients.fetch([one.clone() for one in first])
    whole = clients.fetch(nothing(), OTHER)
    assert torch.equal(later[1], b)
    assert not torch.equal(whole[1], b)
    for place in (0, 2, 3):
        torch.testing.assert_close(later[place], whole[place], rtol=0.01, atol=0.01)
    # Bytes of all shards, with the blocks of those where nothing trains.
    size = 4 if shared or numbers == "float32" else 2
    assert clients.counters()["bytes_in"] - bytes_in <= 4 * 3 + size * (LIVE + n_shards)
    assert clients.counters()["bytes_out"] <= 4 * 3 + size * (LIVE + n_shards)


@pytest.mark.parametrize("shared", [True, False])
def test_a_push_leaves_what_is_frozen_alone(*, shared: bool) -> None:
    """With one client, a buffer becomes what was pushed: b must not."""
    clients = Clients(n_shards=2, shared=shared)
    for seed in range(3):
        clients.push(CLIENT, seed)
    values = clients.fetch(nothing(), OTHER)
    assert not values[1].any()
    assert all(values[place].any() for place in (0, 2, 3))


@pytest.mark.parametrize("shared", [True, False])
def test_a_shard_that_dies_in_the_first_fetch_sends_all_again(*, shared: bool) -> None:
    clients = Clients(n_shards=1, shared=shared)
    clients.push(OTHER, 1)
    bench = clients.bench
    bench.send(TEST, clients.names[0], SaveCheckpoint(label="1"))
    bench.settle()
    [snapshot] = bench.snapshots

    def lose(_: Address, message: object) -> bool:
        return isinstance(message, ParameterBlock)

    bench.lose = lose
    bench.begin_fetch(CLIENT)
    bench.settle()
    bench.lose = lambda _receiver, _message: False
    bench.add_shard(restored=snapshot)
    for name in (CLIENT, OTHER):
        bench.deliver(name, PeerJoined(peer=clients.names[0], incarnation=2))
    bench.settle()
    tensors = nothing()
    assert bench.install(tensors, CLIENT).torn == ()
    for one, other in zip(tensors, clients.fetch(nothing(), OTHER), strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------- jobs

HERE = "tests.distbelief.serve.test_frozen"
WIDTH, HIDDEN = 40, 300


def frozen_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 8))
    net[0].requires_grad_(requires_grad=False)
    return net


FROZEN = msgspec.structs.replace(
    LEARNING, model=ModelSpec(factory=f"{HERE}:frozen_net", initial="seed")
)
N_FROZEN, N_TRAINED = HIDDEN * (WIDTH + 1), 8 * (HIDDEN + 1)


@pytest.mark.each_value
@pytest.mark.parametrize("host", ["host-0", ""])
@pytest.mark.parametrize("send", ["gradient", "delta"])
def test_a_job_moves_frozen_parameters_once(host: str, send: str) -> None:
    settings = downpour(blocking=True, max_steps=12)
    if send == "delta":
        exchange = ExchangePolicy(send="delta")
        inner = {"name": "SGD", "lr": settings.rule.learning_rate}
        rule = distbelief.SGD(learning_rate=1.0)
        settings = msgspec.structs.replace(settings, exchange=exchange, inner=inner, rule=rule)
    cluster = Cluster(FROZEN, settings, n_shards=2, host=host)
    cluster.run()
    found = cluster.status("replica-0")
    n_pushes = found["pushes_sent"]
    assert n_pushes == 12
    assert found["bytes_out"] == 4 * N_TRAINED * n_pushes
    n_fetches = (found["bytes_in"] - 4 * N_FROZEN) / (4 * N_TRAINED)
    assert 12 <= n_fetches < 15  # with the paddings of the first one
    values = cluster.values()
    for name, value in drawn(FROZEN).items():
        assert torch.equal(values[name], value.view(-1)) == name.startswith("0.")


@pytest.mark.each_value
@pytest.mark.parametrize("n_machines", [1, 3])
@pytest.mark.parametrize("host", ["host-0", ""])
def test_ranks_move_frozen_parameters_once(n_machines: int, host: str) -> None:
    group = learning(
        FROZEN, blocking=True, max_steps=9, n_machines=n_machines, dtype="float64", host=host
    )
    group.run()
    expected = sequential(group, task=FROZEN)
    for name, value in group.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
    found = [group.status(name) for name in group.machines]
    n_out, n_in = (sum(one[name] for one in found) for name in ("bytes_out", "bytes_in"))
    assert n_out == 8 * N_TRAINED * 9
    assert 8 * (N_FROZEN + 9 * N_TRAINED) <= n_in < 8 * (N_FROZEN + 12 * N_TRAINED)


def test_a_killed_replica_fetches_them_again() -> None:
    settings = downpour(blocking=True, max_steps=12)
    faults = [Kill(at=0.02, role=Address("replica-0"))]
    cluster = Cluster(FROZEN, settings, n_shards=2, host="", faults=faults)
    cluster.run()
    values, first = cluster.values(), drawn(FROZEN)
    assert torch.equal(values["0.weight"], first["0.weight"].view(-1))
    assert not torch.equal(values["2.weight"], first["2.weight"].view(-1))


# ---------------------------------------------------------------------- one's own loop


@pytest.mark.parametrize("host", ["host-0", ""])
@pytest.mark.parametrize("numbers", ["float32", "bfloat16"])
def test_exchange_moves_frozen_parameters_once(
    monkeypatch: pytest.MonkeyPatch, host: str, numbers: Numbers
) -> None:
    torch.manual_seed(0)
    net = frozen_net()
    parameters = list(net.parameters())
    before = [one.detach().clone() for one in parameters]
    rule = distbelief.SGD(learning_rate=1.0, weight_decay=0.1)  # would move them
    server = Server(parameters, rule=rule, host=host, numbers=numbers)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    exchange = server.exchange(monkeypatch, inner, every=1, numbers=numbers)
    for step in range(6):
        exchange.zero_grad()
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        net(inputs).square().mean().backward()
        exchange.step()
    exchange.finish()
    for place in (0, 1):
        assert torch.equal(parameters[place], before[place])
        assert torch.equal(server.values()[place], before[place].view(-1))
    assert torch.equal(server.values()[2], parameters[2].detach().view(-1))
    found = exchange.counters()
    size = 4 if numbers == "float32" else 2
    assert found["bytes_out"] == size * N_TRAINED * 6
    assert found["bytes_in"] < 4 * N_FROZEN + 4 * N_TRAINED * 9
    parameters[0].requires_grad_()
    with pytest.raises(distbelief.JobError, match=r"requires_grad .* call finish\(\), and make a"):
        exchange.step()


@pytest.mark.parametrize("host", ["host-0", ""])
@pytest.mark.parametrize("numbers", ["float32", "bfloat16"])
def test_downpour_sgd_moves_frozen_parameters_once(
    monkeypatch: pytest.MonkeyPatch, host: str, numbers: Numbers
) -> None:
    """Regression: it pushed zeros for them, and fetched them in every step.

    The head's bias has a gradient in every second step only: the others leave it alone.
    """
    torch.manual_seed(0)
    net = frozen_net()
    parameters = list(net.parameters())
    before = [one.detach().clone() for one in parameters]
    rule = distbelief.Momentum(learning_rate=0.1, momentum=0.9, weight_decay=0.1)
    server = Server(parameters, rule=rule, host=host, numbers=numbers)
    optimizer = server.optimizer(monkeypatch, parameters, blocking=True)
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        net(inputs).square().mean().backward()
        if step % 2:
            parameters[3].grad = None
        bias = parameters[3].detach().clone()
        optimizer.step()
        assert torch.equal(parameters[3], bias) == bool(step % 2)
    optimizer.finish()
    for place in (0, 1):
        assert torch.equal(parameters[place], before[place])
        assert torch.equal(server.values()[place], before[place].view(-1))
    found = optimizer.counters()
    size = 4 if numbers == "float32" else 2
    assert found["bytes_out"] == size * N_TRAINED * 6
    assert found["bytes_in"] < 4 * N_FROZEN + 4 * N_TRAINED * 9
    parameters[0].grad = torch.zeros_like(parameters[0])
    with pytest.raises(distbelief.JobError, match=r"parameter 0 has a gradient, but was frozen"):
        optimizer.step()


def test_frozen_net_trains_its_head_alone() -> None:
    net = build_model(FROZEN.model)
    trained = [name for name, one in net.named_parameters() if one.requires_grad]
    assert trained == ["2.weight", "2.bias"]
    assert np.sum([one.numel() for one in net.parameters() if one.requires_grad]) == N_TRAINED
