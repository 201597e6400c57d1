"""How fluid the page is in a real browser, with 200 roles and 100,000 points.

    python -m tests.distbelief.dashboard.page_figures [--roles 200] [--points 100000] [--seconds 20]

It needs playwright and a Chromium. Made files are served; once all points are drawn, ten more come
each second, and every role changes.

    paint     milliseconds from the request of the page to its first content
    drawn     milliseconds until all points are drawn
    loading   the longest frame until then, in milliseconds, and how many took more than 50
    frame     the longest frame afterwards; and how many took more than 50
    task      the longest task of the page's thread afterwards; 0: all took less than 50
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tests.distbelief.dashboard import made_runs
from tests.distbelief.dashboard.conftest import chromium
from tests.distbelief.dashboard.test_server import served


WATCH = """
window.frames = []; window.tasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((each) => tasks.push(each.duration)))
  .observe({ type: "longtask", buffered: true });
let before = performance.now();
function next(now) { frames.push(now - before); before = now; requestAnimationFrame(next); }
next(before);
"""


def figures(n_roles: int, n_points: int, seconds: float) -> dict[str, float]:
    """Open the page of such a run, and return what it took."""
    with TemporaryDirectory() as folder, chromium() as browser:
        view = made_runs.view(n_points, n_roles - 2, n_hosts=8)
        path = made_runs.make(Path(folder) / "run", n_points=n_points, shown=view)
        with made_runs.running(path), served(path) as server:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.add_init_script(WATCH)
            page.goto(f"http://127.0.0.1:{server.port}/")
            page.wait_for_function("n => runs[0]?.n === n && !isStepping", arg=n_points)
            drawn = page.evaluate("performance.now()")
            paint = page.evaluate("performance.getEntriesByType('paint').at(-1).startTime")
            loading = page.evaluate("frames.splice(0).slice(1)")
            page.evaluate("tasks.length = 0")
            for _ in range(round(seconds)):
                made_runs.append(path, range(n_points, n_points + 10))
                n_points += 10
                view = made_runs.view(n_points, n_roles - 2, n_hosts=8)
                made_runs.write_status(path, msgspec.structs.replace(view, now=view.now + n_points))
                page.wait_for_timeout(1000)
            frames, tasks = page.evaluate("[frames, tasks]")
    return {
        "paint": paint,
        "drawn": drawn,
        "loading": max(loading),
        "loading_long": sum(each > 50.0 for each in loading),
        "frame": max(frames),
        "frame_long": sum(each > 50.0 for each in frames),
        "frames": len(frames),
        "task": max(tasks, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--roles", type=int, default=200)
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    found = figures(options.roles, options.points, options.seconds)
    shown = {name: round(value, 1) for name, value in found.items()}
    sys.stdout.write(f"{json.dumps(shown)}\n")


if __name__ == "__main__":
    main()
