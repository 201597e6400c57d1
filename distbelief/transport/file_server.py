"""The checkpoints and initial values of the supervisor's host, for roles on other hosts.

    RemoteFolder (in a role's process)          FileServer (a thread of the supervisor's process)
      | FileCall ------------------------------>  |   up to `N_CALLS_MAX` under way
      | <----------------------------- FileReply  |

A call may be repeated, after a cut link or a restart of the server: it has no second effect. Pieces
of a file go to their offsets in a draft, which "finish" syncs and renames. The server has the keys
of the supervisor: who may not connect there may not connect here.
"""

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self, final

import msgspec
import zmq

from distbelief.core import files
from distbelief.core.errors import LocalProtocolError, StorageError, TransportError
from distbelief.core.folders import FILE, NAME, LocalFolder
from distbelief.core.reliable import Backoff
from distbelief.protocol.fields import Count, Name, Text
from distbelief.protocol.role import SUPERVISOR
from distbelief.transport import authenticator as auth
from distbelief.transport.address import Endpoint, in_url, is_six
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.zmq_transport import ZAP_ENDPOINT, Log, answer, cannot_bind


INITIAL: Final = "initial.safetensors"  # the name of the file of initial values
CHUNK: Final = 1 << 19  # bytes of a file in one message, at most
N_CALLS_MAX: Final = 8  # of one client under way: 4 MiB
REPEAT_SECONDS: Final = 5.0  # without any reply, until the calls under way are repeated
SILENCE_SECONDS_MAX: Final = 60.0  # of the server, a slow sync to its disk included
DRAFT_SECONDS_MAX: Final = 300.0  # that an unfinished file is kept; its writer gives up sooner
N_ATTEMPTS_MAX: Final = 3  # at a file whose draft is lost
_N_NAMES_MAX: Final = 4096
_BYTES_MAX: Final = 1 << 42  # of a file


class FileCall(msgspec.Struct, frozen=True, kw_only=True):
    run: Name = ""
    number: Count = 0  # the reply repeats it
    do: Literal["read", "write", "finish", "names", "delete"]
    name: Annotated[str, msgspec.Meta(max_length=300)]  # ROLE/LABEL.safetensors; ROLE for "names"
    draft: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")] = "0" * 16  # of one writer
    offset: Annotated[int, msgspec.Meta(ge=0, le=_BYTES_MAX)] = 0
    n_bytes: Count = 0  # wanted; or of the whole file, to finish it


class FileReply(msgspec.Struct, frozen=True, kw_only=True):
    number: Count = 0
    is_missing: bool = False  # the file
    error: Text = ""
    n_bytes: Count = 0  # of the whole file; 0 for a draft that has not all of it
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=_N_NAMES_MAX)] = ()


_Call = tuple[FileCall, memoryview]
_EMPTY: Final = memoryview(b"")


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
        self._bind = f"tcp://{in_url(reach.host)}:{reach.port or '*'}"
        self._run = run
        self._log = log
        self._guard = reach.guard(log=log)
        self._curve = self._guard if isinstance(self._guard, auth.CurveAuth) else None
        self._finished: dict[str, str] = {}  # file -> its last draft
        self._n_refused = 0
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._context = zmq.Context[auth.Socket]()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.ipv6 = "[" in self._bind
        self._router.maxmsgsize = 2 * CHUNK
        self._router.rcvhwm = self._router.sndhwm = 2 * N_CALLS_MAX  # for each client
        try:
            key = self._guard.listen(self._router, self._bind)
            self._router.bind(self._bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(cannot_bind(self._bind, error)) from None
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
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._zap, self._ends[0]):
            poller.register(source, zmq.POLLIN)
        while self._ends[0] not in (ready := dict(poller.poll(1000))):
            if self._zap in ready:
                request = self._zap.recv_multipart()
                verdict = self._guard.judge(request)
                self._zap.send_multipart(answer(request, verdict))
                if not verdict.admitted:
                    self._log_rarely(verdict.remark)
            if self._curve is not None:
                self._curve.refresh()
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
        source = None if self._curve is None else self._curve.source(part)
        if self._curve is not None and source is None:
            return
        try:
            sender, header, content = (frame.buffer for frame in frames)
            call = msgspec.json.decode(header, type=FileCall)
        except (ValueError, msgspec.MsgspecError) as error:
            self._log_rarely(f"an invalid call: {error!s:.200}")
            if self._curve is not None and source is not None:
                self._curve.offended(source, "it sent an invalid call")
            return
        found = _EMPTY
        try:
            reply, found = self._perform(call, content)
        except FileNotFoundError:
            reply = FileReply(is_missing=True)
        except (OSError, EOFError, StorageError) as error:
            reply = FileReply(error=str(error))
        answer = msgspec.json.encode(msgspec.structs.replace(reply, number=call.number))
        with suppress(zmq.ZMQError):  # the client is gone, or does not read: it asks again
            self._router.send_multipart([bytes(sender), answer, found], zmq.DONTWAIT, copy=False)

    def _perform(self, call: FileCall, content: memoryview) -> tuple[FileReply, memoryview]:
        folder, name = self._folder, call.name
        if call.run != self._run:
            raise StorageError("this port belongs to another run by now")
        if call.do == "read" and name == INITIAL and self._initial is not None:
            folder, name = LocalFolder(self._initial.parent), self._initial.name
        elif (NAME if call.do == "names" else FILE).fullmatch(name) is None:
            raise StorageError(f"{name!r} is not the name of a checkpoint")
        match call.do:
            case "read":
                size = folder.size(name)
                part = memoryview(bytearray(max(0, min(call.n_bytes, CHUNK, size - call.offset))))
                folder.read(name, call.offset, part)
                return FileReply(n_bytes=size), part
            case "names":
                self._remove_old_drafts(folder.path / name)
                names = [each for each in folder.names(name) if FILE.fullmatch(f"{name}/{each}")]
                return FileReply(names=tuple(names[:_N_NAMES_MAX])), _EMPTY
            case "delete":
                folder.delete(name)
            case "write":
                self._write(call, content)
            case "finish":
                return FileReply(n_bytes=self._finish(call)), _EMPTY
        return FileReply(), _EMPTY

    def _draft(self, call: FileCall) -> Path:
        return (self._folder.path / call.name).parent / f".{call.draft}{files.TEMPORARY}"

    def _write(self, call: FileCall, content: memoryview) -> None:
        if self._finished.get(call.name) == call.draft:
            return  # a late repetition
        path, draft = self._folder.prepared(call.name), self._draft(call)
        with files.explaining(path, doing="write"):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                    file.seek(call.offset)
                    file.write(content)
            except OSError:
                draft.unlink(missing_ok=True)
                raise

    def _finish(self, call: FileCall) -> int:
        path, draft = self._folder.path / call.name, self._draft(call)
        if self._finished.get(call.name) == call.draft:
            return call.n_bytes
        if not draft.exists() or draft.stat().st_size != call.n_bytes:
            return 0
        with files.explaining(path, doing="write"):
            files.force(draft)
            draft.replace(path)
            files.force(path.parent)
        if len(self._finished) >= _N_NAMES_MAX:
            del self._finished[next(iter(self._finished))]
        self._finished[call.name] = call.draft
        return call.n_bytes

    def _remove_old_drafts(self, folder: Path) -> None:
        for draft in folder.glob(f".*{files.TEMPORARY}"):
            with suppress(OSError):
                age = time.time() - draft.stat().st_mtime  # noqa: TID251 -- a file's time
                if draft.is_file() and age > DRAFT_SECONDS_MAX:
                    draft.unlink()

    def _log_rarely(self, text: str) -> None:
        self._n_refused += 1
        if self._n_refused & (self._n_refused - 1) == 0:
            self._log("warning", f"file server: {text} (so far {self._n_refused})")


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
        self.place = endpoint.endpoint
        self._endpoint = endpoint
        self._guard = reach.guard(log=log)
        self._run = run
        self._silence_seconds = silence_seconds
        self._n_calls = 0
        self._context = zmq.Context[auth.Socket]()
        self._dealer: auth.Socket | None = None
        self._lock = threading.Lock()  # the dealer's

    def close(self) -> None:
        with self._lock:
            self._context.destroy(linger=0)

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        call = FileCall(do="write", name=name, draft=secrets.token_hex(8))
        n_bytes = sum(len(part) for part in parts)
        end = msgspec.structs.replace(call, do="finish", n_bytes=n_bytes)
        for _ in range(N_ATTEMPTS_MAX):
            self._perform(_pieces(call, parts))
            if self._ask(end).n_bytes == n_bytes:
                return
        raise self._error(end, f"its parts were lost there {N_ATTEMPTS_MAX} times")

    def size(self, name: str) -> int:
        return self._ask(FileCall(do="read", name=name)).n_bytes

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        def take(call: FileCall, _reply: FileReply, content: memoryview) -> None:
            if len(content) != call.n_bytes:
                raise EOFError(f"{call.n_bytes - len(content)} bytes are missing at its end")
            buffer[call.offset - offset :][: len(content)] = content

        end = offset + len(buffer)
        calls = (
            FileCall(do="read", name=name, offset=at, n_bytes=min(CHUNK, end - at))
            for at in range(offset, end, CHUNK)
        )
        self._perform(((call, _EMPTY) for call in calls), take)

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
            socket = self._dealer or self._dial()
            backoff = Backoff(first=REPEAT_SECONDS, longest=self._silence_seconds)
            heard_at = time.monotonic()
            backoff.start(heard_at)
            while True:
                while len(under_way) < N_CALLS_MAX and (new := next(calls, None)) is not None:
                    self._n_calls += 1
                    call = msgspec.structs.replace(new[0], run=self._run, number=self._n_calls)
                    under_way[call.number] = call, new[1]
                    _send(socket, call, new[1])
                if not under_way:
                    return
                gives_up_at = heard_at + self._silence_seconds
                wait = min(backoff.due, gives_up_at) - time.monotonic()
                if socket.poll(math.ceil(1000 * max(0.0, wait))):
                    header, content = socket.recv_multipart(copy=False)
                    reply = msgspec.json.decode(header.buffer, type=FileReply)
                    heard_at = time.monotonic()
                    backoff.due = heard_at + backoff.pause
                    if reply.number in under_way:  # else the call was repeated
                        call, _ = under_way.pop(reply.number)
                        self._check(call, reply)
                        take(call, reply, content.buffer)
                elif (now := time.monotonic()) >= gives_up_at:
                    socket.close(0)
                    self._dealer = None
                    raise self._error(
                        next(iter(under_way.values()))[0],
                        f"no answer for {self._silence_seconds:g} s: check that the job still runs "
                        "there, and that this port can be reached from here",
                    )
                elif backoff.again(now):
                    socket.close(0)  # it may wait for a link that is cut
                    socket = self._dial()
                    for again in under_way.values():
                        _send(socket, *again)

    def _dial(self) -> auth.Socket:
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        dealer.ipv6 = is_six(self._endpoint.host)
        self._guard.dial(dealer, SUPERVISOR, self._endpoint)
        dealer.connect(self._endpoint.endpoint)
        return dealer

    def _check(self, call: FileCall, reply: FileReply) -> None:
        if reply.is_missing:
            raise FileNotFoundError(f"{self.place}/{call.name}")
        if reply.error:
            raise self._error(call, reply.error)

    def _error(self, call: FileCall, why: str) -> StorageError:
        doing = {"finish": "write", "names": "list"}.get(call.do, call.do)
        place = f"on the supervisor's host ({self.place})"
        return StorageError(f"cannot {doing} {call.name} {place}: {why}")


def _send(socket: auth.Socket, call: FileCall, content: memoryview) -> None:
    with suppress(zmq.Again):  # the server rejected this side: it is asked again later
        socket.send(msgspec.json.encode(call), zmq.SNDMORE | zmq.DONTWAIT)
        socket.send(content, copy=False)


def _pieces(call: FileCall, parts: Sequence[memoryview]) -> Iterator[_Call]:
    offset = 0
    for part in parts:
        for at in range(0, len(part), CHUNK):
            piece = part[at : at + CHUNK]
            yield msgspec.structs.replace(call, offset=offset), piece
            offset += len(piece)
