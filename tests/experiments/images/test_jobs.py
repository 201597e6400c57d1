"""The job files of this folder, and the plain loop, on a few images."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from distbelief.config.load import load_job
from distbelief.task.losses import loss_function
from distbelief.task.task import build_model
from experiments import baseline, images
from experiments.images.model import staged_net


FOLDER = Path(images.__file__).parent


def test_the_demo_is_of_three_stages_in_small() -> None:
    job = load_job(FOLDER / "demo.toml")
    net = build_model(job.model)
    kinds = [type(layer).__name__ for layer in net.children()]
    stage = ["LocallyConnected2d", "L2Pool2d", "LocalContrastNorm2d"]
    assert kinds == [*stage * 3, "Flatten", "Linear"]
    outputs = net(torch.zeros(2, 1, 32, 32))
    assert outputs.shape == (2, 400)
    assert (job.cluster.replicas, job.cluster.partitions) == (2, 2)


def test_the_papers_job_can_be_read() -> None:
    job = load_job(FOLDER / "paper.toml")
    assert job.model.arguments["categories"] == 20_902
    assert job.cluster.partitions == 81


def test_classifiers_begin_at_the_share_of_their_category() -> None:
    net = staged_net([{"maps": 2, "filter": 3, "pool": 2}], 5, 12, 1)
    shares = net.get_parameter("categories.bias").sigmoid()
    torch.testing.assert_close(shares, torch.full((5,), 0.2))


def test_one_vs_all_is_the_sum_of_logistic_losses() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 4, generator=generator)
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    expected = functional.binary_cross_entropy_with_logits(
        outputs, functional.one_hot(targets, 4).float(), reduction="sum"
    )
    found = loss_function("one_vs_all")(outputs, targets)
    torch.testing.assert_close(found, expected / 6)
    deep = loss_function("one_vs_all")(outputs.T.reshape(1, 4, 6), targets.reshape(1, 6))
    torch.testing.assert_close(deep, expected)


def test_the_plain_loop_learns_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(FOLDER / "demo.toml"), "--reports", "1", "--learning-rate", "0.02"]
    stages = "[{ maps = 4, filter = 3, pool = 3, step = 2 }]"
    small = {"categories": 3, "copies": 20, "size": 12}
    for part in ("train", "test"):
        for key, number in small.items():
            arguments += ["--set", f"data.{part}.arguments.{key}={number}"]
        arguments += ["--set", f'data.{part}.arguments.cache="{tmp_path}"']
    for key, value in (("stages", stages), ("categories", 3), ("size", 12)):
        arguments += ["--set", f"model.arguments.{key}={value}"]
    arguments += ["--set", "algorithm.batch_size=10", "--set", "stop.epochs=10"]
    assert baseline.main(arguments) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["samples"] == 600
    assert summary["accuracy"] > 0.6
    assert baseline.main([*arguments, "--set", "algorithm.batch_size=61"]) == 1
    assert "more than the 60 samples" in capsys.readouterr().err
