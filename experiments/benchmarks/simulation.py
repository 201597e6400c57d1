"""How fast and how true the simulated cluster is: its speed, its forecasts.

    python experiments/benchmarks/simulation.py [--only speed large truth]
        [--jobs alone two shards paused slowed split sandblaster] [--small]
                                of `truth`: each some two minutes

Not in `make bench`: the jobs of `truth` alone take a quarter of an hour. One thread, processor
time. Roles are those of a job as it is run, on a rack of 10 Gbit/s with cards that all flows share;
their small net stands for the paper's speech net of 42 million parameters, in as many blocks.

    messages_per_second         Downpour, 20 replicas, 10 shards, every message encoded
                                and decoded, contents in the digest
    messages_per_second_priced  the same, messages passed on, only their order noted
    messages_per_second_roles   those over the time of the roles and their work in such a run: with
                                a driver that takes no time it would be so fast
    driver_over_roles           time of the driver over that of the roles and their work, in
                                the first
    METHOD_microseconds_PART    of a priced message, by whose time it is: driver, coordinator,
                                replica and shard (their events and small work), gradients
    sandblaster_seconds         only if asked for (`large`): 2000 replicas, 100 batches, 8 shards
    step_time_error             simulated against real on this host, the worst of the
    samples_per_second_error    jobs below; a share
    staleness_error             likewise; of jobs that push to a clock
    bytes_differ                jobs whose bytes were not the same to the last one
    others                      cores taken by what is not of this benchmark; the worst
"""

import argparse
import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import msgspec
import torch

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.core.vectors import BLOCK_BYTES
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import Adagrad
from distbelief.plans.cluster_file import load_cluster
from distbelief.protocol.role import Action, Address, Compute, Event, Role, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.cluster_options import options_for, several
from distbelief.simulation.driver import Builder
from distbelief.simulation.machines import ClusterOptions, CostScale
from distbelief.task.initializers import recorded_initials
from distbelief.task.task import (
    BuildContext,
    DataSpec,
    ModelSpec,
    RosterEntry,
    TaskSpec,
    build_dataset,
    build_model,
)
from distbelief.worker import build as wb
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.steps import STEP
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.simulated.truth import CASES, truth
from sandblaster.algorithm import SANDBLASTER
from sandblaster.chunks import COORDINATOR
from sandblaster.settings import SandblasterSettings


HERE: Final = "experiments.benchmarks.simulated.task"
SPEECH: Final = (440, 2560, 2560, 2560, 2560, 8000)  # Dean et al. 2012, section 5
SPEECH_BATCH: Final = 256
BATCH: Final = 8
Result = TypeVar("Result")
Spent = defaultdict[str, Seconds]  # by replica, shard, coordinator and gradients

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
    n_replicas: int, n_shards: int, *, steps: int, priced: bool, spent: Spent | None = None
) -> Built:
    """Return a Downpour job of the speech net; what its roles and their work take is `spent`."""
    settings = DownpourSettings(
        loss="cross_entropy", batch_size=BATCH, rule=Adagrad(learning_rate=0.01), max_steps=steps
    )
    roster = wb.roster(n_replicas=n_replicas, n_shards=n_shards, evaluates=False)
    build = partial(DOWNPOUR.build, config=settings)
    return _built(roster, build, priced=priced, n_ending=n_replicas, spent=spent)


def sandblaster(
    n_replicas: int, n_shards: int, *, batches: int, spent: Spent | None = None
) -> Built:
    """Return a Sandblaster job of the speech net that evaluates so many batches.

    Each replica has at most one set of a batch; each shard has 25 machines, and sends
    its vector in one block, or messages would be 20 times as many.
    """
    settings = SandblasterSettings(
        loss="cross_entropy",
        max_evaluations=batches,
        tolerance=0.0,
        portion=-(-len(build_dataset(TASK.train)) // n_replicas),
        portions_per_set=1,
    )
    roster = wb.roster(
        n_replicas=n_replicas, n_shards=n_shards, evaluates=False, coordinator=COORDINATOR
    )
    build = partial(SANDBLASTER.build, config=settings)
    return _built(
        roster, build, priced=True, n_ending=1, n_per_shard=25, in_blocks=False, spent=spent
    )


def _built(
    roster: Sequence[RosterEntry],
    build: partial[Role],
    *,
    priced: bool,
    n_ending: int,
    n_per_shard: int = 1,
    in_blocks: bool = True,
    spent: Spent | None = None,
) -> Built:
    names = [Address(entry.name) for entry in roster]
    n_shards = sum(name.startswith("shard") for name in names)
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
        def built(memory: Memory) -> Role:
            role = build(name, context=context(memory=memory))
            return role if spent is None else Timed(role, name.split("-")[0], spent)

        return built

    n_parameters = sum(spec.n_elements for spec in large.tensors if spec.kind == "parameter")
    flops = 6.0 * n_parameters * SPEECH_BATCH / model.flops(BATCH)
    options = replace(
        rack(names, n_per_shard=n_per_shard),
        introduce=True,
        acquainted=lambda *pair: not all(name.startswith("replica") for name in pair),
        scales=_scales(small, large, names, flops=flops),
        codec=not priced,
        trace="order" if priced else "content",
    )
    vectors.BLOCK_BYTES = BLOCK_BYTES
    if in_blocks:
        vectors.BLOCK_BYTES = _block_bytes(small, large)
    builders = {name: builder(name) for name in names}
    cluster = SimulatedCluster(builders, seed=1, options=options)
    return Built(cluster=cluster, n_ending=n_ending)


def _scales(
    small: Layout, large: Layout, names: Sequence[Address], *, flops: float
) -> dict[Address, CostScale]:
    """Return scales by which roles with a small net have the costs of a large one."""
    sizes = [(small.shard_size(k), large.shard_size(k)) for k in range(small.n_shards)]
    whole = sum(n for _, n in sizes) / sum(m for m, _ in sizes)
    scales = dict.fromkeys(names, CostScale(flops=flops, n_bytes=whole, frame_bytes=whole))
    for k, (m, n) in enumerate(sizes):
        ratio = n / max(1, m)  # a shard of a small net may be empty
        shard = CostScale(flops=ratio, n_bytes=ratio, frame_bytes=ratio)
        scales[Address(f"shard-{k}")] = shard
    return scales


def _block_bytes(small: Layout, large: Layout) -> int:
    """Return the block size with which small vectors have as many blocks as large ones.

    With the usual size, each block would stand for far more than 1 MiB of the large vector:
    clients would consider it lost and request it again.
    """
    itemsize = small.dtype.itemsize
    pairs = [(small.shard_size(k), large.shard_size(k)) for k in range(small.n_shards)]
    return max(-(-m // vectors.n_blocks(n, itemsize=itemsize)) for m, n in pairs) * itemsize


def rack(names: Sequence[Address], *, n_per_shard: int = 1) -> ClusterOptions:
    shards = [name for name in names if name.startswith("shard")]
    others = [name for name in names if not name.startswith("shard")]
    one = load_cluster("rack-10g")
    machine, threads = one.machines[0], dict.fromkeys(names, 8)
    of_shard = several(machine, n_per_shard)
    if n_per_shard > 1:
        threads |= dict.fromkeys(shards, of_shard.cores)
    machines = (of_shard,) * len(shards) + (machine,) * len(others)
    cluster = msgspec.structs.replace(one, machines=machines)
    placement = {name: index for index, name in enumerate([*shards, *others])}
    options = options_for(cluster, placement, threads=threads)
    # A role handles its messages in one thread; a shard of several machines has one on each.
    rate = n_per_shard * options.machine_of(names[0]).handling_bytes_per_second
    fast = {
        name: replace(options.machines[name], handling_bytes_per_second=rate) for name in shards
    }
    return replace(options, machines={**options.machines, **fast})


@dataclass(frozen=True, slots=True)
class Timed:
    """A role that notes the processor time of its events and its work, by its kind."""

    role: Role
    kind: str
    spent: Spent

    @property
    def accepts(self) -> frozenset[type]:
        return self.role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        actions = self._time(self.kind, partial(self.role.handle, event, now))
        return [
            msgspec.structs.replace(a, work=partial(self._time, self._kind_of(a), a.work))
            if isinstance(a, Compute)
            else a
            for a in actions
        ]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.role.status()

    def _kind_of(self, action: Compute) -> str:
        return "gradients" if action.name == STEP else self.kind

    def _time(self, kind: str, call: Callable[[], Result]) -> Result:
        begun = time.thread_time()
        try:
            return call()
        finally:
            self.spent[kind] += time.thread_time() - begun


PARTS: Final = ("speed", "large", "truth")
SMALL: Final = {"jobs": ("alone",)}  # and each part in small


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=("speed", "truth"))
    parser.add_argument("--jobs", nargs="+", choices=CASES, default=tuple(CASES))
    options = measurement.options_of(parser, arguments, small=SMALL)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    parts: dict[str, Callable[..., dict[str, float]]] = {"speed": speed, "large": large}
    parts["truth"] = partial(truth, options.jobs)
    for part in options.only:
        vectors.BLOCK_BYTES = BLOCK_BYTES
        figures |= parts[part](small=options.small)
    measurement.conclude("simulation", figures)


# ---------------------------------------------------------------------------- figures


def speed(*, small: bool) -> dict[str, float]:
    figures = {}
    n_replicas, n_shards = (2, 1) if small else (20, 10)
    for key, priced in (("", False), ("_priced", True)):
        built = downpour(n_replicas, n_shards, steps=4, priced=priced)
        n, seconds = built.run()
        figures[f"messages_per_second{key}"] = n / seconds
        print(f"Downpour{key}: {n} messages in {seconds:.2f} s", flush=True)
    spent: Spent = defaultdict(float)
    for priced in (False, True):
        built = downpour(n_replicas, n_shards, steps=4, priced=priced, spent=spent)
        n, seconds, roles = _timed(built, spent)
        if not priced:
            figures["driver_over_roles"] = (seconds - roles) / roles
            continue
        figures["messages_per_second_roles"] = n / roles
        figures |= _profile("downpour", {"driver": seconds - roles, **spent}, n)
    shape = (4, 2) if small else (200, 8)
    n, seconds, roles = _timed(sandblaster(*shape, batches=5, spent=spent), spent)
    return figures | _profile("sandblaster", {"driver": seconds - roles, **spent}, n)


def _timed(built: Built, spent: Spent) -> tuple[int, Seconds, Seconds]:
    """Return the messages, the processor time, and that of the roles and their work."""
    built.cluster.run(until=0.0)
    spent.clear()
    n, seconds = built.run()
    return n, seconds, sum(spent.values())


def _profile(method: str, seconds: Mapping[str, Seconds], n_messages: int) -> dict[str, float]:
    """Print and return what a message takes of each part."""
    each = {part: 1e6 * one / n_messages for part, one in seconds.items()}
    whole = sum(each.values())
    shown = [f"{part} {one:.1f} ({one / whole:.0%})" for part, one in each.items()]
    print(f"{method}, microseconds per message: {', '.join(shown)}, all {whole:.1f}", flush=True)
    return {f"{method}_microseconds_{part}": one for part, one in each.items()}


def large(*, small: bool) -> dict[str, float]:
    built = sandblaster(*((4, 2) if small else (2000, 8)), batches=2 if small else 100)
    n, seconds = built.run()
    print({name: error for name, error in built.cluster.halted.items() if error})
    virtual = built.cluster.now
    print(f"Sandblaster: {n} messages, {virtual:.0f} virtual s in {seconds:.0f} s")
    return {"sandblaster_seconds": seconds}


if __name__ == "__main__":
    main()
