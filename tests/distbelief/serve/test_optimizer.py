"""`DownpourSGD` before it meets a server; with one, see `tests/processes`."""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

import distbelief
from distbelief.protocol import Finished, Join, Message, PeerEntry, Peers
from distbelief.protocol.role import SUPERVISOR
from distbelief.serve.address import ServerAddress
from distbelief.transport.address import LOOPBACK, Endpoint
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from tests.elsewhere import answers
from tests.links import link
from tests.processes.commands import poll


def connect(server: object, timeout_seconds: float = 5.0) -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    distbelief.DownpourSGD(parameters, server=cast("str", server), timeout_seconds=timeout_seconds)


@contextmanager
def serving(serve: Callable[[], object]) -> Iterator[None]:
    """Repeat this in another thread."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            serve()

    server = threading.Thread(target=run)
    server.start()
    try:
        yield
    finally:
        over.set()
        server.join()


@pytest.mark.parametrize("server", [5, None, b"tcp://127.0.0.1:41000"])
def test_an_address_that_is_no_text_is_rejected(server: object) -> None:
    with pytest.raises(distbelief.JobError, match="use ParameterServer") as caught:
        connect(server)
    assert str(caught.value).startswith(f"server is {server!r}: use ParameterServer")


def test_a_server_of_another_run_is_distinguished_from_an_absent_one() -> None:
    secrets = [new_secret() for _ in range(2)]
    links = ListenConfig(host=LOOPBACK, secret=secrets[0]).transport(
        name=SUPERVISOR, incarnation=1, run="r", log=lambda _level, _text: None
    )
    with links as transport:
        address = ServerAddress(
            endpoint=Endpoint.parse(transport.endpoint).endpoint,
            run="r",
            secret=secrets[1],
            n_shards=1,
            memory="",
        )
        lost = pytest.raises(distbelief.PeerLostError)
        with serving(lambda: transport.poll(0.02)), lost as caught:
            connect(str(address), timeout_seconds=1.0)
    told = str(caught.value)
    assert address.endpoint in told
    assert "has not the key in the address" in told
    assert not any(secret in told for secret in secrets)


def test_a_server_whose_directory_is_gone_has_ended(tmp_path: Path) -> None:
    address = ServerAddress(
        endpoint=f"ipc://{tmp_path}/gone/.supervisor.1", run="r", n_shards=1, memory=""
    )
    with pytest.raises(distbelief.PeerLostError, match="the process that made it has ended"):
        connect(str(address))


def test_a_worker_announces_that_it_leaves(tmp_path: Path) -> None:
    """Regression: a worker that had left counted as present for ten seconds and stayed known."""
    told: list[Message] = []

    def serve() -> None:
        transport.poll(0.02)
        for envelope in transport.receive():
            told.append(envelope.message)
            if isinstance(envelope.message, Join):
                transport.connect(envelope.sender, 1, envelope.message.endpoint)
                transport.send(envelope.sender, Peers(entries=(entry,)))

    with link(SUPERVISOR, tmp_path) as transport:
        entry = PeerEntry(name="shard-0", incarnation=1, endpoint=transport.endpoint, host="")
        address = ServerAddress(endpoint=transport.endpoint, run="run", n_shards=1, memory="")
        with serving(serve):
            with pytest.raises(distbelief.PeerLostError, match="a session"):
                connect(str(address), timeout_seconds=2.0)
            poll(lambda: isinstance(told[-1], Finished), seconds=5.0)


def compilers_after_a_first_step() -> list[str]:
    """Return the modules of torch's compiler that a started worker has imported."""
    optimizer = object.__new__(distbelief.DownpourSGD)
    net = nn.Linear(2, 1)
    torch.optim.Optimizer.__init__(optimizer, net.parameters(), {"learning_rate": 0.1})
    net(torch.ones(2)).backward()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    return sorted({"torch._dynamo", "torch._inductor"} & {*sys.modules})


def test_a_worker_starts_without_torchs_compiler() -> None:
    # torch's own optimisers import it when they are made: of a worker that was killed
    # and started again that took 6 s of a processor, and the others' steps with it.
    assert (
        answers("tests.distbelief.serve.test_optimizer", "t.compilers_after_a_first_step()") == []
    )


def test_with_the_compiler_already_imported_torchs_methods_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", importlib.import_module("sys"))
    left: list[str] = []
    for name in ("add_param_group", "zero_grad"):
        method = getattr(torch.optim.Optimizer, name)

        def whole(*_given: object, name: str = name) -> None:
            left.append(name)

        whole.__dict__["__wrapped__"] = method
        monkeypatch.setattr(torch.optim.Optimizer, name, whole)
    optimizer = object.__new__(distbelief.DownpourSGD)
    torch.optim.Optimizer.__init__(optimizer, nn.Linear(2, 1).parameters(), {})
    optimizer.zero_grad()
    assert left == ["add_param_group", "zero_grad"]
