"""What can be wrong with a task, found before any process starts.

Each complaint is one sentence: the culprit, its value, the mend.
"""

import torch

from distbelief.data.dataset import read_batch
from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec, evaluation_difference
from distbelief.runtime.task import trial
from distbelief.runtime.task.samples import Sample, sample_of
from distbelief.runtime.task.task import (
    TaskSpec,
    build_dataset,
    build_loss,
    build_metric,
    build_model,
    metric_name,
)


def check(task: TaskSpec, batch_size: int) -> None:
    """Try one batch, forward and backward, and the evaluation of another.

    To be called before any process starts, in a process of its own or a fresh thread
    count of 1: it builds model and data.

    Raises:
        JobError: naming the culprit, its value and the mend.
    """
    module = build_model(task.model)
    dataset = build_dataset(task.train)
    loss = build_loss(task)
    indices = range(min(batch_size, len(dataset)))
    inputs, targets = read_batch(dataset, indices, table="data.train")
    trial.train(
        module,
        inputs,
        targets,
        loss=loss,
        names=trial.Names(
            model=task.model.factory,
            loss=task.loss,
            data="data.train",
            indices=indices,
        ),
    )
    if task.test is None:
        return
    dataset = build_dataset(task.test, table="data.test")
    indices = range(min(batch_size, len(dataset)))
    inputs, targets = read_batch(dataset, indices, table="data.test")
    trial.evaluate(
        module,
        inputs,
        targets,
        loss=loss,
        metric=build_metric(task),
        names=trial.Names(
            model=task.model.factory,
            loss=task.loss,
            data="data.test",
            metric=metric_name(task),
            indices=indices,
        ),
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
