"""Machines: how fast a role's work goes, and whose memory it shares."""

from dataclasses import dataclass

import numpy as np

from distbelief.roles import Cost, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one role runs on. Roles of one host share memory, not speed."""

    host: str = "host-0"  # "" shares memory with nobody
    flops_per_second: float = 1e10
    bytes_per_second: float = 1e10  # to and from memory
    disk_bytes_per_second: float = 1e9
    overhead_seconds: Seconds = 20e-6  # of handing work to a lane and back
    jitter: float = (
        0.1  # a duration is drawn from [1, 1 + jitter] times the modelled one
    )

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second", "disk_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"Machine.{name} is {getattr(self, name)}; it must be above 0"
                )
        if self.overhead_seconds < 0 or self.jitter < 0:
            raise ValueError(
                f"Machine.overhead_seconds is {self.overhead_seconds} and jitter "
                f"{self.jitter}; neither may be below 0"
            )

    def seconds_of(self, cost: Cost, stream: np.random.Generator) -> Seconds:
        """Return how long work of this cost takes here, this time."""
        modelled = (
            cost.flops / self.flops_per_second + cost.n_bytes / self.bytes_per_second
        )
        return (modelled + self.overhead_seconds) * self._factor(stream)

    def seconds_to_save(self, n_bytes: int, stream: np.random.Generator) -> Seconds:
        """Return how long writing so much to disk takes here, this time."""
        modelled = n_bytes / self.disk_bytes_per_second
        return (modelled + self.overhead_seconds) * self._factor(stream)

    def _factor(self, stream: np.random.Generator) -> float:
        return 1 + self.jitter * stream.random()
