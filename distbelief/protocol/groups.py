"""What the machines of one replica say to each other; machine 0 is the leader."""

from typing import Annotated

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.batch import ShardVersion
from distbelief.protocol.fields import AnyMessage, Count, Name


class ChunkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The set of portions that a life of a replica computes, for a coordinator."""

    epoch: Count
    evaluation: Count
    versions: Annotated[tuple[ShardVersion, ...], msgspec.Meta(max_length=65536)]
    attempt: Count
    start: Count  # positions [start, stop) in the order of the data
    stop: Count
    keeps: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]  # other tries'


class StartEpoch(AnyMessage, frozen=True):
    """Leader -> machine: a new life of our replica begins; drop the one before.

    Idempotent: repeated until `RankReady` comes.
    """

    life: Count  # rises: the leader's incarnation, then a counter
    plan: Name  # hash of the plan; all machines must have the same
    order: ChunkOrder | None = None  # what the life is about, if there is a coordinator


class RankReady(AnyMessage, frozen=True):
    """Machine -> leader: what I pushed is applied, and nothing is under way.

    With life 0, repeated until `StartEpoch` comes: I am in no life; gather us.
    """

    life: Count
    pushes: bool  # False: I keep no parameters, and `samples` says nothing
    samples: Count  # of the pushes that the shards have from me


class GrantSteps(AnyMessage, frozen=True):
    """Leader -> machine: take the steps [0, steps) of this life; no others yet.

    Answers `RankReady` of all machines, and every `StepsDone`. Idempotent.
    """

    life: Count
    position: Count  # in the data, of the life's first step
    steps: Count
    is_last: bool  # there will be no more: push what has accrued, and end
    ended: bool  # I know that you have
    agreed: Count = 0  # steps that all have computed
    square: float = 0.0  # of the last of them: sum of what all have said of it
    sample: Count | None = None  # what the first has said of it who has seen one


class StepsDone(AnyMessage, frozen=True):
    """Machine -> leader: so far, in this life. Idempotent."""

    life: Count
    steps: Count  # taken
    loss: float  # sum over the samples of them whose loss is finite, if I compute it
    samples: Count  # of these
    no_loss: Count  # samples whose loss is not finite
    clock: float  # mean over my shards of those of the values in use; -1: none
    ended: bool  # after the last step: all that I pushed is applied
    square: float = 0.0  # of the last step's gradient, my part; NaN: it is not finite
    sample: Count | None = None  # of the data set: it is to blame for that


class PushChunk(AnyMessage, frozen=True):
    """Leader -> machine: push your part of this try's sum, under this grant.

    Idempotent: repeated until `ChunkStaged` tells of it. Who has no such sum has begun
    anew since it was computed, and pushes nothing.
    """

    epoch: Count
    attempt: Count
    grant: Count


class ChunkStaged(AnyMessage, frozen=True):
    """Machine -> leader: of these grants all shards that I push to hold my part.

    Repeated now and then, whether or not anything changed: I live.
    """

    grants: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]  # the newest


class TransferBlock(AnyMessage, frozen=True):
    """Machine -> machine: one block of one message of the plan's program.

    Sent again until `taken` says that it came.
    """

    life: Count
    sequence: Count  # of this link in this life
    taken: Count  # of the transfers the other way: all before this one have come
    step: Count
    micro_batch: Count
    way: Count  # which of the plan's messages between these two
    block_index: Count
    values: Vector


class TransferAck(AnyMessage, frozen=True):
    """Machine -> machine: of your transfers, all before this one have come."""

    life: Count
    taken: Count
