"""A module that is not split: one machine calls it.

    kind      "whole"
    inputs    what its forward takes, in order, each with the batch first
    tensors   its parameters and buffers, by their names in the module
    options   module: its path in the model; key of `StepTime.modules`
              output: which of several outputs; absent or () if it returns one tensor;
              (1, 0) is the first of the second
              operations: floating point operations of its forward pass for a sample;
              absent for two per element of its tensors

The module's own tensors are not read: all come as `tensors`, so it may lie on torch's
meta device. What it does to its buffers is lost. It is called with random numbers of
the step's seed, so that whoever computes it again gets the same.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import torch
from torch.func import functional_call
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import Cut, Operator, Step, Work
from distbelief.graph.region import Region


@final
class Opaque(Operator):
    """What the forward of a module returns."""

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
        read = sum(region.n_elements for region in self.reads(layer, output))
        return Work(
            forward=operations, backward=2 * operations, n_elements=float(output.n_elements + read)
        )

    @override
    def compute(
        self,
        layer: Layer,
        output: Region,
        inputs: Sequence[torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        path = layer.text("module")
        if path not in step.modules:
            raise GraphError(
                f"{layer.name!r} is computed whole by the module {path!r}, which is "
                "not among the step's modules: give it in Step.modules"
            )
        module = step.modules[path]
        if module.training != step.training:
            module.train(step.training)
        buffers = dict(module.named_buffers())
        state = {
            word: value.clone() if word in buffers else value for word, value in tensors.items()
        }
        n_samples = max(value.shape[0] for value in inputs)
        arguments = tuple(value.expand(n_samples, *value.shape[1:]) for value in inputs)
        devices = {value.device for value in inputs if value.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            torch.manual_seed(_seed(layer, step))
            result: object = functional_call(module, state, arguments)
        return _chosen(layer, result)


def _seed(layer: Layer, step: Step) -> int:
    name = f"{step.seed}:{step.first_sample}:{layer.name}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")


def _chosen(layer: Layer, result: object) -> torch.Tensor:
    for index in layer.integers("output") if "output" in layer.options else ():
        assert isinstance(result, tuple | list), (layer.name, type(result))
        result = result[index]
    if not isinstance(result, torch.Tensor):
        raise GraphError(
            f"the module of {layer.name!r} returns a {type(result).__name__}, not a "
            "tensor: say by the option `output` which of its outputs is meant"
        )
    return result
