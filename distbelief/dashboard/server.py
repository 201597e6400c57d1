"""The server of the page: a few fixed paths, read-only, and one stream of events for each reader.

    /                  the page; /page.js, /page.css, /uplot.js, /uplot.css belong to it
    /events            server-sent events: `points` of the curves, and each second the `state`
    /metrics           the same figures for Prometheus
    /runs/N/metrics.csv, /runs/N/plan.png

One thread reads the run directories, each request has one of its own, and none of them is in the
process that trains.
"""

import csv
import io
import re
import secrets
import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files as resources
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar, Final, final
from urllib.parse import parse_qs, urlsplit

import msgspec
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.dashboard.prometheus import exposition
from distbelief.dashboard.reader import Points, RunReader, now
from distbelief.dashboard.remote import OtherPage, RemoteRun
from distbelief.job.run.directory import RunDirectory


HOST: Final = "127.0.0.1"
PORT: Final = 7788
POLL_SECONDS: Final = 1.0
FIRST_SECONDS: Final = 20.0  # for the first reading of the runs
ALIVE_SECONDS: Final = 15.0  # between two signs of life to a page
REQUEST_SECONDS: Final = 30.0  # for a reader that takes no bytes
N_POINTS_MAX: Final = 5000  # in one event, so that no page is busy for long
N_CONNECTIONS_MAX: Final = 64
N_RUNS_MAX: Final = 16

_Request = socket.socket | tuple[bytes, socket.socket]

_FILES: Final = {
    "/": ("index.html", "text/html"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("page", "uplot")},
    **{f"/{name}.css": (f"{name}.css", "text/css") for name in ("page", "uplot")},
}
_TOKEN: Final = re.compile(r"[\w-]{16,128}", re.ASCII)
_OF_RUN: Final = re.compile(r"/runs/([0-9]{1,2})/(metrics\.csv|plan\.png)")
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS: Final = {
    # Scripts and styles of this server only: none that a name or a message might hold.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@final
class Watch:
    """Reads the runs in a thread of its own; wakes those that wait for `changed`."""

    def __init__(self, runs: Sequence[RunDirectory], pages: Sequence[OtherPage] = ()) -> None:
        self._own, self._pages = [RunReader(run) for run in runs], pages
        self.readers: list[RunReader | RemoteRun] = [*self._own]
        self.readers += (run for page in pages for run in page.find())
        if len(self.readers) > N_RUNS_MAX:
            raise JobError(f"{len(self.readers)} runs: at most {N_RUNS_MAX} fit on one page")
        self.changed = threading.Condition()
        self.version = 0
        self.state = b"[]"
        self.is_over = False

    def poll(self) -> bool:
        """Read what is new; return whether more of a curve is waiting."""
        with self.changed:
            more = [reader.read_points() for reader in self._own]
            for reader in self._own:
                reader.read_status(now())
            self.state = msgspec.json.encode([reader.state for reader in self.readers])
            self.version += 1
            self.changed.notify_all()
        return any(more)

    def run(self, ended: threading.Event) -> None:
        """Read until `ended` is set, and once more then."""
        for page in self._pages:
            threading.Thread(target=page.follow, args=(ended, self.changed), daemon=True).start()
        while not ended.is_set():
            if not self.poll():
                ended.wait(POLL_SECONDS)
        self.poll()
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def metrics(self) -> str:
        """Return the figures for Prometheus, once the runs have been read."""
        with self.changed:
            self.changed.wait_for(lambda: self.version > 0, FIRST_SECONDS)
            return exposition(self._own)

    def points(self, index: int, epoch: int, start: int) -> tuple[int, int, bytes] | None:
        """Return epoch, end and JSON of a run's points from `start`; None if there are none."""
        curve = self.readers[index].curve
        if curve.epoch != epoch:
            start = 0
        elif start >= curve.n_points:
            return None
        end = min(curve.n_points, start + N_POINTS_MAX)
        columns = {name: values[start:end] for name, values in curve.columns.items()}
        event = Points(run=index, start=start, end=end, columns=columns)
        return curve.epoch, end, msgspec.json.encode(event)


@final
class PageServer(ThreadingHTTPServer):
    """Serves the page of some runs at `listening`; with a `token`, only to those who have it."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, watch: Watch, *, token: str = "") -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        host, self.port = listening.getsockname()[:2]
        self.is_local = is_loopback(host)
        self.watch = watch
        self.token = token
        self._free = threading.BoundedSemaphore(N_CONNECTIONS_MAX)

    @override
    def process_request_thread(self, request: _Request, client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    @override
    def handle_error(self, request: _Request, client_address: object) -> None:
        """A reader is gone: nobody needs to know."""


def is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def listen(address: str | None) -> socket.socket:
    """Return a socket that listens at "HOST:PORT"; by default on this host, at a free port.

    JobError if it cannot.
    """
    host, port = HOST, PORT
    if address is not None:
        host, _, digits = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (digits.isascii() and digits.isdigit() and int(digits) < 1 << 16):
            raise JobError(f"--listen {address}: write HOST:PORT, such as {HOST}:{PORT}")
        port = int(digits)
    try:
        return _bound(host, port)
    except OSError as error:
        if address is None:
            return _bound(host, 0)
        why = (error.strerror or str(error)).partition(" (while")[0]  # it names the address again
        raise JobError(f"--listen {address}: {why}") from None


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=N_CONNECTIONS_MAX)


def token_for(listening: socket.socket, file: Path | None) -> str:
    """Return the token that this file holds; without one a new token, or "" on a loopback address.

    JobError if the file holds none.
    """
    if file is None:
        return "" if is_loopback(listening.getsockname()[0]) else secrets.token_urlsafe(24)
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise JobError(f"--token-file {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        token = ""
    if not _TOKEN.fullmatch(token):
        raise JobError(f"--token-file {file}: write 16 to 128 letters, digits, - or _ into it")
    return token


def url(listening: socket.socket, token: str = "") -> str:
    host, port = listening.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104 -- compared, not bound
        host = socket.gethostname()
    where = f"[{host}]" if ":" in host else host
    return f"http://{where}:{port}/" + (f"?token={token}" if token else "")


def serve(server: PageServer, ends: SimpleQueue[object]) -> None:
    """Serve until something is put into `ends`, and the last state has been sent.

    A queue, because a signal's handler may put into it: a handler that sets an Event while the
    same thread waits for it can wait for ever for the Event's lock.
    """
    ended = threading.Event()
    reading = threading.Thread(target=server.watch.run, args=(ended,), daemon=True)
    serving = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    reading.start()
    serving.start()
    try:
        ends.get()
    finally:
        ended.set()
        reading.join(POLL_SECONDS * 2)
        server.shutdown()
        server.server_close()


@final
class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "distbelief"
    sys_version = ""
    timeout: ClassVar[float | None] = REQUEST_SECONDS

    @property
    def page(self) -> PageServer:
        assert isinstance(self.server, PageServer)
        return self.server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if not self._is_for_here():
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "use the address that was printed")
        elif self._has_given_token(parts.query):
            self.send_response(HTTPStatus.SEE_OTHER)
            cookie = f"{self._cookie}={self.page.token}; HttpOnly; SameSite=Strict; Path=/"
            self._end({"Set-Cookie": cookie, "Location": "/", "Content-Length": "0"})
        elif not self._may_read():
            self._refuse(HTTPStatus.UNAUTHORIZED, "open the address with the token")
        elif parts.path in _FILES:
            name, kind = _FILES[parts.path]
            content = resources("distbelief.dashboard").joinpath("page", name).read_bytes()
            self._send(content, kind)
        elif parts.path == "/metrics":
            self._send(self.page.watch.metrics().encode(), "text/plain; version=0.0.4")
        elif parts.path == "/events":
            self._stream()
        elif (found := _OF_RUN.fullmatch(parts.path)) and int(found[1]) < len(self._readers):
            self._send_of_run(int(found[1]), found[2])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_of_run(self, index: int, name: str) -> None:
        run = self._readers[index]
        if name == "metrics.csv":
            self._send(self._csv(index), "text/csv", use="attachment")
        elif isinstance(run, RunReader) and (picture := run.plan_picture()):
            self._send(picture, "image/png")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "the run has no plan")

    @property
    def _readers(self) -> Sequence[RunReader | RemoteRun]:
        return self.page.watch.readers

    @property
    def _cookie(self) -> str:
        return f"distbelief-{self.page.port}"  # cookies do not tell ports apart

    def _is_for_here(self) -> bool:
        """Return whether no other site has led a browser here by a name of its own."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return not self.page.is_local or host in _LOCAL

    def _has_given_token(self, query: str) -> bool:
        given = parse_qs(query).get("token", [""])[0]
        return bool(self.page.token) and self._is_token(given)

    def _may_read(self) -> bool:
        if not self.page.token:
            return True
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        cookies = self.headers.get("Cookie", "").split(";")
        held = [text.strip().partition("=") for text in cookies]
        return (kind == "Bearer" and self._is_token(given.strip())) or any(
            name == self._cookie and self._is_token(value) for name, _, value in held
        )

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.page.token.encode())

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(f"{status.phrase}: {why}\n".encode(), "text/plain", status=status)

    def _send(self, content: bytes, kind: str, status: int = 200, use: str = "inline") -> None:
        self.send_response(status)
        kind = kind if "version" in kind or "image" in kind else f"{kind}; charset=utf-8"
        headers = {"Content-Type": kind, "Content-Length": str(len(content))}
        self._end(headers | {"Content-Disposition": use})
        self.wfile.write(content)

    def _end(self, headers: dict[str, str]) -> None:
        for name, value in (_HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        """Send every point from the first, then what is new, until the reader or the run ends."""
        watch = self.page.watch
        self.send_response(HTTPStatus.OK)
        self._end({"Content-Type": "text/event-stream", "Connection": "close"})
        self.close_connection = True
        sent = [(-1, 0)] * len(watch.readers)
        version, is_over = -1, False
        while not is_over:
            with watch.changed:
                found = [watch.points(n, *at) for n, at in enumerate(sent)]
                if not any(found) and version == watch.version:
                    is_over = watch.is_over
                    if not is_over and not watch.changed.wait(ALIVE_SECONDS):
                        found = []
                state = watch.state if version != watch.version else None
                version = watch.version
            for n, points in enumerate(found):
                if points is not None:
                    sent[n] = points[0], points[1]
                    self._event("points", points[2])
            if state is not None:
                self._event("state", state)
            if not found:
                self.wfile.write(b": alive\n\n")
        self._event("end", b"{}")

    def _event(self, name: str, data: bytes) -> None:
        self.wfile.write(b"event: " + name.encode() + b"\ndata: " + data + b"\n\n")

    def _csv(self, index: int) -> bytes:
        text = io.StringIO(newline="")
        with self.page.watch.changed:
            columns = dict(self._readers[index].curve.columns)
            rows = [*zip(*columns.values(), strict=True)]
        writer = csv.writer(text)
        # A spreadsheet computes what begins so.
        writer.writerow(f"'{name}" if name[:1] in "=+-@\t\r" else name for name in columns)
        writer.writerows(rows)
        return text.getvalue().encode()

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: their addresses may hold the token."""


def directories(paths: Sequence[str]) -> list[RunDirectory]:
    """Open run directories for reading; JobError or StorageError if one is none."""
    found: dict[Path, RunDirectory] = {}
    for path in paths:  # each once: Prometheus takes no figures of two with the same labels
        found.setdefault(Path(path).resolve(), RunDirectory.open(path, write=False))
    return [*found.values()]
