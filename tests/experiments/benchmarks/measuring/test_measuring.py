"""Processes that take turns, and what they use."""

import io
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.benchmarks.measuring import measurement, workers
from experiments.benchmarks.measuring.measurement import Spread
from experiments.benchmarks.measuring.workers import Workers, module, serve_steps
from experiments.benchmarks.measuring.workload import Workload


def test_turns_go_back_the_way_they_came_and_figures_are_one_json_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "".join(measurement.turns("ABC", n_rounds=3)) == "ABCCBAABC"
    take = itertools.count().__next__
    found = measurement.interleaved({"A": take, "B": take}, n_rounds=3)
    assert found == {"A": [0, 3, 4], "B": [1, 2, 5]}
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
    measurement.conclude("x", {"a": 1.23456})
    assert json.loads(capsys.readouterr().out) == {"benchmark": "x", "figures": {"a": 1.235}}


def test_a_family_has_children_and_their_children() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert {os.getpid(), child.pid, grandchild} <= set(measurement.family(os.getpid()))
        child.communicate(b"\n")


def test_memory_and_processor_time_of_this_process_are_seen() -> None:
    assert measurement.peak_bytes(os.getpid()) > 1 << 20
    assert measurement.shared_out_bytes([os.getpid()]) > 1 << 20
    assert measurement.cpu_seconds([os.getpid()]) > 0.0
    assert measurement.busy_seconds() > measurement.cpu_seconds([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert measurement.cpu_seconds([ended.pid]) == 0.0
    assert measurement.peak_bytes(ended.pid) == 0


BEGUN = "cpu  {user} 0 100 5000 10 0 0 0 900 0\ncpu0 1 1\n"


def test_use_by_others_is_in_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A "quiet" machine on which others took half a core: its figures meant nothing."""
    now, stat = [10.0], tmp_path / "stat"
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(measurement, "_PROC", tmp_path)
    stat.write_text(BEGUN.format(user=1000))
    own = iter([100.0, 300.0])
    with measurement.usage(lambda: next(own)) as used:
        now[0] += 1000.0
        stat.write_text(BEGUN.format(user=71_000))
    assert used.cpu_seconds == 200.0
    assert used.others == pytest.approx(0.5)  # 700 s at 100 ticks a second, less those 200
    for _ in range(2):  # what is ours is not others'; nor is anything without /proc/stat
        with measurement.usage() as used:
            sum(range(100_000))
        assert used.others == 0.0
        stat.unlink(missing_ok=True)


def test_a_worker_takes_as_many_steps_as_each_line_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[None] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n3\n"))
    serve_steps(lambda: steps.append(None))
    ready, *answers = capsys.readouterr().out.splitlines()
    assert ready == workers.READY
    assert [len(json.loads(line)) for line in answers] == [2, 3]
    assert len(steps) == workers.N_WARM_STEPS + 2 + 3


@pytest.mark.processes
@pytest.mark.soak
def test_workers_take_turns_and_a_step_takes_as_long_as_its_slowest(tmp_path: Path) -> None:
    workload = Workload(net="speech", batch_size=4, small=True)
    program = module("bare.whole_net", workload, 1)
    with Workers("pair", [program, program], tmp_path, stopped=True) as pair:
        turn = pair.turn(seconds=0.1)
        assert len(turn.steps) == len(turn.of_each[0]) >= 2
        assert turn.steps[0] == max(steps[0] for steps in turn.of_each) > 0
        assert len(pair.ask(3, of=[1])) == 1
        pair.turn(seconds=0.1)
    assert pair.status is not None
    assert pair.step.low <= pair.step.median <= pair.step.high
    assert len(pair.turns) == 2
    assert pair.n_bytes_max > 1 << 20
    assert set(pair.row()) == {"step, ms", "CPU ms", "memory", "others"}


@pytest.mark.processes
@pytest.mark.slow
def test_workers_that_fail_are_reported_with_the_end_of_their_log(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)nobody has ended.*no_such_module"),
        Workers("nobody", [module("no_such_module")], tmp_path),
    ):
        pass
