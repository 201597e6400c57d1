"""Messages of Sandblaster: the coordinator commands shards and assigns chunks to workers.

    worker           coordinator                   shards
      |                | ShardCommand: BeginEvaluation  publish this point
      |                | <-------------- CommandDone |   at this clock
      | <- Assignment  |                             |   compute these chunks
      | WorkReport --> |                             |   computed
      | <- Assignment  |                             |   push this one, under this token
      | Push ------------------------------------->  |
      | <------------------------------- PushApplied |   staged
      | WorkReport --> |                             |   every shard holds it
      |                | ShardCommand: Commit -----> |   count it
      |                | ShardCommand: FinishEvaluation  leave the mean in a vector

The coordinator never holds a parameter: it names vectors (Dean et al. 2012, section 4.2).

In rounds (`sandblaster.strads`) workers take rows of tables, and add to them, piece by piece:

    worker           shards                          | coordinator
      | TakeRows ----> |  rows after command n         |
      | <--- RowsTaken |                               |
      | AddRows -----> |  staged under the attempt     |
      | <--- RowsAdded |                               |
      | WorkReport ----------------------------------> |
      |                | <---------------- CommitRound |  command n + 1, if some task adds

Of rounds in flight several are computed at once. Each is still committed by a command of its own,
and takes rows as they are after an earlier one than that before: shards keep these rows so long.
"""

from typing import Annotated

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.fields import Amount, AnyMessage, Content, Count, Duration, Name, Text
from distbelief.protocol.vector_commands import Batch, Pull, Scalars, VectorName


class ShardVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one shard's published values."""

    incarnation: Count  # of the shard; or term, if it has two copies
    clock: Count
    # Whether later terms have it too: a backup takes over with the same values.
    outlasts: bool | msgspec.UnsetType = msgspec.UNSET  # Unset: no


class GrantedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of the batch, and the commit token under which its gradient was pushed."""

    chunk_index: Count
    commit_token: Count


class Savepoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point to return to: these vectors, as they are before the command that carries it."""

    number: Count  # rises over all series
    vectors: Annotated[tuple[VectorName, ...], msgspec.Meta(max_length=4096)]


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A savepoint to which a shard can return. Number 0: its values before the first command."""

    savepoint: Count
    whole: bool  # False: it has the parameters only
    clock: Count  # of savepoint 0: of the values then


class _Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a coordinator commands."""


class BeginSeries(_Task, frozen=True):
    """First command of a series: drop what an earlier coordinator began; list your savepoints."""


class Restore(_Task, frozen=True):
    """Return to this savepoint; if not `whole`, to its parameters only."""

    savepoint: Count
    whole: bool


class Execute(_Task, frozen=True):
    """Run these vector commands; answer what they measure."""

    commands: Batch


class BeginEvaluation(_Task, frozen=True):
    """Begin an evaluation: run `before`, publish vector `point`, then stage chunks."""

    point: VectorName
    before: Batch
    first_commit_token: Count  # pushes under lower tokens belong to other evaluations
    n_staged_max: Count  # chunks that may wait to be committed


class Commit(_Task, frozen=True):
    """Add these staged chunks to the sum; drop what was pushed under the `void` tokens."""

    chunks: Annotated[tuple[GrantedChunk, ...], msgspec.Meta(max_length=4096)]
    void: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]


class FinishEvaluation(_Task, frozen=True):
    """End the evaluation: leave the mean in vector `gradient`, run `after`.

    `n_examples` 0 means that the loss is not a number: the gradient becomes NaN too.
    """

    gradient: VectorName
    n_examples: Count
    after: Batch


class CommitRound(_Task, frozen=True):
    """Add to rows what these attempts have staged, in this order; drop what others have."""

    tokens: Annotated[tuple[Count, ...], msgspec.Meta(max_length=65536)]
    pulls: dict[Name, Pull]  # by table; others: "add"
    oldest: Count = 0  # keep rows as they are after this command and later ones; 0: none


class Publish(_Task, frozen=True):
    """Last command: publish this vector; the shard takes ordinary pushes again."""

    point: VectorName


class Checkpoint(_Task, frozen=True):
    """Publish the parameters, and save this savepoint, which is the present, to disk."""

    label: Name
    savepoint: Count


Task = (
    BeginSeries
    | Restore
    | Execute
    | BeginEvaluation
    | Commit
    | FinishEvaluation
    | CommitRound
    | Publish
    | Checkpoint
)


class ShardCommand(AnyMessage, frozen=True):
    """Coordinator -> shard: execute this, once.

    Every shard gets the same commands. Each is repeated until `CommandDone` comes; the next
    follows when every shard has answered.
    """

    series: Count  # of the coordinator; shards refuse an older one
    number: Count  # 1, 2, ... in each series
    task: Task
    savepoint: Savepoint | None = None
    settled: Count = 0  # savepoints before this one are not needed any more
    on_disk: Count = 0  # a savepoint that every shard has on disk


class CommandDone(AnyMessage, frozen=True):
    """Shard -> coordinator: the last command that I executed, and its result."""

    series: Count
    number: Count
    clock: Count = 0
    scalars: Scalars = ()
    n_chunks: Amount = 0  # committed in this evaluation
    n_examples: Amount = 0  # in those
    digest: Count = 0  # exclusive or of their tokens
    savepoints: Annotated[tuple[CheckpointRecord, ...], msgspec.Meta(max_length=8)] = ()
    error: Text | None = None
    term: Count | msgspec.UnsetType = msgspec.UNSET  # of a shard with two copies


class ChunkTask(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's attempt at one chunk."""

    chunk_index: Count
    attempt: Count
    commit_token: Count  # 0: compute it; else push it under this number
    # Of a task of a round.
    content: Content = b""  # packed
    after: Count = 0  # take rows as they are after this command of the series
    adds_after: Count = 0  # the command before that which commits the round


class ChunkResult(msgspec.Struct, frozen=True, kw_only=True):
    attempt: Count
    n_examples: Amount
    loss: float  # sum over the examples; not finite if their gradient is not
    seconds: Duration  # of computing
    staged: bool  # every shard holds the gradient
    content: Content = b""  # what a task of a round reports, packed
    adds: bool = True  # whether such a task adds to rows


class Assignment(AnyMessage, frozen=True):
    """Coordinator -> worker: all your work now, in this order.

    Drop what it does not name. Repeated until a `WorkReport` carries its version.
    """

    series: Count
    replica_incarnation: Count
    version: Count  # rises; an older one is ignored
    evaluation: Count
    versions: Annotated[tuple[ShardVersion, ...], msgspec.Meta(max_length=65536)]
    n_examples: Amount  # of the batch
    tasks: Annotated[tuple[ChunkTask, ...], msgspec.Meta(max_length=4096)]
    replica_generation: Count = 0  # as in its `WorkReport`


class WorkReport(AnyMessage, frozen=True):
    """Worker -> coordinator: the last assignment that I got, and its results so far."""

    series: Count
    version: Count
    evaluation: Count
    n_computed: Amount  # examples, for this evaluation
    results: Annotated[tuple[ChunkResult, ...], msgspec.Meta(max_length=4096)]
    generation: Count = 0  # of a model-parallel group: rises when one of its ranks restarts


# --- rows of tables ---


class TakeRows(AnyMessage, frozen=True):
    """Worker -> shard: send me rows as they are after this command, if you have them."""

    series: Count
    number: Count  # of the command
    part: Count  # of what the worker takes
    table: Name
    start: Count = 0  # rows [start, stop), or those in `rows`
    stop: Count = 0
    rows: Vector | None = None  # (n_rows,) int64
    known: Count = 0  # I have them as they are after this command; 0: I do not


class RowsTaken(AnyMessage, frozen=True):
    """Shard -> worker: these are the rows."""

    series: Count
    number: Count
    part: Count
    values: Vector  # row by row
    unchanged: bool = False  # no values: they are those that you know


class AddRows(AnyMessage, frozen=True, kw_only=True):
    """Worker -> shard: stage this for the round that the next command after this one commits."""

    series: Count
    number: Count  # of the command
    token: Count  # of the attempt
    part: Count  # of those of this token on this shard
    n_parts: Count
    table: Name
    start: Count = 0  # rows [start, stop)
    stop: Count = 0
    n_rows: Count = 0  # or so many that stand before the values
    values: Vector  # float64, row by row


class RowsAdded(AnyMessage, frozen=True):
    """Shard -> worker: it is staged."""

    series: Count
    token: Count
    part: Count
