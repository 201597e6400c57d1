"""The layer graph of a job's model and loss, captured without memory for any tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.layer import INPUT, LayerGraph
from distbelief.graph.losses import append_loss, whole_loss
from distbelief.graph.region import Shape
from distbelief.parameter_server.layout.layout import TensorSpec
from distbelief.runtime.task.losses import CLASS_LOSSES, LOSSES, Loss, loss_function
from distbelief.runtime.task.samples import Sample
from distbelief.runtime.task.task import ModelSpec, TaskSpec, build_model


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
    """Return name, shape and kind of every saved tensor, as `LocalModel.specs` does."""
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
