"""Every message that crosses a process boundary: "sender -> receiver: purpose".

The union is closed. Headers are small and typed; arrays travel beside them, raw
(`wire`). A client is whoever fetches or pushes: a replica, the evaluator, one's own
loop behind `DownpourSGD`. Identity: the envelope names the sender and its incarnation;
what depends on the receiver's life carries `shard_incarnation` as well. With two copies
of a shard that is the pairing with which its leader began to lead.

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
"""

from typing import Annotated

import msgspec

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

    Idempotent: repeated until the shard's counter "pairing" says that it came.
    """

    pairing: Count  # rises with every Lead of this shard, whichever copy it is sent to
    second: Name  # "": nobody; acknowledge alone


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
    clock: Count
    clients: tuple[ClientRecord, ...]


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


class Leading(_Message, frozen=True):
    """Shard -> client: I serve you from now on; say Hello."""

    shard_incarnation: Count


# ------------------------------------------------------------ parameter server


class Hello(_Message, frozen=True):
    """Client -> shard: I begin (or begin again) to talk to you.

    Idempotent: repeated until `Welcome` comes.
    """

    layout: Name  # hash of the layout; both sides must cut tensors alike
    pushes: bool  # False: only fetches (the evaluator)
    host: Name  # where the client's memory lies; "" if it can share none
    next_sequence: Count  # of the first push this incarnation has yet to see applied


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


class Acknowledge(_Message, frozen=True):
    """Shard -> client: every push up to `sequence` is applied, once.

    `staleness` is that of push `sequence`.
    """

    sequence: Count
    shard_incarnation: Count
    clock: Count
    staleness: Count


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
)
