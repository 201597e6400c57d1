import json
from pathlib import Path

import pytest
import torch

from experiments.speech.baseline import draw_batches, main
from experiments.speech.errors import SpeechError
from tests.experiments.speech.conftest import TEST, TRAIN


JOB = f"""
[model]
factory = "experiments.speech.model:acoustic_net"
[model.arguments]
hidden = [32]
states = 210
activation = "relu"
[data.train.arguments]
part = "train"
hours = {TRAIN.hours}
survey_hours = {TRAIN.hours}
[data.test.arguments]
part = "test"
hours = {TEST.hours}
survey_hours = {TRAIN.hours}
[algorithm]
batch_size = 64
"""


@pytest.mark.parametrize("rule", [pytest.param("sgd", marks=pytest.mark.soak), "adagrad"])
def test_the_baseline_learns_and_ends_with_json(
    rule: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    options = ["--rule", rule, "--cache", str(cache), "--samples", "12800"]
    assert main([str(job), *options]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["rule"] == rule
    assert summary["samples"] == 12_800
    assert summary["curve"][-1]["loss"] < summary["curve"][0]["loss"]
    assert summary["accuracy"] > 0.05  # chance: one state in 210, the commonest 3 %


def test_a_wrong_job_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.replace('part = "train"', 'part = "dev"'))
    assert main([str(job), "--cache", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "part = 'dev' must be 'train' or 'test'\n"


def test_an_epoch_of_batches_holds_no_frame_twice() -> None:
    batches = draw_batches(10, size=3, seed=0)
    first, second = ([next(batches) for _ in range(3)] for _ in range(2))
    assert len(set(torch.cat(first).tolist())) == 9
    assert torch.cat(first).tolist() != torch.cat(second).tolist()


def test_a_batch_larger_than_the_part_is_refused() -> None:
    with pytest.raises(SpeechError, match="batch_size = 11 is more than the 10 frames"):
        next(draw_batches(10, size=11, seed=0))
