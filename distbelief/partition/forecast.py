"""What a plan is expected to do, and how much of that is proved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

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
