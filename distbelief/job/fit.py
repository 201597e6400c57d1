"""`fit`: trains a module on data in processes of this host, from a program, without a job file.

    net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    run = distbelief.fit(net, (x, y), loss="cross_entropy", batch_size=32,
                         rule=distbelief.Adagrad(learning_rate=0.05), replicas=2)
    run.model(x)

It writes the tables of a job and runs it as `train` does. Model, data, loss and metrics are the
objects of the program (`given`).
"""

import os
import secrets
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final
from zlib import crc32

import torch
from torch import nn

from distbelief.config.load import job_of
from distbelief.config.presets import KNOBS
from distbelief.core.arguments import checked
from distbelief.core.errors import JobError
from distbelief.job.given import check_apart, copy_of, copying, given, giving, path_of
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.run.result import Run
from distbelief.job.trainer import run_job
from distbelief.task.data import Dataset
from distbelief.task.dry_run import shown
from distbelief.task.imports import check_is_no_import
from distbelief.task.losses import LOSS_METRIC
from distbelief.task.pieces import InPieces
from distbelief.task.tensor_pairs import TensorPairs, as_pair


_RULE: Final = 'it is rule={"name": "adam", "learning_rate": 0.001}'
_ELSEWHERE: Final = {
    **dict.fromkeys(("optimizer", "lr", "learning_rate", "optim"), _RULE),
    **dict.fromkeys(("criterion", "loss_fn", "loss_fun"), "it is loss"),
    **dict.fromkeys(("max_epochs", "n_epochs", "num_epochs"), "it is epochs"),
    **dict.fromkeys(("validation_data", "val_data", "test_data", "eval_dataset"), "it is test"),
    **dict.fromkeys(("train_dataset", "train_dataloaders", "train_data"), "it is data"),
    "metric": "it is metrics",
    **dict.fromkeys(
        ("patience", "early_stopping"), 'give test, and overrides={"stop.patience": 5}'
    ),
    **dict.fromkeys(("keep", "save_best"), 'give test, and overrides={"output.keep": "best"}'),
    **dict.fromkeys(
        ("clip_norm", "gradient_clip_val", "max_grad_norm"),
        'give overrides={"algorithm.clip_norm": 1.0}',
    ),
    **dict.fromkeys(("seed", "random_state"), 'give overrides={"algorithm.seed": 1}'),
    **dict.fromkeys(
        ("partitions", "plan"),
        "the processes of fit hold whole models; a job file has it in [cluster]",
    ),
    **dict.fromkeys(("num_workers", "workers"), 'give overrides={"data.train.num_workers": 2}'),
    **dict.fromkeys(("device", "accelerator"), 'give overrides={"cluster.device": "cuda"}'),
    "threads": 'give overrides={"cluster.threads": 2}',
    **dict.fromkeys(
        ("accumulate", "accumulate_grad_batches", "gradient_accumulation_steps"),
        'give overrides={"algorithm.accumulate": 4}',
    ),
    **dict.fromkeys(
        ("limit", "limit_train_batches", "overfit_batches", "fast_dev_run"),
        'it is in samples: give overrides={"data.train.limit": 64}',
    ),
    **dict.fromkeys(("max_time", "seconds"), 'give overrides={"stop.seconds": "10 min"}'),
    **dict.fromkeys(("max_steps", "samples"), 'give overrides={"stop.samples": 64000}'),
    **dict.fromkeys(
        ("val_check_interval", "eval_steps", "eval_every"),
        'give overrides={"evaluation.every": "500 steps"}',
    ),
    **dict.fromkeys(
        ("precision", "mixed_precision", "autocast"), "let forward compute under torch.autocast"
    ),
    "verbose": "it is show",
    **KNOBS,
}


@checked("fit", _ELSEWHERE)
def fit(  # noqa: PLR0913 -- the keys of a job that most jobs have
    model: nn.Module,
    data: object,
    *,
    loss: object,
    batch_size: int,
    rule: object = None,
    preset: str | None = None,
    inner: Mapping[str, object] | None = None,
    test: object = None,
    metrics: object = (),
    replicas: int = 1,
    shards: int = 1,
    epochs: float = 1.0,
    callbacks: Sequence[object] = (),
    directory: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    show: bool = True,
) -> Run:
    """Train a module on data, in processes of this host that are forked from this program.

    Model, data, loss and metrics may be of any class, also of one that a notebook's cell or
    the main program defines. Files that a data set has open are closed in these processes: open
    them when a sample is read.

    Args:
        model: Trained from its present values, in training mode. It stays as it is: `run.model`
            is a trained copy, in evaluation mode.
        data: Inputs and targets (x, y) as tensors or arrays, or a data set of pairs or
            dictionaries: map-style, a stream, in pieces, or torch's DataLoader.
        loss: Torch's name of it ("cross_entropy"), a loss module, or a function (outputs, targets)
            -> mean over the samples; "model": what the model returns as its loss.
        batch_size: Samples of one step of one replica.
        rule: How shards apply what replicas push: `distbelief.Adagrad(learning_rate=0.05)`, or as
            a table, also of a class of torch.optim: {"name": "AdamW", "lr": 1e-3}.
        preset: How replicas exchange, such as "local" or "diloco" (`distbelief presets`); it has a
            rule.
        inner: The optimizer of local steps, of presets with such steps, as a table.
        test: Held-out data, as `data`: they are evaluated while the job runs.
        metrics: Of held-out data, one or a list: a name ("accuracy"), a function (outputs,
            targets) -> mean, or an object with `update`, `compute` and `reset`, as of torchmetrics.
        replicas: Processes that train, each with its own samples.
        shards: Processes that hold the parameters.
        epochs: Passes over the data, by all replicas together.
        callbacks: As of `train`.
        directory: Run directory; if it exists, DIRECTORY.2, and so on. None: a new one in the
            system's temporary directory, which is kept, too: `run.directory`.
        resume: Run directory of an earlier call with the same arguments, to go on from what it
            saved; the present values of the model do not matter.
        overrides: Other keys of a job: {"algorithm.clip_norm": 1.0, "stop.patience": 5}.
        show: Whether to show progress on standard output, and at the end where the results are.

    Returns:
        The run. After Ctrl+C the job ends in order, too, and `run.model` is what was learned.

    Raises:
        JobError: this cannot be run, or the job failed. What it saved is kept.
        StorageError: a directory or shared memory cannot be created.
    """
    check_is_no_import("distbelief.fit")
    module = copy_of(model, user="fit")
    objects: dict[str, object] = {"model": copying(module), "train": giving(_dataset(data, "data"))}
    tables: dict[str, object] = {"train": {"factory": path_of("train")}}
    if test is not None:
        objects["test"] = giving(_dataset(test, "test"))
        tables["test"] = {"factory": path_of("test")}
    listed = _listed(metrics)
    # Results name metrics by these: two must not share one.
    taken = {LOSS_METRIC, *(each for each in listed if isinstance(each, str))}
    names = [_named(each, model, objects, taken) for each in listed]
    if isinstance(rule, str | type | torch.optim.Optimizer):
        raise JobError(
            f"fit: rule is {shown(rule)}: give its name and options, as in "
            '{"name": "AdamW", "lr": 0.001}'
        )
    named_loss = _loss(loss, model, objects)
    algorithm = {"name": "downpour", "loss": named_loss, "batch_size": batch_size}
    job = job_of(
        {
            "name": "fit",
            "model": {"factory": path_of("model")},
            "data": tables,
            "algorithm": algorithm | {"rule": rule, "preset": preset, "inner": inner},
            "cluster": {"replicas": replicas, "shards": shards},
            "evaluation": {"metric": names or None},
            "stop": {"epochs": epochs},
            "output": {"directory": directory or _new_directory()},
        },
        user="fit",
        overrides=overrides or {},
    )
    if job.cluster.is_split:
        raise JobError(f"fit has no option 'partitions': {_ELSEWHERE['partitions']}")
    with given(objects):
        run = run_job(
            job,
            resume=resume,
            show=show,
            launcher=LocalLauncher(holds=True),
            callbacks=callbacks,
            module=module,
        )
        return run.unless_failed("fit")


def _new_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"distbelief-fit-{secrets.token_hex(4)}"


def _dataset(data: object, what: str) -> object:
    """Return a data set; JobError if this is none, with what to give instead."""
    pair = as_pair(data, user=f"fit, {what}")
    if pair is not None:
        return TensorPairs(*pair)
    way = ""
    if type(data).__module__.startswith(("pandas.", "polars.")):
        way = "give arrays, as (frame[columns].to_numpy('float32'), frame[target].to_numpy())"
    elif isinstance(data, Mapping):
        way = "give (inputs, targets), or a data set whose items are dictionaries"
    elif isinstance(data, str | bytes | type | Iterator) or not isinstance(
        data, Dataset | Iterable | InPieces
    ):
        way = "give (x, y), or a data set with __len__ and __getitem__(index) -> (input, target)"
    if way:
        raise JobError(f"fit: {what} is {shown(data)}: {way}")
    return data


def _loss(loss: object, model: nn.Module, objects: dict[str, object]) -> str:
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise JobError("fit: loss has parameters, which nobody trains: make it a part of the model")
    if isinstance(loss, str):
        return loss
    if isinstance(loss, type) or not callable(loss):
        raise JobError(
            f"fit: loss is {shown(loss)}: give a name, such as 'cross_entropy', a function "
            "(outputs, targets) -> mean, or a loss module, as in nn.CrossEntropyLoss()"
        )
    check_apart(loss, model, what="loss", user="fit")
    return _given(loss, _name_of(loss) + _settings_of(loss), objects)


def _listed(metrics: object) -> list[object]:
    return [*metrics] if isinstance(metrics, list | tuple) else [metrics]


def _named(
    metric: object, model: nn.Module, objects: dict[str, object], taken: Collection[str]
) -> str:
    """Return the name of a metric; one that is an object is given by the name of its function."""
    if isinstance(metric, str):
        return metric
    if not (callable(metric) or hasattr(metric, "update")):
        raise JobError(f"fit: a metric is {shown(metric)}: give a name, a function or an object")
    check_apart(metric, model, what="a metric", user="fit")
    return _given(metric, _name_of(metric), objects, taken)


def _given(
    thing: object, name: str, objects: dict[str, object], taken: Collection[str] = ()
) -> str:
    """Give an object by this name, or with a number behind it where that is taken."""
    names = (f"{name}{number or ''}" for number in count())
    name = next(each for each in names if each not in objects and each not in taken)
    objects[name] = thing
    return path_of(name)


def _name_of(thing: object) -> str:
    function = thing.func if isinstance(thing, partial) else thing
    name = str(getattr(function, "__name__", type(function).__name__)).strip("<>").lstrip("_")
    code = getattr(function, "__code__", None)
    if name == "lambda" and code is not None:  # known by what it does
        plain = [one for one in code.co_consts if not hasattr(one, "co_code")]
        return f"lambda_{crc32(repr((code.co_code, plain, code.co_names)).encode()):x}"
    return name


def _settings_of(thing: object) -> str:
    """Return the plain values of a loss, which tell a resumed run of another one."""
    found = thing.keywords if isinstance(thing, partial) else getattr(thing, "__dict__", {})
    plain = [
        f"{key}={value}"
        for key, value in sorted(found.items())
        if isinstance(value, str | int | float) and not key.startswith("_") and key != "training"
    ]
    return f"[{', '.join(plain)}]" if plain else ""
