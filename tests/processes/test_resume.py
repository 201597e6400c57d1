"""A run goes on with other numbers of shards and replicas, in real processes."""

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.processes.commands import Command, poll, train, write_job


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

RESUME = ("--resume", "runs/tiny")


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def go_on(folder: Path, shards: int, replicas: int, *more: str) -> Command:
    """Go on to the end; return the command that has ended."""
    options = sets(f"cluster.shards={shards}", f"cluster.replicas={replicas}", *more)
    with train(folder, *RESUME, *options, job=()) as command:
        assert command.wait() == 0, command.output
        assert not command.shared_memory()
    return command


def figures(command: Command) -> dict[str, object]:
    summary: dict[str, object] = json.loads((command.run / "summary.json").read_text())
    return summary


def samples(command: Command) -> int:
    total = figures(command)["samples"]
    assert isinstance(total, int)
    return total


def curve(command: Command) -> list[int]:
    lines = (command.run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["samples"] for line in lines]


def snapshots(command: Command) -> set[str]:
    directory = command.run / "snapshots"
    found = directory.rglob("*.safetensors")
    return {str(path.relative_to(directory)) for path in found}


@pytest.mark.soak
def test_a_run_goes_on_with_other_shards_and_replicas_and_counts_on(tmp_path: Path) -> None:
    write_job(tmp_path)
    with train(tmp_path, *sets("stop.epochs=1000000")) as first:
        poll(lambda: first.is_training() and first.samples() > 1000)
        first.signal(signal.SIGINT)
        assert first.wait() == 130, first.output
    n_first, saved = samples(first), snapshots(first)

    # A little more than was done: had it begun anew, it would end with less.
    more = n_first + 1000
    second = go_on(tmp_path, 3, 3, f"stop.samples={more}", "stop.epochs=1000000")
    told = " ".join(second.output.split())
    assert "shards: 2 before, 3 now; checkpoints are resharded into runs/tiny/" in told
    assert (
        f"replicas: 2 before, 3 now; each skips its share of the {n_first:,} samples so far" in told
    )
    assert figures(second)["n_shards"] == figures(second)["n_replicas"] == 3
    n_second = samples(second)
    assert n_second >= more
    assert saved < snapshots(second)

    third = go_on(tmp_path, 1, 1, f"stop.samples={n_second + 1000}")
    told = " ".join(third.output.split())
    assert (
        f"replicas: 3 before, 1 now; each skips its share of the {n_second:,} samples so far"
        in told
    )
    assert samples(third) >= n_second + 1000
    assert curve(third) == sorted(curve(third))
    assert figures(third)["restarts"] == figures(third)["pushes_lost"] == 0
    metric = figures(third)["metric"]
    assert isinstance(metric, float)
    assert metric > 0.8
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(third.run / "model.safetensors").items()
    }
    assert shapes["0.weight"] == (16, 10)


@pytest.mark.soak
def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    write_job(tmp_path)
    with train(tmp_path, *sets("stop.samples=200")) as first:
        assert first.wait() == 0, first.output
    job = (first.run / "job.toml").read_text()
    before = snapshots(first)
    other = sets("data.train.arguments.n=1500", "cluster.shards=1")
    with train(tmp_path, *RESUME, *other, job=()) as command:
        assert command.wait() == 2
    assert "[data.train] has changed" in command.output
    assert "n = 1500" in command.output
    assert "Restore the data" in command.output
    assert len(command.output.strip().splitlines()) == 1
    assert (first.run / "job.toml").read_text() == job
    assert snapshots(first) == before


@pytest.mark.soak
def test_a_run_of_which_all_is_damaged_goes_on_only_from_scratch(tmp_path: Path) -> None:
    """It began anew without a word, and exited with 0."""
    write_job(tmp_path)
    with train(tmp_path, *sets("stop.samples=200")) as first:
        assert first.wait() == 0, first.output
    for name in snapshots(first) - {"cut.json"}:
        file = first.run / "snapshots" / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    before = snapshots(first)
    with train(tmp_path, *RESUME, job=()) as command:
        assert command.wait() == 1
    assert all(f"runs/tiny/snapshots/{name} (" in command.output for name in before)
    assert "--from-scratch" in command.output
    assert snapshots(first) == before
    with train(tmp_path, *RESUME, "--from-scratch", job=()) as command:
        assert command.wait() == 0, command.output
    assert "starting from scratch; earlier files are in runs/tiny/aside-1" in (command.output)
    aside = command.run / "aside-1" / "snapshots"
    assert all((aside / name).is_file() for name in before)
    assert figures(command)["pushes_lost"] == 0


@pytest.mark.soak
def test_a_closed_terminal_ends_a_run_with_snapshot_and_model(tmp_path: Path) -> None:
    """Nothing was saved, and no model written."""
    write_job(tmp_path)
    often = sets("stop.epochs=1000000", 'output.snapshot_every="1 h"')
    with train(tmp_path, *often) as command:
        poll(lambda: command.is_training() and command.samples() > 1000)
        command.signal(signal.SIGHUP)
        command.signal(signal.SIGHUP)
        assert command.wait() == 129, command.output
    assert len(snapshots(command)) == 2
    assert load_file(command.run / "model.safetensors")
