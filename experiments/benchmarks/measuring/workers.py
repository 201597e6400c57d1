"""Processes of a benchmark: they start, warm up, take turns when asked, and end together.

    benchmark                 worker
      | <-------- ready          |   a line of its standard output, when it is warm
      | 3 ---------------------> |   a request, one JSON value in a line of its standard input
      | <------ [0.7, 0.7, 0.7]  |   its answer: the seconds of three steps, for example
      | (end of input) --------> |   it ends

Waiting for a line costs nothing. A step takes as long as that of the slowest worker.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Self

import msgspec

from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread
from experiments.benchmarks.network.hosts import HERE, Host


READY: Final = "ready"
Pairs = tuple[list[float], list[float]]  # seconds of pushes, and of fetches in between
N_WARM_STEPS: Final = 3
END_SECONDS_MAX: Final = 20.0
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


# ------------------------------------------------------------------------ in a worker


def serve(answer: Callable[[Any], object]) -> None:
    """Answer requests until the end of input; the worker is warm."""
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def serve_steps(step: Callable[[], None]) -> None:
    """Warm up, then take as many steps as each request says."""
    timed(step, n_steps=N_WARM_STEPS)
    serve(lambda n_steps: timed(step, n_steps=n_steps))


def timed(step: Callable[[], object], *, n_steps: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(n_steps):
        step()
        times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def timed_pairs(
    push: Callable[[], object], fetch: Callable[[], object], n: int
) -> tuple[list[float], list[float]]:
    pairs = [(timed(push, n_steps=1)[0], timed(fetch, n_steps=1)[0]) for _ in range(n)]
    return [push for push, _ in pairs], [fetch for _, fetch in pairs]


# ------------------------------------------------------------------- in the benchmark


@dataclass(frozen=True, kw_only=True)
class Program:
    command: Sequence[str]
    host: Host = HERE[0]
    n_threads: int = 1  # of torch; set as variables too, for threads that torch does not start
    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of this process
    folder: Path | None = None  # it works in


def module(name: str, *arguments: object, **options: Any) -> Program:  # noqa: ANN401
    """Return a module of this package as a program; options are those of `Program`.

    Structs are given to it as JSON.
    """
    words = [
        msgspec.json.encode(each).decode() if isinstance(each, msgspec.Struct) else str(each)
        for each in arguments
    ]
    command = [sys.executable, "-m", f"experiments.benchmarks.{name}", *words]
    return Program(command=command, **options)


class Turn(NamedTuple):
    steps: list[float]  # seconds of each, by the slowest worker
    of_each: list[list[float]]  # seconds of the steps of each worker
    cpu_seconds: float  # of a step, all workers together
    others: float  # processors that others kept busy meanwhile

    @property
    def seconds(self) -> float:
        return median(self.steps)


class Workers:
    """Processes started together and ended together; a context manager.

    Those that `serve` requests are `stopped` between them if they poll without a pause.
    """

    def __init__(
        self,
        name: str,
        programs: Sequence[Program],
        folder: Path,
        *,
        serve: bool = True,
        stopped: bool = False,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.turns: list[Turn] = []
        self.n_bytes_max = 0  # at the end of some turn
        self._programs = programs
        self._processes: list[subprocess.Popen[str]] = []
        self._serve = serve
        self._stopped = stopped

    def __enter__(self) -> Self:
        try:
            self._processes = [self._start(program) for program in self._programs]
            if self._serve:
                self._await_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        return measurement.families(process.pid for process in self._processes)

    @property
    def status(self) -> int | None:
        """The first exit status of those that have ended, None if all run."""
        found = (process.poll() for process in self._processes)
        return next((status for status in found if status is not None), None)

    @property
    def n_bytes(self) -> int:
        return measurement.shared_out_bytes(self.pids)

    def cpu_seconds(self) -> float:
        return measurement.cpu_seconds(self.pids)

    def bind(self, first_core: int = 0) -> None:
        """Give each that has one thread a core to itself, and the next one the next."""
        cores = sorted(os.sched_getaffinity(0))
        pairs = zip(self._programs, self._processes, strict=True)
        for index, (program, process) in enumerate(pairs):
            if program.n_threads == 1:
                for pid in measurement.family(process.pid):
                    measurement.bind(pid, cores[(first_core + index) % len(cores)])

    def signal(self, number: signal.Signals) -> None:
        send(number, (process.pid for process in self._processes))

    def end(self, seconds_max: float = END_SECONDS_MAX) -> None:
        """Close their input and wait; processes that do not end are killed."""
        self.signal(signal.SIGCONT)
        for process in self._processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended
                    process.stdin.close()
        deadline = time.monotonic() + seconds_max
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                send(signal.SIGKILL, reversed(measurement.family(process.pid)))
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def failure(self, what: str) -> RuntimeError:
        text = self.log.read_text(errors="replace")[-4000:]
        return RuntimeError(f"{self.name} {what}; its log ends:\n{text}")

    def _start(self, program: Program) -> "subprocess.Popen[str]":
        threads = dict.fromkeys(_THREAD_VARIABLES, str(program.n_threads))
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*program.host.prefix, *program.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._serve else log,
                stderr=log,
                text=True,
                cwd=program.folder,
                start_new_session=True,  # Ctrl+C is for the benchmark, which ends them
                env={**os.environ, **threads, "PYTHONWARNINGS": "ignore", **program.environment},
            )

    def ask(self, request: object, *, of: Sequence[int] | None = None) -> list[Any]:
        """Send one request to all, or to those `of` which the places are given; return answers."""
        asked = self._processes if of is None else [self._processes[i] for i in of]
        if self._stopped:
            self.signal(signal.SIGCONT)
        for process in asked:
            assert process.stdin is not None
            process.stdin.write(f"{json.dumps(request)}\n")
            process.stdin.flush()
        answers = [json.loads(self._line(process)) for process in asked]
        if self._stopped:
            self.signal(signal.SIGSTOP)
        return answers

    def turn(
        self,
        *,
        seconds: float = 0.0,
        request: Callable[[int], object] = int,
        n_steps: int = 2,
        first_core: int | None = None,
    ) -> Turn:
        """Take `n_steps`, and then more until they have taken about so many seconds.

        `request` is made of a number of steps. The first worker runs on `first_core`, the second on
        the next one, and so on; None: the kernel chooses.
        """
        if first_core is not None:
            self.bind(first_core)
        pids = self.pids
        with measurement.usage(lambda: measurement.cpu_seconds(pids)) as used:
            each: list[list[float]] = self.ask(request(n_steps))
            n_more = round(seconds / median(_slowest(each))) - n_steps
            if n_more > 0:
                each = [a + b for a, b in zip(each, self.ask(request(n_more)), strict=True)]
        steps = _slowest(each)
        self.turns.append(Turn(steps, each, used.cpu_seconds / len(steps), used.others))
        self.n_bytes_max = max(self.n_bytes_max, measurement.shared_out_bytes(pids))
        return self.turns[-1]

    @property
    def step(self) -> Spread:
        return Spread.of(turn.seconds for turn in self.turns)

    @property
    def cpu(self) -> Spread:
        return Spread.of(turn.cpu_seconds for turn in self.turns)

    def row(self) -> dict[str, str]:
        return {
            "step, ms": Spread.of((turn.seconds for turn in self.turns), scale=1e3).show(),
            "CPU ms": Spread.of((turn.cpu_seconds for turn in self.turns), scale=1e3).show(),
            "memory": f"{self.n_bytes_max / 2**20:,.0f} MiB",
            "others": f"{max(turn.others for turn in self.turns):.2f}",
        }

    def _await_ready(self) -> None:
        if any(self._line(process) != READY for process in self._processes):
            raise self.failure(f"does not say {READY!r}")
        if self._stopped:
            self.signal(signal.SIGSTOP)

    def _line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise self.failure("has ended")
        return line


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


def _slowest(each: Sequence[Sequence[float]]) -> list[float]:
    return [max(steps) for steps in zip(*each, strict=True)]
