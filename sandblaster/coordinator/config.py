"""Settings of a coordinator."""

from dataclasses import dataclass
from typing import final

from distbelief.roles.role import Seconds
from sandblaster.chunks import ChunkSizes


@final
@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Settings of a coordinator."""

    chunk_sizes: ChunkSizes  # how batches are divided; every worker must have the same
    # Chunks beyond the oldest unfinished one that may be assigned. It bounds the memory of the
    # shards: half as many vectors at most; mostly a few.
    window_chunks: int = 64
    backups: bool = True  # give idle workers backup tasks
    # Least time that a backup task is expected to save. Less is noise of the operating system;
    # with tiny chunks all would be computed twice.
    backup_seconds_min: Seconds = 0.05
    retry_seconds: Seconds = 0.5  # a command or assignment is repeated; the pause doubles
    retry_seconds_max: Seconds = 4.0
    suspect_seconds: Seconds = 5.0  # a worker silent for so long loses its chunks
    silence_seconds_max: Seconds = 60.0  # a shard silent for so long ends the run
    starved_seconds_max: Seconds = 600.0  # so long without any worker ends the run
    n_warm: int = 0  # workers of a warm start; 0: there is none
    await_begin: bool = True  # wait for `StartTraining`
    goal: str = ""  # method and function; saved states of another goal are not used

    def __post_init__(self) -> None:
        silences = ("suspect_seconds", "silence_seconds_max", "starved_seconds_max")
        for name in ("retry_seconds", "retry_seconds_max", *silences):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")
        if self.backup_seconds_min < 0:
            raise ValueError(f"backup_seconds_min is {self.backup_seconds_min}; use 0 or more")
        if self.window_chunks < 1:
            raise ValueError(f"window_chunks is {self.window_chunks}; use at least 1")
