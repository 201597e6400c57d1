"""A training task: model, data and loss as tables of the job file, and the objects built from them.

The structs hold only names and plain values: a process that joins a job receives them as text
and builds the objects itself. `validation` finds mistakes before any process starts.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, final

import msgspec
import torch
from torch import nn
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.data import Dataset, read_batch
from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import LayerGraph
from distbelief.graph.losses import append_loss, opaque_loss
from distbelief.graph.region import Shape
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.task import dry_run
from distbelief.task.imports import call_factory, place, resolve
from distbelief.task.losses import (
    CLASS_LOSSES,
    Loss,
    Metric,
    loss_function,
    metric_function,
    usual_metric,
)


@final
class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and types of one input and its target: all that a layer graph needs."""

    input_shape: Shape  # without the batch dimension
    input_is_integer: bool  # for example words
    target_shape: Shape  # without the batch dimension
    target_is_integer: bool  # for example labels

    @override
    def __str__(self) -> str:
        kinds = ("numbers", "whole numbers")
        return (
            f"input {list(self.input_shape)} of {kinds[self.input_is_integer]}, "
            f"target {list(self.target_shape)} of {kinds[self.target_is_integer]}"
        )

    @property
    def input_spec(self) -> InputSpec:
        # No layer uses the number of values.
        return InputSpec(shape=self.input_shape, n_values=1 if self.input_is_integer else None)


def sample_of(dataset: Dataset, *, table: str = "data.train") -> Sample:
    """Return the description of a data set's first sample."""
    inputs, targets = read_batch(dataset, [0], table=table)
    return Sample(
        input_shape=tuple(inputs.shape[1:]),
        input_is_integer=not inputs.is_floating_point(),
        target_shape=tuple(targets.shape[1:]),
        target_is_integer=not targets.is_floating_point(),
    )


SEED_MAX: Final = 2**63 - 1  # torch takes no more

# --- job file ---


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [model]."""

    factory: str  # import path "package.module:function" of a function that returns the nn.Module
    arguments: dict[str, object] = {}  # its keyword arguments
    # "module" (as the factory leaves it), "seed" (drawn on the shards by layer type, so that no
    # process holds the whole model), or the path of a safetensors file with whole tensors by name
    initial: str = "module"
    # of the factory's random numbers, and of "seed"
    seed: Annotated[int, msgspec.Meta(ge=0, le=SEED_MAX)] = 0

    def __post_init__(self) -> None:
        # msgspec turns a ValueError into an error that names the table.
        if self.initial not in {"module", "seed"} and not self.initial.endswith(".safetensors"):
            raise ValueError(
                f"initial is {self.initial!r}; use 'module', 'seed', or the path of a "
                ".safetensors file"
            )


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [data.train] or [data.test]: a factory of a map-style data set."""

    factory: str
    arguments: dict[str, object] = {}


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model, data, loss and metric."""

    model: ModelSpec  # table [model]
    train: DataSpec  # table [data.train]
    test: DataSpec | None = None  # table [data.test]; without it nothing is evaluated
    loss: str  # name in `losses.LOSSES`, or import path of f(outputs, targets) -> mean
    # name in `losses.METRICS`, or import path of such a function; None chooses by the loss and the
    # targets
    metric: str | None = None

    @property
    def data(self) -> dict[str, DataSpec]:
        """The data by table."""
        test = {} if self.test is None else {"data.test": self.test}
        return {"data.train": self.train} | test


# --- roles ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEntry:
    """One role of a job."""

    name: str  # "shard-0" (its second copy: "shard-0b"), "replica-1", "evaluator"
    kind: Literal[
        "shard",
        "replica",
        "evaluator",
        "machine",  # a rank above 0 of a replica or the evaluator
        "coordinator",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What an algorithm's `build` may use to make one role, in that role's process."""

    task: TaskSpec
    layout: Layout | None  # of the model's tensors on the shards; None without a parameter server
    n_replicas: int
    n_shards: int
    # Of the evaluation subset (the order of samples has its own, in the algorithm's table; initial
    # values have [model] seed).
    seed: int
    memory: Memory  # given by the driver
    # How to draw each tensor, by name: `FlatModel.initials()`, needed by shards if [model] initial
    # is "seed".
    initials: Mapping[str, Initial] = field(default_factory=dict)
    # A safetensors file with whole tensors in the layout's shapes, needed by shards otherwise:
    # written by the job for "module", else the user's own.
    initial_file: str | None = None
    evaluation_subset: int | None = None  # held-out samples of a usual evaluation; None: all
    shard_copies: int = 1  # processes that keep each shard, 1 or 2
    # Replicas wait for `StartTraining`, which a supervisor sends to each incarnation.
    await_begin: bool = True
    # Path of the plan that partitions replicas and evaluator; None: one process each.
    plan: str | None = None
    sample: Sample | None = None  # description of the data, for the layer graph of that plan
    device: str = "cpu"  # on which the ranks of such a plan compute
    n_train: int | None = None  # number of training samples, where it is known
    # Data sets that exist already, by table ("data.train"): roles that share a process share them.
    datasets: Mapping[str, Dataset] = field(default_factory=dict)

    def train_data(self) -> Dataset:
        """Return the training data, built here unless it exists already."""
        dataset = self.datasets.get("data.train") or build_dataset(self.task.train)
        if self.n_train is not None and len(dataset) != self.n_train:
            raise JobError(
                f"[data.train] has {len(dataset):,} samples here but {self.n_train:,} "
                "where the job began: use the same data on all hosts"
            )
        return dataset

    def test_data(self) -> Dataset:
        """Return the held-out data, built here unless it exists already."""
        if self.task.test is None:
            raise JobError("an evaluator needs held-out data: give [data.test]")
        return self.datasets.get("data.test") or build_dataset(self.task.test, table="data.test")


# --- objects ---


def build_model(spec: ModelSpec) -> nn.Module:
    """Return the module that the factory makes from this seed.

    The same spec gives the same values in every process.

    Raises:
        JobError: the factory cannot be found or called, or returns something else.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        module = call_factory(spec.factory, spec.arguments, table="model")
    if not isinstance(module, nn.Module):
        raise JobError(
            f"[model] {spec.factory} returned {dry_run.shown(module)}, not an nn.Module: "
            "let it return the model, as in Net(...)"
        )
    # The layout needs all shapes before the first forward pass.
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
        JobError: the factory fails, or its result has no length or no items, or is empty.
    """
    dataset = call_factory(spec.factory, spec.arguments, table=table)
    if isinstance(dataset, type) or not isinstance(dataset, Dataset):
        raise JobError(
            f"[{table}] {spec.factory} returned {dry_run.shown(dataset)}, not a data "
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
            f"[{table}] {spec.factory} returned a data set of 0 samples: check [{table}.arguments]"
        )
    return dataset


def datasets_of(task: TaskSpec) -> dict[str, Dataset]:
    """Return the training data, and the held-out data if there are any, by table."""
    return {table: build_dataset(spec, table=table) for table, spec in task.data.items()}


def prepare_data(task: TaskSpec) -> None:
    for table, spec in task.data.items():
        prepare(spec, table=table)


def prepare(spec: DataSpec, *, table: str) -> None:
    """Call the function `prepare` beside a data factory, if there is one, with its arguments.

    It runs once, so that the roles need not do the same work (a download, an index) in parallel.
    """
    resolve(spec.factory, table=table)
    module_name = spec.factory.partition(":")[0]
    if hasattr(sys.modules[module_name], "prepare"):
        call_factory(f"{module_name}:prepare", spec.arguments, table=table)


def build_loss(task: TaskSpec) -> Loss:
    """Return the loss as f(outputs, targets) -> mean over samples (a 0-d tensor)."""
    return loss_function(task.loss)


def metric_name(task: TaskSpec, sample: Sample | None = None) -> str:
    """Return the metric's name or import path, chosen by loss and sample if left open."""
    if task.metric is not None:
        return task.metric
    labels = sample is None or sample.target_is_integer
    return usual_metric(task.loss, labels=labels)


def build_metric(task: TaskSpec, sample: Sample | None = None) -> Metric:
    """Return the metric as f(outputs, targets) -> mean over samples."""
    return metric_function(metric_name(task, sample))


@final
@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model and its loss as a layer graph."""

    graph: LayerGraph  # the loss is its last output
    modules: Mapping[str, nn.Module]  # modules that are computed whole, on the meta device, by path
    specs: Sequence[TensorSpec]  # all tensors of the model, sorted by name


def capture_task(
    task: TaskSpec, *, inputs: Sequence[InputSpec], targets: Shape | None = None, soft: bool = False
) -> Captured:
    """Return the graph of a task's model with its loss.

    `targets` is their shape, if not the usual one; with `soft`, targets of a classification loss
    are probabilities.
    """
    module = build_on_meta(task.model)
    module.train()
    # torch's losses have layers of their own in the graph; a user's function is one layer.
    loss = loss_function(task.loss) if ":" in task.loss else task.loss
    graph = append_loss(capture(module, inputs), loss, targets=targets, soft=soft)
    return Captured(graph=graph, modules=modules_of(graph, module, loss), specs=specs_of(module))


def capture_for(task: TaskSpec, sample: Sample) -> Captured:
    """Return the layer graph of a task for such samples, on the meta device."""
    # Ranks exchange targets as floating-point numbers unless a named loss takes labels.
    loss = task.loss.removesuffix("_loss")
    if ":" in task.loss and sample.target_is_integer:
        raise JobError(
            f"[algorithm] loss = {task.loss!r}: with partitioned replicas your own function "
            "gets floating-point targets, but [data.train] has integers: use a loss by "
            "name, or one process per replica (partitions = 1)"
        )
    if loss == "mse" and sample.target_is_integer:
        raise JobError(
            f"[algorithm] loss {task.loss} compares element by element, but targets of "
            f"[data.train] are integers of shape {list(sample.target_shape)}: return "
            "floating-point targets of the outputs' shape, or use loss = "
            "'cross_entropy' for class labels"
        )
    captured = capture_task(
        task,
        inputs=[sample.input_spec],
        targets=sample.target_shape,
        soft=loss in CLASS_LOSSES and not sample.target_is_integer,
    )
    saved = {spec.name for spec in captured.specs}
    for layer in captured.graph.layers:
        for use in layer.tensors.values():
            if use.name not in saved:
                raise JobError(
                    f"[model] {task.model.factory}: {use.name!r}, which layer "
                    f"{layer.name!r} needs, is not saved with the model, so ranks cannot "
                    "get it from the shards: register it by register_buffer without "
                    "persistent=False, or use one process per replica (partitions = 1)"
                )
    return captured


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    # Parameters lose their memory as soon as a module gets them; buffers keep their values.
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        without_shape = isinstance(parameter, nn.UninitializedParameter)
        if parameter is not None and not parameter.is_meta and not without_shape:
            known = getattr(parameter, "on_meta", None)
            if known is None:
                trains = parameter.requires_grad
                known = nn.Parameter(parameter.detach().to("meta"), requires_grad=trains)
                parameter.on_meta = known  # type: ignore[attr-defined] # shared ones stay shared
            parameter = known
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_on_meta(spec: ModelSpec) -> nn.Module:
    try:
        with _parameters_on_meta():
            return build_model(spec)
    except JobError:  # it computes with its parameters
        pass
    try:
        with torch.device("meta"):
            return build_model(spec)
    except JobError as error:
        if "meta tensor" not in str(error):
            raise
        raise JobError(
            f"{error}. A partitioned model is built on the meta device, whose tensors "
            "have no values: compute such numbers in Python, or use one process per "
            "replica (partitions = 1)"
        ) from error


def modules_of(graph: LayerGraph, module: nn.Module, loss: str | Loss) -> dict[str, nn.Module]:
    """Return the modules that some layer calls, that of the loss included."""
    found: dict[str, nn.Module] = {}
    loss_module = opaque_loss(loss)
    for layer in graph.layers:
        if "module" not in layer.options:
            continue
        path = layer.text("module")
        if loss_module is not None and layer.name == graph.outputs[-1]:
            found[path] = loss_module
        else:
            found[path] = module.get_submodule(path)
    return found


def specs_of(module: nn.Module) -> list[TensorSpec]:
    """Return name, shape and kind of every saved tensor, as `FlatModel.specs` does."""
    saved = module.state_dict(keep_vars=True).keys()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            kind="parameter" if tensor.requires_grad else "buffer",
        )
        for name, tensor in sorted(tensors.items())
        if name in saved
    ]
