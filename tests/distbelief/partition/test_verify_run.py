"""Heartbeats of the ranks of a plan verification."""

import os
from pathlib import Path

import pytest

from distbelief.errors import DistBeliefError
from distbelief.partition.verify_run import (
    DEAD_SECONDS,
    SILENT_SECONDS,
    START_SECONDS_MAX,
    ProcessHeartbeat,
)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "0.alive", tmp_path / "1.alive"]


def touch(path: Path, now: float) -> None:
    path.touch()
    os.utime(path, ns=(0, int(1e9 * (1 + now))))


def looks(pulse: ProcessHeartbeat, begin: float, end: float, *alive: Path) -> list[str]:
    """Look twice a second; these ranks send heartbeats."""
    told = []
    for half in range(round(2 * begin), round(2 * end)):
        for path in alive:
            touch(path, half / 2)
        told += pulse.look(half / 2, left=(0, 1))
    return told


def test_a_silent_machine_is_named_and_then_ends_all(paths: list[Path]) -> None:
    """With one of its processes stopped, `distbelief predict` once waited forever."""
    pulse = ProcessHeartbeat(paths, pids=(70, 71), now=0.0)
    assert looks(pulse, 0.0, 5.0, *paths) == []
    told = looks(pulse, 5.0, 10.0, paths[0])
    assert told == ["machine 1 (process 71) silent for 3.5 s: giving up in 6 s"]
    with pytest.raises(DistBeliefError, match=r"machine 1 \(process 71\) has been sil"):
        looks(pulse, 10.0, 6.0 + DEAD_SECONDS, paths[0])


def test_a_machine_that_is_back_is_reported(paths: list[Path]) -> None:
    pulse = ProcessHeartbeat(paths, pids=(70, 71), now=0.0)
    looks(pulse, 0.0, 5.0, *paths)
    looks(pulse, 5.0, 6.0 + SILENT_SECONDS, paths[0])
    told = looks(pulse, 9.0, 10.0, *paths)
    assert told == ["machine 1 (process 71) is back after 4.5 s"]


def test_a_machine_without_a_first_heartbeat_gets_more_time(paths: list[Path]) -> None:
    pulse = ProcessHeartbeat(paths, pids=(70, 71), now=0.0)
    assert looks(pulse, 0.0, START_SECONDS_MAX, paths[0]) == []
    with pytest.raises(DistBeliefError, match="machine 1"):
        looks(pulse, START_SECONDS_MAX, START_SECONDS_MAX + 1.5, paths[0])


def test_an_ended_machine_is_not_silent(paths: list[Path]) -> None:
    pulse = ProcessHeartbeat(paths, pids=(70, 71), now=0.0)
    looks(pulse, 0.0, 1.0, *paths)
    for half in range(2, 60):
        touch(paths[0], half / 2)
        assert pulse.look(half / 2, left=(0,)) == []


def test_our_own_delay_is_not_silence_of_a_machine(paths: list[Path]) -> None:
    """Ctrl+Z stops all of them, and the monitor resumes first."""
    pulse = ProcessHeartbeat(paths, pids=(70, 71), now=0.0)
    looks(pulse, 0.0, 5.0, *paths)
    assert pulse.look(3600.0, left=(0, 1)) == []
    assert looks(pulse, 3600.5, 3605.0, *paths) == []
