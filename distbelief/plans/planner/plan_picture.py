"""Draws a plan: every layer a strip, every machine a colour (compare Figure 1 of Dean et al. 2012).

Inputs are at the bottom, the loss is at the top; each strip is cut where the plan cuts the layer.
Beside it stand the bytes that cross to other machines. Of many layers, those that follow each
other, lie alike and send nothing are one strip, and blocks of equal strips are drawn once.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from distbelief.core import files
from distbelief.graph.graph import Layer, LayerGraph
from distbelief.plans.placement import Placement
from distbelief.plans.planner.plan_report import size
from distbelief.plans.traffic import Traffic


ROWS_MAX: Final = 60  # strips drawn; of more those with the most elements
UNFOLDED_MAX: Final = 30  # layers that are drawn each on its own
LEGEND: Final = (
    "A colour is a machine. 1x4x2: parts along each dimension of a layer's output, without the "
    "batch; inputs 4: sums over 4 parts of its input."
)

_SPACE: Final = 0.2  # between strips
_HEIGHT_MAX: Final = 4.0


class _Row(NamedTuple):
    """A strip: a layer, and those that follow it and lie as it does."""

    layer: Layer
    placement: Placement
    n_bytes: int  # that cross to other machines, from the last of these layers
    n_layers: int = 1
    n_times: int = 1  # in a row

    @property
    def key(self) -> object:
        """What equal strips share."""
        layer = self.layer
        return layer.kind, layer.shape, self.placement, self.n_bytes, self.n_layers


def _joined(rows: Sequence[_Row]) -> list[_Row]:
    """Make each layer that lies as the one before, which sends nothing, part of its strip."""
    joined: list[_Row] = []
    for row in rows:
        last = joined[-1] if joined else None
        if last is None or last.n_bytes or _lies(row.placement) != _lies(last.placement):
            joined.append(row)
            continue
        named = row if row.layer.tensors and not last.layer.tensors else last
        joined[-1] = named._replace(n_bytes=row.n_bytes, n_layers=last.n_layers + 1)
    return joined


def _lies(placement: Placement) -> object:
    cut = tuple(n for n in placement.grid if n > 1)
    return cut, placement.machines, placement.combine


def _once(rows: Sequence[_Row]) -> list[_Row]:
    """Draw blocks of strips that are repeated in a row once."""
    keys, kept, at = [row.key for row in rows], list[_Row](), 0
    while at < len(rows):
        folded = [(0, 1, 1)]  # strips left out, length of the block, times
        for length in range(1, min(ROWS_MAX, (len(rows) - at) // 2) + 1):
            n, block = 1, keys[at : at + length]
            while keys[at + n * length : at + (n + 1) * length] == block:
                n += 1
            folded.append(((n - 1) * length, -length, n))
        _, length, n = max(folded)
        kept += [row._replace(n_times=n) for row in rows[at : at + abs(length)]]
        at += n * abs(length)
    return kept


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
    rows = [
        _Row(layer, placements[layer.name], crossing.get(layer.name, 0))
        for layer in graph.layers
        if layer.name in placements
    ]
    if len(rows) > UNFOLDED_MAX:
        rows = _once(_joined(rows))
    n_rows = len(rows)
    sizes = sorted((row.layer.region.n_elements for row in rows), reverse=True)[:ROWS_MAX]
    rows = [row for row in rows if row.layer.region.n_elements >= sizes[-1]][:ROWS_MAX]
    heights = [_height(row.placement) for row in rows]
    figure = Figure(figsize=(9.0, 1.0 + 0.42 * sum(heights)), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.26, 0.05, 0.56, 0.9))
    bottom = 0.0
    for row, height in zip(rows, heights, strict=True):
        strip = height - _SPACE
        _strip(axes, bottom, strip, row.placement)
        middle = bottom + strip / 2
        shown = "x".join(map(str, row.layer.shape)) or "1"
        more = f" and {row.n_layers - 1} more" if row.n_layers > 1 else ""
        label = f"{row.layer.name}{more}  {shown}"
        axes.text(-0.01, middle, label, ha="right", va="center", size=7)
        text = f"{row.placement}" + (f", {size(row.n_bytes)} cross" if row.n_bytes else "")
        text += f"; {row.n_times} times" if row.n_times > 1 else ""
        axes.text(1.01, middle, text, ha="left", va="center", size=6)
        bottom += height
    axes.set_xlim(0, 1)
    axes.set_ylim(0, max(1.0, bottom))
    axes.axis("off")
    if len(rows) < n_rows:
        title += f" (the {len(rows)} largest of {n_rows} strips)"
    axes.text(0.5, -0.3, LEGEND, ha="center", va="top", size=6)
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
