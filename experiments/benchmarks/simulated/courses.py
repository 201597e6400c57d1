"""A preset in virtual time: four replicas train a small net at the price of the speech net.

The roles are the real ones, and gradients are real. Bytes, and the seconds of a step, are those of
the net of 41,777,152 parameters: 167 MB each way, and 0.2 s for a step (`links.py` has the same
two). What the simulator makes of such figures is compared with real runs in `simulation.py`.

    replica-0 ... replica-3   a host each, with one card
    shard, evaluator          a host with one card; evaluations use no card

Virtual time runs `TIME_SCALE` times as fast, because heartbeats do not scale; seconds here are
those of the large net.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, cast

import msgspec
import torch
from torch import nn
from torch.nn import functional

from distbelief.config.load import parse_job
from distbelief.config.presets import PRESETS, Table
from distbelief.core import vectors
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.plans.cluster import Cluster, Machine
from distbelief.protocol.role import SUPERVISOR, Address, Computed, Event, Role, Seconds
from distbelief.simulation.cluster_options import options_for
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.run import FinishedRun, run_simulated
from distbelief.simulation.machines import ClusterOptions, CostScale
from distbelief.worker.steps import STEP
from experiments.figures import task as speech_task
from experiments.figures.entries import Noted
from experiments.figures.task import Held
from experiments.speech.model import acoustic_net
from experiments.zoo.text import N_LETTERS, passages


N_PARAMETERS: Final = 41_777_152
STEP_SECONDS: Final = 0.2
N_REPLICAS: Final = 4
BATCH: Final = 32
TIME_SCALE: Final = 20.0
MEMORY_RATE: Final = 1e10  # bytes a second
N_BLOCKS: Final = 32  # of a push or a fetch; the large net has 160
N_EVALUATIONS: Final = 24  # of a course, about
ALONE: Final = "one process"
IN_STEP: Final = "AdamW in step"  # at the shards, of the mean gradient of each step
IN_STEP_16: Final = "AdamW in step, 16 bits"  # the same in bfloat16, both ways
# Of one process: a step, and AdamW, as a replica with local steps pays for it
ALONE_SECONDS: Final = STEP_SECONDS + 8 * 4 * N_PARAMETERS / MEMORY_RATE
_DATA: Final = {"text": "text", "speech": "frames"}
_TASKS: Final = "experiments.benchmarks.simulated.courses"


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    points: tuple[tuple[float, int, float], ...]  # seconds, samples, held-out loss
    seconds: float
    samples: int
    bytes_per_sample: float  # both ways
    error: str | None = None  # why it failed: it has diverged

    def loss_at(self, samples: int) -> float:
        """Return the held-out loss after so many samples, between two evaluations if need be."""
        if self.error is not None or not self.points:
            return math.inf
        before = self.points[0]
        for point in self.points:
            if point[1] >= samples:
                share = (samples - before[1]) / max(1, point[1] - before[1])
                return before[2] + share * (point[2] - before[2])
            before = point
        return before[2]

    def seconds_to(self, loss: float) -> float | None:
        """Return when an evaluation first found this loss or less."""
        return next((seconds for seconds, _, found in self.points if found <= loss), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a job, and when steps of its replicas began and ended, in all incarnations."""

    bits_per_second: float
    steps: dict[Address, list[tuple[Seconds, Seconds]]] = field(default_factory=dict)

    def n_needed(self, prepared: PreparedJob) -> int:
        del prepared
        return N_REPLICAS + 1

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        def watched(name: Address, build: Builder) -> Builder:
            steps = self.steps.setdefault(name, [])

            def note(_role: Role, event: Event, now: Seconds) -> None:
                if isinstance(event, Computed) and event.name == STEP:
                    steps.append((now - event.seconds, now))

            return lambda memory: Noted(build(memory), note)

        kinds = prepared.kinds
        return {
            name: watched(name, build) if kinds[name] == "replica" else build
            for name, build in prepared.builders().items()
        }

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        n_small = prepared.layout.shard_size(0)
        size = N_PARAMETERS / n_small
        one = Machine(
            flops=6.0 * n_small * BATCH / STEP_SECONDS * TIME_SCALE,
            memory_rate=MEMORY_RATE * TIME_SCALE,
            bandwidth=self.bits_per_second / 8 * TIME_SCALE,
        )
        # Four pushes of all replicas at a time must not wait for the memory of one core.
        server = msgspec.structs.replace(one, memory_rate=N_REPLICAS * one.memory_rate)
        machines = (*[one] * N_REPLICAS, server)
        return options_of(prepared, machines, size=size, faults=faults)


def options_of(
    prepared: PreparedJob, machines: Sequence[Machine], *, size: float, faults: Sequence[Fault] = ()
) -> ClusterOptions:
    """Return the options of a job: a machine for each replica, the last one for all other roles.

    Bytes are `size` times those of the job's net; evaluations take nothing.
    """
    last = len(machines) - 1
    cluster = Cluster(name="hosts", machines=tuple(machines), latency=5e-6)
    places = {
        name: int(name.partition("-")[2]) if kind == "replica" else last
        for name, kind in prepared.kinds.items()
    }
    scales = dict.fromkeys(places, CostScale(n_bytes=size, frame_bytes=size))
    scales[Address("evaluator")] = CostScale(flops=0.0, n_bytes=0.0, frame_bytes=size)
    return replace(
        options_for(cluster, places, share_memory=False),
        scales=scales,
        start=(SUPERVISOR,),
        faults=tuple(faults),
        trace="order",
        codec=False,
    )


def table_of(preset: str) -> Table:
    """Return a preset, whose gradients go through the shards."""
    in_step = preset in (IN_STEP, IN_STEP_16)
    table = PRESETS["horovod" if in_step else preset]
    exchange = {**cast("Table", table.get("exchange", {})), "route": "server"}
    if preset == IN_STEP_16:
        exchange["numbers"] = "bfloat16"
    rule = {"name": "AdamW"} if in_step else table["rule"]
    return {**table, "rule": rule, "exchange": exchange}


def exchange_of(preset: str) -> Table:
    return cast("Table", table_of(preset)["exchange"])


def optimizer_of(preset: str) -> str:
    """Return the optimizer whose rate is chosen: the inner one, or else the shards' rule."""
    if preset == ALONE:
        return "AdamW"
    table = table_of(preset)
    return str(cast("Table", table.get("inner", table["rule"]))["name"])


def expected_seconds(preset: str, bits_per_second: float, gradients: int) -> float:
    """Return roughly how long so many gradients take, to spread evaluations over them."""
    exchange = exchange_of(preset)
    codec = msgspec.convert(exchange, ExchangePolicy).push_codec
    n_bytes = 4 * N_PARAMETERS / cast("int", exchange.get("every", 1))
    n_bytes *= 1.0 if codec is None else codec.words_per_element
    ways = 2.0 if "staleness" in exchange else 1.0
    return gradients * (STEP_SECONDS / N_REPLICAS + 8 * ways * n_bytes / bits_per_second)


def job_text(
    task: str, preset: str, *, rate: float, seed: int, every: Seconds, stop: Mapping[str, object]
) -> str:
    """Return the job file; `every`: seconds between evaluations."""
    data = f'{{ factory = "{_TASKS}:{_DATA[task]}", arguments = {{ part = "%s" }} }}'
    table, rate_key = table_of(preset), "lr"
    optimizer = "inner" if "inner" in table else "rule"
    in_step = preset in (IN_STEP, IN_STEP_16)
    if optimizer == "rule" and not in_step:
        rate_key = "learning_rate"
    name = cast("Table", table[optimizer])["name"]
    grace = cast("Table", exchange_of(preset).get("round", {})).get("grace_seconds")
    numbers = 'numbers = "bfloat16",' if preset == IN_STEP_16 else ""
    scaled = f"round.grace_seconds = {cast('float', grace) / TIME_SCALE}," if grace else ""
    return f"""
[model]
factory = "{_TASKS}:{task}_net"
seed = {seed}
[data]
train = {data % "train"}
test = {data % "test"}
[algorithm]
name = "downpour"
preset = "{"horovod" if in_step else preset}"
loss = "cross_entropy"
batch_size = {BATCH}
seed = {seed}
{optimizer} = {{ name = "{name}", {rate_key} = {rate} }}
exchange = {{ {scaled} {numbers} route = "server" }}
[cluster]
replicas = {N_REPLICAS}
[evaluation]
every = "{every / TIME_SCALE} s"
[stop]
{"".join(f"{key} = {value}" for key, value in stop.items())}
[output]
directory = "unused"
snapshot_every = "10 h"
"""


# Two small tasks with real data: the next letter of a text, and phone states of speech

CONTEXT: Final = 16  # letters
N_HELD_OUT: Final = 4096
_PASSAGE: Final = 256  # letters; every tenth is held out


def text_net() -> nn.Module:
    """Return a net that predicts the next letter from 16; 85,376 parameters."""
    return nn.Sequential(
        nn.Embedding(N_LETTERS, 24),
        nn.Flatten(),
        nn.Linear(24 * CONTEXT, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, N_LETTERS),
    )


def speech_net() -> nn.Module:
    """Return 440 - 128 - 210 with ReLU; 83,538 parameters."""
    return acoustic_net(hidden=[128], states=speech_task.N_STATES, activation="relu")


@cache
def text(part: str) -> Held:
    """Return 16 letters and the next, of Python's documentation."""
    letters, following = passages(part=part, length=_PASSAGE).tensors
    inputs = letters.unfold(1, CONTEXT, 1).reshape(-1, CONTEXT)
    targets = following[:, CONTEXT - 1 :].reshape(-1)
    if part == "test":
        chosen = torch.linspace(0, len(targets) - 1, N_HELD_OUT).long()
        inputs, targets = inputs[chosen], targets[chosen]
    return Held(inputs, targets)


def frames(part: str) -> Held:
    return speech_task.train() if part == "train" else speech_task.held_out()


@contextmanager
def _blocks_of(n_bytes: int) -> Iterator[None]:
    # Of the usual size, a block would be all that a small net sends, and stand for far more.
    usual = vectors.BLOCK_BYTES
    vectors.BLOCK_BYTES = n_bytes
    try:
        yield
    finally:
        vectors.BLOCK_BYTES = usual


def run(
    preparation: Preparation, text: str, hosts: Hosts, *, seed: int, faults: Sequence[Fault] = ()
) -> tuple[Course, FinishedRun]:
    job = parse_job(text, path="exchanges.toml")
    prepared = preparation.stage(job)
    with _blocks_of(-(-prepared.layout.shard_size(0) // N_BLOCKS) * 4):
        ended = run_simulated(prepared, hosts, seed=seed, faults=faults)
    outcome = ended.outcome
    begun = outcome.seconds - outcome.training_seconds
    points: list[tuple[float, int, float]] = []
    for point in outcome.history:
        loss = point.held_out_loss
        if loss is not None and not (points and points[-1][2] == loss):  # the same evaluation
            points.append(((point.seconds - begun) * TIME_SCALE, point.samples, loss))
    course = Course(
        points=tuple(points),
        seconds=outcome.training_seconds * TIME_SCALE,
        samples=outcome.samples,
        bytes_per_sample=outcome.traffic["replica - shard"] / max(1, outcome.samples),
        error=outcome.error,
    )
    return course, ended


def alone(task: str, *, rate: float, seed: int, gradients: int) -> Course:
    """Train in one process by torch's AdamW."""
    torch.manual_seed(seed)
    net = text_net() if task == "text" else speech_net()
    data, test = (text(part) if task == "text" else frames(part) for part in ("train", "test"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    order = torch.cat(
        [torch.randperm(len(data)) for _ in range(1 + gradients * BATCH // len(data))]
    )
    points: list[tuple[float, int, float]] = []
    for step in range(1, gradients + 1):
        rows = order[(step - 1) * BATCH : step * BATCH].tolist()
        inputs, targets = data.__getitems__(rows)
        optimizer.zero_grad()
        functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        if step % max(1, gradients // N_EVALUATIONS) == 0:
            points.append((step * ALONE_SECONDS, step * BATCH, _held_out(net, test)))
    return Course(
        points=tuple(points),
        seconds=gradients * ALONE_SECONDS,
        samples=gradients * BATCH,
        bytes_per_sample=0.0,
    )


@torch.no_grad()
def _held_out(net: nn.Module, test: Held) -> float:
    return float(functional.cross_entropy(net(test.inputs), test.targets))
