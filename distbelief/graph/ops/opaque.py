"""The operator of modules that cannot be split: one rank calls the module.

The module's own tensors are not read: all come as the layer's tensors, so it may lie on torch's
meta device. Changes of its buffers are lost. It runs with random numbers of the step's seed, so
that a repeated step gives the same result.
"""

import hashlib
from typing import ClassVar, final

import torch
from torch.func import functional_call
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import Call, Cut, Operator, Step, Work
from distbelief.graph.region import Region


@final
class Opaque(Operator):
    """The output of a module's forward."""

    # inputs    the arguments of its forward, in order, each with the batch first
    # tensors   its parameters and buffers, by their names in the module
    # options   module: its path in the model, a key of `Step.modules`
    #           output: the index of one of several outputs; (1, 0) is the first of the second
    #           operations: floating point operations of its forward pass per sample; if absent,
    #           two per element of its tensors
    name: ClassVar[str] = "whole"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return ()

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
        state = {
            word: value.clone() if word in buffers else value
            for word, value in call.tensors.items()
        }
        n_samples = max(value.shape[0] for value in call.inputs)
        arguments = tuple(value.expand(n_samples, *value.shape[1:]) for value in call.inputs)
        devices = {value.device for value in call.inputs if value.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            torch.manual_seed(seed_of(layer, call.step))
            result: object = functional_call(module, state, arguments)
        return _chosen(layer, result)


def seed_of(layer: Layer, step: Step) -> int:
    name = f"{step.seed}:{step.first_sample}:{layer.name}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")


def _chosen(layer: Layer, result: object) -> torch.Tensor:
    for index in layer.integers("output") if "output" in layer.options else ():
        assert isinstance(result, tuple | list), (layer.name, type(result))
        result = result[index]
    if not isinstance(result, torch.Tensor):
        raise GraphError(
            f"the module of {layer.name!r} returns a {type(result).__name__}, not a "
            "tensor: select one of its outputs with the option `output`"
        )
    return result
