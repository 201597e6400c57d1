"""The operator of modules that cannot be split: one rank calls the module.

The module's own tensors are not read: all come as the layer's tensors, so it may lie on torch's
meta device. Of its buffers, running statistics may change: one more layer returns them. It runs
with random numbers of the step's seed, so that a repeated step gives the same result.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.ops.call import decoded, from_torch, step_numbers
from distbelief.graph.region import Region


@final
class Opaque(Operator):
    """The output of a module's forward."""

    # inputs    the arguments of its forward, in order, each with the batch first
    # tensors   its parameters and buffers, by their names in the module
    # options   module: its path in the model, a key of `Step.modules`
    #           arguments, batch, mask: as for a call of an operation; without them its arguments
    #           are the inputs, and the result has the batch first
    #           output: the index of one of several tensors, however they are nested
    #           statistics: buffers by name, separated by commas: the output is their new values
    #           operations: floating point operations of its forward pass per sample; if absent,
    #           two per element of its tensors
    name: ClassVar[str] = "whole"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return ()

    @override
    def joins_samples(self, layer: Layer) -> bool:
        return layer.options.get("batch") == -1

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return tuple(Region.of(*shape) for shape in layer.input_shapes)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        if "operations" in layer.options:
            operations = layer.number("operations")
        else:
            uses = layer.tensors.values()
            operations = 2.0 * sum(Region.of(*use.shape).n_elements for use in uses)
        return self.product_work(layer, output, operations)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        path = layer.text("module")
        if path not in call.step.modules:
            raise GraphError(
                f"{layer.name!r} is opaque, but its module {path!r} is not given: add it "
                "to Step.modules"
            )
        module = call.step.modules[path]
        if module.training != call.step.training:
            module.train(call.step.training)
        buffers = dict(module.named_buffers())
        state = dict(call.tensors)
        for word in buffers.keys() & state.keys():
            # Ranks have floats, also of whole numbers.
            own, value = buffers[word].dtype, state[word]
            state[word] = value.clone() if own.is_floating_point else value.to(own, copy=True)
        n_samples = max(value.shape[0] for value in call.inputs)
        arguments: Sequence[object] = [
            value.expand(n_samples, *value.shape[1:]) for value in call.inputs
        ]
        words: Mapping[str, object] = {}
        if "arguments" in layer.options:
            text = layer.text("arguments")
            arguments, words = decoded(
                text, inputs=call.inputs, tensors=call.tensors, n_samples=n_samples
            )
        # All layers of one call draw the same numbers.
        with step_numbers(call, f"{path}:{','.join(layer.inputs)}"):
            result: object = functional_call(module, state, tuple(arguments), dict(words))
        if "statistics" in layer.options:
            kept = [state[word].flatten() for word in layer.text("statistics").split(",")]
            return torch.cat(kept).detach().unsqueeze(0)
        if "output" in layer.options:
            leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            result = leaves[layer.integer("output")]
        if not isinstance(result, torch.Tensor):
            raise GraphError(
                f"the module of {layer.name!r} returns a {type(result).__name__}, not a "
                "tensor: select one of its outputs with the option `output`"
            )
        return from_torch(result, call, n_samples) if "batch" in layer.options else result
