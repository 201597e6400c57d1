"""Messages between the primary and the backup of a shard, and the supervisor.

The primary serves the clients. It acknowledges a push once the backup holds it as well
(Chilimbi et al. 2014, section 3.3, do so in two phases). A term is led by one incarnation
of one copy; it rises with every `Promote` of the shard.

    supervisor       primary                       backup
      | Promote -----> |  StartSync, StateBlock ---> |   become my copy, at this clock
      |                | <----------------- StateAck |   I hold so much of it
      | <------------------------------ BackupInSync |   I hold all of it
      |                |  ReplicatePush -----------> |   the next push, in order
      |                |  ReplicateCommand --------> |   the next command, in the same order
      |                |  ReplicateRows -----------> |   what a task of a round adds, the same
      |                | <-------------- PushApplied |   applied here too
      | <- BackupUnresponsive                        |   may I go on without it?
      | Promote -----------------------------------> |   you are the primary now
                       client <------ PrimaryChanged |   open your session here

A position counts what the backup has to repeat: pushes, commands and added rows. With pushes alone
it is the clock of the values.
"""

from typing import Annotated

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.batch import AddRows, ShardCommand
from distbelief.protocol.fields import Amount, AnyMessage, Count, Name, Text
from distbelief.protocol.push_fetch import Dealt, Form, Rates, Ticks, Words


Factor = Annotated[float, msgspec.Meta(ge=0.0)]


class Promote(AnyMessage, frozen=True):
    """Supervisor -> shard: be the primary; acknowledge pushes once `backup` holds them.

    Idempotent: repeated until the shard's counter "term" shows that it arrived.
    """

    term: Count  # the term: rises with every Promote of this shard, to either copy
    receiver_incarnation: Count  # another incarnation ignores it
    backup: Name  # the backup; "": there is none
    backup_incarnation: Count  # 0: there is none


class BackupUnresponsive(AnyMessage, frozen=True):
    """Primary -> supervisor: my backup does not answer; may I go on without it?"""

    term: Count


class BackupInSync(AnyMessage, frozen=True):
    """Backup -> supervisor: I hold all that my primary has acknowledged."""

    term: Count


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What both copies of a shard must know of one client's session."""

    name: Name
    incarnation: Count
    watermark: Count = 0
    applied: Count = 0
    samples: Amount = 0
    staleness: Count = 0
    tick: Ticks = msgspec.UNSET  # ticks that it has ended; Unset: it is not in


class Share(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much one push counts."""

    scale: Factor = 1.0  # multiplies the gradient of a push that is applied by itself
    weight: Factor | None = None  # in its round; None: it is applied by itself
    n_to_follow: Count = 0  # pushes of the round after this one
    sets: bool = False  # as in `Push`
    rates: Rates = msgspec.UNSET  # as in `Push`


WHOLE = Share()


class StartSync(AnyMessage, frozen=True):
    """Primary -> backup: become my copy; my state and every push from here follow.

    Idempotent: repeated until `StateAck` comes.
    """

    term: Count
    receiver_incarnation: Count  # another incarnation ignores it
    clock: Count
    clients: tuple[SessionRecord, ...]
    steps: Vector | None = (
        None  # per element, where clients push parts of the vector; None: none ever did
    )
    applied: tuple[Amount, ...] = ()  # positions in the values, as in `SamplesApplied`
    position: Count | msgspec.UnsetType = msgspec.UNSET  # Unset: the clock
    # Lengths of the arrays whose blocks follow those of the values, where a coordinator has sent
    # commands.
    arrays: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET


class StateBlock(AnyMessage, frozen=True):
    """Primary -> backup: one range of my values and of the optimizer's state, at that position."""

    term: Count
    position: Count = msgspec.field(name="clock")
    index: Count
    # That range of the values, then of each vector of the optimizer's state; or of another array.
    values: Vector
    n_more: Count | msgspec.UnsetType = msgspec.UNSET  # blocks of other arrays; Unset: none


class StateAck(AnyMessage, frozen=True):
    """Backup -> primary: I hold ranges [0, received), as of that position."""

    term: Count
    position: Count = msgspec.field(name="clock")
    received: Count


class ReplicatePush(AnyMessage, frozen=True):
    """Primary -> backup: the push that I apply at `position`; apply it too.

    Answered by `PushApplied` with `sequence` position + 1 and the term. The pushed values lie in
    buffer `slot` of `push_buffers_region`, or come before this as `PushBlock`s of that sequence.
    """

    term: Count
    position: Count = msgspec.field(name="clock")  # before it is applied
    client: SessionRecord  # after it is applied
    n_pushing: Amount  # clients over which buffers (of BatchNorm) are averaged
    push_buffers_region: Name  # "": it comes in blocks
    slot: Count
    holds: Vector | None = None  # of the client, as in its OpenSession
    # Numbers of the stripes that the push `touches`; None: all that the client holds. No `Vector`:
    # a message has one array at most.
    touches: tuple[Count, ...] | None = None
    share: Share = WHOLE
    # As in `Push`:
    dealt: Dealt = msgspec.UNSET
    form: Form | msgspec.UnsetType = msgspec.UNSET
    n_words: Words = msgspec.UNSET
    commit_token: Count | msgspec.UnsetType = msgspec.UNSET  # Unset: 0


class ReplicateCommand(AnyMessage, frozen=True):
    """Primary -> backup: the command that I executed at `position`; execute it too.

    Answered as `ReplicatePush`. A backup whose result has another checksum must not take over.
    """

    term: Count
    position: Count  # before it is executed
    command: ShardCommand
    checksum: Count  # of the answer, and of every vector that it computed
    not_saved: Text | None = None  # why a checkpoint is not on disk


class ReplicateRows(AnyMessage, frozen=True):
    """Primary -> backup: what a task adds, which I staged at `position`; stage it too.

    Answered as `ReplicatePush`.
    """

    term: Count
    position: Count  # before it is staged
    rows: AddRows


class PrimaryChanged(AnyMessage, frozen=True):
    """Shard -> client: I am the primary now; open your session here."""

    term: Count
