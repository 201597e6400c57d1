"""Functions of one number at a time, or of numbers at one place: relu, sums.

    options   function: one of `FUNCTIONS`; argument: its parameter, if it has one

Every input has the output's shape. A region needs the same region of each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


Unary = Callable[[torch.Tensor], torch.Tensor]
Parametric = Callable[[torch.Tensor, float], torch.Tensor]

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
}

PARAMETRIC: Final[Mapping[str, Parametric]] = {
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "add_number": lambda x, c: x + c,
    "multiply_number": lambda x, c: x * c,
    "subtract_from_number": lambda x, c: c - x,
    "divide_number": lambda x, c: c / x,
    "power": lambda x, c: x**c,
}

SEVERAL: Final = frozenset({"add", "subtract", "multiply", "divide"})


@final
class Pointwise(LayerKind):
    """output = function(inputs), place by place."""

    name: ClassVar[str] = "pointwise"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (output,) * len(layer.inputs)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements)
        n_inputs = len(layer.inputs)
        return Work(forward=n, backward=n * n_inputs, n_elements=n * (1 + n_inputs))

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        function = layer.text("function")
        if function in UNARY:
            return UNARY[function](inputs[0])
        if function in PARAMETRIC:
            return PARAMETRIC[function](inputs[0], layer.number("argument"))
        result = inputs[0]
        for other in inputs[1:]:
            match function:
                case "add":
                    result = result + other
                case "subtract":
                    result = result - other
                case "multiply":
                    result = result * other
                case "divide":
                    result = result / other
                case _:
                    raise ValueError(f"{layer.name!r} has no function {function!r}")
        return result
