import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from experiments.baseline import draw_batches, main
from tests.distbelief.jobs import small


HALVES = f"{__name__}:halves"
JOB = small(
    "torch.nn:Linear",
    HALVES,
    f"""
[model.arguments]
in_features = 2
out_features = 2
[data.test]
factory = "{HALVES}"
[evaluation]
metric = "accuracy"
""",
)


def halves() -> TensorDataset:
    """Points of a square; the class is the half that they are in."""
    inputs = torch.rand(256, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0.5).long())


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_the_baseline_learns_and_ends_with_json(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    options = ["--rule", rule, "--learning-rate", "0.5", "--samples", "8000"]
    assert main([str(job), *options]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["rule"] == rule
    assert summary["samples"] == 8000
    assert summary["curve"][-1]["loss"] < summary["curve"][0]["loss"]
    assert summary["accuracy"] > 0.9


def test_a_wrong_job_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.replace("batch_size = 8", "batch_size = 300"))
    assert main([str(job)]) == 1
    assert capsys.readouterr().err == "batch_size = 300 is more than the 256 samples\n"


def test_an_epoch_of_batches_holds_no_sample_twice() -> None:
    batches = draw_batches(10, size=3, seed=0)
    first, second = ([next(batches) for _ in range(3)] for _ in range(2))
    assert len({*chain(*first)}) == 9
    assert first != second
