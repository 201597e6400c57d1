"""One trial step of the user's model, data and loss; each mistake becomes a clear JobError.

Slow and careful where training is fast: `validation.check` runs it before a job starts, and a
replica runs it again on a batch that failed. It checks in the order in which data flows:
inputs, layers, outputs, targets, loss, gradient.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distbelief.errors import JobError
from distbelief.graph.graph import GraphError, LayerGraph
from distbelief.graph.ops.losses import ClassSums, ElementwiseLoss
from distbelief.graph.unsupported import refuse_bounded_tables
from distbelief.task.losses import CLASS_LOSSES, LOSSES, Loss, Metric


IGNORED_LABEL: Final = -100  # torch's `ignore_index`: such a target counts for nothing


def class_counts(graph: LayerGraph) -> Mapping[str, int]:
    """Return the number of classes, by the input layer that has the labels."""
    found = {}
    for layer in graph.layers:
        is_place = layer.kind == ElementwiseLoss.name and layer.options["labels"]
        is_class = layer.kind == ClassSums.name and not layer.options["soft"]
        if is_place or is_class:
            scores, dim = layer.input_shapes[0], layer.integer("dim")
            found[layer.inputs[1]] = scores[dim]
    return found


def check_labels(
    labels: torch.Tensor, n_classes: int, *, indices: Sequence[int], table: str
) -> None:
    """Check that labels are in range.

    If classes are split over ranks, each rank handles its own labels. A label out of range would
    belong to no rank and count as a sample without a loss, where torch raises.

    Args:
        labels: (n_samples, ...), integers.
        n_classes: Labels are 0 to n_classes - 1.
        indices: Of the samples, in the data set.
        table: Table of the job file that names the data set.

    Raises:
        JobError: with the first sample that has a label out of range.
    """
    bad = ((labels < 0) | (labels >= n_classes)) & (labels != IGNORED_LABEL)
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0][0])
    label = int(labels[row][bad[row]].flatten()[0])
    raise JobError(
        f"[{table}] sample {indices[row]} has label {label}, but the model has "
        f"{n_classes} outputs (labels 0 to {n_classes - 1}): give it more outputs, or "
        "fix the labels"
    )


GIVEN_BY_LAYERS: Final = "the layers before it give"

# Layers, their attribute for the width of their inputs, and its axis.
_WIDTHS: Final[tuple[tuple[type[nn.Module], str, int], ...]] = (
    (nn.Linear, "in_features", -1),
    (nn.Conv1d, "in_channels", -2),
    (nn.Conv2d, "in_channels", -3),
    (nn.Conv3d, "in_channels", -4),
    (nn.BatchNorm1d, "num_features", 1),
    (nn.BatchNorm2d, "num_features", 1),
    (nn.BatchNorm3d, "num_features", 1),
    (nn.RNNBase, "input_size", -1),
)


@final
class LayerWatch:
    """Context manager around a forward pass that records the last innermost layer entered.

    torch says "mat1 and mat2 shapes cannot be multiplied"; `explain` says which layer, which two
    widths, and whether to change the data or the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack = ExitStack()
        self._name = ""
        self._layer: nn.Module | None = None
        self._received: torch.Tensor | None = None
        self._returned = False

    def __enter__(self) -> "LayerWatch":
        for name, layer in self._module.named_modules():
            if next(layer.children(), None) is None:
                for handle in self._hook(name, layer):
                    self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _hook(self, name: str, layer: nn.Module) -> tuple[RemovableHandle, ...]:
        def enter(layer: nn.Module, inputs: tuple[object, ...]) -> None:
            first = inputs[0] if inputs else None
            self._name, self._layer, self._returned = name, layer, False
            self._received = first if isinstance(first, torch.Tensor) else None

        def leave(layer: nn.Module, inputs: object, outputs: object) -> None:
            del layer, inputs, outputs
            self._returned = True

        return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)

    def explain(self, error: Exception, inputs: torch.Tensor, *, data: str) -> str:
        """Return where `error` came from and why, as the end of a sentence.

        Args:
            error: What the forward pass raised.
            inputs: Of the model.
            data: Table of the job file that they came from, "data.train".
        """
        reason = f"{type(error).__name__}: {error}"
        layer = self._layer
        if layer is None:
            return f"the model: {reason}"
        kind = type(layer).__name__
        where = f"layer {self._name!r} ({kind})" if self._name else f"the {kind}"
        if self._returned:
            return f"after {where}: {reason}"
        received = self._received
        if received is not None:
            source = f"[{data}] gives" if received is inputs else GIVEN_BY_LAYERS
            reason = _reason(layer, received, source=source) or reason
        return f"{where}: {reason}"


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _reason(layer: nn.Module, received: torch.Tensor, *, source: str) -> str | None:
    if isinstance(layer, nn.Embedding):
        return _embedding_reason(layer, received, source=source)
    weight = next(layer.parameters(), None)
    if weight is not None and weight.dtype != received.dtype:
        return (
            f"its parameters are {dtype_name(weight)}, but {source} "
            f"{dtype_name(received)}: let the data set return {dtype_name(weight)}"
        )
    return _width_reason(layer, received, source=source)


def _embedding_reason(layer: nn.Embedding, received: torch.Tensor, *, source: str) -> str | None:
    if received.is_floating_point():
        return f"it takes whole numbers (int64), but {source} {dtype_name(received)}"
    if received.numel() == 0:
        return None
    low, high = int(received.min()), int(received.max())
    if low >= 0 and high < layer.num_embeddings:
        return None
    return f"it takes numbers from 0 to {layer.num_embeddings - 1}, but {source} {low} to {high}"


def _width_reason(layer: nn.Module, received: torch.Tensor, *, source: str) -> str | None:
    needed = _width(layer)
    shape = tuple(received.shape)
    if needed is None or not shape:
        return None
    size, axis = needed
    # An input with too few dimensions has its features last.
    width = shape[axis] if -len(shape) <= axis < len(shape) else shape[-1]
    if width == size:
        return None
    fix = "make them agree" if source == GIVEN_BY_LAYERS else "change the data set or the model"
    return f"it takes inputs of width {size}, but {source} width {width} (shape {shape}): {fix}"


def _width(layer: nn.Module) -> tuple[int, int] | None:
    for kind, attribute, axis in _WIDTHS:
        if isinstance(layer, kind):
            return int(getattr(layer, attribute)), axis
    if isinstance(layer, nn.LayerNorm) and layer.normalized_shape:
        return layer.normalized_shape[-1], -1
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How messages call what is tried."""

    model: str  # its factory
    loss: str
    data: str  # the table: "data.train", "data.test"
    metric: str = ""
    indices: Sequence[int] = ()  # of the samples, in the data set


def train(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, loss: Loss, names: Names
) -> None:
    """Take one step forward and backward; the module keeps no gradient.

    Args:
        module: The model, in training mode afterwards.
        inputs: (n_samples, ...).
        targets: (n_samples, ...).
        loss: f(outputs, targets) -> mean.
        names: How messages call them.

    Raises:
        JobError: what is wrong, its value and the fix.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        n_frozen = sum(1 for _ in module.parameters())
        raise JobError(
            f"[model] {names.model} has nothing to train: "
            + (
                f"none of its {n_frozen} parameters requires grad"
                if n_frozen
                else "it has no parameters"
            )
        )
    try:
        refuse_bounded_tables(module)
    except GraphError as error:
        raise JobError(f"[model] {names.model}: {error}") from error
    module.train()
    outputs = _forward(module, inputs, names=names)
    value = _loss(outputs, targets, loss=loss, names=names)
    if not value.requires_grad:
        raise JobError(
            f"[algorithm] loss {names.loss} does not depend on the model's parameters: "
            "something between detaches it (no_grad, detach, item, numpy)"
        )
    _check_finite(value, inputs, targets, names=names)
    try:
        value.backward()
    except RuntimeError as error:
        raise JobError(f"[model] the backward pass of {names.model} failed: {error}") from error
    try:
        _check_gradient(module, names=names)
    finally:
        module.zero_grad(set_to_none=True)


def evaluate(
    module: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    loss: Loss,
    metric: Metric,
    names: Names,
) -> None:
    """Evaluate one batch; see `train`.

    Raises:
        JobError: what is wrong, its value and the fix.
    """
    module.eval()
    with torch.no_grad():
        outputs = _forward(module, inputs, names=names)
        _loss(outputs, targets, loss=loss, names=names)
        try:
            value: object = metric(outputs, targets)
        except Exception as error:  # the metric may be the user's
            raise JobError(
                f"[evaluation] metric {names.metric} failed on outputs of shape "
                f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} "
                f"and {dtype_name(targets)}: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(value, torch.Tensor | float | int) or (
        isinstance(value, torch.Tensor) and value.numel() != 1
    ):
        raise JobError(
            f"[evaluation] metric {names.metric} returned {shown(value)}: it must "
            "return one number, the mean over the samples"
        )


def bad_sample(inputs: torch.Tensor, targets: torch.Tensor, *, names: Names) -> str | None:
    """Return a sentence on the first sample that has NaN or infinity, if any has."""
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        bad = ~tensor.isfinite()
        if bool(bad.any()):
            row = int(bad.nonzero()[0][0])
            return (
                f"[{names.data}] sample {names.indices[row]} has NaN or infinite "
                f"{name}: fix or remove such samples"
            )
    return None


def shown(value: object) -> str:
    """Return a short description of a value: "None", "a tensor of shape (3,)", "a list"."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# -------------------------------------------------------------------- forward


def _forward(module: nn.Module, inputs: torch.Tensor, *, names: Names) -> torch.Tensor:
    with LayerWatch(module) as watch:
        try:
            outputs: object = module(inputs)
        except Exception as error:  # the model is the user's
            reason = watch.explain(error, inputs, data=names.data)
            raise JobError(f"[model] {names.model}, {reason}") from error
    if not isinstance(outputs, torch.Tensor):
        raise JobError(
            f"[model] {names.model}: the model returned {shown(outputs)}, not a "
            "tensor: the loss takes one tensor of outputs"
        )
    if outputs.ndim == 0 or len(outputs) != len(inputs):
        raise JobError(
            f"[model] {names.model}: the model returned outputs of shape "
            f"{tuple(outputs.shape)} for {len(inputs)} samples: the first size must be "
            f"{len(inputs)}"
        )
    return outputs


# ----------------------------------------------------------------------- loss


def _loss(
    outputs: torch.Tensor, targets: torch.Tensor, *, loss: Loss, names: Names
) -> torch.Tensor:
    name = names.loss.removesuffix("_loss")
    if name in CLASS_LOSSES and targets.shape != outputs.shape:
        _check_labels(outputs, targets, names=names)
    # A loss of the user's own may take any targets.
    elif name in LOSSES:
        _check_elements(outputs, targets, names=names)
    try:
        value: object = loss(outputs, targets)
    except Exception as error:  # the loss may be the user's
        raise JobError(
            f"[algorithm] loss {names.loss} failed on outputs of shape "
            f"{tuple(outputs.shape)} and {dtype_name(outputs)}, targets of shape "
            f"{tuple(targets.shape)} and {dtype_name(targets)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise JobError(
            f"[algorithm] loss {names.loss} returned {shown(value)}: it must return a "
            "tensor of one element, the mean over the samples"
        )
    if value.dtype != outputs.dtype and targets.is_floating_point():
        raise JobError(
            f"[{names.data}] targets are {dtype_name(targets)}, but the model gives "
            f"{dtype_name(outputs)}: let the data set return targets of "
            f"{dtype_name(outputs)}"
        )
    return value


def _check_elements(outputs: torch.Tensor, targets: torch.Tensor, *, names: Names) -> None:
    is_alike = outputs.shape == targets.shape
    numbers = targets.is_floating_point() or names.loss.removesuffix("_loss") != "mse"
    if is_alike and numbers:
        return
    # The most common cause deserves its own hint.
    looks_like_labels = not targets.is_floating_point()
    raise JobError(
        f"[algorithm] loss {names.loss} compares element by element, but the model "
        f"gives outputs of shape {tuple(outputs.shape)} and {dtype_name(outputs)}, and "
        f"[{names.data}] targets of shape {tuple(targets.shape)} and "
        f"{dtype_name(targets)}: let the data set return targets of shape "
        f"{tuple(outputs.shape)} and {dtype_name(outputs)}"
        + (", or use loss = 'cross_entropy' if they are class labels" if looks_like_labels else "")
    )


def _check_labels(outputs: torch.Tensor, targets: torch.Tensor, *, names: Names) -> None:
    if targets.is_floating_point() or targets.dtype != torch.int64:
        raise JobError(
            f"[{names.data}] targets are {dtype_name(targets)} of shape "
            f"{tuple(targets.shape)}, but loss {names.loss} needs labels: let the data "
            "set return them as int64"
        )
    expected = (outputs.shape[0], *outputs.shape[2:])
    if outputs.ndim < 2 or targets.shape != expected:
        raise JobError(
            f"[{names.data}] targets have shape {tuple(targets.shape)}, but loss "
            f"{names.loss} needs {tuple(expected)} for outputs of shape "
            f"{tuple(outputs.shape)}: one label for each row of outputs"
        )
    check_labels(targets, outputs.shape[1], indices=names.indices, table=names.data)


# --------------------------------------------------------------------- finite


def _check_finite(
    value: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, *, names: Names
) -> None:
    if bool(value.isfinite().all()):
        return
    blame = bad_sample(inputs, targets, names=names)
    if blame is not None:
        raise JobError(blame)
    raise JobError(
        f"[algorithm] loss {names.loss} is {value.item()} for samples "
        f"{names.indices[0]}, ..., whose inputs and targets are finite: check "
        f"the initial values of {names.model}, and logarithms or divisions in the loss"
    )


def _check_gradient(module: nn.Module, *, names: Names) -> None:
    gradients = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if not gradients:
        raise JobError(
            f"[model] {names.model}: no parameter received a gradient: none that "
            "requires grad has a part in the outputs"
        )
    for name, gradient in gradients.items():
        if gradient.is_sparse:
            raise JobError(
                f"[model] {names.model}: the gradient of {name!r} is sparse, and "
                "shards take dense ones: make its nn.Embedding with sparse=False"
            )
        if not bool(gradient.isfinite().all()):
            raise JobError(
                f"[model] {names.model}: the gradient of {name!r} is NaN or infinite, "
                "though the loss is finite: check square roots, divisions and norms "
                "at zero"
            )
