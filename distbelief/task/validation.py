"""Checks a task before any process starts; each mistake becomes a JobError of one sentence."""

import torch

from distbelief.data.dataset import Batch, Dataset, read_batch
from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec, evaluation_difference
from distbelief.task import dry_run
from distbelief.task.task import (
    DataSpec,
    Sample,
    TaskSpec,
    build_dataset,
    build_loss,
    build_metric,
    build_model,
    metric_name,
    sample_of,
)


def check(task: TaskSpec, batch_size: int) -> None:
    """Try one training batch forward and backward, and evaluate one test batch.

    It builds model and data, so call it in a process of its own, before the job starts.

    Raises:
        JobError: what is wrong, its value and the fix.
    """
    module = build_model(task.model)
    dataset = build_dataset(task.train)
    loss = build_loss(task)
    indices = range(min(batch_size, len(dataset)))
    inputs, targets = read_batch(dataset, indices, table="data.train")
    dry_run.train(
        module,
        inputs,
        targets,
        loss=loss,
        names=dry_run.Names(
            model=task.model.factory, loss=task.loss, data="data.train", indices=indices
        ),
    )
    if task.test is None:
        return
    dataset = build_dataset(task.test, table="data.test")
    indices = range(min(batch_size, len(dataset)))
    inputs, targets = read_batch(dataset, indices, table="data.test")
    sample = sample_of(dataset, table="data.test")
    dry_run.evaluate(
        module,
        inputs,
        targets,
        loss=loss,
        metric=build_metric(task, sample),
        names=dry_run.Names(
            model=task.model.factory,
            loss=task.loss,
            data="data.test",
            metric=metric_name(task, sample),
            indices=indices,
        ),
    )


def check_data(task: TaskSpec, batch_size: int, *, n_readers: int = 2) -> Sample:
    """Read a batch of the training and of the test data; return the description of a sample.

    Args:
        task: The task.
        batch_size: Samples read at once.
        n_readers: Ranks of a replica; several must read the same samples.

    Raises:
        JobError: data cannot be read, differ in shape, or are drawn at random; or the metric
            does not exist.
    """
    sample = _sample(task.train, batch_size, n_readers, table="data.train")
    if task.test is not None:
        other = _sample(task.test, batch_size, n_readers, table="data.test")
        if other != sample:
            raise JobError(
                f"samples of [data.train] are {sample}, and those of [data.test] "
                f"{other}: they must be alike"
            )
        build_metric(task, sample)
    return sample


def _sample(spec: DataSpec, batch_size: int, n_readers: int, *, table: str) -> Sample:
    dataset = build_dataset(spec, table=table)
    batch = _first_batch(dataset, batch_size, table=table)
    if n_readers > 1:
        _check_repeatable(spec, dataset, batch, table=table)
    return sample_of(dataset, table=table)


def _check_repeatable(spec: DataSpec, dataset: Dataset, batch: Batch, *, table: str) -> None:
    # One rank reads the inputs, another their targets or the other half of an image: all must see
    # the same draw.
    n_samples = len(batch[0])
    rebuilt = build_dataset(spec, table=table)
    others = {
        "it is read": _first_batch(dataset, n_samples, table=table),
        f"{spec.factory} is called": _first_batch(rebuilt, n_samples, table=table),
    }
    for when, other in others.items():
        row = _first_difference(batch, other)
        if row is not None:
            raise JobError(
                f"[{table}] sample {row} differs each time {when}, but every rank of a "
                "replica reads it: draw by generators seeded with the sample's index, or "
                "use one process per replica (partitions = 1)"
            )


def _first_batch(dataset: Dataset, n_samples: int, *, table: str) -> Batch:
    return read_batch(dataset, range(min(n_samples, len(dataset))), table=table)


def _first_difference(batch: Batch, other: Batch) -> int | None:
    for one, two in zip(batch, other, strict=True):
        if one.shape != two.shape:
            return 0
        # NaN equals NaN here.
        differs = (one != two) & ~(one.isnan() & two.isnan())
        if bool(differs.any()):
            return int(differs.nonzero()[0][0])
    return None


def check_evaluation(task: TaskSpec, sample: Sample) -> None:
    """Check that the layer graph of a task's model is the same in evaluation mode.

    Raises:
        JobError: the model computes something else in evaluation mode.
    """
    with torch.device("meta"):
        module = build_model(task.model)
    n_values = 1 if sample.input_is_integer else None
    spec = InputSpec(shape=sample.input_shape, n_values=n_values)
    difference = evaluation_difference(module, [spec])
    if difference is not None:
        raise JobError(
            f"{type(module).__name__} computes something else in evaluation mode than "
            f"in training, but a plan covers only training: see {difference}. Let its "
            "forward return the same in both modes, or use one process: `distbelief "
            "predict --whole`, partitions = 1 for training"
        )
