"""Simulated clusters of real roles, as `simulated` runs them.

A net that is small and real stands for the speech net of Dean et al. 2012, in as many
blocks (`simulation.scales`); every role has a machine on a rack of 10 Gbit/s.
"""

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import msgspec

from distbelief.algorithms.downpour import DOWNPOUR
from distbelief.core.memory import Memory
from distbelief.forecast.calibration import Stopwatch
from distbelief.forecast.prepare import costed
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.optimizers import Adagrad
from distbelief.program.cluster_file import load_cluster
from distbelief.protocol import Push, PushApplied
from distbelief.roles.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Event,
    Received,
    Role,
    Seconds,
    Send,
    Started,
)
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder
from distbelief.simulation.machines import ClusterOptions, block_bytes_for, scales_for
from distbelief.simulation.placement import options_for, spread
from distbelief.task.task import (
    BuildContext,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    build_model,
)
from distbelief.worker.config import DownpourSettings
from distbelief.worker.local_executor import FlatModel
from sandblaster.algorithm import SANDBLASTER
from sandblaster.config import SandblasterSettings


HERE: Final = "experiments.benchmarks.simulated.task"
SPEECH: Final = (440, 2560, 2560, 2560, 2560, 8000)  # Dean et al. 2012, section 5
SPEECH_BATCH: Final = 256
BATCH: Final = 8

TASK: Final = TaskSpec(
    model=ModelSpec(factory=f"{HERE}:net", initial="seed"),
    train=DataSpec(factory=f"{HERE}:samples"),
    loss="cross_entropy",
)


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
    weights = [TensorSpec(name=f"{i}.weight", shape=(b, a)) for i, (a, b) in enumerate(pairs)]
    biases = [TensorSpec(name=f"{i}.bias", shape=(b,)) for i, (_, b) in enumerate(pairs)]
    return Layout.of([*weights, *biases], n_shards=n_shards)


def downpour(
    n_replicas: int, n_shards: int, *, steps: int, priced: bool, watch: Stopwatch | None = None
) -> Built:
    """Return a Downpour job of the speech net; `watch` times its roles and their work."""
    settings = DownpourSettings(
        loss="cross_entropy", batch_size=BATCH, rule=Adagrad(learning_rate=0.01), max_steps=steps
    )
    roster = DOWNPOUR.roster(settings, n_replicas=n_replicas, n_shards=n_shards, evaluates=False)
    build = partial(DOWNPOUR.build, config=settings)
    names = [Address(entry.name) for entry in roster]
    return _built(names, build, n_shards=n_shards, priced=priced, n_ending=n_replicas, watch=watch)


def sandblaster(n_replicas: int, n_shards: int, *, batches: int) -> Built:
    """Return a Sandblaster job of the speech net that evaluates so many batches.

    Each replica has at most one set of a batch; each shard has 25 machines, and sends
    its vector in one block, or messages would be 20 times as many.
    """
    n_examples = len(build_dataset(TASK.train))
    portion = -(-n_examples // n_replicas)
    settings = SandblasterSettings(
        loss="cross_entropy",
        max_evaluations=batches,
        tolerance=0.0,
        portion=portion,
        portions_per_set=1,
    )
    roster = SANDBLASTER.roster(settings, n_replicas=n_replicas, n_shards=n_shards, evaluates=False)
    build = partial(SANDBLASTER.build, config=settings)
    names = [Address(entry.name) for entry in roster]
    built = partial(_built, names, build, n_shards=n_shards, priced=True, n_ending=1)
    return built(n_per_shard=25, in_blocks=False)


def _built(
    names: Sequence[Address],
    build: partial[Role],
    *,
    n_shards: int,
    priced: bool,
    n_ending: int,
    n_per_shard: int = 1,
    in_blocks: bool = True,
    watch: Stopwatch | None = None,
) -> Built:
    model = FlatModel(build_model(TASK.model))
    small, large = (Layout.of(model.specs(), n_shards=n_shards), speech_layout(n_shards))
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
        acquainted=_acquainted,
        scales=scales_for(small, large, dict.fromkeys(others, flops)),
        block_bytes=block_bytes_for(small, large) if in_blocks else None,
        codec=not priced,
        trace="order" if priced else "content",
    )
    builders = {name: builder(name) for name in names}
    if watch is not None:
        kinds = dict.fromkeys(names, "role")
        builders = costed(builders, kinds, adapt=watch.adapt, handled=watch.handled)
    cluster = SimulatedCluster(builders, seed=1, options=options)
    return Built(cluster=cluster, n_ending=n_ending)


def _acquainted(one: Address, other: Address) -> bool:
    """Return whether these two have to do with each other: replicas have not."""
    return not (one.startswith("replica") and other.startswith("replica"))


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

    accepts = ALL_MESSAGES

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
        answer = PushApplied(sequence=self._n_left, shard_incarnation=1, clock=1, staleness=0)
        return Send(receiver=self._peer, message=answer)


def answering(*, n_pairs: int, n_words: int, priced: bool) -> SimulatedCluster:
    """Return pairs of roles that do nothing but answer each other."""
    builders: dict[Address, Builder] = {}
    for index in range(n_pairs):
        a, b = Address(f"a-{index}"), Address(f"b-{index}")
        for name, peer in ((a, b), (b, a)):

            def build(_: Memory, peer: Address = peer, *, begins: bool = name == a) -> Role:
                return Answering(peer, n_words=n_words, begins=begins)

            builders[name] = build
    options = replace(
        rack(list(builders)),
        introduce=True,
        codec=not priced,
        trace="order" if priced else "content",
    )
    return SimulatedCluster(builders, seed=1, options=options)
