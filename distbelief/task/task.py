"""The layer graph of a job's model and loss, captured without memory for any tensor."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, final

import msgspec
import torch
from torch import nn
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.data.dataset import Dataset, read_batch
from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, LayerGraph
from distbelief.graph.losses import append_loss, whole_loss
from distbelief.graph.region import Shape
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.task import dry_run
from distbelief.task.imports import call_factory, place, resolve
from distbelief.task.losses import (
    CLASS_LOSSES,
    LOSSES,
    Loss,
    Metric,
    loss_function,
    metric_function,
    usual_metric,
)


# What one sample of a data set is like: all that a layer graph needs to know of it.


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


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


# The task: which model learns what, from which data; and what a role is built from.
#
# The structs are tables of the job file, so they hold names and plain values only: a
# process that joins a job receives them as text and builds the objects itself. Whatever
# the user may have got wrong is found by `checks` before any process starts, and told in
# one sentence: the culprit, its value, the mend.

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
        initials: How to draw each tensor, by its name: `FlatModel.initials()`, needed
            by shards if [model] initial is "seed".
        initial_file: A safetensors file with the initial values of all tensors by
            name (whole tensors, in the shapes of the layout), needed by shards
            otherwise: written by the job layer for "module", the user's own else.
        evaluation_subset: Held-out samples of a usual evaluation; None means all.
        threads: Of torch in this process (the process sets them, `build` does not).
        await_begin: Replicas wait for `StartTraining` (a supervisor sends it to each life).
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
            f"[model] {spec.factory} returned {dry_run.shown(module)}, not an nn.Module: "
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


@final
@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model and its loss, as data.

    Attributes:
        graph: The loss is its last output.
        modules: Those that are computed whole, without memory, by their paths.
        specs: All tensors of the model, sorted by name.
    """

    graph: LayerGraph
    modules: Mapping[str, nn.Module]
    specs: Sequence[TensorSpec]


def capture_task(
    task: TaskSpec, *, inputs: Sequence[InputSpec], targets: Shape | None = None, soft: bool = False
) -> Captured:
    """Return the graph of a job's model with its loss.

    Args:
        task: Model and loss.
        inputs: Of the model.
        targets: Shape of the targets, if not the usual one.
        soft: Whether targets of a loss of labels are probabilities instead.

    Raises:
        JobError: the model cannot be built, or captured.
    """
    module = _made(task.model)
    module.train()
    graph = append_loss(capture(module, inputs), _loss(task.loss), targets=targets, soft=soft)
    return Captured(
        graph=graph, modules=modules_of(graph, module, _loss(task.loss)), specs=specs_of(module)
    )


def capture_for(task: TaskSpec, sample: Sample) -> Captured:
    """Return the layer graph of a task on such samples, without any memory.

    Raises:
        JobError: the model cannot be built or captured, does not take them, or needs
            tensors that are not saved with it.
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
    captured = capture_task(
        task,
        inputs=[InputSpec(shape=sample.input_shape, n_values=n_values)],
        targets=sample.target_shape,
        soft=loss in CLASS_LOSSES and not sample.target_is_integer,
    )
    _refuse_unsaved(task, captured)
    return captured


def _made(spec: ModelSpec) -> nn.Module:
    """Return the model, without memory for any tensor.

    Raises:
        JobError: it cannot be made; if for want of values, what to do about that.
    """
    try:
        with torch.device("meta"):
            return build_model(spec)
    except JobError as error:
        if "meta tensor" not in str(error):
            raise
        raise JobError(
            f"{error}. Where replicas are split, the model is made on the meta device, "
            "whose tensors have no values: let its constructor compute such numbers in "
            "Python, or let a replica be one process (partitions = 1)"
        ) from error


def _refuse_unsaved(task: TaskSpec, captured: Captured) -> None:
    """Refuse tensors that machines would not get: they have theirs from the shards."""
    saved = {spec.name for spec in captured.specs}
    for layer in captured.graph.layers:
        for use in layer.tensors.values():
            if use.name not in saved:
                raise JobError(
                    f"[model] {task.model.factory}: {use.name!r}, which layer "
                    f"{layer.name!r} needs, is not saved with the model, and machines "
                    "get their tensors from the shards, which have those that are: "
                    "register it by register_buffer, without persistent=False, or let "
                    "a replica be one process (partitions = 1)"
                )


def modules_of(graph: LayerGraph, module: nn.Module, loss: str | Loss) -> dict[str, nn.Module]:
    """Return the modules that some layer calls, that of the loss among them."""
    found: dict[str, nn.Module] = {}
    own = whole_loss(loss)
    for layer in graph.layers:
        if "module" not in layer.options:
            continue
        path = layer.text("module")
        if own is not None and layer.name == graph.outputs[-1]:
            found[path] = own
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


def input_names(graph: LayerGraph) -> list[str]:
    """Return the names of the inputs, the model's first, then the targets."""
    return [layer.name for layer in graph.layers if layer.kind == INPUT]


def _loss(name: str) -> str | Loss:
    """Return what `append_loss` takes: a name of torch's, or the user's function."""
    known = name in LOSSES or name.removesuffix("_loss") in LOSSES
    return name if known or ":" not in name else loss_function(name)
