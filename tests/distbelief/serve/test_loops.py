import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from typing_extensions import override

import distbelief
from distbelief.parameter_server.rules import UpdateRule
from distbelief.simulation.network import Link
from tests.distbelief.serve.loops import Server


RATE = 0.1
RULE = distbelief.SGD(learning_rate=RATE)

both_data_paths = pytest.mark.parametrize("host", ["host-0", ""])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def served(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    *,
    rule: UpdateRule = RULE,
    host: str = "host-0",
    **options: float | bool,
) -> tuple[Server, distbelief.DownpourSGD]:
    """Return a server of the model, and the optimizer of a loop that trains with it."""
    server = Server(list(model.parameters()), rule=rule, host=host)
    return server, server.optimizer(monkeypatch, model.parameters(), **options)


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer | distbelief.Exchange, n: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        inputs = torch.randn(16, 7, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :3].sin()).backward()
        optimizer.step()


def assert_same(parameters: Sequence[torch.Tensor], others: nn.Module) -> None:
    for one, other in zip(parameters, others.parameters(), strict=True):
        flat = other.detach().view(-1)
        torch.testing.assert_close(one.detach().view(-1), flat, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------- how often, and in between


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("n_push", [1, 2, 5, 10])
@pytest.mark.parametrize("n_fetch", [1, 2, 5, 10])
def test_one_worker_alone_is_plain_sgd_however_seldom_it_fetches_and_pushes(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, n_fetch: int, n_push: int, host: str
) -> None:
    """Regression: a fetch overwrote the local steps whose gradients were not pushed yet."""
    plain = copy.deepcopy(model)
    take_steps(plain, torch.optim.SGD(plain.parameters(), lr=RATE), 23)
    blocking = n_fetch == n_push == 1
    options: dict[str, Any] = {"n_fetch": n_fetch, "n_push": n_push, "blocking": blocking}
    server, optimizer = served(monkeypatch, model, host=host, learning_rate=RATE, **options)
    take_steps(model, optimizer, 23)
    for _ in range(2):  # what is left is pushed once
        optimizer.finish()
        n_pushes = len(range(0, 23, n_push)) + (22 % n_push > 0)
        assert optimizer.counters()["pushes_acknowledged"] == n_pushes
    assert_same(list(model.parameters()), plain)
    assert_same(server.values(), plain)


def test_local_steps_are_overwritten_on_demand_as_in_the_paper(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """DB-6, DB-9: at step 4 the fetch comes first, and gradients 1 to 3 are unsent."""
    options: dict[str, Any] = {"n_fetch": 4, "n_push": 4, "learning_rate": RATE, "blocking": True}
    server, optimizer = served(monkeypatch, model, overwrite_local_steps=True, **options)
    take_steps(model, optimizer, 4)  # of which the last fetches for the next
    of_the_first = server.values()
    for one, other in zip(model.parameters(), of_the_first, strict=True):
        assert torch.equal(one.detach().view(-1), other)
    assert optimizer.counters()["pushes_sent"] == 1


# ------------------------------------------------------------- while the user computes


@pytest.mark.parametrize(("compute", "period"), [(0.2, 1.1), (0.9, 1.1), (2.5, 2.6)])
def test_bytes_travel_while_the_user_computes(
    monkeypatch: pytest.MonkeyPatch, compute: float, period: float
) -> None:
    """Push t - 1 and fetch t + 1 are under way during step t: the longer of both rules.

    Without overlap a step takes `compute` and the seconds of at least one transfer, here 1.
    """
    parameter = nn.Parameter(torch.zeros(4 << 20))
    link = Link(bytes_per_second=4 * parameter.numel(), jitter=0.0)
    server = Server([parameter], rule=RULE, n_shards=1, host="", link=link)
    optimizer = server.optimizer(monkeypatch, [parameter])
    parameter.grad = torch.ones_like(parameter)
    ends = []
    for _ in range(12):
        server.compute(compute)
        optimizer.step()
        ends.append(server.simulation.now)
    assert (ends[-1] - ends[3]) / 8 <= period
    optimizer.finish()
    assert torch.equal(parameter.detach(), server.values()[0])
    assert server.values()[0].mean().item() == pytest.approx(-12 * RATE)


@both_data_paths
@pytest.mark.parametrize("kind", ["DownpourSGD", "Exchange"])
def test_values_change_only_within_a_step(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, kind: str, host: str
) -> None:
    """Not while the user computes with them, though a fetch is complete meanwhile."""
    server = Server(list(model.parameters()), rule=RULE, n_loops=2, host=host)
    optimizer: torch.optim.Optimizer | distbelief.Exchange
    if kind == "DownpourSGD":
        optimizer = server.optimizer(monkeypatch, model.parameters())
    else:
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer = server.exchange(monkeypatch, inner, every=1)
    twin = copy.deepcopy(model)
    other = server.optimizer(monkeypatch, twin.parameters(), blocking=True)
    for _ in range(4):
        take_steps(model, optimizer, 1)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        take_steps(twin, other, 1)
        server.compute(1.0)
        assert torch.equal(nn.utils.parameters_to_vector(model.parameters()).detach(), before)


# --------------------------------------------------------------- what has no gradient


class Gated(nn.Module):
    """One layer is frozen, and one is used in every third step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(7, 20).requires_grad_(False)  # noqa: FBT003 -- torch's
        self.often = nn.Linear(20, 3)
        self.seldom = nn.Linear(20, 3)
        self.n_calls = 0

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        hidden = self.frozen(x)
        result: torch.Tensor = self.often(hidden)
        if self.n_calls % 3 == 0:
            result = result + self.seldom(hidden)
        return result


RULES: dict[str, tuple[UpdateRule, Callable[..., torch.optim.Optimizer], Any]] = {
    "sgd": (
        distbelief.SGD(learning_rate=RATE, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": RATE, "weight_decay": 0.1},
    ),
    "momentum": (
        distbelief.Momentum(learning_rate=RATE, momentum=0.9, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": RATE, "momentum": 0.9, "weight_decay": 0.1},
    ),
    "adam": (distbelief.Adam(learning_rate=0.01), torch.optim.Adam, {"lr": 0.01}),
}


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("name", RULES)
def test_parameters_without_gradient_do_not_move_as_in_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, host: str
) -> None:
    """Regression: the server's momentum and weight decay moved them, even frozen ones."""
    rule, torchs, options = RULES[name]
    model, plain = Gated(), Gated()
    frozen = plain.frozen.weight.detach().clone()
    take_steps(plain, torchs(plain.parameters(), **options), 20)
    server, optimizer = served(monkeypatch, model, rule=rule, host=host, blocking=True)
    take_steps(model, optimizer, 20)
    optimizer.finish()
    assert_same(server.values(), plain)
    assert torch.equal(model.frozen.weight, frozen)


def test_one_gradient_in_any_step_of_a_push_is_enough_to_be_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Gated()
    rule = distbelief.SGD(learning_rate=RATE, weight_decay=0.1)
    server, optimizer = served(monkeypatch, model, rule=rule, n_push=2)
    before = server.values()
    take_steps(model, optimizer, 4)  # pushes 0, then 1 and 2: the last uses `seldom`
    optimizer._wait(lambda: optimizer._session.client.unacknowledged == 0, "")
    moved = [
        not torch.equal(one, other) for one, other in zip(before, server.values(), strict=True)
    ]
    assert moved == [False, False, True, True, True, True]


def test_a_step_without_any_gradient_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    rule = distbelief.SGD(learning_rate=RATE, weight_decay=0.1)
    server, optimizer = served(monkeypatch, model, rule=rule)
    before = server.values()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.finish()
    for one, other in zip(before, server.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("n", [1, 3])
def test_sparse_gradients_are_those_of_a_dense_embedding(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Regression: they ended in an error from inside torch."""
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=sparse)
        options: dict[str, Any] = {
            "n_fetch": n,
            "n_push": n,
            "learning_rate": RATE,
            "blocking": True,
        }
        server, optimizer = served(monkeypatch, model, **options)
        for step in range(7):
            optimizer.zero_grad()
            model(torch.tensor([step, 2, 2])).square().sum().backward()
            optimizer.step()
        optimizer.finish()
        found.append(server.values()[0])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("n_push", [1, 3])
def test_gradients_that_found_no_room_in_time_are_pushed_later(
    monkeypatch: pytest.MonkeyPatch, n_push: int
) -> None:
    """They were dropped: the next `finish` ended without error, and without them."""
    parameter = nn.Parameter(torch.zeros(4))
    server = Server([parameter], rule=distbelief.SGD(learning_rate=1.0), host="host-0")
    optimizer = server.optimizer(monkeypatch, [parameter], n_push=n_push)
    session, wait = optimizer._session, optimizer._session.wait

    def silent(until: Callable[[], bool], what: str, seconds: float) -> None:
        if what == "room for a push":
            raise distbelief.PeerLostError(what)
        wait(until, what, seconds)

    def step() -> None:
        parameter.grad = torch.ones(4)
        optimizer.step()

    for _ in range(n_push):
        step()
    monkeypatch.setattr(session, "wait", silent)
    with pytest.raises(distbelief.PeerLostError):
        step()
    if n_push > 1:
        with pytest.raises(distbelief.PeerLostError):
            optimizer.finish()
    monkeypatch.setattr(session, "wait", wait)
    optimizer.step()  # the same again
    optimizer.finish()
    assert server.values()[0].tolist() == [-(n_push + 1.0)] * 4
    assert parameter.tolist() == [-(n_push + 1.0)] * 4


# ------------------------------------------------------- what belongs to the server


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> distbelief.DownpourSGD:
    rule = distbelief.SGD(learning_rate=RATE)
    server = Server(list(model.parameters()), rule=rule, n_loops=2)
    return server.optimizer(monkeypatch, model.parameters())


Plateau = lr_scheduler.ReduceLROnPlateau
SCHEDULERS: list[Callable[[torch.optim.Optimizer], object]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 10),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, float),
    lr_scheduler.ReduceLROnPlateau,
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
]


def follow(schedule: Callable[[torch.optim.Optimizer], object], optimizer: Any) -> None:  # noqa: ANN401 -- torch's step has overloads
    scheduler: Any = schedule(optimizer)  # most change the rate at once
    for loss in range(12):
        optimizer.step()
        scheduler.step(loss) if isinstance(scheduler, Plateau) else scheduler.step()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_of_torch_are_rejected_without_a_rate_that_they_could_change(
    optimizer: distbelief.DownpourSGD, scheduler: Callable[[torch.optim.Optimizer], object]
) -> None:
    """Regression: each raised KeyError: 'lr'."""
    with pytest.raises(
        distbelief.JobError, match=r"no lr is given.*give DownpourSGD\(\.\.\., lr="
    ) as error:
        follow(scheduler, optimizer)
    assert str(error.value).endswith("or the rule schedule=")


def test_a_scheduler_that_changes_nothing_needs_no_rate(
    model: nn.Module, optimizer: distbelief.DownpourSGD
) -> None:
    constant = lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(model, optimizer, 2)
    constant.step()
    assert constant.get_last_lr() == [1.0]
    assert "lr" not in optimizer.param_groups[0]


class Wrapper:
    """As those of Lightning: of the optimizer's class, without its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

    def __getattr__(self, name: str) -> object:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        self._optimizer.step()


@pytest.mark.parametrize("host", ["host-0", ""])
def test_what_is_called_of_a_wrapper_acts_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, host: str
) -> None:
    """Regression: `close` did not finish, and a step after `finish` was refused."""
    server = Server(list(model.parameters()), rule=distbelief.SGD(learning_rate=RATE), host=host)
    optimizer = server.optimizer(
        monkeypatch, model.parameters(), n_push=3, n_fetch=3, learning_rate=RATE
    )
    wrapped: Any = Wrapper(optimizer)
    take_steps(model, wrapped, 2)
    wrapped.finish()
    assert_served(server, model)
    take_steps(model, wrapped, 3)  # two of them not pushed
    wrapped.close()
    assert_served(server, model)
    assert wrapped.counters("steps", "pushes_acknowledged") == {
        "steps": 5,
        "pushes_acknowledged": optimizer.counters()["pushes_sent"],
    }
    with pytest.raises(distbelief.JobError, match="Did you mean 'steps'"):
        wrapped.counters("step")


def assert_served(server: Server, model: nn.Module) -> None:
    for value, parameter in zip(server.values(), model.parameters(), strict=True):
        assert torch.equal(value, parameter.detach().reshape(-1))


def test_a_checkpoint_of_just_now_is_no_change(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    server, optimizer = served(monkeypatch, model, blocking=True)
    take_steps(model, optimizer, 2)
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(saved)
    take_steps(model, optimizer, 2)
    optimizer.finish()
    assert_served(server, model)
    model.load_state_dict(saved)  # the server has gone on since
    with pytest.raises(distbelief.JobError, match="was changed between two steps"):
        take_steps(model, optimizer, 1)
    assert_same_state(model, saved)
    optimizer.finish()
    assert_served(server, model)


def assert_same_state(model: nn.Module, state: dict[str, Any]) -> None:
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("key", ["weight_decay", "momentum", "betas"])
def test_a_group_with_an_option_of_the_servers_rule_is_rejected(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, optimizer: distbelief.DownpourSGD, key: str
) -> None:
    """Regression: the option was accepted and ignored."""
    server = Server(list(model.parameters()), rule=distbelief.SGD(learning_rate=RATE))
    with pytest.raises(distbelief.JobError, match=f"groups have no '{key}'"):
        server.optimizer(monkeypatch, [{"params": model.parameters(), key: 0.1}])
    with pytest.raises(distbelief.JobError, match=f"groups have no '{key}'"):
        optimizer.param_groups[0][key] = 0.1


def test_a_wrong_key_of_a_group_is_answered_with_the_right_one(
    optimizer: distbelief.DownpourSGD,
) -> None:
    with pytest.raises(
        distbelief.JobError, match="no 'learning_rat': Did you mean 'learning_rate'"
    ):
        optimizer.param_groups[0]["learning_rat"] = 0.1


def test_groups_may_have_their_own_rates_for_local_steps(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    server = Server(list(model.parameters()), rule=distbelief.SGD(learning_rate=RATE))
    groups = [{"params": first}, {"params": second, "learning_rate": 0.0}]
    optimizer = server.optimizer(monkeypatch, groups, n_fetch=9, learning_rate=RATE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    take_steps(model, optimizer, 2)
    moved = [
        not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)
    ]
    assert moved == [True, True, False, False]
    with pytest.raises(distbelief.JobError, match="learning_rate is -1; use a number, 0 or more"):
        optimizer.param_groups[0]["learning_rate"] = -1


def test_parameters_cannot_be_added_later(optimizer: distbelief.DownpourSGD) -> None:
    """Regression: they moved by local steps only and were never pushed."""
    more = nn.Linear(2, 2)
    with pytest.raises(distbelief.JobError, match="pass all of them at once"):
        optimizer.add_param_group({"params": more.parameters()})


def test_a_state_dict_is_restored_and_another_optimizers_is_rejected(
    model: nn.Module, optimizer: distbelief.DownpourSGD
) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(model, optimizer, 2)
    assert optimizer.state_dict()["steps"] == 2
    optimizer.load_state_dict({**optimizer.state_dict(), "steps": 5})
    assert optimizer.counters("steps") == {"steps": 5}
    with pytest.raises(distbelief.JobError, match="steps of the state are -1"):
        optimizer.load_state_dict({**optimizer.state_dict(), "steps": -1})
    with pytest.raises(distbelief.JobError, match="no lr is given"):
        lr_scheduler.LinearLR(optimizer)
    torchs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(distbelief.JobError, match="groups have no 'momentum'"):
        optimizer.load_state_dict(torchs.state_dict())


def test_a_parameter_in_place_of_another_trains(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Regression: the new one in the group never moved; in torch it does."""
    server, optimizer = served(monkeypatch, model, blocking=True)
    plain = copy.deepcopy(model)
    inner = torch.optim.SGD(plain.parameters(), lr=RATE)
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = [(model, optimizer), (plain, inner)]
    for net, one in pairs:
        take_steps(net, one, 2)
        layer = net[0]  # type: ignore[index]
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        one.param_groups[0]["params"][0] = layer.weight
        take_steps(net, one, 2)
    optimizer.finish()
    assert_same(list(plain.parameters()), model)
    assert_same(server.values(), model)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(distbelief.JobError, match=r"4 parameters were given .* the groups have 3"):
        optimizer.step()


@pytest.mark.soak
@pytest.mark.untraced
@pytest.mark.filterwarnings("ignore")  # those of torch's compiler
def test_a_compiled_function_may_call_step(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """Regression: the compiler followed `step` to the server, and failed in its copies."""
    plain = copy.deepcopy(model)
    _, optimizer = served(monkeypatch, model, blocking=True)

    @torch.compile(backend="eager")
    def train(net: nn.Module, one: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        one.zero_grad()
        net(inputs).square().mean().backward()
        one.step()

    for net, one in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=RATE))):
        for _ in range(3):
            train(net, one, torch.ones(4, 7))
    optimizer.finish()
    assert_same(list(plain.parameters()), model)


def test_a_closure_gives_the_loss_and_the_gradient(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    _, optimizer = served(monkeypatch, model, blocking=True)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 7)).square().mean()
        loss.backward()
        return float(loss.detach())

    losses = [optimizer.step(closure) or 0.0 for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] != losses[-1]
