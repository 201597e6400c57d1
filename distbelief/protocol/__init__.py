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
      | <-------------- PushCredit  |   client fills the slot it was lent
      | Push ---------------------> |   the slot of this sequence is complete: apply it
      | <------------- Acknowledge  |   applied; staleness measured; the slot is free

With two copies of a shard one leads, and serves; it acknowledges a push once the second
copy holds it as well (Chilimbi et al. 2014, section 3.3, do so in two phases):

    supervisor       leader                        second
      | Lead --------> |  Follow, StateBlock ------> |   be what I am, at this clock
      |                | <-------------- StateCredit |   so far I am
      | <------------------------------------- Whole |   in all
      |                |  Forward (PushBlock) -----> |   the next push, in order
      |                | <- Acknowledge (PushCredit) |   applied here too
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
      | <---- PushPart |                             |   push your part of it
      | Push ----------------------------------->    |
      | PartStaged --> |  (Account)                  |   all my shards hold it

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
    Account,
    Assignment,
    Attach,
    CutRecord,
    Fold,
    GrantedSet,
    Keep,
    Mark,
    Open,
    Order,
    Perform,
    Performed,
    Publish,
    Recall,
    Seal,
    SetResult,
    SetTask,
    ShardVersion,
    Task,
)
from distbelief.protocol.fields import Blob, Count, Name, Text
from distbelief.protocol.groups import (
    Gather,
    Gathered,
    PartStaged,
    Proceed,
    PushPart,
    SetOrder,
    Stepped,
    Taken,
    Transfer,
)
from distbelief.protocol.hosts import (
    Ask,
    Dismiss,
    Duties,
    Duty,
    DutyEnded,
    HostReport,
    Offer,
    Piece,
)
from distbelief.protocol.membership import (
    Alive,
    Begin,
    Evaluate,
    Failed,
    Finished,
    Heartbeat,
    Join,
    Measured,
    PeerEntry,
    Peers,
    Progress,
    Save,
    Saved,
    Stop,
)
from distbelief.protocol.push_fetch import (
    Acknowledge,
    Credit,
    Fetch,
    Hello,
    ParameterBlock,
    Push,
    PushBlock,
    PushCredit,
    Refused,
    Welcome,
)
from distbelief.protocol.replication import (
    Alone,
    ClientRecord,
    Follow,
    Forward,
    Lead,
    Leading,
    StateBlock,
    StateCredit,
    Whole,
)


__all__ = [
    "Account",
    "Acknowledge",
    "Alive",
    "Alone",
    "Ask",
    "Assignment",
    "Attach",
    "Begin",
    "Blob",
    "ClientRecord",
    "Count",
    "Credit",
    "CutRecord",
    "Dismiss",
    "Duties",
    "Duty",
    "DutyEnded",
    "Evaluate",
    "Failed",
    "Fetch",
    "Finished",
    "Fold",
    "Follow",
    "Forward",
    "Gather",
    "Gathered",
    "GrantedSet",
    "Heartbeat",
    "Hello",
    "HostReport",
    "Join",
    "Keep",
    "Lead",
    "Leading",
    "Mark",
    "Measured",
    "Message",
    "Name",
    "Offer",
    "Open",
    "Order",
    "ParameterBlock",
    "PartStaged",
    "PeerEntry",
    "Peers",
    "Perform",
    "Performed",
    "Piece",
    "Proceed",
    "Progress",
    "Publish",
    "Push",
    "PushBlock",
    "PushCredit",
    "PushPart",
    "Recall",
    "Refused",
    "Save",
    "Saved",
    "Seal",
    "SetOrder",
    "SetResult",
    "SetTask",
    "ShardVersion",
    "StateBlock",
    "StateCredit",
    "Stepped",
    "Stop",
    "Taken",
    "Task",
    "Text",
    "Transfer",
    "Welcome",
    "Whole",
]


Message = (
    Join
    | Peers
    | Heartbeat
    | Alive
    | Begin
    | Stop
    | Finished
    | Failed
    | Progress
    | Evaluate
    | Measured
    | Save
    | Saved
    | Lead
    | Alone
    | Whole
    | Follow
    | StateBlock
    | StateCredit
    | Forward
    | Leading
    | Hello
    | Welcome
    | Refused
    | Fetch
    | ParameterBlock
    | Credit
    | PushBlock
    | PushCredit
    | Push
    | Acknowledge
    | Order
    | Performed
    | Assignment
    | Account
    | Gather
    | Gathered
    | Proceed
    | Stepped
    | PushPart
    | PartStaged
    | Transfer
    | Taken
    | Offer
    | Duties
    | HostReport
    | Dismiss
    | Ask
    | Piece
)
