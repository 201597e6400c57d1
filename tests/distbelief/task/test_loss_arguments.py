"""[algorithm] loss = { name = ..., ... }: arguments of torch's losses, against torch's classes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distbelief.config import toml
from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.job.launch import preflight
from distbelief.task import losses
from distbelief.task.data import read_batch
from distbelief.task.task import capture_for, sample_of
from tests.distbelief.jobs import small


BATCH: dict[str, object] = {
    "model": {"factory": "m:net"},
    "data": {"train": {"factory": "m:points"}},
}
LABELS = torch.arange(12) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def points() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(12, 4), LABELS)


def numbers() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(12, 4), torch.rand(12, 3))


def loss_in(table: object) -> str:
    job = parse_job(small("m:net", "m:points", algorithm={"loss": table}), path="job.toml")
    again = parse_job(job.to_toml(), path="job.toml")
    assert again.loss == job.loss
    return job.loss


@pytest.mark.parametrize(
    ("table", "plain"),
    [
        (
            {"name": "CrossEntropyLoss", "label_smoothing": 0.1},
            nn.CrossEntropyLoss(label_smoothing=0.1),
        ),
        (
            {"name": "cross_entropy", "weight": [1.0, 2, 0.5], "ignore_index": 1},
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), ignore_index=1),
        ),
        ({"name": "MultiMarginLoss", "margin": 0.5}, nn.MultiMarginLoss(margin=0.5)),
    ],
)
def test_a_loss_of_labels_has_the_bits_of_torchs(
    table: dict[str, object], plain: nn.Module
) -> None:
    name = loss_in(table)
    outputs = net()(points().tensors[0]).detach()
    assert torch.equal(losses.loss_function(name)(outputs, LABELS), plain(outputs, LABELS))
    assert losses.usual_metric(name) == "accuracy"
    assert not losses.is_named(name)  # it has no split rule


@pytest.mark.parametrize(
    ("table", "plain"),
    [
        ({"name": "HuberLoss", "delta": 0.1}, nn.HuberLoss(delta=0.1)),
        ({"name": "smooth_l1_loss", "beta": 2}, nn.SmoothL1Loss(beta=2)),
        (
            {"name": "BCEWithLogitsLoss", "pos_weight": [1.0, 2.0, 3.0], "reduction": "mean"},
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])),
        ),
        (
            {"name": "PoissonNLLLoss", "log_input": True, "full": True},
            nn.PoissonNLLLoss(log_input=True, full=True),
        ),
    ],
)
def test_a_loss_of_numbers_has_the_bits_of_torchs(
    table: dict[str, object], plain: nn.Module
) -> None:
    name = loss_in(table)
    inputs, targets = numbers().tensors
    outputs = net()(inputs).detach()
    assert torch.equal(losses.loss_function(name)(outputs, targets), plain(outputs, targets))
    assert losses.usual_metric(name) == "mse"


def test_without_arguments_it_is_the_name() -> None:
    assert loss_in({"name": "CrossEntropyLoss"}) == loss_in("cross_entropy") == "cross_entropy"
    assert loss_in({"name": "KLDivLoss", "reduction": "batchmean"}) == "kl_div"


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"name": "CrossEntropyLoss", "label_smoothin": 0.1}, "no argument 'label_smoothin'. Did"),
        ({"name": "CrossEntropy", "label_smoothing": 0.1}, "there is no loss 'CrossEntropy'"),
        ({"label_smoothing": 0.1}, "loss has name = None: a table is for a loss of torch"),
        (
            {"name": "my.module:loss", "gamma": 2},
            "bind those of your own function, as by functools",
        ),
        ({"name": "MSELoss", "reduction": "sum"}, "must be the mean over the samples: leave reduc"),
        ({"name": "KLDivLoss", "reduction": "mean"}, 'leave reduction out, or use "batchmean"'),
        ({"name": "CrossEntropyLoss", "weight": "balanced"}, "weight = 'balanced': use a number"),
        (
            {"name": "one_vs_all", "weight": [1.0]},
            "'one_vs_all' has no argument 'weight'. It has n",
        ),
    ],
)
def test_wrong_arguments_are_refused(table: dict[str, object], text: str) -> None:
    with pytest.raises(JobError) as caught:
        loss_in(table)
    assert text in str(caught.value)
    assert "(('" not in str(caught.value)


@pytest.mark.parametrize("argument", [{"weight": [1.0, 2.0, 0.5]}, {"ignore_index": 1}])
def test_a_batch_method_refuses_weights_of_samples(argument: dict[str, object]) -> None:
    """Its figures would depend on the size of its chunks."""
    tables = {"name": "sandblaster", "loss": {"name": "CrossEntropyLoss", **argument}}
    with pytest.raises(JobError, match=r"weighs the samples of a chunk.*: leave weight and ign"):
        parse_job(toml.write({**BATCH, "algorithm": tables}), path="job.toml")
    tables["loss"] = {"name": "BCEWithLogitsLoss", "pos_weight": [1.0, 2.0, 0.5]}
    job = parse_job(toml.write({**BATCH, "algorithm": tables}), path="job.toml")
    assert job.loss == "binary_cross_entropy_with_logits(pos_weight=[1.0, 2.0, 0.5])"


@pytest.mark.parametrize("loss", ["cross_entropy(", "cross_entropy(1)", "f(**{})", "mse(beta=2)"])
def test_text_that_is_no_loss_is_refused(loss: str) -> None:
    with pytest.raises(JobError, match="loss"):
        losses.loss_function(loss)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_job_with_arguments_passes_the_check(tmp_path: Path, partitions: int) -> None:
    algorithm = {"loss": {"name": "CrossEntropyLoss", "label_smoothing": 0.1}, "batch_size": 6}
    cluster = {"partitions": partitions}
    text = small(f"{__name__}:net", f"{__name__}:points", algorithm=algorithm, cluster=cluster)
    job = parse_job(text, path=tmp_path / "job.toml")
    found = preflight.answer_to(
        job, initial_file=str(tmp_path / "i.safetensors"), plan=str(tmp_path / "plan.json")
    )
    assert found.proof.startswith("Split replicas") == (partitions == 2)
    batch = read_batch(points(), range(6))
    assert capture_for(job.task, sample_of(points())).graph.outputs
    assert batch is not None


def test_labels_are_checked_as_for_the_plain_loss(tmp_path: Path) -> None:
    algorithm = {"loss": {"name": "CrossEntropyLoss", "label_smoothing": 0.1}}
    text = small(f"{__name__}:net", f"{__name__}:numbers", algorithm=algorithm)
    text = text.replace(":numbers", ":six_labels")
    job = parse_job(text, path=tmp_path / "job.toml")
    with pytest.raises(JobError, match=r"label"):
        preflight.answer_to(job, initial_file=str(tmp_path / "i.safetensors"), plan="")


def six_labels() -> TensorDataset:
    return TensorDataset(torch.zeros(12, 4), torch.arange(12) % 6)
