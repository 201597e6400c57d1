"""Translations of functions of one place at a time, as modules, functions, methods."""

import operator
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from distbelief.graph.building import Builder
from distbelief.graph.layer import GraphError
from distbelief.graph.translation import (
    FunctionTranslation,
    Operand,
    Operation,
    Translated,
    translates,
    translates_function,
)


_UNARY: Final[Mapping[str, tuple[object, ...]]] = {
    "relu": (nn.ReLU, torch.relu, torch.relu_, functional.relu, "relu", "relu_"),
    "relu6": (nn.ReLU6, functional.relu6),
    "sigmoid": (nn.Sigmoid, torch.sigmoid, functional.sigmoid, "sigmoid"),
    "tanh": (nn.Tanh, torch.tanh, functional.tanh, "tanh"),
    "silu": (nn.SiLU, functional.silu),
    "mish": (nn.Mish, functional.mish),
    "hardswish": (nn.Hardswish, functional.hardswish),
    "hardsigmoid": (nn.Hardsigmoid, functional.hardsigmoid),
    "exp": (torch.exp, "exp"),
    "log": (torch.log, "log"),
    "sqrt": (torch.sqrt, "sqrt"),
    "rsqrt": (torch.rsqrt, "rsqrt"),
    "abs": (torch.abs, "abs", operator.abs),
    "neg": (torch.neg, "neg", operator.neg),
    "square": (torch.square, "square"),
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
        operation.name,
        "pointwise",
        operation.inputs,
        operation.output,
        options=options,
    )


def _unary(function: str) -> FunctionTranslation:
    def translate(builder: Builder, operation: Operation) -> Translated:
        return pointwise(builder, operation, function)

    return translate


def _unary_module(
    function: str,
) -> Callable[[Builder, nn.Module, Operation], Translated]:
    def translate(
        builder: Builder, module: nn.Module, operation: Operation
    ) -> Translated:
        del module
        return pointwise(builder, operation, function)

    return translate


def _several(function: str) -> FunctionTranslation:
    def translate(builder: Builder, operation: Operation) -> Translated:
        left, right = operation.arguments[:2]
        if isinstance(left, Operand) and isinstance(right, Operand):
            if left.shape != right.shape:
                raise GraphError(
                    f"{operation.name}: {function} of shapes {list(left.shape)} and "
                    f"{list(right.shape)}; only equal shapes can be split: expand one, "
                    "or put it into a module of its own"
                )
            return pointwise(builder, operation, function)
        number = right if isinstance(left, Operand) else left
        if not isinstance(number, int | float):
            raise GraphError(f"{operation.name}: {function} with {number!r}")
        word, value = _with_number(function, float(number), isinstance(left, Operand))
        return pointwise(builder, operation, word, value)

    return translate


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
    approximate = operation.keywords.get("approximate", "none")
    return pointwise(
        builder, operation, "gelu_tanh" if approximate == "tanh" else "gelu"
    )


@translates(nn.LeakyReLU)
def leaky_relu(
    builder: Builder, module: nn.LeakyReLU, operation: Operation
) -> Translated:
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


@translates_function(operator.pow, torch.pow, "pow")
def power(builder: Builder, operation: Operation) -> Translated:
    """Add a power with a number as exponent."""
    exponent = operation.argument(1, "exponent")
    if not isinstance(exponent, int | float):
        raise GraphError(f"{operation.name}: a power with exponent {exponent!r}")
    return pointwise(builder, operation, "power", float(exponent))


@translates(nn.Identity)
def identity(builder: Builder, module: nn.Identity, operation: Operation) -> Translated:
    """Add nothing."""
    del builder, module
    return operation.operands[0].name


@translates_function("contiguous", "clone")
def same(builder: Builder, operation: Operation) -> Translated:
    """Add nothing: it is about memory."""
    del builder
    return operation.operands[0].name
