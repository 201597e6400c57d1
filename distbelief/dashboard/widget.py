"""The page in a notebook: a widget of anywidget that shows runs live, by the page's own files.

A thread reads the runs and sets two traits, which need no answer of a kernel that is busy training,
and which the notebook keeps. The page is in a frame, to which its script hands them.
"""

import importlib
import json
import os
import threading
from importlib.resources import files as resources
from pathlib import Path
from typing import Final

import msgspec

from distbelief.core.errors import JobError
from distbelief.dashboard.reader import OVER, Points, RunReader, now
from distbelief.dashboard.server import N_RUNS_MAX, POLL_SECONDS
from distbelief.job.run.directory import RunDirectory


N_POINTS_MAX: Final = 1000  # of a curve, all of which is sent whenever it has grown
_SCRIPT: Final = """;
export default { render({ model, el }) {
  const frame = Object.assign(document.createElement("iframe"), { sandbox: "allow-scripts" });
  const told = () => ["points", "state"].map((name) => model.get(name));
  const tell = () => frame.contentWindow?.postMessage(told(), "*");
  frame.style.cssText = "width: 100%; height: 640px; border: 0";
  frame.onload = tell;
  frame.srcdoc = PAGE;
  el.append(frame);
  model.on("change:state", tell);
  return () => model.off("change:state", tell);
} };
"""


def live(*run_directories: str | os.PathLike[str]) -> object:
    """Return a widget that shows these runs live, as the result of a notebook's cell.

    A run that has not begun is shown once it has, such as one of a later cell:
    `distbelief.fit(..., directory="runs/net")`.

    Args:
        run_directories: The runs, side by side, 1 to 16: each a directory that a job writes.

    Raises:
        JobError: anywidget is not installed, or no run or too many are named.
    """
    if not 0 < len(run_directories) <= N_RUNS_MAX:
        raise JobError(f"live: name 1 to {N_RUNS_MAX} run directories, such as 'runs/digits'")
    try:
        base = importlib.import_module("anywidget").AnyWidget
        text = importlib.import_module("traitlets").Unicode
    except ImportError:
        raise JobError('live needs anywidget: pip install "distbelief[notebook]"') from None
    own = {name: text("[]").tag(sync=True) for name in ("points", "state")}
    own["_esm"] = f"const PAGE = {json.dumps(_page())}{_SCRIPT}"
    widget = type("LiveRuns", (base,), own)()
    readers = [RunReader(RunDirectory(Path(path), lock=None)) for path in run_directories]
    pause = threading.Event()

    def tell() -> None:
        while widget.comm is not None:  # it is not closed
            for reader in readers:
                reader.read_status(now())
                while reader.read_points():
                    pass
            points = [_points(*each) for each in enumerate(readers)]
            states = [reader.state for reader in readers]
            widget.points = msgspec.json.encode(points).decode()
            widget.state = msgspec.json.encode(states).decode()
            if all(state.state in OVER for state in states):
                return
            pause.wait(POLL_SECONDS)

    threading.Thread(target=tell, name="live", daemon=True).start()
    return widget


def _page() -> str:
    """Return the page as one file."""
    place = resources("distbelief.dashboard") / "page"
    page, scripts = (place / "index.html").read_text(), ""
    for name in ("uplot", "page"):
        style, script = ((place / f"{name}.{kind}").read_text() for kind in ("css", "js"))
        link = f'<link rel="stylesheet" href="{name}.css">'
        page = page.replace(link, f"<style>{style}</style>")
        page = page.replace(f'<script src="{name}.js" defer></script>', "")
        scripts += f"<script>{script}</script>"
    return page.replace("</body>", f"{scripts}</body>")


def _points(index: int, reader: RunReader) -> Points:
    n = reader.curve.n_points
    step = -(-n // N_POINTS_MAX) or 1
    chosen = [*range(0, n - 1, step), *range(n)[-1:]]
    columns = {name: [values[n] for n in chosen] for name, values in reader.curve.columns.items()}
    return Points(run=index, start=0, end=len(chosen), columns=columns)
