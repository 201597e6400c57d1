"""Detours: real messages between processes of this host pass through this one.

    role A --> detour of B (a socket of this process) --> inbox of B

The supervisor tells everybody the socket of a detour in place of the inbox itself. So a
message can be dropped or doubled as a whole, and a link cut: nothing is read from it
for a while, and it goes on where it was, as over TCP when a cable is put back.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

import msgspec
import numpy as np

from distbelief.chaos.schedule import FaultEvent
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Join
from distbelief.protocol.codec import sender_of
from distbelief.roles.role import SUPERVISOR, Action, Event, Received, Role, Seconds
from distbelief.transport.address import Endpoint


# Turns: a thread that does the same again and again, until it is told to end.
#
# So hands are moved and messages passed on while the job runs. What fails in a turn ends
# them, and is raised where they are ended: it must not pass for a job that nobody broke.

AWAITED_SECONDS_MAX: Final = 10.0


def _nothing() -> None:
    pass


@final
class ThreadLoop:
    """Calls `turn`, over and over. A context manager: within it, a thread does so.

    Args:
        turn: What is done in each.
        every: Seconds between two of them; 0 if a turn waits by itself.
        at_end: What is done after the last, whatever has happened.
    """

    def __init__(
        self,
        turn: Callable[[], None],
        *,
        every: Seconds = 0.0,
        at_end: Callable[[], None] = _nothing,
    ) -> None:
        self._turn = turn
        self._every = every
        self._at_end = at_end
        self._n_taken = 0
        self._taken = threading.Condition()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        """Take turns from now on."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take no more; raise what went wrong in one, unless something worse has."""
        self._ended.set()
        self._thread.join()
        self._at_end()
        if self._error is not None and error is None:
            raise self._error

    def await_next(self) -> None:
        """Return after a turn that began later than this call.

        Raises:
            TimeoutError: there is none.
        """
        with self._taken:
            n = self._n_taken + 2  # one may be under way
            if not self._taken.wait_for(lambda: self._n_taken >= n, AWAITED_SECONDS_MAX):
                raise TimeoutError(f"no turn within {AWAITED_SECONDS_MAX:g} s")

    def _work(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 -- raised at the end
                self._error = error
                return
            with self._taken:
                self._n_taken += 1
                self._taken.notify_all()


# What ZeroMQ says on a connection, cut into messages: of its sender's side only.
#
#     greeting (64 bytes), command READY, then messages of one or more frames
#
#     frame    flags (1: more follow, 2: long, 4: command), length (1 or 8 bytes), content
#
# ZMTP 3.x as in ZeroMQ's RFC 23, not encrypted. Nothing of a message is looked at but
# where it ends, and who sends the first.

GREETING_BYTES: Final = 64
UNIT_BYTES_MAX: Final = 1 << 28
"""Of one message: what is longer is nothing that roles say."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_VERSION_AT = 10


@final
class NotZmtpError(Exception):
    """This is no connection of ZeroMQ's, or of one that is not understood."""


@final
class FrameSplitter:
    """Cuts what comes into pieces that are passed on as a whole.

    Attributes:
        name: Of who speaks, once that was said.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._buffer = bytearray()
        self._n_greeted = 0  # bytes of the greeting that have come
        self._frames_end = 0  # of the message that is not complete

    def feed(self, content: bytes) -> list[tuple[bytes, bool]]:
        """Return what is complete by now, and whether it is a message.

        Raises:
            NotZmtpError: this cannot be cut.
        """
        self._buffer += content
        if len(self._buffer) > UNIT_BYTES_MAX:
            raise NotZmtpError(f"a message of more than {UNIT_BYTES_MAX} bytes")
        pieces: list[tuple[bytes, bool]] = []
        if self._n_greeted < GREETING_BYTES and self._buffer:
            pieces.append((self._greeting(), False))
            if self._n_greeted < GREETING_BYTES:
                return pieces
        while (end := self._frame_end()) is not None:
            flags = self._buffer[self._frames_end]
            if flags & _COMMAND:
                pieces.append((self._command(end), False))
            elif flags & _MORE:
                self._frames_end = end
            else:
                pieces.append((self._message(end), True))
        return pieces

    def _greeting(self) -> bytes:
        """Return what of it has come: both sides speak in turns."""
        begin, buffer = self._n_greeted, self._buffer
        for at, least in ((0, 0xFF), (_VERSION_AT, 3)):
            if begin <= at < begin + len(buffer) and buffer[at - begin] < least:
                raise NotZmtpError("a greeting of another protocol than ZMTP 3")
        content = self._take(min(GREETING_BYTES - begin, len(buffer)))
        self._n_greeted += len(content)
        return content

    def _frame_end(self) -> int | None:
        """Return where the next frame ends, if it has come."""
        begin, buffer = self._frames_end, self._buffer
        if len(buffer) <= begin:
            return None
        n_length = 8 if buffer[begin] & _LONG else 1
        header = begin + 1 + n_length
        if len(buffer) < header:
            return None
        end = header + int.from_bytes(buffer[begin + 1 : header], "big")
        if end > UNIT_BYTES_MAX:
            raise NotZmtpError(f"a message of more than {UNIT_BYTES_MAX} bytes")
        return end if len(buffer) >= end else None

    def _command(self, end: int) -> bytes:
        if self._frames_end:
            raise NotZmtpError("a command in the middle of a message")
        return self._take(end)

    def _message(self, end: int) -> bytes:
        if self.name is None:
            begin = 9 if self._buffer[0] & _LONG else 2
            n = int.from_bytes(self._buffer[1:begin], "big")
            try:
                self.name = sender_of(bytes(self._buffer[begin : begin + n]))
            except RemoteProtocolError as error:
                raise NotZmtpError(str(error)) from None
        return self._take(end)

    def _take(self, end: int) -> bytes:
        taken = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._frames_end = 0
        return taken


READ_BYTES: Final = 1 << 16
WAITING_BYTES_MAX: Final = 1 << 22
"""Of a link whose receiver does not read: then nothing more is read from its sender."""

TURN_SECONDS: Final = 0.02
_STREAM: Final = 0xDE70


@final
@dataclass(eq=False, slots=True)
class _Link:
    """One connection, through this process."""

    near: socket.socket  # to who speaks
    far: socket.socket  # to the inbox
    receiver: str
    cutter: FrameSplitter = field(default_factory=FrameSplitter)
    out: bytearray = field(default_factory=bytearray)  # to `far`
    back: bytearray = field(default_factory=bytearray)  # to `near`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    blow: FaultEvent
    until: Seconds

    def hits(self, sender: str, receiver: str) -> bool:
        blow, ends = self.blow, (sender, receiver)
        return blow.role in ends and (blow.other is None or blow.other in ends)


@final
class TcpProxy:
    """Detours of all roles of a job, open while it takes `turns`.

    Args:
        seed: Of which messages are hit.
        clock: By which blows end.

    Attributes:
        turns: In each, what has come goes on; at their end all links break.
        n_dropped: Messages so far.
        n_doubled: Likewise.
    """

    def __init__(self, seed: int, *, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock = clock
        self.n_dropped = 0
        self.n_doubled = 0
        self._stream = np.random.default_rng([seed, _STREAM])
        self._known: dict[tuple[str, str], str] = {}  # by name and endpoint
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._selector = selectors.DefaultSelector()
        self._links: set[_Link] = set()
        self._new: list[tuple[socket.socket, str, str]] = []
        self.turns = ThreadLoop(self._turn, at_end=self._close_all)

    def through(self, name: str, endpoint: str) -> str:
        """Return where `name` is to be found from now on, in place of `endpoint`."""
        if (known := self._known.get((name, endpoint))) is not None:
            return known
        far = Path(Endpoint.parse(endpoint).path)
        near = far.with_name(f".detour.{len(self._known)}")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(near))
        listener.listen(128)
        listener.settimeout(0.0)
        with self._lock:
            self._new.append((listener, name, str(far)))
        detour = f"ipc://{near}"
        self._known[name, endpoint] = detour
        return detour

    def around(self, supervisor: Role) -> "ProxiedLauncher":
        """Return the supervisor as one who knows everybody by their detours."""
        return ProxiedLauncher(supervisor, self)

    def strike(self, blow: FaultEvent, *, now: Seconds, seconds: Seconds) -> None:
        """Let a blow act on messages for so long."""
        with self._lock:
            self._rules.append(_Rule(blow=blow, until=now + seconds))

    def _close_all(self) -> None:
        for link in list(self._links):
            self._close(link)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        for listener, _, _ in self._new:
            listener.close()

    # ---------------------------------------------------------------- in the thread

    def _turn(self) -> None:
        with self._lock:
            now = self._clock()
            self._rules = [rule for rule in self._rules if rule.until > now]
            rules = tuple(self._rules)
            new, self._new = self._new, []
        for listener, name, far in new:
            self._selector.register(listener, selectors.EVENT_READ, (listener, name, far))
        for link in list(self._links):
            self._watch(link, rules)
        for key, _ in self._selector.select(TURN_SECONDS):
            if isinstance(key.data, _Link):
                self._serve(key.data, key.fileobj, rules)
            else:
                self._accept(*key.data)

    def _accept(self, listener: socket.socket, name: str, far: str) -> None:
        with suppress(OSError):
            near, _ = listener.accept()
            onward = socket.socket(socket.AF_UNIX)
            onward.settimeout(1.0)
            try:
                onward.connect(far)
            except OSError:
                near.close()  # its process is gone
                onward.close()
                return
            for end in (near, onward):
                end.settimeout(0.0)
            link = _Link(near, onward, name)
            self._links.add(link)
            self._watch(link, ())

    def _watch(self, link: _Link, rules: Sequence[_Rule]) -> None:
        """Wait for what can go on: not for what is cut off, or stands in a jam."""
        cut = any(rule.blow.kind == "cut off" for rule in self._hitting(link, rules))
        reads = not cut and len(link.out) < WAITING_BYTES_MAX
        back = not cut and len(link.back) < WAITING_BYTES_MAX
        self._want(link, link.near, reads=reads, writes=bool(link.back))
        self._want(link, link.far, reads=back, writes=bool(link.out) and not cut)

    def _want(self, link: _Link, end: socket.socket, *, reads: bool, writes: bool) -> None:
        events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
        known = self._selector.get_map().get(end)
        if known is not None and known.events == events:
            return
        if known is not None:
            self._selector.unregister(end)
        if events:
            self._selector.register(end, events, link)

    @staticmethod
    def _hitting(link: _Link, rules: Sequence[_Rule]) -> list[_Rule]:
        sender = link.cutter.name or ""
        return [rule for rule in rules if rule.hits(sender, link.receiver)]

    def _serve(self, link: _Link, end: object, rules: Sequence[_Rule]) -> None:
        if link not in self._links:
            return  # closed in this turn
        try:
            if end is link.near:
                _write(link.near, link.back)
                for piece, is_message in link.cutter.feed(_read(link.near)):
                    link.out += piece * (self._copies(link, rules) if is_message else 1)
            else:
                link.back += _read(link.far)
            _write(link.far, link.out)
            _write(link.near, link.back)
        except (OSError, NotZmtpError):
            self._close(link)
            return
        self._watch(link, rules)

    def _copies(self, link: _Link, rules: Sequence[_Rule]) -> int:
        """Return how often a message goes on."""
        n = 1
        for rule in self._hitting(link, rules):
            if self._stream.random() < rule.blow.probability:
                if rule.blow.kind == "drop":
                    self.n_dropped += 1
                    return 0
                self.n_doubled += 1
                n += 1
        return n

    def _close(self, link: _Link) -> None:
        self._links.discard(link)
        for end in (link.near, link.far):
            with suppress(KeyError):
                self._selector.unregister(end)
            end.close()


@final
class ProxiedLauncher:
    """A supervisor to whom all members are where their detours are."""

    def __init__(self, role: Role, detour: TcpProxy) -> None:
        self._role = role
        self._detour = detour

    @property
    def accepts(self) -> frozenset[type]:
        return self._role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        if isinstance(event, Received) and isinstance(event.message, Join):
            event = _moved(event, event.message, self._detour)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, dict[str, float]]:
        """Return what it is doing."""
        word, figures = self._role.status()
        return word, dict(figures)


def _moved(event: Received, join: Join, detour: TcpProxy) -> Received:
    assert event.sender != SUPERVISOR
    endpoint = detour.through(event.sender, join.endpoint)
    return Received(
        sender=event.sender,
        incarnation=event.incarnation,
        message=msgspec.structs.replace(join, endpoint=endpoint),
    )


def _read(end: socket.socket) -> bytes:
    """Return what has come; raise OSError at the end of it."""
    try:
        content = end.recv(READ_BYTES)
    except BlockingIOError:
        return b""
    if not content:
        raise ConnectionResetError
    return content


def _write(end: socket.socket, content: bytearray) -> None:
    """Write what can be written."""
    while content:
        try:
            n = end.send(content[:READ_BYTES])
        except BlockingIOError:
            return
        del content[:n]
