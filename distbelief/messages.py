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
"""

from typing import Annotated

import msgspec

from distbelief.commands import Batch, Scalars, VectorName
from distbelief.vectors import Vector


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Name = Annotated[str, msgspec.Meta(max_length=128)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Base of all messages: immutable, tagged by class name on the wire."""


# ------------------------------------------------------------------ membership


class Join(_Message, frozen=True):
    """Role -> supervisor: I live, and can be reached here."""

    endpoint: Name
    host: Name  # roles of equal host share memory
    pid: Count


class PeerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where one role is to be found."""

    name: Name
    incarnation: Count
    endpoint: Name
    host: Name


class Peers(_Message, frozen=True):
    """Supervisor -> role: you are a member; these are the others you may need."""

    entries: tuple[PeerEntry, ...]


class Heartbeat(_Message, frozen=True):
    """Role -> supervisor: what I am doing; sent whether or not anything changed."""

    state: Name
    counters: dict[Name, float]


class Alive(_Message, frozen=True):
    """Supervisor -> role: I live too."""


class Begin(_Message, frozen=True):
    """Supervisor -> replica: train (a warm start releases replicas one by one)."""


class Stop(_Message, frozen=True):
    """Supervisor -> role: end your work.

    A replica finishes its step and its final push, then says `Finished`; any other
    role says `Finished` when nothing of its own is under way. Then it halts.
    """

    reason: Text


class Finished(_Message, frozen=True):
    """Role -> supervisor: what I was asked to end has ended."""

    counters: dict[Name, float]


class Failed(_Message, frozen=True):
    """Role -> supervisor: I cannot go on."""

    error: Text
    culprit_is_job: bool  # the user's model, data or numbers; a restart cannot mend it


class Progress(_Message, frozen=True):
    """Replica -> supervisor: one or more steps done since the last report."""

    step: Count
    samples: Count  # since this replica's first life began
    loss: float  # mean over the samples since the last report
    seconds_computing: float  # total of this life
    seconds_waiting: float


class Evaluate(_Message, frozen=True):
    """Supervisor -> evaluator: fetch, and measure the held-out data now."""

    request: Count
    whole: bool  # all held-out samples, not the usual subset


class Measured(_Message, frozen=True):
    """Evaluator -> supervisor: held-out figures of the parameters just fetched."""

    request: Count
    loss: float
    metric: float
    n_samples: Count
    clock: float  # mean over shards of the clock at which they were read


class Save(_Message, frozen=True):
    """Supervisor -> shard: persist a snapshot under this label."""

    label: Name


class Saved(_Message, frozen=True):
    """Shard -> supervisor: the snapshot is safe, or why it is not."""

    label: Name
    clock: Count
    error: Text | None = None


# ------------------------------------------------------------ two copies of a shard


class Lead(_Message, frozen=True):
    """Supervisor -> shard: serve the clients; acknowledge what `second` holds too.

    Idempotent: repeated until the shard's counter "pairing" says that it came. It names
    both lives: a pairing is led by one life, and followed by one.
    """

    pairing: Count  # rises with every Lead of this shard, whichever copy it is sent to
    receiver_incarnation: Count  # another life of it does not obey
    second: Name  # "": nobody; acknowledge alone
    second_incarnation: Count  # 0: nobody


class Alone(_Message, frozen=True):
    """Leader -> supervisor: my second does not answer; may I go on without it?"""

    pairing: Count


class Whole(_Message, frozen=True):
    """Second -> supervisor: I hold all that my leader has acknowledged."""

    pairing: Count


class ClientRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard knows of one client, and its other copy has to know as well."""

    name: Name
    incarnation: Count
    watermark: Count
    applied: Count
    samples: Count
    staleness: Count


class Follow(_Message, frozen=True):
    """Leader -> second: become my copy; I send you my state, and every push from here.

    Idempotent: repeated until `StateCredit` comes.
    """

    pairing: Count
    receiver_incarnation: Count  # another life of it does not obey
    clock: Count
    clients: tuple[ClientRecord, ...]
    steps: Vector | None = None  # what was pushed in parts; None: nothing ever was


class StateBlock(_Message, frozen=True):
    """Leader -> second: a piece of my values and of the rule's state, at that clock."""

    pairing: Count
    clock: Count
    index: Count
    values: Vector  # that range of the values, then of each vector of the rule's state


class StateCredit(_Message, frozen=True):
    """Second -> leader: I hold pieces [0, received), brought up to that clock."""

    pairing: Count
    clock: Count
    received: Count


class Forward(_Message, frozen=True):
    """Leader -> second: the push that I apply at `clock`; apply it too.

    Answered by `Acknowledge` with `sequence` clock + 1 and the pairing as
    `shard_incarnation`. What was pushed lies in slot `slot` of `slots_region`, or comes
    before this as `PushBlock`s of sequence clock + 1.
    """

    pairing: Count
    clock: Count  # before it is applied
    client: ClientRecord  # after it is applied
    n_pushing: Count  # over how many clients buffers are averaged
    slots_region: Name  # "": blocks
    slot: Count
    holds: Vector | None = None  # of the client, as in its Hello


class Leading(_Message, frozen=True):
    """Shard -> client: I serve you from now on; say Hello."""

    shard_incarnation: Count


# ------------------------------------------------------------ parameter server


class Hello(_Message, frozen=True):
    """Client -> shard: I begin (or begin again) to talk to you.

    Idempotent: repeated until `Welcome` comes. A client that holds a part of the model
    fetches and pushes the elements of the shard's vector that it holds, by rising
    index; that part is the same as long as it lives.
    """

    layout: Name  # hash of the layout; both sides must cut tensors alike
    pushes: bool  # False: only fetches (the evaluator)
    host: Name  # where the client's memory lies; "" if it can share none
    next_sequence: Count  # of the first push this incarnation has yet to see applied
    holds: Vector | None = None  # (4 n,) stripes of the shard's vector; None: all of it


class Welcome(_Message, frozen=True):
    """Shard -> client: answer to `Hello`."""

    shard_incarnation: Count
    clock: Count
    samples: Count  # of this client, in the last of its pushes applied here
    watermark: Count  # no push of this incarnation up to it is applied from now on
    applied: Count  # how many pushes of this incarnation the values contain
    parameters_region: Name  # shared memory to copy from, "" if none
    slots_region: Name  # shared memory to push into, "" if none


class Refused(_Message, frozen=True):
    """Shard -> client: your message cannot be served, now or ever."""

    reason: Text
    for_good: bool  # asking again will not help


class Fetch(_Message, frozen=True):
    """Client -> shard: lend me a consistent version of your values, block by block."""

    request: Count  # rises with each fetch of this client, over its incarnations too
    shard_incarnation: Count
    credit: Count  # blocks that may be under way


class ParameterBlock(_Message, frozen=True):
    """Shard -> client: one block of the version leased to `request`."""

    request: Count
    shard_incarnation: Count
    block_index: Count
    clock: Count  # of that version
    values: Vector  # (block_size,)


class Credit(_Message, frozen=True):
    """Client -> shard: I hold blocks [0, received); send up to `limit` of them.

    received = number of blocks ends the lease. Also sent when blocks seem lost: the
    shard sends again from `received`.
    """

    request: Count
    shard_incarnation: Count
    received: Count
    limit: Count
    again: bool  # blocks seem lost: begin again at `received`


class PushBlock(_Message, frozen=True):
    """Client -> shard: one block of the push of this sequence."""

    sequence: Count
    shard_incarnation: Count
    block_index: Count
    values: Vector  # (block_size,)
    answer: bool = True  # by PushCredit; a few words for many blocks are enough


class PushCredit(_Message, frozen=True):
    """Shard -> client: I hold blocks [0, received) of that push."""

    sequence: Count
    shard_incarnation: Count
    received: Count


class Push(_Message, frozen=True):
    """Client -> shard: the slot of this sequence is filled: apply it.

    Idempotent: repeated until `Acknowledge` comes. Sequences rise by one; those of an
    incarnation of the client begin beyond all of the one before, so that no late answer
    fits the wrong push. Sequence s lies in slot s mod 2.
    """

    sequence: Count
    shard_incarnation: Count
    fetched_clock: Count  # this shard's clock when the gradient's parameters were read
    n_gradients: Count  # how many were summed
    samples: Count  # the client's total, these gradients included
    grant: Count = 0  # of a set of portions (then `samples` are its own); 0: apply it


class Acknowledge(_Message, frozen=True):
    """Shard -> client: every push up to `sequence` is applied, once.

    `staleness` is that of push `sequence`.
    """

    sequence: Count
    shard_incarnation: Count
    clock: Count
    staleness: Count


# ----------------------------------------------------------------- sandblaster


class ShardVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one shard's published values."""

    incarnation: Count  # of the shard
    clock: Count


class GrantedSet(msgspec.Struct, frozen=True, kw_only=True):
    """A set of portions, and the grant under which its gradient was pushed."""

    set_index: Count
    grant: Count


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent cut: these vectors, as they are before the order that carries it."""

    cut: Count  # rises over all epochs
    vectors: Annotated[tuple[VectorName, ...], msgspec.Meta(max_length=4096)]


class CutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A cut to which a shard can return. Cut 0: its values before the first order."""

    cut: Count
    whole: bool  # False: with the parameters only
    clock: Count  # of cut 0: of the values then


class _Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a coordinator orders."""


class Attach(_Task, frozen=True):
    """First order of an epoch: give up what another began; say which cuts you hold."""


class Recall(_Task, frozen=True):
    """Be as you were at this cut; if not `whole`, hold its parameters only."""

    cut: Count
    whole: bool


class Perform(_Task, frozen=True):
    """Perform these commands; say what they measure."""

    commands: Batch


class Open(_Task, frozen=True):
    """Begin an evaluation: perform `before`, publish vector `point`, gather sets."""

    point: VectorName
    before: Batch
    first_grant: Count  # pushes of lower grants are of other evaluations
    n_staged_max: Count  # sets that may wait to be folded


class Fold(_Task, frozen=True):
    """Count these sets, which you hold; forget what was pushed under other grants."""

    sets: Annotated[tuple[GrantedSet, ...], msgspec.Meta(max_length=4096)]
    void: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]


class Seal(_Task, frozen=True):
    """End the evaluation: leave the mean in vector `gradient`, perform `after`.

    No examples say that the loss is not a number: then neither is the gradient.
    """

    gradient: VectorName
    n_examples: Count
    after: Batch


class Publish(_Task, frozen=True):
    """The last order: let everybody read this vector; you are free again."""

    point: VectorName


class Keep(_Task, frozen=True):
    """Publish the parameters, and save this cut, which is the present, on disk."""

    label: Name
    cut: Count


Task = Attach | Recall | Perform | Open | Fold | Seal | Publish | Keep


class Order(_Message, frozen=True):
    """Coordinator -> shard: do this, once.

    Every shard is given the same orders; each is repeated until `Performed` comes, and
    the next follows when every shard has answered.
    """

    epoch: Count  # of the coordinator; shards refuse an older one
    number: Count  # 1, 2, ... in each epoch
    task: Task
    mark: Mark | None = None
    settled: Count = 0  # cuts before this one are not needed any more
    on_disk: Count = 0  # a cut that every shard has on disk


class Performed(_Message, frozen=True):
    """Shard -> coordinator: the last order that I performed, and what came of it."""

    epoch: Count
    number: Count
    clock: Count = 0
    scalars: Scalars = ()
    n_sets: Count = 0  # folded in this evaluation
    n_examples: Count = 0  # in those
    digest: Count = 0  # of their grants: all bits of all, by exclusive or
    cuts: Annotated[tuple[CutRecord, ...], msgspec.Meta(max_length=8)] = ()
    error: Text | None = None


class SetTask(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's try at one set."""

    set_index: Count
    attempt: Count
    grant: Count  # 0: compute it; else push it under this number


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a try."""

    attempt: Count
    n_examples: Count
    loss: float  # sum over the examples; not finite if their gradient is not
    seconds: float  # of computing
    staged: bool  # every shard holds the gradient


class Assignment(_Message, frozen=True):
    """Coordinator -> replica: all that you are to do now, in this order.

    What it does not name is to be dropped. Repeated until an `Account` knows of it.
    """

    epoch: Count
    replica_incarnation: Count
    version: Count  # rises; an older one says nothing
    evaluation: Count
    versions: Annotated[tuple[ShardVersion, ...], msgspec.Meta(max_length=65536)]
    first: Count  # position of the batch in the order of the data
    n_examples: Count  # of the batch
    tasks: Annotated[tuple[SetTask, ...], msgspec.Meta(max_length=4096)]
    replica_life: Count = 0  # as in its `Account`


class Account(_Message, frozen=True):
    """Replica -> coordinator: what I was told last, and how it stands with that."""

    epoch: Count
    version: Count
    evaluation: Count
    n_computed: Count  # examples, for this evaluation
    results: Annotated[tuple[SetResult, ...], msgspec.Meta(max_length=4096)]
    life: Count = 0  # of a replica of several machines: rises when one begins anew


# --------------------------- machines of one model replica; machine 0 is the leader


class SetOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The set of portions that a life of a replica computes, for a coordinator."""

    epoch: Count
    evaluation: Count
    versions: Annotated[tuple[ShardVersion, ...], msgspec.Meta(max_length=65536)]
    attempt: Count
    start: Count  # positions [start, stop) in the order of the data
    stop: Count
    keeps: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]  # other tries'


class Gather(_Message, frozen=True):
    """Leader -> machine: a new life of our replica begins; drop the one before.

    Idempotent: repeated until `Gathered` comes.
    """

    life: Count  # rises: the leader's incarnation, then a counter
    plan: Name  # hash of the plan; all machines must have the same
    order: SetOrder | None = None  # what the life is about, if there is a coordinator


class Gathered(_Message, frozen=True):
    """Machine -> leader: what I pushed is applied, and nothing is under way.

    With life 0, repeated until `Gather` comes: I am in no life; gather us.
    """

    life: Count
    pushes: bool  # False: I keep no parameters, and `samples` says nothing
    samples: Count  # of the pushes that the shards have from me


class Proceed(_Message, frozen=True):
    """Leader -> machine: take the steps [0, steps) of this life; no others yet.

    Answers `Gathered` of all machines, and every `Stepped`. Idempotent.
    """

    life: Count
    position: Count  # in the data, of the life's first step
    steps: Count
    is_last: bool  # there will be no more: push what has accrued, and end
    ended: bool  # I know that you have
    agreed: Count = 0  # steps that all have computed
    square: float = 0.0  # of the last of them: sum of what all have said of it


class Stepped(_Message, frozen=True):
    """Machine -> leader: so far, in this life. Idempotent."""

    life: Count
    steps: Count  # taken
    loss: float  # sum over the samples of them whose loss is finite, if I compute it
    samples: Count  # of these
    no_loss: Count  # samples whose loss is not finite
    clock: float  # mean over my shards of those of the values in use; -1: none
    ended: bool  # after the last step: all that I pushed is applied
    square: float = 0.0  # of the last step's gradient, my part; NaN: it is not finite


class PushPart(_Message, frozen=True):
    """Leader -> machine: push your part of this try's sum, under this grant.

    Idempotent: repeated until `PartStaged` tells of it. Who has no such sum has begun
    anew since it was computed, and pushes nothing.
    """

    epoch: Count
    attempt: Count
    grant: Count


class PartStaged(_Message, frozen=True):
    """Machine -> leader: of these grants all shards that I push to hold my part.

    Repeated now and then, whether or not anything changed: I live.
    """

    grants: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]  # the newest


class Transfer(_Message, frozen=True):
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


class Taken(_Message, frozen=True):
    """Machine -> machine: of your transfers, all before this one have come."""

    life: Count
    taken: Count


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
)
