"""Thousands of replicas over five regions, whose machines come and go, in virtual time.

    python experiments/benchmarks/many_replicas.py [--replicas 10000] [--exchanges 20]
        [--only local diloco decoupled-diloco horovod] [--profile] [--small]

One process and thread; gradients of a small net are real, and the price of a step is that of a
large one: 1 s. Half of the replicas are spot machines that are taken back every half hour and
cost a third; a tenth of all come 5 s later. Not in `make bench`: 10,000 replicas take minutes.

    seconds_*    processor time; virtual_*: how long the job was
    micro_*      microseconds of it for a message; messages_*: how many
    goodput_*    steps of the job, over those that its machines could have taken while they were
                 there and it trained
    megabytes    the most memory
"""

import argparse
import cProfile
import pstats
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from msgspec import structs

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.plans.cluster import Cluster, Machine, Outages
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault, Outage
from distbelief.simulation.forecast.placed_cluster import PlacedCluster
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.run import FinishedRun, run_simulated
from distbelief.simulation.machines import ClusterOptions, CostScale
from distbelief.worker.local_executor import FlatModel
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.simulated.task import net


PRESET_NAMES: Final = ("local", "diloco", "decoupled-diloco")
BATCH: Final = 8
STEP_SECONDS: Final = 1.0
FLOPS: Final = 1e9
REGIONS: Final = ("eu", "us", "asia", "south", "home")
# Seconds one way between regions, as between data centres of large providers
APART: Final = {
    "eu-us": 0.045,
    "eu-asia": 0.11,
    "eu-south": 0.1,
    "eu-home": 0.01,
    "us-asia": 0.08,
    "us-south": 0.06,
    "us-home": 0.05,
    "asia-south": 0.15,
    "asia-home": 0.12,
    "south-home": 0.11,
}
LATE: Final = 5.0  # seconds, when a tenth of the machines come
SPOT: Final = Outages(mean_time=1800.0, away=60.0)


def wan(n_replicas: int) -> Cluster:
    """Return five regions with a machine for each replica, and one for shards and supervisor."""
    one = Machine(
        flops=FLOPS, memory_rate=1e10, bandwidth=1.25e8, upload=2.5e7, jitter=0.1, price=0.3
    )
    kinds = []
    for region in REGIONS:
        paid = structs.replace(one, region=region)
        kinds += [paid, structs.replace(paid, preemptions=SPOT, price=0.1)]
    late = [structs.replace(kind, join=LATE) for kind in kinds]
    machines = []
    for n in range(n_replicas):
        comes_late = n % 10 == 9
        machines.append((late if comes_late else kinds)[n * len(kinds) // n_replicas])
    last = structs.replace(one, region="home", bandwidth=1.25e9, upload=1.25e9)
    return Cluster(name="wan", machines=(*machines, last), latency=0.001, latencies=APART)


def job_of(preset: str, n_replicas: int, *, every: int, exchanges: int) -> Job:
    return parse_job(
        f"""
[model]
factory = "experiments.benchmarks.simulated.task:net"
initial = "seed"
[data]
train = {{ factory = "experiments.benchmarks.simulated.task:samples" }}
[algorithm]
name = "downpour"
preset = "{preset}"
loss = "cross_entropy"
batch_size = {BATCH}
exchange = {{ every = {every}, route = "server" }}
[cluster]
replicas = {n_replicas}
[stop]
steps = {n_replicas * every * exchanges}
[output]
directory = "unused"
snapshot_every = "10 h"
""",
        path="many_replicas.toml",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """The machines, where steps of the small net take as long as those of a large one."""

    placed: PlacedCluster
    flops: float  # of a step

    def n_needed(self, prepared: PreparedJob) -> int:
        return self.placed.n_needed(prepared)

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        return self.placed.builders(prepared)

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        scale = CostScale(flops=STEP_SECONDS * FLOPS / self.flops)
        replicas = [name for name, kind in prepared.kinds.items() if kind == "replica"]
        return replace(
            self.placed.options(prepared, faults=faults),
            scales=dict.fromkeys(replicas, scale),
            trace="order",
            codec=False,
        )


class Figures(NamedTuple):
    run: FinishedRun
    spent: Seconds  # of the processor
    goodput: float


def run(preparation: Preparation, job: Job, *, flops: float) -> Figures:
    """Run a job; `flops` of one step of its net."""
    prepared = preparation.stage(job)
    cluster = wan(job.cluster.n_replicas)
    placed = PlacedCluster(
        cluster=cluster, reference=cluster.machines[-1], rates=None, together=False
    )
    begun: list[Outage] = []

    def outages() -> Iterator[Outage]:
        for outage in placed.outages(prepared, seed=0):
            begun.append(outage)
            yield outage

    began = time.process_time()
    host = Wan(placed=placed, flops=flops)
    ended = run_simulated(prepared, host, seed=0, outages=outages())
    spent = time.process_time() - began
    # Steps that the machines could have taken while training went on and they were there
    outcome = ended.outcome
    since = outcome.seconds - outcome.training_seconds
    there = job.cluster.n_replicas * outcome.training_seconds
    for outage in begun:
        ends = min(outage.at + outage.seconds, outcome.seconds)
        there -= max(0.0, ends - max(outage.at, since))
    return Figures(ended, spent, outcome.samples / job.batch_size * STEP_SECONDS / there)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--exchanges", type=int, default=20)
    parser.add_argument("--every", type=int, default=1, help="steps of an exchange")
    parser.add_argument("--only", nargs="+", default=PRESET_NAMES)
    parser.add_argument("--profile", action="store_true")
    options = measurement.options_of(parser, arguments, small={"replicas": 12, "exchanges": 3})
    torch.set_num_threads(1)
    flops, figures = FlatModel(net()).flops(BATCH), dict[str, float]()
    with Preparation() as preparation:
        for preset in options.only:
            job = job_of(preset, options.replicas, every=options.every, exchanges=options.exchanges)
            profile = cProfile.Profile()
            if options.profile:
                profile.enable()
            found = run(preparation, job, flops=flops)
            profile.disable()
            outcome = found.run.outcome
            figures |= {
                f"seconds_{preset}": found.spent,
                f"virtual_{preset}": outcome.seconds,
                f"micro_{preset}": 1e6 * found.spent / outcome.n_messages,
                f"messages_{preset}": outcome.n_messages,
                f"goodput_{preset}": found.goodput,
                f"restarts_{preset}": outcome.restarts,
                f"failed_{preset}": float(outcome.error is not None),
            }
            print(preset, outcome.stop_reason, outcome.error or "", flush=True)
            if options.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measurement.conclude("many_replicas", figures | {"megabytes": peak / 1024})


if __name__ == "__main__":
    main()
