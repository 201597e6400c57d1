"""How fluid the page is in a real browser, with 200 roles and 100,000 points.

    python -m tests.distbelief.dashboard.page_figures [--roles 200] [--points 100000] [--seconds 20]

It needs playwright and a Chromium. Made files are served; once all points are drawn, ten more come
each second, and every role changes: its rate, state, staleness, bytes, and where its time goes.
Each second one of a hundred is restarted, of which an event tells.

    paint     milliseconds from the request of the page to its first content
    drawn     milliseconds until all points are drawn
    loading   the longest frame until then, in milliseconds, and how many took more than 50
    frame     the longest frame afterwards; and how many took more than 50
    task      the longest task of the page's thread afterwards; 0: all took less than 50
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import msgspec

from distbelief.supervisor.view import JobView, Message, RoleView
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


def noise(role: int, second: int, what: int) -> float:
    """Return a number from 0 to 1, the same each time for the same numbers."""
    return math.sin(12.9898 * role + 78.233 * second + 37.719 * what) * 43758.5 % 1


@final
class Busy:
    """Roles whose counters grow unevenly from one second to the next."""

    def __init__(self, view: JobView) -> None:
        self.view, self._second = view, 0

    def next(self) -> JobView:
        self._second += 1
        view, second = self.view, self._second
        roles = [self._role(role, n, second) for n, role in enumerate(view.roles)]
        died = [role.name for role in roles if role.state == "restarting"]
        new = [
            Message(
                number=100 + second,
                seconds=view.seconds + second,
                text=f"{name} died (signal 9): restarting it",
                level="warning",
                what="role_restarted",
            )
            for name in died[:1]
        ]
        self.view = msgspec.structs.replace(
            view,
            now=view.now + 1.0,
            seconds=view.seconds + 1.0,
            training_seconds=view.training_seconds + 1.0,
            samples_per_second=(view.samples_per_second or 0.0)
            * (0.95 + 0.1 * noise(0, second, 0)),
            roles=tuple(roles),
            messages=(*view.messages, *new)[-50:],
        )
        return self.view

    def _role(self, role: RoleView, n: int, second: int) -> RoleView:
        if noise(n, second, 1) < 0.01:
            return dataclasses.replace(
                role, state="restarting", rate=None, restarts=role.restarts + 1, counters={}
            )
        share, counters = noise(n, second, 2), dict(role.counters)
        grown = {
            "bytes_in": 2e6 * share,
            "bytes_out": 1e6 * noise(n, second, 3),
            "spent_computing": 0.8 * share,
            "spent_fetching": 0.1 * noise(n, second, 4),
            "spent_reading": 0.1 * noise(n, second, 5),
            "spent_waiting for shard-1": max(0.0, 0.9 - 0.8 * share - 0.2),
        }
        for name, value in grown.items():
            counters[name] = counters.get(name, 0.0) + value
        counters["staleness_mean"] = 1.0 + 3.0 * noise(n, second, 6)
        states = ("computing", "fetching", "waiting for shard-1", "pushing", "reading")
        return dataclasses.replace(
            role,
            state=states[int(5 * noise(n, second, 7))],
            rate=180.0 + 80.0 * share,
            last_heartbeat_age=noise(n, second, 8),
            counters=counters,
        )


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
            busy = Busy(view)
            for _ in range(round(seconds)):
                made_runs.append(path, range(n_points, n_points + 10))
                n_points += 10
                made_runs.write_status(path, busy.next())
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
