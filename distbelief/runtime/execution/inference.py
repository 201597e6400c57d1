"""A plan without its loss: forward only, and what the model returns on machine 0.

    ... --> fc8, cut over 4 machines --> fc8 (whole), on machine 0

What only the loss needs is left out; of an output that is cut, the parts are brought
together by one more layer.
"""

from collections.abc import Mapping, Sequence

from distbelief.graph.building import Builder
from distbelief.graph.layer import INPUT, GraphError, Layer, LayerGraph
from distbelief.program.compilation import Compiled, compile_plan
from distbelief.program.placement import Placement


def inference_of(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    outputs: Sequence[str],
    batch: int,
    n_machines: int,
) -> Compiled:
    """Return the plan that computes these outputs; each is whole on machine 0.

    The outputs of its graph are in this order, under other names.

    Args:
        graph: With or without a loss.
        placements: Of its layers but inputs.
        outputs: Layers.
        batch: Samples of a step.
        n_machines: They are counted from 0.

    Raises:
        GraphError: there is no such layer.
    """
    unknown = [name for name in outputs if name not in graph.by_name]
    if unknown or not outputs:
        raise GraphError(f"no layer {unknown[0]!r}" if unknown else "no output is named")
    wanted = set(outputs)
    for layer in reversed(graph.layers):
        if layer.name in wanted:
            wanted.update(layer.inputs)
    layers = [layer for layer in graph.layers if layer.name in wanted]
    builder = Builder.of(LayerGraph(tuple(layers), tuple(outputs)))
    places = {layer.name: placements[layer.name] for layer in layers if layer.kind != INPUT}
    ends = []
    for name in outputs:
        layer = graph[name]
        end = builder.free_name(f"{name}.whole")
        builder.add_layer(
            Layer(
                name=end,
                kind="reshape",
                inputs=(name,),
                input_shapes=(layer.shape,),
                shape=layer.shape,
                is_integer=layer.is_integer,
            )
        )
        places[end] = Placement.whole(len(layer.shape), 0)
        ends.append(end)
    return compile_plan(builder.finish(ends), places, batch=batch, n_machines=n_machines)


def model_output(graph: LayerGraph) -> str:
    """Return the one output of the model, whose graph ends in its loss.

    Raises:
        GraphError: it has several.
    """
    *outputs, _ = graph.outputs
    if len(outputs) != 1:
        raise GraphError(f"the model has outputs {', '.join(outputs)}: only one can be measured")
    return outputs[0]
