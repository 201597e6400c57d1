"""What can be wrong with a task, found before any process starts.

Each complaint is one sentence: the culprit, its value, the mend.
"""

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
    """Read a batch of the training and of the test data; return what samples are like.

    Args:
        task: Whose data.
        batch_size: Samples that are read at once.
        n_readers: Machines of a replica: more than one have to read the same.

    Raises:
        JobError: they cannot be read, are unlike each other, or are drawn at random;
            or there is no such metric.
    """
    sample = _sample(task.train, batch_size, n_readers, table="data.train")
    if task.test is not None:
        other = _sample(task.test, batch_size, n_readers, table="data.test")
        if other != sample:
            raise JobError(
                f"samples of [data.train] are {sample}, and those of [data.test] "
                f"{other}: they have to be alike"
            )
        build_metric(task, sample)
    return sample


def _sample(spec: DataSpec, batch_size: int, n_readers: int, *, table: str) -> Sample:
    """Return what the samples are like, which all machines of a replica read alike."""
    dataset = build_dataset(spec, table=table)
    batch = _first(dataset, batch_size, table=table)
    if n_readers > 1:
        _check_alike(spec, dataset, batch, table=table)
    return sample_of(dataset, table=table)


def _check_alike(spec: DataSpec, dataset: Dataset, batch: Batch, *, table: str) -> None:
    """Refuse samples that are drawn at random.

    Each machine builds the data set and reads for itself, one the inputs and another
    their targets, or the other half of an image: these would be of other draws.
    """
    n_samples = len(batch[0])
    anew = build_dataset(spec, table=table)
    others = {
        "it is read": _first(dataset, n_samples, table=table),
        f"{spec.factory} is called": _first(anew, n_samples, table=table),
    }
    for when, other in others.items():
        row = _differing(batch, other)
        if row is not None:
            raise JobError(
                f"[{table}] sample {row} is another one each time that {when}, and "
                "machines of a replica read it each for itself: draw nothing at random,"
                " or by generators of a fixed seed (with the sample's index in it), or "
                "let a replica be one process (partitions = 1)"
            )


def _first(dataset: Dataset, n_samples: int, *, table: str) -> Batch:
    return read_batch(dataset, range(min(n_samples, len(dataset))), table=table)


def _differing(batch: Batch, other: Batch) -> int | None:
    """Return the first sample in which two readings differ; NaN is like NaN."""
    for one, two in zip(batch, other, strict=True):
        if one.shape != two.shape:
            return 0
        differs = (one != two) & ~(one.isnan() & two.isnan())
        if bool(differs.any()):
            return int(differs.nonzero()[0][0])
    return None


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
