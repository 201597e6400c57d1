"""What Sandblaster takes beyond the pure gradient, on the speech net of the paper.

The machine itself is now faster, now slower, by more than what is to be seen. So job and plain
processes have it by turns of a few seconds, on the same cores; between its turns a job is stopped
by signals, supervisor included. Each evaluation of the job is compared with the plain turns that
lay within it. Each replica, and each plain process, has a core of its own: the kernel is known to
put two on one while another idles. Snapshots are left out: they take a share of a run that is
bounded (`course`), and would fall into one evaluation and not into another. So are the first
evaluations, in which the history grows, and with it the memory of the shards: pages that were never
touched are dear on a virtual machine (here 1.75 ms a MiB), once in a run.

    job      [----]      [----]      [-|--]      [----]
    plain          [----]      [----]      [----]      [----]
                                       ^ an evaluation has ended
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from distbelief.supervisor.view import JobView
from experiments.benchmarks.batches.replicas import N_REPLICAS, job
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread
from experiments.benchmarks.measuring.workers import Workers, module, send
from experiments.benchmarks.measuring.workload import Workload


PORTION: Final = 250
TURN_SECONDS: Final = 3.0
N_EVALUATIONS: Final = 3
HISTORY: Final = 2
# Evaluations until nothing more is allocated: pairs of that history, one more for a trial, and what
# two cuts keep
N_GROWING: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One evaluation of the job, or more: an iteration may take several."""

    seconds: float  # of an example, while the job had the machine
    plain_seconds: float  # likewise, of the plain processes
    cpu_seconds: float  # that all processes of the job took for it
    plain_cpu_seconds: float  # likewise

    @property
    def overhead(self) -> float:
        return self.seconds / self.plain_seconds - 1.0

    @property
    def cpu_overhead(self) -> float:
        """By the processors' time: what keeps a core busy, without the waiting."""
        return self.cpu_seconds / self.plain_cpu_seconds - 1.0


@dataclass(slots=True)
class _Side:
    """What one side has done since the stretch began."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    n_examples: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Turns:
    """Watches a job, and takes the machine from it for every other turn.

    The first evaluations are no part of it: caches fill, and memory is mapped.
    """

    plain: Workers  # processes that compute portions, one for each replica
    n_growing: int  # evaluations that are no part of it
    n_stretches: int  # after which the job is ended
    stretches: list[Stretch] = field(default_factory=list)  # measured so far
    _samples: int = 0
    _n_seen: int = 0  # ends of evaluations
    _since: float = 0.0  # when the job's turn began
    _cpu_since: float = 0.0
    _ours: _Side = field(default_factory=_Side)
    _theirs: _Side = field(default_factory=_Side)

    def __call__(self, view: JobView) -> bool:
        """Look at the job; return whether it has been seen for long enough."""
        pids = [role.pid for role in view.roles if role.pid is not None]
        if view.samples > self._samples:
            self._end_stretch(view, pids)
        elif self._counts and time.perf_counter() - self._since > TURN_SECONDS:
            self._count(pids)
            self._let_others(pids)
            self._begin(pids)
        return len(self.stretches) >= self.n_stretches

    @property
    def _counts(self) -> bool:
        return self._n_seen >= self.n_growing

    def _end_stretch(self, view: JobView, pids: Sequence[int]) -> None:
        n_examples, counted = view.samples - self._samples, self._counts
        self._samples = view.samples
        self._n_seen += 1
        if self._n_seen == 1:
            _bind(view)
        if counted:
            self._count(pids)
            if not self._theirs.n_examples:
                self._let_others(pids)
            ours, theirs = self._ours, self._theirs
            stretch = Stretch(
                seconds=ours.seconds / n_examples,
                plain_seconds=theirs.seconds / theirs.n_examples,
                cpu_seconds=ours.cpu_seconds / n_examples,
                plain_cpu_seconds=theirs.cpu_seconds / theirs.n_examples,
            )
            self.stretches.append(stretch)
        self._ours, self._theirs = _Side(), _Side()
        self._begin(pids)

    def _begin(self, pids: Sequence[int]) -> None:
        self._cpu_since = measurement.cpu_seconds(pids)
        self._since = time.perf_counter()

    def _count(self, pids: Sequence[int]) -> None:
        self._ours.seconds += time.perf_counter() - self._since
        self._ours.cpu_seconds += measurement.cpu_seconds(pids) - self._cpu_since

    def _let_others(self, pids: Sequence[int]) -> None:
        send(signal.SIGSTOP, pids)
        plain, theirs = self.plain, self._theirs
        try:
            turn = plain.turn(seconds=TURN_SECONDS, first_core=0)
        finally:
            send(signal.SIGCONT, pids)
        # Each at its own pace, as if they shared the work as well as can be.
        n_steps = len(turn.steps)
        theirs.seconds += harmonic_mean([sum(steps) for steps in turn.of_each])
        theirs.n_examples += N_REPLICAS * PORTION * n_steps
        theirs.cpu_seconds += turn.cpu_seconds * n_steps


def _bind(view: JobView) -> None:
    cores = sorted(os.sched_getaffinity(0))
    replicas = [role for role in view.roles if role.name.startswith("replica")]
    for index, role in enumerate(replicas):
        if role.pid is not None:
            measurement.bind(role.pid, cores[index % len(cores)])


def overhead(*, small: bool) -> dict[str, float]:
    n_frames = 2_000 if small else 20_000
    workload = Workload(net="speech", batch_size=PORTION, small=small)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_bytes(msgspec.json.encode(workload))
        program = module("bare.whole_net", file, 1, "sum")
        with Workers("plain", [program] * N_REPLICAS, Path(folder)) as plain:
            turns = Turns(plain=plain, n_growing=N_GROWING, n_stretches=N_EVALUATIONS)
            tables = _tables(n_frames, small=small)
            ours = job(tables, watch=turns, snapshot_every="1 h")
    rows = {
        f"evaluation {k}": {
            "pure, s": f"{stretch.plain_seconds * n_frames:.2f}",
            "sandblaster, s": f"{stretch.seconds * n_frames:.2f}",
            "overhead": f"{stretch.overhead:.1%}",
            "of the processors' time": f"{stretch.cpu_overhead:.1%}",
        }
        for k, stretch in enumerate(turns.stretches, start=N_GROWING + 1)
    }
    title = f"speech net, {n_frames:,} frames, {N_REPLICAS} processes"
    measurement.show(title, rows)
    spread = Spread.of([100 * stretch.overhead for stretch in turns.stretches])
    print(f"overhead: {spread.show()} %")
    shares = {k: v for k, v in ours.figures.items() if k.endswith("share")}
    print(", ".join(f"{name} {value:.1%}" for name, value in shares.items()))
    return {"overhead": spread.median / 100}


def _tables(n_frames: int, *, small: bool) -> dict[str, dict[str, object]]:
    return {
        "model": {
            "factory": "experiments.benchmarks.batches.problems:speech_net",
            "arguments": {"small": small},
            "initial": "seed",
        },
        "data": {
            "train": {
                "factory": "experiments.benchmarks.batches.problems:speech_frames",
                "arguments": {"n": n_frames, "small": small},
            }
        },
        "algorithm": {
            "name": "sandblaster",
            "loss": "cross_entropy",
            "portion": PORTION,
            "history": HISTORY,
            "tolerance": 0.0,
            "value_tolerance": 0.0,
        },
        "cluster": {"replicas": N_REPLICAS, "shards": 2},
    }
