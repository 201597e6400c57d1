"""Translations of comparisons, of what is done with masks, and of choices by them."""

import operator
from collections.abc import Mapping
from typing import Final

import torch

from distbelief.graph.building import Builder
from distbelief.graph.layer import GraphError
from distbelief.graph.operation import Operand, Operation, Translated
from distbelief.graph.translation import FunctionTranslation, translates_function
from distbelief.graph.translations.broadcasting import lined_up


_COMPARISONS: Final[Mapping[str, tuple[object, ...]]] = {
    "greater": (operator.gt, torch.gt, torch.greater, "gt", "greater"),
    "greater_equal": (operator.ge, torch.ge, torch.greater_equal, "ge"),
    "less": (operator.lt, torch.lt, torch.less, "lt", "less"),
    "less_equal": (operator.le, torch.le, torch.less_equal, "le"),
    "equal": (operator.eq, torch.eq, "eq"),
    "not_equal": (operator.ne, torch.ne, "ne"),
    "and": (torch.logical_and, "logical_and"),
    "or": (torch.logical_or, "logical_or"),
}
NO_GRADIENT: Final = "gradient"
"""The option by which a layer says, if False, that it has none."""

_MIRRORED: Final = {
    "greater": "less",
    "greater_equal": "less_equal",
    "less": "greater",
    "less_equal": "greater_equal",
}


def _comparison(function: str) -> FunctionTranslation:
    def translate(builder: Builder, operation: Operation) -> Translated:
        operation.only("input", "other")
        left = operation.argument(0, "input")
        right = operation.argument(1, "other")
        if isinstance(left, Operand) and isinstance(right, Operand):
            return _compared(builder, operation, function)
        if isinstance(left, Operand):
            number = _number(operation, right, "other")
            return _compared(builder, operation, function, number)
        number = _number(operation, left, "input")
        mirrored = _MIRRORED.get(function, function)
        return _compared(builder, operation, mirrored, number)

    return translate


for _function, _targets in _COMPARISONS.items():
    translates_function(*_targets)(_comparison(_function))


@translates_function(operator.and_, operator.or_, "__and__", "__or__")
def combined(builder: Builder, operation: Operation) -> Translated:
    """Add what is true of both masks, or of either."""
    _check_masks(operation)
    word = "and" if "and" in operation.target else "or"
    return _comparison(word)(builder, operation)


@translates_function(operator.invert, torch.logical_not, "logical_not")
def inverted(builder: Builder, operation: Operation) -> Translated:
    """Add what is not true."""
    if "not" not in operation.target:
        _check_masks(operation)
    return _compared(builder, operation, "equal", 0.0)


@translates_function(torch.where, "where")
def where(builder: Builder, operation: Operation) -> Translated:
    """Add a choice; `x.where(mask, other)` has its mask in the middle."""
    first, second = operation.argument(0, "condition"), operation.argument(1, "input")
    other = operation.argument(2, "other")
    if _is_mask(operation, first):
        return _chosen(builder, operation, first, {"yes": second, "no": other})
    return _chosen(builder, operation, second, {"yes": first, "no": other})


@translates_function(torch.masked_fill, "masked_fill", "masked_fill_")
def masked_fill(builder: Builder, operation: Operation) -> Translated:
    """Add a choice between a number and what is there."""
    mask, value = operation.argument(1, "mask"), operation.argument(2, "value")
    there = operation.operand(0, "input")
    return _chosen(builder, operation, mask, {"yes": value, "no": there})


def _compared(
    builder: Builder, operation: Operation, function: str, number: float | None = None
) -> str:
    options: dict[str, str | float | bool] = {"function": function, NO_GRADIENT: False}
    if number is not None:
        options["argument"] = number
    return builder.add(
        operation.name,
        "comparison",
        lined_up(builder, operation),
        operation.output,
        options=options,
    )


def _chosen(builder: Builder, operation: Operation, mask: object, values: dict[str, object]) -> str:
    """Add a choice; operands are read in the order mask, yes, no."""
    if not isinstance(mask, Operand):
        raise GraphError(
            f"{operation.name}: the mask is not the output of a layer: compare "
            "something, or register it as a buffer of its module"
        )
    if operation.is_integer:
        raise GraphError(
            f"{operation.name} chooses whole numbers, which has no split rule: choose "
            "floating point ones"
        )
    options = {
        word: _number(operation, value, word)
        for word, value in values.items()
        if not isinstance(value, Operand)
    }
    operands = (mask, *(v for v in values.values() if isinstance(v, Operand)))
    names = lined_up(builder, operation, operands)
    return builder.add(operation.name, "where", names, operation.output, options=options)


def _number(operation: Operation, value: object, word: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if not isinstance(value, int | float):
        raise GraphError(
            f"{operation.name}: {word} is neither a number nor the output of a layer: "
            "register tensors as parameters or buffers of their module"
        )
    return float(value)


def _is_mask(operation: Operation, value: object) -> bool:
    """Return whether this is the condition: of whole numbers, and first in torch's."""
    is_method = isinstance(value, Operand) and not value.is_integer
    return not is_method or "condition" in operation.keywords


def _check_masks(operation: Operation) -> None:
    """Check that `&`, `|`, `~` are of masks: of whole numbers they are about bits."""
    result = operation.result
    if not isinstance(result, torch.Tensor) or result.dtype != torch.bool:
        raise GraphError(
            f"{operation.name} is about the bits of whole numbers, which has no split "
            "rule: compare them first"
        )
