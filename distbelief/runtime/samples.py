"""What one sample of a data set is like: all that a layer graph needs to know of it."""

from typing import final

import msgspec
import torch
from typing_extensions import override

from distbelief.data.dataset import Dataset, read_batch
from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec, evaluation_difference
from distbelief.graph.region import Shape
from distbelief.runtime.capturing import Captured, capture_task
from distbelief.runtime.losses import CLASS_LOSSES
from distbelief.runtime.task import (
    TaskSpec,
    build_dataset,
    build_metric,
    build_model,
)


@final
class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and kinds of an input and its target.

    Attributes:
        input_shape: Without the batch.
        input_is_integer: Words, for example.
        target_shape: Likewise.
        target_is_integer: Labels, for example.
    """

    input_shape: Shape
    input_is_integer: bool
    target_shape: Shape
    target_is_integer: bool

    @override
    def __str__(self) -> str:
        """Return "input [3, 32, 32], target []"."""
        kind = " of whole numbers"
        return (
            f"input {list(self.input_shape)}{kind if self.input_is_integer else ''}, "
            f"target {list(self.target_shape)}{kind if self.target_is_integer else ''}"
        )


def sample_of(dataset: Dataset, *, table: str = "data.train") -> Sample:
    """Return what the first sample of a data set is like.

    Raises:
        JobError: it cannot be read.
    """
    inputs, targets = read_batch(dataset, [0], table=table)
    return Sample(
        input_shape=tuple(inputs.shape[1:]),
        input_is_integer=not _is_number(inputs),
        target_shape=tuple(targets.shape[1:]),
        target_is_integer=not _is_number(targets),
    )


def capture_for(task: TaskSpec, sample: Sample) -> Captured:
    """Return the layer graph of a task on such samples, without any memory.

    Raises:
        JobError: the model cannot be built or captured, or does not take them.
    """
    n_values = 1 if sample.input_is_integer else None  # how many, no layer asks
    loss = task.loss.removesuffix("_loss")
    if ":" in task.loss and sample.target_is_integer:
        raise JobError(
            f"[algorithm] loss = {task.loss!r}: a function of your own gets targets as "
            "floating-point numbers where replicas are split over machines, and those "
            "of [data.train] are whole numbers: use a loss by name, or let a replica "
            "be one process (partitions = 1)"
        )
    if loss == "mse" and sample.target_is_integer:
        raise JobError(
            f"[algorithm] loss {task.loss} compares element by element, and targets of "
            f"[data.train] are whole numbers of shape {list(sample.target_shape)}: let "
            "the data set return them as floating-point numbers, of the outputs' "
            "shape, or use loss = 'cross_entropy' if they are class labels"
        )
    return capture_task(
        task,
        inputs=[InputSpec(shape=sample.input_shape, n_values=n_values)],
        targets=sample.target_shape,
        soft=loss in CLASS_LOSSES and not sample.target_is_integer,
    )


def check_evaluation(task: TaskSpec, sample: Sample) -> None:
    """Check that the layer graph of a task's model holds in evaluation mode as well.

    Raises:
        JobError: the model computes something else then.
    """
    with torch.device("meta"):
        module = build_model(task.model)
    n_values = 1 if sample.input_is_integer else None
    spec = InputSpec(shape=sample.input_shape, n_values=n_values)
    difference = evaluation_difference(module, [spec])
    if difference is not None:
        raise JobError(
            f"{type(module).__name__} computes something else in evaluation mode than "
            f"in training, and machines by a plan compute the latter: see {difference}."
            " Let its forward return the same in both modes, or use one process: "
            "`distbelief predict --whole`, partitions = 1 for training"
        )


def check_data(task: TaskSpec, batch_size: int) -> Sample:
    """Read a batch of the training and of the test data; return what samples are like.

    Raises:
        JobError: they cannot be read, or are unlike each other; or there is no such
            metric.
    """
    dataset = build_dataset(task.train)
    read_batch(dataset, range(min(batch_size, len(dataset))))
    sample = sample_of(dataset)
    if task.test is not None:
        test = build_dataset(task.test, table="data.test")
        read_batch(test, range(min(batch_size, len(test))), table="data.test")
        other = sample_of(test, table="data.test")
        if other != sample:
            raise JobError(
                f"samples of [data.train] are {sample}, and those of [data.test] "
                f"{other}: they have to be alike"
            )
        build_metric(task)
    return sample


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()
