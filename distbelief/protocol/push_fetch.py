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
"""

from typing import Literal

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.fields import AnyMessage, Count, Name, Text


Payload = Literal["dense", "bfloat16"] | msgspec.UnsetType
"""What values are. "dense": a number of the layout's type for each element that the client holds.
"bfloat16": words of 16 bits, one for each parameter, and two for each buffer, which stays float32.

Unset means dense, and takes no bytes. What lies in shared memory is dense.
"""


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


class SessionOpened(AnyMessage, frozen=True):
    """Shard -> client: answer to `OpenSession`."""

    shard_incarnation: Count
    clock: Count
    samples: Count  # of this client, in the last of its pushes applied here
    watermark: Count  # pushes of this incarnation up to it are never applied from now on
    applied: Count  # how many pushes of this incarnation the values contain
    parameters_region: Name  # shared memory to copy from, "" if none
    push_buffers_region: Name  # shared memory to push into, "" if none


class SessionRefused(AnyMessage, frozen=True):
    """Shard -> client: I cannot serve your message, now or ever."""

    reason: Text
    for_good: bool  # asking again will not help


class Fetch(AnyMessage, frozen=True):
    """Client -> shard: send me one consistent version of your values, block by block."""

    request: Count  # rises with each fetch of this client, over its incarnations too
    shard_incarnation: Count
    credit: Count  # blocks that may be under way
    payload: Payload = msgspec.UNSET  # that the blocks should have


class ParameterBlock(AnyMessage, frozen=True):
    """Shard -> client: one block of the version pinned for `request`."""

    request: Count
    shard_incarnation: Count
    block_index: Count
    clock: Count  # of that version
    values: Vector  # (block_size,)
    payload: Payload = msgspec.UNSET  # what `values` are


class FetchAck(AnyMessage, frozen=True):
    """Client -> shard: I hold blocks [0, received); send up to `limit` of them.

    `received` = number of blocks unpins the version. Also sent when blocks seem lost: the
    shard sends again from `received`.
    """

    request: Count
    shard_incarnation: Count
    received: Count
    limit: Count
    again: bool  # blocks seem lost: begin again at `received`


class PushBlock(AnyMessage, frozen=True):
    """Client -> shard: one block of the push of this sequence."""

    sequence: Count
    shard_incarnation: Count
    block_index: Count
    values: Vector  # (block_size,)
    payload: Payload = msgspec.UNSET  # what `values` are
    answer: bool = True  # by PushBlockAck; one for many blocks is enough


class PushBlockAck(AnyMessage, frozen=True):
    """Shard -> client: I hold blocks [0, received) of that push."""

    sequence: Count
    shard_incarnation: Count
    received: Count


class Push(AnyMessage, frozen=True):
    """Client -> shard: the push buffer of this sequence is complete: apply it.

    Idempotent: repeated until `PushApplied` comes. Sequences rise by one. Those of a new
    incarnation of the client begin beyond all earlier ones, so that no late answer fits the
    wrong push. Sequence s lies in push buffer s mod 2.
    """

    sequence: Count
    shard_incarnation: Count
    fetched_clock: Count  # this shard's clock when the gradient's parameters were read
    n_gradients: Count  # how many were summed
    samples: Count  # the client's total, these gradients included
    commit_token: Count = 0  # of a chunk of a batch (then `samples` are its own); 0: apply it
    # (4 n,) stripes of the shard's vector that it changes, where some tensors have no
    # gradient; None: all that the client holds.
    touches: Vector | None = None
    payload: Payload = msgspec.UNSET  # what lies in the push buffer


class PushApplied(AnyMessage, frozen=True):
    """Shard -> client: every push up to `sequence` is applied, once.

    `staleness` is that of push `sequence`.
    """

    sequence: Count
    shard_incarnation: Count
    clock: Count
    staleness: Count
