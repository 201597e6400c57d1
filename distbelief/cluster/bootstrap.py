"""What a joining host downloads: the job spec, in chunks, and a probe of the link's bandwidth.

    host                             supervisor
      | FileRequest (offset 0) --->    |
      | <----------------- FileChunk   |
      | FileRequest (next) ------->    |   and so on; repeated if nothing comes

One chunk is in flight at a time, so that training traffic goes first. The job spec contains no path
of the supervisor's host that would be used on another one: plan and job travel as text; memory,
checkpoints and keys are the host's own.
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
from distbelief.protocol.hosts import CHUNK_BYTES_MAX
from distbelief.roles.role import Seconds
from distbelief.transport.config import ListenConfig


_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the roles of a run need on another host."""

    spec: RoleSpec  # as for roles of the supervisor's host
    plan: str | None = None  # text of the plan, if replicas are split over several ranks
    shares: bool = True  # whether roles of one host share memory


def write_job_spec(spec: RoleSpec, *, plan: Path | None) -> bytes:
    """Return the encoded job spec of a run.

    Args:
        spec: Of the roles of this host.
        plan: File of their plan.
    """
    portable = msgspec.structs.replace(
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
    return msgspec.json.encode(JobSpec(spec=portable, plan=text, shares=shares))


def read_job_spec(content: bytes) -> JobSpec:
    """Decode what `write_job_spec` wrote on another host.

    Raises:
        JobError: it is not a job spec.
    """
    try:
        return msgspec.json.decode(content, type=JobSpec)
    except _UNREADABLE as error:
        raise JobError(
            f"the supervisor's job spec cannot be read: {error!s:.200}. Use "
            "the same version of distbelief on both hosts"
        ) from None


def patience_of(job: msgspec.Raw) -> Seconds:
    """Return how long roles of this job wait for a silent supervisor.

    Raises:
        JobError: it is not a job.
    """
    try:
        tables = msgspec.json.decode(bytes(job), type=dict[str, object])
    except _UNREADABLE as error:
        raise JobError(f"the supervisor's job cannot be read: {error!s:.200}") from None
    table, quantities = tables.get("cluster", {}), QUANTITIES["cluster"]
    cluster = decode(table, ClusterTable, path=("cluster",), quantities=quantities)
    return cluster.patience


def relocated(job: msgspec.Raw, directory: Path) -> msgspec.Raw:
    """Return a job as if its user had started it in this directory.

    Raises:
        JobError: it is not a job.
    """
    try:
        tables = msgspec.json.decode(bytes(job), type=dict[str, object])
        source = msgspec.convert(tables["source"], type=dict[str, object])
        paths = msgspec.convert(source["import_paths"], type=list[str])
    except _UNREADABLE as error:
        raise JobError(f"the supervisor's job cannot be read: {error!s:.200}") from None
    # The innermost directory first: it may lie within the other.
    bases = sorted((path.rstrip("/") for path in paths), key=len, reverse=True)
    here = str(directory.absolute())
    moved = cast("dict[str, object]", _relocated(tables, bases, here))
    moved["source"] = source | {"import_paths": [here]}
    return msgspec.Raw(msgspec.json.encode(moved))


def _relocated(value: object, bases: list[str], here: str) -> object:
    match value:
        case dict():
            return {key: _relocated(item, bases, here) for key, item in value.items()}
        case list():
            return [_relocated(item, bases, here) for item in value]
        case str() if os.path.isabs(value):  # noqa: PTH117 -- perhaps no path
            for base in bases:
                if value == base or value.startswith(f"{base}/"):
                    return here + value[len(base) :]
            return value
        case _:
            return value


DOCUMENT_BYTES_MAX: Final = 1 << 26


def chunk_of(document: str, content: bytes, offset: int) -> FileChunk:
    """Return the chunk at this offset.

    Raises:
        RemoteProtocolError: the offset is behind the end.
    """
    if offset > len(content):
        raise RemoteProtocolError(f"offset {offset} of {document}: it has {len(content)} bytes")
    return FileChunk(
        document=document,
        offset=offset,
        n_bytes=len(content),
        content=Blob(memoryview(content)[offset : offset + CHUNK_BYTES_MAX]),
    )


@final
class FileDownload:
    """A document, as far as it has come.

    Args:
        document: Its name.
    """

    def __init__(self, document: str) -> None:
        self.document = document
        self._content = bytearray()
        self._n_bytes: int | None = None
        self._n_looks = 0  # calls of `ask_again` since the last request
        self._patience = 2  # such calls before the request is repeated

    @property
    def content(self) -> bytes | None:
        is_whole = self._n_bytes == len(self._content)
        return bytes(self._content) if is_whole else None

    def ask(self) -> FileRequest:
        """Return the request for the next chunk."""
        self._n_looks = 0
        return FileRequest(document=self.document, offset=len(self._content))

    def ask_again(self) -> FileRequest | None:
        """Return the request again if no chunk has come for long; called periodically.

        The interval doubles each time: on a slow link, repeated answers would delay the next chunk.
        """
        self._n_looks += 1
        if self.content is not None or self._n_looks < self._patience:
            return None
        self._patience *= 2
        return self.ask()

    def take(self, chunk: FileChunk) -> bool:
        """Append a chunk; return whether it is new.

        Raises:
            RemoteProtocolError: it contradicts what has come.
        """
        if chunk.document != self.document or chunk.offset != len(self._content):
            return False  # answer to a repeated request
        end = chunk.offset + len(chunk.content)
        known = chunk.n_bytes if self._n_bytes is None else self._n_bytes
        is_sound = known == chunk.n_bytes <= DOCUMENT_BYTES_MAX and end <= known
        if not is_sound or (end < known and not chunk.content):
            raise RemoteProtocolError(
                f"{len(chunk.content)} bytes of {self.document} at {chunk.offset}, of "
                f"{chunk.n_bytes} (before: {self._n_bytes}); {DOCUMENT_BYTES_MAX} at "
                "most"
            )
        if self.content is not None:
            return False
        self._n_bytes = known
        self._content += chunk.content.content
        return True


PROBE: Final = "probe"  # the document that measures the link

CHUNK_BYTES: Final = 1 << 16
N_ROUNDS_MAX: Final = 7
N_CHUNKS_MAX: Final = (1 << N_ROUNDS_MAX) - 1  # 8 MiB to one incarnation of a host

SECONDS_ENOUGH: Final = 0.15
SECONDS_MAX: Final = 3.0  # a lost chunk ends the measurement

_CONTENT: Final = Blob(bytes(CHUNK_BYTES))


def probe_chunk(offset: int) -> FileChunk:
    """Return the chunk of `PROBE` at this offset.

    Raises:
        RemoteProtocolError: there is none.
    """
    n_bytes = N_CHUNKS_MAX * CHUNK_BYTES
    if offset >= n_bytes or offset % CHUNK_BYTES:
        raise RemoteProtocolError(f"{PROBE} has no chunk at offset {offset}")
    return FileChunk(document=PROBE, offset=offset, n_bytes=n_bytes, content=_CONTENT)


@final
@dataclass(slots=True, kw_only=True)
class BandwidthProbe:
    """Measures how fast the supervisor's messages arrive, for one incarnation of a host.

        round     1    2    3    4 ...    7       begins when the previous one is complete
        chunks    1    2    4    8 ...   64       of 64 KiB, all requested at once

    It ends after 150 ms: a slow link after the first chunks, 1 Gbit/s after 8 MiB. The rate is that
    of the best round, because other processes may disturb a round. It includes encryption and
    reading.
    """

    begun_at: Seconds  # when the first chunk was requested
    rate: float = 0.0  # bytes a second in the best complete round; 0.0 before
    is_over: bool = False  # whether there is nothing more to request
    _n_requested: int = 0
    _n_received: int = 0
    _n_of_round: int = 0
    _round_at: Seconds = 0.0

    def ask(self, now: Seconds) -> list[FileRequest]:
        """Return the requests of the next round."""
        self._n_of_round = max(1, 2 * self._n_of_round)
        self._round_at = now
        first, self._n_requested = self._n_requested, self._n_requested + self._n_of_round
        return [
            FileRequest(document=PROBE, offset=index * CHUNK_BYTES)
            for index in range(first, self._n_requested)
        ]

    def take(self, chunk: FileChunk, now: Seconds) -> list[FileRequest]:
        """Count a chunk; return the requests to send now."""
        if self.is_over or chunk.offset != self._n_received * CHUNK_BYTES:
            return []
        self._n_received += 1
        if self._n_received < self._n_requested:
            return []
        seconds = now - self._round_at
        # At least a microsecond: the rate must be finite.
        rate = self._n_of_round * CHUNK_BYTES / max(seconds, 1e-6)
        self.rate = max(self.rate, rate)
        if now - self.begun_at >= SECONDS_ENOUGH or self._n_requested == N_CHUNKS_MAX:
            self.is_over = True
            return []
        return self.ask(now)

    def is_late(self, now: Seconds) -> bool:
        return now - self.begun_at > SECONDS_MAX
