"""The checkpoints and initial values of the supervisor's host, for roles on other hosts.

    RemoteFolder (in a role's process)          FileServer (a thread of the supervisor's process)
      | FileCall ------------------------------>  |   up to `N_CALLS_MAX` under way
      | <----------------------------- FileReply  |   in any order

A call may be repeated, after a cut link or a restart of the server: it has no second effect. The
chunks of a file go to their offsets in a draft; "finish" syncs and renames it once all are there.
The keys are those of the run: who may not connect to its supervisor may not connect here.
"""

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self, final

import msgspec
import zmq

from distbelief.core import files
from distbelief.core.folders import FILE, NAME, LocalFolder
from distbelief.core.reliable import Backoff
from distbelief.errors import LocalProtocolError, StorageError, TransportError
from distbelief.protocol.fields import Count, Name, Text
from distbelief.roles.role import SUPERVISOR
from distbelief.transport import authenticator as auth
from distbelief.transport.address import Endpoint
from distbelief.transport.config import ListenConfig
from distbelief.transport.zmq_transport import (
    HEARTBEAT_MS,
    SILENCE_MS_MAX,
    ZAP_ENDPOINT,
    Log,
    authenticate,
    cannot_bind,
)


INITIAL: Final = "initial.safetensors"  # the name of the file of initial values
CHUNK: Final = 1 << 19  # bytes of a file in one message
N_CALLS_MAX: Final = 8  # of one client under way: 4 MiB
REPEAT_SECONDS: Final = 5.0  # without any reply, until the calls under way are repeated
SILENCE_SECONDS_MAX: Final = 60.0  # of the server, a slow sync to its disk included
DRAFT_SECONDS_MAX: Final = 300.0  # that an unfinished file is kept without a new chunk
N_DRAFTS_MAX: Final = 256
N_ATTEMPTS_MAX: Final = 3  # at one file whose draft is lost
_N_NAMES_MAX: Final = 4096
_BYTES_MAX: Final = 1 << 42  # of a file
_HEADER_BYTES_MAX: Final = 1 << 20


class FileCall(msgspec.Struct, frozen=True, kw_only=True):
    run: Name = ""
    number: Count = 0  # the reply repeats it
    do: Literal["read", "write", "finish", "names", "delete"]
    name: Annotated[str, msgspec.Meta(max_length=300)]  # ROLE/LABEL.safetensors; ROLE for "names"
    draft: Name = ""  # which attempt at writing the file
    offset: Count = 0
    n_bytes: Annotated[int, msgspec.Meta(ge=0, le=_BYTES_MAX)] = 0  # wanted; or of the whole file


class FileReply(msgspec.Struct, frozen=True, kw_only=True):
    number: Count
    problem: Literal["missing file", "missing chunks", "other"] | None = None
    error: Text = ""
    n_bytes: Count = 0  # of the whole file
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=_N_NAMES_MAX)] = ()


_DECODE_CALL: Final = msgspec.json.Decoder(FileCall)
_DECODE_REPLY: Final = msgspec.json.Decoder(FileReply)
_EMPTY: Final = memoryview(b"")
_Content = memoryview | bytes


@dataclass(eq=False, kw_only=True)
class _Draft:
    name: str  # of the file
    n_bytes: int  # of the file
    path: Path  # of the draft
    descriptor: int
    held: ExitStack  # removes the draft
    touched: float
    chunks: set[int] = field(default_factory=set)  # offsets of those that are there


@final
class FileServer:
    """Serves one folder and one more file, within a `with` block; `endpoint` is where.

    A name that is not `ROLE/LABEL.safetensors` is refused, so no call leads out of the folder.
    """

    def __init__(
        self, folder: LocalFolder, initial: Path | None, *, reach: ListenConfig, run: str, log: Log
    ) -> None:
        self._folder = folder
        self._initial = initial
        self._reach = reach
        self._run = run
        self._log = log
        self._guard = reach.guard(log=log)
        self._drafts: dict[str, _Draft] = {}
        self._finished: dict[str, str] = {}  # file -> its last draft
        self._n_refused = 0
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._context = zmq.Context[auth.Socket]()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.maxmsgsize = max(CHUNK, _HEADER_BYTES_MAX)
        self._router.rcvhwm = self._router.sndhwm = 2 * N_CALLS_MAX  # for each client
        bind = f"tcp://{self._reach.host}:{self._reach.port or '*'}"
        try:
            key = self._guard.listen(self._router, bind)
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(cannot_bind(bind, error)) from None
        bound = Endpoint.parse(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        self.endpoint = str(replace(bound, key=key))
        self._ends = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="file-server", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ends[1])
        self._thread.join()
        os.close(self._ends[0])
        for token in list(self._drafts):
            self._drop(token)
        self._context.destroy(linger=0)
        self._guard.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._zap, self._ends[0]):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(1000))
            if self._ends[0] in ready:
                return
            if self._zap in ready:
                verdict = authenticate(self._zap, self._guard)
                if not verdict.admitted:
                    self._log_rarely(verdict.remark)
            if isinstance(self._guard, auth.CurveAuth):
                self._guard.refresh()
            if self._router in ready:
                with suppress(zmq.Again):  # only a handshake was readable
                    self._take()

    def _take(self) -> None:
        frames: list[zmq.Frame] = []
        while True:
            part = self._router.recv(zmq.DONTWAIT, copy=False)
            if len(frames) < 4:
                frames.append(part)
            if not part.more:
                break
        curve = self._guard if isinstance(self._guard, auth.CurveAuth) else None
        source = None if curve is None else curve.source(part)
        if curve is not None and source is None:
            return
        try:
            sender, header, content = (frame.buffer for frame in frames)
            call = _DECODE_CALL.decode(header)
        except (ValueError, msgspec.MsgspecError) as error:
            self._log_rarely(f"an invalid call: {error!s:.200}")
            if curve is not None and source is not None:
                curve.offended(source, "it sent an invalid call")
            return
        reply, answer = self._answer(call, content)
        reply = msgspec.structs.replace(reply, number=call.number)
        message = [bytes(sender), msgspec.json.encode(reply), answer]
        with suppress(zmq.ZMQError):  # the client is gone, or does not read: it asks again
            self._router.send_multipart(message, zmq.DONTWAIT, copy=False)

    def _answer(self, call: FileCall, content: memoryview) -> tuple[FileReply, _Content]:
        try:
            return self._perform(call, content)
        except FileNotFoundError:
            reply = FileReply(number=0, problem="missing file")
        except (OSError, EOFError, StorageError) as error:
            reply = FileReply(number=0, problem="other", error=str(error))
        return reply, b""

    def _perform(self, call: FileCall, content: memoryview) -> tuple[FileReply, _Content]:
        folder, name = self._folder, call.name
        if call.run != self._run:
            raise StorageError("this port belongs to another run by now")
        if call.do == "read" and name == INITIAL and self._initial is not None:
            folder, name = LocalFolder(self._initial.parent), self._initial.name
        elif (NAME if call.do == "names" else FILE).fullmatch(name) is None:
            raise StorageError(f"{name!r} is not the name of a checkpoint")
        done = FileReply(number=0)
        match call.do:
            case "read":
                size = folder.size(name)
                part = bytearray(max(0, min(call.n_bytes, CHUNK, size - call.offset)))
                folder.read(name, call.offset, memoryview(part))
                return msgspec.structs.replace(done, n_bytes=size), memoryview(part)
            case "names":
                names = folder.names(name)[:_N_NAMES_MAX]
                return msgspec.structs.replace(done, names=tuple(names)), b""
            case "delete":
                folder.delete(name)
            case "write":
                self._write(call, content)
            case "finish":
                if not self._finish(call):
                    done = msgspec.structs.replace(done, problem="missing chunks")
        return done, b""

    def _write(self, call: FileCall, content: memoryview) -> None:
        size = min(CHUNK, call.n_bytes - call.offset)
        if call.offset % CHUNK or len(content) != size:
            raise StorageError(f"{len(content)} bytes at {call.offset} of {call.n_bytes}: no chunk")
        draft = self._drafts.get(call.draft)
        if draft is None:
            if self._finished.get(call.name) == call.draft:
                return  # a late repetition
            draft = self._drafts[call.draft] = self._begin(call)
        if (draft.name, draft.n_bytes) != (call.name, call.n_bytes):
            raise StorageError(f"draft {call.draft!r} is of another file")
        draft.touched = time.monotonic()
        path = self._folder.path / call.name
        with files.explaining(path, doing="write"):
            offset = call.offset
            while content:
                n_written = os.pwrite(draft.descriptor, content, offset)
                content, offset = content[n_written:], offset + n_written
        draft.chunks.add(call.offset)

    def _begin(self, call: FileCall) -> _Draft:
        now = time.monotonic()
        for token, draft in list(self._drafts.items()):
            if now - draft.touched > DRAFT_SECONDS_MAX:
                self._drop(token)
        if len(self._drafts) >= N_DRAFTS_MAX:
            raise StorageError(f"{N_DRAFTS_MAX} files are being written already")
        path = self._folder.prepared(call.name)
        with files.explaining(path, doing="write"), ExitStack() as held:
            place = held.enter_context(files.draft_beside(path))
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            held.callback(os.close, descriptor)
            return _Draft(
                name=call.name,
                n_bytes=call.n_bytes,
                path=place,
                descriptor=descriptor,
                held=held.pop_all(),
                touched=now,
            )

    def _finish(self, call: FileCall) -> bool:
        """Return whether the file of this draft is there now."""
        if self._finished.get(call.name) == call.draft:
            return True
        draft, path = self._drafts.get(call.draft), self._folder.path / call.name
        if draft is None or draft.name != call.name:
            return False
        if len(draft.chunks) < -(-draft.n_bytes // CHUNK):
            return False
        try:
            with files.explaining(path, doing="write"):
                os.fsync(draft.descriptor)
                draft.path.replace(path)
                files.force(path.parent)
        finally:
            self._drop(call.draft)
        if len(self._finished) >= _N_NAMES_MAX:
            del self._finished[next(iter(self._finished))]
        self._finished[call.name] = call.draft
        return True

    def _drop(self, token: str) -> None:
        self._drafts.pop(token).held.close()

    def _log_rarely(self, text: str) -> None:
        self._n_refused += 1
        if self._n_refused & (self._n_refused - 1) == 0:
            self._log("warning", f"file server: {text} (so far {self._n_refused})")


_Call = tuple[FileCall, memoryview]


@final
class RemoteFolder:
    """The `Folder` of a `FileServer`; calls block, at most `silence_seconds` without a reply."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        reach: ListenConfig,
        run: str,
        log: Log,
        silence_seconds: float = SILENCE_SECONDS_MAX,
    ) -> None:
        self._endpoint = endpoint
        self._guard = reach.guard(log=log)
        self._run = run
        self._silence_seconds = silence_seconds
        self._n_calls = 0
        self._context: zmq.Context[auth.Socket] | None = None
        self._dealer: auth.Socket | None = None
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        return self._endpoint.endpoint

    def close(self) -> None:
        with self._lock:
            if self._context is not None:
                self._context.destroy(linger=0)
                self._context = self._dealer = None

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        n_bytes = sum(len(part) for part in parts)
        draft = secrets.token_hex(8)
        call = FileCall(do="write", name=name, draft=draft, n_bytes=n_bytes)
        for _ in range(N_ATTEMPTS_MAX):
            self._perform(
                (msgspec.structs.replace(call, offset=offset), chunk)
                for offset, chunk in _chunks(parts)
            )
            end = FileCall(do="finish", name=name, draft=draft)
            if self._ask(end).problem is None:
                return
        raise StorageError(
            f"cannot write {self.place}/{name}: the supervisor's host lost a part of it "
            f"{N_ATTEMPTS_MAX} times"
        )

    def size(self, name: str) -> int:
        return self._ask(FileCall(do="read", name=name)).n_bytes

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        def take(call: FileCall, _reply: FileReply, content: memoryview) -> None:
            if len(content) != call.n_bytes:
                raise EOFError(f"{call.n_bytes - len(content)} bytes are missing at its end")
            begin = call.offset - offset
            buffer[begin : begin + len(content)] = content

        end = offset + len(buffer)
        self._perform(
            (
                (FileCall(do="read", name=name, offset=at, n_bytes=min(CHUNK, end - at)), _EMPTY)
                for at in range(offset, end, CHUNK)
            ),
            take,
        )

    def names(self, role: str) -> list[str]:
        return list(self._ask(FileCall(do="names", name=role)).names)

    def delete(self, name: str) -> None:
        self._ask(FileCall(do="delete", name=name))

    def rename(self, name: str, to: str) -> None:
        raise LocalProtocolError(f"{name} to {to}: only the supervisor renames checkpoints")

    def _ask(self, call: FileCall) -> FileReply:
        replies: list[FileReply] = []
        self._perform(iter([(call, _EMPTY)]), lambda _call, reply, _: replies.append(reply))
        return replies[0]

    def _perform(
        self,
        calls: Iterator[_Call],
        take: Callable[[FileCall, FileReply, memoryview], None] = lambda *_: None,
    ) -> None:
        """Make calls, several at a time, and `take` the reply to each, in any order."""
        with self._lock:
            under_way: dict[int, _Call] = {}
            socket = self._socket()
            backoff = Backoff(first=REPEAT_SECONDS, longest=self._silence_seconds)
            heard_at = time.monotonic()
            backoff.start(heard_at)
            while True:
                while len(under_way) < N_CALLS_MAX and (new := next(calls, None)) is not None:
                    self._n_calls += 1
                    call = msgspec.structs.replace(new[0], run=self._run, number=self._n_calls)
                    under_way[call.number] = call, new[1]
                    _send(socket, *under_way[call.number])
                if not under_way:
                    return
                now = time.monotonic()
                due = min(backoff.due, heard_at + self._silence_seconds)
                if socket.poll(math.ceil(1000 * max(0.0, due - now))):
                    header, content = socket.recv_multipart(copy=False)
                    reply = _DECODE_REPLY.decode(header.buffer)
                    heard_at = time.monotonic()
                    backoff.due = heard_at + backoff.pause
                    if reply.number in under_way:  # else the call was repeated
                        call, _ = under_way.pop(reply.number)
                        self._check(call, reply)
                        take(call, reply, content.buffer)
                elif time.monotonic() >= heard_at + self._silence_seconds:
                    first = next(iter(under_way.values()))[0]
                    raise self._error(
                        first,
                        f"no answer for {self._silence_seconds:g} s: check that the job still runs "
                        "there, and that this port can be reached from here",
                    )
                elif time.monotonic() >= backoff.due:
                    backoff.repeat(time.monotonic())
                    socket = self._socket(fresh=True)
                    for again in under_way.values():
                        _send(socket, *again)

    def _socket(self, *, fresh: bool = False) -> auth.Socket:
        if self._context is None:
            self._context = zmq.Context()
        if fresh and self._dealer is not None:  # the other one may wait for a link that is cut
            self._dealer.close(0)
            self._dealer = None
        if self._dealer is None:
            dealer = self._dealer = self._context.socket(zmq.DEALER)
            dealer.linger = 0
            if not self._endpoint.is_local:
                dealer.heartbeat_ivl = dealer.connect_timeout = HEARTBEAT_MS
                dealer.heartbeat_timeout = dealer.heartbeat_ttl = SILENCE_MS_MAX
            self._guard.dial(dealer, SUPERVISOR, self._endpoint)
            dealer.connect(self._endpoint.endpoint)
        return self._dealer

    def _check(self, call: FileCall, reply: FileReply) -> None:
        if reply.problem == "missing file":
            raise FileNotFoundError(f"{self.place}/{call.name}")
        if reply.problem == "other":
            raise self._error(call, reply.error)

    def _error(self, call: FileCall, why: str) -> StorageError:
        doing = {"finish": "write", "names": "list"}.get(call.do, call.do)
        return StorageError(
            f"cannot {doing} {call.name} on the supervisor's host ({self.place}): {why}"
        )


def _send(socket: auth.Socket, call: FileCall, content: memoryview) -> None:
    socket.send(msgspec.json.encode(call), zmq.SNDMORE)
    socket.send(content, copy=False)


def _chunks(parts: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield offset and content of each chunk; only those that span parts are copied."""
    rest, offset = bytearray(), 0
    for part in parts:
        at = 0
        while at < len(part):
            n = min(CHUNK - len(rest), len(part) - at)
            piece, at = part[at : at + n], at + n
            if rest or n < CHUNK:
                rest += piece
                if len(rest) < CHUNK:
                    continue
                piece, rest = memoryview(rest), bytearray()
            yield offset, piece
            offset += len(piece)
    if rest:
        yield offset, memoryview(rest)
