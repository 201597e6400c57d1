"""A run goes on with other numbers of shards and replicas, in real processes."""

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.object_store import object_store
from tests.processes.commands import LONG, Command, sets, train


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

RESUME = ("--resume", "runs/tiny")


def go_on(folder: Path, shards: int, replicas: int, *more: str) -> Command:
    """Go on to the end; return the command that has ended."""
    options = sets(f"cluster.shards={shards}", f"cluster.replicas={replicas}", *more)
    with train(folder, *RESUME, *options, job=()) as command:
        command.ends()
    return command


def curve(command: Command) -> list[int]:
    return command.metrics("samples")


def snapshots(command: Command) -> set[str]:
    directory = command.run / "snapshots"
    found = directory.rglob("*.safetensors")
    return {str(path.relative_to(directory)) for path in found}


@pytest.mark.soak
@pytest.mark.timeout(400)  # each role imports the driver
def test_a_run_in_an_object_store_goes_on_from_there_with_other_shards(folder: Path) -> None:
    with object_store() as bucket:
        options = sets(f"cluster.checkpoints={bucket}/runs", "output.snapshot_every=5 s")
        with train(folder, *options, *LONG, fresh=True) as first:
            first.trains(1000)
            first.interrupt()
        assert snapshots(first) == set()
        n_first = first.summary()["samples"]
        more = sets("cluster.shards=3", f"stop.samples={n_first + 1000}")
        with train(folder, *RESUME, *more, job=(), fresh=True) as second:
            second.ends(seconds=200.0)
    assert "checkpoints are resharded into s3://bucket/runs/tiny-" in " ".join(
        second.output.split()
    )
    assert second.summary()["samples"] >= n_first + 1000
    assert load_file(second.run / "model.safetensors").keys() == {
        f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }


@pytest.mark.soak
def test_a_run_goes_on_with_other_shards_and_replicas_and_counts_on(folder: Path) -> None:
    parts = "algorithm.order=parts"  # of dealt samples no replica has a share
    with train(folder, *LONG, *sets(parts)) as first:
        first.trains(1000)
        first.interrupt()
    n_first, saved = first.summary()["samples"], snapshots(first)

    # A little more than was done: had it begun anew, it would end with less.
    more = n_first + 1000
    second = go_on(folder, 3, 3, f"stop.samples={more}", "stop.epochs=1000000", parts)
    told = " ".join(second.output.split())
    assert "shards: 2 before, 3 now; checkpoints are resharded into runs/tiny/" in told
    assert (
        f"replicas: 2 before, 3 now; each skips its share of the {n_first:,} samples so far" in told
    )
    assert second.summary()["n_shards"] == second.summary()["n_replicas"] == 3
    n_second = second.summary()["samples"]
    assert n_second >= more
    assert saved < snapshots(second)

    third = go_on(folder, 1, 1, f"stop.samples={n_second + 1000}", parts)
    told = " ".join(third.output.split())
    assert (
        f"replicas: 3 before, 1 now; each skips its share of the {n_second:,} samples so far"
        in told
    )
    assert third.summary()["samples"] >= n_second + 1000
    assert curve(third) == sorted(curve(third))
    assert third.summary()["restarts"] == third.summary()["pushes_lost"] == 0
    assert third.summary()["metric"] > 0.8
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(third.run / "model.safetensors").items()
    }
    assert shapes["0.weight"] == (16, 10)


@pytest.mark.soak
def test_a_run_of_which_all_is_damaged_goes_on_only_from_scratch(folder: Path) -> None:
    """It began anew without a word, and exited with 0."""
    with train(folder, *sets("stop.samples=200")) as first:
        first.ends()
    for name in snapshots(first) - {"cut.json"}:
        file = first.run / "snapshots" / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    before = snapshots(first)
    with train(folder, *RESUME, job=()) as command:
        assert command.wait() == 1
    assert all(f"runs/tiny/snapshots/{name} (" in command.output for name in before)
    assert "--from-scratch" in command.output
    assert snapshots(first) == before
    with train(folder, *RESUME, "--from-scratch", job=()) as command:
        assert command.wait() == 0, command.output
    assert "starting from scratch; earlier files are in runs/tiny/aside-1" in (command.output)
    aside = command.run / "aside-1" / "snapshots"
    assert all((aside / name).is_file() for name in before)
    assert command.summary()["pushes_lost"] == 0


@pytest.mark.soak
def test_a_closed_terminal_ends_a_run_with_snapshot_and_model(folder: Path) -> None:
    """Nothing was saved, and no model written."""
    often = sets('output.snapshot_every="1 h"')
    with train(folder, *LONG, *often) as command:
        command.trains(1000)
        command.signal(signal.SIGHUP)
        command.signal(signal.SIGHUP)
        assert command.wait() == 129, command.output
    assert len(snapshots(command)) == 2
    assert load_file(command.run / "model.safetensors")
