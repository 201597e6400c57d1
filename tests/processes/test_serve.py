"""`distbelief serve` with keys: loops come and go, it is ended, and goes on."""

import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import zmq.utils.z85
from torch import nn

import distbelief
from distbelief.transport.keys import Allowed, KeyFiles
from tests.processes.commands import COMMAND


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(180),
]

MODULE = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
"""
LINE = re.compile(r"workers on this host: (\S+)")


class Server:
    """One life of a server."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said: list[str] = []

    def address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            found = LINE.match(line)
            if found is not None:
                return found[1]
        raise AssertionError(self.said)

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        assert self.process.stdout is not None
        # Not `communicate`: what the search for the address has read ahead is in there.
        self.said.append(self.process.stdout.read())
        return self.process.wait(timeout=90)


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Server]:
    command = [str(COMMAND), "serve", "nets:make", "--shards", "2", *options]
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(MODULE)
    for name in ("server", "worker"):
        KeyFiles(tmp_path / name).make()
    return tmp_path


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train(address: str, keys: Path | None, n_steps: int = 3) -> torch.Tensor:
    """Be one loop; return the server's values at its end."""
    model = net()
    optimizer = distbelief.DownpourSGD(model.parameters(), server=address, keys=keys)
    steps(optimizer, model, n_steps)
    optimizer.finish()
    optimizer.close()
    return flat(model)


def steps(optimizer: distbelief.DownpourSGD, model: nn.Module, n_steps: int) -> None:
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 7)).square().mean().backward()
        optimizer.step()


def told(address: str, keys: Path) -> str:
    with pytest.raises(distbelief.DistBeliefError) as caught:
        train(address, keys)
    return str(caught.value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return int(reserved.getsockname()[1])


def leaks(directory: Path, secrets: list[bytes], pid: int) -> list[str]:
    """Return where a secret is to be read: in files, command lines, environments."""
    places = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".key"]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in [str(pid), *children]:
        places += [Path(f"/proc/{child}/cmdline"), Path(f"/proc/{child}/environ")]
    return [str(path) for path in places if any(secret in path.read_bytes() for secret in secrets)]


@pytest.mark.soak
def test_loops_come_and_go_and_the_server_goes_on_where_it_ended(place: Path) -> None:
    worker, server = KeyFiles(place / "worker"), KeyFiles(place / "server")
    pairs = [worker.pair(), server.pair()]
    raw = [pair.secret for pair in pairs]
    secrets = [text for key in raw for text in (key, key.hex().encode(),
               zmq.utils.z85.encode(key))]  # fmt: skip
    options: tuple[str, ...] = ("--bind", f"tcp://127.0.0.1:{free_port()}", "--keys", "server")
    options += ("--rule", "momentum", "--set", "momentum=0.5", "--seed", "3")
    with serving(place, *options) as first:
        address = first.address()
        assert worker.pair().public not in address
        with pytest.raises(distbelief.JobError) as caught:
            train(address, place / "worker")
        assert f"distbelief keys allow {pairs[0].public} NAME" in str(caught.value)
        server.allow(Allowed(key=pairs[0].public, roles=("worker",), name="w"))
        one = train(address, place / "worker")
        # The server's user, on its machine, has no other key.
        assert not torch.equal(one, train(address, place / "server"))
        with pytest.raises(distbelief.JobError, match="distbelief keys new"):
            train(address, place / "nowhere")
        over_tcp = address.partition("&memory=")[0]
        assert "another run=" in told(over_tcp.replace("run=", "run=0"), worker.directory)
        three = train(over_tcp, place / "worker")
        assert leaks(place, secrets, first.process.pid) == []
        assert first.end() == 0
    assert "the parameters are saved in" in first.said[-1]
    with serving(place, *options) as second:
        assert second.address().partition("&memory=")[0] == over_tcp
        assert torch.equal(train(over_tcp, place / "worker", n_steps=0), three)
        with serving(place, *options) as third:
            said, _ = third.process.communicate(timeout=60)
        assert third.process.returncode == 1
        assert f"is still running (process {second.process.pid})" in said
        server.revoke("w")
        with pytest.raises(distbelief.DistBeliefError):
            train(over_tcp, place / "worker")
        assert second.end() == 0
    said = "".join(map(str, [*first.said, *second.said]))
    assert not any(secret.hex() in said for secret in raw)
    for log in (place / "runs" / "server").glob("*.log"):
        assert "Traceback" not in log.read_text()
    assert (place / "runs" / "server").stat().st_mode & 0o777 == 0o700


def test_a_loop_whose_key_is_revoked_is_told_so(place: Path) -> None:
    """It waited a minute, and the error asked whether the server runs."""
    worker, server = KeyFiles(place / "worker"), KeyFiles(place / "server")
    key = worker.pair().public
    server.allow(Allowed(key=key, roles=("worker",), name="w"))
    with serving(place, "--bind", f"tcp://127.0.0.1:{free_port()}", "--keys", "server") as running:
        address, model = running.address().partition("&memory=")[0], net()
        optimizer = distbelief.DownpourSGD(
            model.parameters(), server=address, keys=worker.directory
        )
        server.revoke("w")
        with pytest.raises(distbelief.JobError) as caught:
            steps(optimizer, model, 100_000)
        with suppress(distbelief.DistBeliefError):
            optimizer.close()
        assert running.end() == 0
    assert "no longer allows this host's key" in str(caught.value)
    assert f"distbelief keys allow {key} NAME" in str(caught.value)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bind", "tcp://0.0.0.0:0"], "distbelief keys new"),
        (["--bind", "tcp://198.51.100.7:0", "--keys", "server"], "no interface"),
        (["--keys", "server", "--insecure"], "--insecure and --keys exclude each other"),
    ],
)
def test_mistakes_are_named(place: Path, options: list[str], said: str) -> None:
    with serving(place, *options) as server:
        told, _ = server.process.communicate(timeout=60)
    assert server.process.returncode in {1, 2}
    assert said in told
    assert "Traceback" not in told


@pytest.mark.soak
def test_insecure_is_loud(place: Path) -> None:
    with serving(place, "--bind", "tcp://0.0.0.0:0", "--insecure") as server:
        address = server.address()
        train(address.replace(address.split(":")[1], "//127.0.0.1"), None)
        assert server.end() == 0
    assert "NOT SECURE" in "".join(server.said)
