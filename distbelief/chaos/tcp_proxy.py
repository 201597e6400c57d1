"""A proxy for messages between processes of this host: drops, duplicates and delays them.

    role A --> proxy socket of B (in this process) --> socket of B

The supervisor gives all roles the proxy sockets instead of the real ones. Whole messages are
dropped or duplicated. A cut link is not read for a while, then continues, as with TCP.
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


AWAITED_SECONDS_MAX: Final = 10.0


def _nothing() -> None:
    pass


@final
class ThreadLoop:
    """A thread that calls `turn` repeatedly; a context manager.

    An exception in `turn` ends the thread, and is raised at the end of the `with` block.

    Args:
        turn: Called in each iteration.
        every: Seconds between two calls; 0 if `turn` waits by itself.
        at_end: Called once at the end, in any case.
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
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._at_end()
        if self._error is not None and error is None:
            raise self._error

    def await_next(self) -> None:
        """Wait for a turn that began after this call."""
        with self._taken:
            n = self._n_taken + 2  # one may be in progress
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


# ZMTP 3.x (ZeroMQ's RFC 23), unencrypted:
#
#     greeting (64 bytes), command READY, then messages of one or more frames
#     frame    flags (1: more follow, 2: long, 4: command), length (1 or 8 bytes), content

GREETING_BYTES: Final = 64
UNIT_BYTES_MAX: Final = 1 << 28  # of one message; roles send no longer ones

_MORE, _LONG, _COMMAND = 1, 2, 4
_VERSION_AT = 10


@final
class NotZmtpError(Exception):
    """The connection does not use ZMTP 3."""


@final
class FrameSplitter:
    """Splits the bytes of one direction of a connection into whole messages."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the sender, from its first message
        self._buffer = bytearray()
        self._n_greeted = 0  # bytes of the greeting received
        self._frames_end = 0  # in the incomplete message

    def feed(self, content: bytes) -> list[tuple[bytes, bool]]:
        """Return the complete pieces, each with True if it is a message."""
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
        # A part of a greeting is passed on at once: each side waits for the other's part.
        begin, buffer = self._n_greeted, self._buffer
        for at, least in ((0, 0xFF), (_VERSION_AT, 3)):
            if begin <= at < begin + len(buffer) and buffer[at - begin] < least:
                raise NotZmtpError("a greeting of another protocol than ZMTP 3")
        content = self._take(min(GREETING_BYTES - begin, len(buffer)))
        self._n_greeted += len(content)
        return content

    def _frame_end(self) -> int | None:
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
WAITING_BYTES_MAX: Final = 1 << 22  # for a slow receiver; then the sender is not read

TURN_SECONDS: Final = 0.02
_STREAM: Final = 0xDE70


@final
@dataclass(eq=False, slots=True)
class _Link:
    near: socket.socket  # to the sender
    far: socket.socket  # to the receiver
    receiver: str
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    out: bytearray = field(default_factory=bytearray)  # to `far`
    back: bytearray = field(default_factory=bytearray)  # to `near`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    event: FaultEvent
    until: Seconds

    def hits(self, sender: str, receiver: str) -> bool:
        event, ends = self.event, (sender, receiver)
        return event.role in ends and (event.other is None or event.other in ends)


@final
class TcpProxy:
    """The proxy sockets of all roles of a job, open while its thread loop (`turns`) runs.

    Args:
        seed: Seed for the choice of affected messages.
        clock: Clock for the end of faults.
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
        """Return the proxy endpoint for `name`, in place of `endpoint`."""
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
        proxy = f"ipc://{near}"
        self._known[name, endpoint] = proxy
        return proxy

    def around(self, supervisor: Role) -> "ProxiedLauncher":
        return ProxiedLauncher(supervisor, self)

    def inject(self, event: FaultEvent, *, now: Seconds, seconds: Seconds) -> None:
        """Apply a fault event to messages for `seconds`."""
        with self._lock:
            self._rules.append(_Rule(event=event, until=now + seconds))

    def _close_all(self) -> None:
        for link in list(self._links):
            self._close(link)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        for listener, _, _ in self._new:
            listener.close()

    # --- in the thread ---

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
                near.close()  # the process has ended
                onward.close()
                return
            for end in (near, onward):
                end.settimeout(0.0)
            link = _Link(near, onward, name)
            self._links.add(link)
            self._watch(link, ())

    def _watch(self, link: _Link, rules: Sequence[_Rule]) -> None:
        # Do not read from a link that is cut off, or whose buffer is full.
        cut = any(rule.event.kind == "cut off" for rule in self._hitting(link, rules))
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
        sender = link.splitter.name or ""
        return [rule for rule in rules if rule.hits(sender, link.receiver)]

    def _serve(self, link: _Link, end: object, rules: Sequence[_Rule]) -> None:
        if link not in self._links:
            return  # closed in this turn
        try:
            if end is link.near:
                _write(link.near, link.back)
                for piece, is_message in link.splitter.feed(_read(link.near)):
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
        n = 1
        for rule in self._hitting(link, rules):
            if self._stream.random() < rule.event.probability:
                if rule.event.kind == "drop":
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
    """Wraps a supervisor, and replaces the endpoints of members by proxy endpoints."""

    def __init__(self, role: Role, proxy: TcpProxy) -> None:
        self._role = role
        self._proxy = proxy

    @property
    def accepts(self) -> frozenset[type]:
        return self._role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        if isinstance(event, Received) and isinstance(event.message, Join):
            event = _moved(event, event.message, self._proxy)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, dict[str, float]]:
        state, metrics = self._role.status()
        return state, dict(metrics)


def _moved(event: Received, join: Join, proxy: TcpProxy) -> Received:
    assert event.sender != SUPERVISOR
    endpoint = proxy.through(event.sender, join.endpoint)
    return Received(
        sender=event.sender,
        incarnation=event.incarnation,
        message=msgspec.structs.replace(join, endpoint=endpoint),
    )


def _read(end: socket.socket) -> bytes:
    try:
        content = end.recv(READ_BYTES)
    except BlockingIOError:
        return b""
    if not content:
        raise ConnectionResetError
    return content


def _write(end: socket.socket, content: bytearray) -> None:
    while content:
        try:
            n = end.send(content[:READ_BYTES])
        except BlockingIOError:
            return
        del content[:n]
