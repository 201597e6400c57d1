"""Jobs over hosts whose links have a given rate: forecast from what was measured here, and run.

10.78.0.1        supervisor, and shards with placement "here"; it computes nothing
10.78.0.2 ...    `distbelief join --stay`: one core each, for one job after the other

Measured, and never on the runs that are compared: the work of a job (`forecast.calibration`),
figures of this host, and what a message between two hosts takes.
"""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from distbelief.job.run.directory import RunDirectory
from distbelief.plans.planner.profiling.this_host import Network, figures
from distbelief.simulation.forecast.placed_cluster import HostCosts
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.run import run_simulated
from distbelief.supervisor.view import JobView
from experiments.benchmarks.network import jobs
from experiments.benchmarks.network.hosts import Lan, switched
from experiments.benchmarks.plans.machines import network
from experiments.benchmarks.simulated import task
from experiments.benchmarks.simulated.truth import EDGE, JOB, N_POINTS_MIN, Case


N_MACHINES: Final = 5
SECONDS_MAX: Final = 120.0
_MEASURED_BITS: Final = 1.6e8  # a second: of the links on which a message is measured
_N_NUMBERS: Final = 1 << 22  # of that message: many times what a token bucket lets pass at once
# Steps that links bound, and a disk that is slow to read from: two cores carry all hosts
OVERRIDES: Final = (
    "model.arguments={ width = 440, hidden = 256, layers = 4 }",  # 1.2 MB
    f"data.train.factory='{task.__name__}:slow_samples'",
    "data.train.arguments={ width = 440, n_samples = 8192, seconds = 0.2 }",
    "algorithm.batch_size=8",
    "algorithm.max_steps=1000000",
    "output.report_every='0.25 s'",
    "output.snapshot_every='1 h'",
)


@dataclass(kw_only=True)
class Site:
    """Hosts that wait for jobs."""

    lan: Lan
    folder: Path
    between: Network  # what lies between two of them at `_MEASURED_BITS`
    n_run: int = 0

    def cluster(self, bits_per_second: float) -> Path:
        """Return the cluster file of these hosts with links of another rate."""
        path, here = self.folder / f"{bits_per_second:.0f}.toml", figures()
        bandwidth = self.between.bandwidth * bits_per_second / _MEASURED_BITS
        path.write_text(
            f"""latency = "{1e6 * self.between.latency:.3f} us"
message_overhead = "{1e6 * self.between.message_overhead:.3f} us"
[[machines]]
count = {N_MACHINES}
flops = "{here.flops:.0f} FLOP/s"
memory_rate = "{here.memory_rate:.0f} B/s"
memory = "{here.memory:.0f} B"
overhead = "{1e6 * here.overhead:.3f} us"
handling = "{1e6 * self.between.handling:.3f} us"
bandwidth = "{bandwidth:.0f} B/s"
"""
        )
        return path

    def forecast(self, case: Case, *, bits_per_second: float, seed: int = 0) -> float:
        """Return samples per second in virtual time."""
        job = case.job
        hosts = HostCosts(str(self.cluster(bits_per_second)), machines=None, measures=True)
        placed = hosts.hosting(job, tell=lambda _: None)
        with Preparation() as preparation, reading_at_once():
            prepared = placed.formed(preparation.stage(job))
            ended = run_simulated(prepared, placed, seed=seed)
        return steady_rate(ended.view)

    def run(self, case: Case, *, bits_per_second: float) -> float:
        """Run a job, and return samples per second; RuntimeError if it fails."""
        for host in self.lan.hosts:
            self.lan.limit(host, bits_per_second=bits_per_second)
        self.n_run += 1
        words = [word for one in case.overrides for word in ("--set", one)]
        directory = f"runs/{self.n_run}"
        words += ["--set", f"output.directory={directory}", "--cores", "0"]
        words += ["--hosts", str(N_MACHINES - 1)]
        process = jobs.begin(self.folder, self.lan.hosts, 0, *words, imports="")
        try:
            said, _ = process.communicate(timeout=SECONDS_MAX)
        finally:
            process.kill()
            process.wait()
        status = RunDirectory(self.folder / "0" / directory, lock=None).read_status()
        if process.returncode or status is None:
            raise RuntimeError(f"the job ended with {process.returncode}: {said}")
        return steady_rate(status.view)


def steady_rate(view: JobView) -> float:
    """Return the samples per second between the first tenth and the last: the slope of a line.

    Of few steps, two points alone would be a step or a report too far apart. Not a number if there
    are too few.
    """
    inner = [p for p in view.history if EDGE <= p.samples / view.samples <= 1.0 - EDGE]
    if len(inner) < N_POINTS_MIN:
        return math.nan
    slope, _ = np.polyfit([p.seconds for p in inner], [p.samples for p in inner], 1)
    return float(slope)


@contextmanager
def site() -> Iterator[Site]:
    """Make hosts, measure what lies between them, and let all but the first wait for jobs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="distbelief-")))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # what was measured before is not used
        lan = stack.enter_context(switched(N_MACHINES, bits_per_second=_MEASURED_BITS))
        between = network(folder, ends=lan.hosts[:2], seconds=0.5, large=_N_NUMBERS)
        jobs.lay_out(folder, JOB, n_hosts=N_MACHINES)
        for index in range(1, N_MACHINES):
            words = ("--stay",)
            imports = task.__name__
            process = jobs.begin(folder, lan.hosts, index, *words, imports=imports, output=DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        stack.callback(_kill, lan)
        yield Site(lan=lan, folder=folder, between=between)


def _kill(lan: Lan) -> None:
    for host in lan.hosts:
        lan.kill(host)


@contextmanager
def reading_at_once() -> Iterator[None]:
    """Let this process not sleep where it reads: virtual time has what was measured."""
    task.sleeps = False
    try:
        yield
    finally:
        task.sleeps = True
