"""Machines: how fast a role's work goes, and whose memory it shares."""

import math
from dataclasses import dataclass

import numpy as np

from distbelief.roles import Cost, Seconds
from distbelief.simulation.desk import Handling
from distbelief.simulation.sharing import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one role runs on.

    Roles of one host share memory. They share its speed if the host has a processor
    (`ClusterOptions.processors`), and its way out if it has a card (`fabric`).
    """

    host: str = "host-0"  # "" shares nothing with anybody
    shares_memory: bool = True
    flops_per_second: float = 1e10
    bytes_per_second: float = 1e10  # to and from memory
    disk_bytes_per_second: float = 1e9
    overhead_seconds: Seconds = 20e-6  # of handing work to a lane and back
    jitter: float = 0.1  # a duration is drawn from [1, 1 + jitter] times the modelled one
    spread: float = 0.0  # and besides: standard deviation of a duration's logarithm
    threads: int = 1  # that its compute lane keeps busy
    # What each message takes of the process that receives it, one after the other.
    handling_seconds: Seconds = 0.0
    handling_bytes_per_second: float = math.inf
    # What each event, of whatever kind, takes of a core of a host that has a processor;
    # then the two above are of no account.
    handling: Handling | None = None

    def __post_init__(self) -> None:
        for name in (
            "flops_per_second",
            "bytes_per_second",
            "disk_bytes_per_second",
            "handling_bytes_per_second",
            "threads",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"Machine.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("overhead_seconds", "jitter", "spread", "handling_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"Machine.{name} is {getattr(self, name)}; it may not be below 0, "
                    "nor without end"
                )

    @property
    def handles_slowly(self) -> bool:
        """Whether messages take any time of its process."""
        return self.handling is None and (
            self.handling_seconds > 0 or self.handling_bytes_per_second < math.inf
        )

    def demand(self, cost: Cost, seconds: Seconds, threads: float) -> Demand:
        """Return what work of this cost, alone so many seconds, asks of the host."""
        in_memory = cost.n_bytes / self.bytes_per_second
        computing = cost.flops / self.flops_per_second + self.overhead_seconds
        share = in_memory / (in_memory + computing) if in_memory else 0.0
        if cost.waiting:  # spread over the time that it takes
            threads *= 1.0 - cost.waiting / (in_memory + computing + cost.waiting)
        return Demand(
            seconds=seconds,
            threads=threads,
            memory_share=share,
            bytes_per_second=self.bytes_per_second,
        )

    def seconds_of(self, cost: Cost, stream: np.random.Generator) -> Seconds:
        """Return how long work of this cost takes here, this time."""
        modelled = cost.flops / self.flops_per_second + cost.n_bytes / self.bytes_per_second
        return (modelled + self.overhead_seconds) * self._factor(stream) + cost.waiting

    def seconds_to_save(self, n_bytes: float, stream: np.random.Generator) -> Seconds:
        """Return how long writing so much to disk takes here, this time."""
        modelled = n_bytes / self.disk_bytes_per_second
        return (modelled + self.overhead_seconds) * self._factor(stream)

    def _factor(self, stream: np.random.Generator) -> float:
        factor = 1 + self.jitter * stream.random()
        if self.spread:
            factor *= math.exp(self.spread * stream.standard_normal())
        return factor
