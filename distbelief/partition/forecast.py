"""What a plan is expected to do, and how much of that is proved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from distbelief.partition.playing import Way
from distbelief.program.cluster import Cluster
from distbelief.program.placement import Placement


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where the time of a step goes, averaged over the machines used; sums to 1.

    Attributes:
        compute: Of layers.
        communication: Sending or receiving states and gradients, nothing to compute.
        sync: Likewise, of parameters that several machines use.
        wait: For others.
    """

    compute: float
    communication: float
    sync: float
    wait: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The best plan found for so many machines.

    Attributes:
        n_machines: How many it may use.
        used: Those that it uses.
        placements: The plan itself, by layer.
        method: Who found it: a solver, a baseline, or the search.
        seconds: Of a step; quantiles 10 %, 50 % and 90 % over draws of the jitter.
        one_machine_seconds: Of a step on the first machine alone; the median too.
        shares: Where they go.
        memory: Bytes of each machine.
        offenders: Machines whose memory is too small.
        link_bytes: Per pair of sender and receiver, bytes of a step.
        model_seconds: Cost of the plan in the solver's model, in which phases follow
            each other; None for plans the solver does not know.
        model_bound: No plan of the candidates costs less there.
        lower_bound: No plan at all takes less: work over the speed of all machines,
            and the longest chain of layers.
        micro_batches: Into how many parts the batch is cut.
    """

    n_machines: int
    used: tuple[int, ...]
    placements: Mapping[str, Placement]
    method: str
    seconds: tuple[float, float, float]
    one_machine_seconds: float
    shares: Shares
    memory: tuple[float, ...]
    offenders: tuple[int, ...]
    link_bytes: Mapping[tuple[int, int], int]
    model_seconds: float | None
    model_bound: float
    lower_bound: float
    micro_batches: int = 1

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return self.seconds[1]

    @property
    def speed_up(self) -> float:
        """How many times faster than one machine."""
        return self.one_machine_seconds / self.median

    @property
    def efficiency(self) -> float:
        """Speed-up per machine used."""
        return self.speed_up / len(self.used)

    @property
    def gap(self) -> float | None:
        """How much more than the bound it costs in the solver's model, as a share."""
        if self.model_seconds is None or self.model_bound <= 0:
            return None
        return max(0.0, self.model_seconds / self.model_bound - 1.0)

    @property
    def fits(self) -> bool:
        """Whether every machine has memory enough."""
        return not self.offenders


def forecast_of(
    way: Way, cluster: Cluster, *, alone: float, model_bound: float, lower_bound: float
) -> Forecast:
    """Return what is to be expected of a way.

    Args:
        way: Played through.
        cluster: The machines that there may be.
        alone: Seconds of a step on the first machine alone.
        model_bound: No plan of the candidates costs less in the solver's model.
        lower_bound: No plan at all takes less.
    """
    done = way.price
    used = tuple(sorted(done.compiled.order))
    step = max(done.step_seconds, 1e-300) * len(used)
    rows = [done.seconds[machine] for machine in used]
    return Forecast(
        n_machines=len(cluster),
        used=used,
        placements=way.placements,
        method=way.method,
        seconds=way.seconds,
        one_machine_seconds=alone,
        shares=Shares(
            compute=sum(row.compute for row in rows) / step,
            communication=sum(row.communication for row in rows) / step,
            sync=sum(row.sync for row in rows) / step,
            wait=sum(row.wait for row in rows) / step,
        ),
        memory=tuple(map(float, done.memory_bytes)),
        offenders=tuple(
            index
            for index, machine in enumerate(cluster.machines)
            if done.memory_bytes[index] > machine.memory
        ),
        link_bytes=done.link_bytes,
        micro_batches=way.micro_batches,
        model_seconds=way.model_seconds,
        model_bound=model_bound,
        lower_bound=lower_bound,
    )
