"""Which layers have a gradient: it comes from an output, and some tensor wants it."""

from typing import Final

from distbelief.graph.layer import INPUT, Layer, LayerGraph


NO_GRADIENT: Final = "gradient"
"""The option by which a layer says, if False, that it has none (maxima of softmax)."""


def with_gradient(graph: LayerGraph) -> frozenset[str]:
    """Return the layers that take part in the backward pass.

    They train or read a layer that does, and an output depends on them. Whole numbers
    have no gradient, nor have maxima that only keep the numbers of a softmax small.
    """
    wanting: set[str] = set()
    for layer in graph.layers:
        trains = any(use.trains for use in layer.tensors.values())
        if _flows(layer) and (trains or not wanting.isdisjoint(layer.inputs)):
            wanting.add(layer.name)
    reached = set(graph.outputs)
    for layer in reversed(graph.layers):
        if layer.name in reached and _flows(layer):
            reached.update(layer.inputs)
    return frozenset(wanting & reached)


def _flows(layer: Layer) -> bool:
    if layer.kind == INPUT or layer.is_integer:
        return False
    return layer.options.get(NO_GRADIENT) is not False
