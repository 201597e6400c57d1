"""Hands: processes of a benchmark that do what a line tells them, and answer by a line.

They say that they are warm first, then wait, which costs nothing.

    here                      process
      | <-------- ready          |   when it is warm
      | what to do ------------> |   a line of its standard input
      | <----------- found       |   a line of its standard output
      | (end of input) --------> |   it ends
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from experiments.benchmarks.measuring import measurement, paced
from experiments.benchmarks.network.hosts import Host


END_SECONDS_MAX: Final = 20.0
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_QUIET: Final = {"PYTHONWARNINGS": "ignore"}


@final
@dataclass(frozen=True, kw_only=True)
class Hand:
    """What one process is."""

    module: str  # of this package; run as a program
    arguments: Sequence[str]  # what it is given
    host: Host  # where
    # of torch. Also told by variables, for threads that torch has not started get their number
    # from there.
    n_threads: int = 1
    # variables beside those that are set here
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, log: Path) -> "subprocess.Popen[str]":
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
class Hands:
    """The processes, started together and ended together; a context manager.

    Args:
        name: Of them all.
        hands: Each.
        folder: For what they say when they fail.
    """

    def __init__(self, name: str, hands: Sequence[Hand], folder: Path) -> None:
        self._name = name
        self._hands = hands
        self._log = folder / f"{name}.log"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            self._processes = [hand.start(self._log) for hand in self._hands]
            for process in self._processes:
                self._hear(process, paced.READY)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def ask(self, line: str, *, of: Sequence[int] | None = None) -> list[str]:
        """Tell all the same, and return what each answers.

        Args:
            line: What they are to do.
            of: Which of them; all by default.

        Raises:
            RuntimeError: one has ended; it says how, with the end of its log.
        """
        asked = self._processes if of is None else [self._processes[i] for i in of]
        for process in asked:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return [self._hear(process) for process in asked]

    def bind(self, first_core: int = 0) -> None:
        """Give each that has one thread a core to itself, and the next one the next."""
        cores = sorted(os.sched_getaffinity(0))
        for index, (hand, pid) in enumerate(zip(self._hands, self.pids, strict=True)):
            if hand.n_threads == 1:
                for each in measurement.family(pid):
                    measurement.bind(each, cores[(first_core + index) % len(cores)])

    def end(self) -> None:
        """End all: they are told to, and who does not listen is killed."""
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

    def _hear(self, process: "subprocess.Popen[str]", wanted: str = "") -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line or (wanted and line != wanted):
            raise RuntimeError(
                f"{self._name} says {line!r}; its log ends:\n"
                f"{self._log.read_text(errors='replace')[-4000:]}"
            )
        return line
