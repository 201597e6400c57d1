import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import LayerGraph
from experiments.benchmarks import zoo
from experiments.zoo import measure, models, text
from tests.experiments.benchmarks.runs import figures_in


class Cumulated(nn.Module):
    """A sum along the only dimension has no split rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.cumsum(self.first(x), 1))
        return found


def graph_of(net: nn.Module) -> LayerGraph:
    return capture(net, [InputSpec(shape=(8,))])


def test_the_table_has_forty_models_and_both_sizes_of_each() -> None:
    assert len(models.MODELS) >= 40
    for model in models.MODELS.values():
        assert model.kind in {"transformer", "convolutional", "other"}
        assert [len(each.shape) for each in model.published.inputs] == [
            len(each.shape) for each in model.small.inputs
        ]


def test_a_sum_along_a_whole_dimension_is_no_part_of_the_share() -> None:
    plain, net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Cumulated()
    assert measure._shares(graph_of(plain), plain)["split_share"] == 1
    share = measure._shares(graph_of(net), net)["split_share"]
    assert 0.9 < share < 1  # the sum is little beside two linear layers


def test_what_was_measured_is_kept_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "capture": {"error": None, "split_share": 0.98, "capture_seconds": 1.0},
        "plan": {"error": None, "plan_seconds": 3.0, "speed_ups": [1.5, 2.0, 2.5], "used": [2]},
        "verify": {
            "error": None,
            "agrees": True,
            "bytes_exact": True,
            "verify_seconds": 9.0,
            **{key: [1e-06, 1e-06] for key in ("outputs", "loss", "gradients")},
        },
    }
    monkeypatch.setattr(zoo, "RESULTS", tmp_path)
    (tmp_path / "gpt2.json").write_text(json.dumps(found))
    (tmp_path / "bert.json").write_text(json.dumps(found | {"verify": {"error": "lost"}}))
    zoo.main(["--models", "gpt2", "bert", "--markdown"])
    told = capsys.readouterr().out
    assert "| GPT-2 | 98.0% |" in told
    assert figures_in(told, "zoo") == {
        "models": 2,
        "accepted": 2,
        "agreeing": 1,
        "split_share_worst": 0.98,
        "plan_seconds_worst": 3.0,
    }


def test_a_process_that_ends_early_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed while it measured again left the result of before in the table."""
    (tmp_path / "gpt2.json").write_text(json.dumps({"plan": {"error": None, "plan_seconds": 3.0}}))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = zoo.measured("gpt2", ["plan"], folder=tmp_path, again=True)
    assert found == {"plan": {"error": "the process ended: 1"}}


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    with pytest.raises(JobError, match=r"'no_library'.*pip install 'distbelief\[zoo\]'"):
        models.library("no_library")


def test_letters_are_followed_by_the_next_and_none_is_in_both_parts() -> None:
    train, test = text.passages(part="train"), text.passages(part="test")
    inputs, targets = train[0]
    assert torch.equal(inputs[1:], targets[:-1])
    assert len(train) > 8 * len(test) > 800


class Letters(nn.Module):
    """Gives for each letter the scores of the next: (batch, letters, length)."""

    def __init__(self, *, double: bool = False) -> None:
        super().__init__()
        self.scores = nn.Embedding(text.N_LETTERS, text.N_LETTERS)
        self.to(torch.float64 if double else torch.float32)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(x)
        return scores.transpose(1, 2)


@dataclass
class Trained:
    """A run that took one step more than the job asks for, from `late` seeds on."""

    job: Job
    late: int

    @property
    def summary(self) -> SimpleNamespace:
        return SimpleNamespace(samples=200, staleness_mean=1.5)

    @property
    def model(self) -> nn.Module:
        is_late = self.job.model.seed >= self.late
        return text.one_process(self.job, 200 + 4 * is_late)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_split_replicas_are_compared_with_one_process(
    late: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "trained", lambda job: Trained(job, late))
    factory = f"model.factory={__name__}:Letters"
    fast = "algorithm.rule.learning_rate=0.5"
    assert text.main(["--seeds", "2", "--set", factory, "--set", fast]) == 0
    figures = figures_in(capsys.readouterr().out, "gpt2")
    assert (figures["apart_1_rank"] > 0, figures["apart_2_ranks"] > 0) == (late == 0,) * 2
    assert (figures["difference"] == 0) == (late == 2)
    assert figures["staleness"] == 1.5
    assert 3 < figures["one_process"] < 6
    assert figures["delayed"] != figures["one_process"]
    assert figures["spread"] > 0
