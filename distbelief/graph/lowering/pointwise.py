"""Lowering rules for elementwise operations, dropout, comparisons and masks."""

import operator
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from distbelief.graph.graph import Builder, GraphError
from distbelief.graph.lowering.registry import FunctionLowering, lowers, lowers_function
from distbelief.graph.lowering.views import lined_up
from distbelief.graph.operation import Lowered, Operand, Operation


_WHOLE_CHANNELS: Final = (functional.dropout1d, functional.dropout2d, functional.dropout3d)


@lowers(nn.Dropout, like_input=True)
def dropout(builder: Builder, module: nn.Dropout, operation: Operation) -> Lowered:
    return _dropout(builder, operation, module.p, trains=operation.trains)


@lowers(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, like_input=True)
def channel_dropout(builder: Builder, module: _DropoutNd, operation: Operation) -> Lowered:
    n_shared = len(operation.output) - 1
    return _dropout(builder, operation, module.p, trains=operation.trains, n_shared=n_shared)


@lowers_function(functional.dropout)
def dropout_function(builder: Builder, operation: Operation) -> Lowered:
    probability, trains = _given(operation)
    return _dropout(builder, operation, probability, trains=trains)


@lowers_function(*_WHOLE_CHANNELS)
def channel_dropout_function(builder: Builder, operation: Operation) -> Lowered:
    probability, trains = _given(operation)
    n_shared = len(operation.output) - 1
    return _dropout(builder, operation, probability, trains=trains, n_shared=n_shared)


def _given(operation: Operation) -> tuple[float, bool]:
    probability = operation.argument(1, "p", 0.5)
    assert isinstance(probability, int | float), operation
    return float(probability), bool(operation.argument(2, "training", default=True))


def _dropout(
    builder: Builder, operation: Operation, probability: float, *, trains: bool, n_shared: int = 0
) -> str:
    if not trains or not probability:
        return operation.operands[0].name
    return builder.add(
        operation.name,
        "dropout",
        operation.inputs[:1],
        operation.output,
        options={"probability": float(probability), "n_shared": n_shared},
    )


# --- comparisons and masks ---

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
# The option by which a layer says, if False, that it has none.
NO_GRADIENT: Final = "gradient"

_MIRRORED: Final = {
    "greater": "less",
    "greater_equal": "less_equal",
    "less": "greater",
    "less_equal": "greater_equal",
}


def _comparison(function: str) -> FunctionLowering:
    def lower(builder: Builder, operation: Operation) -> Lowered:
        operation.only("input", "other")
        left = operation.argument(0, "input")
        right = operation.argument(1, "other")
        if isinstance(left, Operand) and isinstance(right, Operand):
            return _compared(builder, operation, function)
        if isinstance(left, Operand):
            number = _choice_number(operation, right, "other")
            return _compared(builder, operation, function, number)
        number = _choice_number(operation, left, "input")
        mirrored = _MIRRORED.get(function, function)
        return _compared(builder, operation, mirrored, number)

    return lower


for _choice_function, _choice_targets in _COMPARISONS.items():
    lowers_function(*_choice_targets)(_comparison(_choice_function))


@lowers_function(operator.and_, operator.or_, "__and__", "__or__")
def combined(builder: Builder, operation: Operation) -> Lowered:
    _check_choice_masks(operation)
    word = "and" if "and" in operation.target else "or"
    return _comparison(word)(builder, operation)


@lowers_function(operator.invert, torch.logical_not, "logical_not")
def inverted(builder: Builder, operation: Operation) -> Lowered:
    if "not" not in operation.target:
        _check_choice_masks(operation)
    return _compared(builder, operation, "equal", 0.0)


@lowers_function(torch.where, "where")
def where(builder: Builder, operation: Operation) -> Lowered:
    # `x.where(mask, other)` has its mask in the middle.
    first, second = operation.argument(0, "condition"), operation.argument(1, "input")
    other = operation.argument(2, "other")
    if _is_mask(operation, first):
        return _chosen(builder, operation, first, {"yes": second, "no": other})
    return _chosen(builder, operation, second, {"yes": first, "no": other})


@lowers_function(torch.masked_fill, "masked_fill", "masked_fill_")
def masked_fill(builder: Builder, operation: Operation) -> Lowered:
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
    # Operands in the order mask, yes, no.
    if not isinstance(mask, Operand):
        raise GraphError(
            f"{operation.name}: the mask is not the output of a layer: compare "
            "something, or register it as a buffer of its module"
        )
    if operation.is_integer:
        raise GraphError(
            f"{operation.name} chooses integers, which has no split rule: choose "
            "floating point ones"
        )
    options = {
        word: _choice_number(operation, value, word)
        for word, value in values.items()
        if not isinstance(value, Operand)
    }
    operands = (mask, *(v for v in values.values() if isinstance(v, Operand)))
    names = lined_up(builder, operation, operands)
    return builder.add(operation.name, "where", names, operation.output, options=options)


def _choice_number(operation: Operation, value: object, word: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if not isinstance(value, int | float):
        raise GraphError(
            f"{operation.name}: {word} is neither a number nor the output of a layer: "
            "register tensors as parameters or buffers of their module"
        )
    return float(value)


def _is_mask(operation: Operation, value: object) -> bool:
    # The condition: integers, and first among torch's arguments.
    is_method = isinstance(value, Operand) and not value.is_integer
    return not is_method or "condition" in operation.keywords


def _check_choice_masks(operation: Operation) -> None:
    # On masks `&`, `|`, `~` are logical; on integers they would be bitwise.
    result = operation.result
    if not isinstance(result, torch.Tensor) or result.dtype != torch.bool:
        raise GraphError(
            f"{operation.name} is bitwise on integers, which has no split rule: compare them first"
        )


_UNARY: Final[Mapping[str, tuple[object, ...]]] = {
    "relu": (nn.ReLU, torch.relu, torch.relu_, functional.relu, "relu", "relu_"),
    "relu6": (nn.ReLU6, functional.relu6),
    "sigmoid": (
        nn.Sigmoid,
        torch.sigmoid,
        torch.sigmoid_,
        functional.sigmoid,
        "sigmoid",
        "sigmoid_",
    ),
    "tanh": (nn.Tanh, torch.tanh, torch.tanh_, functional.tanh, "tanh", "tanh_"),
    "silu": (nn.SiLU, functional.silu),
    "mish": (nn.Mish, functional.mish),
    "hardswish": (nn.Hardswish, functional.hardswish),
    "hardsigmoid": (nn.Hardsigmoid, functional.hardsigmoid),
    "exp": (torch.exp, "exp", "exp_"),
    "log": (torch.log, "log", "log_"),
    "sqrt": (torch.sqrt, "sqrt", "sqrt_"),
    "rsqrt": (torch.rsqrt, "rsqrt", "rsqrt_"),
    "abs": (torch.abs, "abs", "abs_", operator.abs),
    "neg": (torch.neg, "neg", "neg_", operator.neg),
    "square": (torch.square, "square", "square_"),
    "detach": (torch.detach, "detach"),
}

_SEVERAL: Final[Mapping[str, tuple[object, ...]]] = {
    "add": (operator.add, operator.iadd, torch.add, "add", "add_"),
    "subtract": (operator.sub, operator.isub, torch.sub, "sub", "sub_"),
    "multiply": (operator.mul, operator.imul, torch.mul, "mul", "mul_"),
    "divide": (operator.truediv, operator.itruediv, torch.div, "div", "div_"),
}


def pointwise(
    builder: Builder, operation: Operation, function: str, argument: float | None = None
) -> str:
    options: dict[str, str | float] = {"function": function}
    if argument is not None:
        options["argument"] = argument
    return builder.add(
        operation.name, "pointwise", lined_up(builder, operation), operation.output, options=options
    )


def _unary(function: str) -> FunctionLowering:
    def lower(builder: Builder, operation: Operation) -> Lowered:
        operation.only("input", "inplace")
        return pointwise(builder, operation, function)

    return lower


def _unary_module(function: str) -> Callable[[Builder, nn.Module, Operation], Lowered]:
    def lower(builder: Builder, module: nn.Module, operation: Operation) -> Lowered:
        del module
        return pointwise(builder, operation, function)

    return lower


def _several(function: str) -> FunctionLowering:
    def lower(builder: Builder, operation: Operation) -> Lowered:
        operation.only("input", "other")
        left = operation.argument(0, "input")
        right = operation.argument(1, "other")
        if isinstance(left, Operand) and isinstance(right, Operand):
            _check_masks(operation, function)
            return pointwise(builder, operation, function)
        number = _number(right if isinstance(left, Operand) else left, operation)
        word, value = _with_number(function, number, isinstance(left, Operand))
        return pointwise(builder, operation, word, value)

    return lower


def _check_masks(operation: Operation, function: str) -> None:
    result = operation.result
    is_mask = isinstance(result, torch.Tensor) and result.dtype == torch.bool
    if is_mask and function != "multiply":
        raise GraphError(f"{operation.name} of two masks has no split rule: write `|` or `&`")


def _number(value: object, operation: Operation) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if not isinstance(value, int | float):
        operation.operand(1, "other")  # says what is wrong with it
        raise GraphError(f"{operation.name} with {value!r}")
    return float(value)


def _with_number(function: str, number: float, on_right: bool) -> tuple[str, float]:  # noqa: FBT001 -- x - c or c - x
    match function, on_right:
        case "add", _:
            return "add_number", number
        case "multiply", _:
            return "multiply_number", number
        case "subtract", True:
            return "add_number", -number
        case "subtract", False:
            return "subtract_from_number", number
        case "divide", True:
            return "multiply_number", 1.0 / number
        case _:
            return "divide_number", number


for _function, _targets in _UNARY.items():
    for _target in _targets:
        if isinstance(_target, type):
            lowers(_target)(_unary_module(_function))
        else:
            lowers_function(_target)(_unary(_function))

for _function, _targets in _SEVERAL.items():
    lowers_function(*_targets)(_several(_function))


@lowers(nn.GELU)
def gelu(builder: Builder, module: nn.GELU, operation: Operation) -> Lowered:
    word = "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return pointwise(builder, operation, word)


@lowers_function(functional.gelu)
def gelu_function(builder: Builder, operation: Operation) -> Lowered:
    operation.only("input", "approximate")
    approximate = operation.argument(1, "approximate", "none")
    return pointwise(builder, operation, "gelu_tanh" if approximate == "tanh" else "gelu")


@lowers_function(functional.leaky_relu, functional.leaky_relu_)
def leaky_relu_function(builder: Builder, operation: Operation) -> Lowered:
    slope = operation.argument(1, "negative_slope", 0.01)
    return pointwise(builder, operation, "leaky_relu", _number(slope, operation))


@lowers_function(functional.elu, functional.elu_)
def elu_function(builder: Builder, operation: Operation) -> Lowered:
    alpha = operation.argument(1, "alpha", 1.0)
    return pointwise(builder, operation, "elu", _number(alpha, operation))


@lowers_function(functional.softplus)
def softplus_function(builder: Builder, operation: Operation) -> Lowered:
    operation.only("input")
    if len(operation.arguments) > 1:
        raise GraphError(f"{operation.name}: only the usual constants can be split")
    return pointwise(builder, operation, "softplus")


@lowers(nn.LeakyReLU)
def leaky_relu(builder: Builder, module: nn.LeakyReLU, operation: Operation) -> Lowered:
    return pointwise(builder, operation, "leaky_relu", module.negative_slope)


@lowers(nn.ELU)
def elu(builder: Builder, module: nn.ELU, operation: Operation) -> Lowered:
    return pointwise(builder, operation, "elu", module.alpha)


@lowers(nn.Softplus)
def softplus(builder: Builder, module: nn.Softplus, operation: Operation) -> Lowered:
    if (module.beta, module.threshold) != (1, 20):
        raise GraphError(
            f"{operation.name}: Softplus with beta {module.beta} and threshold "
            f"{module.threshold}; only the usual 1 and 20 can be split"
        )
    return pointwise(builder, operation, "softplus")


@lowers_function(operator.pow, operator.ipow, torch.pow, "pow", "pow_")
def power(builder: Builder, operation: Operation) -> Lowered:
    operation.operand(0, "input")
    exponent = operation.argument(1, "exponent")
    if isinstance(exponent, Operand):
        raise GraphError(
            f"{operation.name}: the exponent is the output of {exponent.name!r}; "
            "only numbers can be split: put it into a module of its own"
        )
    return pointwise(builder, operation, "power", _number(exponent, operation))


@lowers(nn.Identity)
def identity(builder: Builder, module: nn.Identity, operation: Operation) -> Lowered:
    # Has no effect on values.
    del builder, module
    return operation.operands[0].name


@lowers_function("contiguous", "clone", torch.clone)
def same(builder: Builder, operation: Operation) -> Lowered:
    # Concerns memory layout only.
    del builder
    return operation.operands[0].name


@lowers_function("to", "type_as", "float", "double", "half", "bfloat16", "type")
def converted(builder: Builder, operation: Operation) -> Lowered:
    # No layer where the dtype stays the same.
    operand = operation.operand(0, "self")
    # What a mask is made of is floating point already.
    if builder[operand.name].is_integer != operation.is_integer:
        raise GraphError(
            f"{operation.name} between whole and floating point numbers has no split "
            "rule: give the model an input of the type it needs"
        )
    return operand.name
