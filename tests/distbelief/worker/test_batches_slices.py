"""What a machine reads of a batch, and refuses to read."""

import numpy as np
import pytest
import torch

from distbelief.data.dataset import Dataset
from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.losses import append_loss
from distbelief.graph.region import Region
from distbelief.worker.batches import BatchIndices, SliceReader
from tests.distbelief.examples import net


class Labelled:
    """Samples whose labels are given."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), self.labels[index]


def reader(dataset: Dataset, *, loss: str = "cross_entropy") -> SliceReader:
    """Of a machine that has half of the inputs, and the labels of all samples."""
    graph = append_loss(capture(net(), [InputSpec(shape=(4,))]), loss)
    return SliceReader(
        dataset,
        graph=graph,
        reads={"input": [Region.of(4).replaced(0, (2, 4))], "targets": [Region(())]},
        dtype=torch.float64,
    )


def chosen(*indices: int) -> BatchIndices:
    return BatchIndices(position=0, indices=np.array(indices))


def test_a_portion_is_what_this_machine_needs_and_no_more() -> None:
    portion = reader(Labelled([0, 1, 1, 0])).read(7, 3, chosen(2, 0))
    assert (portion.life, portion.step, portion.targets) == (7, 3, None)
    (inputs,), (labels,) = portion.inputs["input"], portion.inputs["targets"]
    assert inputs.dtype == torch.float64
    assert inputs.tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert labels.tolist() == [1, 0]


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", "one_vs_all"])
@pytest.mark.parametrize("label", [2, -1, 9])
def test_a_label_that_no_machine_has_a_class_for_is_refused(loss: str, label: int) -> None:
    """It once counted as a sample without a loss: each machine left it to the other.

    One process was told by torch, replicas of several trained on.
    """
    labels = [0, 1, 0, label]
    reading = reader(Labelled(labels), loss=loss)
    assert reading.read(1, 0, chosen(0, 1, 2)).inputs["targets"][0].tolist() == [0, 1, 0]
    claim = rf"\[data.train\] sample 3 has label {label}, .* 2 outputs \(labels 0 to 1\)"
    with pytest.raises(JobError, match=claim):
        reading.read(1, 0, chosen(1, 3))


def test_who_only_keeps_targets_refuses_labels_too() -> None:
    """As machines that evaluate do: their metric counted such a sample as wrong."""
    graph = append_loss(capture(net(), [InputSpec(shape=(4,))]), "one_vs_all")
    reading = SliceReader(
        Labelled([0, 3]),
        graph=graph,
        reads={},
        dtype=torch.float32,
        keeps_targets=True,
        table="data.test",
    )
    with pytest.raises(JobError, match=r"\[data.test\] sample 1 has label 3"):
        reading.read(1, 0, chosen(0, 1))


def test_the_label_that_counts_for_nothing_is_read() -> None:
    portion = reader(Labelled([0, -100])).read(1, 0, chosen(0, 1))
    assert portion.inputs["targets"][0].tolist() == [0, -100]
