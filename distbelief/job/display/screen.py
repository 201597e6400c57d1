"""The live screen of a job (rich): a bar, a few values, small curves, one row per role.

It is drawn from a `JobView` alone, for any width and height: what does not fit is left out, least
important first. `progress` keeps it up to date; `distbelief status` prints it once.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distbelief.core import formatting
from distbelief.supervisor.view import HostView, JobView, RoleView


_WIDE = 64  # columns, for the whole table of roles
_ROWS_ABOVE = 11  # lines of a screen that are not roles
_ROWS_OF_A_TABLE = 3  # lines of a table that are not rows
_CURVE_MAX = 40
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"
_GONE = ("gone", "leaving", "rejected")
_TROUBLE = ("lost", "failed", "restarting", "silent")


class Screen:
    """Draws a view to the console's present width and height.

    `whole` draws every role, however many lines that takes; `is_past` shows a job that has ended.
    """

    def __init__(
        self, view: JobView, *, name: str, whole: bool = False, is_past: bool = False
    ) -> None:
        self._view = _past(view) if is_past else view
        self._phase = f"was {phase_of(view)}" if is_past else phase_of(view)
        self._name = name
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view
        width = options.max_width
        n_rows_max = len(view.roles)
        shows_hosts = bool(view.hosts) and width >= _WIDE
        if not self._whole:
            n_rows_max = max(1, console.height - _ROWS_ABOVE)
            n_left = n_rows_max - len(view.roles)
            shows_hosts &= len(view.hosts) + _ROWS_OF_A_TABLE <= n_left
        parts: list[RenderableType] = [_title(view, self._name, self._phase, width)]
        parts += _bar(view, width)
        parts += _figures(view, width)
        curves = _curves(view, width, ascii_only=options.ascii_only)
        if curves is not None:
            parts += [Text(), curves]
        if view.roles:
            parts += [Text(), *_roles(view.roles, width, n_rows_max=n_rows_max)]
        if shows_hosts:
            parts += [Text(), _hosts(view.hosts)]
        yield Group(*parts)


def spark(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Return a curve of at most `width` characters, from lowest to highest value.

    With more values than characters, each character is the mean of some.
    """
    blocks = _ASCII if ascii_only else _BLOCKS
    # Divided, so that sums and differences of large values stay finite.
    shares = [value / 4 for value in values if math.isfinite(value)]
    if not shares or width < 1:
        return ""
    values = [share / len(shares) for share in shares]
    n = min(width, len(values))
    cuts = [index * len(values) // n for index in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    if low == high:
        return blocks[len(blocks) // 2] * n
    steps = len(blocks) - 1
    return "".join(blocks[round((mean - low) / (high - low) * steps)] for mean in means)


def phase_of(view: JobView) -> str:
    """Return "training", or "stopping: " and the reason."""
    why = None
    if view.phase in {"stopping", "saving", "done", "interrupted", "failed"}:
        why = (view.phase == "failed" and view.error) or view.stop_reason
    return f"{view.phase}: {why}" if why else view.phase


def left(view: JobView) -> str:
    """Return "about 2 m 40 s left", or nothing if that is unknown."""
    if view.eta_seconds is None or view.phase not in {"warm start", "training"}:
        return ""
    return f"about {formatting.duration(view.eta_seconds)} left"


def state_of(role: RoleView) -> tuple[str, str]:
    """Return the state of a role, and the style to show it in."""
    age = role.last_heartbeat_age
    if any(word in role.state for word in _TROUBLE):
        return role.state, "yellow"
    ended = role.state in {"done", "finished"}
    if age is not None and age > role.silent_seconds and not ended:
        return f"{role.state}, silent", "yellow"
    return role.state, ""


def _past(view: JobView) -> JobView:
    roles = tuple(
        replace(role, state=f"was {role.state}", rate=None, last_heartbeat_age=None, pid=None)
        for role in view.roles
    )
    return msgspec.structs.replace(view, roles=roles, eta_seconds=None, samples_per_second=None)


def _title(view: JobView, name: str, phase: str, width: int) -> Table:
    times = [formatting.duration(view.seconds), left(view)]
    line = Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    title = Text.assemble((name, "bold"), "  ", (phase, "cyan"))
    both = ", ".join(time for time in times if time)
    fits = title.cell_len + len(both) + 2 <= width
    line.add_row(title, Text(both if fits else times[-1] or times[0], "dim"))
    return line


def _bar(view: JobView, width: int) -> list[RenderableType]:
    total = "" if view.total_samples is None else f" of {view.total_samples:,}"
    samples = f"{view.samples:,}{total} samples"
    if view.progress is None:
        return [Text(samples)] if view.samples else []
    share = min(max(view.progress, 0.0), 1.0)
    text = f"{formatting.percent(share):>5}" + (f"  {samples}" if width >= _WIDE else "")
    line = Table.grid(expand=True, padding=(0, 1, 0, 0))
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(ProgressBar(total=1.0, completed=share), Text(text))
    return [line]


def _figures(view: JobView, width: int) -> list[Text]:
    mean, lost = view.staleness_mean, view.pushes_lost
    sizes = f"in {formatting.size(view.bytes_in)}, out {formatting.size(view.bytes_out)}"
    parts: list[object] = [
        view.samples_per_second is not None
        and f"{formatting.rate(view.samples_per_second)} samples/s",
        mean is not None and f"staleness {formatting.staleness(mean, view.staleness_p95)}",
        (view.bytes_in or view.bytes_out) and sizes,
        "pushes lost: unknown" if lost is None else lost and f"{lost:,} pushes lost",
        *formatting.named(view.figures),
    ]
    lines: list[str] = []
    for part in parts:
        if not isinstance(part, str):
            continue
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return [Text(line) for line in lines]


def _curves(view: JobView, width: int, *, ascii_only: bool) -> Table | None:
    name, points = view.metric_name, view.history
    best = ""
    if view.best_metric is not None and width >= _WIDE:
        best = f"best {formatting.metric(view.best_metric, name)}"
    metric = formatting.metric(view.metric, name)
    held_out_loss = None if formatting.is_loss(name) else view.held_out_loss
    rows = [
        (f"held-out {name}", metric, [p.metric for p in points], best),
        *((f"held-out {n}", formatting.metric(v, n), [], "") for n, v in view.others.items()),
        ("held-out loss", formatting.figure(held_out_loss), [p.held_out_loss for p in points], ""),
        ("training loss", formatting.figure(view.loss), [p.loss for p in points], ""),
    ]
    rows = [row for row in rows if row[1] != formatting.DASH]
    if not rows:
        return None
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(no_wrap=True, style="dim", overflow="ellipsis")
    room = width - max(len(row[0]) + len(row[1]) + len(row[3]) for row in rows) - 6
    for label, last, values_of, extra in rows:
        values = [value for value in values_of if value is not None]
        curve = spark(values, min(room, _CURVE_MAX), ascii_only=ascii_only)
        table.add_row(label, last, curve, extra)
    return table


def _roles(roles: Sequence[RoleView], width: int, *, n_rows_max: int) -> list[RenderableType]:
    shown = list(roles)
    if len(roles) > n_rows_max:
        shown.sort(key=lambda role: not state_of(role)[1])
        shown = shown[: max(1, n_rows_max - 1)]
    wide = width >= _WIDE
    elsewhere = wide and any(role.at for role in roles)
    table = _table()
    longest = max(len(role.name) for role in shown)
    table.add_column("role", no_wrap=True, min_width=min(longest, width // 3))
    if elsewhere:
        table.add_column("on", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("state", no_wrap=True, overflow="ellipsis")
    for name in ("rate", "heard", "restarts") if wide else ("rate",):
        table.add_column(name, justify="right", no_wrap=True)
    for role in shown:
        age = role.last_heartbeat_age
        cells: dict[str, Text | str] = {
            "role": formatting.role(role.name),
            "on": Text(role.at or "here"),
            "state": Text(*state_of(role)),
            "rate": _rate(role, wide=wide),
            "heard": formatting.DASH if age is None else f"{formatting.duration(age)} ago",
            "restarts": Text(f"{role.restarts}", "yellow" if role.restarts else ""),
        }
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    if len(shown) == len(roles):
        return [table]
    return [table, Text(f"and {len(roles) - len(shown)} more", "dim")]


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)


def _hosts(hosts: Sequence[HostView]) -> Table:
    table = _table()
    table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("state", no_wrap=True, overflow="ellipsis")
    for name in ("cores", "memory", "a core", "link from here"):
        table.add_column(name, justify="right", no_wrap=True)
    for host in hosts:
        rate = host.bandwidth
        table.add_row(
            Text(host.label),
            Text(host.state, "yellow" if host.state in _GONE else ""),
            f"{host.cores:,}",
            formatting.size(host.memory_bytes),
            formatting.speed(host.flops),
            formatting.DASH if rate is None else f"{formatting.size(rate)}/s",
        )
    return table


def _rate(role: RoleView, *, wide: bool) -> str:
    if role.rate is None:
        return formatting.DASH
    unit = "pushes" if role.name.startswith("shard") else "samples"
    return f"{formatting.rate(role.rate)}{f' {unit}' if wide else ''}/s"
