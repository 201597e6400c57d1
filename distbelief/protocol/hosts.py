"""What a machine that has joined, a host, and the supervisor say to each other."""

from typing import Annotated

import msgspec

from distbelief.protocol.fields import AnyMessage, Blob, Count, Name, Rate, Text


PIECE_BYTES_MAX = 1 << 19
"""Of a document in one message."""

N_DUTIES_MAX = 4096

_Reason = Annotated[str, msgspec.Meta(max_length=2048)]


class Offer(AnyMessage, frozen=True):
    """Host -> supervisor: use this machine; repeated until `Assignments` of this life come.

    Figures are the machine's own word.
    """

    life: Count  # rises whenever the host begins anew
    label: Name  # what people call it
    endpoint: Name  # where the host itself listens
    cores: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    memory_bytes: Count
    devices: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]  # "cuda", each
    flops: Rate = 0.0  # of one core, in a large matrix product


class RoleAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one role."""

    name: Name
    incarnation: Count


class Assignments(AnyMessage, frozen=True):
    """Supervisor -> host: run these roles of this run, and no others. Idempotent.

    Answers every `Offer` and `HostReport` of a life that counts.
    """

    life: Count
    run: Name
    duties: Annotated[tuple[RoleAssignment, ...], msgspec.Meta(max_length=N_DUTIES_MAX)]


class RoleEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a role has ended, or could not be begun."""

    name: Name
    incarnation: Count
    reason: _Reason


class HostReport(AnyMessage, frozen=True):
    """Host -> supervisor: how it stands; sent whether or not anything changed."""

    life: Count
    ready: bool  # the run's brief is here, and roles can be started
    leaving: bool  # the machine's user wants it back
    refusal: Text | None  # why this machine can be of no use to this run
    # Of the duties, those that have ended: until they are duties no more.
    ended: Annotated[tuple[RoleEnded, ...], msgspec.Meta(max_length=N_DUTIES_MAX)]
    bandwidth: Rate = 0.0  # bytes that come in from the supervisor


class Release(AnyMessage, frozen=True):
    """Supervisor -> host: that life is over; end all that runs. Idempotent."""

    life: Count
    again: bool  # offer yourself anew; else there is nothing more to do
    reason: Text
    refused: bool = False  # this machine can be of no use to the job, for that reason


class FileRequest(AnyMessage, frozen=True):
    """Host -> supervisor: send this piece of a document; or the other way round."""

    document: Name
    offset: Count


class FileChunk(AnyMessage, frozen=True):
    """Supervisor -> host: a piece of a document; or the other way round."""

    document: Name
    offset: Count
    n_bytes: Count  # of the whole document
    content: Blob
    error: Text | None = None  # why there is none
