"""What a job over hosts keeps of its speed, and of its samples, while these fail.

    python experiments/benchmarks/cluster_chaos.py [--only PART] [--minutes M] [--seed 0] [--small]

Hosts are network namespaces at a switch, 1 Gbit/s each. Two processors carry all, so the net of
eight replicas *sleeps* 0.5 s in each step of 4 samples: undisturbed speed does not depend on them.
It counts how often each sample of its one epoch was applied (`marks.numbered`).

    chaos   five hosts with three slots each, the supervisor's among them, so that three can carry
            all replicas; two shards with two copies, spread. About every 29 s one of: a process of
            a role killed (-9), or paused for up to 5 s; a host that joined lost with all its
            processes, and another one 10 s later; the link of such a host down for 30 s; with
            `--supervisor` also: the supervisor killed, and its run resumed
    spot    eight hosts with a replica each, and the supervisor's with the shards. About every 20 s
            a host is lost, and another one joins

The faults come one by one, and wait until each shard has its copies again. Before and after them
the job runs in peace. Not in `make bench`: only root may make network namespaces.

    PART_throughput_kept     samples applied per second during the faults, over those in peace
    PART_acknowledged_lost   pushes
    PART_samples_not_once    samples of the epoch that were not applied exactly once
    PART_hangs               times that the job, or a replica with a host, stood still for 60 s
    PART_faults, PART_KIND   how many there were, of which kind
    spot_loss                of all samples at the end, over the mean of three undisturbed jobs,
    spot_loss_noise          and how far these are from it at most; they run at ten times the pace
"""

import argparse
import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, Self, TypeVar

import numpy as np

from distbelief.job.run.directory import RunDirectory
from distbelief.simulation.chaos.local_faults import ProcessFaults
from distbelief.supervisor.view import JobView, RoleView
from experiments.benchmarks.marks import numbered
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.network import jobs
from experiments.benchmarks.network.hosts import Host, Lan, obstacle, switched


T = TypeVar("T")
BATCH_SIZE, STEP_SECONDS, N_REPLICAS = 4, 0.5, 8
HANG_SECONDS: Final = 60.0
WARM_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 30.0  # after the last fault, which still count as disturbed
LINK_SECONDS, PAUSE_SECONDS = 30.0, 5.0
TICK_SECONDS: Final = 0.1
FASTER: Final = 10.0  # undisturbed jobs
SMALL: Final = {"minutes": 1.0, "peace": 5.0, "undisturbed": 0, "only": ["chaos"]}
JOB: Final = """
cluster = {cluster}
model = {{ factory = "{module}:CountingNet", arguments = {{ n = {n}, seconds = {seconds} }} }}
data.train = {{ factory = "{module}:Numbered", arguments = {{ n = {n} }} }}
stop.epochs = 1
output.directory = "run"

[algorithm]
name = "downpour"
loss = "{module}:loss"
batch_size = {batch_size}
order = "dealt"
seed = {seed}
rule = {{ name = "sgd", learning_rate = 1.0 }}
"""


class Part(NamedTuple):
    kinds: tuple[str, ...]
    minutes: float
    every: float  # seconds between two faults, on average
    away: float  # seconds from the loss of a host until another one joins
    n_hosts: int
    cores: tuple[int, int]  # of the first host, and of each that joins
    cluster: str  # table of the job


PARTS: Final = {
    "chaos": Part(
        *(("kill", "pause", "host", "link"), 30.0, 29.0, 10.0, 5, (3, 3)),
        '{ replicas = 8, shards = 2, shard_copies = 2, placement = "spread" }',
    ),
    "spot": Part(
        *(("host",), 10.0, 20.0, 0.0, 1 + N_REPLICAS, (0, 1)),
        "{ replicas = { min = 1, max = 8 }, shards = 2 }",
    ),
}


class Mark(NamedTuple):
    written: float  # when the supervisor wrote this, seconds since 1970
    samples: int

    def rate_until(self, later: Self) -> float:
        return (later.samples - self.samples) / max(later.written - self.written, 1e-9)


class Arena:
    """A job over hosts, and the faults that they meet."""

    def __init__(self, part: Part, lan: Lan, folder: Path, *, seed: int) -> None:
        self._part = part
        self._lan = lan
        self._folder = folder
        self._random = np.random.default_rng(seed)
        self._faults = ProcessFaults()
        self._begun = time.monotonic()
        self._repairs: list[tuple[float, Host, Callable[[], object]]] = []
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._moved: dict[str, tuple[object, float]] = {}  # what counted last, and since when
        self._view = JobView()
        self._mark = Mark(0.0, 0)
        self.marks: list[Mark] = []
        self.faults: Counter[str] = Counter()
        self.hangs = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            for index in range(self._part.n_hosts):
                self._begin(index)
            yield
        finally:
            self._faults.release()
            for host in self._lan.hosts:
                self._lan.kill(host)
            for process in self._processes.values():
                process.wait()

    # ------------------------------------------------------------------------- the course

    def warm_up(self) -> None:
        while self._runs and sum(r.rate is not None for r in self._replicas) < N_REPLICAS:
            self._look()
        self._wait(WARM_SECONDS)

    def stretch(self, seconds: float) -> None:
        """Let the job run in peace; note what it has done before and after."""
        self.marks.append(self._mark)
        self._wait(seconds)
        self.marks.append(self._mark)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._runs:
            self._look()

    def attack(self, n_faults: int) -> None:
        kinds: list[str] = []
        begun = time.monotonic()
        for index in range(n_faults):
            kinds = kinds or list(self._random.permutation(self._part.kinds))
            at = begun + self._part.every * (index + self._random.uniform(0.0, 0.3))
            self._wait(at - time.monotonic())
            self._await_copies()
            if self._runs:
                self._inject(kinds.pop())
        self._wait(SETTLE_SECONDS)

    def finish(self) -> tuple[int, int, float]:
        """Wait for the end; return pushes lost, samples not applied once, and the loss."""
        n_hangs = self.hangs
        while self._runs and self.hangs == n_hangs:
            self._look()
        code = self._processes[0].wait(HANG_SECONDS)
        self._look()
        if code:
            raise RuntimeError(f"the job ended with {code}: {self._view.error}")
        n_not_once, loss = numbered.judge(self._run.path / "model.safetensors")
        return self._view.pushes_lost or 0, n_not_once, loss

    # ---------------------------------------------------------------------------- the job

    @property
    def _runs(self) -> bool:
        return self._processes[0].poll() is None and self._view.stop_reason is None

    @property
    def _run(self) -> RunDirectory:
        return RunDirectory(self._folder / "0" / "run", lock=None)

    @property
    def _replicas(self) -> list[RoleView]:
        return [role for role in self._view.roles if role.name.startswith("replica")]

    def _begin(self, index: int, *more: str) -> None:
        words = ["--cores", f"{self._part.cores[index > 0]}", *more]
        words += [] if index else ["--hosts", f"{self._part.n_hosts - 1}"]
        with (self._folder / f"{index}" / "output").open("a") as log:
            self._processes[index] = jobs.begin(
                self._folder, self._lan.hosts, index, *words, imports=numbered.__name__, output=log
            )

    def _look(self) -> None:
        time.sleep(TICK_SECONDS)
        now, status = time.monotonic(), self._run.read_status()
        self._faults.turn(now)
        for due in [due for due in self._repairs if now >= due[0]]:
            self._repairs.remove(due)
            due[2]()
        if status is None or not status.view.samples:
            return
        self._view = status.view
        if self._runs:
            self._mark = Mark(status.written, self._view.samples)
            self._watch("the job", self._view.samples, now)
            for role in self._replicas:
                work = role.pid, role.counters.get("samples")
                self._watch(role.name, work if role.pid else now, now)  # else it waits for a host

    def _watch(self, what: str, work: object, now: float) -> None:
        before, since = self._moved.setdefault(what, (work, now))
        if before != work or now - since > HANG_SECONDS:
            self._moved[what] = work, now
        if before == work and now - since > HANG_SECONDS:
            self._hang(f"{what} has stood still for {HANG_SECONDS:.0f} s")

    def _hang(self, text: str) -> None:
        self.hangs += 1
        self._log(f"HANG: {text}")

    def _await_copies(self) -> None:
        begun = time.monotonic()
        while self._runs and "shard_copies" in self._part.cluster:
            states = [r.state for r in self._view.roles if r.name.startswith("shard") and r.pid]
            if sorted(states) == ["backup", "backup", "primary", "primary"]:
                break
            if time.monotonic() - begun > HANG_SECONDS:
                self._hang(f"copies of shards are {states}")
                break
            self._look()

    # ------------------------------------------------------------------------- the attack

    def _inject(self, kind: str) -> None:
        now, text = time.monotonic(), kind
        if kind in {"kill", "pause"}:
            role = self._draw([role for role in self._view.roles if role.pid])
            text, pid = f"{kind} {role.name} ({role.state})", role.pid or 0
            if kind == "kill":
                self._faults.kill(pid)
            else:
                seconds = float(self._random.uniform(0.1, 1.0)) * PAUSE_SECONDS
                self._faults.slow(pid, now=now, seconds=seconds, factor=math.inf)
        elif kind == "supervisor":
            self._processes[0].kill()
            self._processes[0].wait()
            self._begin(0, "--resume", "run")
        else:
            broken = [host for _, host, _ in self._repairs]
            host = self._draw([one for one in self._lan.hosts[1:] if one not in broken])
            index = self._lan.hosts.index(host)
            text = f"{kind} {index}"
            if kind == "link":
                self._lan.cut(host)
                self._repairs.append((now + LINK_SECONDS, host, lambda: self._lan.mend(host)))
            else:
                self._lan.kill(host)
                self._processes[index].wait()
                away = now + self._part.away
                self._repairs.append((away, host, lambda: self._begin(index)))
        self.faults[kind] += 1
        self._log(text)

    def _draw(self, those: Sequence[T]) -> T:
        return those[int(self._random.integers(len(those)))]

    def _log(self, text: str) -> None:
        rate, at = self._view.samples_per_second or 0.0, time.monotonic() - self._begun
        print(f"{at:7.1f} s  {self._view.samples:7,} samples, {rate:5.1f}/s  {text}", flush=True)


def run(
    part: Part, options: argparse.Namespace, *, seed: int, n_faults: int, n_samples: int
) -> tuple[Arena, tuple[int, int, float]]:
    """Run a job under faults, if any; return also what `Arena.finish` returns."""
    seconds = STEP_SECONDS if n_faults else STEP_SECONDS / FASTER
    names = {"module": numbered.__name__, "batch_size": BATCH_SIZE, "cluster": part.cluster}
    text = JOB.format(n=n_samples, seconds=seconds, seed=seed, **names)
    with ExitStack() as stack:
        temporary = stack.enter_context(TemporaryDirectory(prefix="distbelief-chaos-"))
        folder = Path(options.folder or temporary) / f"{seed}-{n_faults}-{part.n_hosts}"
        folder.mkdir(parents=True)
        lan = stack.enter_context(switched(part.n_hosts, bits_per_second=1e9))
        jobs.lay_out(folder, text, n_hosts=part.n_hosts)
        arena = Arena(part, lan, folder, seed=seed)
        stack.enter_context(arena.open())
        if n_faults:
            arena.warm_up()
            arena.stretch(options.peace)
            arena.attack(n_faults)
            arena.stretch(options.peace)
        return arena, arena.finish()


def figures_of(name: str, options: argparse.Namespace) -> dict[str, float]:
    part = PARTS[name]
    if options.supervisor:
        part = part._replace(kinds=(*part.kinds, "supervisor"))
    n_faults = round(60.0 * (options.minutes or part.minutes) / part.every)
    seconds = 2 * options.peace + part.every * n_faults + SETTLE_SECONDS
    n_samples = int(seconds * N_REPLICAS * BATCH_SIZE / STEP_SECONDS)
    arena, (n_lost, n_not_once, loss) = run(
        part, options, seed=options.seed, n_faults=n_faults, n_samples=n_samples
    )
    begun, attacked, settled, ended = arena.marks
    peace = (begun.rate_until(attacked) + settled.rate_until(ended)) / 2
    figures = {
        "throughput_kept": attacked.rate_until(settled) / peace,
        "acknowledged_lost": n_lost,
        "samples_not_once": n_not_once,
        "hangs": arena.hangs,
        "faults": arena.faults.total(),
        **arena.faults,
    }
    if name == "spot" and options.undisturbed:
        calm = [
            run(part, options, seed=seed, n_faults=0, n_samples=n_samples)[1][-1]
            for seed in range(options.undisturbed)
        ]
        figures["loss"] = loss / fmean(calm)
        figures["loss_noise"] = max(abs(one / fmean(calm) - 1.0) for one in calm)
    print(f"{name}: {n_samples:,} samples, {peace:.1f}/s in peace; loss {loss:.4f}", flush=True)
    return {f"{name}_{key}": value for key, value in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=list(PARTS))
    parser.add_argument("--minutes", type=float, help="of faults, in place of 30 and 10")
    parser.add_argument("--seed", type=int, default=0, help="of the faults, and of the order")
    parser.add_argument("--supervisor", action="store_true", help="kill it, too")
    parser.add_argument("--peace", type=float, default=60.0, help="seconds before and after")
    parser.add_argument("--undisturbed", type=int, default=3, help="jobs beside that of `spot`")
    parser.add_argument("--folder", help="for the files of jobs, which then stay")
    options = measurement.options_of(parser, arguments, small=SMALL)
    if (why := obstacle()) is not None:
        raise SystemExit(why)
    figures: dict[str, float] = {}
    for name in options.only or PARTS:
        figures |= figures_of(name, options)
    measurement.conclude("cluster_chaos", figures)


if __name__ == "__main__":
    main()
