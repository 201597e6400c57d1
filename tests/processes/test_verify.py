"""A plan run on processes of this host, as `distbelief partition --verify` does it."""

import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from distbelief.errors import DistBeliefError, JobError
from distbelief.partition.verify_run import VerificationRun, run_verification
from distbelief.task.task import DataSpec, ModelSpec, Sample, TaskSpec
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


def rehearsal(folder: Path, *, factory: str) -> VerificationRun:
    return VerificationRun(
        folder=str(folder),
        run="t" * 32,
        task=TaskSpec(
            model=ModelSpec(factory=factory), train=DataSpec(factory="none:none"), loss="mse"
        ),
        sample=Sample(
            input_shape=(1, 8, 8), input_is_integer=False, target_shape=(), target_is_integer=False
        ),
        plan=str(folder / "no-plan.json"),
        weights="",
        inputs="",
        n_samples=1,
        n_steps=1,
        import_paths=(str(folder),),
    )


@pytest.mark.soak
@pytest.mark.untraced
def test_a_machine_that_cannot_begin_ends_all_and_is_told(tmp_path: Path) -> None:
    told = r"(?s)machine \d .*no-plan\.json"
    with pytest.raises(DistBeliefError, match=told) as caught:
        run_verification(rehearsal(tmp_path, factory="tiny:net"), n_machines=2)
    assert not isinstance(caught.value, JobError)
    assert not list(tmp_path.glob("*.json.tmp"))


def process_of(machine: int, folder: Path) -> int | None:
    """Return the process that is this machine of the rehearsal in a folder."""
    ending = f"{folder / 'spec.json'}\0{machine}\0002\0".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().endswith(ending):
                return int(path.parent.name)
    return None


@pytest.mark.soak
@pytest.mark.untraced
def test_a_machine_that_is_stopped_is_named_and_ends_all(tmp_path: Path) -> None:
    """`distbelief predict` waited for it without a word, and without an end."""
    os.mkfifo(tmp_path / "no-plan.json")  # whoever opens it waits, and lives

    def stop() -> None:
        poll((tmp_path / "1.alive").is_file, seconds=60.0)
        pid = process_of(1, tmp_path)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop)
    stopper.start()
    told: list[str] = []
    with pytest.raises(DistBeliefError, match=r"machine 1 .* silent for 1\d\.\d s: it"):
        run_verification(rehearsal(tmp_path, factory="tiny:net"), n_machines=2, tell=told.append)
    stopper.join()
    (text,) = told
    assert "machine 1 (process " in text
    assert process_of(0, tmp_path) is process_of(1, tmp_path) is None
