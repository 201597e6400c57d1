"""Runs that a page at another address shows, beside those of this host."""

import csv
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.core.errors import JobError
from distbelief.dashboard import remote, server as server_module
from distbelief.dashboard.reader import RunState
from distbelief.dashboard.remote import OtherPage
from distbelief.dashboard.server import PageServer, Watch, directories, listen
from tests.distbelief.dashboard import made_runs
from tests.distbelief.dashboard.test_server import TOKEN, get, served, serving


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(remote, "AGAIN_SECONDS", 0.01)


def at(page: PageServer, token: str = "") -> str:
    return f"http://127.0.0.1:{page.port}/" + (f"?token={token}" if token else "")


@contextmanager
def served_with(*urls: str, own: Path) -> Iterator[PageServer]:
    """Serve a run of this host, and those of other pages."""
    watch = Watch(directories([str(own)]), [OtherPage(url, token="") for url in urls])
    with serving(PageServer(listen("127.0.0.1:0"), watch)) as page:
        yield page


def wait_for(page: PageServer, index: int, state: str) -> RunState:
    watch = page.watch
    with watch.changed:
        found = watch.changed.wait_for(lambda: watch.readers[index].state.state == state, 30.0)
        assert found, watch.readers[index].state
        return watch.readers[index].state


def rows_of(table: str) -> list[list[str] | list[float | None]]:
    names, *lines = csv.reader(table.splitlines())
    return [names, *([float(n) if n else None for n in line] for line in lines)]


def test_runs_of_another_page_are_shown_beside_those_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "N_POINTS_MAX", 50)
    own = made_runs.make(tmp_path / "own", n_points=5)
    there = [made_runs.make(tmp_path / name, name=name, n_points=120) for name in ("a", "b")]
    with (
        made_runs.running(there[0]),
        served(*there, token=TOKEN) as other,
        served_with(at(other, TOKEN), own=own) as page,
    ):
        watch = page.watch
        state = wait_for(page, 1, "running")
        assert state.path == f"{there[0]} at http://127.0.0.1:{other.port}"
        assert [each.state.name for each in watch.readers] == ["speech", "a", "b"]
        made_runs.append(there[0], range(120, 130))
        with watch.changed:
            assert watch.changed.wait_for(lambda: watch.readers[1].curve.n_points == 130, 30.0)
        header = {"Authorization": f"Bearer {TOKEN}"}
        here, as_there = (
            [line.split(",") for line in text.splitlines()]
            for text in (
                get(page, "/runs/1/metrics.csv")[1],
                get(other, "/runs/0/metrics.csv", **header)[1],
            )
        )
        assert here[0] == as_there[0]
        assert len(here) == 131
        numbers = [
            [[float(n or "nan") for n in row] for row in rows[1:]] for rows in (here, as_there)
        ]
        assert repr(numbers[0]) == repr(numbers[1])
        assert get(page, "/runs/1/plan.png")[0] == 404
        figures = get(page, "/metrics")[1]
        assert str(own) in figures
        assert str(there[0]) not in figures  # who wants them asks that page


def test_a_page_that_ends_is_found_again(tmp_path: Path) -> None:
    own, there = (made_runs.make(tmp_path / name, n_points=5) for name in ("own", "there"))
    listening = listen("127.0.0.1:0")
    port = listening.getsockname()[1]

    def again() -> PageServer:
        where = listening if listening.fileno() >= 0 else listen(f"127.0.0.1:{port}")
        return PageServer(where, Watch(directories([str(there)])))

    with made_runs.running(own), made_runs.running(there):
        first = serving(again())
        first.__enter__()
        with served_with(f"http://127.0.0.1:{port}", own=own) as page:
            assert wait_for(page, 1, "running").roles[2].rate is not None
            first.__exit__(None, None, None)
            lost = wait_for(page, 1, "unreachable")
            assert lost.note.startswith(f"http://127.0.0.1:{port} ")
            assert lost.note.endswith("; trying again")
            assert {(role.state, role.rate) for role in lost.roles} == {("not known", None)}
            assert wait_for(page, 0, "running").note == ""
            with serving(again()):
                assert wait_for(page, 1, "running").note == ""
                assert page.watch.readers[1].curve.n_points == 5


def test_a_run_that_has_ended_stays_so_when_its_page_ends(tmp_path: Path) -> None:
    own, there = (
        made_runs.make(tmp_path / name, n_points=5, ended=True) for name in ("own", "there")
    )
    with served(there) as other, served_with(at(other), own=own) as page:
        wait_for(page, 1, "ended")
        with page.watch.changed:
            other.watch.is_over = True  # what its end says to those who read
            with other.watch.changed:
                other.watch.changed.notify_all()
            assert page.watch.changed.wait_for(lambda: page.watch.readers[1].state.note != "", 30.0)
        assert page.watch.readers[1].state.state == "ended"
        assert "has ended" in page.watch.readers[1].state.note


@contextmanager
def answering(*lines: bytes) -> Iterator[int]:
    """Serve these bytes to every client; yield the port."""
    with listen("127.0.0.1:0") as listening:

        def answer() -> None:
            for _ in range(2):
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"\r\n".join(lines))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(30)


STREAM = (b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream", b"Connection: close", b"")


@pytest.mark.parametrize(
    "lines",
    [
        (b"hello",),
        (b"HTTP/1.1 200 OK", b"Content-Type: text/html", b"Content-Length: 2", b"", b"ok"),
        # Its token must go nowhere else.
        (b"HTTP/1.1 303 See Other", b"Location: http://127.0.0.1:1/events", b"", b""),
        (*STREAM, b"event: state\ndata: {}\n\n"),
        (*STREAM, b"event: state\ndata: [{}]\n\n"),
        (*STREAM, b"event: state\ndata: " + b"[" * 100_000 + b"\n\n"),
        (*STREAM, b"event: state\ndata: " + b"x" * 2000 + b"\n\n"),
    ],
)
def test_what_is_no_page_is_told(lines: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LINE_BYTES_MAX", 200_000 if len(lines[-1]) > 5000 else 1000)
    with answering(*lines) as port, pytest.raises(JobError, match=f":{port} is no page of this"):
        OtherPage(f"http://127.0.0.1:{port}", token=TOKEN).find()


def test_points_that_do_not_fit_are_taken_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    page = OtherPage("http://there", token="")
    page.runs = [remote.RemoteRun(RunState(name="a", path="a"))]
    for text in (
        b'{"run":0,"from":5,"to":9,"columns":{}}',
        b'{"run":0,"from":0,"to":2,"columns":{"loss":[1]}}',
        b'{"run":0,"from":0,"to":-2,"columns":{"loss":[1]}}',
        b'{"run":0,"from":0,"to":1000000000,"columns":{}}',
        b'{"run":0,"from":0,"to":-5,"columns":{}}',
        b'{"run":7,"from":0,"to":0,"columns":{}}',
        b'{"run":-1,"from":0,"to":1,"columns":{"loss":[1]}}',
        b'{"run":0,"from":0,"to":1,"columns":{"loss":["x"]}}',
    ):
        with pytest.raises(remote._BROKEN):
            page._take(b"points", text)
        assert page.runs[0].curve.n_points == 0
    monkeypatch.setattr(remote, "N_POINTS_MAX", 1)
    with pytest.raises(ValueError, match="0"):
        page._take(b"points", b'{"run":0,"from":0,"to":2,"columns":{"loss":[1,2]}}')
    many = ",".join(f'"metric:\x1b{n}":[1]'.replace("\x1b", "\\u001b") for n in range(99))
    page._take(b"points", f'{{"run":0,"from":0,"to":1,"columns":{{{many}}}}}'.encode())
    assert len(page.runs[0].curve.columns) == 64
    assert not any("\x1b" in name for name in page.runs[0].curve.columns)


def test_a_server_that_never_ends_its_line_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each byte of it came in time, so that the command waited for ever.
    monkeypatch.setattr(remote, "SILENT_SECONDS_MAX", 0.1)
    with listen("127.0.0.1:0") as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(b"\r\n".join(STREAM) + b"\r\n")
                while True:
                    connection.sendall(b":\n")
                    time.sleep(0.01)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(JobError, match="cannot be read: no answer"):
            OtherPage(url, token="").find()
        thread.join(30)
        assert not thread.is_alive()


def test_mistakes_are_told(tmp_path: Path) -> None:
    run = str(made_runs.make(tmp_path / "run"))

    def said(*names: str) -> str:
        done = CliRunner().invoke(app, ["dashboard", *names, "--listen", "127.0.0.1:0"])
        assert done.exit_code == 2
        assert "\x1b" not in done.output
        return " ".join(done.output.split())

    with listen("127.0.0.1:0") as closed:
        port = closed.getsockname()[1]
    assert f"http://127.0.0.1:{port} cannot be read: Connection refused" in said(
        run, f"http://127.0.0.1:{port}/?token={TOKEN}"
    )
    with served(Path(run), token=TOKEN) as other:
        for url in (at(other), at(other, "another-token-than-that")):
            assert "use the address it printed, with its token" in said(run, url)
        name = f"http://[::ffff:127.0.0.1]:{other.port}/"
        assert "cannot be read" in said(run, name) or "printed" in said(run, name)
    for token in ("%0aX: y", "\u043a\u043b\u044e\u0447"):
        assert "a token has letters" in said(run, f"http://127.0.0.1:{port}/?token={token}")
    assert "cannot be read" in said(run, f"HTTP://127.0.0.1:{port}")
    for url in ("http://", "http://[::1", "http://a\x1b[2Jb", "http://127.0.0.1:x/"):
        assert "Traceback" not in said(run, url)


def test_the_file_of_a_token_opens_addresses_without_one(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    with served(path, token=TOKEN) as other:
        assert len(OtherPage(at(other), token=TOKEN).find()) == 1
        with pytest.raises(JobError, match="with its token"):
            OtherPage(at(other, "the-one-in-the-address"), token=TOKEN).find()
