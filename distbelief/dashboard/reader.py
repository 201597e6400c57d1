"""Reads one run directory for the page, again and again: the curve, and the state of every role.

Files of others are shown as text only, and no file but status.json, metrics.jsonl and plan.png is
read.
"""

import datetime as dt
import math
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, final

import msgspec

from distbelief.core.errors import StorageError
from distbelief.core.formatting import plain
from distbelief.dashboard.bottleneck import (
    SPENT,
    Finding,
    bottleneck,
    seconds_counted,
    seconds_spent,
)
from distbelief.job.display.screen import left, phase_of, state_of
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.metrics_file import Measurement, measurements_in
from distbelief.supervisor.view import HostView, JobView, Message, RoleView


READ_BYTES_MAX: Final = 1 << 22  # of metrics.jsonl at once, so that others get their turn
PICTURE_BYTES_MAX: Final = 1 << 24
LINE_BYTES_MAX: Final = 1 << 20  # a longer one is of another program
N_COLUMNS_MAX: Final = 64
N_MESSAGES_MAX: Final = 500
SILENT_SECONDS: Final = 5.0  # without a new status, after which a run counts as silent
WATCH_SECONDS: Final = 6
RATE_SECONDS: Final = 8.0  # rates of roles are means over about this time

_COLUMNS: Final = (
    *("time", "samples", "step", "loss", "held_out_loss", "samples_per_second"),
    *("staleness_mean", "staleness_p95", "bytes_in", "bytes_out"),
    *("pushes_refused", "pushes_lost", "n_checkpoints"),
)
OVER: Final = frozenset({"ended", "interrupted", "failed"})  # states of a run

Column = list[float | None]


class Points(msgspec.Struct, frozen=True, kw_only=True, rename={"start": "from", "end": "to"}):
    """The points of a run's curve from `start` until before `end`, as the page gets them."""

    run: int
    start: int
    end: int
    columns: dict[str, Column]


@final
class Curve:
    """A growing curve; `epoch` changes if it begins anew.

    Its columns are those of `Measurement`, `metric:NAME` and `figure:NAME`; None where a line has
    no such number.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.forget()

    def forget(self) -> None:
        self.epoch += 1
        self.columns: dict[str, Column] = {name: [] for name in _COLUMNS}
        self.n_points = 0

    def add(self, n: int, values: Mapping[str, Sequence[float | None]]) -> None:
        """Add n points; columns that `values` lacks get None."""
        for name in values:
            if name not in self.columns and len(self.columns) < N_COLUMNS_MAX:
                self.columns[name] = [None] * self.n_points
        for name, column in self.columns.items():
            column.extend(values.get(name) or [None] * n)
        self.n_points += n


class RoleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One role, as the page shows it; rates are those of the last few seconds."""

    name: str
    state: str
    trouble: bool
    host: str  # "" for the supervisor's
    rate: float | None
    unit: str  # of `rate`: what of them a second
    heard: float | None  # seconds since its last heartbeat
    restarts: int
    staleness: float | None
    bytes_in: float | None  # received a second; in total for a run that has ended
    bytes_out: float | None
    # Activity -> share of its time, while it runs in the last few seconds. What is missing to 1 was
    # not attributed.
    spent: dict[str, float]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """A run at a moment, as the page shows it."""

    name: str
    path: str
    state: str = "starting"  # running, ended, interrupted, failed, silent, stopped, unreachable
    note: str = ""  # what `state` means, if more is to say
    phase: str = ""
    age: float | None = None  # seconds since its last status
    left: str = ""
    view: JobView | None = None  # without curve, roles, hosts and messages
    roles: tuple[RoleRow, ...] = ()
    hosts: tuple[HostView, ...] = ()
    messages: tuple[Message, ...] = ()
    why: Finding | None = None  # what holds it back; None: not known
    has_plan: bool = False  # as a picture


@final
class RunReader:
    """Reads the files of one run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._picture = run, run.plan_file.with_suffix(".png")
        self.curve = Curve()
        self.state = RunState(name=plain(run.path.name), path=plain(str(run.path)))
        self.status: Status | None = None
        self._file = -1, 0  # inode of metrics.jsonl, and how much of it is read
        self._messages: dict[tuple[float, int], Message] = {}
        self._views: deque[JobView] = deque()

    def read_points(self) -> bool:
        """Read more of the curve; return whether there may be more still."""
        inode, offset = self._file
        try:
            with self._run.metrics_file.open("rb") as file:
                found = self._run.metrics_file.stat()
                if found.st_ino != inode or found.st_size < offset:
                    if offset:
                        self.curve.forget()
                    inode, offset = found.st_ino, 0
                file.seek(offset)
                content = file.read(READ_BYTES_MAX)
        except OSError:  # not written yet, or removed
            return False
        end = content.rfind(b"\n") + 1
        if not end and len(content) > LINE_BYTES_MAX:
            end = len(content)
        self._file = inode, offset + end
        for measurement in measurements_in(content[:end]):
            self._add(measurement)
        return len(content) == READ_BYTES_MAX

    def read_status(self, now: float) -> None:
        """Read the state of the run; `now`: seconds since 1970."""
        pid, note = self._run.writer_pid(), ""
        try:
            status = self._run.read_status()
        except StorageError as error:
            status, note = None, plain(str(error))
        if status is not None and pid is not None and status.pid != pid:
            status = None  # written before the run was resumed
        self.status = status
        if status is None:
            state = "starting" if pid is not None else "stopped"
            note = note or ("" if pid is not None else "not running, and it has written no status")
            self.state = msgspec.structs.replace(self.state, state=state, note=note, view=None)
            return
        view, age = status.view, max(0.0, now - status.written)
        state, note = self._condition(status, pid, age)
        self._keep(view)
        since = self._views[0] if state == "running" and len(self._views) > 1 else None
        shown = msgspec.structs.replace(view, history=(), roles=(), hosts=(), messages=())
        self.state = RunState(
            name=status.name,
            path=self.state.path,
            state=state,
            note=note,
            phase=phase_of(view),
            age=age,
            left=left(view) if state == "running" else "",
            view=shown,
            roles=tuple(_row(role, view, since, is_past=state != "running") for role in view.roles),
            hosts=view.hosts,
            messages=tuple(self._messages.values()),
            why=bottleneck(view, since) if since or state != "running" else None,
            has_plan=self._picture.is_file(),
        )

    def plan_picture(self) -> bytes | None:
        """Return the picture of the plan, a PNG; None if there is none."""
        try:
            # No link: it could lead to any file of this user.
            opened = os.open(self._picture, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(opened, "rb") as file:
                content = file.read(PICTURE_BYTES_MAX)
        except OSError:
            return None
        return content if content.startswith(b"\x89PNG\r\n") else None

    def _condition(self, status: Status, pid: int | None, age: float) -> tuple[str, str]:
        if status.ended:
            failed = status.error or (status.view.phase == "failed" and status.view.error) or ""
            if failed:
                return "failed", failed
            return ("interrupted" if status.view.phase == "interrupted" else "ended"), ""
        if pid is None:
            if self._run.live_memory() is not None:
                return "stopped", "its supervisor was killed, and its roles train on for a while"
            return "stopped", "not running, and it did not end properly"
        if age > SILENT_SECONDS:
            return "silent", "its process runs but writes no status: stopped, or out of memory"
        return "running", ""

    def _keep(self, view: JobView) -> None:
        for message in view.messages:
            self._messages[message.seconds, message.number] = message
        while len(self._messages) > N_MESSAGES_MAX:
            del self._messages[next(iter(self._messages))]
        views = self._views
        if views and (view.now < views[-1].now or len(view.roles) != len(views[-1].roles)):
            views.clear()
        if not views or view.now > views[-1].now:
            views.append(view)
        while len(views) > 2 and views[1].now <= view.now - RATE_SECONDS:
            views.popleft()

    def _add(self, measurement: Measurement) -> None:
        values: dict[str, float | None] = {
            name: _number(getattr(measurement, name)) for name in _COLUMNS
        }
        times = self.curve.columns["time"]
        before = times[-1] if times else 0.0
        # A resumed run may begin a little before the last line. Curves need rising times.
        values["time"] = max(values["time"] or 0.0, before or 0.0)
        metrics = measurement.metrics
        if measurement.metric is not None:
            metrics = {measurement.metric_name: measurement.metric, **metrics}
        values |= {f"metric:{plain(name)}": _number(n) for name, n in metrics.items()}
        values |= {f"figure:{plain(name)}": _number(n) for name, n in measurement.figures.items()}
        self.curve.add(1, {name: [value] for name, value in values.items()})


def _number(value: float | None) -> float | None:
    """Return six digits of it, which curves need, but whole numbers as they are.

    None if it is not finite.
    """
    if value is None or not math.isfinite(value):
        return None
    return value if value % 1 == 0 else float(f"{value:.6g}")


def _row(role: RoleView, view: JobView, since: JobView | None, *, is_past: bool) -> RoleRow:
    state, style = state_of(role)
    counters = role.counters
    before: dict[str, float] = {}
    seconds = seconds_counted(role, view)
    if since is not None:
        seconds = view.now - since.now
        earlier = [each.counters for each in since.roles if each.name == role.name]
        before = earlier[0] if earlier else {}
        # A role that was restarted counts from zero.
        if any(counters.get(name, 0.0) < before[name] for name in before if _is_time(name)):
            before, seconds = {}, math.inf
    spent: dict[str, float] = {}
    if seconds > 0.0:
        for name, value in seconds_spent(counters, before).items():
            spent[name] = min(max(value / seconds, 0.0), 1.0)
    per = seconds if since is not None else 1.0

    def moved(counter: str) -> float | None:
        if counter not in counters or not (per > 0.0):
            return None
        return max(counters[counter] - before.get(counter, 0.0), 0.0) / per

    return RoleRow(
        name=role.name,
        state=f"was {state}" if is_past and state not in {"done", "finished"} else state,
        trouble=bool(style) and not is_past,
        host=role.at,
        rate=None if is_past else role.rate,
        unit="pushes" if role.name.startswith("shard") else "samples",
        heard=None if is_past else role.last_heartbeat_age,
        restarts=role.restarts,
        staleness=counters.get("staleness_mean"),
        bytes_in=moved("bytes_in"),
        bytes_out=moved("bytes_out"),
        spent=spent,
    )


def _is_time(counter: str) -> bool:
    return counter.startswith(("seconds_", SPENT, "bytes_"))


def watched(run: RunDirectory) -> RunState:
    """Return the state of a run; of one that is running, after some seconds of watching it."""
    reader, waiting = RunReader(run), threading.Event()
    reader.read_status(now())
    for _ in range(WATCH_SECONDS):
        if reader.state.state != "running":
            break
        waiting.wait(1.0)
        reader.read_status(now())
    return reader.state


def now() -> float:
    """Return the time of day, in seconds since 1970, as in status.json."""
    return dt.datetime.now(tz=dt.UTC).timestamp()
