"""Costs of micro-batches, from those of a batch."""

import pytest
from torch import nn

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import Layer
from distbelief.partition.cost_model import AnalyticCosts, MicroBatchScaling
from distbelief.program.cluster_file import load_cluster


def test_what_takes_longer_than_by_arithmetic_does_with_fewer_samples_too() -> None:
    cluster = load_cluster("rack-1g").first(1)
    graph = capture(nn.Linear(500, 300), [InputSpec(shape=(500,))])
    layer = graph.layers[-1]
    slow, batch, part = (AnalyticCosts(cluster, batch=n) for n in (192, 64, 16))
    costs = MicroBatchScaling(slow, batch=batch, part=part)
    half = layer.region.cut(0, [1.0, 1.0])[0]
    for name in ("forward", "backward"):
        there = {
            one: getattr(one.passes(layer, half, 0), name) for one in (costs, slow, batch, part)
        }
        assert there[costs] / there[part] == pytest.approx(there[slow] / there[batch])


def test_what_takes_no_time_takes_none() -> None:
    cluster = load_cluster("rack-1g").first(1)
    graph = capture(nn.Linear(5, 3), [InputSpec(shape=(5,))])
    costs = AnalyticCosts(cluster, batch=4)
    fewer = MicroBatchScaling(costs, batch=costs, part=AnalyticCosts(cluster, batch=2))
    source = graph.layers[0]
    assert fewer.passes(source, source.region, 0).forward == 0.0
    assert fewer.passes(source, source.region, 0).backward == 0.0


def test_what_share_of_its_time_a_part_takes_is_measured_if_it_can_be() -> None:
    """Steps with micro-batches were once predicted a fifth too short."""
    cluster = load_cluster("rack-1g").first(1)
    graph = capture(nn.Linear(500, 300), [InputSpec(shape=(500,))])
    layer = graph.layers[-1]
    batch, part = (AnalyticCosts(cluster, batch=n) for n in (64, 16))

    def shares(of: Layer, n_samples: int) -> tuple[float, float]:
        assert (of, n_samples) == (layer, 16)
        return 0.3, 0.35

    costs = MicroBatchScaling(batch, batch=batch, part=part, shares=shares)
    half = layer.region.cut(0, [1.0, 1.0])[0]
    whole_batch = batch.passes(layer, half, 0).forward, batch.passes(layer, half, 0).backward
    assert costs.passes(layer, half, 0).forward == pytest.approx(0.3 * whole_batch[0])
    assert costs.passes(layer, half, 0).backward == pytest.approx(0.35 * whole_batch[1])
