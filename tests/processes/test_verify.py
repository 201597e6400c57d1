"""A plan run on processes of this host, as `distbelief partition --verify` does it."""

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import distbelief
from distbelief.config.load import parse_job
from distbelief.core.errors import DistBeliefError
from distbelief.job import verify
from distbelief.job.launch.computation import compute
from distbelief.job.launch.local import LocalLauncher
from distbelief.task.data import Batch
from distbelief.worker.computation import Computation
from tests.distbelief.jobs import small
from tests.processes.commands import poll, said


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

MODEL = """
from torch import nn


def net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 5),
    )


def doubles():
    return net().double()


class Last(nn.Module):
    def forward(self, given):
        return given[0][:, -1]


def steps():
    lstm = nn.LSTM(8, 256, 2, batch_first=True, dropout=0.3, bidirectional=True)
    return nn.Sequential(lstm, Last(), nn.Linear(512, 5))
"""


@pytest.mark.soak
@pytest.mark.untraced
@pytest.mark.parametrize("net", ["net", "doubles"])
def test_a_plan_computes_what_one_process_does(tmp_path: Path, net: str) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    words = ["partition", f"tiny:{net}", "--input", "1x8x8", "--batch", "6"]
    words += ["--loss", "cross_entropy", "--machines", "3", "--exactly", "--verify"]
    found = json.loads(said(tmp_path, *words, "--cluster", "rack-1g", "--json"))["verified"]
    assert found["passed"]
    assert found["machines"] == 3
    assert {"outputs", "loss", "0.weight", "1.weight", "6.bias"} <= set(found["errors"])
    errors = {name: each["plan"] for name, each in found["errors"].items()}
    # The gradient of a bias before BatchNorm is zero but for rounding.
    assert errors.pop("0.bias") < 1e-2
    assert max(errors.values()) < 1e-5
    assert sum(link["sent_bytes"] for link in found["links"]) > 0
    for link in found["links"]:
        assert link["sent_bytes"] == link["predicted_bytes"]
    assert found["measured_seconds"] > 0


@pytest.mark.soak
@pytest.mark.untraced
def test_ranks_send_each_other_the_states_of_recurrent_layers(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    words = ["partition", "tiny:steps", "--input", "6x8", "--batch", "8", "--machines", "2"]
    words += ["--loss", "cross_entropy", "--exactly", "--pin", "0.0.step2=units:2", "--verify"]
    found = json.loads(said(tmp_path, *words, "--json"))["verified"]
    assert found["passed"]
    assert max(each["plan"] for each in found["errors"].values()) < 1e-5
    assert min(link["sent_bytes"] for link in found["links"]) > 0
    for link in found["links"]:
        assert link["sent_bytes"] == link["predicted_bytes"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.soak
@pytest.mark.untraced
@pytest.mark.parametrize("names", [["SMALLEST", "ROUNDING"], ["LARGE"]])
def test_what_float32_does_not_decide_is_run_in_float64(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    for name in names:
        monkeypatch.setattr(verify, name, -1.0)
    plan = distbelief.plan(net(), torch.zeros(8, 4), loss="cross_entropy", machines=(2,))
    with closing(LocalLauncher()) as launcher:
        found = verify.verify(
            plan,
            factory=f"{__name__}:net",
            loss="cross_entropy",
            n_cores=2,
            launcher=launcher,
            n_steps=1,
        )
    doubles = [each.double for each in found.errors.values()]
    assert all(double is not None and double < 1e-14 for double in doubles)
    assert found.passed


def run(
    folder: Path, tell: Callable[[str], None], show: Callable[[str], None] = lambda _: None
) -> None:
    weights = str(folder / "no-weights")
    computation = Computation(folder=str(folder), weights=weights, n_samples=1, n_steps=1)
    job = parse_job(small(f"{__name__}:net", "none:none"), path=folder / "job.toml")
    plan = distbelief.plan(net(), torch.zeros(1, 4), machines=(2,), exactly=True).plan
    with closing(LocalLauncher()) as launcher:
        inputs = Batch(torch.zeros(1, 4), None)
        compute(job, computation, plan=plan, inputs=inputs, launcher=launcher, tell=tell, show=show)


@pytest.mark.soak
@pytest.mark.untraced
def test_a_rank_that_cannot_begin_ends_all_and_is_told(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match=r"(?s)replica.*no-weights"):
        run(tmp_path, print)
    assert not list(tmp_path.glob("*.json.tmp"))


def process_of(rank: int, folder: Path) -> int | None:
    """Return the process that writes the log of this rank."""
    log = folder / f"replica-0.{rank}.log"
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if path.readlink() == log:
                return int(path.parts[2])
    return None


@pytest.mark.soak
@pytest.mark.untraced
def test_a_rank_that_is_stopped_is_named_and_ends_all(tmp_path: Path) -> None:
    """`distbelief predict` waited for it without a word, and without an end."""
    os.mkfifo(tmp_path / "no-weights")  # whoever opens it waits, and lives

    states: list[str] = []

    def stop() -> None:
        poll(lambda: states and "replica-0.1 starting" not in states[-1], seconds=100.0)
        pid = process_of(1, tmp_path)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop)
    stopper.start()
    told: list[str] = []
    with pytest.raises(DistBeliefError, match="replica"):
        run(tmp_path, told.append, states.append)
    stopper.join()
    assert any("silent for" in text for text in told)
    assert process_of(0, tmp_path) is process_of(1, tmp_path) is None
