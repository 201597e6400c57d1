"""`Exchange`: local steps by a torch optimizer, exchanged with shards on a simulated cluster."""

import copy
import math
import signal
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import distbelief
from distbelief.parameter_server.client import client
from distbelief.parameter_server.client.pushes import PushDraft
from distbelief.parameter_server.policy import ExchangePolicy, Numbers, Round
from distbelief.serve.address import ServerAddress
from distbelief.simulation.network import Link
from tests.distbelief.serve.loops import Server


RATE = 0.1
SUM = distbelief.SGD(learning_rate=1.0)

both_data_paths = pytest.mark.parametrize("host", ["host-0", ""])

Optimizers = dict[str, Callable[[nn.Module], torch.optim.Optimizer]]

IN_CLIENT = ["put", "install"]  # while it copies

INNER: Optimizers = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=RATE),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def exchanging(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    inner: torch.optim.Optimizer | None = None,
    *,
    host: str = "host-0",
    **options: int,
) -> tuple[Server, distbelief.Exchange]:
    server = Server(list(model.parameters()), rule=SUM, host=host)
    inner = inner or torch.optim.SGD(model.parameters(), lr=RATE)
    return server, server.exchange(monkeypatch, inner, **options)


def backward(model: nn.Module, step: int) -> None:
    inputs = torch.randn(16, 7, generator=torch.Generator().manual_seed(step))
    nn.functional.mse_loss(model(inputs), inputs[:, :3].sin()).backward()


def take_steps(
    model: nn.Module, optimizer: distbelief.Exchange | torch.optim.Optimizer, n: int
) -> None:
    for step in range(n):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def flat(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().view(-1).clone() for parameter in model.parameters()]


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("every", [1, 2, 5, 10])
@pytest.mark.parametrize("name", INNER)
def test_one_worker_alone_is_the_inner_optimizer_however_seldom_it_exchanges(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, name: str, every: int, host: str
) -> None:
    """E7: a - (a - x) = x, up to the rounding of the difference."""
    plain = copy.deepcopy(model)
    take_steps(plain, INNER[name](plain), 23)
    server, exchange = exchanging(monkeypatch, model, INNER[name](model), host=host, every=every)
    take_steps(model, exchange, 23)
    exchange.finish()
    for one, other, served in zip(flat(model), flat(plain), server.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert torch.equal(one, served)
    assert exchange.counters()["pushes_acknowledged"] == -(-23 // every)


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("every", [1, 3, 4])
def test_every_local_step_of_every_worker_is_applied_once(
    monkeypatch: pytest.MonkeyPatch, every: int, host: str
) -> None:
    """E2: with steps that are small integers times 2^-4 float32 sums are exact.

    The workers take turns of different lengths, so pushes and fetches overlap steps in many ways.
    """
    n_workers, length = 3, 40_000  # several blocks to each shard
    first = nn.Parameter(torch.zeros(length))
    server = Server([first], rule=SUM, n_loops=n_workers, host=host)
    loops = []
    for _ in range(n_workers):
        parameter = nn.Parameter(torch.zeros(length))
        inner = torch.optim.SGD([parameter], lr=2.0**-4)
        loops.append((parameter, server.exchange(monkeypatch, inner, every=every)))
    random = torch.Generator().manual_seed(3)
    total = torch.zeros(length)
    for turn in range(40):
        parameter, exchange = loops[int(torch.randint(n_workers, (), generator=random))]
        for _ in range(1 + turn % 3):
            parameter.grad = torch.randint(-8, 9, (length,), generator=random).float()
            total -= parameter.grad * 2.0**-4
            exchange.step()
    for _, exchange in loops:
        exchange.finish()
    assert torch.equal(server.values()[0], total)
    assert torch.equal(loops[-1][0].detach(), total)


def test_what_is_pushed_moves_the_server_as_the_worker_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DP-1: before - after, so that a rule that subtracts goes the same way."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    server = Server([parameter], rule=distbelief.SGD(learning_rate=0.5), n_loops=1)
    inner = torch.optim.SGD([parameter], lr=1.0)
    exchange = server.exchange(monkeypatch, inner, every=2)
    for _ in range(2):
        parameter.grad = torch.tensor([0.25, -0.5])
        exchange.step()
    exchange.finish()
    # The worker has gone from 1 to 0.5 and from 2 to 3; the server goes half of that way.
    assert server.values()[0].tolist() == [0.75, 2.5]
    assert parameter.tolist() == [0.75, 2.5]


@pytest.mark.parametrize("kind", ["exchange", "optimizer"])
def test_samples_are_counted_over_all_exchanges(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Shards take the difference of two totals for the samples of a push, and weigh it so.

    A worker that begins to count anew with each exchange has pushed nothing, as it seems.
    """
    parameter = nn.Parameter(torch.zeros(2))
    server = Server([parameter], rule=SUM, policy=ExchangePolicy(weight="samples"))
    if kind == "exchange":
        loop: distbelief.Exchange | distbelief.DownpourSGD = server.exchange(
            monkeypatch, torch.optim.SGD([parameter], lr=RATE), every=1
        )
    else:
        loop = server.optimizer(monkeypatch, [parameter])
    found = []
    for samples in [16, 16, 5, 0, 7]:
        parameter.grad = torch.ones(2)
        loop.step(samples=samples)
        server.compute(1.0)
        found.append(server.samples("worker-0"))
    assert found == [(16, 16), (32, 16), (37, 5), (37, 0), (44, 7)]


def test_steps_during_an_exchange_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge: x <- a' + (x - a). Overwriting x would lose them (a fault of Dpplee3)."""
    parameter = nn.Parameter(torch.zeros(4))
    server = Server([parameter], rule=SUM, host="")
    exchange = server.exchange(monkeypatch, torch.optim.SGD([parameter], lr=1.0), every=3)
    for step in range(1, 9):
        parameter.grad = torch.full((4,), -1.0)
        exchange.step()
        assert parameter.tolist() == [float(step)] * 4
    exchange.finish()
    assert server.values()[0].tolist() == [8.0] * 4


def test_a_scheduler_of_torch_works_on_the_inner_optimizer(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    _, exchange = exchanging(monkeypatch, model, inner, every=2)
    scheduler = lr_scheduler.StepLR(inner, 1, gamma=0.5)
    take_steps(model, exchange, 1)
    scheduler.step()
    assert inner.param_groups[0]["lr"] == RATE / 2


def test_a_closure_gives_the_loss(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    _, exchange = exchanging(monkeypatch, model, every=2)

    def closure() -> float:
        exchange.zero_grad()
        loss = model(torch.ones(4, 7)).square().mean()
        loss.backward()
        return float(loss.detach())

    losses = [exchange.step(closure) or 0.0 for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_frozen_parameters_stay(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    first = model[0].weight.requires_grad_(requires_grad=False)  # type: ignore[index]
    before = first.detach().clone()
    server, exchange = exchanging(monkeypatch, model, every=2)
    take_steps(model, exchange, 5)
    exchange.finish()
    assert torch.equal(first, before)
    assert torch.equal(server.values()[0], before.view(-1))


def test_a_value_that_is_not_finite_is_not_pushed(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    server, exchange = exchanging(monkeypatch, model, every=2)
    before = server.values()
    take_steps(model, exchange, 1)
    with torch.no_grad():
        next(model.parameters())[0] = torch.nan
    with pytest.raises(
        distbelief.JobError, match="Exchange: step 2: NaN or infinity in the change of parameter 0 "
    ):
        exchange.step()
    for one, other in zip(before, server.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("place", ["torch._foreach_sub_", "torch._foreach_copy_", *IN_CLIENT])
def test_ctrl_c_within_an_exchange_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """One between x - a and x + a' left zeros in the model, which `finish` then pushed to all."""
    parameter = nn.Parameter(torch.full((4,), 100.0))
    server = Server([parameter], rule=SUM, host="")
    exchange = server.exchange(monkeypatch, torch.optim.SGD([parameter], lr=1.0), every=1)
    *_, name = place.split(".")
    owner = torch if place.startswith("torch") else PushDraft if name == "put" else client
    work = getattr(owner, name)

    def interrupted(*args: object, **options: object) -> object:
        result = work(*args, **options)
        monkeypatch.setattr(owner, name, work)
        signal.raise_signal(signal.SIGINT)
        return result

    for step in range(1, 5):
        parameter.grad = torch.full((4,), 1.0)
        if step == 3:  # every step after the first merges a fetch
            monkeypatch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                exchange.step()
        else:
            exchange.step()
    exchange.finish()
    assert parameter.tolist() == [96.0] * 4
    assert server.values()[0].tolist() == [96.0] * 4


def test_wrong_arguments_are_rejected(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    server = Server(list(model.parameters()), rule=SUM, n_loops=2)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    for every, said in [
        (0, "Exchange: every is 0; use 1 or more"),
        (2.5, 'Exchange: every = 2.5: wants a whole number or "auto"'),
        ("3", 'Exchange: every = "3": wants a whole number or "auto"'),
        (
            "1 epoch",
            r"the data of your loop are not known here: give steps, as every=len\(loader\)",
        ),
    ]:
        with pytest.raises(distbelief.JobError, match=said):
            server.exchange(monkeypatch, inner, every=every)
    with pytest.raises(distbelief.JobError, match="use an optimizer such as torch"):
        server.exchange(monkeypatch, model.parameters())  # type: ignore[arg-type]
    downpour = server.optimizer(monkeypatch, model.parameters())
    with pytest.raises(distbelief.JobError, match="has a server of its own"):
        server.exchange(monkeypatch, downpour)
    exchange = server.exchange(monkeypatch, inner)
    inner.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(distbelief.JobError, match="pass all of them at once"):
        exchange.step()


@pytest.mark.parametrize("kind", ["DownpourSGD", "Exchange"])
def test_a_parameter_whose_memory_was_replaced_still_learns(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, kind: str
) -> None:
    """vector_to_parameters assigns `.data`: pushes and fetches went to the old memory."""
    server = Server(list(model.parameters()), rule=distbelief.SGD(learning_rate=RATE))
    optimizer: distbelief.Exchange | distbelief.DownpourSGD
    if kind == "Exchange":
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer = server.exchange(monkeypatch, inner, every=2)
    else:
        optimizer = server.optimizer(monkeypatch, model.parameters())
    before = flat(model), server.values()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector, model.parameters())
    take_steps(model, optimizer, 4)
    optimizer.finish()
    now = flat(model), server.values()
    for was, became in zip(before, now, strict=True):
        assert not any(torch.equal(one, other) for one, other in zip(was, became, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(*now, strict=True))
    model[2].bias.data = model[0].bias.data[:3]  # type: ignore[index]
    with pytest.raises(distbelief.JobError, match=r"parameter . and parameter . have the same mem"):
        optimizer.step()
    model.double()
    with pytest.raises(distbelief.JobError, match=r"parameter 0 has become torch\.float64"):
        optimizer.step()


def test_what_follows_the_last_step_is_pushed_by_finish(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Regression: where the last step was an exchange, a projection after it stayed here."""
    server, exchange = exchanging(monkeypatch, model, every=3)
    for _ in range(3):
        take_steps(model, exchange, 1)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    projected = flat(model)
    exchange.finish()
    for one, here, there in zip(projected, flat(model), server.values(), strict=True):
        torch.testing.assert_close(here, one)
        assert torch.equal(here, there)
    exchange.finish()
    nn.init.ones_(next(model.parameters()))
    with pytest.raises(distbelief.JobError, match="changed since the server's values came"):
        exchange.finish()


def test_a_step_of_the_inner_optimizer_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Regression: a loop that kept its `inner.step()` trained, and pushed nothing."""
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    _, exchange = exchanging(monkeypatch, model, inner, every=3)
    for _ in range(2):
        backward(model, 0)
        with pytest.raises(distbelief.JobError, match=r"inner .* no other .* step\(\) of the Exch"):
            inner.step()
        take_steps(model, exchange, 2)
        take_steps(model, inner, 1)  # a change that follows a step is part of it
        exchange.finish()
    exchange.close()
    take_steps(model, inner, 1)


def test_two_exchanges_of_one_parameter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pushes the steps of both; with a first rate of 0 neither had seen the other's."""
    trunk, *heads = nn.Linear(7, 7), nn.Linear(7, 3), nn.Linear(7, 3)
    nets = [nn.Sequential(trunk, head) for head in heads]
    exchanges = [exchanging(monkeypatch, net, every=2)[1] for net in nets]
    for net, exchange in zip(nets, exchanges, strict=True):
        exchange.param_groups[0]["lr"] = 0.0
        take_steps(net, exchange, 1)
    with pytest.raises(distbelief.JobError, match=r"parameter 0 is trained by another Exchange"):
        take_steps(nets[0], exchanges[0], 1)
    take_steps(nets[1], exchanges[1], 3)
    exchanges[1].finish()


def test_hooks_are_those_of_the_inner_optimizer(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Regression: torch's `register_step_post_hook` ended in an AttributeError."""
    _, exchange = exchanging(monkeypatch, model, every=2)
    seen: list[object] = []
    exchange.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    exchange.register_state_dict_pre_hook(seen.append)
    take_steps(model, exchange, 2)
    exchange.state_dict()
    assert seen == [exchange.inner] * 3
    with pytest.raises(AttributeError, match="'Exchange' object has no attribute 'no_such'"):
        exchange.no_such  # noqa: B018


def test_a_step_after_close_is_refused(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """With `every` above 1 it trained on, for nobody."""
    _, exchange = exchanging(monkeypatch, model, every=2)
    exchange.close()
    before = flat(model)
    backward(model, 0)
    with pytest.raises(distbelief.PeerLostError, match="Exchange is closed"):
        exchange.step()
    assert all(torch.equal(one, other) for one, other in zip(before, flat(model), strict=True))


@pytest.mark.parametrize("samples", [-1, 1.5, torch.tensor(2.0)])
def test_a_number_of_samples_that_is_none_is_refused_before_the_push(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, samples: int
) -> None:
    """The shards dropped such a push, and the worker waited for an answer until its timeout."""
    _, exchange = exchanging(monkeypatch, model, every=2)
    with pytest.raises(distbelief.JobError, match=r"samples is .*use a whole number, 0 or more"):
        exchange.step(samples=samples)
    exchange.step(samples=int(torch.tensor(3)))


def test_what_is_sent_as_bfloat16_ends_in_the_exact_values_of_the_server(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    server = Server(list(model.parameters()), rule=SUM, host="", numbers="bfloat16")
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    exchange = server.exchange(monkeypatch, inner, every=5)
    anchor = [values.clone() for values in flat(model)]
    assert all(torch.equal(one, one.bfloat16().float()) for one in anchor)
    take_steps(model, exchange, 23)
    served = server.values()
    assert not all(torch.equal(one, one.bfloat16().float()) for one in served)
    exchange.finish()
    for one, other in zip(flat(model), server.values(), strict=True):
        assert torch.equal(one, other)
    n_bytes = 2 * sum(server.layout.shard_size(k) for k in range(2))
    assert exchange.counters()["bytes_out"] == 5 * n_bytes
    # The first fetch, one for each exchange, and the last one, in float32.
    assert exchange.counters()["bytes_in"] == (1 + 5 + 2) * n_bytes


def test_numbers_are_of_two_kinds(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    server = "ipc:///x/.supervisor.1?run=t&shards=1"
    with pytest.raises(distbelief.JobError, match='"float16": wants "bfloat16" or "float32"'):
        distbelief.Exchange(inner, server=server, numbers="float16")  # type: ignore[arg-type]


# ------------------------------------------------------------ policies


def test_auto_fits_the_steps_between_exchanges_to_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push and a fetch take 1 s each, a step 0.1 s: 32 is the least power of two for 80 %."""
    parameter = nn.Parameter(torch.zeros(1 << 20))
    link = Link(bytes_per_second=4 * parameter.numel(), jitter=0.0)
    server = Server([parameter], rule=SUM, n_shards=1, host="", link=link)
    inner = torch.optim.SGD([parameter], lr=RATE)
    exchange = server.exchange(monkeypatch, inner, every="auto")
    parameter.grad = torch.ones_like(parameter)
    assert exchange.counters()["every"] == 4
    begun = server.simulation.now
    for _ in range(200):
        server.compute(0.1)
        exchange.step()
    assert exchange.counters()["every"] == 32
    assert server.simulation.now - begun < 200 * 0.1 * 1.25  # it waited at first only


def test_a_worker_waits_for_one_that_is_too_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """SSP-1, SSP-3: at most `staleness` ticks ahead; and the slow one waits for nobody."""
    policy = ExchangePolicy(send="delta", staleness=2)
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(2)]
    server = Server(parameters[:1], rule=SUM, n_loops=2, policy=policy)
    gaps: list[float] = []
    waits: list[float] = []

    def loop(me: int, seconds: float, n_steps: int) -> Callable[[], None]:
        inner = torch.optim.SGD([parameters[me]], lr=1.0)
        exchange = server.exchange(monkeypatch, inner, every=1)

        def run() -> None:
            for _ in range(n_steps):
                server.compute(seconds)
                parameters[me].grad = -torch.ones(100)
                exchange.step()
                gaps.append(exchange.counters()["clock_gap"])
            exchange.finish()
            waits.append(exchange.counters().get(f"waits_worker-{1 - me}", 0.0))

        return run

    server.run_together(loop(0, 0.1, 30), loop(1, 0.5, 8))
    assert max(gaps) == 2
    assert waits[0] < 0.1  # the slow one ends first, and nobody waits for it then
    assert waits[1] > 1.0
    assert server.values()[0].tolist() == [38.0] * 100


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("numbers", ["float32", "bfloat16"])
@pytest.mark.parametrize("every", [1, 3])
def test_rounds_of_loops_average_what_they_send(
    monkeypatch: pytest.MonkeyPatch, every: int, numbers: Numbers, host: str
) -> None:
    """PA-1, PA-2: after each round all have the mean; the worker's number is its gradient."""
    policy = ExchangePolicy(
        send="delta", every=every, staleness=0, round=Round(), weight="mean", numbers=numbers
    )
    parameters = [nn.Parameter(torch.zeros(40)) for _ in range(3)]
    server = Server(parameters[:1], rule=SUM, n_loops=3, policy=policy, host=host, numbers=numbers)

    def loop(me: int) -> Callable[[], None]:
        parameter = parameters[me]
        exchange = server.exchange(monkeypatch, torch.optim.SGD([parameter], lr=0.25))

        def run() -> None:
            for step in range(1, 7):
                server.compute(0.1 * (me + 1))
                parameter.grad = torch.full((40,), -1.0 - me)
                exchange.step()
                if step % every == 0:
                    assert parameter.tolist() == [0.5 * step] * 40
            exchange.finish()

        return run

    server.run_together(*map(loop, range(3)))
    assert server.values()[0].tolist() == [3.0] * 40


def test_gradients_of_loops_in_rounds_are_those_of_one_large_batch(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """E5, HV-1: `DownpourSGD` with preset horovod."""
    policy = ExchangePolicy(staleness=0, round=Round(), weight="mean")
    plain, twin = copy.deepcopy(model), copy.deepcopy(model)
    rule = distbelief.SGD(learning_rate=RATE)
    server = Server(list(model.parameters()), rule=rule, n_loops=2, policy=policy)

    def loop(net: nn.Module, first: int) -> Callable[[], None]:
        optimizer = server.optimizer(monkeypatch, net.parameters())

        def run() -> None:
            for step in range(first, 20, 2):
                optimizer.zero_grad()
                backward(net, step)
                server.compute(0.1)
                optimizer.step()
            optimizer.finish()

        return run

    server.run_together(loop(model, 0), loop(twin, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE / 2)
    for step in range(0, 20, 2):
        optimizer.zero_grad()
        backward(plain, step)
        backward(plain, step + 1)
        optimizer.step()
    for one, other in zip(flat(plain), server.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_preset_is_the_servers_and_what_contradicts_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    policy = ExchangePolicy(send="delta", every=5, weight="mean", numbers="bfloat16")
    server = Server(list(model.parameters()), rule=SUM, n_loops=9, policy=policy)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    exchange = server.exchange(monkeypatch, inner)
    assert exchange._policy == policy
    assert server.exchange(monkeypatch, inner, every=3)._policy.every == 3
    for preset, why in [
        ("diloco", "staleness is 0 with preset 'diloco', and None at the server: give"),
        ("dpplee3-asgd", "weight is 'sum' with preset 'dpplee3-asgd', and 'mean' at the server"),
        ("horovod", "preset 'horovod' sends gradients"),
        ("dilocco", "Exchange: preset = .*dilocco.* is not known. Did you mean"),
    ]:
        with pytest.raises(distbelief.JobError, match=why):
            server.exchange(monkeypatch, inner, preset=preset)
    with pytest.raises(distbelief.JobError, match=r"use distbelief\.Exchange"):
        server.optimizer(monkeypatch, model.parameters())


def test_the_address_of_a_server_carries_its_policy() -> None:
    policy = ExchangePolicy(staleness=0, round=Round(quorum=0.5, grace_seconds=2.0), weight="mean")
    address = ServerAddress(
        endpoint="ipc:///x/.supervisor.1", run="t", n_shards=1, memory="", exchange=policy
    )
    assert ServerAddress.parse(str(address)) == address
    with pytest.raises(distbelief.JobError, match="is no address of a parameter server"):
        ServerAddress.parse(str(address).replace("mean", "meant"))


def test_the_state_is_restored_and_another_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    inner = torch.optim.AdamW(model.parameters(), lr=RATE)
    server = Server(list(model.parameters()), rule=SUM, n_loops=2)
    exchange = server.exchange(monkeypatch, inner, every=2)
    take_steps(model, exchange, 3)
    exchange.finish()
    twin = copy.deepcopy(model)
    other = server.exchange(monkeypatch, torch.optim.AdamW(twin.parameters(), lr=0.5), every=2)
    other.load_state_dict(copy.deepcopy(exchange.state_dict()))
    for one, net in ((exchange, model), (other, twin)):
        one.zero_grad()
        backward(net, 7)
        one.step()
    assert all(torch.equal(one, other) for one, other in zip(flat(model), flat(twin), strict=True))
    with pytest.raises(distbelief.JobError, match=r"not a state of an Exchange: state, param"):
        exchange.load_state_dict(inner.state_dict())
    assert exchange.state_dict().keys() == {"state", "param_groups", "every"}


@pytest.mark.parametrize("seconds", [0, -1.0, "60", None, True, math.nan])
def test_a_timeout_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, seconds: object
) -> None:
    server = Server(list(model.parameters()), rule=SUM)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    with pytest.raises(distbelief.JobError, match=f"timeout_seconds is {seconds!r}; use a number"):
        server.exchange(monkeypatch, inner, timeout_seconds=seconds)


# ----------------------------------------------------------------- as an optimizer of torch


def test_a_loop_may_take_it_for_an_optimizer_of_torch(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Regression: schedulers and `zero_grad(set_to_none=True)` ended in a TypeError."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=0.9)
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    _, exchange = exchanging(monkeypatch, model, inner, every=3)
    assert isinstance(exchange, torch.optim.Optimizer)
    assert exchange.param_groups is inner.param_groups
    assert exchange.defaults["momentum"] == 0.9
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=7) for one in (optimizer, exchange)
    ]
    for step in range(7):
        for net, one in ((plain, optimizer), (model, exchange)):
            one.zero_grad(set_to_none=step % 2 == 0)
            backward(net, step)
            one.step()
        for schedule in schedules:
            schedule.step()
    exchange.finish()
    assert exchange.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < RATE
    assert exchange.state.keys() == set(model.parameters())
    for value, other in zip(flat(model), flat(plain), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    exchange.zero_grad(set_to_none=False)
    assert all(not torch.any(one.grad) for one in model.parameters() if one.grad is not None)
    with pytest.raises(distbelief.JobError, match="group of parameters cannot be added"):
        exchange.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_after_nan_one_call_goes_back_to_the_last_exchange(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Regression: each further step failed, and nothing but a new Exchange helped."""
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    server, exchange = exchanging(monkeypatch, model, inner, every=2)
    take_steps(model, exchange, 2)
    exchange.finish()
    before = server.values()
    inputs = torch.full((2, 7), torch.nan)
    exchange.zero_grad()
    model(inputs).sum().backward()
    exchange.step()
    with pytest.raises(distbelief.JobError, match=r"NaN .* clip; take_back\(\) goes back to the"):
        exchange.step()
    exchange.take_back()
    assert not exchange.state  # NaN in the velocity would come back at once
    for one, other, there in zip(flat(model), before, server.values(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, there)
    take_steps(model, exchange, 4)
    exchange.finish()
    for one, there in zip(flat(model), server.values(), strict=True):
        assert torch.equal(one, there)
    assert not torch.equal(flat(model)[0], before[0])


def both(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, user: str
) -> tuple[Server, distbelief.Exchange | distbelief.DownpourSGD]:
    """Return a server, and an Exchange or a DownpourSGD, each of plain SGD."""
    if user == "Exchange":
        server = Server(list(model.parameters()), rule=SUM)
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        return server, server.exchange(monkeypatch, inner, every=3)
    server = Server(list(model.parameters()), rule=distbelief.SGD(learning_rate=RATE))
    return server, server.optimizer(
        monkeypatch, model.parameters(), n_fetch=3, n_push=2, learning_rate=RATE
    )


USERS = ["Exchange", "DownpourSGD"]


@pytest.mark.parametrize("user", USERS)
def test_at_the_end_of_a_with_block_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, user: str
) -> None:
    server, optimizer = both(monkeypatch, model, user)
    with optimizer as same:
        assert same is optimizer
        take_steps(model, optimizer, 3)
    for one, there in zip(flat(model), server.values(), strict=True):
        torch.testing.assert_close(one, there)
    with pytest.raises(distbelief.PeerLostError, match="is closed"):
        optimizer.step()
    _, optimizer = both(monkeypatch, model, user)
    with pytest.raises(ZeroDivisionError), optimizer:
        raise ZeroDivisionError
    with pytest.raises(distbelief.PeerLostError, match="is closed"):
        optimizer.step()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, methodcaller("__reduce_ex__", 2)])
def test_a_copy_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, how: Callable[[object], object], user: str
) -> None:
    """Regression: a copy had no connection, and failed in its first step with torch's words."""
    _, optimizer = both(monkeypatch, model, user)
    with pytest.raises(distbelief.JobError, match=f"{user} cannot be copied or pickled.*make ano"):
        how(optimizer)


@pytest.mark.parametrize("user", USERS)
def test_the_memory_layout_of_parameters_stays(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    """Regression: parameters in channels_last became contiguous, and convolutions slower."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 2)
    net = nn.Sequential(convolution, nn.Flatten(), nn.Linear(16, 2))
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = copy.deepcopy(net)
    server, optimizer = both(monkeypatch, net, user)
    for step in range(8):
        x = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(step))
        pairs: Any = ((plain, torch.optim.SGD(plain.parameters(), lr=RATE)), (net, optimizer))
        for one, its in pairs:
            its.zero_grad()
            one(x).square().mean().backward()
            its.step()
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
        assert not convolution.weight.is_contiguous()
    optimizer.finish()
    for one, other, there in zip(
        net.parameters(), plain.parameters(), server.values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(one.detach().reshape(-1), there)
