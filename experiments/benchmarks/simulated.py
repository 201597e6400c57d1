"""What `simulation` measures: speed, memory and truth of the simulated cluster.

    python experiments/benchmarks/simulation.py [--only speed memory large truth]

One thread, processor time. Roles are those of a job as it is run, on a rack of
10 Gbit/s with cards that all flows share; the net they train is small and stands for
the paper's speech net of 42 million parameters, in as many blocks (`scales`).

    messages_per_second         Downpour, 20 replicas, 10 shards, every message encoded
                                and decoded, contents in the digest
    messages_per_second_priced  the same, messages passed on, only their order noted
    messages_per_second_driver  the same as the first with two roles that only answer
                                each other: what the driver takes
    messages_per_second_passed  likewise as the second
    kilobytes_per_replica       priced; at 100 replicas and 20 shards, what each shard
                                keeps for it included
    memory_growth               that over the same at 25 replicas: 1 is linear in roles
    sandblaster_seconds         only if asked for (`large`): 2000 replicas, 100
                                batches, 8 shards
    step_time_error             simulated against real on this host, the worst of the
    samples_per_second_error    jobs below; a share
    bytes_differ                jobs whose bytes were not the same to the last one
"""

import argparse
import gc
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.downpour.algorithm import DOWNPOUR, DownpourSettings
from distbelief.forecast.agreement import Agreement, both_ways
from distbelief.job.jobfile import parse_job
from distbelief.memory import Memory
from distbelief.messages import Acknowledge, Push
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.update_rules import Adagrad
from distbelief.program.cluster_file import load_cluster
from distbelief.roles import (
    Action,
    Address,
    Event,
    Received,
    Role,
    Seconds,
    Send,
    Started,
)
from distbelief.runtime.local_model import LocalModel
from distbelief.runtime.task import (
    BuildContext,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    build_model,
)
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.options import ClusterOptions
from distbelief.simulation.placing import options_for, spread
from distbelief.simulation.scales import block_bytes_for, scales_for
from distbelief.simulation.world import Builder
from experiments.benchmarks import measurement
from sandblaster.algorithm import SANDBLASTER
from sandblaster.config import SandblasterSettings


HERE: Final = "experiments.benchmarks.simulated_task"
SPEECH: Final = (440, 2560, 2560, 2560, 2560, 8000)  # Dean et al. 2012, section 5
SPEECH_BATCH: Final = 256
BATCH: Final = 8

TASK: Final = TaskSpec(
    model=ModelSpec(factory=f"{HERE}:net", initial="seed"),
    train=DataSpec(factory=f"{HERE}:samples"),
    loss="cross_entropy",
)

JOB: Final = """
[model]
factory = "experiments.benchmarks.simulated_task:net"
arguments = { width = 440, hidden = 1024, layers = 4 }
[data.train]
factory = "experiments.benchmarks.simulated_task:samples"
arguments = { width = 440, n_samples = 8192 }
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 64
max_steps = 60
rule = { name = "adagrad", learning_rate = 0.01 }
[cluster]
replicas = 2
shards = 1
[stop]
epochs = 1000
[output]
directory = "runs/simulation"
"""
SANDBLAST: Final = JOB.replace(
    """name = "downpour"
loss = "cross_entropy"
batch_size = 64
max_steps = 60
rule = { name = "adagrad", learning_rate = 0.01 }""",
    """name = "sandblaster"
loss = "cross_entropy"
max_iterations = 5
portion = 256""",
)
JOBS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Downpour, 1 replica, 1 shard": (JOB, ("cluster.replicas=1",)),
    "Downpour, 2 replicas, 1 shard": (JOB, ()),
    "Downpour, 2 replicas, 2 shards": (JOB, ("cluster.shards=2",)),
    "2 machines of a replica, 1 shard": (
        JOB,
        ("cluster.replicas=1", "cluster.partitions=2"),
    ),
    "Sandblaster, 2 replicas, 1 shard": (SANDBLAST, ()),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parts = ("speed", "memory", "large", "truth")
    usual = ("speed", "memory", "truth")
    parser.add_argument("--only", nargs="+", choices=parts, default=usual)
    chosen = parser.parse_args(arguments).only
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for part in chosen:
        figures |= {"speed": speed, "memory": memory, "large": large, "truth": truth}[
            part
        ]()
    measurement.conclude("simulation", figures)


# --------------------------------------------------------------------------- clusters


@final
@dataclass(frozen=True, kw_only=True)
class Built:
    """A simulated cluster, and how many of its roles end by themselves."""

    cluster: SimulatedCluster
    n_ending: int

    def run(self) -> tuple[int, float]:
        """Let it come to its end; return the messages, and the processor time."""
        self.cluster.run(until=0.0)
        gc.collect()
        began = time.process_time()
        self.cluster.run_until(
            lambda: len(self.cluster.halted) >= self.n_ending,
            within=1e9,
            max_events=1 << 60,
            every=1000,
        )
        return self.cluster.counts.delivered, time.process_time() - began


def speech_layout(n_shards: int) -> Layout:
    """Return how the paper's speech net lies on so many shards."""
    pairs = list(itertools.pairwise(SPEECH))
    weights = [
        TensorSpec(name=f"{i}.weight", shape=(b, a)) for i, (a, b) in enumerate(pairs)
    ]
    biases = [
        TensorSpec(name=f"{i}.bias", shape=(b,)) for i, (_, b) in enumerate(pairs)
    ]
    return Layout.of([*weights, *biases], n_shards=n_shards)


def downpour(n_replicas: int, n_shards: int, *, steps: int, priced: bool) -> Built:
    """Return a Downpour job of the speech net, which every replica has to itself."""
    settings = DownpourSettings(
        loss="cross_entropy",
        batch_size=BATCH,
        rule=Adagrad(learning_rate=0.01),
        max_steps=steps,
    )
    roster = DOWNPOUR.roster(
        settings, n_replicas=n_replicas, n_shards=n_shards, evaluates=False
    )
    build = partial(DOWNPOUR.build, config=settings)
    names = [Address(entry.name) for entry in roster]
    return _built(names, build, n_shards=n_shards, priced=priced, n_ending=n_replicas)


def sandblaster(n_replicas: int, n_shards: int, *, batches: int) -> Built:
    """Return a Sandblaster job of the speech net that evaluates so many batches.

    Each replica has about one set of a batch; each shard has 25 machines, and sends
    its vector in one block, or messages would be 20 times as many.
    """
    n_examples = len(build_dataset(TASK.train))
    portion = max(1, n_examples // n_replicas)
    settings = SandblasterSettings(
        loss="cross_entropy",
        max_evaluations=batches,
        tolerance=0.0,
        portion=portion,
        portions_per_set=1,
    )
    roster = SANDBLASTER.roster(
        settings, n_replicas=n_replicas, n_shards=n_shards, evaluates=False
    )
    build = partial(SANDBLASTER.build, config=settings)
    names = [Address(entry.name) for entry in roster]
    built = partial(_built, names, build, n_shards=n_shards, priced=True, n_ending=1)
    return built(n_per_shard=25, in_blocks=False)


def _built(  # noqa: PLR0913 -- what two kinds of jobs differ in
    names: Sequence[Address],
    build: partial[Role],
    *,
    n_shards: int,
    priced: bool,
    n_ending: int,
    n_per_shard: int = 1,
    in_blocks: bool = True,
) -> Built:
    model = LocalModel(build_model(TASK.model))
    small, large = (
        Layout.of(model.specs(), n_shards=n_shards),
        speech_layout(n_shards),
    )
    context = partial(
        BuildContext,
        task=TASK,
        layout=small,
        n_replicas=sum(name.startswith("replica") for name in names),
        n_shards=n_shards,
        seed=0,
        initials=model.initials(),
        await_begin=False,
        n_train=len(build_dataset(TASK.train)),
    )

    def builder(name: Address) -> Builder:
        return lambda memory: build(name, context=context(memory=memory))

    flops = 6.0 * large.n_parameters * SPEECH_BATCH / model.flops(BATCH)
    others = [name for name in names if not name.startswith("shard")]
    options = replace(
        rack(names, n_per_shard=n_per_shard),
        introduce=True,
        scales=scales_for(small, large, dict.fromkeys(others, flops)),
        block_bytes=block_bytes_for(small, large) if in_blocks else None,
        codec=not priced,
        trace="order" if priced else "content",
    )
    builders = {name: builder(name) for name in names}
    cluster = SimulatedCluster(builders, seed=1, options=options)
    return Built(cluster=cluster, n_ending=n_ending)


def rack(names: Sequence[Address], *, n_per_shard: int = 1) -> ClusterOptions:
    """Return a machine for each, of a rack of 10 Gbit/s as large as need be."""
    shards = [name for name in names if name.startswith("shard")]
    others = [name for name in names if not name.startswith("shard")]
    n_of_shards = len(shards) * n_per_shard
    one = load_cluster("rack-10g")
    machines = (one.machines[0],) * (n_of_shards + len(others))
    cluster = msgspec.structs.replace(one, machines=machines)
    placement = spread(others, len(others), first=n_of_shards)
    for k, name in enumerate(shards):
        first = k * n_per_shard
        placement[name] = first if n_per_shard == 1 else (first, n_per_shard)
    return options_for(cluster, placement, threads=8)


@final
class Answering:
    """Answers every word of its peer with one; the first of the two begins."""

    def __init__(self, peer: Address, *, n_words: int, begins: bool) -> None:
        self._peer = peer
        self._n_left = n_words
        self._begins = begins

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Answer."""
        del now
        if isinstance(event, Started) and self._begins:
            return [self._word()]
        if isinstance(event, Received) and self._n_left:
            self._n_left -= 1
            return [self._word()]
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return nothing of interest."""
        return "answering", {}

    def _word(self) -> Send:
        if self._begins:
            push = Push(
                sequence=self._n_left,
                shard_incarnation=1,
                fetched_clock=0,
                n_gradients=1,
                samples=1,
            )
            return Send(receiver=self._peer, message=push)
        answer = Acknowledge(
            sequence=self._n_left, shard_incarnation=1, clock=1, staleness=0
        )
        return Send(receiver=self._peer, message=answer)


def answering(*, n_pairs: int, n_words: int, priced: bool) -> SimulatedCluster:
    """Return pairs of roles that do nothing but answer each other."""
    builders: dict[Address, Builder] = {}
    for index in range(n_pairs):
        a, b = Address(f"a-{index}"), Address(f"b-{index}")
        for name, peer in ((a, b), (b, a)):

            def build(
                _: Memory, peer: Address = peer, *, begins: bool = name == a
            ) -> Role:
                return Answering(peer, n_words=n_words, begins=begins)

            builders[name] = build
    options = replace(
        rack(list(builders)),
        introduce=True,
        codec=not priced,
        trace="order" if priced else "content",
    )
    return SimulatedCluster(builders, seed=1, options=options)


# ---------------------------------------------------------------------------- figures


def speed() -> dict[str, float]:
    figures = {}
    for key, priced in (("", False), ("_priced", True)):
        n, seconds = downpour(20, 10, steps=4, priced=priced).run()
        figures[f"messages_per_second{key}"] = n / seconds
        print(f"Downpour{key}: {n} messages in {seconds:.2f} s", flush=True)
    for key, priced in (("_driver", False), ("_passed", True)):
        cluster = answering(n_pairs=20, n_words=2000, priced=priced)
        cluster.run(until=0.0)
        began = time.process_time()
        cluster.run(max_events=1 << 60)
        seconds = time.process_time() - began
        n = cluster.counts.delivered
        figures[f"messages_per_second{key}"] = n / seconds
        print(f"answers{key}: {n} messages in {seconds:.2f} s", flush=True)
    return figures


def memory() -> dict[str, float]:
    """Take a step; what a replica takes must not depend on how many there are."""
    kept = []  # what was let go of would be used again, and not be counted
    per_replica = {}
    for n_replicas in (10, 25, 100):
        gc.collect()
        before = _resident_bytes()
        built = downpour(n_replicas, 20, steps=1, priced=True)
        built.run()
        kept.append(built)
        per_replica[n_replicas] = (_resident_bytes() - before) / n_replicas
    print(f"bytes of a replica and its pairs: {per_replica}", flush=True)
    return {
        "kilobytes_per_replica": per_replica[100] / 1000,
        "memory_growth": per_replica[100] / max(1.0, per_replica[25]),
    }


def large() -> dict[str, float]:
    built = sandblaster(2000, 8, batches=100)
    n, seconds = built.run()
    print({name: error for name, error in built.cluster.halted.items() if error})
    virtual = built.cluster.now
    print(f"Sandblaster: {n} messages, {virtual:.0f} virtual s in {seconds:.0f} s")
    return {"sandblaster_seconds": seconds}


def truth() -> dict[str, float]:
    """Run jobs in virtual time and for real."""
    rows = {}
    found = {}
    for name, (text, overrides) in JOBS.items():
        job = parse_job(text, path=Path("simulation.toml"), overrides=overrides)
        found[name] = both = both_ways(job)
        rows[name] = _row(both)
        print(name, rows[name], flush=True)
    measurement.show("simulated / real on this host", rows)
    return {
        "step_time_error": _worst(found, "step_seconds"),
        "samples_per_second_error": _worst(found, "samples_per_second"),
        "bytes_differ": float(sum(not _equal_bytes(both) for both in found.values())),
    }


def _row(both: Agreement) -> dict[str, str]:
    cells = {}
    for figure in ("step_seconds", "samples_per_second", "staleness_mean"):
        simulated, real = getattr(both.simulated, figure), getattr(both.real, figure)
        if simulated is not None and real is not None:
            cells[figure] = f"{simulated:.4g} / {real:.4g}"
    for figure in ("pushed_bytes", "fetched_bytes", "steps"):
        cells[figure] = f"{getattr(both.simulated, figure)} / " + str(
            getattr(both.real, figure)
        )
    return cells


def _worst(found: Mapping[str, Agreement], figure: str) -> float:
    errors = [both.error_of(figure) for both in found.values()]
    return max(error for error in errors if error is not None)


def _equal_bytes(both: Agreement) -> bool:
    return all(
        getattr(both.simulated, figure) == getattr(both.real, figure)
        for figure in ("pushed_bytes", "fetched_bytes")
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
