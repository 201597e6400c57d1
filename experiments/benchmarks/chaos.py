"""What a run keeps of its speed, and of its pushes, while somebody kills its processes.

    python experiments/benchmarks/chaos.py [--minutes 10] [--seed 0] [--small]

Four workers (ordinary loops with `DownpourSGD`, a tiny net, batches of 64) train against two shards
with two copies each. About every ten seconds a process drawn by a seeded generator, worker or
shard, is killed (-9) or paused for up to five seconds. Stretches of chaos and of peace alternate,
so that a machine that becomes slower spoils neither.

    throughput_kept    pushes acknowledged per second in chaos, over those in peace
    standstill_share   of the seconds in chaos, those in which for a tenth of a second
                       or longer nobody's push had been acknowledged
    acknowledged_lost  pushes that a worker knew to be acknowledged and no shard has
    applied_twice      applications of a push beyond the first
    hangs              workers that stood still for longer than 30 s, though not paused
"""

import argparse
import math
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from distbelief.parameter_server.rules import SGD
from distbelief.serve.optimizer import DownpourSGD
from distbelief.serve.server import ParameterServer
from distbelief.simulation.chaos.local_faults import ProcessFaults
from experiments.benchmarks.marks import worker as marked_worker
from experiments.benchmarks.marks.worker import (
    N_SHARDS,
    N_WORKERS,
    Ledger,
    MarkedNet,
    Verdict,
    judge,
)
from experiments.benchmarks.measuring import measurement


HANG_SECONDS = 30.0
STANDSTILL_SECONDS = 2.0  # after which one that moves again is reported
SETTLE = 0.6  # after the last fault of a stretch, before peace is measured; these
FAULTS = (0.5, 1.5)  # between two faults, drawn evenly; and
PAUSE = (0.1, 0.5)  # are shares of the mean time between two faults
SMALL = {"minutes": 0.15, "every": 1.5}
TICK_SECONDS = 0.02
STILL_SECONDS = 0.1


@dataclass(slots=True)
class Worker:
    index: int
    ledger: Ledger
    process: BaseProcess
    moved_at: float
    life: int = 0
    n_seen: int = 0  # acknowledged pushes, when last looked at
    gap: float = 0.0  # longest standstill since the last fault


@dataclass(slots=True)
class Counts:
    pushes: dict[str, int] = field(default_factory=lambda: {"chaos": 0, "peace": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"chaos": 0.0, "peace": 0.0})
    faults: dict[str, int] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # after faults of shards
    standstill: dict[str, float] = field(default_factory=dict)  # seconds, by stretch
    hangs: int = 0


class Arena:
    """The server, its workers, and whoever attacks them."""

    def __init__(self, folder: Path, *, seed: int, shard_copies: int, every: float) -> None:
        self._folder = folder
        self._every = every  # seconds between two faults, on average
        self._random = np.random.default_rng(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", marked_worker.__name__])
        self._net = MarkedNet()
        self._server = ParameterServer(
            self._net.parameters(),
            rule=SGD(learning_rate=1.0),
            shards=N_SHARDS,
            shard_copies=shard_copies,
            directory=folder / "server",
        )
        suffixes = ["", "b"][:shard_copies]
        self._shards = [f"shard-{k}{s}" for k in range(N_SHARDS) for s in suffixes]
        self._stop = folder / "stop"
        self._faults = ProcessFaults()
        self._paused_until = 0.0
        self._paused_worker: Worker | None = None
        self._begun = time.monotonic()
        self._watched = False  # the last fault was a shard's, and is being measured
        self.counts = Counts()
        self.workers: list[Worker] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        with self._server:
            try:
                for index in range(N_WORKERS):
                    ledger = Ledger.make(self._ledger(index))
                    process = self._started(index, life=0)
                    self.workers.append(Worker(index, ledger, process, time.monotonic()))
                yield
            finally:
                self._faults.release()
                for worker in self.workers:
                    worker.process.kill()
                    worker.process.join()

    # ----------------------------------------------------------------- the course

    def stretch(self, kind: str, seconds: float) -> None:
        begun = now = moved_at = time.monotonic()
        n_begun = n_seen = self._n_acknowledged
        standstill = 0.0
        last_fault = begun + seconds - SETTLE * self._every
        next_fault = now + self._draw(FAULTS)
        while now < begun + seconds:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            self._look(now)
            n_before, n_seen = n_seen, self._n_acknowledged
            if n_seen != n_before:
                if now - moved_at > STILL_SECONDS:
                    standstill += now - moved_at
                moved_at = now
            if kind == "chaos" and next_fault <= now < last_fault:
                self._attack(now)
                next_fault = now + self._draw(FAULTS)
        n_pushes = self._n_acknowledged - n_begun
        self.counts.standstill[kind] = self.counts.standstill.get(kind, 0.0) + standstill
        self.counts.pushes[kind] = self.counts.pushes.get(kind, 0) + n_pushes
        self.counts.seconds[kind] = self.counts.seconds.get(kind, 0.0) + now - begun
        self._log(f"{kind}: {n_pushes / (now - begun):,.1f} pushes/s")

    def finish(self) -> Verdict:
        self._stop.touch()
        for worker in self.workers:
            worker.process.join(HANG_SECONDS)
            if worker.process.exitcode is None:
                self.counts.hangs += 1
                self._log(f"worker {worker.index} does not end")
        optimizer = DownpourSGD(self._net.parameters(), server=self._server.address)
        optimizer.close()
        return judge(self._net.marks, [worker.ledger for worker in self.workers])

    @property
    def _n_acknowledged(self) -> int:
        return sum(worker.ledger.n_acknowledged for worker in self.workers)

    def _look(self, now: float) -> None:
        self._faults.turn(now)
        if now >= self._paused_until:
            self._paused_worker = None
        for worker in self.workers:
            if worker.process.exitcode is not None:
                if worker.process.exitcode != -signal.SIGKILL:
                    self.counts.hangs += 1
                    self._log(f"worker {worker.index} failed: {worker.process.exitcode}")
                worker.life, worker.moved_at = worker.life + 1, now
                worker.process = self._started(worker.index, life=worker.life)
            n_seen = worker.ledger.n_acknowledged
            if n_seen != worker.n_seen or worker is self._paused_worker:
                if now - worker.moved_at > STANDSTILL_SECONDS:
                    stood = now - worker.moved_at
                    self._log(f"worker-{worker.index} moves, after {stood:.1f} s")
                worker.n_seen, worker.moved_at = n_seen, now
            worker.gap = max(worker.gap, now - worker.moved_at)
            if now - worker.moved_at > HANG_SECONDS:
                self.counts.hangs += 1
                worker.moved_at = now
                self._log(f"worker {worker.index} has stood still for 30 s")

    def _ledger(self, worker: int) -> Path:
        return self._folder / f"ledger-{worker}"

    def _started(self, worker: int, *, life: int) -> BaseProcess:
        process = self._context.Process(
            target=marked_worker.work,
            args=(self._server.address, str(self._ledger(worker)), str(self._stop)),
            kwargs={"worker": worker, "life": life},
        )
        process.start()
        return process

    # ------------------------------------------------------------------ the attack

    def _attack(self, now: float) -> None:
        self._note_gaps()
        n_roles = N_WORKERS + len(self._shards)
        victim = int(self._random.integers(n_roles))
        kills = bool(self._random.integers(2))
        seconds = self._draw(PAUSE)  # drawn in any case: one seed, one schedule
        worker = self.workers[victim] if victim < N_WORKERS else None
        if worker is None:
            name = self._shards[victim - N_WORKERS]
            pid = measurement.roles_in(self._folder / "server").get(name)
        else:
            name, pid = f"worker-{victim}", worker.process.pid
        what = "kill" if kills else "pause"
        key = f"{what} {'shard' if worker is None else 'worker'}"
        self.counts.faults[key] = self.counts.faults.get(key, 0) + 1
        self._log(f"{what} {name}" + ("" if kills else f" for {seconds:.1f} s"))
        if pid is None:
            return
        self._watched = worker is None
        for other in self.workers:
            other.gap = 0.0
        if kills:
            self._faults.kill(pid)  # nobody, if it is just being restarted
        elif self._faults.slow(pid, now=now, seconds=seconds, factor=math.inf):
            self._paused_until, self._paused_worker = now + seconds, worker

    def _note_gaps(self) -> None:
        if self._watched:
            self.counts.gaps.append(max(worker.gap for worker in self.workers))
        self._watched = False

    def _draw(self, shares: tuple[float, float]) -> float:
        return self._every * float(self._random.uniform(*shares))

    def _log(self, text: str) -> None:
        seconds = time.monotonic() - self._begun
        print(f"{seconds:7.1f} s  {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of chaos")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule of faults")
    parser.add_argument("--copies", type=int, default=2, help="of each shard")
    every = "seconds between faults, on average"
    parser.add_argument("--every", type=float, default=10.0, help=every)
    options = measurement.options_of(parser, arguments, small=SMALL)
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="distbelief-chaos-") as folder:
        arena = Arena(
            Path(folder), seed=options.seed, shard_copies=options.copies, every=options.every
        )
        n_stretches = max(1, round(options.minutes))
        chaos = 60.0 * options.minutes / n_stretches
        with arena.open():
            arena.stretch("warm-up", min(10.0, chaos))
            for _ in range(n_stretches):
                arena.stretch("peace", chaos / 4)
                arena.stretch("chaos", chaos)
            arena.stretch("peace", chaos / 4)
            verdict = arena.finish()
        report(arena.counts, verdict, seed=options.seed)


def report(counts: Counts, verdict: Verdict, *, seed: int) -> None:
    rates = {kind: counts.pushes[kind] / counts.seconds[kind] for kind in counts.seconds}
    gaps = counts.gaps or [0.0]
    for what, count in sorted(counts.faults.items()):
        print(f"{what:>14}  {count}")
    print(f"{verdict.n_applied:,} pushes applied; seed {seed}")
    figures = {
        "throughput_kept": rates["chaos"] / rates["peace"],
        "acknowledged_lost": verdict.n_lost,
        "applied_twice": verdict.n_twice,
        "hangs": counts.hangs,
        "faults": sum(counts.faults.values()),
        "chaos_pushes_per_second": rates["chaos"],
        "peace_pushes_per_second": rates["peace"],
        "standstill_share": counts.standstill["chaos"] / counts.seconds["chaos"],
        "standstill_after_shard_fault_p50_seconds": float(np.quantile(gaps, 0.5)),
        "standstill_after_shard_fault_p95_seconds": float(np.quantile(gaps, 0.95)),
    }
    measurement.conclude("chaos", figures)


if __name__ == "__main__":
    main()
