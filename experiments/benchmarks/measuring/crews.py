"""Crews: processes that take the same steps at the same time, as `paced` tells them.

A step of a crew takes as long as that of its slowest process; what is told of a turn is
the median over its steps. All crews live at once and take turns, so that a machine that
becomes slower spoils no ratio. How many processors others had meanwhile is told too: a
turn that had to share them says nothing of what it measures.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final, Self, final

from experiments.benchmarks.measuring import measurement, paced
from experiments.benchmarks.measuring.measurement import Spread
from experiments.benchmarks.network.hosts import Host


END_SECONDS_MAX: Final = 20.0
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_QUIET: Final = {"PYTHONWARNINGS": "ignore"}


@final
@dataclass(frozen=True, kw_only=True)
class Hand:
    """One process of a crew.

    Attributes:
        module: Of this package; run as a program.
        arguments: What it is given.
        host: Where.
        n_threads: Of torch. Also told by variables, for threads that torch has not
            started get their number from there.
        environment: Variables beside those that are set here.
    """

    module: str
    arguments: Sequence[str]
    host: Host
    n_threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, log: Path) -> "subprocess.Popen[str]":
        """Return the process; its errors go to a file."""
        module = f"experiments.benchmarks.{self.module}"
        threads = dict.fromkeys(_THREAD_VARIABLES, str(self.n_threads))
        with log.open("ab") as errors:
            return subprocess.Popen(
                [*self.host.prefix, sys.executable, "-m", module, *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **threads, **_QUIET, **self.environment},
            )


@final
class Crew:
    """Processes that step together; a context manager.

    Args:
        name: Of the crew.
        hands: Its processes.
        folder: For what they say when they fail.
    """

    def __init__(self, name: str, hands: Sequence[Hand], folder: Path) -> None:
        self.name = name
        self.seconds: list[float] = []  # of a step, per turn
        self.cpu_seconds: list[float] = []  # of a step, all processes together
        self.others: list[float] = []  # processors that others kept busy, per turn
        self.n_bytes = 0  # at the end of some turn
        self.told: list[list[float]] = []  # by each process, of the last turn's steps
        self._hands = hands
        self._log = folder / f"{name}.log"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        """Start all, and wait until they are warm."""
        try:
            self._processes = [hand.start(self._log) for hand in self._hands]
            for process in self._processes:
                self._hear(process, paced.READY)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End all."""
        self._end()

    @property
    def step(self) -> Spread:
        """Seconds of a step, over turns."""
        return Spread.of(self.seconds)

    def turn(self, *, seconds: float, first_core: int | None = None) -> list[float]:
        """Take steps for about so long, two at least; return the seconds of each.

        Args:
            seconds: How long.
            first_core: Where the first process computes, which has a core to itself;
                the second on the next one, and so on. None: wherever there is room.
        """
        if first_core is not None:
            self._bind(first_core)
        pids = measurement.families(process.pid for process in self._processes)
        used, busy = measurement.cpu_seconds(pids), measurement.busy_seconds()
        began = time.monotonic()
        self.told = [[] for _ in self._processes]
        steps = self._steps(2)
        n_more = round(seconds / median(steps)) - len(steps)
        steps += self._steps(n_more) if n_more > 0 else []
        taken = measurement.cpu_seconds(pids) - used
        busy = measurement.busy_seconds() - busy
        self.others.append(max(busy - taken, 0.0) / (time.monotonic() - began))
        self.cpu_seconds.append(taken / len(steps))
        self.n_bytes = max(self.n_bytes, measurement.shared_out_bytes(pids))
        self.seconds.append(median(steps))
        return steps

    def row(self) -> dict[str, str]:
        """Return what a table tells of it."""
        return {
            "step, ms": Spread.of([1e3 * value for value in self.seconds]).show(),
            "CPU ms": Spread.of([1e3 * value for value in self.cpu_seconds]).show(),
            "memory": f"{self.n_bytes / 2**20:,.0f} MiB",
            "others": f"{max(self.others):.2f}",
        }

    def _bind(self, first_core: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for index, (hand, process) in enumerate(
            zip(self._hands, self._processes, strict=True)
        ):
            if hand.n_threads == 1:
                core = cores[(first_core + index) % len(cores)]
                for pid in measurement.family(process.pid):
                    measurement.bind(pid, core)

    def _steps(self, n_steps: int) -> list[float]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{n_steps}\n")
            process.stdin.flush()
        told = [json.loads(self._hear(process)) for process in self._processes]
        self.told = [a + b for a, b in zip(self.told, told, strict=True)]
        return [max(each) for each in zip(*told, strict=True)]

    def _hear(self, process: "subprocess.Popen[str]", wanted: str = "") -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line or (wanted and line != wanted):
            raise RuntimeError(
                f"{self.name} says {line!r}; its log ends:\n"
                f"{self._log.read_text(errors='replace')[-4000:]}"
            )
        return line

    def _end(self) -> None:
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                try:
                    process.stdin.close()
                except BrokenPipeError:  # it has ended
                    continue
        deadline = time.monotonic() + END_SECONDS_MAX
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for pid in reversed(measurement.family(process.pid)):
                    os.kill(pid, 9)
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
