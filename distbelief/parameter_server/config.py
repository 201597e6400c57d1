"""What a shard is to be, as numbers and rules."""

from dataclasses import dataclass
from typing import Final, final

from distbelief.parameter_server.checkpoint import ShardIdentity
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.roles.role import Seconds


ABSENCE_SECONDS_MAX: Final = 300.0
"""How long a client that is gone keeps its slots. One's own loop says nothing while it
is not in a step: it measures, or writes a file, for minutes, and is taken for gone
meanwhile. If it comes back later, a handshake lends it others, and what it had not
been told of goes there; so the bound may be short beside a run that lasts for days."""


@final
@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """What a shard is to be.

    Its memory is bounded by its values, the rule's state, `n_copies` more copies of the
    values, and two per client that pushes. The second of two copies of a shard has of
    these only the first two; and two vectors more if its leader lies on another host.
    """

    index: int
    layout: Layout
    rule: UpdateRule
    lease_seconds_max: Seconds = 10.0  # without progress
    absence_seconds_max: Seconds = ABSENCE_SECONDS_MAX  # then its slots are taken back
    n_copies: int = 2  # lent to those who fetch by blocks
    n_clients_max: int = 4096
    n_vectors_max: int = 64  # that a coordinator may make here
    name: str = ""  # of the role; by default "shard-INDEX"
    waits_for_lead: bool = False  # one of two copies: the supervisor says which leads

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"shard-{self.index}")
        if not 0 <= self.index < self.layout.n_shards:
            raise ValueError(
                f"index is {self.index}; the layout has {self.layout.n_shards} shards, "
                "counted from 0"
            )
        for name in ("lease_seconds_max", "absence_seconds_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")
        for name in ("n_copies", "n_clients_max", "n_vectors_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")

    @property
    def identity(self) -> ShardIdentity:
        """What a snapshot of this shard must agree with."""
        return ShardIdentity(index=self.index, layout=self.layout, rule=self.rule)
