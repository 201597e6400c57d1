"""Jobs of real processes, as a user runs them, and what is left of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from distbelief.parameter_server.shard_config import shard_of
from distbelief.protocol.role import Address
from tests.processes.nursery import Forked


COMMAND = Path(sys.executable).with_name("distbelief")
SHARED_MEMORY = Path("/dev/shm")

MODULE = '''
import os
import time

import torch
from torch import nn


class Frames:
    """Three classes that lines separate."""

    def __init__(self, n, seed, pause=0.0):
        self.pause = pause
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(n, 10, generator=generator)
        lines = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
        self.targets = (self.inputs @ lines).argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices):
        time.sleep(self.pause)
        return self.inputs[indices], self.targets[indices]


def frames(n=2000, seed=0, pause=0.0):
    return Frames(n, seed, pause)


def fragile(n=2000, seed=0):
    """Fails in replica 1 only, and so after the job was tried out."""
    if os.readlink("/proc/self/fd/1").endswith("replica-1.log"):
        raise OSError("the disk with the data is gone")
    return Frames(n, seed)


def net(width=16):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3))
'''

TABLES = """
[model]
factory = "tiny:net"

[data.train]
factory = "tiny:frames"

[data.test]
factory = "tiny:frames"
arguments = { n = 500, seed = 7 }

[cluster]
replicas = 2
shards = 2

[evaluation]
every = "500 ms"

[output]
directory = "runs/tiny"
report_every = "500 ms"
snapshot_every = "500 ms"
"""
JOB = f"""{TABLES}
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 20
warm_start_steps = 5
rule = {{ name = "adagrad", learning_rate = 0.05 }}

[stop]
epochs = 5
"""
BATCH_JOB = f"""{TABLES}
[algorithm]
name = "sandblaster"
loss = "cross_entropy"
l2 = 1e-3
portion = 250
tolerance = 5e-3
"""


def write_job(folder: Path, *, job: str = JOB, more: str = "") -> None:
    """Write a job file, and the module that it names with `more` in it."""
    (folder / "tiny.py").write_text(MODULE + more)
    (folder / "tiny.toml").write_text(job)


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


LONG = sets("stop.epochs=1000000")
# The same, for a test of what starts and ends beside it: training leaves the cores to that.
SLOW = [*LONG, *sets("data.train.arguments={ pause = 0.05 }")]


def ended(
    folder: Path, *words: str | Path, seconds: float = 150.0
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end."""
    return subprocess.run(
        words, cwd=folder, check=False, capture_output=True, text=True, timeout=seconds
    )


def printed(folder: Path, program: str) -> str:
    """Run a program to its end; return what it writes to standard output."""
    (folder / "main.py").write_text(program)
    return said(folder, "main.py")


def said(folder: Path, *words: str, code: int = 0, seconds: float = 150.0) -> str:
    """Run `distbelief WORDS...`, or `python FILE.py`, as `printed` does."""
    if is_measured():
        program = sys.executable if words[0].endswith(".py") else COMMAND
        done = ended(folder, program, *words, seconds=seconds)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout
    with TemporaryDirectory() as place:
        errors = Path(place) / "errors"
        with Forked(words, folder=folder, errors=errors) as forked:
            output, _ = forked.communicate(timeout=seconds)
            assert forked.returncode == code, output + errors.read_text()
            return output


def is_measured() -> bool:
    """Whether the coverage of processes is measured: not in those from the nursery."""
    return any(name.startswith("COVERAGE_PROCESS") for name in os.environ)


@dataclass
class Command:
    """A command that runs, or has run."""

    process: "subprocess.Popen[str] | Forked"
    folder: Path
    run: Path
    output: str = field(default="", init=False)

    def wait(self, *, seconds: float = 60.0) -> int:
        """Wait for its end; return the exit code."""
        output, _ = self.process.communicate(timeout=seconds)
        self.output += output
        return self.process.returncode

    def ends(self, code: int = 0, *, seconds: float = 60.0) -> None:
        """Wait for its end with this exit code; nothing of it may be left."""
        assert self.wait(seconds=seconds) == code, self.output
        assert not alive(self.all_pids())
        assert not self.shared_memory()

    def interrupt(self) -> None:
        """Press Ctrl+C, and wait for the end."""
        self.signal(signal.SIGINT)
        self.ends(130)

    def kill_roles(self) -> None:
        """Kill what a supervisor that was killed has left."""
        for pid in self.all_pids():
            with suppress(OSError):
                if Path(f"/proc/{pid}/fd/1").readlink().parent == (self.run / "logs").resolve():
                    os.kill(pid, signal.SIGKILL)

    def metrics(self, name: str) -> list[Any]:
        """Return this figure of each line of metrics.jsonl."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)[name] for line in lines]

    def summary(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads((self.run / "summary.json").read_text()))

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the newest process of a role."""
        os.kill(self.pids(role)[-1], number)

    def status(self) -> dict[str, object]:
        """Return the newest status.json; empty before there is one."""
        try:
            return cast("dict[str, object]", json.loads((self.run / "status.json").read_text()))
        except (OSError, json.JSONDecodeError):
            return {}

    def view(self) -> dict[str, object]:
        return cast("dict[str, object]", self.status().get("view", {}))

    def samples(self) -> int:
        return cast("int", self.view().get("samples", 0))

    def roles(self) -> dict[str, dict[str, object]]:
        roles = cast("list[dict[str, object]]", self.view().get("roles", []))
        return {str(role["name"]): role for role in roles}

    def told(self) -> str:
        """Return the supervisor's log."""
        log = self.run / "logs" / "supervisor.log"
        return log.read_text() if log.is_file() else ""

    def pids(self, role: str) -> list[int]:
        """Return the processes that this role has had, the newest last."""
        log = self.run / "logs" / f"{role}.log"
        text = log.read_text() if log.is_file() else ""
        return [int(pid) for pid in re.findall(r"process (\d+) begins", text)]

    def all_pids(self) -> list[int]:
        return [pid for log in (self.run / "logs").glob("*.log") for pid in self.pids(log.stem)]

    def shared_memory(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"distbelief-{self.process.pid}-*"))

    def clocks(self) -> dict[str, int]:
        """Return how many pushes each shard has applied, as its clients read that."""
        found: dict[str, int] = {}
        for directory in self.shared_memory():
            for file in directory.glob("shard-*.values"):
                header = np.fromfile(file, np.int64, count=2)
                shard = shard_of(Address(file.name.partition(".")[0]))
                found[shard] = max(found.get(shard, 0), int(header[1]))
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def is_training(self) -> bool:
        return self.view().get("phase") == "training" and self.samples() > 0

    def trains(self, n_samples: int = 500) -> None:
        """Wait until it has trained so many more samples."""
        before = self.samples()
        poll(lambda: self.view().get("phase") == "training" and self.samples() > before + n_samples)


@contextmanager
def train(
    folder: Path,
    *arguments: str,
    run: str = "tiny",
    job: Sequence[str] = ("tiny.toml",),
    fresh: bool = False,
) -> Iterator[Command]:
    """Start `distbelief train`; nothing of it is left after the block.

    Args:
        folder: Where it runs.
        arguments: Behind the job file.
        run: Name of the run directory.
        job: The job file.
        fresh: As a user starts it, not from the nursery, which takes less time. So it
            is, too, where its coverage is measured.
    """
    words = ["train", *job, *arguments]
    process: subprocess.Popen[str] | Forked
    if fresh or is_measured():
        process = subprocess.Popen(
            [COMMAND, *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    else:
        process = Forked(words, folder=folder)
    command = Command(process, folder, folder / "runs" / run)
    with ExitStack() as stack:
        stack.callback(lambda: poll(lambda: not alive(command.all_pids())))
        stack.callback(command.kill_roles)
        stack.enter_context(process)
        stack.callback(process.kill)
        yield command


def alive(pids: Sequence[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def poll(condition: Callable[[], object], *, seconds: float = 60.0) -> float:
    """Wait until `condition` holds; return for how long. Fails if it never does."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not so after {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begun
