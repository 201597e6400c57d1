"""Which labels a layer graph has classes for; others belong to no machine.

Where classes are split over machines each adds what it has of a label's class. A label
beyond them all would be nobody's, and count as a sample without a loss: in one process
torch raises, and so has a replica of several.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from distbelief.errors import JobError
from distbelief.graph.kinds.class_losses import ClassSums
from distbelief.graph.kinds.place_losses import PlaceLoss
from distbelief.graph.layer import LayerGraph


IGNORED_LABEL: Final = -100  # torch's `ignore_index`: such a target counts for nothing


def class_counts(graph: LayerGraph) -> Mapping[str, int]:
    """Return how many classes there are, by the input that has their labels."""
    found = {}
    for layer in graph.layers:
        is_place = layer.kind == PlaceLoss.name and layer.options["labels"]
        is_class = layer.kind == ClassSums.name and not layer.options["soft"]
        if is_place or is_class:
            scores, dim = layer.input_shapes[0], layer.integer("dim")
            found[layer.inputs[1]] = scores[dim]
    return found


def check_labels(
    labels: torch.Tensor, n_classes: int, *, indices: Sequence[int], table: str
) -> None:
    """Refuse what is no label.

    Args:
        labels: (n_samples, ...), whole numbers.
        n_classes: They are 0 to n_classes - 1.
        indices: Of the samples, in the data set.
        table: Table of the job file that names the data set.

    Raises:
        JobError: naming the first sample that has one.
    """
    bad = ((labels < 0) | (labels >= n_classes)) & (labels != IGNORED_LABEL)
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0][0])
    label = int(labels[row][bad[row]].flatten()[0])
    raise JobError(
        f"[{table}] sample {indices[row]} has label {label}, but the model has "
        f"{n_classes} outputs (labels 0 to {n_classes - 1}): give it more outputs, or "
        "mend the labels"
    )
