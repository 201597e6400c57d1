"""Messages between the members of a ring, who sum one vector of each (`worker.ring`).

    supervisor       member            its right neighbour
      | RingMembers -->  |                 |   the members, in order: a generation begins
      |                  | RingBlock --->  |   a block of a partial sum, later of the whole one
      |                  | <----- RingAck  |   blocks that it holds, and how many it takes
      |                  | <- RingFailed > |   the vectors differ: no member gets a sum

The right neighbour of the last member is the first. Each message carries the generation: those of
another one are dropped.
"""

from typing import Annotated

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol.fields import AnyMessage, Count, Name, Text


class RingMember(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    incarnation: Count


class RingMembers(AnyMessage, frozen=True):
    """Supervisor -> member: these are the ring from now on; drop the round that is under way.

    Idempotent: a generation that is not higher is ignored.
    """

    generation: Count  # rises
    members: Annotated[tuple[RingMember, ...], msgspec.Meta(max_length=4096)]  # in their order


class RingBlock(AnyMessage, frozen=True):
    """Member -> neighbour: to the right, the next block of a round."""

    generation: Count
    round: Count  # of this generation, from 1
    index: Count  # among the blocks of the round
    vector: Name  # what is summed: length, element type, layout; equal at all members
    values: Vector  # (block_size,)


class RingAck(AnyMessage, frozen=True):
    """Member -> neighbour: to the left, I hold blocks [0, received), and all of former rounds.

    Send none from `limit` on before I say so.
    """

    generation: Count
    round: Count
    received: Count
    limit: Count


class RingFailed(AnyMessage, frozen=True):
    """Member -> neighbour: to either side, there will be no sum in this generation.

    Repeated until it knows.
    """

    generation: Count
    reason: Text
    answer: bool  # by the same message
