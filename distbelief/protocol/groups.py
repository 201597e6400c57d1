"""Messages between the ranks of one model-parallel replica; rank 0 is the group leader.

    rank             leader                        shards
      | <- StartGeneration                           |   a new generation begins here
      | RankReady ---> |                             |   nothing of the old one is under way
      | <-- GrantSteps |                             |   compute up to this step
      | TransferBlock, TransferAck between ranks     |   activations and gradients; on one host
      |                                              |   they lie in shared memory
      | StepsDone ---> |                             |   computed so many
      | <--- PushChunk |                             |   Sandblaster: push your part of a chunk
      | Push ------------------------------------->  |
      | ChunkStaged -> |                             |   all shards that I push to hold it

A generation ends when a rank restarts; all ranks of the group then start the next together.
"""

from typing import Annotated

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.batch import ShardVersion
from distbelief.protocol.fields import Amount, AnyMessage, Count, Name


class GroupChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The chunk of the batch that one generation of a group computes, for a coordinator."""

    series: Count
    evaluation: Count
    versions: Annotated[tuple[ShardVersion, ...], msgspec.Meta(max_length=65536)]
    attempt: Count
    start: Amount  # positions [start, stop) in the order of the data
    stop: Amount
    keeps: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]  # chunks of other attempts


class DealtRanges(msgspec.Struct, frozen=True, kw_only=True):
    """Where samples are dealt: ranges of positions, from that of the next step on.

    They come after the first `n_before` that the leader was dealt. Those that a rank has are
    ignored.
    """

    n_before: Count
    ranges: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=4096)]


class StartGeneration(AnyMessage, frozen=True):
    """Leader -> rank: a new generation of the group begins; drop the old one.

    Idempotent: repeated until `RankReady` comes.
    """

    generation: Count  # rises: the leader's incarnation, then a counter
    plan: Name  # hash of the plan; all ranks must have the same
    chunk: GroupChunk | None = None  # with a coordinator: the work of this generation


class RankReady(AnyMessage, frozen=True):
    """Rank -> leader: what I pushed is applied, and nothing is under way.

    With generation 0, repeated until `StartGeneration` comes: I am in no generation.
    """

    generation: Count
    pushes: bool  # False: I hold no parameters, and `samples` means nothing
    samples: Amount  # of the pushes that the shards have from me


class GrantSteps(AnyMessage, frozen=True):
    """Leader -> rank: compute the steps [0, steps) of this generation; no others yet.

    Answers `RankReady` of all ranks, and every `StepsDone`. Idempotent.
    """

    generation: Count
    position: Amount  # in the data, of the generation's first step
    steps: Amount
    is_last: bool  # no more will follow: push what is accumulated, and end
    ended: bool  # the leader knows that this rank has ended
    agreed: Count = 0  # steps that all ranks have computed
    square: float = 0.0  # of the last of them: squared norm of the gradient over all ranks
    sample: Count | None = None  # of the first rank that found a bad sample
    dealt: DealtRanges | msgspec.UnsetType = msgspec.UNSET  # Unset takes no bytes


class StepsDone(AnyMessage, frozen=True):
    """Rank -> leader: progress in this generation. Idempotent."""

    generation: Count
    steps: Amount  # taken
    loss: float  # sum over their samples with a finite loss, on the rank that computes it
    samples: Amount  # of these
    no_loss: Amount  # samples whose loss is not finite
    clock: float  # mean over its shards of the clocks of the values in use; -1: none
    ended: bool  # after the last step: all that it pushed is applied
    square: float = 0.0  # squared norm of its part of the last step's gradient; may be NaN
    sample: Count | None = None  # the sample of the data set that made it NaN


class PushChunk(AnyMessage, frozen=True):
    """Leader -> rank: push your part of this attempt's sum, under this commit token.

    Idempotent: repeated until `ChunkStaged` names the token. A rank without the sum has
    restarted since, and pushes nothing.
    """

    series: Count
    attempt: Count
    commit_token: Count


class ChunkStaged(AnyMessage, frozen=True):
    """Rank -> leader: under these tokens all shards that I push to hold my part.

    Repeated at an interval as a sign of life.
    """

    commit_tokens: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]  # the newest


class TransferBlock(AnyMessage, frozen=True):
    """Rank -> rank: one block of one of the plan's messages, or all of it in shared memory.

    Sent again until `taken` covers it.
    """

    generation: Count
    sequence: Count  # of this link in this generation
    taken: Count  # all transfers before this number arrived from the other side
    step: Count
    micro_batch: Count
    way: Count  # which of the plan's messages between these two ranks
    block_index: Count
    values: Vector | None  # None: the whole message lies in the sender's outbox


class TransferAck(AnyMessage, frozen=True):
    """Rank -> rank: all your transfers before this number arrived."""

    generation: Count
    taken: Count
    # Your outbox cannot be read here: send blocks. Unset takes no bytes
    by_blocks: bool | msgspec.UnsetType = msgspec.UNSET
