import math
from pathlib import Path

import matplotlib.image
import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.figure import Figure

from distbelief.core.errors import StorageError
from distbelief.job.run.metrics_file import Measurement, MetricsFile, draw_curve, read_metrics
from distbelief.supervisor.view import JobView
from tests.distbelief.limits import largest_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def measurement(step: int) -> Measurement:
    return Measurement(time=float(step), step=step, samples=step * 64, loss=1.0 / step)


def test_lines_can_be_read_at_once_and_a_resumed_run_goes_on_there(path: Path) -> None:
    for session in ((1, 2), (3,), (4,)):
        with MetricsFile(path) as metrics:
            for step in session:
                metrics.append(measurement(step))
                assert read_metrics(path)[-1] == measurement(step)
    assert read_metrics(path) == [measurement(step) for step in (1, 2, 3, 4)]
    assert len(path.read_text().splitlines()) == 4


@given(n_cut=st.integers(1, 200), n_junk=st.sampled_from([0, 10_000]))
def test_a_cut_last_line_is_ignored_and_then_replaced(
    tmp_path_factory: pytest.TempPathFactory, n_cut: int, n_junk: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.append(measurement(1))
        metrics.append(measurement(2))
    first = path.read_bytes().index(b"\n") + 1
    if n_junk:  # longer than what is read at a time to find the last newline
        path.write_bytes(path.read_bytes()[:first] + b"x" * n_junk)
    else:
        content = path.read_bytes()
        path.write_bytes(content[: max(first, len(content) - n_cut)])
    assert read_metrics(path) == [measurement(1)]
    with MetricsFile(path) as metrics:
        metrics.append(measurement(3))
    assert read_metrics(path) == [measurement(1), measurement(3)]


@pytest.mark.parametrize(
    ("content", "n_read"),
    [
        (b"", 0),
        (b'{"time":', 0),
        (b'{"time":1,"step":1,"samples":64,"loss":1.0,"power":3}\n\xff\n', 1),  # a newer version
    ],
)
def test_whole_lines_are_read_and_the_file_goes_on(path: Path, content: bytes, n_read: int) -> None:
    assert read_metrics(path) == []
    path.write_bytes(content)
    assert read_metrics(path) == [measurement(1)] * n_read
    with MetricsFile(path) as metrics:
        metrics.append(measurement(2))
    assert read_metrics(path) == [*[measurement(1)] * n_read, measurement(2)]


def test_a_loss_that_is_no_number_is_written_as_null(path: Path) -> None:
    with MetricsFile(path) as metrics:
        metrics.append(Measurement(time=0.0, step=1, samples=1, loss=math.nan))
    assert '"loss":null' in path.read_text()
    assert read_metrics(path)[0].loss is None


def test_a_metric_that_is_no_number_loses_no_line(path: Path) -> None:
    """Regression: readers left the line out, as one that is damaged."""
    given = Measurement(time=0.0, samples=1, metric=0.5, metrics={"accuracy": 0.5, "auc": math.nan})
    with MetricsFile(path) as metrics:
        metrics.append(given)
    assert [row.metrics for row in read_metrics(path)] == [{"accuracy": 0.5, "auc": None}]
    view = JobView(metrics=given.metrics)
    again = msgspec.json.decode(msgspec.json.encode(view), type=JobView)
    assert math.isnan(again.others["auc"])


def test_a_measurement_is_taken_from_a_view() -> None:
    view = JobView(seconds=2.00049, step=3, samples=192, loss=0.5, metric=0.4, staleness_p95=2.0)
    assert Measurement.of(view) == Measurement(
        time=2.0, step=3, samples=192, loss=0.5, metric=0.4, staleness_p95=2.0
    )


def test_a_full_disk_is_named_and_leaves_whole_lines(path: Path) -> None:
    with MetricsFile(path) as metrics:
        metrics.append(measurement(1))
        room = path.stat().st_size + 20
        with largest_file(room), pytest.raises(StorageError, match=str(path)):
            metrics.append(measurement(2))
        metrics.append(measurement(3))
    assert path.read_bytes().endswith(b"\n")
    assert read_metrics(path) == [measurement(1), measurement(3)]


def test_a_file_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(StorageError, match="cannot write /none/metrics"):
        MetricsFile(Path("/none/metrics.jsonl")).open()


# ---------------------------------------------------------------------- curve


def test_a_curve_is_drawn_without_a_display(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    assert not draw_curve(path, [], title="demo")  # nothing measured, nothing drawn
    assert not path.exists()
    lines = [
        Measurement(
            time=float(t),
            step=t,
            samples=64 * t,
            loss=3.0 / (t + 1),
            held_out_loss=3.1 / (t + 1) if t > 4 else None,
            metric=t / 40 if t > 4 else None,
        )
        for t in range(20)
    ]
    for part in (lines, lines[:1]):  # the second without a metric: only the loss
        assert draw_curve(path, part, title="demo")
        assert path.read_bytes().startswith(b"\x89PNG")


def drawn(tmp_path: Path, *metrics: float | None) -> np.ndarray[tuple[int, ...], np.dtype]:
    """Return the pixels of a curve of these: (height, width, 4) from 0 to 1."""
    path = tmp_path / "curve.png"
    lines = [
        Measurement(time=t, step=1, samples=64, loss=3.0 - t, metric=metric)
        for t, metric in enumerate(metrics, 1)
    ]
    assert draw_curve(path, lines, title="demo")
    return matplotlib.image.imread(path)


def test_a_metric_that_is_the_loss_has_no_panel_of_its_own(tmp_path: Path) -> None:
    pictures: list[bytes] = []
    for name, metric in (("loss", 2.0), ("mse", None)):
        path = tmp_path / f"{name}.png"
        line = Measurement(time=1.0, step=1, samples=64, loss=2.0, metric_name=name, metric=metric)
        assert draw_curve(path, [line], title="demo")
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]


def test_a_single_evaluation_is_a_point_that_can_be_seen(tmp_path: Path) -> None:
    """A line through one point has no ink: the panel looked empty."""
    pixels = drawn(tmp_path, None, 0.5)
    lower = pixels[pixels.shape[0] // 2 :]
    assert (np.ptp(lower[..., :3], axis=-1) > 0.2).sum() > 20  # colourful


def test_a_panel_without_any_number_says_so(tmp_path: Path) -> None:
    pixels = drawn(tmp_path, math.nan, math.nan)
    height, width, _ = pixels.shape
    middle = pixels[int(0.65 * height) : int(0.75 * height), width // 3 : 2 * width // 3]
    assert (middle[..., :3].max(axis=-1) < 0.4).sum() > 50  # words, dark


def test_a_short_run_shows_its_points_and_noise_does_not_fill_the_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four accuracies between 97.7 and 99 % were a line from the lower corner to the upper."""
    figures: list[Figure] = []

    def save(figure: Figure, path: Path, **_: str) -> None:
        figures.append(figure)
        path.write_bytes(b"")

    monkeypatch.setattr(Figure, "savefig", save)
    drawn_of: list[tuple[float, ...]] = [(0.977, 0.982, 0.99, 0.988), tuple(np.linspace(0, 1, 90))]
    for shares in drawn_of:
        lines = [
            Measurement(time=t + 2.0, step=1, samples=64, loss=5.0 + share / 100, metric=share)
            for t, share in enumerate(shares)
        ]
        assert draw_curve(tmp_path / "curve.png", lines, title="demo")
    (loss, metric), (_, whole) = (figure.axes for figure in figures)
    assert metric.get_xlim()[0] == 0.0
    assert np.ptp(metric.get_ylim()) == pytest.approx(0.1)
    assert metric.get_ylim()[1] <= 1.0
    assert np.ptp(loss.get_ylim()) >= 0.49
    assert np.ptp(whole.get_ylim()) > 1.0  # wide enough already
    assert [metric.lines[0].get_marker(), whole.lines[0].get_marker()] == [".", ""]
