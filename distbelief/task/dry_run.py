"""One trial step of the user's model, data and loss; each mistake becomes a clear JobError.

Slow and careful where training is fast: `validation.check` runs it before a job starts, and a
replica runs it again on a batch that failed. It checks in the order in which data flows:
inputs, layers, outputs, targets, loss, gradient.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import torch
from torch import nn

from distbelief.core.errors import JobError
from distbelief.graph.graph import GraphError, LayerGraph
from distbelief.graph.ops.loss_layers import ClassSums, ElementwiseLoss
from distbelief.graph.unsupported import refuse_bounded_tables
from distbelief.task.data import Batch, Path, n_samples_of, shown_path, tensors_of
from distbelief.task.losses import (
    CLASS_LOSSES,
    LOSSES,
    OWN,
    Loss,
    Metric,
    StatefulMetric,
    base_of,
    labels_of,
    number_of,
    scores_of,
)


MEAN_ERROR_MAX: Final = 1e-3  # between a metric of a batch and the mean of its parts
PARTS_ERROR_MAX: Final = 1e-4  # the same of a loss: rounding is a hundredth of it
IGNORED_LABEL: Final = -100  # torch's `ignore_index`: such a target counts for nothing


PartOf: TypeAlias = "slice[int, int, None]"  # of the samples of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How messages call what is tried."""

    model: str  # its factory
    loss: str
    data: str  # the table: "data.train", "data.test"
    indices: Sequence[int] = ()  # of the samples, in the data set
    takes_sparse: bool = False  # gradients may be sparse
    kept: Literal["", "frozen", "all"] = ""  # parameters that forward must not change


def class_counts(graph: LayerGraph) -> Mapping[str, int]:
    """Return the number of classes, by the input layer that has the labels."""
    found = {}
    for layer in graph.layers:
        is_place = layer.kind == ElementwiseLoss.name and layer.options["labels"]
        is_class = layer.kind == ClassSums.name and not layer.options["soft"]
        if is_place or is_class:
            found[layer.inputs[1]] = layer.input_shapes[0][layer.integer("dim")]
    return found


def check_labels(
    labels: torch.Tensor, n_classes: int, *, indices: Sequence[int], table: str, sums: bool = False
) -> None:
    """Check that labels are 0 to n_classes - 1; `indices` and `table` are for the message.

    Where losses are added up (`sums`), all must count, too: see `check_counted`.

    If classes are split over ranks, each rank handles its own labels. A label out of range would
    belong to no rank and count as a sample without a loss, where torch raises.
    """
    if sums:
        check_counted(labels, indices=indices, table=table)
    bad = ((labels < 0) | (labels >= n_classes)) & (labels != IGNORED_LABEL)
    if bool(bad.any()):
        row = int(bad.nonzero()[0][0])
        raise JobError(
            f"[{table}] sample {indices[row]} has label {int(labels[row][bad[row]].flatten()[0])}, "
            f"but the model has {n_classes} outputs (labels 0 to {n_classes - 1}): give it more "
            "outputs, or fix the labels"
        )


def check_counted(targets: object, *, indices: Sequence[int], table: str) -> None:
    """Raise JobError for labels that a mean leaves out, where a batch is added up of parts.

    The mean of each part is over the labels that count there, and parts are weighted by samples.
    """
    for tensor in tensors_of(targets).values():
        if tensor.dtype == torch.int64 and bool((ignored := tensor == IGNORED_LABEL).any()):
            row = int(ignored.nonzero()[0][0])
            raise JobError(
                f"[{table}] sample {indices[row]} has label {IGNORED_LABEL}, which does not count, "
                "and a batch method adds up means of parts: leave such samples out, or use your "
                "own loss, a sum over labels divided by the number of samples, or algorithm "
                '"downpour"'
            )


# Losses that leave labels out, and the model's own, which mostly is one.
LEAVE_OUT: Final = frozenset({"cross_entropy", "nll", OWN})


def check_parts(loss_of: Callable[[PartOf], float], n: int, *, loss: str) -> None:
    """Raise JobError if the loss of n samples is not the mean of those of two parts of them."""
    if n < 3:
        return
    parts = slice(n), slice(n // 3), slice(n // 3, n)
    try:
        with torch.no_grad():
            whole, first, second = map(loss_of, parts)
            mean = (n // 3 * first + (n - n // 3) * second) / n
            differs = abs(whole - mean) > PARTS_ERROR_MAX * max(map(abs, (whole, first, second)))
            is_bad = differs and loss_of(parts[0]) == whole  # else it is random
    except Exception:  # noqa: BLE001 -- of the user's, who may want one number of samples only
        return
    if is_bad:
        raise JobError(
            f"[algorithm] loss {loss} is {whole:.6g} for {n} samples, and {mean:.6g} as the mean "
            "over parts, which a batch method adds up: let it be the sum over what counts, divided "
            'by the number of samples, or use algorithm "downpour"'
        )


def train(module: nn.Module, batch: Batch, *, loss: Loss, names: Names) -> None:
    """Take one step forward and backward; the module keeps no gradient."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise JobError(
            f"[model] {names.model} has nothing to train: none of its "
            f"{sum(1 for _ in module.parameters())} parameters requires grad"
        )
    try:
        refuse_bounded_tables(module)
    except GraphError as error:
        raise JobError(f"[model] {names.model}: {error}") from error
    module.train()
    with _kept(module, names):
        outputs = _forward(module, batch, names)
    value = _loss(outputs, batch.targets, loss, names)
    if not value.requires_grad:
        raise JobError(
            f"[algorithm] loss {names.loss} does not depend on the model's parameters: "
            "something between detaches it (no_grad, detach, item, numpy)"
        )
    if not bool(value.isfinite().all()):
        raise JobError(
            bad_sample(batch, names=names)
            or f"[algorithm] loss {names.loss} is {value.item()} for samples {names.indices[0]}, "
            "..., whose inputs and targets are finite: check the initial values of "
            f"{names.model}, and logarithms or divisions in the loss"
        )
    try:
        value.backward()
        _check_gradient(module, names)
    except RuntimeError as error:
        raise JobError(f"[model] the backward pass of {names.model} failed: {error}") from error
    finally:
        module.zero_grad(set_to_none=True)


@contextmanager
def _kept(module: nn.Module, names: Names) -> Iterator[None]:
    """Refuse a forward that makes or changes parameters: shards would have others.

    Nor may it make buffers that are saved.
    """
    before = {name: one.detach().clone() for name, one in module.named_parameters() if names.kept}
    saved = module.state_dict(keep_vars=True).keys()
    yield
    more = module.state_dict(keep_vars=True).keys() - saved
    for name, _ in module.named_buffers() if names.kept else ():
        if name in more:
            raise JobError(
                f"[model] {names.model}: forward makes buffer {name!r} itself, which a job would "
                "not have: make it in __init__, or register it with persistent=False"
            )
    for name, one in module.named_parameters() if names.kept else ():
        what = f"[model] {names.model}: forward {{}} parameter {name!r} itself, which is not "
        if name not in before:
            raise JobError(f"{what.format('makes')}trained: make it in __init__")
        # As bits, in which NaN is the same.
        pair = (x.detach().resolve_neg().reshape(-1) for x in (one, before[name]))
        now, then = (x.view(torch.uint8) for x in pair)
        if (names.kept == "all" or not one.requires_grad) and not torch.equal(now, then):
            way = "exchanged: keep it in a buffer, or compute with a changed copy"
            raise JobError(what.format("changes") + way)


def check_buffers(module: nn.Module, *, model: str) -> None:
    """Raise JobError for a saved buffer that is not finite: no push of it would be."""
    saved = module.state_dict(keep_vars=True).keys()
    for name, one in module.named_buffers():
        if name in saved and one.is_floating_point() and not bool(one.isfinite().all()):
            raise JobError(
                f"[model] {model}: buffer {name!r} has NaN or infinite values after a step, and "
                "replicas push what they save: register it with persistent=False, as for a mask, "
                "or use large numbers"
            )


N_TRIED: Final = 8  # samples, of which a loss is tried once, twice and three times over
GROWS: Final = 0.01  # least growth of a loss that counts, relative to it
UNSURE: Final = 0.25  # how far a sum may be from twice and three times itself, if it is random


def check_mean(module: nn.Module, batch: Batch, *, loss: Loss, names: Names) -> None:
    """Raise JobError for a loss that grows with the number of samples, such as a sum.

    A mean is the same for samples that are given several times, whatever it counts; a sum, and a
    sum beside a mean, grow by as much each time; a sum over a power of their number, as that power.
    A loss that compares the samples of a batch with each other grows in another way, and may.
    """
    module.train()
    few: dict[Path, torch.Tensor] = {}

    def value(n_copies: int) -> float:
        tensors = {path: torch.cat([tensor] * n_copies) for path, tensor in few.items()}
        copies = Batch.of(tensors)
        return float(loss(copies.run(module), copies.targets).detach())

    try:
        few |= {path: tensor[:N_TRIED] for path, tensor in batch.tensors().items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            one, again, two, three = (value(n) for n in (1, 1, 2, 3))
    except Exception:  # noqa: BLE001 -- of the user's, who may want one number of samples only
        return
    growth = two - one
    if again != one:  # as by dropout: only a plain sum shows
        near = UNSURE * abs(one)
        is_bad = abs(two - 2 * one) < near and abs(three - 3 * one) < near
    elif abs(growth) > GROWS * abs(one):  # and a number
        is_sum = abs(three - two - growth) <= GROWS * abs(growth)
        ratio = two / one if one else 0.0
        is_power = ratio > 0 and math.isclose(3 ** math.log2(ratio), three / one, rel_tol=1e-3)
        is_bad = is_sum or is_power
    else:
        return
    if is_bad:
        raise JobError(
            f"[algorithm] loss {names.loss} is {one:.4g} for {n_samples_of(few)} samples and "
            f"{two:.4g} for the same samples twice: let it be the mean over the samples, as by "
            "reduction='mean', not a sum"
        )


def evaluate(
    module: nn.Module, batch: Batch, *, loss: Loss, metrics: Mapping[str, Metric], names: Names
) -> None:
    """Evaluate one batch; see `train`."""
    module.eval()
    with torch.no_grad():
        outputs = _forward(module, batch, names)
        _loss(outputs, batch.targets, loss, names)
        for name, metric in metrics.items():
            measure(metric, outputs, batch.targets, name=name)


def measure(metric: Metric, outputs: object, targets: object, *, name: str) -> float:
    """Return a metric of one batch alone; JobError, with its `name`, if it has none."""
    try:
        if isinstance(metric, StatefulMetric):
            alone = deepcopy(metric)
            alone.reset()
            alone.update(outputs, targets)
            value = alone.compute()
        else:
            value = metric(outputs, targets)
    except Exception as error:  # the metric may be the user's
        raise _failed(f"[evaluation] metric {name}", outputs, targets, error) from error
    what = "" if isinstance(metric, StatefulMetric) else ", the mean over the samples"
    return number_of(value, name=name, what=what)


def check_mean_metric(module: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> None:
    """Refuse a metric that is no mean, where outputs and targets are one tensor each.

    Outputs are drawn, because a model that has learned nothing may give the same for all samples.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs, targets = batch.run(module.eval()), batch.targets
        if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            return
        outputs, n = outputs + torch.randn(outputs.shape).to(outputs), len(targets)
        for name, metric in metrics.items():
            try:
                whole, first, second = (
                    measure(metric, outputs[part], targets[part], name=name)
                    for part in (slice(n), slice(n // 3), slice(n // 3, n))
                )
            except (JobError, IndexError):  # it takes other outputs, such as probabilities
                continue
            mean = (n // 3 * first + (n - n // 3) * second) / n
            if abs(whole - mean) > MEAN_ERROR_MAX * max(abs(whole), abs(first), abs(second)):
                raise JobError(
                    f"[evaluation] metric {name} is {whole:.4g} for {n} samples, and {mean:.4g} as "
                    "the mean over their parts: held-out data are measured in parts, so let it be "
                    "an object with update(outputs, targets), compute() and reset(), as those of "
                    "torchmetrics, or a mean over the samples"
                )


def check_arguments(
    module: nn.Module, batch: Batch, *, model: str, table: str = "data.train"
) -> None:
    """Check that forward takes what items have; `model` and `table` are for the message."""
    arguments, keywords = batch.arguments(module)
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        given = ", ".join(map(shown_path, batch.tensors()))
        raise JobError(
            f"[{table}] items have {given}, but forward of {model} takes "
            f"({', '.join(signature.parameters)}): {error}"
        ) from error


def bad_sample(batch: Batch, *, names: Names) -> str | None:
    """Return a sentence on the first sample that has NaN or infinity, if any has."""
    for path, tensor in batch.tensors().items():
        bad = ~tensor.isfinite()
        if bool(bad.any()):
            row = int(bad.nonzero()[0][0])
            return (
                f"[{names.data}] sample {names.indices[row]} has NaN or infinite "
                f"{shown_path(path)}: fix or remove such samples"
            )
    return None


def shown(value: object) -> str:
    """Return a short description of a value: "None", "float32 of shape (3,)", "a list"."""
    match value:
        case torch.Tensor():
            return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
        case None | bool() | int() | float():
            return repr(value)
        case type():
            return f"the class {value.__name__}"
        case _:
            tensors = tensors_of(value).items()
            parts = ", ".join(f"{shown_path(path)} {shown(tensor)}" for path, tensor in tensors)
            return f"a {type(value).__name__}" + (f" ({parts})" if parts else "")


def _failed(what: str, outputs: object, targets: object, error: Exception) -> JobError:
    return JobError(
        f"{what} failed on outputs {shown(outputs)} and targets {shown(targets)}: "
        f"{type(error).__name__}: {error}"
    )


def _forward(module: nn.Module, batch: Batch, names: Names) -> object:
    check_arguments(module, batch, model=names.model, table=names.data)
    with _LayerWatch(module) as watch:
        try:
            with _broadcasts_refused():  # the model may compute its loss
                outputs = batch.run(module)
        except Exception as error:  # the model is the user's
            own = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
            of_type = own is not None and "dtype" in str(error) and watch.has_data(batch)
            way = f": let the data set return {str(own).removeprefix('torch.')}" if of_type else ""
            raise JobError(
                f"[model] {names.model}: {watch.place(batch, data=names.data)}: "
                f"{type(error).__name__}: {error}{way}"
            ) from error
    return outputs


class _LayerWatch(ExitStack):
    """Context manager around a forward pass that records the last innermost layer entered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._at = ""
        self._received: object = None
        for name, layer in module.named_modules():
            # TorchScript has no such hooks.
            is_script = isinstance(layer, torch.jit.ScriptModule)
            if next(layer.children(), None) is None and not is_script:
                before = layer.register_forward_pre_hook(partial(self._enter, name))
                after = layer.register_forward_hook(self._leave)
                self.callback(before.remove)
                self.callback(after.remove)

    def _enter(self, name: str, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        self._at, self._received = f"layer {name!r} {layer}", inputs[0] if inputs else None

    def _leave(self, *_: object) -> None:
        self._at, self._received = self._at.replace("layer", "after layer", 1), None

    def has_data(self, batch: Batch) -> bool:
        """Return whether the layer received the data as they are."""
        return any(self._received is tensor for tensor in batch.tensors().values())

    def place(self, batch: Batch, *, data: str) -> str:
        """Return where the pass was, and what the layer received."""
        if self._received is None:
            return self._at or "forward"
        source = f"from [{data}]" if self.has_data(batch) else "from the layers before it"
        return f"{self._at} received {_with_range(self._received)} {source}"


def _with_range(value: object) -> str:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return shown(value)
    if value.is_floating_point() or value.is_complex():
        return shown(value)
    return f"{shown(value)} with values {int(value.min())} to {int(value.max())}"


@contextmanager
def _broadcasts_refused() -> Iterator[None]:
    """Let torch's losses raise where outputs (n, 1) beside targets (n,) are (n, n) differences."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Using a target size")
        yield


def _loss(outputs: object, targets: object, loss: Loss, names: Names) -> torch.Tensor:
    if base_of(names.loss) in LOSSES and "ignore_index" not in names.loss:
        _check_named(outputs, scores_of(outputs), labels_of(targets), names)
    try:
        with _broadcasts_refused():
            value: object = loss(outputs, targets)
    except JobError:
        raise
    except Exception as error:  # the loss may be the user's
        raise _failed(f"[algorithm] loss {names.loss}", outputs, targets, error) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise JobError(
            f"[algorithm] loss {names.loss} returned {shown(value)}: it must return a "
            "tensor of one element, the mean over the samples"
        )
    if (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and targets.is_floating_point()
        and value.dtype != outputs.dtype
    ):
        raise JobError(
            f"[{names.data}] targets are {shown(targets)}, but the model gives "
            f"{shown(outputs)}: let the data set return targets of that type"
        )
    return value


def _check_named(
    outputs: object, scores: torch.Tensor, targets: torch.Tensor, names: Names
) -> None:
    if scores.shape[:1] != targets.shape[:1]:
        raise JobError(
            f"[model] {names.model} returned {shown(outputs)} for {len(targets)} samples: the loss "
            f"takes one tensor of outputs, whose first size is {len(targets)}"
        )
    name = base_of(names.loss)
    if name in CLASS_LOSSES and targets.shape != scores.shape:
        expected = (scores.shape[0], *scores.shape[2:])
        if targets.dtype != torch.int64 or scores.ndim < 2 or targets.shape != expected:
            raise JobError(
                f"[{names.data}] targets are {shown(targets)}, but loss {names.loss} needs labels "
                f"for outputs {shown(scores)}: let the data set return int64 of shape {expected}"
            )
        check_labels(targets, scores.shape[1], indices=names.indices, table=names.data)
        return
    is_number = targets.is_floating_point() or name != "mse"
    if scores.shape != targets.shape or not is_number:
        raise JobError(
            f"[algorithm] loss {names.loss} compares element by element, but the model gives "
            f"{shown(scores)}, and [{names.data}] targets are {shown(targets)}: let the data "
            "set return targets like the outputs, or use loss = 'cross_entropy' for labels"
        )


def _check_gradient(module: nn.Module, names: Names) -> None:
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    if not gradients:
        raise JobError(
            f"[model] {names.model}: no parameter received a gradient: none that "
            "requires grad has a part in the outputs"
        )
    for name, gradient in gradients.items():
        if gradient.is_sparse and not names.takes_sparse:
            raise JobError(
                f"[model] {names.model}: the gradient of {name!r} is sparse, and "
                "shards take dense ones: make its nn.Embedding with sparse=False, or use threads "
                "without locks ([algorithm] lockfree, without clip_norm), which move its rows only"
            )
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not bool(values.isfinite().all()):
            raise JobError(
                f"[model] {names.model}: the gradient of {name!r} is NaN or infinite, though the "
                "loss is finite: check square roots, divisions and norms at zero"
            )
