"""Checks a task before any process starts; each mistake becomes a JobError of one sentence."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from distbelief.core.errors import JobError
from distbelief.graph.capture import evaluation_difference
from distbelief.task import dry_run, task as tasks
from distbelief.task.data import (
    ENDLESS,
    Batch,
    Dataset,
    DataSource,
    first_of,
    pieces_of,
    read_batch,
    reseed,
    shown_path,
    some_of,
)
from distbelief.task.forward import Forward, Sample, input_specs
from distbelief.task.initializers import lost
from distbelief.task.losses import (
    CHUNK,
    LOSS_METRIC,
    OWN,
    StatefulMetric,
    base_of,
    is_named,
    own_loss,
)
from distbelief.task.sources import DrawnOrder
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec


N_COMPARED: Final = 64  # samples of a stream


def check(
    task: TaskSpec,
    batch_size: int,
    datasets: Mapping[str, Dataset] | None = None,
    *,
    takes_sparse: bool = False,  # gradients may be sparse
    keeps_all: bool = True,  # forward must not change any parameter; or only no frozen one
) -> None:
    """Try one training batch forward and backward, and evaluate one test batch.

    It builds the model, so call it in a process of its own, before the job starts.
    """
    module, loss = _begun(task.model), tasks.build_loss(task)
    for table, dataset in (datasets or tasks.datasets_of(task)).items():
        indices = first_of(dataset, batch_size)
        batch = read_batch(dataset, indices, table=table)
        for path, tensor in batch.tensors().items():
            if tensor.layout != torch.strided:
                raise JobError(
                    f"[{table}] {shown_path(path)} is a {tensor.layout} tensor: give a dense one, "
                    "as of to_dense(), or its indices and values, as many for each sample"
                )
        names = dry_run.Names(model=task.model.factory, loss=task.loss, data=table, indices=indices)
        if table == "data.train":
            kept: Literal["frozen", "all"] = "all" if keeps_all else "frozen"
            named = replace(names, takes_sparse=takes_sparse, kept=kept)
            dry_run.train(module, batch, loss=loss, names=named)
            dry_run.check_buffers(module, model=task.model.factory)
            if not is_named(task.loss):
                dry_run.check_mean(module, batch, loss=loss, names=names)
            continue
        metrics = tasks.build_metrics(task, tasks.sample_of(dataset, table=table))
        dry_run.evaluate(module, batch, loss=loss, metrics=metrics, names=names)
        if len(dataset) > CHUNK and len(indices) > 2:
            own = {
                name: metric
                for name, metric in metrics.items()
                if ":" in name and not isinstance(metric, StatefulMetric)
            }
            dry_run.check_mean_metric(module, batch, own)


def _begun(spec: ModelSpec) -> nn.Module:
    """Return the model with the values of its file, if it begins with those.

    What does not fit is refused later, by those who read all of it.
    """
    module = tasks.build_model(spec)
    if isinstance(spec.initial, str) and spec.initial.endswith(".safetensors"):
        named = module.state_dict()
        with suppress(OSError, SafetensorError), safe_open(spec.initial, framework="pt") as file:
            for name in named.keys() & set(file.keys()):
                values = file.get_tensor(name)
                own = named[name]
                if values.shape == own.shape and (what := lost(values, own.copy_(values))):
                    raise JobError(f"[model] initial: {name!r} has {what}, beyond {own.dtype}")
    return module


def check_sources(
    task: TaskSpec,
    datasets: Mapping[str, Dataset],
    *,
    batch_size: int,
    seed: int,
    n_replicas: int,
    is_dealt: bool,  # samples are, by the supervisor
    is_driven: bool,  # by a coordinator
) -> dict[str, int]:
    """Reject streams and loaders that contradict the job; return the readers that loaders want."""
    found: dict[str, int] = {}
    for table, dataset in datasets.items():
        source, spec = DataSource.of(dataset), task.data[table]
        user, is_train = f"[{table}] {spec.factory}", table == "data.train"
        n_wanted = spec.num_workers or source.num_workers
        has_parts = is_train and n_replicas > 1 and tasks.makes_parts(spec)
        is_endless = len(source) == ENDLESS
        unfit = {
            f"returned a DataLoader of batch_size {source.batch_size}, and [algorithm] batch_size "
            f"is {batch_size}": (
                is_train
                and source.batch_size not in {None, batch_size}
                and not is_driven
                and "use the same in both"
            ),
            f"returned a DataLoader of {source.num_workers} workers, and num_workers is "
            f"{spec.num_workers}": (0 < source.num_workers != n_wanted and "leave one of them out"),
            f"is a stream, which each of num_workers = {n_wanted} would read as a whole": (
                source.is_stream
                and n_wanted > 1
                and "use 1, and more replicas, each with a part (parameters replica, replicas)"
            ),
            f"gives samples {source.of_order}, and a batch method reads all in its own order": (
                is_train
                and is_driven
                and source.order is not None
                and 'return a map-style data set, or use [algorithm] name = "downpour"'
            ),
            "is a stream without length, and each evaluation reads all of it": (
                not is_train and is_endless and "give it __len__, or a limit in [data.test]"
            ),
            "takes replica and replicas, so that each replica has data of its own, and [algorithm] "
            'order is "dealt"': has_parts and is_dealt and 'use order = "parts"',
            f'is a stream without length, and [algorithm] order "parts" gives each of {n_replicas} '
            "replicas a part": (
                is_train
                and is_endless
                and n_replicas > 1
                and not (is_dealt or has_parts)
                and 'use order = "dealt", or let it take replica and replicas'
            ),
        }
        of_pieces = _unfit_pieces(
            source, is_train=is_train, is_dealt=is_dealt, batch_size=batch_size
        )
        for what, fix in (unfit | of_pieces).items():
            if fix:
                raise JobError(f"{user} {what}: {fix}")
        if isinstance(source.order, DrawnOrder):
            source.order.check(seed)
        if source.is_stream:
            n_passes = 1 if is_endless or not is_train else 2
            _check_same_again(source, user, n_passes=n_passes)
        if n_wanted:
            found[table] = n_wanted
    return found


def _unfit_pieces(
    source: DataSource, *, is_train: bool, is_dealt: bool, batch_size: int
) -> dict[str, str | Literal[False]]:
    pieces, placed = pieces_of(source), source.placed
    if pieces is None:
        return {}
    here = () if placed is None else placed.here
    near = {
        k for start, stop in zip(here[::2], here[1::2], strict=True) for k in range(start, stop)
    }
    n_away = sum(n > 0 and k not in near for k, n in enumerate(pieces.rows))
    single = next((name for name, n in zip(pieces.names, pieces.rows, strict=True) if n == 1), None)
    return {
        'is in pieces, which are dealt, and [algorithm] order is "parts"': (
            is_train and not is_dealt and 'use order = "dealt"'
        ),
        f"has 1 row in piece {single!r}, a batch that batch normalisation cannot train on": (
            is_train
            and placed is not None
            and single is not None
            and batch_size > 1
            and "join it to another piece, or let all hosts read all (no here)"
        ),
        f"has {n_away:,} pieces on other hosts, and an evaluation reads all": (
            not is_train
            and placed is not None
            and n_away > 0
            and not pieces.can_fetch
            and "give it fetch(piece), or let this host have all"
        ),
    }


def _check_same_again(source: DataSource, user: str, *, n_passes: int) -> None:
    """Reject a stream that another process, or a resumed run, would read otherwise.

    Some streams begin in order, and are shuffled from their second pass on.
    """
    for number in range(n_passes):
        some = [number * len(source) + k for k in first_of(source, N_COMPARED)]
        first, second = (read_batch(source, some, before=reseed) for _ in range(2))
        row = _first_difference(first, second)
        if row is not None:
            which = f" of pass {number}" if number else ""
            raise JobError(
                f"{user}: sample {row}{which} of the stream differs each time it begins: let it "
                "draw from torch's, numpy's or Python's own generator, or seed its generator in "
                "__iter__"
            )


def check_data(
    task: TaskSpec,
    batch_size: int,
    *,
    n_readers: int = 2,
    datasets: Mapping[str, Dataset] | None = None,
) -> Sample:
    """Read a batch of the training and of the test data; return the description of a sample.

    If a replica has several ranks (`n_readers`), all must read the same samples. JobError if data
    cannot be read, differ in shape, or are drawn at random; or the metric does not exist.
    """
    why = ("every rank of a replica reads it", "or use one process per replica (partitions = 1)")
    samples: dict[str, Sample] = {}
    for table, dataset in (datasets or tasks.datasets_of(task)).items():
        batch = read_batch(dataset, first_of(dataset, batch_size), table=table)
        if n_readers > 1:
            _check_repeatable(task.data[table], dataset, batch_size, table=table, why=why)
        samples[table] = tasks.sample_of(dataset, table=table)
        if Sample.of(batch) != samples[table]:  # as a collate may do that pads to the longest
            raise JobError(
                f"[{table}] one sample is {samples[table]}, and in a batch {Sample.of(batch)}: "
                "split replicas need one shape: pad all samples alike, or split nothing"
            )
    train = samples["data.train"]
    if task.test is not None:
        if samples["data.test"] != train:
            raise JobError(
                f"samples of [data.train] are {train}, and those of [data.test] "
                f"{samples['data.test']}: they must be alike"
            )
        tasks.build_metrics(task, train)
    return train


def check_fixed(task: TaskSpec, batch_size: int, datasets: Mapping[str, Dataset]) -> None:
    """Check that every replica reads the same training data at every evaluation of a batch method.

    JobError if samples are drawn at random: the method would compare losses of different data.
    """
    table = "data.train"
    why = (
        "a batch method reads all samples again for each evaluation",
        'or use [algorithm] name = "downpour"',
    )
    _check_repeatable(task.data[table], datasets[table], batch_size, table=table, why=why)


def check_sums(task: TaskSpec, batch_size: int, datasets: Mapping[str, Dataset]) -> None:
    """Check that the loss of a batch is the mean of those of its parts, which a batch method adds.

    JobError if it is not for the first samples.
    """
    table, name = "data.train", task.loss
    indices = first_of(datasets[table], batch_size)
    batch = read_batch(datasets[table], indices, table=table)
    if base_of(name) in dry_run.LEAVE_OUT:
        dry_run.check_counted(batch.targets, indices=indices, table=table)
    if name != OWN and ":" not in name:
        return
    module, loss = tasks.build_model(task.model).eval(), tasks.build_loss(task)
    tensors = batch.tensors()

    def loss_of(part: dry_run.PartOf) -> float:
        some = Batch.of({path: tensor[part] for path, tensor in tensors.items()})
        return float(loss(some.run(module), some.targets))

    dry_run.check_parts(loss_of, len(indices), loss=name)


def _check_repeatable(
    spec: DataSpec, dataset: Dataset, n_samples: int, *, table: str, why: tuple[str, str]
) -> None:
    # One rank reads the inputs, another their targets or the other half of an image: all must see
    # the same draw.
    rebuilt = tasks.build_dataset(spec, table=table)
    few = max(n_samples // 2, 1)
    # Of data that are sorted, only some may be drawn.
    chosen = sorted({*first_of(dataset, few), *some_of(dataset, few + 1)})
    batch = read_batch(dataset, chosen, table=table)
    for when, source in (("it is read", dataset), (f"{spec.factory} is called", rebuilt)):
        row = _first_difference(batch, read_batch(source, chosen, table=table))
        if row is not None:
            raise JobError(
                f"[{table}] sample {chosen[row]} differs each time {when}, but {why[0]}: draw by "
                f"generators seeded with the sample's index, {why[1]}"
            )


def _first_difference(batch: Batch, other: Batch) -> int | None:
    first, second = batch.tensors(), other.tensors()
    if first.keys() != second.keys():
        return 0
    for path, one in first.items():
        two = second[path]
        if one.shape != two.shape:
            return 0
        # NaN equals NaN here.
        differs = (one != two) & ~(one.isnan() & two.isnan())
        if bool(differs.any()):
            return int(differs.nonzero()[0][0])
    return None


def check_evaluation(task: TaskSpec, sample: Sample) -> None:
    """Check that the layer graph of a task's model is the same in evaluation mode."""
    with torch.device("meta"):
        module = tasks.build_model(task.model)
    # A model may return its loss and nothing else.
    evaluates_loss = (task.loss, *tasks.metric_names(task, sample)) == (OWN, LOSS_METRIC)
    entries = sample.entries if evaluates_loss else sample.inputs
    loss = own_loss if evaluates_loss else None
    forward = Forward([entry.path for entry in entries], loss=loss, keeps_outputs=True, name=OWN)
    inputs = input_specs(module, entries)
    difference = evaluation_difference(module, inputs, call=forward)
    if difference is not None:
        raise JobError(
            f"{type(module).__name__} computes something else in evaluation mode than in "
            f"training: see {difference}. Let its forward return the same in both, or use one "
            "process: `distbelief predict --whole`, partitions = 1 for training"
        )
