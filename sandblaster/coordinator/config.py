"""How a coordinator works, as numbers."""

from dataclasses import dataclass
from typing import final

from distbelief.roles.role import Seconds
from sandblaster.chunks import ChunkSizes


@final
@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """How a coordinator works.

    Attributes:
        cutting: How batches are cut; every replica must have the same.
        window_sets: Sets beyond the oldest unfinished one that may be dealt. It bounds
            the memory of the shards: at most half as many vectors, and the logarithm of
            the number of sets; mostly a few.
        backups: Let idle replicas compute what others are late with.
        backup_seconds_min: What a backup must promise to save. Below it lie hiccups of
            the operating system, and sets so small that all of them would be doubled.
        retry_seconds: After which an order or assignment is repeated; doubling up to:
        retry_seconds_max: At the most.
        suspect_seconds: A replica silent for so long gets no work, and its sets are
            dealt again.
        silence_seconds_max: A shard silent for so long is given up.
        starved_seconds_max: So long without any replica, and the run is given up.
        n_warm: Replicas that begin with a warm start; 0: there is none.
        await_begin: Wait for `StartTraining`.
        goal: Which method minimises what: a life that finds states of another goal on
            its disk begins anew at the parameters.
    """

    chunk_sizes: ChunkSizes
    window_chunks: int = 64
    backups: bool = True
    backup_seconds_min: Seconds = 0.05
    retry_seconds: Seconds = 0.5
    retry_seconds_max: Seconds = 4.0
    suspect_seconds: Seconds = 5.0
    silence_seconds_max: Seconds = 60.0
    starved_seconds_max: Seconds = 600.0
    n_warm: int = 0
    await_begin: bool = True
    goal: str = ""

    def __post_init__(self) -> None:
        for name in (
            "retry_seconds",
            "retry_seconds_max",
            "suspect_seconds",
            "silence_seconds_max",
            "starved_seconds_max",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")
        if self.backup_seconds_min < 0:
            raise ValueError(f"backup_seconds_min is {self.backup_seconds_min}; use 0 or more")
        if self.window_chunks < 1:
            raise ValueError(f"window_sets is {self.window_chunks}; use at least 1")
