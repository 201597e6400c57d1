"""A first job file for a model and data that are shown: `distbelief init`.

It builds the model, reads some samples, looks at what comes out, and tries one step. What it cannot
tell it refuses, with the way.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import nn

from distbelief.config import toml
from distbelief.config.load import parse_job
from distbelief.core import files
from distbelief.core.errors import JobError
from distbelief.task.data import (
    ENDLESS,
    Batch,
    Dataset,
    DataSource,
    read_batch,
    some_of,
    tensors_of,
)
from distbelief.task.imports import resolve
from distbelief.task.losses import OWN, labels_of, scores_of
from distbelief.task.task import DataSpec, ModelSpec, build_dataset, build_model
from distbelief.task.validation import check


BATCH_SIZE: Final = 32  # unless a loader says another, or there are fewer samples
N_SHOWN: Final = 256  # samples that are looked at
_HELD_OUT: Final = ("test", "validation", "valid", "val", "eval")
_WAY: Final = "say which loss with --loss, as in --loss cross_entropy, mse or MODULE:FUNCTION"

# (value, comment) by key and table
_Tables = Mapping[str, Mapping[str, tuple[object, str]]]


def first_job(
    model: str, train: str, *, test: str | None = None, loss: str | None = None, name: str = "job"
) -> str:
    """Return the text of a job file that has been tried.

    Args:
        model: Import path of the function, or class, that makes the model.
        train: Import path of the function that returns the training data.
        test: That of held-out data; None: the function beside `train` whose name has "test" in
            place of "train", if there is one.
        loss: As in a job file; None: what the outputs and targets tell.
        name: Of the job, and of its run directory.

    Raises:
        JobError: something is wrong, or cannot be told.
    """
    data = build_dataset(DataSpec(factory=train))
    source = DataSource.of(data)
    if len(source) >= ENDLESS:
        raise JobError(
            f"[data.train] {train} is a stream without a length, so no epoch ends: give it "
            "__len__, or write the job by hand with limit = ... in [data.train]"
        )
    try:
        module = build_model(ModelSpec(factory=model))
    except JobError as error:
        if not str(error).startswith("[model.arguments]"):
            raise
        raise JobError(f"{error}: name a function that needs no arguments") from None
    if loss is None:
        loss = _loss(module, data, model)
    batch_size = source.batch_size or min(BATCH_SIZE, len(source))
    test = test or _held_out(train)
    text = _text(_tables(model, train, test, loss, batch_size, name), name)
    job = parse_job(text, path="job.toml")
    check(job.task, batch_size)
    return text


def _held_out(train: str) -> str | None:
    module, _, function = train.partition(":")
    for word in _HELD_OUT if "train" in function else ():
        name = function.replace("train", word)
        try:
            resolve(f"{module}:{name}", table="data.test")
        except JobError:
            continue
        return f"{module}:{name}"
    return None


def _loss(module: nn.Module, data: Dataset, model: str) -> str:
    """Return the loss that outputs and targets allow; JobError if that is none, or several."""
    batch = read_batch(data, some_of(data, N_SHOWN))
    outputs = _outputs(module, batch, model)
    found = tensors_of(outputs)
    if any(path in found and found[path].numel() == 1 for path in (("loss",), *_scalar(outputs))):
        return OWN
    try:
        scores, targets = scores_of(outputs), labels_of(batch.targets)
    except JobError as error:
        raise JobError(f"{error}; or {_WAY}") from None
    shapes = f"the model gives {list(scores.shape)} and targets are {list(targets.shape)}"
    if targets.is_floating_point():
        if scores.shape != targets.shape:
            raise JobError(f"{shapes}: let them have the same shape, or {_WAY}")
        if bool(((targets == 0) | (targets == 1)).all()):
            raise JobError(
                "targets are 0.0 and 1.0: are they yes and no (--loss "
                "binary_cross_entropy_with_logits), or numbers (--loss mse)?"
            )
        return "mse"
    is_class = scores.ndim == targets.ndim + 1 and scores.shape[1] > 1
    if not is_class or (*scores.shape[:1], *scores.shape[2:]) != tuple(targets.shape):
        raise JobError(
            f"{shapes} of {targets.dtype}: for classes give a score for each, (samples, classes), "
            f"and targets (samples,); for numbers give float targets; or {_WAY}"
        )
    sums = scores.sum(1)
    if bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        raise JobError(
            "the model's outputs are probabilities, and cross_entropy takes scores: leave the "
            f"softmax out of the model, or {_WAY}"
        )
    return "cross_entropy"


def _outputs(module: nn.Module, batch: Batch, model: str) -> object:
    try:
        with torch.no_grad():
            return batch.run(module.eval())
    except Exception as error:  # the user's code may raise anything
        raise JobError(
            f"[model] {model} failed on {len(next(iter(batch.tensors().values())))} samples: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        module.train()


def _scalar(outputs: object) -> tuple[tuple[()], ...]:
    return ((),) if isinstance(outputs, torch.Tensor) and outputs.ndim == 0 else ()


def _tables(
    model: str, train: str, test: str | None, loss: str, batch_size: int, name: str
) -> _Tables:
    held_out: dict[str, Mapping[str, tuple[object, str]]] = {}
    if test is not None:
        held_out = {
            "data.test": {"factory": (test, "held-out data, as above")},
            "evaluation": {"every": ("1 epoch", "when held-out data are evaluated")},
        }
    return {
        "model": {"factory": (model, "makes the model: a torch.nn.Module")},
        "data.train": {"factory": (train, "returns the data: samples (input, target) or dicts")},
        **held_out,
        "algorithm": {
            "name": ("downpour", "asynchronous SGD of replicas over a parameter server"),
            "loss": (loss, '"model": what the model returns as its loss; or torch\'s name of one'),
            "batch_size": (batch_size, "samples of one step of one replica"),
            "rule": (
                {"name": "adam", "learning_rate": 0.001},
                "how shards apply what replicas push",
            ),
        },
        "cluster": {
            "replicas": (1, "processes that train, each on samples of its own"),
            "shards": (1, "processes that hold the parameters"),
        },
        "stop": {"epochs": (10.0, "passes over the data, of all replicas together")},
        "output": {
            "directory": (f"runs/{name}", "of the run; if it exists, the next free name"),
            "keep": ("last" if test is None else "best", "which values the model file has"),
        },
    }


def _text(tables: _Tables, name: str) -> str:
    lines = [
        "# Made by `distbelief init`. All keys: docs/reference/job-file.md",
        f"name = {toml.inline(name)}  # of the job",
    ]
    for table, keys in tables.items():
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {toml.inline(value)}  # {why}" for key, (value, why) in keys.items()]
    return "\n".join(lines) + "\n"


def write_first_job(text: str, out: Path) -> None:
    """Write a job file; JobError if it is there already."""
    if out.exists():
        raise JobError(f"{out} exists: give another name with -o, or remove it")
    files.write(out, text.encode())
