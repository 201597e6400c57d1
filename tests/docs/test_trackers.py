"""The callbacks of docs/howto/loop-control.md hand a job's figures to trackers.

MLflow, wandb and trackio have stand-ins with their functions; TensorBoard's files are read back.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distbelief.job.callbacks import Callbacks
from distbelief.supervisor.view import JobView
from tests.docs.pages import ROOT, blocks


PAGE = ROOT / "docs" / "howto" / "loop-control.md"
VIEWS = [
    JobView(),
    JobView(step=10, loss=2.5, figures={"clock_gap_max": 3.0}),
    JobView(step=20, loss=1.5, n_evaluations=1, held_out_loss=1.75, metrics={"accuracy": 0.5}),
    JobView(step=20, loss=1.5, n_evaluations=2, held_out_loss=0.75, metrics={"accuracy": 0.75}),
]
LOGGED = [
    ({"loss": 2.5, "clock_gap_max": 3.0}, 10),
    ({"loss": 1.5}, 20),
    ({"held_out/loss": 1.75, "held_out/accuracy": 0.5}, 20),
    ({"held_out/loss": 0.75, "held_out/accuracy": 0.75}, 20),
]


@pytest.fixture
def trackers() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(next(each.text for each in blocks(PAGE) if each.title == "trackers.py"), names)
    return names


def shown(callback: object) -> None:
    callbacks = Callbacks([callback])
    assert [callbacks(view) for view in VIEWS] == [False] * len(VIEWS)
    callbacks.end(SimpleNamespace())


def test_mlflow_gets_them_without_waiting(
    trackers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[dict[str, float], int]] = []
    ended: list[bool] = []

    def log_metrics(metrics: dict[str, float], *, step: int, synchronous: bool) -> None:
        assert not synchronous
        found.append((metrics, step))

    mlflow = SimpleNamespace(log_metrics=log_metrics, end_run=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    shown(trackers["MLflow"]())
    assert found == LOGGED
    assert ended == [True]


def test_wandb_gets_them(trackers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[dict[str, float], int]] = []
    said: list[str] = []
    wandb = SimpleNamespace(
        init=lambda *, project: said.append(project),
        log=lambda values, *, step: found.append((values, step)),
        finish=lambda: said.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    shown(trackers["Wandb"]())
    assert found == LOGGED
    assert said == ["distbelief", "finished"]


def test_tensorboards_files_have_them(trackers: dict[str, Any], tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown(trackers["TensorBoard"](str(tmp_path)))
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    found = {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    assert found == {
        "loss": [(10, 2.5), (20, 1.5)],
        "clock_gap_max": [(10, 3.0)],
        "held_out/loss": [(20, 1.75), (20, 0.75)],
        "held_out/accuracy": [(20, 0.5), (20, 0.75)],
    }
