"""The machines of Figures 4 and 5: those of 2012, scaled down with net and batch.

What is learnt is small (`task`), and so are the machines: as much slower than those of
cluster commodity-2012 as our net and batches are smaller than the paper's net and
batches of 512. So computing and sending take each other's measure as they would there.
Time runs `haste` times as fast, for heartbeats and time-outs are not to be scaled, and
is multiplied again in what is reported: seconds are those of the large cluster.

    replica       one machine of 16 cores (the paper: 8 to 32 cores of several)
    shards        one, with the processors and cards of half as many machines as there
                  are replicas, at least two and at most 250
    evaluator     off the path: it never delays anybody
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import msgspec

from distbelief.forecast.prepare import PreparedJob
from distbelief.program.cluster import Cluster, Machine
from distbelief.program.cluster_file import load_cluster
from distbelief.roles.role import SUPERVISOR, Address
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.placement import Place, options_for


BATCH: Final = 8
PAPERS_BATCH: Final = 512
N_PARAMETERS: Final = 41_874
PAPERS_PARAMETERS: Final = 41_777_152
N_SHARDS: Final = 1
"""It stands for many machines; more would cost each push as many messages more."""

CORES: Final = 16
"""Of a machine of this cluster, by its file."""

LATENCY: Final = 1e-4
SHARD_MACHINES_MAX: Final = 250
_EVALUATOR_MACHINES: Final = 64


def shard_machines(n_replicas: int) -> int:
    """Return how many machines the shards of so many replicas have together."""
    return max(2, min(n_replicas // 2, SHARD_MACHINES_MAX))


@final
@dataclass(frozen=True, slots=True)
class Rig:
    """The scaled machines for so many replicas: a host as `run_simulated` wants it."""

    n_replicas: int
    haste: float

    @property
    def machine(self) -> Machine:
        given = load_cluster("commodity-2012").machines[0]
        size = N_PARAMETERS / PAPERS_PARAMETERS
        return msgspec.structs.replace(
            given,
            flops=given.flops * size * BATCH / PAPERS_BATCH * self.haste,
            memory_rate=given.memory_rate * size * self.haste,
            bandwidth=given.bandwidth * size * self.haste,
            overhead=given.overhead / self.haste,
            cores=CORES,
        )

    @property
    def n_machines(self) -> int:
        return self.n_replicas + shard_machines(self.n_replicas)

    def n_needed(self, staged: PreparedJob) -> int:
        """Return how many machines a job takes, as the figures count."""
        del staged
        return self.n_machines

    def builders(self, staged: PreparedJob) -> dict[Address, Builder]:
        """Return the roles, at the costs that they tell of."""
        return staged.builders()

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return what the simulation is to be told of them."""
        n = self.n_machines + _EVALUATOR_MACHINES + 1
        cluster = Cluster(name="scaled", machines=(self.machine,) * n, latency=LATENCY / self.haste)
        places = {name: self.place(name, kind) for name, kind in staged.kinds.items()}
        options = options_for(cluster, places, threads=CORES, share_memory=False)
        return replace(
            options, start=(SUPERVISOR,), faults=tuple(faults), trace="order", codec=False
        )

    def place(self, name: Address, kind: str) -> Place:
        index = int(name.partition("-")[2] or 0)
        match kind:
            case "replica":
                return index
            case "shard":
                return (self.n_replicas, shard_machines(self.n_replicas))
            case "evaluator":
                return (self.n_machines, _EVALUATOR_MACHINES)
            case _:  # supervisor, coordinator
                return self.n_machines + _EVALUATOR_MACHINES
