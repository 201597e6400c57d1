"""Every message that crosses a process boundary: "sender -> receiver: purpose".

The union is closed. Headers are small and typed; arrays travel beside them, raw
(`wire`). A client is whoever fetches or pushes: a replica, the evaluator, one's own
loop behind `DownpourSGD`. Identity: the envelope names the sender and its incarnation;
what depends on the receiver's life carries `shard_incarnation` as well. With two copies
of a shard that is the pairing with which its leader began to lead; what begins a
pairing names the life that it is meant for as well, by its `receiver_incarnation`.

    client                        shard
      | Hello ------------------->  |   who I am, which push comes next
      | <------------------ Welcome |   incarnation, clock, where shared memory lies
      |                             |
      | Fetch ------------------->  |   block messages only; with shared memory a
      | <---------- ParameterBlock  |   client copies the shard's published values
      | Credit ------------------>  |   more blocks, or (all) the lease may end
      |                             |
      | PushBlock ----------------> |   block messages only; with shared memory the
      | <-------------- PushBlockAck  |   client fills the slot it was lent
      | Push ---------------------> |   the slot of this sequence is complete: apply it
      | <------------- Acknowledge  |   applied; staleness measured; the slot is free

With two copies of a shard one leads, and serves; it acknowledges a push once the second
copy holds it as well (Chilimbi et al. 2014, section 3.3, do so in two phases):

    supervisor       leader                        second
      | Lead --------> |  Follow, StateBlock ------> |   be what I am, at this clock
      |                | <-------------- StateAck |   so far I am
      | <------------------------------------- Whole |   in all
      |                |  Forward (PushBlock) -----> |   the next push, in order
      |                | <- Acknowledge (PushBlockAck) |   applied here too
      | <------- Alone |                             |   it does not answer: release me
      |
      | Lead -----------------------> (the second)   |   you lead now
                       client <------------- Leading |   say Hello to me

A coordinator drives the shards by numbered orders, and tells replicas what to compute:

    replica          coordinator                   shards
      |                | Order: Open ------------->  |   publish this point
      |                | <-------------- Performed   |   at this clock
      | <- Assignment  |                             |   compute these sets
      | Account -----> |                             |   computed
      | <- Assignment  |                             |   push this one, under this grant
      | Push ----------------------------------->    |
      | <-------------------------- Acknowledge      |   staged
      | Account -----> |                             |   every shard holds it
      |                | Order: Fold ------------->  |   count it
      |                | Order: Seal ------------->  |   leave the mean in a vector
      |                | <-------------- Performed   |   so many sets, these grants

Of a replica of several machines the leader speaks with the coordinator, and the others
do what it does:

    machine          leader                        shards
      | <------ Gather |                             |   compute this set with us
      | Stepped -----> |  (Account, Assignment)      |   computed; granted
      | <---- PushChunk |                             |   push your part of it
      | Push ----------------------------------->    |
      | ChunkStaged --> |  (Account)                  |   all my shards hold it

A machine that joins a job is a host: it runs what the supervisor wants to run there:

    host                          supervisor
      | Offer ------------------->  |   so many cores; use them
      | <------------------ Duties  |   of this run
      | Ask, <-------------- Piece  |   all that its roles are told
      | HostReport -------------->  |   ready; twice a second, from now on
      | <------------------ Duties  |   run these roles, and no others
      | HostReport -------------->  |   that one has ended
      | <----------------- Dismiss  |   that is all
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
