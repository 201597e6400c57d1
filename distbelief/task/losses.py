"""Losses and metrics by name or import path: f(outputs, targets) -> mean over the samples.

A user's own function gets what the model returns and what the data set gives: f(outputs, batch)
where items are dictionaries. Those with a name take one tensor of each: `scores_of`. The loss
"model" is the one that the model returns itself. A name may have arguments of torch's function:
"cross_entropy(label_smoothing=0.1)", which a table of a job file becomes.

The result is a tensor of one element. A batch that is evaluated in pieces is weighted by their
sizes. A metric that is no mean over samples is an object with a state, as those of torchmetrics:
`update(outputs, targets)` takes each piece, and `compute()` returns the metric of all.
"""

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from numbers import Real
from typing import Final, NoReturn, Protocol, cast, final, runtime_checkable

import numpy as np
import torch
from torch.nn import functional

from distbelief.core.errors import JobError
from distbelief.core.formatting import nearest
from distbelief.task.data import Path, shown_path, tensors_of
from distbelief.task.imports import call_factory, named, resolve


# Of what the model returns, and targets or batch.
Loss = Callable[..., torch.Tensor]  # type: ignore[explicit-any] # of any type
MeanMetric = Callable[..., torch.Tensor | float]  # type: ignore[explicit-any] # the same


@runtime_checkable
class StatefulMetric(Protocol):
    """A metric of all samples that it was given since its `reset`."""

    @property
    def update(self) -> Callable[..., object]: ...  # type: ignore[explicit-any] # the same
    def compute(self) -> torch.Tensor | float: ...
    def reset(self) -> object: ...


Metric = MeanMetric | StatefulMetric

_OfTensors = Callable[..., torch.Tensor]  # type: ignore[explicit-any] # outputs, targets, options

CHUNK: Final = 1024  # held-out samples of one piece, where one process holds the whole model
OWN: Final = "model"  # the loss that the model returns
LOSS_METRIC: Final = "loss"  # the metric that is the loss


def scores_path(outputs: object) -> Path:
    """Return the path of the only tensor, or "logits", in the outputs, or raise JobError."""
    found = tensors_of(outputs)
    if len(found) == 1:
        return next(iter(found))
    if ("logits",) in found:
        return ("logits",)
    raise JobError(
        f"a loss or metric with a name takes one tensor of outputs, and the model returned "
        f"{', '.join(map(shown_path, found)) or f'a {type(outputs).__name__} without any'}: return "
        "one, call it logits, or use your own function, loss = 'package.module:function'"
    )


def scores_of(outputs: object) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        return outputs
    return tensors_of(outputs)[scores_path(outputs)]


def labels_of(targets: object) -> torch.Tensor:
    """Return targets that are one tensor; JobError if they are not."""
    if isinstance(targets, torch.Tensor):
        return targets
    raise no_label(tensors_of(targets))


def no_label(paths: Iterable[Path]) -> JobError:
    """Return the error for targets with several tensors where a loss has a name."""
    return JobError(
        "a loss or metric with a name takes one tensor of targets, and the data set gives "
        f"{', '.join(map(shown_path, paths))}: return pairs (inputs, target), or use loss = "
        "'model' or your own function, loss = 'package.module:function'"
    )


def own_loss(outputs: object, targets: object) -> torch.Tensor:
    """Return a model's own loss, entry "loss" or the first of a tuple, or raise JobError."""
    del targets
    found = tensors_of(outputs)
    for path in (("loss",), (0,), ()):
        if path in found and found[path].numel() == 1:
            return found[path]
    if ("loss",) in found:
        raise JobError(
            f"[algorithm] loss = 'model': the model's loss has shape {tuple(found['loss',].shape)}"
            ": it must have one element, the mean over the samples"
        )
    raise JobError(
        "[algorithm] loss = 'model' takes the field 'loss' of what the model returns, or the first "
        f"of a tuple; it returned {', '.join(map(shown_path, found)) or 'no tensor'}: does "
        "the data set give the labels, under the name that forward has for them?"
    )


def _named(function: _OfTensors) -> Loss:
    return lambda outputs, targets: function(scores_of(outputs), labels_of(targets))


def one_vs_all(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each class against all others, summed (Dean et al. 2012, section 5)."""
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    classes = classes.view(1, -1, *(1,) * (outputs.ndim - 2))
    wanted = (targets.unsqueeze(1) == classes).to(outputs.dtype)
    losses = functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
    return losses.sum() / len(outputs)


# torch's losses of two arguments, with or without "_loss" at the end, and "one_vs_all".
LOSSES: Final[dict[str, _OfTensors]] = {
    "binary_cross_entropy": functional.binary_cross_entropy,
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    "cross_entropy": functional.cross_entropy,
    "hinge_embedding": functional.hinge_embedding_loss,
    "huber": functional.huber_loss,
    # torch's default "mean" divides by the number of elements, which gives no divergence.
    "kl_div": partial(functional.kl_div, reduction="batchmean"),
    "l1": functional.l1_loss,
    "mse": functional.mse_loss,
    "multi_margin": functional.multi_margin_loss,
    "multilabel_margin": functional.multilabel_margin_loss,
    "multilabel_soft_margin": functional.multilabel_soft_margin_loss,
    "nll": functional.nll_loss,
    "one_vs_all": one_vs_all,
    "poisson_nll": functional.poisson_nll_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "soft_margin": functional.soft_margin_loss,
}

# torch's classes of them
_CLASSES: Final = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "HingeEmbeddingLoss": "hinge_embedding",
    "HuberLoss": "huber",
    "KLDivLoss": "kl_div",
    "L1Loss": "l1",
    "MSELoss": "mse",
    "MultiLabelMarginLoss": "multilabel_margin",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin",
    "MultiMarginLoss": "multi_margin",
    "NLLLoss": "nll",
    "PoissonNLLLoss": "poisson_nll",
    "SmoothL1Loss": "smooth_l1",
    "SoftMarginLoss": "soft_margin",
}
_NOT_OURS: Final = {"input", "target", "size_average", "reduce", "reduction"}

# Their targets are class labels, one for each row of outputs.
CLASS_LOSSES: Final = frozenset({"cross_entropy", "nll", "multi_margin", "one_vs_all"})


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share of targets that the largest output predicts.

    Args:
        outputs: (n_samples, n_classes, ...) scores.
        targets: (n_samples, ...) labels, or (n_samples, n_classes, ...) probabilities.
    """
    return _top(outputs, targets, k=1)


def top5(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share of targets among the five largest outputs; see `accuracy`."""
    return _top(outputs, targets, k=min(5, outputs.shape[1]))


METRICS: Final[dict[str, _OfTensors]] = {
    "accuracy": accuracy,
    "mse": lambda outputs, targets: functional.mse_loss(outputs, targets.to(outputs.dtype)),
    "top5": top5,
}


def is_named(loss: str) -> bool:
    """Return whether a loss is one of `LOSSES`, of one tensor of outputs and one of targets."""
    return loss != OWN and not {":", "("} & {*loss}


def base_of(loss: str) -> str:
    """Return the key in `LOSSES` of a loss with a name, with arguments or without."""
    return loss.partition("(")[0].removesuffix("_loss")


def text_of(table: Mapping[str, object]) -> str:
    """Return the name of a loss with arguments, given as a table; JobError if it is none."""
    name = table.get("name")
    if not isinstance(name, str) or ":" in name or name == OWN:
        raise JobError(
            f"[algorithm] loss has name = {name!r}: a table is for a loss of torch and its "
            'arguments, as { name = "CrossEntropyLoss", label_smoothing = 0.1 }; bind those of '
            "your own function, as by functools.partial"
        )
    base = _CLASSES.get(name, name.removesuffix("_loss"))
    function = LOSSES.get(base) or _refuse(name, LOSSES, what="loss", table="algorithm")
    known = inspect.signature(function).parameters.keys() - _NOT_OURS - {"outputs", "targets"}
    arguments = {key: value for key, value in table.items() if key != "name"}
    usual = "batchmean" if base == "kl_div" else "mean"
    if arguments.pop("reduction", usual) != usual:
        raise JobError(
            f"[algorithm] loss {name!r} must be the mean over the samples: leave reduction out, or "
            f'use "{usual}"'
        )
    for key, value in arguments.items():
        if key not in known:
            hint = nearest(key, sorted(known)) if known else "It has none."
            raise JobError(f"[algorithm] loss {name!r} has no argument {key!r}. {hint}")
        numbers = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(one, int | float) for one in numbers):
            raise JobError(
                f"[algorithm] loss has {key} = {value!r}: use a number, or a list of them"
            )
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{base}({given})" if given else base


def _with_arguments(loss: str) -> Loss:
    try:
        call = ast.parse(loss, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(loss)  # noqa: TRY301 -- told below
        given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError):
        raise JobError(
            f"[algorithm] loss = {loss!r} cannot be read: use a table, as "
            '{ name = "CrossEntropyLoss", label_smoothing = 0.1 }'
        ) from None
    text_of({"name": base_of(loss), **given})  # refuses what is wrong
    function = LOSSES[base_of(loss)]
    plain = {key: value for key, value in given.items() if not isinstance(value, list)}
    lists = {key: torch.tensor(value) for key, value in given.items() if isinstance(value, list)}

    def computed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        tensors = {key: one.to(outputs) for key, one in lists.items()}
        return function(outputs, targets, **plain, **tensors)

    return _named(computed)


def loss_function(name: str) -> Loss:
    if name == OWN:
        return own_loss
    if "(" in name:
        return _with_arguments(name)
    if ":" in name:
        return cast("Loss", resolve(name, table="algorithm"))
    found = LOSSES.get(name) or LOSSES.get(name.removesuffix("_loss"))
    return _named(found or _refuse(name, [*LOSSES, OWN], what="loss", table="algorithm"))


def metric_of(name: str) -> Metric:
    """Return the metric of this name or import path; `LOSS_METRIC` is none of them.

    A class is called without arguments; of an object with a state this is a copy.
    """
    if ":" in name:
        found = named(name, table="evaluation")
        if isinstance(found, type):
            found = call_factory(name, {}, table="evaluation")
        if isinstance(found, StatefulMetric):
            return deepcopy(found)
        return cast("MeanMetric", resolve(name, table="evaluation"))
    known = [*METRICS, LOSS_METRIC]
    return _named(METRICS.get(name) or _refuse(name, known, what="metric", table="evaluation"))


def higher_is_better(metric: str) -> bool:
    """Return whether higher is better: as a user's function says (torchmetrics), or true."""
    if metric in {"mse", LOSS_METRIC}:
        return False
    return getattr(metric_of(metric), "higher_is_better", True) is not False


def number_of(value: object, *, name: str, what: str = "") -> float:
    """Return the real number, of any type of torch and numpy, that a metric has returned.

    JobError, with its `name` and `what` the number is, if it has returned anything else.
    """
    plain, found = value, f"{type(value).__name__}"
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        plain = value.item() if math.prod(value.shape) == 1 else None
        kind = str(value.dtype).removeprefix("torch.")
        found = f"{kind} of shape {tuple(value.shape)}"
    is_bool = isinstance(plain, bool)  # which Python counts as a number
    if isinstance(plain, Real) and not is_bool:
        with suppress(OverflowError):
            return float(plain)
        found = "a number that is too large"
    raise JobError(f"[evaluation] metric {name} returned {found}: it must return one number{what}")


@final
class Measures:
    """Loss and metrics of an evaluation, piece by piece."""

    def __init__(self, loss: Loss, metrics: Mapping[str, Metric]) -> None:
        self._loss = loss
        self.metrics = metrics

    def reset(self) -> None:
        """An evaluation begins."""
        for metric in self.metrics.values():
            if isinstance(metric, StatefulMetric):
                metric.reset()

    def of(self, outputs: object, targets: object, *, loss: float | None = None) -> list[float]:
        """Take a piece, and its `loss` if that is known; return what is a mean over its samples.

        In place of other metrics there is 0.
        """
        value = float(self._loss(outputs, targets)) if loss is None else loss
        found = [value]
        for name, metric in self.metrics.items():
            if isinstance(metric, StatefulMetric):
                metric.update(outputs, targets)
                found.append(0.0)
            elif metric is self._loss:
                found.append(value)
            else:
                found.append(number_of(metric(outputs, targets), name=name))
        return found

    def whole(self) -> dict[int, float]:
        """Return the metrics of all pieces that are no means, by their place in `of`."""
        return {
            place: number_of(metric.compute(), name=name)
            for place, (name, metric) in enumerate(self.metrics.items(), start=1)
            if isinstance(metric, StatefulMetric)
        }


def usual_metric(loss: str, *, labels: bool | None = True) -> str:
    """Return the default metric for a loss.

    With integer `labels`, a user's own loss classifies; None: targets are not one tensor.
    """
    if loss == OWN or labels is None:
        return LOSS_METRIC
    if labels if ":" in loss else base_of(loss) in CLASS_LOSSES:
        return "accuracy"
    return "mse"


def _refuse(name: str, known: Iterable[str], *, what: str, table: str) -> NoReturn:
    hint = nearest(name, known, only_close=True)
    raise JobError(
        f"[{table}] there is no {what} {name!r} (there are {', '.join(sorted(known))}, "
        f"or an import path 'package.module:function'). {hint}".rstrip(". ")
    )


def _top(outputs: torch.Tensor, targets: torch.Tensor, *, k: int) -> torch.Tensor:
    labels = targets.argmax(dim=1) if targets.shape == outputs.shape else targets
    named = outputs.topk(k, dim=1).indices  # (n_samples, k, ...)
    return (named == labels.unsqueeze(1)).any(dim=1).float().mean()
