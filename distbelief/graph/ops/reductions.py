"""Reductions over dimensions (sum, mean, variance, maximum), and softmax.

All can be split over the dimensions that they reduce, as partial sums. A reduction over the batch
gives one sample, (1, *shape), that broadcasts: the batch is never split over ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, final

import torch
from typing_extensions import override

from distbelief.graph.graph import Layer, Option
from distbelief.graph.operator import Call, Combine, Operator, Sums, Work
from distbelief.graph.region import Region


@final
class Reduction(Sums):
    """Sums, means and maxima over some dimensions; any box of x contributes to its part."""

    # inputs    x, and for some functions a statistic that broadcasts against x
    # options   function:
    #             "sum"  "mean"  "mean_square"  "maximum"    of x
    #             "variance"   mean of (x - mean)^2    inputs x, mean; also "unbiased_variance"
    #             "sum_exp"    sum of exp(x - maximum) inputs x, maximum
    #           dims: dimensions of x, without the batch, from 0
    #           keep: whether they stay, with extent 1
    #           batch: whether samples are summed over too
    #           gradient: whether it has one; a maximum, which softmax needs, has none
    name: ClassVar[str] = "reduction"

    @override
    def combine(self, layer: Layer) -> Combine:
        return "max" if layer.options["function"] == "maximum" else "sum"

    @override
    def writes(self, layer: Layer, part: Region) -> Region:
        dims, keep = layer.integers("dims"), layer.options["keep"]
        return Region(
            tuple(
                (0, 1) if dim in dims else interval
                for dim, interval in enumerate(part)
                if keep or dim not in dims
            )
        )

    @override
    def reduced(self, layer: Layer, output: Region) -> Region:
        dims = layer.integers("dims")
        left = iter(output)
        intervals = []
        for dim, extent in enumerate(layer.input_shapes[0]):
            kept = next(left) if layer.options["keep"] or dim not in dims else None
            intervals.append((0, extent) if kept is None or dim in dims else kept)
        return Region(tuple(intervals))

    @override
    def work(self, layer: Layer, part: Region) -> Work:
        n = float(len(layer.inputs))
        return Work(forward=n, backward=n, n_elements=1.0).times(part.n_elements)

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return bool(layer.options["batch"])

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer, x = call.layer, call.inputs[0]
        function = layer.text("function")
        own = tuple(dim + 1 for dim in layer.integers("dims"))
        dims = (0, *own) if layer.options["batch"] else own
        if function == "maximum":
            total = x.detach().amax(dims, keepdim=True) if dims else x.detach()
        else:
            summands = _SUMMANDS[function](call.inputs)
            total = summands.sum(dims, keepdim=True) if dims else summands
        if function not in {"sum", "sum_exp", "maximum"}:
            count = math.prod((x.shape[0], *layer.input_shapes[0])[dim] for dim in dims)
            total = total / float(max(1, count - function.startswith("unbiased")))
        return total if layer.options["keep"] else total.squeeze(own)


_SUMMANDS: Final[Mapping[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]]] = {
    **dict.fromkeys(("sum", "mean"), lambda inputs: inputs[0]),
    "mean_square": lambda inputs: inputs[0].square(),
    **dict.fromkeys(
        ("variance", "unbiased_variance"), lambda inputs: (inputs[0] - inputs[1]).square()
    ),
    "sum_exp": lambda inputs: (inputs[0] - inputs[1]).exp(),
}


def reduction_layer(
    name: str,
    sources: Sequence[Layer],
    *,
    function: str,
    dims: Sequence[int],
    keep: bool = True,
    batch: bool = False,
) -> Layer:
    """Return a layer "reduction"; options as there."""
    shape = sources[0].shape
    options: dict[str, Option] = {"function": function, "gradient": function != "maximum"}
    options |= {"dims": tuple(dims), "keep": keep, "batch": batch}
    return Layer.of(
        name,
        Reduction.name,
        sources,
        tuple(
            1 if dim in dims else shape[dim] for dim in range(len(shape)) if keep or dim not in dims
        ),
        options=options,
    )


@final
class Softmax(Operator):
    """exp(x - maximum) / sum of the same, or its logarithm."""

    # inputs    x, maximum, sum of exp(x - maximum); the last two broadcast against x
    # options   log: whether to return the logarithm
    name: ClassVar[str] = "softmax"
    per_element: ClassVar[Work | None] = Work(forward=3.0, backward=3.0, n_elements=2.0)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        x, maximum, total = call.inputs
        if call.layer.options["log"]:
            return x - maximum - total.log()
        return (x - maximum).exp() / total


def softmax_layers(name: str, source: Layer, *, dim: int, log: bool = False) -> list[Layer]:
    """Return the layers of a softmax over dimension `dim`, the batch not counted."""
    maximum = reduction_layer(f"{name}.maximum", [source], function="maximum", dims=[dim])
    total = reduction_layer(f"{name}.sum_exp", [source, maximum], function="sum_exp", dims=[dim])
    sources = (source, maximum, total)
    softmax = Layer.of(name, Softmax.name, sources, source.shape, options={"log": log})
    return [maximum, total, softmax]
