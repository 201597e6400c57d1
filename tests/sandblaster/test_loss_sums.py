"""A batch method adds up the losses of chunks: as plain torch has them for the whole batch, or not.

`distbelief` and plain torch are compared where sums are right; other losses are refused.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.job.launch.preflight import answer_to
from distbelief.task import dry_run
from distbelief.task.losses import LOSSES, loss_function
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.local_executor import FlatModel, LocalExecutor, summed


N = 24
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(N) % 3


class Labelled:
    """Samples with labels of three classes, some of them -100."""

    def __init__(self, n_ignored: int = 0, first: int = 0) -> None:
        self.targets = LABELS.clone()
        self.targets[first : first + n_ignored] = -100

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index], self.targets[index]


class WithLoss(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    @override
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Items(Labelled):
    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"x": X[index], "labels": self.targets[index]}


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2.0, 5.0]))


def no_class_0(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=0)


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(targets)))


def sum_over_samples(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Right: the same number divides whatever counts."""
    return functional.cross_entropy(outputs, targets, reduction="sum") / len(outputs)


JOB = f"""
[model]
factory = "torch.nn:Linear"
arguments = {{ in_features = 5, out_features = 3 }}

[data.train]
factory = "{__name__}:Labelled"

[algorithm]
name = "sandblaster"
loss = "cross_entropy"
portion = {N}
"""


def check(folder: Path, *overrides: str) -> None:
    job = parse_job(JOB, path=folder / "job.toml", overrides=overrides)
    answer_to(job, initial_file=str(folder / "i.safetensors"), plan=str(folder / "p.json"))


IGNORED = "data.train.arguments.n_ignored=5"
LABEL = "sample 0 has label -100, which does not count"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([IGNORED], LABEL),
        ([IGNORED, "cluster.partitions=2"], LABEL),
        ([IGNORED, "algorithm.method=owl-qn", "algorithm.l1=0.1"], LABEL),
        (
            [
                IGNORED,
                f"model.factory={__name__}:WithLoss",
                "model.arguments={}",
                f"data.train.factory={__name__}:Items",
                "algorithm.loss=model",
            ],
            LABEL,
        ),
        ([f"algorithm.loss={__name__}:weighted"], "which a batch method adds up"),
        ([f"algorithm.loss={__name__}:no_class_0"], "which a batch method adds up"),
        ([f"algorithm.loss={__name__}:contrast"], "which a batch method adds up"),
        ([IGNORED, f"algorithm.loss={__name__}:weighted"], "which a batch method adds up"),
    ],
)
def test_losses_whose_parts_do_not_add_up_are_refused_before_the_start(
    tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises(JobError, match=text):
        check(tmp_path, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"algorithm.loss={__name__}:sum_over_samples", IGNORED],
        [
            f"model.factory={__name__}:WithLoss",
            "model.arguments={}",
            f"data.train.factory={__name__}:Items",
            "algorithm.loss=model",
        ],
    ],
)
def test_means_over_the_samples_pass(tmp_path: Path, overrides: list[str]) -> None:
    check(tmp_path, *overrides)


# --- beside plain torch ---


@pytest.mark.parametrize("name", [*LOSSES, "sum"])
def test_the_sum_over_chunks_is_plain_torch_s_batch(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.rand(N, 3, generator=generator, dtype=torch.float64)
    targets = torch.rand(N, 3, generator=generator, dtype=torch.float64)
    if name in {"cross_entropy", "nll", "multi_margin", "one_vs_all", "sum"}:
        targets = LABELS
    elif name == "multilabel_margin":
        targets = torch.argsort(targets, dim=1)
    elif name in {"hinge_embedding", "soft_margin"}:
        targets = targets.round() * 2 - 1
    loss = sum_over_samples if name == "sum" else loss_function(name)
    total = sum(
        (
            summed(loss, checks=True)(outputs[start : start + 7], targets[start : start + 7])
            for start in range(0, N, 7)
        ),
        start=torch.zeros((), dtype=torch.float64),
    )
    torch.testing.assert_close(total / N, loss(outputs, targets), rtol=1e-12, atol=0.0)


def test_why_labels_that_do_not_count_are_refused() -> None:
    """What was computed without a word: another function than plain torch's."""
    data = Labelled(n_ignored=5)
    outputs = X[:, :3]
    loss = functional.cross_entropy
    parts = [slice(0, 8), slice(8, N)]
    total = sum(float(summed(loss)(outputs[part], data.targets[part])) for part in parts)
    assert abs(total / N - float(loss(outputs, data.targets))) > 1e-2


# --- where the first samples show nothing ---


def executor(loss: str, *, n_ignored: int = 0) -> LocalExecutor:
    names = dry_run.Names(model="torch.nn:Linear", loss=loss, data="data.train")
    data = Labelled(n_ignored, first=20)
    model = FlatModel(nn.Linear(5, 3))
    return LocalExecutor(model, data, loss=loss_function(loss), names=names, sums=True)


def step(of: LocalExecutor, start: int, stop: int) -> float | None:
    samples = BatchIndices(indices=torch.arange(start, stop).numpy(), position=start)
    batch = of._reader.read(samples)
    one = BatchSlice(generation=0, step=0, samples=samples, inputs={}, batch=batch)
    return of.run(one, put=lambda *_: None).loss


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", f"{__name__}:weighted"])
def test_later_samples_are_refused_when_they_come(loss: str) -> None:
    if "weighted" in loss:
        with pytest.raises(JobError, match=r"loss weighted is .* which a batch method adds up"):
            step(executor(loss), 0, 12)
        return
    one = executor(loss, n_ignored=2)
    assert step(one, 0, 12) is not None
    with pytest.raises(JobError, match="sample 20 has label -100"):
        step(one, 12, N)


def test_random_losses_and_those_of_one_number_of_samples_are_not_judged() -> None:
    dry_run.check_parts(lambda part: float(torch.rand(())) + (part.stop or 0), 9, loss="random")

    def of_nine(part: dry_run.PartOf) -> float:
        if part != slice(9):
            raise ValueError(part)
        return 1.0

    dry_run.check_parts(of_nine, 9, loss="nine")
    dry_run.check_parts(lambda part: float(part.stop), 2, loss="few")
