"""Reductions over dimensions (sum, mean, variance, maximum), and softmax.

All can be split over the dimensions that they reduce, as partial sums. A reduction over the batch
gives one sample, (1, *shape), that broadcasts: the batch is never split over ranks. A maximum
with a gradient is not split over the dimensions that it reduces: it would be unclear which of
several equal values gets the gradient.
"""

import math
from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, final

import torch
from typing_extensions import override

from distbelief.graph.graph import Layer, Option
from distbelief.graph.operator import Call, Combine, Cut, Operator, PartialSums, Work
from distbelief.graph.region import Region, Shape


class SumOfParts(Operator, ABC):
    """Base of operators that compute an output as one partial sum over all of the input.

    The computation stands once, in `partial`; a subclass adds the region it reduces, and the cost
    per element of it.
    """

    def reduced_region(self, layer: Layer, output: Region) -> Region:
        """Return the region of the first input that `output` reduces; by default all of it."""
        del output
        return Region.of(*layer.input_shapes[0])

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        assert self.partial is not None
        return self.partial.reads(layer, self.reduced_region(layer, output))

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        assert self.per_element is not None
        return self.per_element.times(self.reduced_region(layer, output).n_elements)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        assert self.partial is not None
        part = self.reduced_region(call.layer, call.region)
        return self.partial.compute(replace(call, region=part))


class _OverDims(SumOfParts, ABC):
    @override
    def reduced_region(self, layer: Layer, output: Region) -> Region:
        dims = layer.integers("dims")
        left = iter(output)
        intervals = []
        for dim, extent in enumerate(layer.input_shapes[0]):
            kept = next(left) if layer.options["keep"] or dim not in dims else None
            intervals.append((0, extent) if kept is None or dim in dims else kept)
        return Region(tuple(intervals))

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(len(layer.inputs))
        elements = self.reduced_region(layer, output).n_elements
        return Work(forward=n, backward=n, n_elements=1.0).times(elements)


class _PartsOverDims(PartialSums, ABC):
    @override
    def writes(self, layer: Layer, part: Region) -> Region:
        dims = layer.integers("dims")
        keep = bool(layer.options["keep"])
        return Region(
            tuple(
                (0, 1) if dim in dims else interval
                for dim, interval in enumerate(part)
                if keep or dim not in dims
            )
        )


@final
class ReducedParts(_PartsOverDims):
    """Any box of x contributes a summand to the region that it reduces to."""

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        x = call.inputs[0]
        match layer.text("function"):
            case "sum" | "mean":
                summands = x
            case "mean_square":
                summands = x.square()
            case "variance":
                summands = (x - call.inputs[1]).square()
            case "sum_exp":
                summands = (x - call.inputs[1]).exp()
            case function:
                raise ValueError(f"{layer.name!r} has an unknown function {function!r}")
        batch = (0,) if layer.options["batch"] else ()
        dims = (*batch, *_dims(layer))
        total = summands.sum(dims, keepdim=True) if dims else summands
        return _without_dims(layer, total) / _divisor(layer, x.shape[0])


@final
class Reduction(_OverDims):
    """Sums and means over some dimensions."""

    # inputs    x, and for some functions a statistic that broadcasts against x
    # options   function:
    #             "sum"  "mean"  "mean_square"         of x
    #             "variance"   mean of (x - mean)^2    inputs x, mean
    #             "sum_exp"    sum of exp(x - maximum) inputs x, maximum
    #           dims: dimensions of x, without the batch, from 0
    #           keep: whether they stay, with extent 1
    #           batch: whether samples are summed over too
    #           correction: subtracted from the count of a mean (1 in an unbiased "variance")
    name: ClassVar[str] = "reduction"
    partial: ClassVar[PartialSums | None] = ReducedParts()

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return bool(layer.options["batch"])


@final
class MaximumParts(_PartsOverDims):
    """The largest value of each part; a maximum with a gradient is not split over `dims`."""

    combine: ClassVar[Combine] = "max"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        over = layer.integers("dims") if layer.options["gradient"] else ()
        return tuple(cut for cut in super().cuts(layer) if cut.dim not in over)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        x = call.inputs[0] if layer.options["gradient"] else call.inputs[0].detach()
        dims = _dims(layer)
        return _without_dims(layer, x.amax(dims, keepdim=True) if dims else x)


@final
class Maximum(_OverDims):
    """The largest element over some dimensions; equal values share its gradient."""

    # options   dims, keep; gradient: whether it has one (softmax needs none)
    name: ClassVar[str] = "maximum"
    partial: ClassVar[PartialSums | None] = MaximumParts()


def reduction_layer(
    name: str,
    sources: Sequence[Layer],
    *,
    function: str,
    dims: Sequence[int],
    keep: bool = True,
    batch: bool = False,
    correction: int = 0,
    gradient: bool = False,
) -> Layer:
    """Return a layer "reduction" or "maximum"; options as there."""
    shape = sources[0].shape
    options: dict[str, Option] = {"dims": tuple(dims), "keep": keep}
    if function == "maximum":
        options |= {"gradient": gradient}
    else:
        options |= {"function": function, "batch": batch, "correction": correction}
    return Layer.of(
        name,
        "maximum" if function == "maximum" else "reduction",
        sources,
        tuple(
            1 if dim in dims else shape[dim] for dim in range(len(shape)) if keep or dim not in dims
        ),
        options=options,
    )


def _dims(layer: Layer) -> Shape:
    # Counted with the batch.
    return tuple(dim + 1 for dim in layer.integers("dims"))


def _without_dims(layer: Layer, total: torch.Tensor) -> torch.Tensor:
    return total if layer.options["keep"] else total.squeeze(_dims(layer))


def _divisor(layer: Layer, n_samples: int) -> float:
    if layer.text("function") in {"sum", "sum_exp"}:
        return 1.0
    shape = layer.input_shapes[0]
    count = math.prod(shape[dim] for dim in layer.integers("dims"))
    if layer.options["batch"]:
        count *= n_samples
    return float(max(1, count - layer.integer("correction")))


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
