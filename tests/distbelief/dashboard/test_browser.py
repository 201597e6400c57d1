"""The page in a real browser: live, narrow, dark, by keyboard, and what hostile text does not do.

It needs playwright and a Chromium: the one of playwright, or that of the system.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib import image

from distbelief.dashboard import remote, server as server_module
from distbelief.dashboard.remote import OtherPage
from distbelief.dashboard.server import PageServer, Watch, directories, listen
from distbelief.supervisor.view import Message, RoleView
from tests.distbelief.dashboard import made_runs
from tests.distbelief.dashboard.test_server import TOKEN, served, serving


pytestmark = [pytest.mark.slow, pytest.mark.processes]

Page = Any  # these are playwright's, which may be missing
Browser = Any


@contextmanager
def shown(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """Open a page; it may log no error, and ask nobody else for anything."""
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.extend([said.text] * (said.type == "error")))
    page.on("dialog", lambda dialog: errors.append(f"a script ran: {dialog.message}"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.wait_for_selector(".card .name:not(:empty)")
    yield page
    assert errors == []
    assert [each for each in asked if not each.startswith((url, "data:"))] == []
    page.close()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.05)


def at(server: PageServer) -> str:
    return f"http://127.0.0.1:{server.port}/"


def is_wide(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def test_a_role_that_dies_and_returns_is_shown(browser: Browser, tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    well = tuple(RoleView(name=f"replica-{n}", state="computing", rate=9.0) for n in range(2))
    ill = (well[0], RoleView(name="replica-1", state="restarting", restarts=1))
    with made_runs.running(path), served(path) as server, shown(browser, at(server)) as page:
        for roles, state in ((well, "computing"), (ill, "restarting"), (well, "computing")):
            view = msgspec.structs.replace(made_runs.view(), roles=roles)
            made_runs.write_status(path, view)
            page.wait_for_function(
                "text => document.querySelector('#roles tbody tr:nth-child(2) .state')"
                "?.textContent === text",
                arg=state,
            )
        made_runs.append(path, range(120, 150))
        page.wait_for_function("() => runs[0].n === 150")
        assert page.locator(".chart canvas").count() == 5
        assert page.locator("#events li").count() == 3


def test_hostile_text_runs_no_script(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>'\"</script><script>alert(2)</script>"
    view = msgspec.structs.replace(
        made_runs.view(),
        roles=(RoleView(name=f"replica-{evil}", state=evil, at=evil),),
        messages=(Message(number=1, seconds=20.0, text=evil, what="role_restarted"),),
        metric_name=evil,
        stop_reason=evil,
        figures={evil: 1.0},
    )
    path = made_runs.make(tmp_path / evil.replace("/", "_"), n_points=0, shown=view, name=evil)
    lines = [made_runs.measurement(n, metric_name=evil) for n in range(40)]
    lines = [msgspec.structs.replace(line, figures={evil: 1.0}) for line in lines]
    (path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in lines))
    with made_runs.running(path), served(path, path) as server, shown(browser, at(server)) as page:
        page.wait_for_function("() => document.querySelectorAll('.chart').length > 4")
        assert page.locator("img, main script").count() == 0
        assert page.locator(".card .name").first.text_content() == evil


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    path = made_runs.make(tmp_path / "run", shown=made_runs.view(120, 12, n_hosts=3))
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with (
        made_runs.running(path),
        served(path) as server,
        shown(browser, at(server), **options) as page,
    ):
        page.wait_for_selector(".chart canvas")
        assert not is_wide(page)
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        is_dark = sum(map(int, back[4:-1].split(","))) < 200
        assert is_dark == (scheme == "dark")


def test_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    with made_runs.running(path), served(path) as server, shown(browser, at(server)) as page:
        page.wait_for_selector(".chart canvas")
        reached = []
        for _ in range(16):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || 'chart'"))
        assert {"theme", "axis", "smooth", "log", "marks", "chart"} <= set(reached)
        page.locator(".chart").first.focus()
        page.keyboard.press("End")
        value = page.locator(".chart .u-legend .u-series:not(.raw) .u-value").nth(1)
        assert value.text_content().replace(".", "").isdigit()


def test_runs_side_by_side_and_ended(browser: Browser, tmp_path: Path) -> None:
    paths = [
        made_runs.make(tmp_path / name, n_points=30 + 20 * n, name=name, ended=True)
        for n, name in enumerate(("first", "second"))
    ]
    with served(*paths) as server, shown(browser, at(server)) as page:
        page.wait_for_selector(".chart canvas")
        assert page.locator(".card").count() == 2
        assert page.locator(".chip").all_text_contents() == ["ended", "ended"]
        assert "second, held out" in str(page.locator(".chart").first.text_content())
        page.locator(".choose").nth(1).click()
        page.wait_for_function(
            "() => document.getElementById('roles-of').textContent === 'of second'"
        )


def test_every_row_is_there_for_screen_readers_and_paper(browser: Browser, tmp_path: Path) -> None:
    """Rows out of sight had no cells in the browser's accessibility tree, and none on paper."""
    path = made_runs.make(tmp_path / "run", shown=made_runs.view(20, 58, n_hosts=3))
    with made_runs.running(path), served(path) as server, shown(browser, at(server)) as page:
        page.wait_for_function("() => document.querySelectorAll('#roles tbody tr').length === 60")
        session = page.context.new_cdp_session(page)
        session.send("Accessibility.enable")
        tree = session.send("Accessibility.getFullAXTree")["nodes"]
        found = [node["role"]["value"] for node in tree if not node["ignored"]]
        assert found.count("cell") >= 60 * 9
        assert found.count("columnheader") >= 10
        page.emulate_media(media="print")
        assert page.evaluate("document.querySelector('.scroll').scrollHeight") <= page.evaluate(
            "document.querySelector('.scroll').clientHeight"
        )
        assert page.locator("#roles tbody tr").last.bounding_box()["height"] > 10


def test_rows_out_of_sight_are_drawn_in_turn(browser: Browser, tmp_path: Path) -> None:
    view = made_runs.view(20, 58)
    paths = [made_runs.make(tmp_path / name, shown=view, name=name) for name in ("a", "b")]
    with (
        made_runs.running(paths[0]),
        made_runs.running(paths[1]),
        served(*paths) as server,
        shown(browser, at(server)) as page,
    ):
        last = "document.querySelector('#roles tbody tr:last-child td:nth-child(4)')?.textContent"
        page.wait_for_function(f"() => {last} === '240 samples/s'")
        for name, rate, path in (("a", 77.0, paths[0]), ("b", 88.0, paths[1])):
            faster = msgspec.structs.replace(
                view, roles=tuple(dataclasses.replace(role, rate=rate) for role in view.roles)
            )
            made_runs.write_status(path, faster, name=name)
        page.wait_for_function(f"() => {last} === '77 samples/s'")
        page.locator(".choose").nth(1).click()
        page.wait_for_function(f"() => {last} === '88 samples/s'")


def test_rows_that_come_into_sight_are_of_now(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Until the next state they showed what had been true up to eight states ago.
    view = made_runs.view(20, 58)
    path = made_runs.make(tmp_path / "a", shown=view)
    with made_runs.running(path), served(path) as server, shown(browser, at(server)) as page:
        last = "document.querySelector('#roles tbody tr:last-child td:nth-child(4)')?.textContent"
        page.wait_for_function(f"() => {last} === '240 samples/s'")
        monkeypatch.setattr(server_module, "POLL_SECONDS", 60.0)
        roles = tuple(dataclasses.replace(role, rate=77.0) for role in view.roles)
        made_runs.write_status(path, msgspec.structs.replace(view, roles=roles))
        server.watch.poll()
        page.locator("#roles tbody tr").last.scroll_into_view_if_needed()
        page.wait_for_function(f"() => {last} === '77 samples/s'", timeout=20_000)


def test_a_page_that_cannot_be_reached_is_told(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "AGAIN_SECONDS", 0.01)
    own, there = (made_runs.make(tmp_path / name, name=name) for name in ("own", "there"))
    with made_runs.running(own), made_runs.running(there):
        with served(there) as other:
            watch = Watch(directories([str(own)]), [OtherPage(at(other), token="")])
            page_server = PageServer(listen("127.0.0.1:0"), watch)
            around = serving(page_server)
            around.__enter__()
        with shown(browser, at(page_server)) as page:
            page.wait_for_selector(".chip.unreachable")
            note = page.locator(".note.bad", has_text="trying again").text_content()
            assert note.startswith(f"http://127.0.0.1:{other.port} cannot be read: Connection")
            assert page.locator(".chip").all_text_contents() == ["training", "unreachable"]
            page.locator(".choose").nth(1).click()
            page.wait_for_function(
                "() => document.querySelector('#roles tbody .state').textContent === 'not known'"
            )
        around.__exit__(None, None, None)


def test_the_address_with_the_token_opens_it(browser: Browser, tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    with served(path, token=TOKEN) as server:
        url, page = at(server), browser.new_page()
        reply = page.goto(url)
        assert reply.status == 401
        page.goto(f"{url}?token={TOKEN}")
        page.wait_for_selector(".chart canvas")
        assert page.url == url
        page.close()


def test_the_plan_is_a_picture(browser: Browser, tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run", ended=True)
    image.imsave(path / "plan.png", np.zeros((20, 30)))
    with served(path) as server, shown(browser, at(server)) as page:
        page.locator("#plan summary").click()
        page.wait_for_function("() => document.querySelector('#plan img')?.naturalWidth === 30")


def test_what_is_missing_is_said(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "job.toml").write_text("")
    with made_runs.running(path), served(path) as server, shown(browser, at(server)) as page:
        text = page.locator("main").text_content()
        assert "its roles are starting" in text
        assert page.locator("#no-roles").is_visible()
        assert page.locator("#no-events").is_visible()
        assert page.locator("#why").is_hidden()
