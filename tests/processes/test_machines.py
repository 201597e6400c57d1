"""Replicas that are split over machines, each a process: as a user runs them."""

import json
import os
import re
import shutil
import signal
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import experiments.digits
from distbelief.plans.plan import load
from experiments.digits.digits import images, net
from tests.distbelief.jobs import small
from tests.processes.commands import COMMAND, Command, alive, ended, poll, said, sets, train


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(experiments.digits.__path__[0])
SPLIT = sets("cluster.partitions=2", "model.initial=seed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("digits.py", "digits.toml"):
        shutil.copy(EXAMPLE / name, tmp_path / name)
    return tmp_path


def digits(folder: Path, *arguments: str) -> AbstractContextManager[Command]:
    return train(folder, *arguments, run="digits", job=("digits.toml",))


@pytest.mark.soak
def test_two_replicas_of_two_machines_learn_and_predict(folder: Path) -> None:
    soon = sets("stop.accuracy=0.96", "evaluation.every=1 s")
    with digits(folder, *SPLIT, *soon) as command:
        command.ends(seconds=400.0)
    summary = command.summary()
    # It was 96 %; the last evaluation is of what was pushed after that as well.
    assert summary["metric"] >= 0.9, command.output
    assert summary["pushes_lost"] == 0
    names = {f"replica-{r}.{m}" for r in range(2) for m in range(2)}
    assert names | {"shard-0", "shard-1", "evaluator", "evaluator.1"} == set(command.roles())
    # What it leaves behind: the plan, its picture, a plain model; nothing else.
    plan = load(command.run / "plan.json")
    assert (plan.cluster.n_machines, plan.batch, plan.machines) == (2, 32, [0, 1])
    assert (command.run / "plan.png").read_bytes().startswith(b"\x89PNG")
    module = net()
    module.load_state_dict(load_file(command.run / "model.safetensors"))
    held_out = images("test")
    with torch.no_grad():
        expected = module.eval()(held_out.tensors[0])
    np.save(folder / "scans.npy", held_out.tensors[0].numpy())
    for extra in ([], ["--whole"]):
        words = ["predict", str(command.run), "scans.npy", "--json", *extra]
        told = json.loads(said(folder, *words, seconds=300))
        assert told["machines"] == (1 if extra else 2)
        assert told["shape"] == [360, 10]
        outputs = np.load(folder / "scans.outputs.npy")
        np.testing.assert_allclose(outputs, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.soak
def test_a_killed_machine_costs_its_replica_a_step_and_nobody_else(folder: Path) -> None:
    lasting = sets("stop.epochs=100000", "algorithm.warm_start_steps=0")
    with digits(folder, *SPLIT, *lasting) as command:
        poll(command.is_training, seconds=400.0)
        poll(lambda: "replica-0.1" in command.roles(), seconds=60.0)
        names = ("replica-0.0", "replica-0.1", "replica-1.0", "replica-1.1", "shard-0")
        for killed in ("replica-0.1", "replica-0.0"):
            before = {name: command.pids(name) for name in names}
            os.kill(before.pop(killed)[-1], signal.SIGKILL)
            poll(partial(begins_anew, command, killed), seconds=60.0)
            poll(partial(has_steps, command, killed), seconds=120.0)
            assert {name: command.pids(name) for name in before} == before
        counters = [command.roles()[name]["counters"] for name in names[:-1]]
        command.interrupt()
    assert said_to_restart(command, "replica 0.1", "replica 0.0")
    for each in cast("list[dict[str, float]]", counters):
        assert each["messages_shared"] == each["messages_out"] > 0
    assert not command.shared_memory()


def said_to_restart(command: Command, *labels: str) -> bool:
    """Return whether these roles alone were killed and started again."""
    found = re.findall(r"(\S+ \S+) was ended by signal SIGKILL.*: restarting", command.output)
    return found == [*labels]


def has_steps(command: Command, name: str) -> bool:
    """Return whether this life of a role has taken steps, by its own word."""
    counters = command.roles()[name].get("counters") or {}
    return cast("dict[str, float]", counters).get("steps", 0.0) > 0


def begins_anew(command: Command, name: str) -> bool:
    return not has_steps(command, name)


WIDE = '''
import torch
from torch import nn


class Waves:
    """Random numbers, and which half of them is larger."""

    def __init__(self, n, width):
        self.inputs = torch.randn(n, width, generator=torch.Generator().manual_seed(0))
        first, second = self.inputs.chunk(2, dim=1)
        self.targets = (first.sum(1) < second.sum(1)).to(torch.int64)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def waves(n=64, width=2000):
    return Waves(n, width)


def net(width=2000, hidden=20000):
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU(),
        nn.Linear(width, 2),
    )
'''

WIDE_JOB = small(
    "wide:net",
    "wide:waves",
    model={"initial": "seed"},
    algorithm={"batch_size": 16, "rule": {"name": "sgd", "learning_rate": 0.001}},
    cluster={"shards": 6},
    stop={"epochs": None, "samples": 64},
    output={"snapshot_every": "1 h"},
)

MODEL_BYTES = 4 * (2000 * 20000 + 20000 + 20000 * 2000 + 2000 + 2000 * 2 + 2)  # 320 MB
CAP_BYTES = 240_000_000
"""Of a process's private memory, beyond what it has without any model to speak of."""


def write_wide(folder: Path) -> None:
    (folder / "wide.py").write_text(WIDE)
    (folder / "wide.toml").write_text(WIDE_JOB)


def private_bytes(pid: int) -> int:
    """Return what RLIMIT_DATA counts: private writable memory, used or not."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    return 0


def with_limit(n_bytes: int, arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run a command of which no process may have more private memory."""
    program = f"ulimit -d {n_bytes // 1024}; exec {COMMAND} {' '.join(arguments)}"
    done = ended(folder, "bash", "-c", program, seconds=900)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_a_model_that_no_process_could_hold_trains(tmp_path: Path) -> None:
    """RLIMIT_DATA for every process: 240 MB beyond that of an empty role; 320 MB."""
    write_wide(tmp_path)
    small = sets("model.arguments.hidden=10", "stop.samples=1000000")
    split = sets("cluster.partitions=4")
    with train(tmp_path, *small, *split, run="wide", job=("wide.toml",)) as command:
        poll(command.is_training, seconds=300.0)
        empty = max(private_bytes(pid) for pid in alive(command.all_pids()))
        command.signal(signal.SIGINT)
        command.wait(seconds=60.0)
    cap = empty + CAP_BYTES
    assert cap - empty < MODEL_BYTES
    directory = sets("output.directory=runs/large")
    code, told = with_limit(cap, ["train", "wide.toml", *split, *directory], tmp_path)
    assert code == 0, told
    summary = json.loads((tmp_path / "runs" / "large" / "summary.json").read_bytes())
    assert summary["samples"] >= 64
    model = tmp_path / "runs" / "large" / "model.safetensors"
    assert model.stat().st_size > MODEL_BYTES
    # The same limit ends a job whose replica is one process.
    directory = sets("output.directory=runs/whole")
    code, told = with_limit(cap, ["train", "wide.toml", *directory], tmp_path)
    assert code != 0, told


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_sixteen_machines_learn_and_one_may_be_killed(folder: Path) -> None:
    many = sets("cluster.partitions=16", "model.initial=seed")
    one = sets("cluster.replicas=1", "model.arguments.channels=32")
    # 16 others evaluate, on the same cores.
    seldom = sets("evaluation.every=30 s", "stop.epochs=12")
    with digits(folder, *many, *one, *seldom) as command:
        poll(command.is_training, seconds=900.0)
        command.kill("replica-0.7")
        command.ends(seconds=1200.0)
    assert said_to_restart(command, "replica 0.7")
    assert command.summary()["metric"] >= 0.95
