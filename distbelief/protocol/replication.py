"""Two copies of one shard: who leads, and what makes the second equal to it."""

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.fields import AnyMessage, Count, Name


class Promote(AnyMessage, frozen=True):
    """Supervisor -> shard: serve the clients; acknowledge what `second` holds too.

    Idempotent: repeated until the shard's counter "pairing" says that it came. It names
    both lives: a pairing is led by one life, and followed by one.
    """

    pairing: Count  # rises with every Lead of this shard, whichever copy it is sent to
    receiver_incarnation: Count  # another life of it does not obey
    second: Name  # "": nobody; acknowledge alone
    second_incarnation: Count  # 0: nobody


class BackupUnresponsive(AnyMessage, frozen=True):
    """Leader -> supervisor: my second does not answer; may I go on without it?"""

    pairing: Count


class BackupInSync(AnyMessage, frozen=True):
    """Second -> supervisor: I hold all that my leader has acknowledged."""

    pairing: Count


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard knows of one client, and its other copy has to know as well."""

    name: Name
    incarnation: Count
    watermark: Count
    applied: Count
    samples: Count
    staleness: Count


class StartSync(AnyMessage, frozen=True):
    """Leader -> second: become my copy; I send you my state, and every push from here.

    Idempotent: repeated until `StateAck` comes.
    """

    pairing: Count
    receiver_incarnation: Count  # another life of it does not obey
    clock: Count
    clients: tuple[SessionRecord, ...]
    steps: Vector | None = None  # what was pushed in parts; None: nothing ever was


class StateBlock(AnyMessage, frozen=True):
    """Leader -> second: a piece of my values and of the rule's state, at that clock."""

    pairing: Count
    clock: Count
    index: Count
    values: Vector  # that range of the values, then of each vector of the rule's state


class StateAck(AnyMessage, frozen=True):
    """Second -> leader: I hold pieces [0, received), brought up to that clock."""

    pairing: Count
    clock: Count
    received: Count


class ReplicatePush(AnyMessage, frozen=True):
    """Leader -> second: the push that I apply at `clock`; apply it too.

    Answered by `PushApplied` with `sequence` clock + 1 and the pairing as
    `shard_incarnation`. What was pushed lies in slot `slot` of `slots_region`, or comes
    before this as `PushBlock`s of sequence clock + 1.
    """

    pairing: Count
    clock: Count  # before it is applied
    client: SessionRecord  # after it is applied
    n_pushing: Count  # over how many clients buffers are averaged
    slots_region: Name  # "": blocks
    slot: Count
    holds: Vector | None = None  # of the client, as in its Hello
    # It holds everything, and `holds` is instead what its push `touches`: a message has
    # one array at the most.
    touches: bool = False


class PrimaryChanged(AnyMessage, frozen=True):
    """Shard -> client: I serve you from now on; say Hello."""

    shard_incarnation: Count
