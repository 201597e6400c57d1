"""Jobs that keep their best values, and end by patience, with real processes."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.processes.commands import LONG, printed, said, sets, train, write_job


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

    resume = ("--resume", "runs/tiny", *OFTEN)
    with train(folder, *resume, *sets("evaluation.subset=100"), job=()) as command:
        assert command.wait() == 2
        assert 'another [evaluation] subset (none, now "100 of seed 0")' in command.output
    # Other shards, and values that get worse: the best ones stay.
    (run / "best.safetensors").unlink()
    goal = sets(f"stop.samples={first['samples'] + 2000}", "cluster.shards=3")
    said(folder, "train", *resume, *goal)
    second = json.loads((run / "summary.json").read_bytes())
    assert second["kept"]["metric"] >= first["kept"]["metric"]
    best = accuracy_of(folder, run / "best.safetensors")
    assert best == pytest.approx(second["kept"]["metric"])


CALLBACKS = """
import json

class Notes:
    def __init__(self):
        self.heard = []
    def on_step(self, view):
        self.heard.append("step")
    def on_evaluation(self, view):
        self.heard.append("evaluation")
        return view.n_evaluations == 2
    def on_checkpoint(self, view):
        self.heard.append("checkpoint")
    def on_end(self, run):
        with open("heard.json", "w") as file:
            json.dump([run.summary.stop_reason, run.exit_code, self.heard], file)
"""
PROGRAM = """
import distbelief

class Fails:
    def on_checkpoint(self, view):
        raise KeyError("mine")

try:
    distbelief.train("tiny.toml", show=False, callbacks=[Fails()])
except KeyError as error:
    print("raised", error)
"""


def test_callbacks_of_a_job_hear_of_it_and_may_end_it(tmp_path: Path) -> None:
    write_job(tmp_path, more=CALLBACKS)
    own = sets('output.callbacks=["tiny:Notes"]', 'evaluation.every="100 ms"')
    said(tmp_path, "train", "tiny.toml", *own, *LONG)
    reason, code, heard = json.loads((tmp_path / "heard.json").read_bytes())
    assert (reason, code) == ("stopped by the caller", 0)
    assert {*heard} == {"step", "evaluation", "checkpoint"}
    assert heard.count("evaluation") >= 2  # and the last one, of all samples


def test_an_error_of_a_callback_is_told_with_its_name(tmp_path: Path) -> None:
    write_job(tmp_path, more="def fails(view):\n    raise KeyError('mine')\n")
    with train(tmp_path, *sets('output.callbacks=["tiny:fails"]'), *LONG) as command:
        assert command.wait() == 1
        assert "callback tiny.fails raised KeyError: 'mine' at " in command.output
        assert "unexpected" not in command.output


def test_an_error_of_a_callback_ends_the_job_in_order_and_is_raised(folder: Path) -> None:
    assert printed(folder, PROGRAM) == "raised 'mine'\n"
    summary = json.loads((folder / "runs" / "tiny" / "summary.json").read_bytes())
    assert summary["stop_reason"] == "callback __main__.Fails.on_checkpoint raised KeyError: 'mine'"
    assert (folder / "runs" / "tiny" / "model.safetensors").is_file()
