"""Messages between the supervisor and a host: a machine that joined and runs roles.

host                          supervisor
  | Offer ------------------->  |   so many cores; use them
  | <-------------- Assignments |   of this run
  | FileRequest, <--- FileChunk |   the job's files
  | HostReport -------------->  |   ready; from now on twice a second
  | <-------------- Assignments |   run these roles, and no others
  | HostReport -------------->  |   that role has ended
  | <------------------ Release |   the job is over
"""

from typing import Annotated, Final

import msgspec

from distbelief.core.errors import RemoteProtocolError
from distbelief.protocol.fields import AnyMessage, Blob, Count, Name, Rate, Text


CHUNK_BYTES_MAX = 1 << 19
"""Bytes of a file in one message."""

JOB_SPEC: Final = "brief"
"""The document that says what roles of the run need (`job.hosts.bootstrap`)."""

PROBE: Final = "probe"
"""A document of zeros: by its chunks a host measures how fast they arrive."""

PROBE_BYTES: Final = 8 * CHUNK_BYTES_MAX

N_ASSIGNMENTS_MAX = 4096

_Reason = Annotated[str, msgspec.Meta(max_length=2048)]


class Offer(AnyMessage, frozen=True):
    """Host -> supervisor: use this machine; repeated until `Assignments` come.

    The figures are what the host measured itself.
    """

    incarnation: Count  # rises whenever the host starts anew
    label: Name  # its name for people
    endpoint: Name  # where the host itself listens
    cores: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    memory_bytes: Count
    devices: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]  # "cuda", each
    flops: Rate = 0.0  # of one core, in a large matrix product
    domain: Name = ""  # what fails together, such as a rack; "" for the host alone


class RoleAssignment(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    incarnation: Count
    ranks: Count = 1  # of its group


class Assignments(AnyMessage, frozen=True):
    """Supervisor -> host: run these roles of this run, and no others. Idempotent.

    Answers every `Offer` and `HostReport` of the present session of the host.
    """

    incarnation: Count
    run: Name
    assignments: Annotated[tuple[RoleAssignment, ...], msgspec.Meta(max_length=N_ASSIGNMENTS_MAX)]


class RoleEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a role has ended, or could not be started."""

    name: Name
    incarnation: Count
    reason: _Reason


class HostReport(AnyMessage, frozen=True):
    """Host -> supervisor: what runs here; sent at a fixed interval."""

    incarnation: Count
    ready: bool  # the job's files are here, and roles can be started
    leaving: bool  # the user of the host wants it back
    refusal: Text | None  # why this host cannot run roles of this job
    # Assigned roles that have ended; repeated until they are not assigned any more.
    ended: Annotated[tuple[RoleEnded, ...], msgspec.Meta(max_length=N_ASSIGNMENTS_MAX)]
    bandwidth: Rate = 0.0  # bytes per second from the supervisor


class Release(AnyMessage, frozen=True):
    """Supervisor -> host: end all roles that run there. Idempotent."""

    incarnation: Count
    again: bool  # send a new Offer; else the host exits
    reason: Text
    refused: bool = False  # this host cannot serve the job, for that reason


class FileRequest(AnyMessage, frozen=True):
    """Host -> supervisor: send this part of a file."""

    document: Name
    offset: Count


class FileChunk(AnyMessage, frozen=True):
    """Supervisor -> host: a part of a file."""

    document: Name
    offset: Count
    n_bytes: Count  # of the whole file
    content: Blob

    @classmethod
    def of(cls, document: str, content: bytes, offset: int) -> "FileChunk":
        """Return the chunk at this offset; RemoteProtocolError if the offset is behind the end."""
        n_bytes = len(content)
        if offset > n_bytes:
            raise RemoteProtocolError(f"offset {offset} of {document}: it has {n_bytes} bytes")
        chunk = Blob(memoryview(content)[offset : offset + CHUNK_BYTES_MAX])
        return cls(document=document, offset=offset, n_bytes=n_bytes, content=chunk)
