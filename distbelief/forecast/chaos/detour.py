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
from typing import Final, final

import msgspec
import numpy as np

from distbelief.forecast.chaos.schedule import Blow
from distbelief.forecast.chaos.turns import Turns
from distbelief.forecast.chaos.zmtp import Cutter, NoZmtpError
from distbelief.messages import Join
from distbelief.roles import SUPERVISOR, Action, Event, Received, Role, Seconds
from distbelief.transport.places import Place


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
    cutter: Cutter = field(default_factory=Cutter)
    out: bytearray = field(default_factory=bytearray)  # to `far`
    back: bytearray = field(default_factory=bytearray)  # to `near`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    blow: Blow
    until: Seconds

    def hits(self, sender: str, receiver: str) -> bool:
        blow, ends = self.blow, (sender, receiver)
        return blow.role in ends and (blow.other is None or blow.other in ends)


@final
class Detour:
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
        self.turns = Turns(self._turn, at_end=self._close_all)

    def through(self, name: str, endpoint: str) -> str:
        """Return where `name` is to be found from now on, in place of `endpoint`."""
        if (known := self._known.get((name, endpoint))) is not None:
            return known
        far = Path(Place.parse(endpoint).path)
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

    def around(self, supervisor: Role) -> "Detoured":
        """Return the supervisor as one who knows everybody by their detours."""
        return Detoured(supervisor, self)

    def strike(self, blow: Blow, *, now: Seconds, seconds: Seconds) -> None:
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
        except (OSError, NoZmtpError):
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
class Detoured:
    """A supervisor to whom all members are where their detours are."""

    def __init__(self, role: Role, detour: Detour) -> None:
        self._role = role
        self._detour = detour

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        if isinstance(event, Received) and isinstance(event.message, Join):
            event = _moved(event, event.message, self._detour)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, dict[str, float]]:
        """Return what it is doing."""
        word, figures = self._role.status()
        return word, dict(figures)


def _moved(event: Received, join: Join, detour: Detour) -> Received:
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
