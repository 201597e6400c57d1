"""A training task: model, data and loss as tables of the job file, and the objects built from them.

The structs hold only names and plain values: a process that joins a job receives them as text
and builds the objects itself. `validation` finds mistakes before any process starts.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal, NamedTuple, cast, final
from weakref import WeakSet

import msgspec
import torch
from torch import nn

from distbelief.core.errors import JobError
from distbelief.core.memory import Memory
from distbelief.core.pieces import Pieces
from distbelief.core.tensor_files import TensorFile
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import capture
from distbelief.graph.graph import INPUT, Builder, GraphError, LayerGraph, as_real
from distbelief.graph.module_calls import module_at
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, TensorSpec, in_one_memory, kind_of
from distbelief.protocol.role import Together, in_turn
from distbelief.task import dry_run, losses
from distbelief.task.data import (
    Collate,
    Dataset,
    DataSource,
    Path,
    Readers,
    are_alike,
    first_of,
    marks_of,
    pieces_of,
    read_batch,
    shown_path,
)
from distbelief.task.forward import Forward, Sample, WholeLoss, input_specs
from distbelief.task.imports import call_factory, own_arguments, parameters_of, resolve
from distbelief.task.initializers import InitialFile
from distbelief.task.losses import Loss, Metric
from distbelief.task.sources import source_of


def sample_of(dataset: Dataset, *, table: str = "data.train") -> Sample:
    one = [0] if DataSource.of(dataset).placed is None else first_of(dataset, 1)
    return Sample.of(read_batch(dataset, one, table=table))


SEED_MAX: Final = 2**63 - 1  # torch takes no more

# --- job file ---


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    factory: str  # import path "package.module:function" of a function that returns the nn.Module
    arguments: dict[str, object] = {}  # its keyword arguments
    # "module" (as the factory leaves it), "seed" (drawn on the shards from the same distributions,
    # so that no process holds the whole model), or the path of a safetensors file with whole
    # tensors by name, or a table where that file has only some of them
    initial: str | InitialFile = "module"
    # of the factory's random numbers, and of "seed"
    seed: Annotated[int, msgspec.Meta(ge=0, le=SEED_MAX)] = 0

    def __post_init__(self) -> None:
        # msgspec turns a ValueError into an error that names the table.
        initial = self.initial
        if isinstance(initial, InitialFile) or initial in {"module", "seed"}:
            return
        if not initial.endswith(".safetensors"):
            raise ValueError(
                f"initial is {initial!r}; use 'module', 'seed', or the path of a .safetensors file"
            )

    @property
    def needs_module(self) -> bool:
        """Whether some initial values are those that the factory leaves."""
        return self.initial == "module" or isinstance(self.initial, InitialFile)


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    factory: str
    arguments: dict[str, object] = {}
    # Processes that read samples for each role that needs them; 0: a thread of the role
    num_workers: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None  # use the first so many samples only
    collate: str | None = None  # import path of f(samples) -> batch, as torch's DataLoader has it

    @property
    def source(self) -> dict[str, object]:
        """What the samples come from, by any number of processes."""
        more = {"limit": self.limit, "collate": self.collate}
        given = {key: value for key, value in more.items() if value is not None}
        arguments = own_arguments(self.factory, self.arguments)
        return {"factory": self.factory, "arguments": arguments, **given}


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelSpec  # table [model]
    train: DataSpec  # table [data.train]
    test: DataSpec | None = None  # table [data.test]; without it nothing is evaluated
    # name in `losses.LOSSES`, import path of f(outputs, targets) -> mean, or "model": its own
    loss: str
    # name in `losses.METRICS`, or import path of such a function; None chooses by the loss and the
    # targets. Or several of them.
    metric: str | tuple[str, ...] | None = None

    @property
    def data(self) -> dict[str, DataSpec]:
        test = {} if self.test is None else {"data.test": self.test}
        return {"data.train": self.train} | test

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that it names."""
        return (self.metric,) if isinstance(self.metric, str) else self.metric or ()


# --- roles ---


# "rank": a rank above 0 of a replica or the evaluator
Kind = Literal["shard", "replica", "evaluator", "rank", "coordinator"]


class RosterEntry(NamedTuple):
    name: str  # "shard-0" (its second copy: "shard-0b"), "replica-1", "evaluator"
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What an algorithm's `build` may use to make one role, in that role's process."""

    task: TaskSpec
    layout: Layout  # of the model's tensors on the shards
    n_replicas: int
    n_shards: int
    # Of the evaluation subset (the order of samples has its own, in the algorithm's table; initial
    # values have [model] seed).
    seed: int
    memory: Memory  # given by the driver
    together: Together = in_turn  # runs threads; given by the driver, too
    # How to draw each tensor, by name; needed by shards if [model] initial is "seed".
    initials: Mapping[str, Initial] = field(default_factory=dict)
    # A safetensors file with whole tensors in the layout's shapes, needed by shards otherwise:
    # written by the job for "module", else the user's own.
    initial_file: TensorFile | None = None
    evaluation_subset: int | None = None  # held-out samples of a usual evaluation; None: all
    averaged: bool = False  # whether the evaluator measures running averages of the parameters
    keeps_best: bool = False  # whether the evaluator saves the values of its best evaluation
    shard_copies: int = 1  # processes that keep each shard, 1 or 2
    # Replicas wait for `StartTraining`, which a supervisor sends to each incarnation.
    await_begin: bool = True
    # Path of the plan that partitions replicas and evaluator; None: one process each.
    plan: str | None = None
    sample: Sample | None = None  # description of the data, for the layer graph of that plan
    device: str = "cpu"  # on which this process computes: "cpu", "cuda:1"
    n_train: int | None = None  # number of training samples, where it is known
    marks: tuple[float, ...] | None = None  # of these samples (`marks_of`), where they may differ
    pieces: Pieces | None = None  # of the training samples, if they are in some
    # Data sets that exist already, by table ("data.train"): roles that share a process share them.
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    # Processes that read for this role, by table, if it has some.
    readers: Mapping[str, Readers] = field(default_factory=dict)

    def train_data(self, replica: int | None = None) -> Dataset:
        """Return the training data, built here unless it exists already: the part of a replica."""
        if replica is not None and self.has_parts:
            return build_dataset(self.task.train, part=(replica, self.n_replicas))
        dataset = self.datasets.get("data.train") or build_dataset(self.task.train)
        if self.n_train is not None:
            check_pieces(self.pieces, pieces_of(dataset))
        if self.n_train is not None and len(dataset) != self.n_train:
            raise JobError(
                f"[data.train] has {len(dataset):,} samples here but {self.n_train:,} "
                "where the job began: use the same data on all hosts"
            )
        is_new = self.marks is not None and "data.train" not in self.datasets
        if is_new and not are_alike(self.marks, marks_of(dataset)):
            raise JobError(
                f"[data.train] has {len(dataset):,} other samples here than where the job began: "
                "use the same data on all hosts"
            )
        return dataset

    @property
    def has_parts(self) -> bool:
        """Whether each replica has training data of its own."""
        return self.n_replicas > 1 and makes_parts(self.task.train)

    def test_data(self) -> Dataset:
        """Return the held-out data, built here unless it exists already."""
        if self.task.test is None:
            raise JobError("an evaluator needs held-out data: give [data.test]")
        return self.datasets.get("data.test") or build_dataset(self.task.test, table="data.test")


def check_pieces(pieces: Pieces | None, here: Pieces | None) -> None:
    """Raise JobError if this process has other pieces than there are where the job began."""
    if pieces != here:
        what = pieces.difference(here) if pieces and here else "pieces on some hosts only"
        raise JobError(f"[data.train] has {what}: use the same data on all hosts")


# --- objects ---

_built: Final = WeakSet[nn.Module]()  # with their parts


def build_model(spec: ModelSpec) -> nn.Module:
    """Return the module that the factory makes from this seed.

    The same spec gives the same values in every process. JobError if the factory cannot be found or
    called, or returns something else, or what it had returned before.
    """
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(spec.seed)
        else:  # the same for the CPU, but for 0.3 ms in which torch keeps the stack for others
            torch.default_generator.manual_seed(spec.seed)
        module = call_factory(spec.factory, spec.arguments, table="model")
    if not isinstance(module, nn.Module):
        raise JobError(
            f"[model] {spec.factory} returned {dry_run.shown(module)}, not an nn.Module: "
            "let it return the model, as in Net(...)"
        )
    parts = [*module.modules()]
    if not _built.isdisjoint(parts):  # trial steps have moved it
        raise JobError(
            f"[model] {spec.factory} returned a module, or a part of one, that it had returned "
            "before: let each call make new modules"
        )
    _built.update(parts)
    check_shapes(module, f"[model] {spec.factory}")
    check_saved(module, f"[model] {spec.factory}")
    if module.training:  # a model that is wholly in evaluation mode is put into training mode
        check_modes(module, f"[model] {spec.factory}")
    # Not where it is built to see how tensors are drawn: a question is noted as the user's.
    if torch.get_default_device().type != "meta":
        check_memory(module, f"[model] {spec.factory}")
    return module


def check_shapes(module: nn.Module, user: str) -> None:
    """Raise JobError if a tensor of a module gets its shape in the first forward only."""
    for kind, tensors in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, tensor in tensors:
            if nn.parameter.is_lazy(tensor):
                raise JobError(
                    f"{user}: {kind} {name!r} has no shape yet: replace the Lazy module by one "
                    "with its sizes given"
                )


def check_modes(module: nn.Module, user: str) -> None:
    """Raise JobError if some parts of a module are in evaluation mode, and `train` changes that.

    The module is in training mode then.
    """
    evaluates = [(name, one) for name, one in module.named_modules() if not one.training]
    if not evaluates or len(evaluates) == len([*module.modules()]):
        return
    module.train()
    if lost := [name for name, one in evaluates if one.training]:
        raise JobError(
            f"{user}: {lost[0] or 'the model'!r} is in evaluation mode and other parts are not, "
            "and a job trains all: call model.train(), and freeze (by requires_grad_) what is not "
            "meant to train; statistics stay as they are if train() of a class of yours keeps it so"
        )


def check_saved(module: nn.Module, user: str) -> None:
    """Raise JobError if a module saves something else than its parameters and buffers.

    A job exchanges and saves what is both in it and in its `state_dict`, by the same names.
    """
    saved = module.state_dict(keep_vars=True).keys()
    lost = [n for n, one in module.named_parameters() if one.requires_grad and n not in saved]
    if lost:
        raise JobError(
            f"{user}: state_dict() has no {lost[0]!r}, so a job would not train it: leave out what "
            "changes its names or leaves some out, as the wrapper of checkpoint_wrapper does (in "
            "forward, torch.utils.checkpoint does the same)"
        )
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if more := sorted(saved - own):
        raise JobError(
            f"{user}: state_dict() has {more[0]!r}, which is neither a parameter nor a buffer, and "
            "a job would lose it: make it a buffer (register_buffer)"
        )


def check_memory(module: nn.Module, user: str) -> None:
    """Raise JobError if a parameter has elements of another tensor: a job keeps each by itself."""
    for name, other in in_one_memory([*module.named_parameters(), *module.named_buffers()]):
        raise JobError(
            f"{user}: {name!r} and {other!r} have the same memory, and a job trains each "
            "by itself: make them one parameter (b.weight = a.weight), or a copy (.clone())"
        )


_PART: Final = "replica", "replicas"  # parameters of a factory that makes a part


def makes_parts(spec: DataSpec) -> bool:
    """Return whether the factory makes a part of the data for each replica."""
    known = parameters_of(resolve(spec.factory, table="data.train"))
    return {*_PART} <= {*known} - {*spec.arguments}


def build_dataset(
    spec: DataSpec, *, table: str = "data.train", part: tuple[int, int] = (0, 1)
) -> Dataset:
    """Return the factory's data set; JobError if that fails, or returns something else.

    If the factory has parameters `replica` and `replicas`, it is that of this `part` of so many.
    """
    arguments, limit, (replica, n_replicas) = spec.arguments, spec.limit, part
    if makes_parts(spec):
        arguments = arguments | dict(zip(_PART, part, strict=True))
        if limit is not None:
            limit = max(limit * (replica + 1) // n_replicas - limit * replica // n_replicas, 1)

    def build() -> object:
        return call_factory(spec.factory, arguments, table=table)

    collate = None
    if spec.collate is not None:
        collate = cast("Collate", resolve(spec.collate, table=table))
    return source_of(
        build(), name=spec.factory, table=table, limit=limit, collate=collate, again=build
    )


def datasets_of(task: TaskSpec) -> dict[str, Dataset]:
    return {table: build_dataset(spec, table=table) for table, spec in task.data.items()}


def prepare_data(task: TaskSpec) -> None:
    """Call `prepare` beside each data factory, once, so that roles do not repeat its work."""
    for table, spec in task.data.items():
        resolve(spec.factory, table=table)
        module_name = spec.factory.partition(":")[0]
        if hasattr(sys.modules.get(module_name), "prepare"):
            call_factory(f"{module_name}:prepare", spec.arguments, table=table)


def build_loss(task: TaskSpec) -> Loss:
    return losses.loss_function(task.loss)


def metric_names(task: TaskSpec, sample: Sample | None = None) -> tuple[str, ...]:
    """Return names or import paths of the metrics, chosen by loss and sample if left open."""
    if task.metrics:
        return task.metrics
    target = None if sample is None else sample.target
    labels = True if sample is None else None if target is None else target.is_integer
    return (losses.usual_metric(task.loss, labels=labels),)


def judged_by(
    task: TaskSpec, metric: str, *, subset: int | None, seed: int, averaged: bool = False
) -> str:
    """Return, as JSON, what two evaluations must have in common for their metrics to compare."""
    found = {
        "[evaluation] metric": f"loss ({task.loss})" if metric == losses.LOSS_METRIC else metric,
        "[evaluation] subset": None if subset is None else f"{subset} of seed {seed}",
        "[data.test]": task.test and task.test.source,
    } | ({"[evaluation] averaged": True} if averaged else {})
    return msgspec.json.encode(found, order="deterministic").decode()


def build_metrics(task: TaskSpec, sample: Sample | None = None) -> dict[str, Metric]:
    """Return the metrics by name, each of f(outputs, targets) or an object with a state."""
    return {
        name: build_loss(task) if name == losses.LOSS_METRIC else losses.metric_of(name)
        for name in metric_names(task, sample)
    }


@final
@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model and its loss as a layer graph."""

    graph: LayerGraph  # the loss is its last output
    modules: Mapping[str, nn.Module]  # modules that are computed whole, on the meta device, by path
    specs: Sequence[TensorSpec]  # all tensors of the model, sorted by name


def capture_task(task: TaskSpec, sample: Sample) -> Captured:
    """Return the graph of a task's model with its loss."""
    module = build_on_meta(task.model)
    module.train()
    keeps_outputs = bool({*task.metrics} - {losses.LOSS_METRIC})  # they may read any output
    graph = graph_with_loss(module, sample, task.loss, keeps_outputs=keeps_outputs)
    modules = modules_of(graph, module, loss_module(graph, sample, task.loss))
    return Captured(graph=graph, modules=modules, specs=specs_of(module))


def graph_with_loss(
    module: nn.Module, sample: Sample, loss: str, *, keeps_outputs: bool = False
) -> LayerGraph:
    """Return the graph of a model with its loss.

    A loss with a name has layers of its own. A user's function of one tensor of outputs and one of
    floating-point targets is computed whole; others are captured with the model, or else whole.
    """
    target = sample.target
    if losses.is_named(loss):
        if target is None:
            raise losses.no_label(entry.path for entry in sample.entries)
        graph = forward_graph(module, sample, scores=True)
        soft = loss.removesuffix("_loss") in losses.CLASS_LOSSES and not target.is_integer
        return append_loss(graph, loss, targets=target.shape, soft=soft)
    if target is not None and not target.is_integer and loss != losses.OWN:
        graph = forward_graph(module, sample)
        if graph.fields == ((),):
            return _with_whole_loss(graph, sample, "a user-defined loss function")
    paths = [entry.path for entry in sample.entries]
    forward = Forward(
        paths, loss=losses.loss_function(loss), keeps_outputs=keeps_outputs, name=loss
    )
    try:
        return capture(module, input_specs(module, sample.entries), call=forward)
    except GraphError as error:
        if loss == losses.OWN:
            raise
        only = () if keeps_outputs else forward.fields
        graph = forward_graph(module, sample, only=only)
        return _with_whole_loss(graph, sample, f"a loss that cannot be captured: {error}")


def _with_whole_loss(graph: LayerGraph, sample: Sample, reason: str) -> LayerGraph:
    builder = Builder.of(graph)
    given = [layer for layer in graph.layers if layer.kind == INPUT]
    for entry in sample.entries[len(given) :]:
        name, spec = builder.free_name(shown_path(entry.path[1:]) or "targets"), entry.spec
        given.append(
            builder.input(name, spec.shape, is_integer=spec.is_integer, is_mask=spec.is_mask)
        )
    read = [*(graph[name] for name in graph.outputs), *given[-len(sample.of_loss) :]]
    name = builder.free_name("loss")
    builder.add(name, "call", read, (), options={"module": name}, whole=reason)
    return replace(builder.finish([*graph.outputs, name]), fields=graph.fields)


def loss_module(graph: LayerGraph, sample: Sample, loss: str) -> nn.Module | None:
    """Return the module of a loss that is computed whole, the graph's last output."""
    if "module" not in graph[graph.outputs[-1]].options:
        return None
    return WholeLoss(losses.loss_function(loss), graph.fields, sample.of_loss)


def forward_graph(
    module: nn.Module, sample: Sample, *, scores: bool = False, only: Sequence[Path] = ()
) -> LayerGraph:
    """Return the graph of a model without a loss; `scores` and `only` are those of `Forward`."""
    forward = Forward([entry.path for entry in sample.inputs], scores=scores, only=only)
    return capture(module, input_specs(module, sample.inputs), call=forward)


def capture_for(task: TaskSpec, sample: Sample) -> Captured:
    """Return the layer graph of a task for such samples, on the meta device."""
    target = sample.target
    if losses.base_of(task.loss) == "mse" and target is not None and target.is_integer:
        raise JobError(
            f"[algorithm] loss {task.loss} compares element by element, but [data.train] has "
            f"integers {list(target.shape)} as targets: return floats like the outputs, or use "
            "loss = 'cross_entropy' for class labels"
        )
    captured = capture_task(task, sample)
    saved = {spec.name for spec in captured.specs}
    for layer in captured.graph.layers:
        for use in layer.tensors.values():
            if use.name not in saved:
                raise JobError(
                    f"[model] {task.model.factory}: {use.name!r} of layer {layer.name!r} is not "
                    "saved with the model: register it by register_buffer without "
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


def modules_of(
    graph: LayerGraph, module: nn.Module, loss: nn.Module | None = None
) -> dict[str, nn.Module]:
    """Return the modules that some layer calls, that of the loss included."""
    paths = {layer.text("module") for layer in graph.layers if "module" in layer.options}
    last = graph[graph.outputs[-1]]
    own = {} if loss is None else {last.name: loss}
    return {path: module_at(module, path) for path in paths - own.keys()} | own


def specs_of(module: nn.Module) -> list[TensorSpec]:
    """Return name, shape and kind of every saved tensor, as `FlatModel.specs` does."""
    saved = module.state_dict(keep_vars=True).keys()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [
        TensorSpec(name=name, shape=tuple(as_real(tensor).shape), kind=kind_of(tensor))
        for name, tensor in sorted(tensors.items())
        if name in saved
    ]
