"""The page over plain HTTP: what it sends, to whom, and what it refuses."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from distbelief.core.errors import JobError, StorageError
from distbelief.dashboard import server as server_module
from distbelief.dashboard.server import (
    PageServer,
    Watch,
    directories,
    listen,
    serve,
    token_for,
    url,
)
from distbelief.supervisor.view import Message, RoleView
from tests.distbelief.dashboard import made_runs
from tests.docs.pages import ROOT


PAGE = Path(server_module.__file__).parent / "page"
TOKEN = "a-token-of-some-length"


@contextmanager
def serving(page: PageServer) -> Iterator[PageServer]:
    ends = SimpleQueue[object]()
    page.watch.poll()
    thread = threading.Thread(target=serve, args=(page, ends))
    thread.start()
    try:
        yield page
    finally:
        ends.put(None)
        thread.join(30)
    assert not thread.is_alive()


@contextmanager
def served(*paths: Path, token: str = "") -> Iterator[PageServer]:
    """Serve these runs at a free port."""
    watch = Watch(directories([str(path) for path in paths]))
    with serving(PageServer(listen("127.0.0.1:0"), watch, token=token)) as page:
        yield page


def get(page: PageServer, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, reply.read().decode(), dict(reply.getheaders())
    connection.close()
    return found


@contextmanager
def stream(page: PageServer) -> Iterator[Iterator[tuple[str, object]]]:
    """Yield the events that the page gets."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.request("GET", "/events")
    reply = connection.getresponse()
    assert reply.headers["Content-Type"].startswith("text/event-stream")

    def events() -> Iterator[tuple[str, object]]:
        name = ""
        for line in reply:
            kind, _, text = line.decode().rstrip("\n").partition(": ")
            if kind == "event":
                name = text
            elif kind == "data":
                yield name, json.loads(text)

    yield events()
    connection.close()


def test_the_page_is_small_and_asks_nobody_else() -> None:
    files = [path for path in PAGE.iterdir() if path.suffix != ".uplot"]
    assert sum(path.stat().st_size for path in files) <= 100_000
    own = [path.read_text() for path in files if not path.name.startswith("uplot")]
    assert len(own) == 3
    for text in own:
        assert "http" not in text
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text
    assert "1.6.32" in (PAGE / "LICENSE.uplot").read_text()
    assert "v1.6.32" in (PAGE / "uplot.js").read_text()[:80]


def test_it_serves_the_page_and_the_figures(tmp_path: Path) -> None:
    with served(made_runs.make(tmp_path / "a"), made_runs.make(tmp_path / "b", n_points=3)) as page:
        for path, kind in (("/", "text/html"), ("/page.js", "text/javascript")):
            status, text, headers = get(page, path)
            assert status == 200
            assert headers["Content-Type"].startswith(kind)
            assert "script-src 'self'" in headers["Content-Security-Policy"]
            assert len(text) > 1000
        status, text, _ = get(page, "/runs/1/metrics.csv")
        lines = text.splitlines()
        assert lines[0].startswith("time,samples,step,loss")
        assert len(lines) == 4
        assert lines[3].split(",")[:3] == ["3.0", "1280", "40"]


@pytest.mark.parametrize(
    "path",
    [
        "/job.toml",
        "/../job.toml",
        "/runs/0/../../job.toml",
        "/runs/9/metrics.csv",
        "/runs/0/status.json",
        "/page/page.js",
        "//etc/passwd",
        "/%2e%2e/server.py",
        "/page.js/",
        "/runs/0/metrics.csv/..",
    ],
)
def test_it_serves_no_other_path(tmp_path: Path, path: str) -> None:
    with served(made_runs.make(tmp_path / "run")) as page:
        status, text, _ = get(page, path)
        assert status == 404
        assert text == "Not Found: there is no such page\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_is_read_only(tmp_path: Path, method: str) -> None:
    with served(made_runs.make(tmp_path / "run")) as page:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        connection.request(method, "/", body=b"x")
        assert connection.getresponse().status == 501
        connection.close()


def test_a_site_that_names_this_host_reads_nothing(tmp_path: Path) -> None:
    """A name of somebody else may resolve to 127.0.0.1 (DNS rebinding)."""
    with served(made_runs.make(tmp_path / "run")) as page:
        for host in ("evil.example", f"evil.example:{page.port}", ""):
            status, text, _ = get(page, "/metrics", Host=host)
            assert status == 421
            assert "distbelief_" not in text
        for host in ("localhost", f"127.0.0.1:{page.port}", "[::1]:80"):
            assert get(page, "/metrics", Host=host)[0] == 200


def test_a_token_is_asked_for_everywhere(tmp_path: Path) -> None:
    with served(made_runs.make(tmp_path / "run"), token=TOKEN) as page:
        for path in ("/", "/page.js", "/events", "/metrics", "/runs/0/metrics.csv", "/x"):
            assert get(page, path)[0] == 401
            assert get(page, f"{path}?token=wrong")[0] == 401
        assert get(page, "/metrics", Authorization="Bearer wrong")[0] == 401
        assert get(page, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, _, headers = get(page, f"/?token={TOKEN}")
        assert (status, headers["Location"]) == (303, "/")  # it stays in no address
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert get(page, "/", Cookie=f"a=b; {cookie.partition(';')[0]}")[0] == 200


def test_another_address_has_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with listen("0.0.0.0:0") as everywhere, listen("127.0.0.1:0") as here:
        assert len(made := token_for(everywhere, None)) >= 32
        assert made != token_for(everywhere, None)
        assert token_for(here, None) == ""
        for text in ("short", "x" * 200, "with a space in it", "é" * 20):
            file.write_text(text)
            with pytest.raises(JobError, match="token-file"):
                token_for(here, file)
        file.write_text(f"{TOKEN}\n")
        assert token_for(here, file) == token_for(everywhere, file) == TOKEN
        assert url(here, "t").startswith("http://127.0.0.1:")
        assert url(everywhere, "t").endswith("/?token=t")
    with pytest.raises(JobError, match=r"none: No such file or directory$"):
        token_for(here, tmp_path / "none")


def test_addresses() -> None:
    for address in ("7788", "here:", ":7788", "127.0.0.1:70000", "127.0.0.1:-1"):
        with pytest.raises(JobError, match="--listen"):
            listen(address)
    with listen("[::1]:0") as six:
        assert url(six).startswith("http://[::1]:")
    with listen(None) as first, listen(None) as second:
        assert first.getsockname() != second.getsockname()
        with pytest.raises(JobError, match="in use"):
            listen(f"127.0.0.1:{first.getsockname()[1]}")


def test_only_run_directories_are_shown(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(JobError):
            directories([str(path)])
    run = made_runs.make(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="regular file"):
        directories([str(run)])
    with pytest.raises(JobError, match="at most 16"):
        Watch(directories([str(made_runs.make(tmp_path / "other"))]) * 17)


def test_events_tell_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(server_module, "N_POINTS_MAX", 50)
    path = made_runs.make(tmp_path / "run", n_points=120)
    with made_runs.running(path), served(path) as page, stream(page) as events:
        seen: list[tuple[int, int]] = []
        for name, data in events:
            if name == "points":
                assert isinstance(data, dict)
                seen.append((data["from"], data["to"]))
                assert len(data["columns"]["loss"]) == data["to"] - data["from"]
            if seen and seen[-1][1] == 120:
                break
        assert seen == [(0, 50), (50, 100), (100, 120)]
        made_runs.append(path, range(120, 125))
        found = next(data for name, data in events if name == "points")
        assert isinstance(found, dict)
        assert (found["from"], found["to"]) == (120, 125)
        died = msgspec.structs.replace(
            made_runs.view(), roles=(RoleView(name="replica-0", state="restarting"),)
        )
        made_runs.write_status(path, died)
        for name, data in events:
            if name == "state" and isinstance(data, list) and len(data[0]["roles"]) == 1:
                assert data[0]["roles"][0]["trouble"]
                assert data[0]["messages"][1]["what"] == "role_restarted"
                break


def test_the_last_state_is_sent_before_the_end(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    page = PageServer(listen("127.0.0.1:0"), Watch(directories([str(path)])))
    ends = SimpleQueue[object]()
    thread = threading.Thread(target=serve, args=(page, ends))
    thread.start()
    with stream(page) as events:
        assert next(events)[0] == "points"
        made_runs.write_status(path, made_runs.view(), ended=True)
        ends.put(None)
        names = []
        state = ""
        for name, data in events:
            names.append(name)
            if name == "state" and isinstance(data, list):
                state = data[0]["state"]
    thread.join(30)
    assert names[-1] == "end"
    assert state == "ended"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = '</script><img src=x onerror=alert(1)>"\n\x1b[2J\u2028'
    shown = msgspec.structs.replace(
        made_runs.view(),
        roles=(RoleView(name=evil, state=evil, at=evil, counters={evil: 1.0}),),
        metrics={evil: 1.0, "=1+1": 2.0},
        messages=(Message(number=1, seconds=0.0, text=evil, what=evil),),
        stop_reason=evil,
    )
    path = made_runs.make(tmp_path / "run", n_points=0, shown=shown, name=evil)
    line = made_runs.measurement(20, metric_name=evil)
    line = msgspec.structs.replace(line, figures={"=1+1": 1.0})
    (path / "metrics.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    with served(path) as page:
        _, text, _ = get(page, "/metrics")
        for each in text.splitlines():
            assert each.startswith(("distbelief_", "# HELP", "# TYPE"))
        assert "\x1b" not in text
        assert 'alert(1)>\\"\\n?[2J' in text
        _, text, headers = get(page, "/runs/0/metrics.csv")
        assert headers["Content-Disposition"] == "attachment"
        assert "\x1b" not in text
        with stream(page) as events:
            assert {next(events)[0], next(events)[0]} == {"points", "state"}


def test_the_picture_of_a_plan_is_a_picture_of_this_run(tmp_path: Path) -> None:
    """A link in a directory of somebody else could lead to any file of its reader."""
    secret, path = tmp_path / "secret.png", made_runs.make(tmp_path / "run")
    picture = b"\x89PNG\r\n\x1a\n and what follows"
    secret.write_bytes(picture)
    with served(path) as page:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)

        def asked() -> tuple[int, bytes]:
            connection.request("GET", "/runs/0/plan.png")
            reply = connection.getresponse()
            return reply.status, reply.read()

        assert asked()[0] == 404
        (path / "plan.png").symlink_to(secret)
        assert asked()[0] == 404
        (path / "plan.png").unlink()
        (path / "plan.png").write_text("<script>alert(1)</script>")
        assert asked()[0] == 404
        (path / "plan.png").write_bytes(picture)
        assert asked() == (200, picture)
        connection.close()


def test_prometheus_gets_base_units(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    with made_runs.running(path), served(path) as page:
        _, text, headers = get(page, "/metrics")
    assert headers["Content-Type"] == "text/plain; version=0.0.4"
    lines = text.splitlines()
    assert f'distbelief_run_up{{run="{path}"}} 1' in lines
    assert f'distbelief_pushes_total{{run="{path}"}} 2400' in lines
    assert f'distbelief_received_bytes_total{{run="{path}"}} 120000000' in lines
    assert f'distbelief_role_restarts_total{{run="{path}",role="replica-1"}} 1' in lines
    assert f'distbelief_metric{{run="{path}",metric="accuracy"}} ' in text
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    shown = re.findall(r"distbelief_[a-z_]+", (ROOT / "docs" / "grafana.json").read_text())
    assert {*shown} <= {*families}
    for line in lines:
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert (kind == "counter") == name.endswith("_total")


def test_readers_that_take_no_bytes_disturb_nobody(tmp_path: Path) -> None:
    with served(made_runs.make(tmp_path / "run")) as page:
        idle = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(40)]
        assert get(page, "/metrics")[0] == 200
        for each in idle:
            each.close()


def test_a_run_that_is_named_twice_is_shown_once(tmp_path: Path) -> None:
    first, other = (str(made_runs.make(tmp_path / name, n_points=1)) for name in ("b", "a"))
    found = directories([first, other, f"{first}/", f"{other}/../b"])
    assert [str(run.path) for run in found] == [first, other]
