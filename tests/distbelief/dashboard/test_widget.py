"""The notebook widget: which data of a run it gets, and what a real browser shows.

It needs anywidget; the second half playwright and a Chromium, too.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import distbelief
from distbelief.core.errors import JobError
from distbelief.dashboard import widget as widget_module
from tests.distbelief.dashboard import made_runs
from tests.distbelief.dashboard.test_browser import Browser, is_wide
from tests.docs.pages import ROOT


Widget = Any  # made of a class of anywidget, which may be missing


def shown(*paths: Path) -> Widget:
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    return distbelief.live(*paths)


def wait_for_state(widget: Widget, state: str) -> None:
    for _ in range(600):
        if [each["state"] for each in json.loads(widget.state)] == [state]:
            return
        time.sleep(0.05)
    raise AssertionError(f"not {state}: {widget.state}")


def test_a_run_that_has_not_begun_is_shown_once_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widget_module, "POLL_SECONDS", 0.01)
    widget = shown(tmp_path / "run")
    wait_for_state(widget, "stopped")
    path = made_runs.make(tmp_path / "run", n_points=2500, ended=True)
    wait_for_state(widget, "ended")
    (points,) = json.loads(widget.points)
    assert (points["from"], points["to"]) == (0, 834)
    assert len(points["columns"]["loss"]) == 834
    assert points["columns"]["time"][-1] == 2500.0  # the last one is never left out
    assert path.exists()


def test_a_widget_that_is_closed_reads_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widget_module, "POLL_SECONDS", 0.01)
    shown(made_runs.make(tmp_path / "run")).close()
    for thread in threading.enumerate():
        if thread.name == "live":
            thread.join(30)
            assert not thread.is_alive()


def test_mistakes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="name 1 to 16 run directories"):
        distbelief.live()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(JobError, match=r"distbelief\[notebook\]"):
        distbelief.live("runs/net")


@pytest.mark.slow
@pytest.mark.processes
def test_a_notebook_is_told_while_its_kernel_is_busy(tmp_path: Path) -> None:
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    nbclient: Any = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbformat: Any = pytest.importorskip("nbformat")
    made = f"made_runs.make(Path({str(tmp_path / 'run')!r}), ended=True)"
    cells = (
        f"import distbelief\ndistbelief.live({str(tmp_path / 'run')!r})",
        f"from tests.distbelief.dashboard import made_runs\nfrom pathlib import Path\n{made}",
        "import threading as t\n[each.join(60) for each in t.enumerate() if each.name == 'live']",
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(book, timeout=120).execute(cwd=str(ROOT))
    (widget,) = book.cells[0].outputs
    kept = book.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    model = widget["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert '"state":"ended"' in kept[model]["state"]["state"]
    assert json.loads(kept[model]["state"]["points"])[0]["to"] == 120


@pytest.mark.slow
@pytest.mark.processes
def test_in_a_browser_it_is_the_page(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    path = made_runs.make(tmp_path / "run", name=evil, ended=True)
    widget = shown(path)
    wait_for_state(widget, "ended")
    page = browser.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"a script ran: {dialog.message}"))
    page.on("request", lambda request: asked.append(request.url))
    page.set_content("<div id=cell></div>")
    page.evaluate(
        """async ([script, traits]) => {
            const file = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
            const model = { get: (name) => traits[name], on: (_, tell) => (window.tell = tell) };
            const widget = (await import(file)).default;
            window.traits = traits;
            window.widget = widget.render({ model, el: document.getElementById("cell") });
        }""",
        [widget._esm, {"points": widget.points, "state": widget.state}],
    )
    frame = page.frame_locator("iframe")
    frame.locator(".chart canvas").first.wait_for()
    assert frame.locator(".card .name").text_content() == evil
    assert frame.locator(".chip").text_content() == "ended"
    state = widget.state.replace('"state":"ended"', '"state":"failed"')
    page.evaluate("(state) => { traits.state = state; tell(); }", state)
    frame.locator(".chip", has_text="failed").wait_for()
    assert not frame.locator("footer").is_visible()
    assert not is_wide(page)
    assert errors == []
    assert [each for each in asked if not each.startswith(("about:", "blob:", "data:"))] == []
    page.close()
