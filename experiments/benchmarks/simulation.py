"""How fast and how true the simulated cluster is: its speed, its memory, its forecasts.

    python experiments/benchmarks/simulation.py [--only speed memory large truth]
        [--jobs alone two shards paused slowed split sandblaster] [--small]
                                of `truth`: each some two minutes

Not in `make bench`: the jobs of `truth` alone take a quarter of an hour.

One thread, processor time. Roles are those of a job as it is run, on a rack of
10 Gbit/s with cards that all flows share; the net they train is small and stands for
the paper's speech net of 42 million parameters, in as many blocks (`scales`).

    messages_per_second         Downpour, 20 replicas, 10 shards, every message encoded
                                and decoded, contents in the digest
    messages_per_second_priced  the same, messages passed on, only their order noted
    messages_per_second_driver  the same as the first with two roles that only answer
                                each other: what the driver takes
    messages_per_second_passed  likewise as the second
    driver_over_roles           time of the driver over that of the roles and their work, in
                                the first
    kilobytes_per_replica       priced; from 100 to 400 replicas on 20 shards, what each
                                shard keeps for it included
    memory_growth               that over the same from 25 to 100: 1 is linear in roles
    sandblaster_seconds         only if asked for (`large`): 2000 replicas, 100
                                batches, 8 shards
    step_time_error             simulated against real on this host, the worst of the
    samples_per_second_error    jobs below; a share
    staleness_error             likewise; of jobs that push to a clock
    bytes_differ                jobs whose bytes were not the same to the last one
    others                      cores taken by what is not of this benchmark; the worst
"""

import argparse
import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch

from distbelief.algorithms.downpour import DOWNPOUR
from distbelief.config.cluster_file import load_cluster
from distbelief.core.memory import Memory
from distbelief.forecast.calibration import Stopwatch
from distbelief.forecast.prepare import costed
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.optimizers import Adagrad
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
from distbelief.simulation.placement import options_for, several
from distbelief.task.initializers import recorded_initials
from distbelief.task.task import (
    BuildContext,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    build_model,
)
from distbelief.worker import build as wb
from distbelief.worker.config import DownpourSettings
from distbelief.worker.local_executor import FlatModel
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.simulated.truth import CASES, truth
from sandblaster.algorithm import SANDBLASTER
from sandblaster.chunks import COORDINATOR
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
    roster = wb.roster(n_replicas=n_replicas, n_shards=n_shards, evaluates=False)
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
    roster = wb.roster(
        n_replicas=n_replicas, n_shards=n_shards, evaluates=False, coordinator=COORDINATOR
    )
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
        initials=recorded_initials(lambda: build_model(TASK.model), list(model.named_tensors())),
        await_begin=False,
        n_train=len(build_dataset(TASK.train)),
    )

    def builder(name: Address) -> Builder:
        return lambda memory: build(name, context=context(memory=memory))

    n_parameters = sum(spec.n_elements for spec in large.tensors if spec.kind == "parameter")
    flops = 6.0 * n_parameters * SPEECH_BATCH / model.flops(BATCH)
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
    """Return whether these two exchange messages: replicas do not."""
    return not (one.startswith("replica") and other.startswith("replica"))


def rack(names: Sequence[Address], *, n_per_shard: int = 1) -> ClusterOptions:
    shards = [name for name in names if name.startswith("shard")]
    others = [name for name in names if not name.startswith("shard")]
    one = load_cluster("rack-10g")
    machine = one.machines[0]
    of_shard, threads = machine, dict.fromkeys(names, 8)
    if n_per_shard > 1:
        of_shard = several(machine, n_per_shard)
        threads |= dict.fromkeys(shards, of_shard.cores)
    machines = (of_shard,) * len(shards) + (machine,) * len(others)
    cluster = msgspec.structs.replace(one, machines=machines)
    placement = {name: index for index, name in enumerate([*shards, *others])}
    return options_for(cluster, placement, threads=threads)


class Answering:
    """Answers every word of its peer with one; the first of the two begins."""

    accepts = ALL_MESSAGES

    def __init__(self, peer: Address, *, n_words: int, begins: bool) -> None:
        self._peer = peer
        self._n_left = n_words
        self._begins = begins

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        del now
        if isinstance(event, Started) and self._begins:
            return [self._word()]
        if isinstance(event, Received) and self._n_left:
            self._n_left -= 1
            return [self._word()]
        return ()

    def status(self) -> tuple[str, Mapping[str, float]]:
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


N_REPLICAS: Final = (25, 100, 400)
N_REPLICAS_SMALL: Final = (1, 2, 3)  # of which memory is looked at

SMALL: Final = {"jobs": ("alone",)}  # and each part in small


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parts = ("speed", "memory", "large", "truth")
    usual = ("speed", "memory", "truth")
    parser.add_argument("--only", nargs="+", choices=parts, default=usual)
    parser.add_argument("--jobs", nargs="+", choices=CASES, default=tuple(CASES))
    options = measurement.options_of(parser, arguments, small=SMALL)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    run: dict[str, Callable[[], dict[str, float]]] = {
        "speed": partial(speed, small=options.small),
        "memory": partial(memory, small=options.small),
        "large": partial(large, small=options.small),
        "truth": partial(truth, options.jobs, small=options.small),
    }
    for part in options.only:
        figures |= run[part]()
    measurement.conclude("simulation", figures)


# ---------------------------------------------------------------------------- figures


def speed(*, small: bool) -> dict[str, float]:
    figures = {}
    n_replicas, n_shards, n_words = (2, 1, 20) if small else (20, 10, 2000)
    for key, priced in (("", False), ("_priced", True)):
        built = downpour(n_replicas, n_shards, steps=4, priced=priced)
        n, seconds = built.run()
        figures[f"messages_per_second{key}"] = n / seconds
        print(f"Downpour{key}: {n} messages in {seconds:.2f} s", flush=True)
    watch = Stopwatch()
    built = downpour(n_replicas, n_shards, steps=4, priced=False, watch=watch)
    built.cluster.run(until=0.0)
    began = _seconds_of(watch)
    _, seconds = built.run()
    of_roles = _seconds_of(watch) - began
    figures["driver_over_roles"] = (seconds - of_roles) / of_roles
    for key, priced in (("_driver", False), ("_passed", True)):
        cluster = answering(n_pairs=20, n_words=n_words, priced=priced)
        cluster.run(until=0.0)
        began = time.process_time()
        cluster.run(max_events=1 << 60)
        seconds = time.process_time() - began
        n = cluster.counts.delivered
        figures[f"messages_per_second{key}"] = n / seconds
        print(f"answers{key}: {n} messages in {seconds:.2f} s", flush=True)
    return figures


def _seconds_of(watch: Stopwatch) -> float:
    pieces = (piece for every in watch.work.values() for piece in every)
    return watch.handling + sum(seconds for seconds, _ in pieces)


def memory(*, small: bool) -> dict[str, float]:
    """Take a step; what a replica takes must not depend on how many there are.

    Each number of them in a process of its own: what one lets go of the next would use
    again, and it would not be counted. What the first few take once is taken off.
    """
    context = multiprocessing.get_context("spawn")
    taken = {}
    few, some, many = N_REPLICAS_SMALL if small else N_REPLICAS
    for n_replicas in (few, some, many):
        with context.Pool(1) as pool:
            taken[n_replicas] = pool.apply(_bytes_of, (n_replicas,))
    per_replica = (taken[many] - taken[some]) / (many - some)
    at_first = (taken[some] - taken[few]) / (some - few)
    print(f"bytes of so many replicas and their pairs: {taken}", flush=True)
    return {
        "kilobytes_per_replica": per_replica / 1000,
        "memory_growth": per_replica / max(1.0, at_first),
    }


def large(*, small: bool) -> dict[str, float]:
    built = sandblaster(*((4, 2) if small else (2000, 8)), batches=2 if small else 100)
    n, seconds = built.run()
    print({name: error for name, error in built.cluster.halted.items() if error})
    virtual = built.cluster.now
    print(f"Sandblaster: {n} messages, {virtual:.0f} virtual s in {seconds:.0f} s")
    return {"sandblaster_seconds": seconds}


def _bytes_of(n_replicas: int) -> int:
    torch.set_num_threads(1)
    downpour(1, 20, steps=1, priced=True).run()  # modules, buffers, data
    gc.collect()
    before = _resident_bytes()
    built = downpour(n_replicas, 20, steps=1, priced=True)
    built.run()
    return _resident_bytes() - before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
