"""Thousands of replicas over five regions, whose machines come and go, in virtual time.

    python experiments/benchmarks/many_replicas.py [--replicas 10000] [--exchanges 20] [--every 4]
        [--step-seconds 0.1] [--steps-in-one 125] [--only local diloco decoupled-diloco horovod]
        [--losses] [--profile] [--small]

One process and thread; gradients of a linear model are real, and the price of a step is that of a
large one: `--step-seconds`, of which a simulated one stands for `--steps-in-one`. By default an
exchange is 500 steps of 100 ms, as DiLoCo's, at the price of four real gradients, and the job is 17
minutes long. Half of the replicas are spot machines that are taken back once an hour, for a minute,
and cost a third; a tenth of all come 5 s later. With longer steps, of which an exchange has fewer,
this takes less processor time, but what is left at the end is dealt in whole steps.
Not in `make bench`: 10,000 replicas take many minutes.

    seconds_*    processor time; virtual_*: how long the job was
    micro_*      microseconds of it for a message; messages_*: how many
    goodput_*    samples of the job, over those that its machines would have trained in the time
                 that it trained, undisturbed: none of them late, lost, waiting, or done early
    megabytes    the most memory

`--losses` says what became of the rest, as shares of all machines' time. It keeps each piece of
work in memory, so take a thousand replicas or fewer:

    away         the machine was not there yet, or was lost
    start        it was there, and its replica had not begun its first step
    again        it was back, and its replica had not begun a step again
    cut          steps that its loss cut short, and waiting before it
    waiting      between two steps: for the shards, for other replicas, for links
    end          after its last step
    unused       steps that count for nothing

Beside each, data-parallel training with a barrier in every step, on the same machines with the same
outages, without a message: a step ends with the slowest machine and a mean over the slowest link,
and none ends while a machine is away.

    goodput_barrier_waits_*      the step begins anew when all machines are back
    goodput_barrier_restarts_*   so does all since the last checkpoint, of every 100th step
"""

import argparse
import cProfile
import math
import pstats
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
import torch
from msgspec import structs

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.config.presets import PRESETS
from distbelief.plans.cluster import Cluster, Machine, Outages
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault, Outage
from distbelief.simulation.forecast.placed_cluster import PlacedCluster
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.run import FinishedRun, run_simulated
from distbelief.simulation.machines import ClusterOptions, CostScale
from distbelief.task.tensor_pairs import TensorPairs
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.steps import STEP
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.simulated.task import net, samples


PRESET_NAMES: Final = ("local", "diloco", "decoupled-diloco")
BATCH: Final = 8
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
INNER: Final = 'name = "AdamW", lr = 1e-3, fused = true'
LATE: Final = 5.0  # seconds, when a tenth of the machines come
JITTER: Final = 0.1  # standard deviation of the logarithm of a step's time
STEPS_KEPT: Final = 100  # between checkpoints of data-parallel training
BARRIER_SECONDS: Final = 3600.0  # of it: a loss is seldom where machines are few
SPOT: Final = Outages(mean_time=3600.0, away=60.0)


def rows() -> TensorPairs:
    return TensorPairs(*samples().tensors)


class Steps(NamedTuple):
    """What a step stands for."""

    seconds: Seconds  # of each
    in_one: int  # so many of them, each with its own jitter

    @property
    def jitter(self) -> float:
        return JITTER / math.sqrt(self.in_one)

    @property
    def mean(self) -> Seconds:
        return self.in_one * self.seconds * math.exp(self.jitter**2 / 2.0)


def wan(n_replicas: int, steps: Steps) -> Cluster:
    """Return five regions with a machine for each replica, and one for shards and supervisor."""
    one = Machine(
        flops=FLOPS,
        memory_rate=1e10,
        bandwidth=1.25e8,
        upload=2.5e7,
        jitter=steps.jitter,
        price=0.3,
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
    # The same update as without `fused`, in one call: half of a step's time is torch's.
    inner = f"inner = {{ {INNER} }}" if "inner" in PRESETS[preset] else ""
    return parse_job(
        f"""
[model]
factory = "experiments.benchmarks.simulated.task:net"
arguments = {{ layers = 0 }}
initial = "seed"
[data]
train = {{ factory = "experiments.benchmarks.many_replicas:rows" }}
[algorithm]
name = "downpour"
preset = "{preset}"
loss = "cross_entropy"
batch_size = {BATCH}
{inner}
exchange = {{ every = {every}, route = "server" }}
[cluster]
replicas = {n_replicas}
[stop]
steps = {n_replicas * every * exchanges}
[output]
directory = "unused"
snapshot_every = "10 h"
report_every = "20 s"
""",
        path="many_replicas.toml",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """The machines, where steps of the small net take as long as those of a large one."""

    placed: PlacedCluster
    flops: float  # of a step
    steps: Steps

    def n_needed(self, prepared: PreparedJob) -> int:
        return self.placed.n_needed(prepared)

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        return self.placed.builders(prepared)

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        scale = CostScale(flops=self.steps.in_one * self.steps.seconds * FLOPS / self.flops)
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
    shares: dict[str, float]  # of the machines' time: goodput, and what else became of it


def shares_of(
    ended: FinishedRun, outages: Sequence[Outage], job: Job, steps: Steps
) -> dict[str, float]:
    """Return what became of the machines' time while the job trained; see above."""
    outcome, n_replicas = ended.outcome, job.cluster.n_replicas
    since, until = outcome.seconds - outcome.training_seconds, outcome.seconds
    whole = n_replicas * outcome.training_seconds
    shares = {"goodput": outcome.samples / job.batch_size * steps.mean / whole}
    taken: dict[Address, list[tuple[Seconds, Seconds]]] = {}
    for span in ended.timeline.spans:
        if span.name == STEP:
            taken.setdefault(span.role, []).append((span.ends - span.seconds, span.ends))
    if not taken:
        return shares
    away: dict[Address, list[tuple[Seconds, Seconds]]] = {}
    for outage in outages:
        for name in outage.roles:
            away.setdefault(name, []).append((outage.at, outage.at + outage.seconds))
    lost = dict.fromkeys(("away", "start", "again", "cut", "waiting", "end"), 0.0)
    for n in range(n_replicas):
        name, at, kind = Address(f"replica-{n}"), since, "start"
        for begins, ends in [*taken.get(name, []), (until, until)]:
            kind = "end" if begins == until and kind == "waiting" else kind
            for gone, back in away.get(name, []):
                if gone < begins and back > at:
                    lost["cut" if kind == "waiting" else kind] += max(gone - at, 0.0)
                    lost["away"] += min(back, begins) - max(gone, at)
                    at, kind = min(back, begins), "start" if kind == "start" else "again"
            lost[kind] += max(begins - at, 0.0)
            at, kind = max(at, ends), "waiting"
    shares |= {name: seconds / whole for name, seconds in lost.items()}
    return shares | {"unused": 1.0 - sum(shares.values())}


def barrier(
    outages: Iterator[Outage], n_replicas: int, step: Seconds, *, seconds: Seconds, keeps: int = 0
) -> float:
    """Return the goodput of steps that all machines take together, for so many seconds.

    With `keeps`, a checkpoint is taken every so many steps, and a loss takes back to it. Training
    begins when all machines are there.
    """
    chance, slowest = np.random.default_rng(0), 2.0 * max(APART.values())
    began = now = there_at = LATE
    done = kept = 0
    never = Outage(at=math.inf, roles=(), seconds=0.0)  # of few machines none may come or go
    following = next((one for one in outages if one.at > began), never)
    while now < began + seconds:
        largest = float(chance.random()) ** (1.0 / n_replicas)  # of so many draws
        takes = step * math.exp(JITTER * NormalDist().inv_cdf(largest)) + slowest
        now = max(now, there_at)
        if following.at > now + takes:
            now, done = now + takes, done + 1
            kept = done if keeps and done % keeps == 0 else kept
            continue
        done, now = kept if keeps else done, max(now, following.at)
        there_at = max(there_at, following.at + following.seconds)
        following = next(outages, never)
    return done * Steps(step, in_one=1).mean / (now - began)


def run(preparation: Preparation, job: Job, steps: Steps, *, flops: float, losses: bool) -> Figures:
    """Run a job; `flops` of one step of its net."""
    prepared = preparation.stage(job)
    cluster = wan(job.cluster.n_replicas, steps)
    placed = PlacedCluster(
        cluster=cluster, reference=cluster.machines[-1], rates=None, together=False
    )
    begun: list[Outage] = []

    def outages() -> Iterator[Outage]:
        for outage in placed.outages(prepared, seed=0):
            begun.append(outage)
            yield outage

    began = time.process_time()
    host = Wan(placed=placed, flops=flops, steps=steps)
    ended = run_simulated(prepared, host, seed=0, outages=outages(), keeps_spans=losses)
    spent = time.process_time() - began
    shares = shares_of(ended, begun, job, steps)
    for name, keeps in (("waits", 0), ("restarts", STEPS_KEPT)):
        shares[f"goodput_barrier_{name}"] = barrier(
            placed.outages(prepared, seed=0),
            job.cluster.n_replicas,
            steps.seconds,
            seconds=max(ended.outcome.training_seconds, BARRIER_SECONDS),
            keeps=keeps,
        )
    return Figures(ended, spent, shares)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--exchanges", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="steps of an exchange")
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--steps-in-one", type=int, default=125, help="that a step stands for")
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=PRESET_NAMES)
    parser.add_argument("--losses", action="store_true", help="say where time was lost")
    parser.add_argument("--profile", action="store_true")
    options = measurement.options_of(parser, arguments, small={"replicas": 12, "exchanges": 3})
    torch.set_num_threads(1)
    steps = Steps(options.step_seconds, options.steps_in_one)
    flops, figures = FlatModel(net(layers=0)).flops(BATCH), dict[str, float]()
    with Preparation() as preparation:
        for preset in options.only:
            job = job_of(preset, options.replicas, every=options.every, exchanges=options.exchanges)
            profile = cProfile.Profile()
            if options.profile:
                profile.enable()
            found = run(preparation, job, steps, flops=flops, losses=options.losses)
            profile.disable()
            outcome = found.run.outcome
            figures |= {
                f"seconds_{preset}": found.spent,
                f"virtual_{preset}": outcome.seconds,
                f"micro_{preset}": 1e6 * found.spent / outcome.n_messages,
                f"messages_{preset}": outcome.n_messages,
                f"restarts_{preset}": outcome.restarts,
                f"failed_{preset}": float(outcome.error is not None),
            }
            figures |= {f"{name}_{preset}": share for name, share in found.shares.items()}
            print(preset, outcome.stop_reason, outcome.error or "")
            for name, figure in figures.items():  # now, as the next one takes minutes
                if name.endswith(f"_{preset}"):
                    print(f"  {name} {figure:.4g}", flush=True)
            if options.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measurement.conclude("many_replicas", figures | {"megabytes": peak / 1024})


if __name__ == "__main__":
    main()
