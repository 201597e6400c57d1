"""Draws the curves of several runs beside each other: loss in training, and held out.

    python -m experiments.speech.curves RUN_DIR RUN_DIR ... [--out curves.png]

What it draws stands in each run's metrics.jsonl. Over seconds, for the runs differ in
what a sample costs them; held-out figures of a Sandblaster run that goes on are of the
point on trial, which is mostly the next that is accepted.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from distbelief.core.formatting import is_share
from distbelief.run.metrics_file import Measurement, read_metrics


_PANELS: Final = ("loss in training", "loss held out", "metric")


def values_of(run: Sequence[Measurement], panel: str) -> list[tuple[float, float]]:
    """Return (seconds, value) of what was measured, each value where it first stood."""
    points: list[tuple[float, float]] = []
    for line in run:
        value = {
            "loss in training": line.loss,
            "loss held out": line.held_out_loss,
            "metric": line.metric,
        }[panel]
        if value is not None and (not points or value != points[-1][1]):
            points.append((line.time, value))
    return points


def draw(runs: dict[str, list[Measurement]], path: Path) -> None:
    figure = Figure(figsize=(12.0, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_PANELS), sharex=True, squeeze=False)[0]
    for axes, panel in zip(panels, _PANELS, strict=True):
        for name, run in runs.items():
            points = values_of(run, panel)
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=name)
        _decorate(axes, panel, runs)
    panels[0].legend(frameon=False)
    figure.savefig(path, format="png")


def _decorate(axes: Axes, panel: str, runs: dict[str, list[Measurement]]) -> None:
    names = {run[-1].metric_name for run in runs.values() if run}
    if panel == "metric" and names:
        panel = f"{', '.join(sorted(names))} held out"
        if all(is_share(name) for name in names):
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.set_title(panel)
    axes.set_xlabel("seconds")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    options = parser.parse_args()
    runs = {run.name: read_metrics(run / "metrics.jsonl") for run in options.runs}
    for name, run in runs.items():
        if not run:
            parser.error(f"{name} has no metrics.jsonl with any line: is it a run?")
    draw(runs, options.out)
    for name, run in runs.items():
        last = run[-1]
        print(f"{name}: {last.time:.0f} s, loss {last.loss}, held out {last.metric}")
    print(options.out)


if __name__ == "__main__":
    main()
