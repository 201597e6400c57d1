"""Graphs and clusters for tests of the planner."""

from functools import cache
from itertools import pairwise

import torch
from torch import nn

from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import GraphError, LayerGraph
from distbelief.plans.cluster import Cluster, Machine, uniform
from tests.distbelief.plans.plans import zoo_graph


NETS = ("alexnet", "mobilenet", "resnet18", "vision transformer", "unet, transposed")
"""Of the zoo, those that are captured quickly and have all sorts of layers."""

MACHINE = Machine(flops=1e10, memory_rate=1e10, bandwidth=1e8, overhead=1e-5)
SLOW = Machine(flops=4e9, memory_rate=4e9, bandwidth=5e7, overhead=1e-5)


def equal(n: int, *, latency: float = 0.0, memory: float | None = None) -> Cluster:
    machine = MACHINE
    if memory is not None:
        machine = Machine(flops=1e10, memory_rate=1e10, bandwidth=1e8, memory=memory)
    return uniform("equal", machine, n, latency=latency)


def unequal() -> Cluster:
    """Two fast machines, three slow ones, and a bad link."""
    return Cluster(
        name="unequal",
        machines=(MACHINE, MACHINE, SLOW, SLOW, SLOW),
        latency=1e-4,
        links={"0-3": 1e6},
    )


def shuffled() -> LayerGraph:
    """Its last layer has no split rule."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.PixelShuffle(2))
    return capture(model, [InputSpec(shape=(1, 3, 3))])


@cache
def zoo(name: str) -> LayerGraph:
    """A graph of the zoo, with a loss if it has one output that takes one."""
    graph = zoo_graph(name)
    try:
        return append_loss(graph, "cross_entropy")
    except GraphError:
        return graph


@cache
def fully_connected(*widths: int) -> LayerGraph:
    """Widths of inputs, hidden layers with sigmoids, and classes."""
    layers: list[nn.Module] = []
    with torch.device("meta"):
        for before, after in pairwise(widths[:-1]):
            layers += [nn.Linear(before, after), nn.Sigmoid()]
        layers.append(nn.Linear(widths[-2], widths[-1]))
    graph = capture(nn.Sequential(*layers), [InputSpec(shape=(widths[0],))])
    return append_loss(graph, "cross_entropy")


@cache
def convolutional() -> LayerGraph:
    """Two convolutions, a pool, and classes of every place: a chain of images."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(8, 6, 3),
            nn.ReLU(),
            nn.Conv2d(6, 4, 1),
        )
    return append_loss(capture(model, [InputSpec(shape=(3, 17, 19))]), "mse")
