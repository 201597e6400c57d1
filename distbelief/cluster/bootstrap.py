"""How fast what the supervisor sends comes in here: pieces, twice as many each time.

    round     1    2    3    4 ...    7       begun when the last one is here
    pieces    1    2    4    8 ...   64       of 64 KiB, all asked for at once

until all of it has taken 150 ms. So a slow link is done after the first pieces, one of
1 Gbit/s after 8 MiB. The rate is that of the best round, for in another one somebody
else may have had the processor: what messages get, encrypted if they are, and read by
this process.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast, final

import msgspec

from distbelief.config.job import QUANTITIES, ClusterTable
from distbelief.config.tables import decode
from distbelief.errors import JobError, RemoteProtocolError
from distbelief.launch.role_process import RoleSpec
from distbelief.protocol import Blob, FileChunk, FileRequest
from distbelief.protocol.hosts import PIECE_BYTES_MAX
from distbelief.roles.role import Seconds
from distbelief.transport.config import ListenConfig


# A brief: all that the roles of a run are told, from one machine to another.
#
# The supervisor's machine writes it; a host makes of it the file that its own processes
# read (`process.Spec`). Nothing in it is a path of the supervisor's machine that would be
# used here: plan and job travel as text, memory, snapshots and keys are the host's own.
# What the job says of files is looked for below the host's own directory where the job's
# user had it below his.

_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is told.

    Attributes:
        spec: As for roles of the supervisor's machine.
        plan: The plan's text, where replicas are split over machines.
        shares: Whether roles of one machine share memory.
    """

    spec: RoleSpec
    plan: str | None = None
    shares: bool = True


def write_job_spec(spec: RoleSpec, *, plan: Path | None) -> bytes:
    """Return the brief of a run.

    Args:
        spec: Of the roles of this machine.
        plan: Where their plan is.
    """
    told = msgspec.structs.replace(
        spec,
        supervisor="",
        memory="",
        snapshots="",
        plan=None,
        initial_file=None,
        reach=ListenConfig(),
    )
    text = None if plan is None else plan.read_text()
    shares = bool(spec.memory)
    return msgspec.json.encode(JobSpec(spec=told, plan=text, shares=shares))


def read_job_spec(content: bytes) -> JobSpec:
    """Return the brief that `write_brief` wrote, on another machine.

    Raises:
        JobError: it is none.
    """
    try:
        return msgspec.json.decode(content, type=JobSpec)
    except _UNREADABLE as error:
        raise JobError(
            f"what the supervisor says of its job cannot be read: {error!s:.200}. Use "
            "the same version of distbelief on both machines"
        ) from None


def patience_of(job: msgspec.Raw) -> Seconds:
    """Return how long roles of this job wait for a supervisor that is silent.

    Raises:
        JobError: it is no job.
    """
    try:
        tables = msgspec.json.decode(bytes(job), type=dict[str, object])
    except _UNREADABLE as error:
        raise JobError(f"the supervisor sent no job: {error!s:.200}") from None
    table, quantities = tables.get("cluster", {}), QUANTITIES["cluster"]
    cluster = decode(table, ClusterTable, path=("cluster",), quantities=quantities)
    return cluster.patience


def relocated(job: msgspec.Raw, directory: Path) -> msgspec.Raw:
    """Return a job as if its user had started it in this directory.

    Raises:
        JobError: it is no job.
    """
    try:
        tables = msgspec.json.decode(bytes(job), type=dict[str, object])
        source = msgspec.convert(tables["source"], type=dict[str, object])
        paths = msgspec.convert(source["import_paths"], type=list[str])
    except _UNREADABLE as error:
        raise JobError(f"the supervisor sent no job: {error!s:.200}") from None
    # The innermost directory first: it may lie within the other.
    bases = sorted((path.rstrip("/") for path in paths), key=len, reverse=True)
    here = str(directory.absolute())
    moved = cast("dict[str, object]", _moved(tables, bases, here))
    moved["source"] = source | {"import_paths": [here]}
    return msgspec.Raw(msgspec.json.encode(moved))


def _moved(value: object, bases: list[str], here: str) -> object:
    match value:
        case dict():
            return {key: _moved(item, bases, here) for key, item in value.items()}
        case list():
            return [_moved(item, bases, here) for item in value]
        case str() if os.path.isabs(value):  # noqa: PTH117 -- perhaps no path
            for base in bases:
                if value == base or value.startswith(f"{base}/"):
                    return here + value[len(base) :]
            return value
        case _:
            return value


# Documents between a host and the supervisor: asked for piece by piece.
#
#     who wants it                    who has it
#       | Ask (offset 0) ----------->  |
#       | <-------------------- Piece  |
#       | Ask (where that ended) --->  |   and so on; asked again if nothing comes
#
# One piece is under way at a time, but for a few that were asked for twice, so a document
# takes little more of a link, or of memory at its end, than a piece: what is trained goes
# first.

DOCUMENT_BYTES_MAX: Final = 1 << 26


def chunk_of(document: str, content: bytes, offset: int) -> FileChunk:
    """Return the piece that begins there.

    Raises:
        RemoteProtocolError: there is none.
    """
    if offset > len(content):
        raise RemoteProtocolError(f"a piece of {document} at {offset}: it has {len(content)} bytes")
    return FileChunk(
        document=document,
        offset=offset,
        n_bytes=len(content),
        content=Blob(memoryview(content)[offset : offset + PIECE_BYTES_MAX]),
    )


@final
class FileDownload:
    """One document, as far as it has come.

    Args:
        document: Its name.
    """

    def __init__(self, document: str) -> None:
        self.document = document
        self._content = bytearray()
        self._n_bytes: int | None = None
        self._n_looks = 0  # since it was asked last
        self._patience = 2  # looks, after which it is asked again

    @property
    def content(self) -> bytes | None:
        """All of it, once it is here."""
        is_whole = self._n_bytes == len(self._content)
        return bytes(self._content) if is_whole else None

    def ask(self) -> FileRequest:
        """Return what to ask for now."""
        self._n_looks = 0
        return FileRequest(document=self.document, offset=len(self._content))

    def ask_again(self) -> FileRequest | None:
        """Return what to ask for if nothing has come for long; called now and then.

        More and more seldom: what is merely slow comes as often as it is asked for, and
        the next piece after all that.
        """
        self._n_looks += 1
        if self.content is not None or self._n_looks < self._patience:
            return None
        self._patience *= 2
        return self.ask()

    def take(self, piece: FileChunk) -> bool:
        """Take a piece; return whether it is news.

        Raises:
            RemoteProtocolError: it does not go with what has come.
        """
        if piece.document != self.document or piece.offset != len(self._content):
            return False  # of a question that was repeated
        end = piece.offset + len(piece.content)
        known = piece.n_bytes if self._n_bytes is None else self._n_bytes
        is_sound = known == piece.n_bytes <= DOCUMENT_BYTES_MAX and end <= known
        if not is_sound or (end < known and not piece.content):
            raise RemoteProtocolError(
                f"{len(piece.content)} bytes of {self.document} at {piece.offset}, of "
                f"{piece.n_bytes} (before: {self._n_bytes}); {DOCUMENT_BYTES_MAX} at "
                "most"
            )
        if self.content is not None:
            return False
        self._n_bytes = known
        self._content += piece.content.content
        return True


PROBE: Final = "probe"
"""The document that is asked for to see how long it takes."""

PIECE_BYTES: Final = 1 << 16
N_ROUNDS_MAX: Final = 7
N_PIECES_MAX: Final = (1 << N_ROUNDS_MAX) - 1
"""That one life of a host is sent: 8 MiB."""

SECONDS_ENOUGH: Final = 0.15
SECONDS_MAX: Final = 3.0
"""For all of it: a link on which something is lost has no rate."""

_CONTENT: Final = Blob(bytes(PIECE_BYTES))


def probe_chunk(offset: int) -> FileChunk:
    """Return the piece that begins there.

    Raises:
        RemoteProtocolError: there is none.
    """
    n_bytes = N_PIECES_MAX * PIECE_BYTES
    if offset >= n_bytes or offset % PIECE_BYTES:
        raise RemoteProtocolError(f"a piece of {PROBE} at {offset}: there is none")
    return FileChunk(document=PROBE, offset=offset, n_bytes=n_bytes, content=_CONTENT)


@final
@dataclass(slots=True, kw_only=True)
class BandwidthProbe:
    """Of one life of a host.

    Attributes:
        begun_at: When its first piece was asked for.
        rate: Bytes a second, of the best round that is whole; 0.0: none is.
        is_over: Whether there is nothing more to ask for.
    """

    begun_at: Seconds
    rate: float = 0.0
    is_over: bool = False
    _n_asked: int = 0
    _n_come: int = 0
    _n_of_round: int = 0
    _round_at: Seconds = 0.0

    def ask(self, now: Seconds) -> list[FileRequest]:
        """Return what the next round asks for."""
        self._n_of_round = max(1, 2 * self._n_of_round)
        self._round_at = now
        first, self._n_asked = self._n_asked, self._n_asked + self._n_of_round
        return [
            FileRequest(document=PROBE, offset=index * PIECE_BYTES)
            for index in range(first, self._n_asked)
        ]

    def take(self, piece: FileChunk, now: Seconds) -> list[FileRequest]:
        """Take a piece; return what is to be asked for now."""
        if self.is_over or piece.offset != self._n_come * PIECE_BYTES:
            return []
        self._n_come += 1
        if self._n_come < self._n_asked:
            return []
        seconds = now - self._round_at
        # As if read by a clock of microseconds: an infinite speed is none.
        rate = self._n_of_round * PIECE_BYTES / max(seconds, 1e-6)
        self.rate = max(self.rate, rate)
        if now - self.begun_at >= SECONDS_ENOUGH or self._n_asked == N_PIECES_MAX:
            self.is_over = True
            return []
        return self.ask(now)

    def is_late(self, now: Seconds) -> bool:
        """Return whether it has taken too long."""
        return now - self.begun_at > SECONDS_MAX
