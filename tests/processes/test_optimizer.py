"""`DownpourSGD` in an ordinary loop, against real shards."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import distbelief
from distbelief import ParameterServer


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

RATE = 0.1


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def batches(n_steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n_steps):
        inputs = torch.randn(16, 7, generator=generator)
        yield inputs, inputs[:, :3].sin()


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    for inputs, targets in batches(n):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def served(model: nn.Module, *, shards: int = 1, shared_memory: bool = True) -> ParameterServer:
    rule = distbelief.SGD(learning_rate=RATE)
    return ParameterServer(
        model.parameters(), rule=rule, shards=shards, shared_memory=shared_memory
    )


@pytest.mark.untraced
@pytest.mark.parametrize("shared_memory", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_one_blocking_worker_is_plain_sgd_to_the_bit_and_pushes_numbers_only(
    model: nn.Module, *, shared_memory: bool
) -> None:
    plain = copy.deepcopy(model)
    take_steps(plain, torch.optim.SGD(plain.parameters(), lr=RATE, fused=True), 20)
    with served(model, shards=2, shared_memory=shared_memory) as server:
        optimizer = distbelief.DownpourSGD(model.parameters(), server=server.address, blocking=True)
        take_steps(model, optimizer, 20)
        (model(torch.full((1, 7), torch.nan)).sum()).backward()
        with pytest.raises(distbelief.JobError, match="step 20: NaN or infinity"):
            optimizer.step()
        optimizer.finish()
        assert optimizer.counters()["pushes_acknowledged"] == 20
        optimizer.close()
    assert torch.equal(flat(model), flat(plain))


@pytest.mark.soak
def test_a_loop_that_has_finished_needs_its_server_no_more(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's: its optimizer outlives its server until the script's end."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("distbelief.server_loop.atexit", SimpleNamespace(register=at_exit.append))
    with served(model) as server:
        optimizer = distbelief.DownpourSGD(model.parameters(), server=server.address)
        take_steps(model, optimizer, 3)
        optimizer.finish()
        optimizer.finish()  # may be asked for again, to see what others have done
    (leave,) = at_exit
    leave()
    assert capsys.readouterr().out == ""
    optimizer.close()
    with pytest.raises(distbelief.PeerLostError, match="is closed"):
        take_steps(model, optimizer, 1)


@pytest.mark.soak
def test_a_server_that_has_ended_is_named_and_leaves_the_model_as_it_was(model: nn.Module) -> None:
    server = served(model).start()
    optimizer = distbelief.DownpourSGD(
        model.parameters(), server=server.address, timeout_seconds=5.0
    )
    take_steps(model, optimizer, 3)
    server.close()
    with pytest.raises(distbelief.PeerLostError, match="server ipc://"):
        take_steps(model, optimizer, 100)
    assert torch.isfinite(flat(model)).all()
    with pytest.raises(distbelief.PeerLostError):
        optimizer.close()
    optimizer.close()
