"""The task: which model learns what, from which data; and what a role is built from.

The structs are tables of the job file, so they hold names and plain values only: a
process that joins a job receives them as text and builds the objects itself. Whatever
the user may have got wrong is found by `checks` before any process starts, and told in
one sentence: the culprit, its value, the mend.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec
import torch
from torch import nn

from distbelief.data.dataset import Dataset
from distbelief.errors import JobError
from distbelief.memory import Memory
from distbelief.parameter_server.layout.initial import Initial
from distbelief.parameter_server.layout.layout import Layout
from distbelief.runtime.task import trial
from distbelief.runtime.task.imports import call_factory, place, resolve
from distbelief.runtime.task.losses import (
    Loss,
    Metric,
    loss_function,
    metric_function,
    usual_metric,
)
from distbelief.runtime.task.samples import Sample


SEED_MAX: Final = 2**63 - 1  # torch takes no more

# ------------------------------------------------------------------- job file


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [model].

    Attributes:
        factory: Import path "package.module:function" of what returns the nn.Module.
        arguments: Its keyword arguments.
        initial: "module" (as the factory leaves it), "seed" (drawn on the shards by
            layer type, so that no process holds the whole net), or the path of a
            safetensors file with whole tensors by name.
        seed: Of the factory's random numbers, and of "seed".
    """

    factory: str
    arguments: dict[str, object] = {}
    initial: str = "module"
    seed: Annotated[int, msgspec.Meta(ge=0, le=SEED_MAX)] = 0

    def __post_init__(self) -> None:
        """Refuse an `initial` that is neither word nor file.

        Raises:
            ValueError: which msgspec turns into an error that names the table.
        """
        if self.initial in {"module", "seed"}:
            return
        if not self.initial.endswith(".safetensors"):
            raise ValueError(
                f"initial is {self.initial!r}; use 'module', 'seed', or the path of a "
                ".safetensors file"
            )


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [data.train] or [data.test]: a factory of a map-style data set."""

    factory: str
    arguments: dict[str, object] = {}


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is learnt: model, data, loss, and the figure by which it is judged.

    Attributes:
        model: Table [model].
        train: Table [data.train].
        test: Table [data.test], if there is any: without it nothing is evaluated.
        loss: Name in `losses.LOSSES`, or import path of f(outputs, targets) -> mean.
        metric: Name in `losses.METRICS`, or import path of such a function; None
            chooses by the loss, and by the targets.
    """

    model: ModelSpec
    train: DataSpec
    test: DataSpec | None = None
    loss: str
    metric: str | None = None


# ---------------------------------------------------------------------- roles


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEntry:
    """One role of a job."""

    name: str  # "shard-0" (its other copy: "shard-0b"), "replica-1", "evaluator"
    kind: Literal[
        "shard",
        "replica",
        "evaluator",
        "machine",  # led by one of the two before
        "coordinator",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What an algorithm's `build` may use to make one role, in that role's process.

    Attributes:
        task: What is learnt.
        layout: Of the model's tensors on the shards; None if the algorithm has no
            parameter server.
        n_replicas: Model replicas of the job.
        n_shards: Shards of the job.
        shard_copies: Processes that keep each of them, 1 or 2.
        seed: Of the evaluation subset (the order of samples has its own, in the
            algorithm's table; initial values have [model] seed).
        memory: What the driver lends.
        initials: How to draw each tensor, by its name: `LocalModel.initials()`, needed
            by shards if [model] initial is "seed".
        initial_file: A safetensors file with the initial values of all tensors by
            name (whole tensors, in the shapes of the layout), needed by shards
            otherwise: written by the job layer for "module", the user's own else.
        evaluation_subset: Held-out samples of a usual evaluation; None means all.
        threads: Of torch in this process (the process sets them, `build` does not).
        await_begin: Replicas wait for `Begin` (a supervisor sends it to each life).
        plan: Path of the plan that replicas and evaluator are split by; None if each
            is one process.
        sample: What the data are like, for the layer graph of that plan.
        device: On which machines of such a plan compute.
        n_train: Training samples, where somebody has counted them.
        datasets: Those that stand already, by table ("data.train"): roles that share a
            process need no data of their own.
    """

    task: TaskSpec
    layout: Layout | None
    n_replicas: int
    n_shards: int
    seed: int
    memory: Memory
    initials: Mapping[str, Initial] = field(default_factory=dict)
    initial_file: str | None = None
    evaluation_subset: int | None = None
    threads: int = 1
    shard_copies: int = 1
    await_begin: bool = True
    plan: str | None = None
    sample: Sample | None = None
    device: str = "cpu"
    n_train: int | None = None
    datasets: Mapping[str, Dataset] = field(default_factory=dict)

    def train_data(self) -> Dataset:
        """Return the training data, built here unless it stands already.

        Raises:
            JobError: it cannot be built, or is not that of the job.
        """
        standing = self.datasets.get("data.train")
        if standing is not None:
            return standing
        dataset = build_dataset(self.task.train)
        if self.n_train is not None and len(dataset) != self.n_train:
            raise JobError(
                f"[data.train] has {len(dataset):,} samples here, and {self.n_train:,} "
                "where the job began: all its machines have to have the same data"
            )
        return dataset

    def test_data(self) -> Dataset:
        """Return the held-out data, likewise.

        Raises:
            JobError: there are none, or they cannot be built.
        """
        if self.task.test is None:
            raise JobError("an evaluator needs held-out data: give [data.test], or do without it")
        standing = self.datasets.get("data.test")
        if standing is not None:
            return standing
        return build_dataset(self.task.test, table="data.test")


# -------------------------------------------------------------------- objects


def build_model(spec: ModelSpec) -> nn.Module:
    """Return the module that the factory makes from this seed.

    The same spec gives the same values in every process.

    Raises:
        JobError: the factory cannot be had or called, or returns something else.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        module = call_factory(spec.factory, spec.arguments, table="model")
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise JobError(
            f"[model] {spec.factory} returned the class {module.__name__}, not an "
            f"nn.Module: let it return {module.__name__}(...)"
        )
    if not isinstance(module, nn.Module):
        raise JobError(
            f"[model] {spec.factory} returned {trial.shown(module)}, not an nn.Module: "
            "let it return the model"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise JobError(
                f"[model] {spec.factory}: parameter {name!r} has no shape yet: replace "
                "the Lazy module by one with its sizes given"
            )
    return module


def build_dataset(spec: DataSpec, *, table: str = "data.train") -> Dataset:
    """Return the data set that the factory makes.

    Raises:
        JobError: the factory cannot be had or called, or what it returns has no
            length or no items, or is empty.
    """
    dataset = call_factory(spec.factory, spec.arguments, table=table)
    if isinstance(dataset, type) or not isinstance(dataset, Dataset):
        raise JobError(
            f"[{table}] {spec.factory} returned {trial.shown(dataset)}, not a data "
            "set: it must have __len__ and __getitem__(index) -> (input, target)"
        )
    try:
        n_samples = len(dataset)
    except Exception as error:  # the data set is the user's
        raise JobError(
            f"[{table}] {spec.factory}: len() of its data set failed: "
            f"{type(error).__name__}: {error}{place(error)}"
        ) from error
    if n_samples == 0:
        raise JobError(
            f"[{table}] {spec.factory} returned a data set of 0 samples: check its "
            "[" + table + ".arguments]"
        )
    return dataset


def prepare(spec: DataSpec, *, table: str) -> None:
    """Let the module of a data factory build what its factory will open.

    A function `prepare` beside the factory is called once, here, with the factory's
    arguments, so that the roles need not do the same work side by side.
    """
    resolve(spec.factory, table=table)
    module_name = spec.factory.partition(":")[0]
    if hasattr(sys.modules[module_name], "prepare"):
        call_factory(f"{module_name}:prepare", spec.arguments, table=table)


def build_loss(task: TaskSpec) -> Loss:
    """Return the loss as f(outputs, targets) -> mean over samples (a 0-d tensor)."""
    return loss_function(task.loss)


def metric_name(task: TaskSpec, sample: Sample | None = None) -> str:
    """Return the metric's name or import path, chosen by the loss if left open.

    Args:
        task: What is learnt.
        sample: What the data are like; a loss of one's own does not say.
    """
    if task.metric is not None:
        return task.metric
    labels = sample is None or sample.target_is_integer
    return usual_metric(task.loss, labels=labels)


def build_metric(task: TaskSpec, sample: Sample | None = None) -> Metric:
    """Return the metric as f(outputs, targets) -> mean over samples."""
    return metric_function(metric_name(task, sample))
