"""Translations of functions of one place at a time, as modules, functions, methods."""

import operator
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.building import Builder
from distbelief.graph.layer import GraphError
from distbelief.graph.operation import Operand, Operation, Translated
from distbelief.graph.translation import FunctionTranslation, translates, translates_function
from distbelief.graph.translations.broadcasting import lined_up


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
    """Add a pointwise layer over all operands."""
    options: dict[str, str | float] = {"function": function}
    if argument is not None:
        options["argument"] = argument
    return builder.add(
        operation.name, "pointwise", lined_up(builder, operation), operation.output, options=options
    )


def _unary(function: str) -> FunctionTranslation:
    def translate(builder: Builder, operation: Operation) -> Translated:
        operation.only("input", "inplace")
        return pointwise(builder, operation, function)

    return translate


def _unary_module(function: str) -> Callable[[Builder, nn.Module, Operation], Translated]:
    def translate(builder: Builder, module: nn.Module, operation: Operation) -> Translated:
        del module
        return pointwise(builder, operation, function)

    return translate


def _several(function: str) -> FunctionTranslation:
    def translate(builder: Builder, operation: Operation) -> Translated:
        operation.only("input", "other")
        left = operation.argument(0, "input")
        right = operation.argument(1, "other")
        if isinstance(left, Operand) and isinstance(right, Operand):
            _check_masks(operation, function)
            return pointwise(builder, operation, function)
        number = _number(right if isinstance(left, Operand) else left, operation)
        word, value = _with_number(function, number, isinstance(left, Operand))
        return pointwise(builder, operation, word, value)

    return translate


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
            translates(_target)(_unary_module(_function))
        else:
            translates_function(_target)(_unary(_function))

for _function, _targets in _SEVERAL.items():
    translates_function(*_targets)(_several(_function))


@translates(nn.GELU)
def gelu(builder: Builder, module: nn.GELU, operation: Operation) -> Translated:
    """Add a GELU, exact or by tanh."""
    word = "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return pointwise(builder, operation, word)


@translates_function(functional.gelu)
def gelu_function(builder: Builder, operation: Operation) -> Translated:
    """Add a GELU, exact or by tanh."""
    operation.only("input", "approximate")
    approximate = operation.argument(1, "approximate", "none")
    return pointwise(builder, operation, "gelu_tanh" if approximate == "tanh" else "gelu")


@translates_function(functional.leaky_relu, functional.leaky_relu_)
def leaky_relu_function(builder: Builder, operation: Operation) -> Translated:
    """Add a leaky ReLU."""
    slope = operation.argument(1, "negative_slope", 0.01)
    return pointwise(builder, operation, "leaky_relu", _number(slope, operation))


@translates_function(functional.elu, functional.elu_)
def elu_function(builder: Builder, operation: Operation) -> Translated:
    """Add an ELU."""
    alpha = operation.argument(1, "alpha", 1.0)
    return pointwise(builder, operation, "elu", _number(alpha, operation))


@translates_function(functional.softplus)
def softplus_function(builder: Builder, operation: Operation) -> Translated:
    """Add a softplus with torch's usual constants."""
    operation.only("input")
    if len(operation.arguments) > 1:
        raise GraphError(f"{operation.name}: only the usual constants can be split")
    return pointwise(builder, operation, "softplus")


@translates(nn.LeakyReLU)
def leaky_relu(builder: Builder, module: nn.LeakyReLU, operation: Operation) -> Translated:
    """Add a leaky ReLU."""
    return pointwise(builder, operation, "leaky_relu", module.negative_slope)


@translates(nn.ELU)
def elu(builder: Builder, module: nn.ELU, operation: Operation) -> Translated:
    """Add an ELU."""
    return pointwise(builder, operation, "elu", module.alpha)


@translates(nn.Softplus)
def softplus(builder: Builder, module: nn.Softplus, operation: Operation) -> Translated:
    """Add a softplus with torch's usual constants."""
    if (module.beta, module.threshold) != (1, 20):
        raise GraphError(
            f"{operation.name}: Softplus with beta {module.beta} and threshold "
            f"{module.threshold}; only the usual 1 and 20 can be split"
        )
    return pointwise(builder, operation, "softplus")


@translates_function(operator.pow, operator.ipow, torch.pow, "pow", "pow_")
def power(builder: Builder, operation: Operation) -> Translated:
    """Add a power with a number as exponent."""
    operation.operand(0, "input")
    exponent = operation.argument(1, "exponent")
    if isinstance(exponent, Operand):
        raise GraphError(
            f"{operation.name}: the exponent is the output of {exponent.name!r}; "
            "only numbers can be split: put it into a module of its own"
        )
    return pointwise(builder, operation, "power", _number(exponent, operation))


@translates(nn.Identity)
def identity(builder: Builder, module: nn.Identity, operation: Operation) -> Translated:
    """Add nothing."""
    del builder, module
    return operation.operands[0].name


@translates_function("contiguous", "clone", torch.clone)
def same(builder: Builder, operation: Operation) -> Translated:
    """Add nothing: it is about memory."""
    del builder
    return operation.operands[0].name


@translates_function("to", "type_as", "float", "double", "half", "bfloat16", "type")
def converted(builder: Builder, operation: Operation) -> Translated:
    """Add nothing where the type stays as it is."""
    operand = operation.operand(0, "self")
    # What a mask is made of is floating point already.
    if builder[operand.name].is_integer != operation.is_integer:
        raise GraphError(
            f"{operation.name} between whole and floating point numbers has no split "
            "rule: give the model an input of the type it needs"
        )
    return operand.name
