"""The machines of Figures 4 and 5: those of 2012, scaled down with net and batch.

The net is small (`task`), and so are the machines: as much slower than those of cluster
commodity-2012 as our net and batches are smaller than the paper's net and batches of 512, so that
computing and sending keep their proportions. Time runs `time_scale` times as fast, because
heartbeats and time-outs do not scale; reported seconds are those of the large cluster.

    replica       one machine of 16 cores (the paper: 8 to 32 cores of several)
    shards        one, with the processors and cards of half as many machines as there are
                  replicas, at least two and at most 250
    evaluator     on machines of its own: it never delays anybody
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from distbelief.plans.cluster import Cluster, Machine
from distbelief.plans.cluster_file import load_cluster
from distbelief.protocol.role import ALL_MESSAGES, SUPERVISOR, Action, Address, Event, Role, Seconds
from distbelief.simulation.cluster_options import options_for, several
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.forecast.prepare import PreparedJob
from distbelief.simulation.machines import ClusterOptions
from experiments.figures.task import N_TRAIN


COORDINATOR: Final = Address("coordinator")
BATCH: Final = 8
PAPERS_BATCH: Final = 512
N_PARAMETERS: Final = 41_874
PAPERS_PARAMETERS: Final = 41_777_152
N_SHARDS: Final = 1  # it stands for many machines; more would cost each push as many messages more
CORES: Final = 16  # of a machine of this cluster, by its file
LATENCY: Final = 1e-4
SHARD_MACHINES_MAX: Final = 250
_EVALUATOR_MACHINES: Final = 64


def shard_machines(n_replicas: int) -> int:
    return max(2, min(n_replicas // 2, SHARD_MACHINES_MAX))


@dataclass(frozen=True, slots=True)
class ScaledMachines:
    """The scaled machines for so many replicas: a host as `run_simulated` wants it."""

    n_replicas: int
    time_scale: float
    evaluations: list[Seconds] | None = None  # when given: filled with when each began

    @property
    def machine(self) -> Machine:
        given = load_cluster("commodity-2012").machines[0]
        size = N_PARAMETERS / PAPERS_PARAMETERS
        return msgspec.structs.replace(
            given,
            flops=given.flops * size * BATCH / PAPERS_BATCH * self.time_scale,
            memory_rate=given.memory_rate * size * self.time_scale,
            bandwidth=given.bandwidth * size * self.time_scale,
            overhead=given.overhead / self.time_scale,
            cores=CORES,
        )

    @property
    def n_machines(self) -> int:
        return self.n_replicas + shard_machines(self.n_replicas)

    def n_needed(self, prepared: PreparedJob) -> int:
        del prepared
        return self.n_machines

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        builders = prepared.builders()
        if (begun := self.evaluations) is not None:
            build = builders[COORDINATOR]

            def note(role: Role, _event: Event, now: Seconds) -> None:
                if role.status()[1].get("evaluations", 0) > len(begun):
                    begun.append(now)

            builders[COORDINATOR] = lambda memory: Noted(build(memory), note)
        return builders

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        one = self.machine
        together = (shard_machines(self.n_replicas), _EVALUATOR_MACHINES, 1)
        machines = (one,) * self.n_replicas + tuple(several(one, n) for n in together)
        cluster = Cluster(name="scaled", machines=machines, latency=LATENCY / self.time_scale)
        places = {name: self.place(name, kind) for name, kind in prepared.kinds.items()}
        threads = {name: machines[index].cores for name, index in places.items()}
        options = options_for(cluster, places, threads=threads, share_memory=False)
        return replace(
            options, start=(SUPERVISOR,), faults=tuple(faults), trace="order", codec=False
        )

    def place(self, name: Address, kind: str) -> int:
        if kind == "replica":
            return int(name.partition("-")[2])
        # Behind the replicas; the last one holds supervisor and coordinator.
        return self.n_replicas + {"shard": 0, "evaluator": 1}.get(kind, 2)


@dataclass(frozen=True, slots=True)
class Noted:
    """A role, and what is noted of it after each event."""

    accepts = ALL_MESSAGES

    role: Role
    note: Callable[[Role, Event, Seconds], None]

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        actions = self.role.handle(event, now)
        self.note(self.role, event, now)
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.role.status()


Kind = Literal["sgd", "adagrad", "l-bfgs"]
PORTION: Final = 32

# Replicas by which Sandblaster learns, however many it is priced for: `batched`
LEARNERS: Final = 8

NAMES: Final[Mapping[Kind, str]] = {
    "sgd": "Downpour",
    "adagrad": "Downpour + Adagrad",
    "l-bfgs": "Sandblaster L-BFGS",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind  # of the method
    replicas: int  # model replicas
    candidates: tuple[float, ...]  # settings to choose from
    samples: int  # it ends after so many
    every: float  # seconds of the large cluster between evaluations
    stops: bool = True  # whether it may end once it is well above the target
    time_scale: float = 20.0  # how many times as fast time runs

    @property
    def name(self) -> str:
        alone = self.kind == "sgd" and self.replicas == 1
        return "SGD" if alone else NAMES[self.kind]

    @property
    def label(self) -> str:
        return f"{self.name} [{self.replicas}]"

    def algorithm(self, setting: float, *, squares: float) -> str:
        if self.kind == "l-bfgs":
            return (
                'name = "sandblaster"\nmethod = "l-bfgs"\n'
                f"history = {int(setting)}\n{cutting(self.replicas)}"
            )
        rule = f'name = "{self.kind}", learning_rate = {setting}'
        if self.kind == "adagrad":
            rule += f", initial_accumulator = {squares}"
        return f'name = "downpour"\nbatch_size = {BATCH}\nrule = {{ {rule} }}'


def cutting(n_replicas: int) -> str:
    """Return how a batch, all samples, is cut: so that each replica pushes twice.

    That is 32 samples at a time, at least: once for each of 2,000 replicas, and 48.
    """
    if n_replicas == LEARNERS:
        return "portion = 2048\nportions_per_set = 1"
    n_portions = max(1, N_TRAIN // (2 * PORTION * n_replicas))
    return f"portion = {PORTION}\nportions_per_set = {n_portions}"


def _downpour(
    kind: Kind, replicas: int, *candidates: float, samples: int = 34_000, stops: bool = True
) -> Entry:
    return Entry(
        kind=kind,
        replicas=replicas,
        candidates=candidates,
        samples=samples,
        every=200.0 if replicas == 1 else 600.0 / replicas,
        stops=stops,
    )


def _batched(replicas: int) -> Entry:
    return Entry(
        kind="l-bfgs",
        replicas=replicas,
        candidates=(5, 10, 20, 40),
        samples=30 * N_TRAIN,
        every=400.0 if replicas == LEARNERS else 20.0,
        time_scale=200.0,
    )


LEARNER: Final = _batched(LEARNERS)

# The paper's, but for its GPU; and Sandblaster with half as many replicas as there
FIGURE_4: Final = (
    _downpour("sgd", 1, 0.0025, 0.005, 0.01, 0.02, samples=34_000, stops=False),
    _downpour("sgd", 20, 0.00125, 0.0025, 0.005, 0.01, samples=38_000, stops=False),
    _downpour("adagrad", 20, 0.005, 0.01, 0.02, 0.04, samples=38_000, stops=False),
    _downpour("adagrad", 200, 0.0005, 0.001, 0.002, 0.004, samples=96_000, stops=False),
    _batched(2000),
    _batched(1000),
)

# Four of each, as in the paper, which does not name them all
FIGURE_5: Final = (
    _downpour("sgd", 5, 0.0025, 0.005, 0.01, 0.02),
    _downpour("sgd", 10, 0.00125, 0.0025, 0.005, 0.01),
    FIGURE_4[1],
    _downpour("sgd", 40, 0.000625, 0.00125, 0.0025, 0.005),
    _downpour("adagrad", 10, 0.005, 0.01, 0.02, 0.04),
    FIGURE_4[2],
    _downpour("adagrad", 50, 0.0025, 0.005, 0.01, 0.02),
    FIGURE_4[3],
    _batched(100),
    _batched(300),
    FIGURE_4[5],
    FIGURE_4[4],
)
