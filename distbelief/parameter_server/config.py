"""Settings of a shard."""

from dataclasses import dataclass
from typing import Final, final

from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.roles.role import Seconds


ABSENCE_SECONDS_MAX: Final = 300.0
"""How long an absent client keeps its push buffers. A user's own training loop is silent for
minutes while it evaluates or writes a file. If it returns later, a new session gives it others."""


@final
@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """Settings of a shard.

    Its memory: the values, the rule's state, `n_copies` pinned versions, and two push buffers per
    client that pushes. A backup has only the first two, and two push buffers if its primary is on
    another host.
    """

    index: int
    layout: Layout
    rule: UpdateRule
    policy: ExchangePolicy = DOWNPOUR
    pin_seconds_max: Seconds = 10.0  # without progress of the reader
    absence_seconds_max: Seconds = ABSENCE_SECONDS_MAX  # of a client
    # After a restart or a takeover, for clients to come back: until then the floor does not rise.
    return_seconds: Seconds = 2.0
    n_copies: int = 2  # pinned versions, for fetches by blocks
    n_clients_max: int = 4096
    n_vectors_max: int = 64  # named vectors of a coordinator
    name: str = ""  # of the role; by default "shard-INDEX"
    is_replicated: bool = False  # one of two copies: the supervisor promotes one

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"shard-{self.index}")
        if not 0 <= self.index < self.layout.n_shards:
            raise ValueError(
                f"index is {self.index}; the layout has {self.layout.n_shards} shards, "
                "counted from 0"
            )
        times = "pin_seconds_max", "absence_seconds_max", "return_seconds"
        for name in (*times, "n_copies", "n_clients_max", "n_vectors_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")
