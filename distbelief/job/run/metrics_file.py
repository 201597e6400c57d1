"""metrics.jsonl: the curve of a run, one JSON object per line; curve.png draws it.

Each line is written before the next one begins, so a killed run leaves at most one cut line, the
last. Readers skip it; a resumed run removes it and appends.
"""

import errno
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

import msgspec

from distbelief.core import files
from distbelief.core.drawing import draw_line, import_for_drawing, say_nothing_measured
from distbelief.core.formatting import is_loss, is_share
from distbelief.supervisor.view import JobView, Measured, filled


if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Measurement(Measured, frozen=True, kw_only=True):
    """One line: the job at one moment."""

    time: float  # seconds of the job, previous sessions included
    pushes_refused: int = 0  # as in `JobView`
    pushes_lost: int | None = 0  # as in `JobView`
    n_checkpoints: int = 0  # of all shards, in this session

    @classmethod
    def of(cls, view: JobView) -> Self:
        return filled(cls, {"time": round(view.seconds, 3)}, view)


@final
class MetricsFile:
    """Appends to a metrics.jsonl; continues an existing one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._end = 0  # offset behind the last whole line

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the file; remove a cut last line."""
        try:
            # Unbuffered: bytes of a failed write must not appear later.
            self._file = self._path.open("a+b", buffering=0)
            self._end = self._path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(self._end)
        except OSError as error:
            self.close()
            raise files.explained(error, self._path, doing="write") from error

    def append(self, measurement: Measurement) -> None:
        assert self._file is not None, "open() comes first"
        line = msgspec.json.encode(measurement) + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise files.explained(error, self._path, doing="write") from error
        self._end += len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[Measurement]:
    """Return the whole lines of a metrics.jsonl; none if there is no such file."""
    try:
        return measurements_in(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.explained(error, path, doing="read") from error


def measurements_in(content: bytes) -> list[Measurement]:
    decoder = msgspec.json.Decoder(Measurement)
    measurements: list[Measurement] = []
    for line in content.split(b"\n")[:-1]:  # the rest has no newline: a cut line
        try:
            measurements.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return measurements


def draw_curve(path: Path, measurements: Sequence[Measurement], *, title: str) -> bool:
    """Draw the curve to `path`; return False if there is nothing to draw yet."""
    import_for_drawing()
    # Without pyplot, which keeps global state and may need a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import PercentFormatter  # noqa: PLC0415

    drawn = [m for m in measurements if m.loss is not None or m.metric is not None]
    if not drawn:
        return False
    names = [name for name in {drawn[-1].metric_name: 0, **drawn[-1].others} if not is_loss(name)]
    names = names if any(m.metric is not None for m in drawn) else []
    height = 5.0 + 2.5 * max(0, len(names) - 1)
    figure = Figure(figsize=(7.0, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(names), 1, sharex=True, squeeze=False)[:, 0]
    lines = [
        draw_line(axes[0], [(m.time, m.loss) for m in drawn], label="training"),
        draw_line(axes[0], [(m.time, m.held_out_loss) for m in drawn], label="held out"),
    ]
    axes[0].set_ylabel("loss")
    if any(lines):
        axes[0].legend(frameon=False)
    else:
        say_nothing_measured(axes[0])
    axes[0].set_title(title)
    for axis, name in zip(axes[1:], names, strict=True):
        values = [
            (m.time, m.metric if name == m.metric_name else m.metrics.get(name)) for m in drawn
        ]
        if not draw_line(axis, values, label="held out"):
            say_nothing_measured(axis)
        axis.set_ylabel(f"held-out {name}")
        if is_share(name):
            axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        _widen(axis, 0.1 if is_share(name) else None, most=1.0 if is_share(name) else math.inf)
    _widen(axes[0], None, most=math.inf)
    axes[-1].set_xlim(left=0.0)
    axes[-1].set_xlabel(f"seconds ({drawn[-1].samples:,} samples in all)")
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    files.write_by(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def _widen(axes: "Axes", least: float | None, *, most: float) -> None:
    """Show a range of at least `least`, or else a tenth of the largest value: noise stays small."""
    low, high = axes.get_ylim()
    lacking = (max(abs(low), abs(high)) / 10 if least is None else least) - (high - low)
    if lacking > 0:
        top = min(high + lacking / 2, max(high, most))
        axes.set_ylim(top - (high - low) - lacking, top)
