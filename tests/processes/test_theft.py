"""Another user of the machine attacks a server while its roles die: it gains nothing.

A process that bound the port of a role that had just died was shown the run's token by
all who had spoken with that role, within 0.06 s; with it, it was let in and stopped the
job. Pushes and fetches were as open to it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import distbelief
from distbelief.serve.address import ServerAddress
from distbelief.transport.keys import KeyPair
from distbelief.transport.shared_memory import FileMemory
from tests.processes.commands import alive, poll
from tests.processes.test_serve import MODULE, Server, net, serving


NOBODY: Final = 65534
SIX: Final = ("--shards", "6")  # each may die four times in a row, and is started again
THIEF: Final = Path(__file__).with_name("thief.py")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to be another user"
    ),
]


@dataclass
class Victim:
    """A standing server, and one loop of its user's."""

    server: Server
    folder: Path
    address: str
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def roles(self) -> list[str]:
        return [path.stem for path in self.folder.glob("shard-*.log")]

    def newest(self, role: str) -> int:
        text = (self.folder / f"{role}.log").read_text()
        return int(re.findall(r"process (\d+) begins", text)[-1])

    def family(self) -> list[int]:
        shards = [self.newest(role) for role in self.roles]
        return [self.server.process.pid, *shards]

    def told(self) -> str:
        return (self.folder / "supervisor.log").read_text()

    def secrets(self) -> list[bytes]:
        """Return all that could help somebody to be let in."""
        address = ServerAddress.parse(self.address)
        found = [address.run.encode()]
        if address.secret:
            pair = KeyPair.parse(address.secret)
            found += [address.secret.encode(), pair.secret]
        return found


@dataclass
class Attack:
    """A thief at work."""

    process: "subprocess.Popen[str]"

    def show(self, pids: Sequence[int]) -> None:
        """Tell the thief whose sockets it may touch."""
        inodes = set()
        for pid in pids:
            with suppress(FileNotFoundError):  # it has ended
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(FileNotFoundError):
                        inodes.update(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
        assert self.process.stdin is not None
        order = {"inodes": sorted(inodes), "pids": list(pids)}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, object]:
        said, _ = self.process.communicate(timeout=60)
        report: dict[str, object] = json.loads(said.splitlines()[-1])
        return report


@contextmanager
def attack() -> Iterator[Attack]:
    with subprocess.Popen(
        [sys.executable, str(THIEF), str(NOBODY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Attack(process)
        finally:
            process.kill()
            process.wait()
            for path in Path("/dev/shm").glob("distbelief-*"):
                if path.stat().st_uid == NOBODY:  # the thief has made it
                    shutil.rmtree(path)


def take_step(model: nn.Module, optimizer: distbelief.DownpourSGD) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()


def take_last_step(model: nn.Module, optimizer: distbelief.DownpourSGD) -> None:
    take_step(model, optimizer)
    optimizer.close(timeout_seconds=2.0)


@pytest.mark.parametrize(
    ("options", "n_deaths"),
    [
        ((), 2),
        pytest.param(SIX, 20, marks=pytest.mark.soak),
        pytest.param((*SIX, "--bind", "tcp://127.0.0.1:0"), 20, marks=pytest.mark.soak),
    ],
    ids=["files", "files, 20 deaths", "tcp, 20 deaths"],
)
def test_another_user_gains_nothing(tmp_path: Path, options: Sequence[str], n_deaths: int) -> None:
    (tmp_path / "nets.py").write_text(MODULE)
    with serving(tmp_path, *options) as server, attack() as thief:
        victim = Victim(server, tmp_path / "runs" / "server", server.address())
        model = net()
        optimizer = distbelief.DownpourSGD(model.parameters(), server=victim.address)
        for number in range(n_deaths):
            thief.show([os.getpid(), *victim.family()])
            take_step(model, optimizer)
            role = sorted(victim.roles)[number % len(victim.roles)]
            dead = victim.newest(role)
            os.kill(dead, signal.SIGKILL)
            poll(lambda: not alive([dead]))  # noqa: B023 -- called at once
            poll(lambda: victim.newest(role) != dead)  # noqa: B023 -- called at once
            take_step(model, optimizer)  # with the new life: the run goes on
        end_at_once(victim)
        thief.show([os.getpid(), *victim.family()])
        # It dials the dead again and again: longer than the longest time between two.
        with pytest.raises(distbelief.PeerLostError):
            take_last_step(model, optimizer)
        report = thief.end()
    heard = bytes.fromhex(str(report["heard"]))
    assert not [secret for secret in victim.secrets() if secret in heard]
    assert report["let_in"] == 0, report
    assert "stolen" not in victim.told()
    # It has tried, though.
    assert int(str(report["tries"])) > n_deaths
    assert report["listened"]
    if "--bind" not in options:
        assert heard == b""


def end_at_once(victim: Victim) -> None:
    """Kill all of a server, and remove what it leaves as the next one would."""
    pids = victim.family()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    poll(lambda: not alive(pids[1:]))
    victim.server.process.wait(60)
    FileMemory.sweep()
