"""What a coordinator orders of shards, and has replicas compute."""

from typing import Annotated

import msgspec

from distbelief.protocol.fields import AnyMessage, Count, Name, Text
from distbelief.protocol.vector_commands import Batch, Scalars, VectorName


class ShardVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one shard's published values."""

    incarnation: Count  # of the shard
    clock: Count


class GrantedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A set of portions, and the grant under which its gradient was pushed."""

    set_index: Count
    grant: Count


class Savepoint(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent cut: these vectors, as they are before the order that carries it."""

    cut: Count  # rises over all epochs
    vectors: Annotated[tuple[VectorName, ...], msgspec.Meta(max_length=4096)]


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A cut to which a shard can return. Cut 0: its values before the first order."""

    cut: Count
    whole: bool  # False: with the parameters only
    clock: Count  # of cut 0: of the values then


class _Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a coordinator orders."""


class BeginEpoch(_Task, frozen=True):
    """First order of an epoch: give up what another began; say which cuts you hold."""


class Restore(_Task, frozen=True):
    """Be as you were at this cut; if not `whole`, hold its parameters only."""

    cut: Count
    whole: bool


class Execute(_Task, frozen=True):
    """Perform these commands; say what they measure."""

    commands: Batch


class BeginEvaluation(_Task, frozen=True):
    """Begin an evaluation: perform `before`, publish vector `point`, gather sets."""

    point: VectorName
    before: Batch
    first_grant: Count  # pushes of lower grants are of other evaluations
    n_staged_max: Count  # sets that may wait to be folded


class Commit(_Task, frozen=True):
    """Count these sets, which you hold; forget what was pushed under other grants."""

    sets: Annotated[tuple[GrantedChunk, ...], msgspec.Meta(max_length=4096)]
    void: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]


class FinishEvaluation(_Task, frozen=True):
    """End the evaluation: leave the mean in vector `gradient`, perform `after`.

    No examples say that the loss is not a number: then neither is the gradient.
    """

    gradient: VectorName
    n_examples: Count
    after: Batch


class Publish(_Task, frozen=True):
    """The last order: let everybody read this vector; you are free again."""

    point: VectorName


class Checkpoint(_Task, frozen=True):
    """Publish the parameters, and save this cut, which is the present, on disk."""

    label: Name
    cut: Count


Task = (
    BeginEpoch
    | Restore
    | Execute
    | BeginEvaluation
    | Commit
    | FinishEvaluation
    | Publish
    | Checkpoint
)


class ShardCommand(AnyMessage, frozen=True):
    """Coordinator -> shard: do this, once.

    Every shard is given the same orders; each is repeated until `CommandDone` comes, and
    the next follows when every shard has answered.
    """

    epoch: Count  # of the coordinator; shards refuse an older one
    number: Count  # 1, 2, ... in each epoch
    task: Task
    mark: Savepoint | None = None
    settled: Count = 0  # cuts before this one are not needed any more
    on_disk: Count = 0  # a cut that every shard has on disk


class CommandDone(AnyMessage, frozen=True):
    """Shard -> coordinator: the last order that I performed, and what came of it."""

    epoch: Count
    number: Count
    clock: Count = 0
    scalars: Scalars = ()
    n_sets: Count = 0  # folded in this evaluation
    n_examples: Count = 0  # in those
    digest: Count = 0  # of their grants: all bits of all, by exclusive or
    cuts: Annotated[tuple[CheckpointRecord, ...], msgspec.Meta(max_length=8)] = ()
    error: Text | None = None


class ChunkTask(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's try at one set."""

    set_index: Count
    attempt: Count
    grant: Count  # 0: compute it; else push it under this number


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a try."""

    attempt: Count
    n_examples: Count
    loss: float  # sum over the examples; not finite if their gradient is not
    seconds: float  # of computing
    staged: bool  # every shard holds the gradient


class Assignment(AnyMessage, frozen=True):
    """Coordinator -> replica: all that you are to do now, in this order.

    What it does not name is to be dropped. Repeated until an `WorkReport` knows of it.
    """

    epoch: Count
    replica_incarnation: Count
    version: Count  # rises; an older one says nothing
    evaluation: Count
    versions: Annotated[tuple[ShardVersion, ...], msgspec.Meta(max_length=65536)]
    first: Count  # position of the batch in the order of the data
    n_examples: Count  # of the batch
    tasks: Annotated[tuple[ChunkTask, ...], msgspec.Meta(max_length=4096)]
    replica_life: Count = 0  # as in its `WorkReport`


class WorkReport(AnyMessage, frozen=True):
    """Replica -> coordinator: what I was told last, and how it stands with that."""

    epoch: Count
    version: Count
    evaluation: Count
    n_computed: Count  # examples, for this evaluation
    results: Annotated[tuple[ChunkResult, ...], msgspec.Meta(max_length=4096)]
    life: Count = 0  # of a replica of several machines: rises when one begins anew
