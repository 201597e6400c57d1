"""How fast this machine is at a moment: layers of a net now, beside those of a profile.

A host that others use too is faster and slower by tens of percent within minutes, so a
prediction can be no better than its profile is new. So layers are measured again, whole
and once each, just before and after whatever is predicted, in as many processes at once
as it has: what they share, memory above all, they share then too. Slices of a layer are
taken to have become slower by as much as the whole.

Nothing here knows of any plan, so nothing is fitted on what plans took.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self, final

import msgspec
from msgspec.structs import replace

from distbelief.partition.profiling.profile import WHOLE, Profile, Slices
from experiments.benchmarks.measuring import paced
from experiments.benchmarks.measuring.workload import Workload


Pace = dict[str, tuple[float, float]]
"""Seconds of the forward and backward pass of whole layers, by key."""

_END_SECONDS: float = 20.0


@final
class Pacemaker:
    """Processes that measure layers when asked to; a context manager.

    Args:
        workload: The net.
        n_processes: How many at most.
        folder: For what they are told.
    """

    def __init__(self, workload: Workload, n_processes: int, folder: Path) -> None:
        self._file = folder / "pace.json"
        self._file.write_bytes(msgspec.json.encode(workload))
        self._n_processes = n_processes
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Start all, and wait until they are warm."""
        for _ in range(self._n_processes):
            module = "experiments.benchmarks.plans.layers_now"
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(self._file)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        for process in self._processes:
            assert _line(process) == paced.READY
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End all."""
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended
                process.stdin.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def measure(self, n_processes: int) -> Pace:
        """Measure all layers in so many processes at once; return the means."""
        asked = self._processes[:n_processes]
        for process in asked:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return mean_pace([json.loads(_line(process)) for process in asked])


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Return the mean of several."""
    return {
        key: (
            fmean(pace[key][0] for pace in paces),
            fmean(pace[key][1] for pace in paces),
        )
        for key in set(paces[0]).intersection(*paces[1:])
    }


def slower(profile: Profile, pace: Pace) -> float:
    """Return how many times as long all layers take as by a profile."""
    keys = pace.keys() & profile.layers.keys()
    then = sum(
        profile.layers[key][WHOLE].forward[-1] + profile.layers[key][WHOLE].backward[-1]
        for key in keys
    )
    return sum(sum(pace[key]) for key in keys) / then


def at_pace(profile: Profile, pace: Pace) -> Profile:
    """Return a profile as it would be, had it been measured at that pace."""
    layers: dict[str, Mapping[str, Slices]] = dict(profile.layers)
    for key, (forward, backward) in pace.items():
        if key in layers:
            whole = layers[key][WHOLE]
            factors = _ratio(forward, whole.forward), _ratio(backward, whole.backward)
            layers[key] = {
                word: replace(
                    slices,
                    forward=tuple(factors[0] * seconds for seconds in slices.forward),
                    backward=tuple(factors[1] * seconds for seconds in slices.backward),
                )
                for word, slices in layers[key].items()
            }
    return replace(profile, layers=layers)


def _ratio(now: float, then: Sequence[float]) -> float:
    return now / then[-1] if then[-1] else 1.0


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{process.args!r} ended, with status {process.poll()}")
    return line
