"""`distbelief demo`: what a bare installation trains."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from distbelief.cli import demo_task
from distbelief.cli.demo import JOB
from distbelief.cli.main import app


def test_its_digits_are_drawn_whole_and_equal_for_equal_seeds() -> None:
    images, labels = demo_task.digits(200, 1).tensors
    assert images.shape == (200, 1, demo_task.SIDE, demo_task.SIDE)
    assert set(labels.tolist()) == set(range(10))
    assert torch.equal(images, demo_task.digits(200, 1).tensors[0])
    assert len({tuple(glyph.flatten().tolist()) for glyph in demo_task.glyphs()}) == 10
    ink = demo_task.glyphs().sum((1, 2))[labels]
    assert (images.sum((1, 2, 3)) - ink).abs().mean() < 10 * demo_task.NOISE
    assert demo_task.net()(images).shape == (200, 10)


@pytest.mark.usefixtures("forked_roles")
def test_it_learns_and_names_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(JOB, "stop", {"samples": 10_000})
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.output
    assert "distbelief dashboard runs/demo" in result.output
    summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
    assert summary["samples"] >= 10_000
    assert summary["loss"] < 2.3  # that of guessing is log 10
