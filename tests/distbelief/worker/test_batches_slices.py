"""What a rank reads of a batch, and labels that it rejects."""

import numpy as np
import pytest
import torch

from distbelief.core.errors import JobError
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.region import Region
from distbelief.task.data import Dataset
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


def reader(dataset: Dataset, *, loss: str = "cross_entropy", sums: bool = False) -> SliceReader:
    """Return the reader of a rank with half of the inputs and the labels of all samples."""
    graph = append_loss(capture(net(), [InputSpec(shape=(4,))]), loss)
    return SliceReader(
        dataset,
        graph=graph,
        reads={"input": [Region.of(4).replaced(0, (2, 4))], "targets": [Region(())]},
        dtype=torch.float64,
        sums=sums,
    )


def samples(*indices: int) -> BatchIndices:
    return BatchIndices(position=0, indices=np.array(indices))


def test_a_slice_is_what_the_rank_needs_and_no_more() -> None:
    batch_slice = reader(Labelled([0, 1, 1, 0])).read(7, 3, samples(2, 0))
    assert (batch_slice.generation, batch_slice.step, batch_slice.batch) == (7, 3, None)
    (inputs,), (labels,) = batch_slice.inputs["input"], batch_slice.inputs["targets"]
    assert inputs.dtype == torch.float64
    assert inputs.tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert labels.tolist() == [1, 0]


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", "one_vs_all"])
@pytest.mark.parametrize("label", [2, -1, 9])
def test_a_label_out_of_range_is_rejected(loss: str, label: int) -> None:
    """Regression: it counted as a sample without a loss, since each rank left it to the other.

    torch raises in one process; partitioned replicas trained on.
    """
    labels = [0, 1, 0, label]
    slice_reader = reader(Labelled(labels), loss=loss)
    assert slice_reader.read(1, 0, samples(0, 1, 2)).inputs["targets"][0].tolist() == [0, 1, 0]
    claim = rf"\[data.train\] sample 3 has label {label}, .* 2 outputs \(labels 0 to 1\)"
    with pytest.raises(JobError, match=claim):
        slice_reader.read(1, 0, samples(1, 3))


def test_a_rank_that_only_keeps_targets_checks_labels_too() -> None:
    """Regression: the metric of partitioned evaluators counted such a sample as wrong."""
    graph = append_loss(capture(net(), [InputSpec(shape=(4,))]), "one_vs_all")
    slice_reader = SliceReader(
        Labelled([0, 3]),
        graph=graph,
        reads={},
        dtype=torch.float32,
        keeps_targets=True,
        table="data.test",
    )
    with pytest.raises(JobError, match=r"\[data.test\] sample 1 has label 3"):
        slice_reader.read(1, 0, samples(0, 1))


def test_the_ignored_label_is_accepted() -> None:
    batch_slice = reader(Labelled([0, -100])).read(1, 0, samples(0, 1))
    assert batch_slice.inputs["targets"][0].tolist() == [0, -100]


def test_the_ignored_label_is_refused_where_means_are_added_up() -> None:
    slice_reader = reader(Labelled([0, -100]), sums=True)
    assert slice_reader.read(1, 0, samples(0)).inputs["targets"][0].tolist() == [0]
    with pytest.raises(JobError, match=r"sample 1 has label -100, which does not count"):
        slice_reader.read(1, 0, samples(0, 1))
