"""Curves as figures of matplotlib, which is imported when the first is drawn."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


N_MARKED_MAX: Final = 40  # points of a curve that are marked
N_NAMED_MAX: Final = 20  # curves

Curve = Sequence[tuple[float, float | None]]

_IMPORTING: Final = Lock()  # matplotlib's modules import each other: two threads must not


def import_for_drawing() -> None:
    """Import what figures need, which takes most of a second."""
    with _IMPORTING:
        for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
            import_module(module)


def plot(
    curves: Mapping[str, Curve], *, x: str, y: str, title: str, repeats: bool = False
) -> "Figure":
    """Return a figure with these curves, which needs no display; a notebook shows it.

    A value that is the one before is drawn if `repeats`.
    """
    import_for_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7.0, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawn = [draw_line(axes, of, label=label, repeats=repeats) for label, of in curves.items()]
    if not any(drawn):
        say_nothing_measured(axes)
    elif len(drawn) <= N_NAMED_MAX:  # of hundreds the names would hide the curves
        axes.legend(frameon=False)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    return figure


def draw_line(axes: "Axes", points: Curve, *, label: str, repeats: bool = False) -> bool:
    """Draw each value, where it first appeared; return whether there were any."""
    times: list[float] = []
    values: list[float] = []
    for time, value in points:
        if value is None or not math.isfinite(value):
            continue
        if repeats or not values or value != values[-1]:
            times.append(time)
            values.append(value)
    # A line through one point is invisible, and of few the line hides which were measured.
    marker = "o" if len(values) == 1 else "." if len(values) <= N_MARKED_MAX else ""
    if values:
        axes.plot(times, values, label=label, linewidth=1.5, marker=marker)
    return bool(values)


def say_nothing_measured(axes: "Axes") -> None:
    axes.text(
        0.5, 0.5, "no number was measured", transform=axes.transAxes, horizontalalignment="center"
    )
