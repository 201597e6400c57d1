"""Every message that crosses a process boundary, and the closed union of all of them.

One module for each pair of roles: `membership` (supervisor and roles), `push_fetch`
(client and shard), `replication` (the two copies of a shard), `batch` (coordinator, shards
and batch workers), `groups` (the ranks of one replica), `hosts` (supervisor and hosts).
Each message says "sender -> receiver: purpose". Headers are small and typed; arrays
travel beside them, raw (`codec`). Roles declare which messages they accept; the drivers
refuse all others (`distbelief.roles.role`).

The envelope names the sender and its incarnation. A message that makes sense for one
incarnation of its receiver only carries that incarnation too.
"""

from distbelief.protocol.batch import (
    Assignment,
    BeginEpoch,
    BeginEvaluation,
    Checkpoint,
    CheckpointRecord,
    ChunkResult,
    ChunkTask,
    CommandDone,
    Commit,
    Execute,
    FinishEvaluation,
    GrantedChunk,
    Publish,
    Restore,
    Savepoint,
    ShardCommand,
    ShardVersion,
    Task,
    WorkReport,
)
from distbelief.protocol.fields import Blob, Count, Name, Text
from distbelief.protocol.groups import (
    ChunkOrder,
    ChunkStaged,
    GrantSteps,
    PushChunk,
    RankReady,
    StartEpoch,
    StepsDone,
    TransferAck,
    TransferBlock,
)
from distbelief.protocol.hosts import (
    Assignments,
    FileChunk,
    FileRequest,
    HostReport,
    Offer,
    Release,
    RoleAssignment,
    RoleEnded,
)
from distbelief.protocol.membership import (
    CheckpointSaved,
    Evaluate,
    EvaluationDone,
    Failed,
    Finished,
    Heartbeat,
    HeartbeatAck,
    Join,
    PeerEntry,
    Peers,
    Progress,
    SaveCheckpoint,
    StartTraining,
    Stop,
)
from distbelief.protocol.push_fetch import (
    Fetch,
    FetchAck,
    OpenSession,
    ParameterBlock,
    Push,
    PushApplied,
    PushBlock,
    PushBlockAck,
    SessionOpened,
    SessionRefused,
)
from distbelief.protocol.replication import (
    BackupInSync,
    BackupUnresponsive,
    PrimaryChanged,
    Promote,
    ReplicatePush,
    SessionRecord,
    StartSync,
    StateAck,
    StateBlock,
)


__all__ = [
    "Assignment",
    "Assignments",
    "BackupInSync",
    "BackupUnresponsive",
    "BeginEpoch",
    "BeginEvaluation",
    "Blob",
    "Checkpoint",
    "CheckpointRecord",
    "CheckpointSaved",
    "ChunkOrder",
    "ChunkResult",
    "ChunkStaged",
    "ChunkTask",
    "CommandDone",
    "Commit",
    "Count",
    "Evaluate",
    "EvaluationDone",
    "Execute",
    "Failed",
    "Fetch",
    "FetchAck",
    "FileChunk",
    "FileRequest",
    "FinishEvaluation",
    "Finished",
    "GrantSteps",
    "GrantedChunk",
    "Heartbeat",
    "HeartbeatAck",
    "HostReport",
    "Join",
    "Message",
    "Name",
    "Offer",
    "OpenSession",
    "ParameterBlock",
    "PeerEntry",
    "Peers",
    "PrimaryChanged",
    "Progress",
    "Promote",
    "Publish",
    "Push",
    "PushApplied",
    "PushBlock",
    "PushBlockAck",
    "PushChunk",
    "RankReady",
    "Release",
    "ReplicatePush",
    "Restore",
    "RoleAssignment",
    "RoleEnded",
    "SaveCheckpoint",
    "Savepoint",
    "SessionOpened",
    "SessionRecord",
    "SessionRefused",
    "ShardCommand",
    "ShardVersion",
    "StartEpoch",
    "StartSync",
    "StartTraining",
    "StateAck",
    "StateBlock",
    "StepsDone",
    "Stop",
    "Task",
    "Text",
    "TransferAck",
    "TransferBlock",
    "WorkReport",
]


Message = (
    Join
    | Peers
    | Heartbeat
    | HeartbeatAck
    | StartTraining
    | Stop
    | Finished
    | Failed
    | Progress
    | Evaluate
    | EvaluationDone
    | SaveCheckpoint
    | CheckpointSaved
    | Promote
    | BackupUnresponsive
    | BackupInSync
    | StartSync
    | StateBlock
    | StateAck
    | ReplicatePush
    | PrimaryChanged
    | OpenSession
    | SessionOpened
    | SessionRefused
    | Fetch
    | ParameterBlock
    | FetchAck
    | PushBlock
    | PushBlockAck
    | Push
    | PushApplied
    | ShardCommand
    | CommandDone
    | Assignment
    | WorkReport
    | StartEpoch
    | RankReady
    | GrantSteps
    | StepsDone
    | PushChunk
    | ChunkStaged
    | TransferBlock
    | TransferAck
    | Offer
    | Assignments
    | HostReport
    | Release
    | FileRequest
    | FileChunk
)
