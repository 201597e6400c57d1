"""What a server serves to users' own loops: tensors matched by name, buffers, values set anew."""

import copy
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

import pytest
import torch
from torch import nn
from typing_extensions import override

import distbelief
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.serve.address import ServerAddress, named
from tests.distbelief.serve.loops import Server


RATE = 0.05
SGD = distbelief.SGD(learning_rate=RATE)
SUM = distbelief.SGD(learning_rate=1.0)

Loop = distbelief.DownpourSGD | distbelief.Exchange

both_kinds = pytest.mark.parametrize("kind", ["DownpourSGD", "Exchange"])
both_data_paths = pytest.mark.parametrize("host", ["host-0", ""])


def loop(
    monkeypatch: pytest.MonkeyPatch, server: Server, kind: str, params: object, **options: object
) -> Loop:
    if kind == "DownpourSGD":
        return server.optimizer(monkeypatch, params, **options)
    inner = torch.optim.SGD(params, lr=RATE)  # type: ignore[arg-type]
    return server.exchange(monkeypatch, inner, **{"every": 2, **options})


# ------------------------------------------------------------ names


class Pair(nn.Module):
    """Two weights of one shape, which a mistake of order would swap without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 4), 1.0))
        self.b = nn.Parameter(torch.full((4, 4), 2.0))


@both_kinds
def test_parameters_with_names_on_both_sides_are_matched_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They were matched by position: each weight got the other's values, and its gradients."""
    net = Pair()
    server = Server([net.a, net.b], names=["a", "b"], rule=SGD if kind == "DownpourSGD" else SUM)
    backwards = list(net.named_parameters())[::-1]
    optimizer = loop(monkeypatch, server, kind, backwards)
    assert (net.a.mean().item(), net.b.mean().item()) == (1.0, 2.0)
    for _ in range(4):
        optimizer.zero_grad()
        (net.a.sum() - 2 * net.b.sum()).backward()
        optimizer.step()
    optimizer.finish()
    assert net.a.mean().item() == pytest.approx(1.0 - 4 * RATE)
    assert net.b.mean().item() == pytest.approx(2.0 + 8 * RATE)


def test_a_rate_belongs_to_the_parameters_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Pair()
    server = Server([net.a, net.b], names=["a", "b"], rule=SGD)
    groups = [
        {"params": [("b", net.b)], "learning_rate": 1.0},
        {"params": [("a", net.a)], "learning_rate": 0.5},
    ]
    optimizer = server.optimizer(monkeypatch, groups, n_fetch=3, learning_rate=0.1)
    for parameter in (net.a, net.b):
        parameter.grad = torch.ones(4, 4)
    optimizer.step()
    assert (net.a.mean().item(), net.b.mean().item()) == (0.5, 1.0)


@both_kinds
@pytest.mark.parametrize("theirs", [["a", "b"], ["a", "c"], []])
def test_names_that_differ_are_refused_and_none_go_by_position(
    monkeypatch: pytest.MonkeyPatch, theirs: list[str], kind: str
) -> None:
    net = Pair()
    server = Server([net.a, net.b], names=theirs, rule=SUM, n_loops=2)
    if theirs == ["a", "c"]:
        why = "the server has parameter 'c', which is not among those given here .*to match by posi"
        with pytest.raises(distbelief.JobError, match=f"{kind}: {why}"):
            loop(monkeypatch, server, kind, net.named_parameters())
        loop(monkeypatch, server, kind, net.parameters())
        return
    loop(monkeypatch, server, kind, net.named_parameters())
    more = [*net.named_parameters(), ("c", nn.Parameter(torch.ones(1)))]
    if theirs:
        with pytest.raises(distbelief.JobError, match="parameter 'c' is not on the server"):
            loop(monkeypatch, server, kind, more)


def test_an_address_carries_the_names() -> None:
    names = tuple(f"layers.{i}.norm.running_mean" for i in range(200))
    address = ServerAddress(
        endpoint="ipc:///x/.supervisor.1",
        run="t",
        n_shards=1,
        memory="",
        preset="strom",
        n_buffers=3,
        names=names,
    )
    assert ServerAddress.parse(str(address)) == address
    assert len(str(address)) < 1000
    for broken in ("names=eJx", "names=AAAA", "buffers=x"):
        with pytest.raises(distbelief.JobError, match="is no address of a parameter server"):
            ServerAddress.parse(f"ipc:///x/.supervisor.1?run=t&shards=1&{broken}")


def test_a_name_that_comes_twice_is_refused() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(distbelief.JobError, match="parameter 'a' is given twice"):
        named([("a", weight), ("b", weight), ("a", weight)], what="parameter")


# ------------------------------------------------------------ presets


@pytest.mark.parametrize("preset", ["strom", "downpour", "horovod"])
def test_a_server_that_was_told_to_take_gradients_takes_no_local_steps(
    monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """It applied its learning rate to each sum of 64 steps, without a word."""
    net = Pair()
    server = Server(list(net.parameters()), rule=SGD, preset=preset)
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    for options in ({}, {"preset": "dpplee3-asgd"}, {"every": 4}):
        with pytest.raises(distbelief.JobError, match=rf"'{preset}'.*DownpourSGD, or give Param"):
            server.exchange(monkeypatch, inner, **options)


@pytest.mark.parametrize("preset", ["hogwild", "adam-2014"])
def test_presets_with_threads_in_a_replica_are_not_for_loops(preset: str) -> None:
    net = Pair()
    with pytest.raises(distbelief.JobError, match=rf"'{preset}' has threads .*\"dpplee3-asgd\""):
        distbelief.ParameterServer(net.parameters(), preset=preset)


# ------------------------------------------------------------ buffers


class Normal(nn.Module):
    """BatchNorm, and buffers that are counted, bound anew, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.seen: torch.Tensor

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        output: torch.Tensor = self.net(x)
        return output


def normal() -> Normal:
    torch.manual_seed(0)
    return Normal()


def serve_net(net: nn.Module, **options: object) -> Server:
    buffer_names, buffers = named(net, what="buffer")
    names = [*dict(net.named_parameters()), *buffer_names]
    parameters = list(net.parameters())
    return Server(parameters, buffers=buffers, names=names, **options)  # type: ignore[arg-type]


def train(net: nn.Module, optimizer: Loop | torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(16, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), inputs[:, :3]).backward()
        optimizer.step()


WAYS: Mapping[str, tuple[str, dict[str, object]]] = {
    "as they come": ("DownpourSGD", {}),
    "blocking": ("DownpourSGD", {"blocking": True}),
    "seldom": ("DownpourSGD", {"n_push": 3, "n_fetch": 2, "learning_rate": RATE}),
    "local steps": ("Exchange", {"every": 4}),
}
every_way = pytest.mark.parametrize(("kind", "options"), WAYS.values(), ids=WAYS.keys())


@pytest.mark.each_value
@both_data_paths
@every_way
def test_one_worker_has_the_buffers_of_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, object], host: str
) -> None:
    net, plain = normal(), normal()
    server = serve_net(net, rule=SGD if kind == "DownpourSGD" else SUM, host=host)
    optimizer = loop(monkeypatch, server, kind, net.parameters(), buffers=net, **options)
    train(net, optimizer, range(30))
    optimizer.finish()
    train(plain, torch.optim.SGD(plain.parameters(), lr=RATE), range(30))
    assert int(net.seen) == int(plain.seen) == 480
    for name, value in net.state_dict().items():
        if options:  # as they come, gradients are those of older parameters
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    served = dict(zip(server.names, server.values(), strict=True))
    for name, value in net.state_dict().items():
        assert torch.equal(served[name], value.reshape(-1).float()), name


@pytest.mark.each_value
@both_data_paths
@every_way
def test_a_worker_that_joins_gets_the_buffers_and_goes_on_with_them(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, object], host: str
) -> None:
    """It had fresh ones, and the same parameters: accuracy 0.80 for A and 0.40 for B."""
    first, second = normal(), normal()
    rule = SGD if kind == "DownpourSGD" else SUM
    server = serve_net(first, rule=rule, host=host, n_loops=2)
    one = loop(monkeypatch, server, kind, first.parameters(), buffers=first, **options)
    train(first, one, range(30))
    one.finish()
    other = loop(monkeypatch, server, kind, second.parameters(), buffers=second, **options)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    train(second, other, range(30, 50))
    other.finish()
    one.finish()
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert int(first.seen) == 16 * (30 + 20) // 2  # a mean over both, who are there all along


@both_kinds
def test_buffers_of_only_one_side_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    net = normal()
    server = serve_net(net, rule=SUM, n_loops=3)
    there = r"the server has 4 buffers, as 'seen', and {} are given here: give buffers=net"
    for n, options in ((0, {}), (5, {"buffers": net.buffers()})):
        with pytest.raises(distbelief.JobError, match=there.format(n)):
            loop(monkeypatch, server, kind, net.parameters(), **options)
    other = [(f"other.{name}", buffer) for name, buffer in named_buffers(net)]
    with pytest.raises(distbelief.JobError, match="the server has buffer 'seen', which is not"):
        loop(monkeypatch, server, kind, net.parameters(), buffers=other)
    loop(monkeypatch, server, kind, net.parameters(), buffers=named_buffers(net)[::-1])
    plain = Server(list(net.parameters()), rule=SUM)
    with pytest.raises(distbelief.JobError, match="the server has no buffers, and 4 are given"):
        loop(monkeypatch, plain, kind, net.parameters(), buffers=net)


class Beside(nn.Module):
    """A layer, and a buffer that each forward changes."""

    kept: torch.Tensor

    def __init__(self, kept: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(7, 3), change
        self.register_buffer("kept", kept)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.change(self.kept)
        output: torch.Tensor = self.layer(x)
        return output


LOST: Mapping[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "large": (
        torch.tensor([2**31 - 1]),
        torch.clone,
        r"buffer 0 is torch\.int64 with 2147483647 at",
    ),
    "double": (torch.tensor([1e300], dtype=torch.float64), torch.clone, "float64 with 1e.300 at"),
    "mask": (
        torch.full((2,), -torch.inf),
        torch.clone,
        "NaN or infinity in buffer 0, 'kept', .*mask",
    ),
    "grows": (torch.zeros(2), lambda x: x.repeat(2), r"'kept' of a Beside has become \[4\]"),
}


@both_kinds
@pytest.mark.parametrize("name", LOST)
def test_a_buffer_that_a_server_cannot_keep_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """2,147,483,647 became 2,147,483,648; of a mask it said "use a lower learning rate"."""
    kept, change, why = LOST[name]
    net = Beside(kept, change)

    def run() -> None:
        server = serve_net(net, rule=SUM)
        train(net, loop(monkeypatch, server, kind, net.parameters(), buffers=net), range(2))

    with pytest.raises(distbelief.JobError, match=why):
        run()


def test_buffers_inside_of_a_wrapper_are_served() -> None:
    """checkpoint_wrapper saves what is in it by other names: BatchNorm's were not served."""
    wrapper = import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    names = [name for name, _ in named_buffers(wrapper.checkpoint_wrapper(normal()))]
    assert len(names) == len(named_buffers(normal())) == 4


def named_buffers(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    names, buffers = named(net, what="buffer")
    return list(zip(names, buffers, strict=True))


# ------------------------------------------------------------ changes by something else


CHANGES: Mapping[str, Callable[[nn.Module, nn.Module], object]] = {
    "load": lambda net, other: net.load_state_dict(other.state_dict()),
    "clamp": lambda net, _: [one.clamp_(-0.01, 0.01) for one in net.parameters()],
    "clamp by data": lambda net, _: [one.data.clamp_(-0.01, 0.01) for one in net.parameters()],
    "decay": lambda net, _: [one.mul_(0.9) for one in net.parameters()],
    "initialise": lambda net, _: [nn.init.constant_(one, 0.5) for one in net.parameters()],
    "new memory": lambda net, other: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(other.parameters()), net.parameters()
    ),
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


def other_net() -> nn.Module:
    torch.manual_seed(1)
    return Normal()


@pytest.mark.each_value
@every_change
@pytest.mark.parametrize("options", [{}, {"n_push": 2, "n_fetch": 3, "learning_rate": RATE}])
def test_a_change_that_the_next_fetch_would_undo_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[nn.Module, nn.Module], object],
    options: dict[str, object],
) -> None:
    """A checkpoint that was loaded after DownpourSGD(...), or each clamp_, was discarded."""
    net = normal()
    server = serve_net(net, rule=SGD)
    optimizer = server.optimizer(monkeypatch, net.parameters(), buffers=net, **options)
    for _ in range(2):
        with torch.no_grad():
            change(net, other_net())
        before = server.values()
        with pytest.raises(
            distbelief.JobError, match=r"parameter 0, 'net\.0\.weight', was changed"
        ):
            train(net, optimizer, range(3))
        assert all(map(torch.equal, before, server.values()))
        optimizer.finish()  # as the error says
        train(net, optimizer, range(3))


@pytest.mark.parametrize("change", [CHANGES["load"], CHANGES["initialise"]])
def test_a_change_that_each_worker_would_add_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, nn.Module], object]
) -> None:
    """Of two workers that loaded a checkpoint the server had 2 x checkpoint - start."""
    net = normal()
    server = serve_net(net, rule=SUM, n_loops=3)
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    exchange = server.exchange(monkeypatch, inner, buffers=net, every=2)
    for _ in range(2):
        with torch.no_grad():
            change(net, other_net())
        with pytest.raises(
            distbelief.JobError, match=r"net\.0\.weight', was changed since the serv"
        ):
            train(net, exchange, range(3))
        exchange.load_state_dict(net.state_dict())
        train(net, exchange, range(3))
        exchange.finish()


def test_averages_that_are_swapped_in_and_out_again_are_no_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = normal()
    server = serve_net(net, rule=SUM)
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    exchange = server.exchange(monkeypatch, inner, buffers=net, every=2)
    train(net, exchange, range(3))
    exchange.finish()
    kept = copy.deepcopy(net.state_dict())
    net.load_state_dict(other_net().state_dict())
    net.load_state_dict(kept)
    train(net, exchange, range(3))


def test_what_follows_a_step_of_an_exchange_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch: a projection after each step, weight decay by hand."""
    net, plain = normal(), normal()
    server = serve_net(net, rule=SUM)
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    exchange = server.exchange(monkeypatch, inner, buffers=net, every=3)
    alone = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in range(8):
        for one, optimizer in ((net, exchange), (plain, alone)):
            train(one, optimizer, range(step, step + 1))
            for parameter in one.parameters():
                parameter.data.mul_(0.99).clamp_(-0.2, 0.2)
    exchange.finish()
    for value, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------ values set anew


@both_kinds
@both_data_paths
def test_a_models_state_becomes_the_servers(
    monkeypatch: pytest.MonkeyPatch, kind: str, host: str
) -> None:
    net = normal()
    momentum = distbelief.Momentum(learning_rate=0.1, momentum=0.9)
    rule = momentum if kind == "DownpourSGD" else SUM
    server = serve_net(net, rule=rule, host=host, n_loops=3)
    optimizer = loop(monkeypatch, server, kind, net.parameters(), buffers=net)
    train(net, optimizer, range(3))
    state = cast("dict[str, object]", other_net().state_dict())
    optimizer.load_state_dict(state)
    served = dict(zip(server.names, server.values(), strict=True))
    for name, value in net.state_dict().items():
        assert torch.equal(value, cast("torch.Tensor", state[name])), name
        assert torch.equal(served[name], value.reshape(-1).float()), name
    second = normal()
    loop(monkeypatch, server, kind, second.parameters(), buffers=second)
    assert all(map(torch.equal, net.state_dict().values(), second.state_dict().values()))
    train(net, optimizer, range(3))
    optimizer.finish()


@both_kinds
def test_a_state_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    net = normal()
    server = serve_net(net, rule=SUM, n_loops=6)
    optimizer = loop(monkeypatch, server, kind, net.parameters(), buffers=net)
    state = dict(net.state_dict())
    wrong: list[tuple[str, dict[str, torch.Tensor]]] = [
        ("the state has nothing as 'seen'", {k: v for k, v in state.items() if k != "seen"}),
        (r"the state has \[3\] as 'net.0.bias'", state | {"net.0.bias": torch.ones(3)}),
        ("the state has 'extra', which is not served", state | {"extra": torch.ones(3)}),
        ("the state has NaN", state | {"net.0.bias": torch.full((5,), torch.nan)}),
    ]
    for why, given in wrong:
        with pytest.raises(distbelief.JobError, match=f"{kind}: {why}"):
            optimizer.load_state_dict(cast("dict[str, object]", given))
    tied = state | {"tied": state["net.0.weight"]}
    optimizer.load_state_dict(cast("dict[str, object]", tied))


def test_values_are_set_at_once_where_there_are_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round would wait for the other worker, and average the values with its steps."""
    policy = ExchangePolicy(send="delta", every=2, staleness=0, round=Round(), weight="mean")
    nets = [normal(), normal()]
    server = serve_net(nets[0], rule=SUM, policy=policy, n_loops=3)
    exchanges = [
        server.exchange(monkeypatch, torch.optim.SGD(net.parameters(), lr=RATE), buffers=net)
        for net in nets
    ]
    state = other_net().state_dict()
    exchanges[0].load_state_dict(cast("dict[str, object]", state))
    served = dict(zip(server.names, server.values(), strict=True))
    for name, value in state.items():
        assert torch.equal(served[name], value.reshape(-1).float()), name
