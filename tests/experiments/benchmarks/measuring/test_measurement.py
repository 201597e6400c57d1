import json
import os
import subprocess
import sys

import pytest

from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread


def test_turns_go_back_the_way_they_came() -> None:
    assert "".join(measurement.turns("ABC", n_rounds=3)) == "ABCCBAABC"


def test_a_spread_is_median_lowest_and_highest() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)


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


def test_what_has_ended_has_used_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert measurement.cpu_seconds([ended.pid]) == 0.0
    assert measurement.peak_bytes(ended.pid) == 0


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    measurement.conclude("x", {"a": 1.23456})
    assert json.loads(capsys.readouterr().out) == {"benchmark": "x", "figures": {"a": 1.235}}
