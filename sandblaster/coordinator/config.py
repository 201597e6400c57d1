"""Settings of a coordinator."""

from dataclasses import dataclass
from typing import final

from distbelief.roles.role import Seconds
from sandblaster.chunks import ChunkSizes


@final
@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Settings of a coordinator.

    Attributes:
        chunk_sizes: How batches are divided; every worker must have the same.
        window_chunks: Chunks beyond the oldest unfinished one that may be assigned. It bounds
            the memory of the shards: half as many vectors at most; mostly a few.
        backups: Whether idle workers get backup tasks.
        backup_seconds_min: Least time that a backup task is expected to save.
        retry_seconds: Seconds after which a command or assignment is repeated; it doubles.
        retry_seconds_max: Upper bound of that.
        suspect_seconds: A worker silent for so long is removed; its chunks are assigned again.
        silence_seconds_max: A shard silent for so long ends the run.
        starved_seconds_max: So long without any worker ends the run.
        n_warm: Workers of a warm start; 0: there is none.
        await_begin: Wait for `StartTraining`.
        goal: Method and function; saved states of another goal are not used.
    """

    chunk_sizes: ChunkSizes
    window_chunks: int = 64
    backups: bool = True
    # Less is noise of the operating system; with tiny chunks all would be computed twice.
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
            raise ValueError(f"window_chunks is {self.window_chunks}; use at least 1")
