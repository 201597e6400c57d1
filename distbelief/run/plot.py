"""curve.png: loss and held-out metric of a run over time."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from distbelief.core import files
from distbelief.core.formatting import is_share
from distbelief.run.metrics_file import Measurement


def draw_curve(path: Path, measurements: Sequence[Measurement], *, title: str) -> bool:
    """Draw the curve to `path`; return False if there is nothing to draw yet."""
    drawn = [m for m in measurements if m.loss is not None or m.metric is not None]
    if not drawn:
        return False
    # Without pyplot, which keeps global state and may need a display.
    figure = Figure(figsize=(7.0, 5.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    has_metric = any(m.metric is not None for m in drawn)
    axes = figure.subplots(1 + has_metric, 1, sharex=True, squeeze=False)[:, 0]
    lines = [
        _line(axes[0], [(m.time, m.loss) for m in drawn], label="training"),
        _line(axes[0], [(m.time, m.held_out_loss) for m in drawn], label="held out"),
    ]
    axes[0].set_ylabel("loss")
    if any(lines):
        axes[0].legend(frameon=False)
    else:
        _say_nothing_measured(axes[0])
    axes[0].set_title(title)
    if has_metric:
        name = drawn[-1].metric_name
        if not _line(axes[1], [(m.time, m.metric) for m in drawn], label="held out"):
            _say_nothing_measured(axes[1])
        axes[1].set_ylabel(f"held-out {name}")
        if is_share(name):
            axes[1].yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes[-1].set_xlabel(f"seconds ({drawn[-1].samples:,} samples in all)")
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    files.write_by(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def _line(axes: Axes, points: Sequence[tuple[float, float | None]], *, label: str) -> bool:
    # Each value is drawn where it first appeared. Returns whether there were any.
    times: list[float] = []
    values: list[float] = []
    for time, value in points:
        if value is None or not math.isfinite(value):
            continue
        if not values or value != values[-1]:
            times.append(time)
            values.append(value)
    # A line through one point is invisible.
    marker = "o" if len(values) == 1 else ""
    if values:
        axes.plot(times, values, label=label, linewidth=1.5, marker=marker)
    return bool(values)


def _say_nothing_measured(axes: Axes) -> None:
    axes.text(
        0.5, 0.5, "no number was measured", transform=axes.transAxes, horizontalalignment="center"
    )
