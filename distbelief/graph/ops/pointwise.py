"""Elementwise operators: functions, sums, comparisons and selection by a mask.

Inputs broadcast to the output's shape as in torch, aligned at the last dimension; statistics have
a batch of one and broadcast over samples too. A region needs the same region of each input.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import ClassVar, Final, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Call, Operator, Work
from distbelief.graph.region import Region


Unary = Callable[[torch.Tensor], torch.Tensor]
Parametric = Callable[[torch.Tensor, float], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

UNARY: Final[Mapping[str, Unary]] = {
    "relu": torch.relu,
    "relu6": functional.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "mish": functional.mish,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "selu": functional.selu,
    "softsign": functional.softsign,
    "logsigmoid": functional.logsigmoid,
    "tanhshrink": functional.tanhshrink,
    "detach": torch.detach,
}

PARAMETRIC: Final[Mapping[str, Parametric]] = {
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "celu": functional.celu,
    "hardshrink": functional.hardshrink,
    "softshrink": functional.softshrink,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "add_number": lambda x, c: x + c,
    "multiply_number": lambda x, c: x * c,
    "subtract_from_number": lambda x, c: c - x,
    "divide_number": lambda x, c: c / x,
    "power": lambda x, c: x**c,
}

SEVERAL: Final[Mapping[str, Binary]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


@final
class Pointwise(Operator):
    """output = function(inputs), elementwise."""

    # options   function: one of UNARY, PARAMETRIC, SEVERAL; argument: its parameter, if any
    name: ClassVar[str] = "pointwise"

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        function = layer.text("function")
        if function in UNARY:
            return UNARY[function](call.inputs[0])
        if function in PARAMETRIC:
            return PARAMETRIC[function](call.inputs[0], layer.number("argument"))
        if function not in SEVERAL:
            raise ValueError(f"{layer.name!r} has an unknown function {function!r}")
        operands = [aligned(value, len(layer.shape)) for value in call.inputs]
        return reduce(SEVERAL[function], operands)


def aligned(value: torch.Tensor, n_dims: int) -> torch.Tensor:
    """Return (batch, *shape) with dimensions of extent 1 inserted after the batch.

    Without them torch would align the batch with a dimension of a longer shape.
    """
    missing = n_dims + 1 - value.dim()
    return value.view(value.shape[0], *(1,) * missing, *value.shape[1:])


Number = torch.Tensor | float
Comparison = Callable[[torch.Tensor, Number], torch.Tensor]

COMPARISONS: Final[Mapping[str, Comparison]] = {
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "less": operator.lt,
    "less_equal": operator.le,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "and": lambda x, y: torch.logical_and(x, torch.as_tensor(y)),
    "or": lambda x, y: torch.logical_or(x, torch.as_tensor(y)),
}


@final
class Compare(Operator):
    """output = comparison of the inputs, 1 or 0, elementwise."""

    # options   function: one of COMPARISONS; argument: a number in place of the second input
    # The result is a float, so that it can be sent and multiplied; it has no gradient.
    name: ClassVar[str] = "comparison"

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        return replace(super().work(layer, output), backward=0.0)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        one, *others = (aligned(value, len(layer.shape)) for value in call.inputs)
        other = others[0] if others else layer.number("argument")
        found = COMPARISONS[layer.text("function")](one.detach(), other)
        types = (value.dtype for value in call.inputs if value.is_floating_point())
        return found.to(next(types, torch.get_default_dtype()))


@final
class Where(Operator):
    """output = the second input where the first is not 0, else the third."""

    # options   yes, no: a number in place of the second or third input
    name: ClassVar[str] = "where"

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        mask, *given = (aligned(value, len(layer.shape)) for value in call.inputs)
        values = iter(given)
        yes, no = (
            layer.number(key) if key in layer.options else next(values) for key in ("yes", "no")
        )
        return torch.where(mask != 0, yes, no)
