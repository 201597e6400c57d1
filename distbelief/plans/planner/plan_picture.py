"""Draws a plan: every layer a strip, every machine a colour (compare Figure 1 of Dean et al. 2012).

Inputs are at the bottom, the loss is at the top; each strip is cut where the plan cuts the layer.
Beside it stand the bytes that cross to other machines.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from distbelief.core import files
from distbelief.graph.graph import LayerGraph
from distbelief.plans.placement import Placement
from distbelief.plans.planner.plan_report import size
from distbelief.plans.traffic import Traffic


ROWS_MAX: Final = 60  # layers drawn; of larger graphs those with the most elements

_SPACE: Final = 0.2  # between strips
_HEIGHT_MAX: Final = 4.0


def draw_plan(
    path: Path,
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    traffic: Iterable[Traffic],
    title: str,
) -> None:
    """Draw the placement of every layer.

    Layers without a placement (inputs) are not drawn. StorageError if the file cannot be written.
    """
    crossing: dict[str, int] = {}
    for flow in traffic:
        crossing[flow.name] = crossing.get(flow.name, 0) + int(flow.n_bytes.sum())
    names = [layer.name for layer in graph.layers if layer.name in placements]
    sizes = {name: graph[name].region.n_elements for name in names}
    kept = set(sorted(names, key=lambda name: -sizes[name])[:ROWS_MAX])
    names = [name for name in names if name in kept]
    heights = [_height(placements[name]) for name in names]
    figure = Figure(figsize=(9.0, 1.0 + 0.42 * sum(heights)), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.26, 0.05, 0.56, 0.9))
    bottom = 0.0
    for name, height in zip(names, heights, strict=True):
        layer, placement = graph[name], placements[name]
        strip = height - _SPACE
        _strip(axes, bottom, strip, placement)
        middle = bottom + strip / 2
        shown = "x".join(map(str, layer.shape)) or "1"
        axes.text(-0.01, middle, f"{name}  {shown}", ha="right", va="center", size=7)
        n_bytes = crossing.get(name, 0)
        text = f"{placement}" + (f", {size(n_bytes)} cross" if n_bytes else "")
        axes.text(1.01, middle, text, ha="left", va="center", size=6)
        bottom += height
    axes.set_xlim(0, 1)
    axes.set_ylim(0, max(1.0, bottom))
    axes.axis("off")
    if len(names) < len(sizes):
        title += f" (the {len(names)} largest of {len(sizes)} layers)"
    figure.suptitle(title, size=9)
    files.write_by(
        path, lambda temporary: figure.savefig(temporary, format="png", bbox_inches="tight")
    )


def _upwards(placement: Placement) -> int | None:
    # The dimension drawn upwards: the first cut one, if two or more are cut.
    cut = [dim for dim, n in enumerate(placement.grid) if n > 1]
    return cut[0] if len(cut) > 1 else None


def _height(placement: Placement) -> float:
    # Including the space above.
    dim = _upwards(placement)
    n_up = placement.grid[dim] if dim is not None else 1
    return _SPACE + min(_HEIGHT_MAX, max(0.8, 0.35 * n_up))


def _strip(axes: Axes, bottom: float, high: float, placement: Placement) -> None:
    machines, dim = np.reshape(placement.machines, placement.grid), _upwards(placement)
    cells = machines.reshape(1, -1)
    if dim is not None:
        cells = np.moveaxis(machines, dim, 0).reshape(machines.shape[dim], -1)
    n_up, n_across = cells.shape
    lefts, tops = np.linspace(0, 1, n_across + 1), np.linspace(bottom + high, bottom, n_up + 1)
    colours = np.array([[colour(machine) for machine in row] for row in cells.tolist()])
    width = 0.6 if n_across < 40 else 0.2
    axes.pcolormesh(lefts, tops, colours, edgecolors="white", linewidth=width)  # row 0 on top
    if n_across <= 24 and high / n_up >= 0.3:
        for (up, across), machine in np.ndenumerate(cells):
            middle = (lefts[across : across + 2].mean(), tops[up : up + 2].mean())
            axes.text(*middle, str(machine), ha="center", va="center", size=5)


def colour(machine: int) -> tuple[float, float, float, float]:
    """Return the colour of a machine: always the same, and unlike its neighbours."""
    golden = 0.618033988749895  # consecutive hues are far apart
    red, green, blue, _ = colormaps["hsv"](machine * golden % 1.0)
    pale = 0.45
    return (red + (1 - red) * pale, green + (1 - green) * pale, blue + (1 - blue) * pale, 1.0)
