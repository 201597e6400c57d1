"""Where a host joins a job, and what it downloads in chunks: a probe of the link, the job spec.

    host                             supervisor
      | FileRequest (offset 0) --->    |
      | <----------------- FileChunk   |
      | FileRequest (next) ------->    |   and so on; repeated if nothing comes

One chunk is in flight at a time, so that training traffic goes first. The job spec contains no path
of the supervisor's host that would be used on another one: plan and job travel as text; memory and
keys are the host's own; checkpoints and initial values are at the supervisor's file server, unless
[cluster] checkpoints names a place that all hosts reach. Shared memory is the
supervisor's for hosts on its machine.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, cast, final
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
from typing_extensions import override

from distbelief.config.job import ClusterTable
from distbelief.config.tables import decode
from distbelief.core.errors import JobError, RemoteProtocolError, TransportError
from distbelief.core.reliable import Backoff
from distbelief.job.launch.role_process import RoleSpec
from distbelief.protocol import FileChunk, FileRequest
from distbelief.protocol.role import Seconds
from distbelief.transport.address import Endpoint, in_url, number_of
from distbelief.transport.authenticator import open_private
from distbelief.transport.keys import KeyPair, public_key
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.shared_memory import this_machine


_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError)


@final
@dataclass(frozen=True, kw_only=True)
class JobAddress:
    """Where hosts join a job: tcp://HOST:PORT?key=..., without key files ?secret=...

    With key files the address contains no secret. Without them, anyone with it is let in.
    """

    host: str  # name or number, as the user wrote it
    port: int  # TCP port
    key: str = ""  # public key; "" for the server key in the host's allow-list
    secret: str = ""  # of a run without key files

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what `str` wrote, or a part of it, or raise JobError."""
        try:
            parts = urlsplit(text)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
            query = parse_qs(parts.query)
        except ValueError:  # unbalanced brackets, a port that is not a number, ...
            scheme, host, port, query = "", None, None, {}
        if scheme != "tcp" or not host or not port or not text.isascii():
            raise JobError(
                f"{text!r} is not a job address: use the one that `distbelief train JOB.toml "
                "--listen tcp://HOST:PORT --keys DIR` prints, like tcp://10.0.0.1:7700?key=..."
            )
        key = public_key(query["key"][0]) if "key" in query else ""
        secret = query.get("secret", [""])[0]
        if secret:
            key = KeyPair.parse(secret).public
        return cls(host=host, port=port, key=key, secret=secret)

    @override
    def __str__(self) -> str:
        who = {"secret": self.secret} if self.secret else {"key": self.key}
        return f"{self.endpoint}?{urlencode(who)}"

    @property
    def endpoint(self) -> str:
        return f"tcp://{in_url(self.host)}:{self.port}"

    def place(self, key: str) -> Endpoint:
        return Endpoint(host=number_of(self.host), port=self.port, key=key)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    spec: RoleSpec  # as for roles of the supervisor's host
    plans: dict[int, str] = {}  # texts of `RoleSpec.plans`
    shares: bool = True  # whether roles of one host share memory
    # The supervisor's machine and shared memory, which hosts on that machine use as well: through
    # TCP and encryption, a step there would take longer
    machine: str = ""
    memory: str = ""

    @property
    def memory_here(self) -> Path | None:
        """The supervisor's shared memory, if this host is on its machine and has the same user."""
        if not (self.shares and self.machine and self.machine == this_machine()):
            return None
        with suppress(TransportError):
            os.close(open_private(Path(self.memory)))
            return Path(self.memory)
        return None


def write_job_spec(spec: RoleSpec, *, files: str = "", snapshots: str = "") -> bytes:
    """Encode the job spec; `snapshots` is where all hosts reach the checkpoints, if anywhere."""
    portable = msgspec.structs.replace(
        spec,
        supervisor="",
        memory="",
        snapshots=snapshots,
        files=files,
        plans={},
        initial_file=None if spec.initial_file is None else "",
        reach=ListenConfig(),
    )
    plans = {n: Path(plan).read_text() for n, plan in spec.plans.items()}
    shares = bool(spec.memory)
    made = JobSpec(
        spec=portable, plans=plans, shares=shares, machine=this_machine(), memory=spec.memory
    )
    return msgspec.json.encode(made)


def read_job_spec(content: bytes) -> JobSpec:
    """Decode what `write_job_spec` wrote on another host, or raise JobError."""
    try:
        return msgspec.json.decode(content, type=JobSpec)
    except _UNREADABLE as error:
        raise JobError(
            f"the supervisor's job spec cannot be read: {error!s:.200}. Use "
            "the same version of distbelief on both hosts"
        ) from None


def localized(job: msgspec.Raw, directory: Path) -> tuple[msgspec.Raw, Seconds]:
    """Return a job as if started in this directory, and how long its roles wait in silence."""
    try:
        tables = msgspec.json.decode(bytes(job), type=dict[str, object])
        source = msgspec.convert(tables["source"], type=dict[str, object])
        paths = msgspec.convert(source["import_paths"], type=list[str])
    except _UNREADABLE as error:
        raise JobError(f"the supervisor's job cannot be read: {error!s:.200}") from None
    cluster = decode(tables.get("cluster", {}), ClusterTable, path=("cluster",))
    # The innermost directory first: it may lie within the other.
    bases = sorted((path.rstrip("/") for path in paths), key=len, reverse=True)
    here = str(directory.absolute())
    moved = cast("dict[str, object]", _relocated(tables, bases, here))
    moved["source"] = source | {"import_paths": [here]}
    return msgspec.Raw(msgspec.json.encode(moved)), cluster.patience


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
ASK_SECONDS: Final = 1.0  # without a chunk, until it is requested again


@final
class FileDownload:
    """A document, as far as it has come; one chunk is under way at a time."""

    def __init__(self, document: str, now: Seconds) -> None:
        self.document = document
        self.begun_at = now
        self.rate = 0.0  # bytes a second of the fastest chunk; 0.0 before there is one
        self._content = bytearray()
        self._n_bytes: int | None = None
        self._asked_at = now
        # The pause doubles over the whole download: on a slow link, repeated answers would delay
        # the next chunk.
        self._backoff = Backoff(first=ASK_SECONDS, longest=math.inf)

    @property
    def content(self) -> bytes | None:
        is_whole = self._n_bytes == len(self._content)
        return bytes(self._content) if is_whole else None

    def ask(self, now: Seconds) -> FileRequest:
        self._asked_at = now
        self._backoff.due = now + self._backoff.pause
        return FileRequest(document=self.document, offset=len(self._content))

    def ask_again(self, now: Seconds) -> FileRequest | None:
        """Return the request again if no chunk has come for long."""
        if self._n_bytes == len(self._content) or not self._backoff.again(now):
            return None
        return FileRequest(document=self.document, offset=len(self._content))

    def take(self, chunk: FileChunk, now: Seconds) -> bool:
        """Append a chunk; return whether it is new. RemoteProtocolError if it makes no sense."""
        if chunk.document != self.document or chunk.offset != len(self._content):
            return False  # answer to a repeated request
        end = chunk.offset + len(chunk.content)
        known = chunk.n_bytes if self._n_bytes is None else self._n_bytes
        is_sound = known == chunk.n_bytes <= DOCUMENT_BYTES_MAX and end <= known
        if not is_sound or (end < known and not chunk.content):
            raise RemoteProtocolError(
                f"{len(chunk.content)} bytes of {self.document} at {chunk.offset}, of "
                f"{chunk.n_bytes} (before: {self._n_bytes}); {DOCUMENT_BYTES_MAX} at most"
            )
        if self._n_bytes == len(self._content):
            return False
        self._n_bytes = known
        self._content += chunk.content.content
        # At least a microsecond: the rate must be finite.
        self.rate = max(self.rate, len(chunk.content) / max(now - self._asked_at, 1e-6))
        return True
