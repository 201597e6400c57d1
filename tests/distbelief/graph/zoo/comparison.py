"""Compares a captured model, whole or in parts, with the model itself."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from distbelief.graph.graph import INPUT, Layer, LayerGraph, as_real
from distbelief.graph.module_calls import module_at
from distbelief.graph.operator import Step, operator_of
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import close, zeros
from tests.distbelief.graph.reference import Partials, Parts, evaluate
from tests.distbelief.graph.zoo.catalogue import Case


def whole_modules(graph: LayerGraph, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that opaque layers call."""
    paths = [layer.text("module") for layer in graph.layers if "module" in layer.options]
    return {path: module_at(model, path) for path in paths}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers as ranks have them: floats, also those of whole numbers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, tensor in model.named_buffers():
        real = as_real(tensor)
        tensors[name] = real.clone() if real.is_floating_point() else real.double()
    return tensors


def flat(result: object) -> list[torch.Tensor]:
    values = result.values() if isinstance(result, Mapping) else [result]
    return [value for value in values if isinstance(value, torch.Tensor)]


def random_parts(layer: Layer, generator: np.random.Generator) -> Parts:
    """Halves along some of the dimensions that may be split, of output or input."""
    kind = operator_of(layer)
    partial = kind.partial
    if partial is not None and generator.random() < 0.5:
        region, cuts = Region.of(*layer.input_shapes[0]), partial.cuts(layer)
    else:
        partial, region, cuts = None, layer.region, kind.cuts(layer)
    parts = [region]
    for cut in cuts:
        if generator.random() < 0.6:
            parts = [
                half for part in parts for half in part.cut(cut.dim, [1.0, 1.0], unit=cut.unit)
            ]
    return parts if partial is None else Partials(tuple(parts))


def assert_same(
    graph: LayerGraph,
    model: nn.Module,
    case: Case,
    *,
    training: bool,
    seeds: Sequence[int | None] = (None,),
) -> None:
    """Check outputs, gradients and running statistics of a step: whole, or in parts by a seed."""
    model.train(training)
    x = case.input(batch=3)
    tensors = tensors_of(model)
    step = Step(training=training, modules=whole_modules(graph, model))
    (source,) = [layer.name for layer in graph.layers if layer.kind == INPUT]
    computed = []
    for seed in seeds:
        parts: dict[str, Parts] = {}
        if seed is not None:
            generator = np.random.default_rng(seed)
            parts = {
                layer.name: random_parts(layer, generator)
                for layer in graph.layers
                if layer.kind != INPUT
            }
        computed.append(evaluate(graph, {source: x}, tensors, parts=parts, step=step))
    model.train(training)
    expected = flat(model(x))
    leaves = [*model.parameters(), *([x] if x.requires_grad else [])]
    slopes = gradients(objective(expected), leaves)
    buffers = dict(model.named_buffers())
    for values in computed:
        found = [values[name] for name in graph.outputs]
        for one, other in zip(found, expected, strict=True):
            close(one, other)
        for slope, wanted in zip(gradients(objective(found), leaves), slopes, strict=True):
            close(zeros(slope, wanted), zeros(wanted, slope))
        for name, layer in running_averages(graph).items():
            close(values[layer][0], buffers[name])


def objective(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(value * value.cos()).sum() for value in outputs]).sum()


def gradients(y: torch.Tensor, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return torch.autograd.grad(y, leaves, allow_unused=True)
