"""`DownpourSGD` in an ordinary loop, against real shards."""

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import distbelief
from distbelief import ParameterServer
from tests.processes.commands import poll
from tests.processes.nursery import context


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


@pytest.mark.usefixtures("forked_servers")
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


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.soak
def test_a_loop_that_has_finished_needs_its_server_no_more(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's: its optimizer outlives its server until the script's end."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(
        "distbelief.serve.server_loop.atexit", SimpleNamespace(register=at_exit.append)
    )
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


@pytest.mark.usefixtures("forked_servers")
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


# ------------------------------------------------- the thread that moves blocks, and the end


# Each line of its input is one loop, in a process that it forks: torch is imported once. It writes
# the number of that process, and how it has ended.
SCRIPT = """
import gc, os, sys
import torch
import distbelief

torch.set_num_threads(1)
server, folder = sys.argv[1:]
for how in map(str.strip, sys.stdin):
    loop = os.fork()
    if loop == 0:
        break
    print(loop, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(loop, 0)[1]), flush=True)
else:
    sys.exit()
for number in (1, 2):
    os.dup2(os.open(f"{folder}/{how}.{number}", os.O_WRONLY | os.O_CREAT), number)
parameter = torch.nn.Parameter(torch.zeros(300_000))  # two blocks
optimizer = distbelief.DownpourSGD([parameter], server=server)


def step():
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


for _ in range(3):
    step()
if how == "error":
    raise RuntimeError("of the user")
if how == "interrupt":
    print("ready", flush=True)
    while True:
        step()
if how == "fork":
    child = os.fork()
    try:
        step()
    except distbelief.PeerLostError as error:
        assert child == 0 and "is closed" in str(error), error
        optimizer.counters()
        sys.exit()
    assert os.waitpid(child, 0) == (child, 0)
    step()
if how == "garbage":
    optimizer.itself = optimizer
    del optimizer
    gc.collect()
"""


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.untraced
def test_a_loop_ends_as_the_user_ends_it(tmp_path: Path) -> None:
    """The thread that moves blocks hangs nothing; a script that ends early loses no push."""
    values = nn.Parameter(torch.zeros(300_000))
    rule = distbelief.SGD(learning_rate=1.0)
    with ParameterServer([values], rule=rule, shared_memory=False) as server:
        command = [sys.executable, "-c", SCRIPT, server.address, str(tmp_path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as loops:
            ways, told = loops.stdin, loops.stdout
            assert ways is not None
            assert told is not None

            def start(how: str) -> int:
                ways.write(f"{how}\n")
                ways.flush()
                return int(told.readline())

            def end(how: str, status: int, *, out: str = "") -> None:
                ended = int(told.readline())
                err = (tmp_path / f"{how}.2").read_text()
                assert (ended, (tmp_path / f"{how}.1").read_text()) == (status, out), err
                assert ("Traceback" in err) is (status != 0)

            start("error")
            end("error", 1)
            start("fork")
            end("fork", 0)
            distbelief.DownpourSGD([values], server=server.address).close()
            assert values.mean().item() == -3 - 5
            loop, out = start("interrupt"), tmp_path / "interrupt.1"
            poll(lambda: out.exists() and out.read_text() == "ready\n")
            time.sleep(0.5)
            os.kill(loop, signal.SIGINT)
            end("interrupt", -signal.SIGINT, out="ready\n")
            start("garbage")
            end("garbage", 0)


def test_a_server_that_ends_while_the_user_computes_is_named_by_the_next_step(
    model: nn.Module,
) -> None:
    server = served(model, shared_memory=False).start()
    assert server._process is not None
    pid = server._process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert "server_process" in Path(f"/proc/{child}/cmdline").read_text()  # forked: torch is there
    optimizer = distbelief.DownpourSGD(model.parameters(), server=server.address)
    take_steps(model, optimizer, 3)
    before = flat(model).clone()
    server.close()
    poll(lambda: optimizer._session.node.halted, seconds=10.0)
    with pytest.raises(distbelief.PeerLostError, match=r"server ipc://.*the server has ended"):
        take_steps(model, optimizer, 1)
    assert torch.equal(flat(model), before)
    optimizer._session.close()


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.untraced
def test_loops_follow_the_preset_of_their_server(model: nn.Module) -> None:
    """Averaging every 5 steps: rounds of both, and both end with the server's values."""
    nets = [copy.deepcopy(model) for _ in range(2)]
    counters: list[dict[str, float]] = []
    with ParameterServer(model.parameters(), preset="dl4j-averaging", shards=2) as server:
        # As with one group of weights and one of biases. It was "PeerLostError: JobError: ...".
        mixed = torch.optim.SGD(list(model.parameters())[::-1], lr=RATE)
        with pytest.raises(
            distbelief.JobError,
            match=r"it has parameter 0 of shape .*, not parameter 0 .* in the same order",
        ):
            distbelief.Exchange(mixed, server=server.address)
        exchanges = [
            distbelief.Exchange(torch.optim.SGD(net.parameters(), lr=RATE), server=server.address)
            for net in nets
        ]

        def train(net: nn.Module, exchange: distbelief.Exchange) -> None:
            for inputs, targets in batches(20):
                exchange.zero_grad()
                nn.functional.mse_loss(net(inputs), targets).backward()
                exchange.step()
            exchange.close()
            counters.append(exchange.counters())

        threads = [
            threading.Thread(target=train, args=pair) for pair in zip(nets, exchanges, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Equal samples: the mean of both is what each has done.
    take_steps(model, torch.optim.SGD(model.parameters(), lr=RATE), 20)
    for net, found in zip(nets, counters, strict=True):
        torch.testing.assert_close(flat(net), flat(model), rtol=1e-4, atol=1e-6)
        assert (found["pushes_acknowledged"], found["staleness_max"]) == (4, 0)


# ------------------------------------------------------------------ workers that end, servers too


def partner(server: str, ready: Connection) -> None:
    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.zeros(1000))
    exchange = distbelief.Exchange(torch.optim.SGD([parameter], lr=1.0), server=server, every=1)
    for step in range(10**9):
        parameter.grad = torch.ones_like(parameter)
        exchange.step()
        if step == 3:
            ready.send("ready")


@pytest.mark.each_value
@pytest.mark.usefixtures("forked_servers")
@pytest.mark.untraced
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("rounds", [True, False])
def test_a_worker_that_is_killed_does_not_stall_the_others(
    *, rounds: bool, shared_memory: bool
) -> None:
    """Regression: those in a round with it, or under SSP, waited for 9.2 to 9.6 seconds."""
    parameter = nn.Parameter(torch.zeros(1000))
    options: dict[str, Any] = {"staleness": 1}
    if rounds:
        options = {"staleness": 0, "round": {"quorum": 1.0}, "weight": "mean"}
    with ParameterServer(
        [parameter], rule=distbelief.SGD(learning_rate=1.0), shared_memory=shared_memory, **options
    ) as server:
        inner = torch.optim.SGD([parameter], lr=1.0)
        exchange = distbelief.Exchange(inner, server=server.address, every=1)
        is_ready, ready = context().Pipe(duplex=False)
        other = context().Process(target=partner, args=(server.address, ready), daemon=True)
        other.start()
        ready.close()

        def step() -> float:
            parameter.grad = torch.ones_like(parameter)
            began = time.monotonic()
            exchange.step()
            return time.monotonic() - began

        while not is_ready.poll():
            step()
        other.kill()
        other.join()
        longest = max(step() for _ in range(20))
        exchange.close()
    assert longest < 3.0  # it was above 9; 0.1 is usual


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.untraced
def test_a_server_continues_where_one_in_its_directory_ended(tmp_path: Path) -> None:
    """Regression: after the script was killed the next was told to remove what was saved."""

    def run() -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(70))
        with ParameterServer(
            [parameter], rule=distbelief.SGD(learning_rate=1.0), directory=tmp_path
        ) as server:
            optimizer = distbelief.DownpourSGD([parameter], server=server.address)
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.close()
        return parameter.detach().clone()

    assert torch.equal(run(), torch.full((70,), -1.0))
    assert torch.equal(run(), torch.full((70,), -2.0))


def normal() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def labelled(seed: int, n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = 3.0 + 5.0 * torch.randn(n, 7, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, :3] - 3.0).argmax(1)


def train_on(net: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> float:
    """Train, and return the accuracy of the net in evaluation mode."""
    for seed in seeds:
        inputs, targets = labelled(seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return accuracy_of(net)


def accuracy_of(net: nn.Module) -> float:
    inputs, targets = labelled(-1, n=1000)
    with torch.no_grad():
        found = copy.deepcopy(net).eval()(inputs).argmax(1)
    return float((found == targets).float().mean())


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.untraced
def test_a_worker_that_joins_late_is_as_accurate_as_one_process() -> None:
    """B had the parameters of A after 100 steps, and fresh statistics: 0.40 where A had 0.80."""
    plain, first, second = normal(), normal(), normal()
    expected = train_on(plain, torch.optim.SGD(plain.parameters(), lr=RATE), range(130))
    first[0].bias.requires_grad = second[0].bias.requires_grad = False
    rule = distbelief.SGD(learning_rate=RATE)
    with ParameterServer(first, rule=rule, shards=2) as server:
        one = distbelief.DownpourSGD(first.parameters(), server=server.address, buffers=first)
        train_on(first, one, range(100))
        one.close()
        backwards = list(second.named_parameters())[::-1]
        other = distbelief.DownpourSGD(backwards, server=server.address, buffers=second)
        joined = accuracy_of(second)
        train_on(second, other, range(100, 130))
        other.finish()
        assert min(joined, accuracy_of(second)) > max(expected - 0.1, 0.7)
        assert second[1].num_batches_tracked == 130
        server.load_state_dict(plain.state_dict())  # of a frozen parameter too
        third = normal()
        distbelief.DownpourSGD(third.parameters(), server=server.address, buffers=third).close()
        assert all(map(torch.equal, third.state_dict().values(), plain.state_dict().values()))


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.untraced
@pytest.mark.parametrize("kind", ["DownpourSGD", "Exchange"])
def test_workers_that_end_one_by_one_count_as_those_that_end_together(kind: str) -> None:
    """The second counted whole what it pushed after the end of the first."""
    nets = normal(), normal()
    preset = "local" if kind == "Exchange" else "downpour"
    with ParameterServer(nets[0], preset=preset, rule=distbelief.SGD(learning_rate=RATE)) as server:

        def worker(net: nn.Module) -> distbelief.DownpourSGD | distbelief.Exchange:
            if kind == "Exchange":
                inner = torch.optim.SGD(net.parameters(), lr=RATE)
                return distbelief.Exchange(inner, server=server.address, buffers=net, every=2)
            return distbelief.DownpourSGD(net.parameters(), server=server.address, buffers=net)

        one, other = map(worker, nets)
        train_on(nets[0], one, range(8))
        train_on(nets[1], other, range(3))
        one.close()
        train_on(nets[1], other, range(3, 8))
        other.close()
        assert nets[1][1].num_batches_tracked == 8
