"""Draws the figures as PNG, with what the paper published beside our curves."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter, StrMethodFormatter

from experiments.figures.courses import TARGET, Course
from experiments.figures.entries import CORES, NAMES
from experiments.figures.findings import (
    EXTRA,
    PAPERS_CORES,
    PAPERS_CROSSING_CORES,
    PAPERS_ORDER,
    by_label,
)
from experiments.figures.results import FOLDER
from experiments.figures.speedup import SpeedUp
from experiments.figures.studies import Found, Row, spread


# What section 5 of Dean et al. 2012 says in words: machines, and times as fast.
PAPERS_SPEED_UPS: Final[Mapping[str, tuple[float, float]]] = {
    "speech 42M": (8, 2.2),
    "images 1.7B": (81, 12.0),
}

COLOURS: Final = ("#444444", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e")
_MANY: Final = (*COLOURS[1:], "#8c564b", "#17becf", COLOURS[0])


def draw_speed_up(found: Sequence[SpeedUp]) -> None:
    figure, (axes,) = _figure(1, width=7.0)
    names = list(dict.fromkeys(each.net for each in found))
    for name, colour in zip(names, COLOURS[1:], strict=False):
        own = [each for each in found if each.net == name]
        machines = [each.machines for each in own]
        axes.plot(machines, [e.speed_up for e in own], "o-", color=colour, label=name)
        axes.plot(machines, [e.even for e in own], ":", color=colour)
        one = own[0].seconds[1] * own[0].speed_up
        slow = [one / each.seconds[2] for each in own]
        fast = [one / each.seconds[0] for each in own]
        axes.fill_between(machines, slow, fast, color=colour, alpha=0.15, linewidth=0)
        if name in PAPERS_SPEED_UPS:
            axes.plot(*PAPERS_SPEED_UPS[name], "*", color=colour, markersize=14)
    axes.plot([], [], ":", color="black", label="every layer cut evenly")
    axes.plot([], [], "*", color="black", markersize=12, label="the paper, in words")
    axes.set(xlabel="machines of one replica", ylabel="speed-up of a step", ylim=(0, None))
    axes.legend(frameon=False)
    _save(figure, "figure3.png")


def draw_methods(courses: Sequence[Course]) -> None:
    figure, panels = _figure(2, width=11.0)
    groups = by_label(courses)
    for axes, part in zip(panels, ("trained", "held_out"), strict=True):
        for label, colour in zip((*PAPERS_ORDER, EXTRA), COLOURS, strict=False):
            if label in groups:
                _band(axes, groups[label], part, label, colour)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        axes.set(
            xlabel="hours of the large cluster",
            ylabel=f"accuracy, {part.replace('_', ' ')}",
            xscale="log",
        )
        axes.axhline(TARGET, color="black", linewidth=0.5, linestyle=":")
        axes.set_xticks([0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    title = "the paper's order, slowest first;\nthe last is not in the paper"
    panels[0].legend(frameon=False, loc="lower right", fontsize=8, title=title, title_fontsize=8)
    _save(figure, "figure4.png")


def draw_crossings(courses: Sequence[Course]) -> None:
    figure, panels = _figure(2, width=11.0)
    for axes, factor, what in zip(panels, (1, CORES), ("machines", "cores"), strict=True):
        for name, colour in zip(NAMES.values(), COLOURS[1:], strict=False):
            rows = _times(courses, name)
            if not rows:
                continue
            x = [machines * factor for machines, _, _ in rows]
            middle, low, high = (
                [float(of(times)) / 3600 for _, times, _ in rows] for of in (np.median, min, max)
            )
            axes.plot(x, middle, "o-", color=colour, label=name)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            for at, (_, times, n_seeds) in zip(zip(x, middle, strict=True), rows, strict=True):
                if missed := n_seeds - len(times):
                    axes.annotate(
                        f"-{missed}", at, xytext=(4, 4), textcoords="offset points", fontsize=8
                    )
        axes.set(xlabel=what, ylabel=f"hours to {TARGET:.0%} held out", xscale="log")
        axes.set_yscale("log")
        axes.set_yticks([0.03, 0.1, 0.3, 1.0])
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for cores, text in (
        (PAPERS_CORES, "the paper: up to here\nAdagrad is first"),
        (PAPERS_CROSSING_CORES, "the paper: here\nSandblaster may be"),
    ):
        panels[1].axvline(cores, color="black", linewidth=0.5, linestyle=":")
        top = panels[1].get_xaxis_transform()  # 1 at the top, whatever the times are
        panels[1].text(cores, 0.98, text, transform=top, ha="right", va="top", fontsize=7)
    panels[0].legend(frameon=False, title="medians of seeds that get there; -n: do not")
    _save(figure, "figure5.png")


def draw_study(name: str, x_label: str, found: Mapping[Row, Sequence[Found]]) -> None:
    """Draw accuracies: a row of panels for each task, a line for each of its lines."""
    panels = list(dict.fromkeys((row.task, row.panel) for row in found))
    tasks = list(dict.fromkeys(task for task, _ in panels))
    n_columns = max(sum(task == other for other, _ in panels) for task in tasks)
    figure = Figure(
        figsize=(4.0 * n_columns + 1.0, 3.2 * len(tasks)), dpi=120, layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(tasks), n_columns, squeeze=False, sharey="row")
    for axes_of_task, task in zip(grid, tasks, strict=True):
        own = [panel for other, panel in panels if other == task]
        for axes, panel in zip(axes_of_task, own, strict=False):
            rows = [row for row in found if (row.task, row.panel) == (task, panel)]
            lines = list(dict.fromkeys(row.line for row in rows))
            places = list(dict.fromkeys(row.x for row in rows))
            for line, colour in zip(lines, _MANY, strict=False):
                points = [(places.index(r.x), *spread(found[r])) for r in rows if r.line == line]
                x, low, middle, high = zip(*points, strict=True)
                axes.plot(x, middle, "o-", color=colour, label=line, markersize=4)
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.set_xticks(range(len(places)), places)
            axes.set_title(", ".join(filter(None, (task, panel))), fontsize="medium")
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
            axes.set_xlabel(x_label)
        axes_of_task[0].set_ylabel("accuracy, held out")
    grid[0][-1].legend(frameon=False, fontsize=8)
    _save(figure, f"study-{name}.png")


def _times(courses: Sequence[Course], name: str) -> list[tuple[int, list[float], int]]:
    """Return machines, times of the seeds that reached the target, and all seeds."""
    rows: dict[int, list[float]] = defaultdict(list)
    n_seeds: dict[int, int] = defaultdict(int)
    for course in courses:
        if course.name == name:
            n_seeds[course.machines] += 1
            if course.target_seconds is not None:
                rows[course.machines].append(course.target_seconds)
    return [(machines, times, n_seeds[machines]) for machines, times in sorted(rows.items())]


def _band(axes: Axes, courses: Sequence[Course], part: str, label: str, colour: str) -> None:
    """Draw the median of the seeds, and all between the lowest and the highest.

    What was measured before anything was learnt has no place on a logarithmic axis.
    """
    learnt = [[p for p in course.points if p.seconds > 0] for course in courses]
    end = min(points[-1].seconds for points in learnt)
    begin = max(points[0].seconds for points in learnt)
    grid = np.geomspace(begin, max(end, 2 * begin), 60)
    curves = np.empty((len(learnt), len(grid)))  # (seeds, times)
    for row, points in zip(curves, learnt, strict=True):
        at = np.log([point.seconds for point in points])
        row[:] = np.interp(np.log(grid), at, [getattr(point, part) for point in points])
    hours = grid / 3600
    axes.plot(hours, np.median(curves, axis=0), color=colour, label=label)
    axes.fill_between(hours, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.2)


def _figure(n_panels: int, *, width: float) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, n_panels, squeeze=False)[0])


def _save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / name, format="png")
    print(f"drawn: {os.path.relpath(FOLDER / name)}")
