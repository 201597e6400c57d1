"""Settings of a shard and of its clients, and the names of its copies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.core.vectors import Vector
from distbelief.parameter_server.codecs import Codec
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy, Fetched
from distbelief.parameter_server.rules import UpdateRule
from distbelief.protocol.role import Address, Seconds
from distbelief.protocol.vector_commands import VectorName


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
    n_clients_max: int = 1 << 14  # measured with 10,000
    n_vectors_max: int = 64  # named vectors of a coordinator
    name: str = ""  # of the role; by default "shard-INDEX"
    is_replicated: bool = False  # one of two copies: the supervisor promotes one
    deals: bool = False  # data are dealt: the supervisor hears of the positions applied here
    n_samples: int = 0  # of an epoch of dealt data; 0: not known
    # Named vectors of a coordinator that never change, of `n_gradient` elements
    constants: Mapping[VectorName, Vector] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"shard-{self.index}")


@final
@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    pushes: bool
    retry_seconds: Seconds = 0.5
    retry_seconds_max: Seconds = 4.0
    silence_seconds_max: Seconds = 60.0  # without any message
    stall_seconds_max: Seconds = 600.0  # with messages but without progress
    torn_seconds_max: Seconds = 1.0  # then a fetch from shared memory goes by blocks
    credit_blocks: int = 16  # blocks of 1 MiB under way per shard and direction; at most 64
    push: Codec | None = None  # of pushes; None: as they are
    fetch: Fetched = "float32"  # as fetched from another host
    durable: bool = False  # what pushes hold back is saved before they go
    averaged: bool = False  # fetch the running averages of parameters: `ema` of the rule

    @classmethod
    def of(cls, policy: ExchangePolicy, *, retry_seconds: Seconds = 0.5) -> "ClientConfig":
        """Return the settings of a client that pushes as the policy says."""
        return cls(
            pushes=True,
            push=policy.push_codec,
            fetch=policy.fetched,
            durable=policy.durable,
            retry_seconds=retry_seconds,
        )

    @property
    def blocks_per_answer(self) -> int:
        return max(1, self.credit_blocks // 4)


# --- names of the copies: "shard-0", and "shard-0b" for the second one ---

COPIES_MAX: Final = 2

_SUFFIX: Final = "b"  # of the other copy


def copy_names(shard_index: int, n_copies: int) -> tuple[Address, ...]:
    name = f"shard-{shard_index}"
    return (Address(name), Address(f"{name}{_SUFFIX}"))[:n_copies]


def shard_of(copy: str) -> Address:
    """Return a copy's shard, the name of its first copy and snapshots; other names as they are."""
    return Address(copy.removesuffix(_SUFFIX) if copy.startswith("shard-") else copy)


def other_copy(copy: str) -> Address:
    shard = shard_of(copy)
    return Address(f"{shard}{_SUFFIX}") if copy == shard else shard
