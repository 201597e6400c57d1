"""Jobs that keep their best values, and end by patience, with real processes."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.processes.commands import said, sets


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

OFTEN = sets('evaluation.every="100 ms"', 'output.keep="best"')
SLOWLY = sets("data.train.arguments={ pause = 0.002 }")


def accuracy_of(folder: Path, weights: Path) -> float:
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    net.load_state_dict(load_file(weights))
    held_out = runpy.run_path(str(folder / "tiny.py"))["frames"](500, 7)
    with torch.no_grad():
        hits = net(held_out.inputs).argmax(1) == held_out.targets
    return float(hits.float().mean())


def test_the_best_values_are_those_that_were_measured_and_outlast_a_resharding(
    folder: Path,
) -> None:
    run = folder / "runs" / "tiny"
    said(folder, "train", "tiny.toml", *OFTEN, *SLOWLY, *sets("stop.patience=3", "stop.epochs=50"))
    first = json.loads((run / "summary.json").read_bytes())
    assert "has not got better than" in first["stop_reason"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    found = [line["metric"] for line in lines if line["metric"] is not None]
    assert first["kept"]["metric"] == first["best_metric"] == max(found)
    assert accuracy_of(folder, run / "best.safetensors") == pytest.approx(max(found))
    assert accuracy_of(folder, run / "model.safetensors") == pytest.approx(first["metric"])

    resume = ("train", "--resume", "runs/tiny")
    assert "the best values were measured by them" in said(
        folder, *resume, *OFTEN, *sets("evaluation.subset=100"), code=2
    )
    # Other shards, and values that get worse: the best ones stay.
    (run / "best.safetensors").unlink()
    goal = sets(f"stop.samples={first['samples'] + 2000}", "cluster.shards=3")
    said(folder, *resume, *OFTEN, *goal)
    second = json.loads((run / "summary.json").read_bytes())
    assert second["kept"]["metric"] >= first["kept"]["metric"]
    best = accuracy_of(folder, run / "best.safetensors")
    assert best == pytest.approx(second["kept"]["metric"])
