"""`distbelief train` with real processes: it ends, it survives, it leaves nothing."""

import json
import os
import re
import runpy
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief.job.run.checkpoints import CheckpointStore
from tests.processes.commands import (
    LONG,
    SHARED_MEMORY,
    SLOW,
    Command,
    alive,
    ended,
    poll,
    sets,
    train,
)


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]


def has_restarted(command: Command, role: str) -> bool:
    return command.roles()[role]["restarts"] == 1


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# ------------------------------------------------------------------------------ ends


def test_a_job_ends_and_its_model_is_a_plain_torch_module(folder: Path) -> None:
    with train(folder, "--json", fresh=True) as command:
        poll(lambda: command.pids("shard-0"))
        server = parent_of(command.pids("shard-0")[0])
        assert parent_of(server) == command.process.pid
        assert words_of(server) == words_of(command.process.pid)  # a fork: torch is imported once
        command.ends()
        summary = json.loads(command.output)
    assert summary["stop_reason"] == "5 epochs done"
    assert summary["samples"] >= 10_000
    assert summary["train"]["n_samples"] == 2000
    assert summary["pushes_lost"] == summary["restarts"] == 0
    run = folder / "runs" / "tiny"
    for name in ("job.toml", "metrics.jsonl", "curve.png", "summary.json"):
        assert (run / name).stat().st_size > 0, name
    assert {log.stem for log in (run / "logs").iterdir()} == {
        *("check", "supervisor", "evaluator"),
        *("replica-0", "replica-1", "shard-0", "shard-1"),
    }
    assert not (run / "initial.safetensors").exists()
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    net.load_state_dict(load_file(run / "model.safetensors"))
    held_out = runpy.run_path(str(folder / "tiny.py"))["frames"](500, 7)
    with torch.no_grad():
        hits = net(held_out.inputs).argmax(1) == held_out.targets
    assert float(hits.float().mean()) == pytest.approx(summary["metric"])
    assert summary["metric"] > 0.8


@pytest.mark.soak
def test_the_library_does_what_the_command_does(folder: Path) -> None:
    program = (
        "import distbelief\n"
        "run = distbelief.train('tiny.toml', show=False)\n"
        "print(run.exit_code, run.summary.samples >= 10_000, run.model[0].in_features)"
    )
    done = ended(folder, sys.executable, "-c", program)
    assert done.stdout == "0 True 10\n", done.stderr


@pytest.mark.soak
def test_two_runs_at_once_do_not_meet(folder: Path) -> None:
    with train(folder) as one:
        poll(one.run.is_dir)
        with train(folder, run="tiny.2") as other:
            assert one.wait() == 0, one.output
            assert other.wait() == 0, other.output
    for command in (one, other):
        assert command.summary()["samples"] >= 10_000
        for log in (command.run / "logs").iterdir():
            assert "another run" not in log.read_text()


# ------------------------------------------------------------------------ interrupts


@pytest.mark.untraced
def test_ctrl_c_ends_everything_and_resume_goes_on(folder: Path) -> None:
    with train(folder, *SLOW) as command:
        command.trains(1000)
        command.signal(signal.SIGINT)
        assert poll(lambda: not alive(command.all_pids()) and not command.shared_memory()) < 2.0
        assert command.wait() == 130, command.output
        assert re.search("go on: distbelief train --resume .*tiny", command.output)
    first = command.summary()
    assert first["stop_reason"] == "Ctrl+C"
    assert first["error"] is None
    assert (command.run / "model.safetensors").is_file()
    n_lines = len(command.metrics("samples"))

    resume = ("--resume", "runs/tiny")
    with train(folder, *resume, *sets("model.arguments.width=8"), job=()) as command:
        assert command.wait() == 2
        assert "changed [model]: the checkpoints are of another model" in command.output
    # A little more than was done: had it begun anew, it would take longer.
    goal = sets(f"stop.samples={first['samples'] + 1000}")
    with train(folder, *resume, *goal, *SLOW, job=()) as command:
        assert command.wait() == 0, command.output
    second = command.summary()
    assert second["samples"] >= first["samples"] + 1000
    assert second["seconds"] > first["seconds"]
    samples = command.metrics("samples")
    assert len(samples) > n_lines
    assert samples == sorted(samples)


# ---------------------------------------------------------------------------- deaths


@pytest.mark.untraced
def test_the_job_survives_the_death_of_any_role_and_ends_in_order_with_all(folder: Path) -> None:
    """After SIGTERM to all, shards saved and left at once: what they had applied since was lost."""
    with train(folder, *SLOW) as command:
        poll(command.is_training)
        poll((command.run / "snapshots" / "shard-0").is_dir)
        for role in ("replica-1", "shard-0", "evaluator"):
            command.kill(role)
            poll(partial(has_restarted, command, role))
            command.trains(1000)
        for pid in alive(command.all_pids()):  # as a service manager does
            os.kill(pid, signal.SIGTERM)
        command.signal(signal.SIGTERM)
        command.ends(143)
    assert "did not answer in time" not in command.output
    assert (command.run / "model.safetensors").is_file()
    assert "replica 1 was ended by signal SIGKILL (out of memory?): restarting" in command.output
    assert "restarting it from checkpoint " in command.output


@pytest.mark.untraced
def test_nothing_outlives_a_supervisor_that_is_killed_but_what_was_learnt(folder: Path) -> None:
    """Its shards were killed as well: all pushes since the last snapshot were lost.

    Then all roles ended with it, at once; now they train on for a while.
    """
    patience = ("output.snapshot_every=1000 s", "cluster.patience=2 s")
    with train(folder, *SLOW, *sets(*patience)) as command:
        command.trains(1000)
        pids = command.all_pids()
        command.signal(signal.SIGKILL)
        command.wait()  # it holds nothing open that the user waits for
        killed_at = command.clocks()
        assert min(killed_at.values()) > 10
        before = killed_at
        poll(lambda: min(command.clocks().values()) > max(killed_at.values()) + 10)
        while (clocks := command.clocks()) and alive(pids):
            before = clocks
            time.sleep(0.02)
        poll(lambda: not alive(pids))
        poll(lambda: not command.shared_memory())
    store = CheckpointStore(command.run / "snapshots", report=pytest.fail)
    for shard, clock in before.items():
        snapshot = store.newest(shard)
        assert snapshot is not None
        assert int(snapshot.facts["clock"]) >= clock


@pytest.mark.soak
def test_what_a_crash_of_all_processes_left_is_swept_by_the_next_run(folder: Path) -> None:
    left = SHARED_MEMORY / f"distbelief-1-{folder.name}"
    left.mkdir()
    with train(folder) as command:
        assert command.wait() == 0, command.output
    assert not left.exists()


# -------------------------------------------------------------------- the user's code


@pytest.mark.untraced
def test_a_factory_that_fails_in_a_role_ends_the_job_with_its_words(folder: Path) -> None:
    bad = sets("data.train.factory=tiny:fragile")
    with train(folder, *LONG, *bad, "--json") as command:
        command.ends(1)
    summary, told = command.output.rsplit("}\n", 1)  # the latter on standard error
    error = json.loads(summary + "}")["error"]
    assert error.startswith("replica 1: [data.train] tiny:fragile failed: OSError")
    assert "the disk with the data is gone" in error
    assert told.startswith(f"tiny failed: {error}; its logs are in runs/tiny/logs")


@pytest.mark.untraced
def test_a_training_that_diverges_says_so(folder: Path) -> None:
    rule = 'algorithm.rule={ name = "sgd", learning_rate = 1e30 }'
    with train(folder, *LONG, *sets(rule), "--json") as command:
        assert command.wait() == 1, command.output
    error = json.loads(command.output.rsplit("}\n", 1)[0] + "}")["error"]
    assert "NaN or infinite" in error
    assert "Use a lower learning_rate" in error
