"""The outer step of DiLoCo (Douillard et al. 2023, algorithm 1) against two other sources of it.

    delta_i = theta - theta_i        after H local steps of replica i from theta
    theta   = Nesterov(theta, mean of delta_i)

Once as published, in a few lines; and once by torchft, where that is installed.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.futures import Future

import distbelief
from distbelief.parameter_server.policy import ExchangePolicy, Round
from tests.distbelief.serve.loops import Server


N_REPLICAS, EVERY, N_ROUNDS = 2, 4, 5
RATE, MOMENTUM = 0.7, 0.9
SIZE = 33


def gradient(replica: int, step: int) -> torch.Tensor:
    stream = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(SIZE, generator=stream)


def start() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1.0, 1.0, SIZE))


def inner(parameter: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter], lr=0.01)


def take_steps(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer | distbelief.Exchange, replica: int
) -> None:
    for step in range(EVERY * N_ROUNDS):
        parameter.grad = gradient(replica, step)
        optimizer.step()


def published() -> torch.Tensor:
    shared, velocity = start().detach(), torch.zeros(SIZE)
    local = [start() for _ in range(N_REPLICAS)]
    optimizers = [inner(parameter) for parameter in local]
    for round_ in range(N_ROUNDS):
        for replica, (parameter, optimizer) in enumerate(zip(local, optimizers, strict=True)):
            parameter.data.copy_(shared)
            for step in range(round_ * EVERY, (round_ + 1) * EVERY):
                parameter.grad = gradient(replica, step)
                optimizer.step()
        delta = torch.stack([shared - parameter.detach() for parameter in local]).mean(0)
        velocity = MOMENTUM * velocity + delta
        shared = shared - RATE * (delta + MOMENTUM * velocity)
    return shared


@pytest.mark.parametrize("host", ["host-0", ""])
def test_rounds_of_exchange_are_diloco_as_published(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    policy = ExchangePolicy(send="delta", every=EVERY, staleness=0, round=Round(), weight="mean")
    rule = distbelief.Momentum(learning_rate=RATE, momentum=MOMENTUM, nesterov=True)
    parameters = [start() for _ in range(N_REPLICAS)]
    server = Server(parameters[:1], rule=rule, n_loops=N_REPLICAS, policy=policy, host=host)

    def loop(replica: int) -> Callable[[], None]:
        exchange = server.exchange(monkeypatch, inner(parameters[replica]))

        def run() -> None:
            take_steps(parameters[replica], exchange, replica)
            exchange.finish()

        return run

    server.run_together(*map(loop, range(N_REPLICAS)))
    torch.testing.assert_close(server.values()[0], published(), rtol=1e-5, atol=1e-6)


class Averages:
    """Stands for torchft's manager: the mean over all replicas, each of which has a thread."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self._barrier = threading.Barrier(N_REPLICAS)
        self._sent: list[torch.Tensor] = []

    def allreduce(self, tensor: torch.Tensor, *, should_quantize: bool) -> Future[torch.Tensor]:
        assert not should_quantize
        self._sent.append(tensor)
        self._barrier.wait()
        mean = torch.stack(self._sent[-N_REPLICAS:]).mean(0)
        self._barrier.wait()
        tensor.copy_(mean)
        done: Future[torch.Tensor] = Future()
        done.set_result(tensor)
        return done

    def current_step(self) -> int:
        return 0

    def should_commit(self) -> bool:
        return True

    def start_quorum(self, *_: object) -> None: ...
    def register_state_dict_fn(self, *_: object) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...


def test_the_published_outer_step_is_torchfts() -> None:
    local_sgd = pytest.importorskip("torchft.local_sgd")
    manager, found = Averages(), dict[int, torch.Tensor]()

    def replica(index: int) -> None:
        module = nn.Module()
        module.theta = start()
        parameter = module.theta
        outer = torch.optim.SGD([parameter], lr=RATE, momentum=MOMENTUM, nesterov=True)
        optimizer = inner(parameter)
        with local_sgd.DiLoCo(manager, [module], optimizer, outer, sync_every=EVERY):
            take_steps(parameter, optimizer, index)
        found[index] = parameter.detach()

    run_all([partial(replica, index) for index in range(N_REPLICAS)])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], published(), rtol=1e-5, atol=1e-6)


def run_all(loops: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
