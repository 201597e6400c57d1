import msgspec
import numpy as np
import pytest

from distbelief.partition.baselines import even
from distbelief.partition.cost_model import Variance
from distbelief.program.cluster import Cluster, uniform
from distbelief.program.step_cost import StepCost
from tests.distbelief.partition.plans import MACHINE, fully_connected
from tests.distbelief.partition.requests import make_request, simulated


GRAPH = fully_connected(40, 600, 400, 50)
ALL = np.linspace(0, 1, 11).tolist()


def cluster(jitter: float, n: int = 4) -> Cluster:
    return uniform("uneven", msgspec.structs.replace(MACHINE, jitter=jitter), n)


def evenly(on: Cluster, n: int) -> StepCost:
    return simulated(make_request(GRAPH, on), even(GRAPH, on.first(n)), n_machines=n)


def test_equal_machines_always_take_the_simulated_step() -> None:
    cost = evenly(cluster(0.0), 4)
    found = Variance(GRAPH, cluster(0.0)).quantiles(cost, ALL)
    assert found == pytest.approx([cost.step_seconds] * len(ALL))


@pytest.mark.parametrize("jitter", [0.05, 0.2, 0.6])
def test_quantiles_ascend(jitter: float) -> None:
    cost = evenly(cluster(jitter), 4)
    found = Variance(GRAPH, cluster(jitter)).quantiles(cost, ALL)
    assert list(found) == sorted(found)
    assert found[0] > 0


def test_the_more_machines_vary_the_longer_they_wait_for_the_slowest() -> None:
    medians = [
        Variance(GRAPH, cluster(jitter)).quantiles(evenly(cluster(jitter), 4))[1]
        for jitter in (0.0, 0.05, 0.2, 0.6)
    ]
    assert medians == sorted(set(medians))


def test_draws_depend_on_machine_and_layer_only() -> None:
    cost = evenly(cluster(0.2), 2)
    few, many = Variance(GRAPH, cluster(0.2)), Variance(GRAPH, cluster(0.2, n=40))
    assert few.quantiles(cost, ALL) == many.quantiles(cost, ALL)


def test_half_of_the_draws_are_slower_and_half_are_faster() -> None:
    cost = evenly(cluster(0.2), 1)
    for seed in range(20):
        p50 = Variance(GRAPH, cluster(0.2), seed=seed).quantiles(cost)[1]
        assert p50 == pytest.approx(cost.step_seconds, rel=0.06)
        assert p50 >= 0.999 * cost.step_seconds  # so no bound of the step is above it


def test_seeds_differ_and_repeat() -> None:
    cost = evenly(cluster(0.2), 4)
    one, again, other = (
        Variance(GRAPH, cluster(0.2), seed=seed).quantiles(cost) for seed in (0, 0, 1)
    )
    assert one == again != other
