"""From what a person asks to what is to be planned: the graph, machines, costs.

cluster     profile    seconds of a layer
"here"      any        as measured on this machine
another     no         arithmetic with the figures of the cluster
another     yes        the same, times measured / arithmetic on this machine
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import nn

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.layer import GraphError, LayerGraph
from distbelief.graph.losses import append_loss, whole_loss
from distbelief.partition.costs import AnalyticCosts, single_sample
from distbelief.partition.planning import Order, Told
from distbelief.partition.profiling.fewer_samples import FewerSamples
from distbelief.partition.profiling.host import HERE, here
from distbelief.partition.profiling.measuring import profiled
from distbelief.partition.profiling.probing import recheck
from distbelief.partition.profiling.profiled_costs import ProfiledCosts
from distbelief.program.cluster import Cluster
from distbelief.program.cluster_file import load_cluster


_N_BYTES_MAX: Final = 1 << 50
"""Of one layer, a petabyte: beyond, sums over layers and machines might overflow."""


def order_of(  # noqa: PLR0913 -- all that a plan depends on
    model: nn.Module,
    inputs: Sequence[InputSpec],
    *,
    batch: int,
    loss: str,
    counts: Sequence[int],
    cluster: str | Path | Cluster,
    pins: Mapping[str, str],
    exactly: bool,
    profile: bool = False,
    tell: Told = lambda _: None,
) -> Order:
    """Return what is to be planned.

    Args:
        model: On any device; nothing of it is changed.
        inputs: Of the model.
        batch: Samples of a step.
        loss: Its name; "" for none.
        counts: Numbers of machines.
        cluster: A ready-made one's name, the path of a file, a cluster, or "here".
        pins: Per layer how it must be split.
        exactly: Use all machines of each count.
        profile: Measure layers here, also for other machines.
        tell: Told what is being measured, for people who wait.

    Raises:
        GraphError: the model cannot be captured, or all of it is one layer that cannot
            be split; there is no such cluster, or it has fewer machines.
    """
    is_here = cluster == HERE
    # What is wrong is said before anything takes long.
    machines = None if is_here else _named(cluster, counts)
    graph = capture(model, inputs)
    _refuse_indivisible(graph)
    if loss:
        graph = append_loss(graph, loss)
    _check_sizes(graph, batch)
    slower = recheck(tell) if is_here or profile else 1.0
    if machines is None:
        tell("measuring this machine")
        machines = here(max([1, *counts]))
    single = single_sample(graph)
    costs = AnalyticCosts(machines, batch=batch, single=single)
    order = Order(
        graph=graph,
        cluster=machines,
        batch=batch,
        costs=costs,
        costs_for=lambda n: AnalyticCosts(machines, batch=n, single=single),
        pins=pins,
        exactly=exactly,
    )
    if not (profile or is_here):
        return order
    host = None
    if not is_here:
        tell("measuring this machine")
        host = AnalyticCosts(here(1), batch=batch, single=single)

    def progress(n_done: int, n_wanted: int, name: str) -> None:
        tell(f"measuring layer {n_done + 1} of {n_wanted}: {name}")

    modules = _modules(model, graph, loss=loss)
    measured = profiled(graph, batch=batch, modules=modules, progress=progress)
    profiled_costs = ProfiledCosts(measured, machines=costs, host=host, slower=slower)

    def fewer(n_samples: int) -> FewerSamples:
        part = AnalyticCosts(machines, batch=n_samples, single=single)
        shares = profiled_costs.shares
        return FewerSamples(profiled_costs, batch=costs, part=part, shares=shares)

    return replace(order, costs=profiled_costs, costs_for=fewer)


def _check_sizes(graph: LayerGraph, batch: int) -> None:
    """Check that bytes can be counted.

    Raises:
        GraphError: a layer of so many samples is larger than anything there is.
    """
    for layer in graph.layers:
        n_bytes = 8 * batch * math.prod(layer.shape)
        if n_bytes > _N_BYTES_MAX:
            raise GraphError(
                f"layer {layer.name!r} of shape {list(layer.shape)} takes "
                f"{n_bytes:.2g} bytes with a batch of {batch:.3g}: use fewer samples, "
                "or a smaller input"
            )
    for name, use in graph.tensors.items():
        if 8 * math.prod(use.shape) > _N_BYTES_MAX:
            raise GraphError(
                f"tensor {name!r} of shape {list(use.shape)} is larger than anything "
                "there is: use a smaller model"
            )


def _named(cluster: str | Path | Cluster, counts: Sequence[int]) -> Cluster:
    found = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if counts:
        found.first(max(counts))
    return found


def _modules(model: nn.Module, graph: LayerGraph, *, loss: str) -> dict[str, nn.Module]:
    """Return copies of the modules that are called whole, by their paths."""
    found: dict[str, nn.Module] = {}
    for layer in graph.layers:
        if "module" not in layer.options or layer.text("module") in found:
            continue
        path = layer.text("module")
        try:
            found[path] = copy.deepcopy(model.get_submodule(path))
        except AttributeError:  # no part of the model
            module = whole_loss(loss) if loss else None
            if module is not None:
                found[path] = module
    return found


def _refuse_indivisible(graph: LayerGraph) -> None:
    """Check that there is anything to plan.

    Raises:
        GraphError: all of it is one layer that one machine has to compute.
    """
    layers = [layer for layer in graph.layers if layer.inputs]
    if len(layers) == 1 and layers[0].whole:
        raise GraphError(f"nothing of this model can be split: {layers[0].whole}")
