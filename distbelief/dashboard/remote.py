"""The runs that another page shows, read over its stream of events.

One thread for each address follows the stream, and connects again once it breaks. What comes is
foreign: bounded, checked, shown as text. No redirection is followed and no proxy is used, so that
the token goes nowhere else.
"""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Final, final
from urllib.parse import parse_qs, urlsplit

import msgspec

from distbelief.core.errors import JobError
from distbelief.core.formatting import plain, plain_in
from distbelief.dashboard.reader import OVER, Curve, Points, RunState


AGAIN_SECONDS: Final = 3.0  # between two attempts to connect
SILENT_SECONDS_MAX: Final = 40.0  # without a state; a page sends one each second
LINE_BYTES_MAX: Final = 1 << 24
N_POINTS_MAX: Final = 1 << 20  # of a curve: 24 days at a line every 2 s
_TOKEN: Final = re.compile(r"[\w-]+", re.ASCII)
_BROKEN: Final = (OSError, HTTPException, ValueError, LookupError, RecursionError)


@final
class RemoteRun:
    """A run as another page has sent it."""

    def __init__(self, state: RunState) -> None:
        self.curve, self.state = Curve(), state


@final
class OtherPage:
    """A page at another address, as `distbelief dashboard` prints it there."""

    def __init__(self, url: str, *, token: str) -> None:
        address, _, query = url.partition("?")
        self._address, self.where = address.rstrip("/"), plain(address.rstrip("/"))
        token = parse_qs(query).get("token", [token])[0]
        if token and not _TOKEN.fullmatch(token):
            raise JobError(f"{self.where}: a token has letters, digits, - or _ only")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.runs: list[RemoteRun] = []

    def find(self) -> list[RemoteRun]:
        """Connect, and return the runs that it shows; JobError if that fails."""
        try:
            states = (self._states(data) for name, data in self._events() if name == b"state")
            self.runs = [RemoteRun(state) for state in next(filter(None, states))]
        except (*_BROKEN, StopIteration) as error:
            raise JobError(self._why(error)) from None
        return self.runs

    def follow(self, ended: threading.Event, changed: threading.Condition) -> None:
        """Take what comes, while holding `changed`, until `ended` is set."""
        while not ended.is_set():
            why = f"{self.where} has ended"
            try:
                for name, data in self._events():
                    with changed:
                        self._take(name, data)
            except _BROKEN as error:
                why = self._why(error)
            with changed:
                for run in self.runs:
                    run.state = _unreachable(run.state, f"{why}; trying again")
            ended.wait(AGAIN_SECONDS)

    def _events(self) -> Iterator[tuple[bytes, bytes]]:
        parts = urlsplit(self._address)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with closing(kind(parts.netloc, timeout=SILENT_SECONDS_MAX)) as connection:
            connection.connect()
            with closing(_Alarm(connection.sock)) as alarm:
                connection.request("GET", f"{parts.path}/events", headers=self._headers)
                with connection.getresponse() as reply:
                    yield from self._events_in(reply, alarm)
                if alarm.has_rung:
                    raise TimeoutError

    def _events_in(self, reply: HTTPResponse, alarm: "_Alarm") -> Iterator[tuple[bytes, bytes]]:
        if reply.status in {401, 421}:
            raise ConnectionRefusedError(0, "use the address it printed, with its token")
        if not reply.headers.get("Content-Type", "").startswith("text/event-stream"):
            raise ValueError(reply.status)
        name = b""
        while (line := reply.readline(LINE_BYTES_MAX)).endswith(b"\n"):
            key, _, value = line.rstrip().partition(b": ")
            name = value if key == b"event" else name
            if key == b"data":
                yield name, value
                if name == b"state":
                    alarm.set()
        if len(line) >= LINE_BYTES_MAX:
            raise ValueError(len(line))

    def _take(self, name: bytes, data: bytes) -> None:
        if name == b"points":
            points = msgspec.json.decode(data, type=Points)
            curve, n = self.runs[points.run].curve, points.end - points.start
            if points.start < curve.n_points:
                curve.forget()
            if not (points.start == curve.n_points <= points.end <= N_POINTS_MAX):
                raise ValueError(points.start)
            if points.run < 0 or {*map(len, points.columns.values())} != {n}:
                raise ValueError(points.run)
            curve.add(n, {plain(name): values for name, values in points.columns.items()})
        elif name == b"state" and (states := self._states(data)):
            for index, run in enumerate(self.runs):
                run.state = states[index]

    def _states(self, data: bytes) -> list[RunState]:
        sent = msgspec.convert(plain_in(msgspec.json.decode(data)), list[RunState])
        replace, where = msgspec.structs.replace, f" at {self.where}"
        return [replace(each, path=each.path[:300] + where, has_plan=False) for each in sent]

    def _why(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return f"{self.where} is no page of this version of distbelief, or shows other runs now"
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        return f"{self.where} cannot be read: {plain(str(why))}"


@final
class _Alarm:
    """Hangs up if no state comes for long: a server may send its bytes one by one, for ever."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.has_rung = connection, False
        self._timer = threading.Timer(0.0, self._ring)
        self.set()

    def set(self) -> None:
        self.close()
        self._timer = threading.Timer(SILENT_SECONDS_MAX, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        self.has_rung = True
        with suppress(OSError):  # it has just ended
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


def _unreachable(state: RunState, why: str) -> RunState:
    """Return the last state, without what was true at that moment only."""
    replace = msgspec.structs.replace
    if state.state in OVER:
        return replace(state, note=state.note or why)
    gone = {"rate": None, "heard": None, "bytes_in": None, "bytes_out": None, "trouble": False}
    roles = tuple(replace(role, state="not known", spent={}, **gone) for role in state.roles)
    return replace(state, state="unreachable", note=why, age=None, left="", why=None, roles=roles)
