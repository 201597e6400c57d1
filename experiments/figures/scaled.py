"""Courses of training in virtual time, at the price of the paper's speech net.

What is learnt is small (`task`), and so are the machines: as much slower than those of
cluster commodity-2012 as our net and batches are smaller than the paper's net and
batches of 512. So computing and sending take each other's measure as they would there.
Time runs `haste` times as fast, for heartbeats and time-outs are not to be scaled, and
is multiplied again in what is reported: seconds are those of the large cluster.

    replica       one machine of 16 cores (the paper: 8 to 32 cores of several)
    shards        two; together they have the processors and cards of as many machines
                  as there are replicas, halved, but no more than 250
    evaluator     off the path: it never delays anybody
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import msgspec
import torch
from safetensors.torch import save_file

from distbelief.forecast.staging import StagedJob, Staging
from distbelief.forecast.virtual_run import run_virtually
from distbelief.job.jobfile import parse_job
from distbelief.program.cluster import Cluster
from distbelief.program.cluster_file import load_cluster
from distbelief.roles import SUPERVISOR, Address
from distbelief.simulation.faults import Fault
from distbelief.simulation.options import ClusterOptions
from distbelief.simulation.placing import Place, options_for
from distbelief.simulation.world import Builder
from experiments.figures import task
from experiments.figures.results import RESULTS


BATCH: Final = 32
PAPERS_BATCH: Final = 512
N_PARAMETERS: Final = 41_874
PAPERS_PARAMETERS: Final = 41_777_152
N_SHARDS: Final = 2
CORES: Final = 16
"""Of a machine of this cluster, by its file."""
WARM_STEPS: Final = 500
WARM_RATE: Final = 0.1
SHARD_MACHINES_MAX: Final = 250


@final
class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: seconds of the large cluster, and accuracies."""

    seconds: float
    samples: int
    trained: float
    held_out: float


@final
class Course(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        name: Of the method.
        seed: Of everything.
        replicas: Model replicas.
        machines: Theirs, and the shards'.
        points: In order of time.
        target_seconds: When the wanted accuracy was reached, if one was and it was.
        staleness: Mean, in pushes.
        ended: Why.
    """

    name: str
    seed: int
    replicas: int
    machines: int
    points: tuple[Point, ...]
    target_seconds: float | None
    staleness: float | None
    ended: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a course is trained.

    Attributes:
        name: As in the figure.
        algorithm: Lines of table [algorithm].
        replicas: Model replicas.
        stop: Lines of table [stop].
        every: Seconds of the large cluster between evaluations.
        haste: How many times as fast time runs.
    """

    name: str
    algorithm: str
    replicas: int
    stop: str
    every: float
    haste: float = 20.0

    @property
    def shard_machines(self) -> int:
        """How many machines its shards have together."""
        halved = min(self.replicas // 2, SHARD_MACHINES_MAX)
        return max(N_SHARDS, halved - halved % N_SHARDS)


@final
@dataclass(frozen=True, slots=True)
class Rig:
    """The scaled machines for one method."""

    method: Method

    @property
    def cluster(self) -> Cluster:
        """As many machines as it takes, each scaled down."""
        given = load_cluster("commodity-2012").machines[0]
        size = N_PARAMETERS / PAPERS_PARAMETERS
        machine = msgspec.structs.replace(
            given,
            flops=given.flops * size * BATCH / PAPERS_BATCH * self.method.haste,
            memory_rate=given.memory_rate * size * self.method.haste,
            bandwidth=given.bandwidth * size * self.method.haste,
            overhead=given.overhead / self.method.haste,
            cores=CORES,
        )
        n = self.method.replicas + self.method.shard_machines + 65
        return Cluster(
            name="scaled", machines=(machine,) * n, latency=1e-4 / self.method.haste
        )

    def n_needed(self, staged: StagedJob) -> int:
        """Return the machines of replicas and shards."""
        del staged
        return self.method.replicas + self.method.shard_machines

    def builders(self, staged: StagedJob) -> dict[Address, Builder]:
        """Return the roles, at the costs that they tell of."""
        return staged.builders()

    def options(
        self, staged: StagedJob, *, faults: Sequence[Fault] = ()
    ) -> ClusterOptions:
        """Return the simulated cluster."""
        placement: dict[Address, Place] = {}
        n_each = self.method.shard_machines // N_SHARDS
        first = self.method.replicas
        for name, kind in staged.kinds.items():
            if kind == "replica":
                placement[name] = int(name.partition("-")[2])
            elif kind == "shard":
                index = int(name.partition("-")[2])
                placement[name] = (first + index * n_each, n_each)
        after = first + self.method.shard_machines
        for name, kind in staged.kinds.items():
            if kind == "evaluator":
                placement[name] = (after, 64)
            elif name not in placement:  # supervisor, coordinator
                placement[name] = after + 64
        options = options_for(
            self.cluster, placement, threads=CORES, share_memory=False
        )
        return replace(
            options,
            start=(SUPERVISOR,),
            faults=tuple(faults),
            trace="order",
            codec=False,
        )


def course_of(
    method: Method, *, seed: int, target: float | None = None, wanted: str = "both"
) -> Course:
    """Run a method once; what was run before is read from its file.

    Args:
        method: What is run.
        seed: Of the warm start, of the order of samples, of the machines' jitter.
        target: Accuracy at which the run may end.
        wanted: "both" accuracies, of training and held out, or "held_out" alone.
    """
    known = kept(method, seed=seed, wanted=wanted)
    if known is not None:
        return known
    found = _run(method, seed=seed, target=target, wanted=wanted)
    RESULTS.mkdir(exist_ok=True)
    path = _path(method, seed, wanted)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return found


def kept(method: Method, *, seed: int, wanted: str = "both") -> Course | None:
    """Return what was run before, if it was."""
    path = _path(method, seed, wanted)
    if not path.is_file():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Course)


def _path(method: Method, seed: int, wanted: str) -> Path:
    slug = "".join(c if c.isalnum() else "-" for c in method.name.lower())
    return RESULTS / f"{slug}-{method.replicas}-{wanted}-{seed}.json"


def _run(method: Method, *, seed: int, target: float | None, wanted: str) -> Course:
    data = "measured" if wanted == "both" else "held_out"
    metric = "experiments.figures.task:both" if wanted == "both" else "accuracy"
    text = f"""
[model]
factory = "experiments.figures.task:net"
initial = "{warm_start(seed)}"
[data.train]
factory = "experiments.figures.task:train"
[data.test]
factory = "experiments.figures.task:{data}"
[algorithm]
{method.algorithm}
loss = "experiments.figures.task:loss"
seed = {seed}
[cluster]
replicas = {method.replicas}
shards = {N_SHARDS}
[evaluation]
metric = "{metric}"
every = "{method.every / method.haste} s"
[stop]
{method.stop}
{"" if target is None else f"accuracy = {target}"}
[output]
directory = "unused"
snapshot_every = "1 h"
report_every = "{method.every / method.haste} s"
"""
    job = parse_job(text, path="figure.toml")
    with Staging() as staging:
        ended = run_virtually(staging.stage(job), Rig(method), seed=seed)
    outcome = ended.outcome
    points: list[Point] = []
    begun = outcome.seconds - outcome.training_seconds
    for point in outcome.history:
        if point.metric is None:
            continue
        trained, held_out = (
            task.parts_of(point.metric)
            if wanted == "both"
            else (float("nan"), point.metric)
        )
        if points and points[-1].held_out == held_out and points[-1].trained == trained:
            continue  # the same evaluation
        points.append(
            Point(
                seconds=max(0.0, point.seconds - begun) * method.haste,
                samples=point.samples,
                trained=0.0 if wanted != "both" else trained,
                held_out=held_out,
            )
        )
    at = outcome.target_seconds
    return Course(
        name=method.name,
        seed=seed,
        replicas=method.replicas,
        machines=outcome.n_machines,
        points=tuple(points),
        target_seconds=None if at is None else at * method.haste,
        staleness=outcome.staleness_mean,
        ended=outcome.error or outcome.ended or "",
    )


def warm_start(seed: int) -> str:
    """Return the file of what one replica has learnt before the others begin."""
    path = RESULTS / f"warm-relu64-{WARM_STEPS}-{seed}.safetensors"  # what it is of
    if not path.is_file():
        RESULTS.mkdir(exist_ok=True)
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        net, data = task.net(), task.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=WARM_RATE)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        for step in range(WARM_STEPS):
            rows = order[step * BATCH % len(data) :][:BATCH]
            optimizer.zero_grad()
            task.loss(net(data.inputs[rows]), data.targets[rows]).backward()
            optimizer.step()
        save_file(dict(net.state_dict()), path)
    return str(path)


def show(courses: Sequence[Course], tell: Callable[[str], None] = print) -> None:
    """Print how each course ended."""
    for each in courses:
        last = each.points[-1] if each.points else None
        tell(
            json.dumps(
                {
                    "name": each.name,
                    "replicas": each.replicas,
                    "seed": each.seed,
                    "seconds": None if last is None else round(last.seconds),
                    "trained": None if last is None else round(last.trained, 4),
                    "held_out": None if last is None else round(last.held_out, 4),
                    "staleness": each.staleness,
                    "target_seconds": each.target_seconds,
                    "ended": each.ended,
                }
            )
        )
