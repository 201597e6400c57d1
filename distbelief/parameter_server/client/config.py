"""How a client talks to its shards, as numbers."""

from dataclasses import dataclass
from typing import final

from distbelief.roles import Seconds


@final
@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """How a client talks to its shards."""

    pushes: bool
    retry_seconds: Seconds = 0.5
    retry_seconds_max: Seconds = 4.0
    silence_seconds_max: Seconds = 60.0  # without a word
    stall_seconds_max: Seconds = 600.0  # with words, but without progress
    torn_seconds_max: Seconds = 1.0  # then a fetch from shared memory goes by blocks
    credit_blocks: int = 16  # blocks of 1 MiB under way per shard and direction

    def __post_init__(self) -> None:
        for name in (
            "retry_seconds",
            "retry_seconds_max",
            "silence_seconds_max",
            "stall_seconds_max",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")
        if not self.torn_seconds_max >= 0:
            raise ValueError(f"torn_seconds_max is {self.torn_seconds_max}; use 0 or more")
        if not 1 <= self.credit_blocks <= 64:
            raise ValueError(f"credit_blocks is {self.credit_blocks}; use 1 to 64")
