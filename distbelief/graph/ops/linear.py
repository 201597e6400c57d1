"""Linear layers, products of two computed matrices, and embeddings."""

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Call, Operator, PartialSums, Work
from distbelief.graph.region import Interval, Region


@final
class Embedding(Operator):
    """output[p] = weight[words[p]], split by positions and by columns of the table."""

    # input     words, integers: (*positions); () for one per sample
    # tensors   weight (words, size)
    # options   padding: the word whose row gets no gradient, or None
    # output    shape (*positions, size)
    name: ClassVar[str] = "embedding"
    per_element: ClassVar[Work | None] = Work(backward=1.0, n_elements=2.0)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (Region(output.intervals[:-1]),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        n_words, _ = layer.tensors["weight"].shape
        return {"weight": Region(((0, n_words), output.intervals[-1]))}

    @override
    def compute(self, call: Call) -> torch.Tensor:
        padding = call.layer.options["padding"]
        assert padding is None or isinstance(padding, int), (call.layer.name, padding)
        return functional.embedding(call.inputs[0], call.tensors["weight"], padding)


@final
class LinearSums(PartialSums):
    """Partial sums: each part of the inputs, with its columns of W, contributes to every output."""

    @override
    def uses(self, layer: Layer, part: Region) -> Mapping[str, Region]:
        inputs = part.intervals[-1]
        uses = _uses(layer, (0, layer.shape[-1]))
        uses["weight"] = uses["weight"].replaced(1 - _outputs(layer, "weight"), inputs)
        if inputs[0] > 0:
            uses.pop("bias", None)  # only the first part adds it
        return uses

    @override
    def writes(self, layer: Layer, part: Region) -> Region:
        return part.replaced(-1, (0, layer.shape[-1]))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return _product(call.layer, call.inputs[0], call.tensors)


@final
class Linear(Operator):
    """y = x W^T + b, split by outputs, or by inputs as partial sums."""

    # input     (..., inputs): leading dimensions, for example of a sequence, are kept
    # tensors   weight (outputs, inputs); bias (outputs,), optional
    # options   first_row, first_row_of_bias: where its outputs begin in the tensors; 0 if absent
    #           (attention keeps queries, keys and values in one tensor)
    #           transposed: whether the weight is (inputs, outputs), as in x @ w
    name: ClassVar[str] = "linear"
    partial: PartialSums | None = LinearSums()

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (output.replaced(-1, (0, layer.input_shapes[0][-1])),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        return _uses(layer, output.intervals[-1])

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_inputs = layer.input_shapes[0][-1]
        return self.product_work(layer, output, 2.0 * output.n_elements * n_inputs)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return _product(call.layer, call.inputs[0], call.tensors)


def _product(layer: Layer, x: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weight = tensors["weight"]
    if _outputs(layer, "weight"):
        weight = weight.t()
    return functional.linear(x, weight, tensors.get("bias"))


def _outputs(layer: Layer, key: str) -> int:
    # Index of the output dimension of a tensor.
    return int(key == "weight" and bool(layer.options.get("transposed", False)))


def _uses(layer: Layer, units: Interval) -> dict[str, Region]:
    uses = {}
    for key, option in (("weight", "first_row"), ("bias", "first_row_of_bias")):
        if key in layer.tensors:
            first = layer.integer(option) if option in layer.options else 0
            rows = (first + units[0], first + units[1])
            whole = Region.of(*layer.tensors[key].shape)
            uses[key] = whole.replaced(_outputs(layer, key), rows)
    return uses


@final
class Product(Operator):
    """output = one @ other, over the last two dimensions; both are outputs of layers."""

    # inputs    one (*lead, rows, inner), other (*lead, inner, columns)
    # output    shape (*lead, rows, columns)
    name: ClassVar[str] = "product"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        *lead, rows, columns = output.intervals
        inner = (0, layer.input_shapes[0][-1])
        return Region((*lead, rows, inner)), Region((*lead, inner, columns))

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_inner = layer.input_shapes[0][-1]
        return self.product_work(layer, output, 2.0 * n_inner * output.n_elements)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return call.inputs[0] @ call.inputs[1]


def product_layer(name: str, one: Layer, other: Layer) -> Layer:
    """Return the layer of a product of (*lead, rows, inner) and (*lead, inner, columns)."""
    return Layer.of(name, "product", [one, other], (*one.shape[:-1], other.shape[-1]))
