"""Messages between a client and a shard of the parameter server.

A client fetches and pushes: a replica, the evaluator, or `DownpourSGD`.

    client                        shard
      | OpenSession ------------->  |   who I am, which push comes next
      | <------------ SessionOpened |   incarnation, clock, where shared memory lies
      | Fetch ------------------->  |   by blocks only; in shared memory a client copies
      | <----------- ParameterBlock |   the published values itself
      | FetchAck ---------------->  |   more blocks, or (all) the version may go
      | PushBlock --------------->  |   by blocks only; in shared memory the client
      | <------------- PushBlockAck |   fills the push buffer that it was lent
      | Push -------------------->  |   the buffer of this sequence is complete: apply it
      | <-------------- PushApplied |   applied; staleness measured; the buffer is free
      | <-------------------- Floor |   where workers wait for each other: one may go on

A tick of a worker is one exchange, from a fetch to a push. Where shards count ticks, a client
enters before its first one and leaves when it has nothing to do: others wait for those that are in.
"""

from typing import Annotated, Literal

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.fields import Amount, AnyMessage, Count, Name, Text


Payload = Literal["dense", "bfloat16", "changed", "moved", "averaged"] | msgspec.UnsetType
"""What fetched values are. "dense": a number of the layout's type for each element that the client
holds. "bfloat16": words of 16 bits, one for each parameter, and two for each buffer, which stays
float32. "changed": words of 32 bits, the elements that have changed since the client's last fetch,
by rising index, and then the bits of their values. "moved": the words of each move since then, and
the bits of the buffers. The shard sends all instead if that is less, or if it does not know.
"averaged": dense, but of parameters the running average that a rule with `ema` keeps.

Unset means dense, and takes no bytes. What lies in shared memory is dense.
"""

Form = Literal["bfloat16", "int8", "int4", "top-k", "top-k-2", "threshold", "factors"]
"""How a codec has written the parameters of a push, in words of 32 bits. The bits of the buffers,
which stay float32, follow. Unset: a push is dense, as above.
"""

Words = Count | msgspec.UnsetType
"""How many words an encoded push or fetch has; Unset: it is dense."""

Ticks = Amount | msgspec.UnsetType
"""A number that is sent only where shards count ticks; Unset takes no bytes."""


Rates = (
    Annotated[
        tuple[Annotated[float, msgspec.Meta(ge=0.0, le=1e18)], ...],
        msgspec.Meta(min_length=1, max_length=1 << 16),
    ]
    | msgspec.UnsetType
)
"""Learning rates of one push in place of the rule's: one, or one for each parameter in the order of
the layout. Unset: the rule's; it takes no bytes.
"""


Dealt = tuple[Amount, Amount] | msgspec.UnsetType
"""Positions that are sent only where data are dealt; Unset takes no bytes."""


Attempt = Count | msgspec.UnsetType
"""Which attempt at a push this is of. Blocks may leave while the gradient is still computed. If it
turns out to be bad, they are void, and the next attempt has the same sequence. Unset: the first.
"""


Encodes = Literal[True] | msgspec.UnsetType
"""Pushes are encoded, so they come in blocks, also on this host. Unset takes no bytes."""


N_SHOWN_MAX = 4096
Tensors = Annotated[tuple[Name, ...], msgspec.Meta(max_length=N_SHOWN_MAX)] | msgspec.UnsetType
"""Name and shape of each."""


class OpenSession(AnyMessage, frozen=True):
    """Client -> shard: open a session, or open it again.

    Idempotent: repeated until `SessionOpened` comes. A client that holds a part of the model
    fetches and pushes those elements of the shard's vector, by rising index. The part stays
    the same for one incarnation of the client.
    """

    layout: Name  # hash of the layout; both sides must cut tensors alike
    pushes: bool  # False: it only fetches (the evaluator)
    host: Name  # whose shared memory the client can map; "" if none
    next_sequence: Count  # of the first push of this incarnation that is not known to be applied
    holds: Vector | None = None  # (4 n,) stripes of the shard's vector; None: all of it
    entries: Ticks = msgspec.UNSET  # how often this incarnation has entered or left; odd: it is in
    tick: Ticks = msgspec.UNSET  # ticks ended by acknowledged pushes; Unset: begin at the floor
    known_term: Count = 0  # the highest that the client knows
    encodes: Encodes = msgspec.UNSET


class SessionOpened(AnyMessage, frozen=True):
    """Shard -> client: answer to `OpenSession`."""

    term: Count
    clock: Count
    samples: Amount  # of this client, in the last of its pushes applied here
    watermark: Count  # pushes of this incarnation up to it are never applied from now on
    applied: Count  # how many pushes of this incarnation the values contain
    parameters_region: Name  # shared memory to copy from, "" if none
    push_buffers_region: Name  # shared memory to push into, "" if none
    entries: Ticks = msgspec.UNSET  # of the latest OpenSession with that number
    tick: Ticks = msgspec.UNSET  # ticks that the client has ended; Unset: it is not in
    floor: Ticks = msgspec.UNSET  # as in `Floor`; Unset: this shard counts no ticks
    behind: Name | msgspec.UnsetType = msgspec.UNSET


class SessionRefused(AnyMessage, frozen=True):
    """Shard -> client: I cannot serve your message, now or ever."""

    reason: Text
    for_good: bool  # asking again will not help
    tensors: Tensors = msgspec.UNSET  # of the shard, if the client's layout differs


class Fetch(AnyMessage, frozen=True):
    """Client -> shard: send me one consistent version of your values, block by block."""

    request: Count  # rises with each fetch of this client, over its incarnations too
    term: Count
    credit: Count  # blocks that may be under way
    payload: Payload = msgspec.UNSET  # that the blocks should have
    since: Count | msgspec.UnsetType = (
        msgspec.UNSET
    )  # the clock of this term of which the client has the values
    # (4 n,) stripes of the shard's vector, of a fetch of more than what the client holds: with the
    # parameters that do not train. Unset: what it holds.
    holds: Vector | msgspec.UnsetType = msgspec.UNSET


class ParameterBlock(AnyMessage, frozen=True):
    """Shard -> client: one block of the version pinned for `request`."""

    request: Count
    term: Count
    block_index: Count
    clock: Count  # of that version
    values: Vector  # (block_size,)
    payload: Payload = msgspec.UNSET  # what `values` are
    n_words: Words = msgspec.UNSET  # of all blocks, if they are of changes or moves


class FetchAck(AnyMessage, frozen=True):
    """Client -> shard: I hold blocks [0, received); send up to `limit` of them.

    `received` = number of blocks unpins the version. Also sent when blocks seem lost: the
    shard sends again from `received`.
    """

    request: Count
    term: Count
    received: Count
    limit: Count
    again: bool  # blocks seem lost: begin again at `received`


class PushBlock(AnyMessage, frozen=True):
    """Client -> shard: one block of the push of this sequence."""

    sequence: Count
    term: Count
    block_index: Count
    values: Vector  # (block_size,)
    n_words: Words = msgspec.UNSET  # of the whole push
    answer: bool = True  # by PushBlockAck; one for many blocks is enough
    number: Count | msgspec.UnsetType = msgspec.UNSET  # in the order sent; Unset: `block_index`
    attempt: Attempt = msgspec.UNSET


class PushBlockAck(AnyMessage, frozen=True):
    """Shard -> client: I hold the first `received` blocks of that push, in the order sent."""

    sequence: Count
    term: Count
    received: Count
    attempt: Attempt = msgspec.UNSET
    # The push is complete, and waits for those of other clients.
    waits: bool | msgspec.UnsetType = msgspec.UNSET


class Push(AnyMessage, frozen=True):
    """Client -> shard: the push buffer of this sequence is complete: apply it.

    Idempotent: repeated until `PushApplied` comes. Sequences rise by one. Those of a new
    incarnation of the client begin beyond all earlier ones, so that no late answer fits the
    wrong push. Sequence s lies in push buffer s mod 2.
    """

    sequence: Count
    term: Count
    fetched_clock: Count  # this shard's clock when the gradient's parameters were read
    n_gradients: Amount  # how many were summed
    samples: Amount  # the client's total, these gradients included
    commit_token: Count = 0  # of a chunk of a batch (then `samples` are its own); 0: apply it
    # (4 n,) stripes of the shard's vector that it changes, where some tensors have no
    # gradient; None: all that the client holds.
    touches: Vector | None = None
    form: Form | msgspec.UnsetType = msgspec.UNSET  # of an encoded push; it comes in blocks
    n_words: Words = msgspec.UNSET
    tick: Ticks = msgspec.UNSET  # ticks that the client has ended, this one included
    n_samples: Ticks = msgspec.UNSET  # of this push
    # Positions [start, stop) of its samples, where data are dealt (`core.spans`; of the rank's own
    # part): a shard that has
    # applied a push with one of them acknowledges this one, and leaves its values as they are.
    dealt: Dealt = msgspec.UNSET
    sets: bool = False  # the shard's values become those of the push, whatever its rule
    rates: Rates = msgspec.UNSET
    attempt: Attempt = msgspec.UNSET


class PushApplied(AnyMessage, frozen=True):
    """Shard -> client: every push up to `sequence` is applied, once.

    `staleness` is that of push `sequence`.
    """

    sequence: Count
    term: Count
    clock: Count
    staleness: Count
    floor: Ticks = msgspec.UNSET
    behind: Name | msgspec.UnsetType = msgspec.UNSET
    # Its dealt positions were applied before, so the push was dropped, with what else was in it.
    dropped: Literal[True] | msgspec.UnsetType = msgspec.UNSET
    late: Name | msgspec.UnsetType = msgspec.UNSET  # whose push the round waited for; "": nobody's


class Floor(AnyMessage, frozen=True):
    """Shard -> client: every client that is in has ended `floor` ticks.

    It never falls within one incarnation of the shard.
    """

    term: Count
    floor: Count
    behind: Name  # the first of the clients that have ended no more; "": none is in
    closes: Ticks = msgspec.UNSET  # the receiver's tick, which the round of the others waits for
