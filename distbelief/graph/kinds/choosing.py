"""Numbers compared, and chosen by that: masks, `where`, `masked_fill`.

    kind      "comparison": 1 where it is true, 0 elsewhere
    options   function: one of `COMPARISONS`, of the inputs; argument: a number in the
              place of the second

    kind      "where": the second input where the first is not 0, the third elsewhere
    options   yes, no: a number in the place of one of them

What is true is a number, of the type of what is compared: so it can be sent, and
multiplied, like others. It has no gradient; what is chosen has.

Inputs broadcast to the output's shape; a region needs the same region of each.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, final

import torch
from typing_extensions import override

from distbelief.graph.kind import LayerKind, Step, Work
from distbelief.graph.kinds.pointwise import broadcast, lined_up
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region


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
class Compare(LayerKind):
    """output = function(inputs), 1 or 0, place by place."""

    name: ClassVar[str] = "comparison"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return tuple(broadcast(output, shape) for shape in layer.input_shapes)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements)
        n_elements = n * (1 + len(layer.inputs))
        return Work(forward=n, backward=0.0, n_elements=n_elements)

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        one, *others = (lined_up(value, len(layer.shape)) for value in inputs)
        other = others[0] if others else layer.number("argument")
        found = COMPARISONS[layer.text("function")](one.detach(), other)
        types = (value.dtype for value in inputs if value.is_floating_point())
        return found.to(next(types, torch.get_default_dtype()))


@final
class Where(LayerKind):
    """output = one of two, as a mask says, place by place."""

    name: ClassVar[str] = "where"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return tuple(broadcast(output, shape) for shape in layer.input_shapes)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n, n_inputs = float(output.n_elements), len(layer.inputs)
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
        mask, *given = (lined_up(value, len(layer.shape)) for value in inputs)
        values = iter(given)
        yes, no = (
            layer.number(word) if word in layer.options else next(values) for word in ("yes", "no")
        )
        return torch.where(mask != 0, yes, no)
