from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from distbelief.partition.planner import simulated
from distbelief.partition.problem import build
from tests.distbelief.partition.plans import equal, zoo
from tests.distbelief.partition.requests import make_request, permuted, planned


pytestmark = pytest.mark.untraced


ESTIMATES = [done.estimate for done in planned(1, 2, 4)]
GRAPH = zoo("alexnet")
CLUSTER = equal(4, latency=1e-4)
_, DECODER = build(GRAPH, CLUSTER, batch=32)


def test_an_estimate_has_the_figures_of_the_step() -> None:
    for estimate in ESTIMATES:
        assert estimate.seconds == tuple(sorted(estimate.seconds))
        assert estimate.speed_up * estimate.median == pytest.approx(estimate.one_machine_seconds)
        assert estimate.efficiency * len(estimate.used) == pytest.approx(estimate.speed_up)
        assert estimate.lower_bound <= estimate.median
        assert len(estimate.memory) == estimate.n_machines
        assert {p for pair in estimate.link_bytes for p in pair} <= set(estimate.used)


def test_the_gap_is_what_the_model_has_above_its_bound() -> None:
    estimate = replace(ESTIMATES[0], model_seconds=3.0, model_bound=2.0)
    assert estimate.gap == pytest.approx(0.5)
    assert replace(estimate, model_bound=3.5).gap == 0.0  # rounding
    assert replace(estimate, model_seconds=None).gap is None
    assert replace(estimate, model_bound=0.0).gap is None


def test_a_plan_fits_if_no_machine_lacks_memory() -> None:
    assert ESTIMATES[0].fits
    assert not replace(ESTIMATES[0], offenders=(0,)).fits


@settings(max_examples=15)
@given(data=st.data(), to=st.permutations(range(4)))
def test_equal_machines_may_be_numbered_otherwise(data: st.DataObject, to: list[int]) -> None:
    choice = [data.draw(st.integers(0, len(node.candidates) - 1)) for node in DECODER.nodes]
    placements = DECODER(choice)
    asked = make_request(GRAPH, CLUSTER)
    one = simulated(asked, placements, n_machines=4)
    other = simulated(asked, permuted(placements, dict(enumerate(to))), n_machines=4)
    assert other.step_seconds == pytest.approx(one.step_seconds, rel=1e-12)
    moved = {(to[p], to[q]): n for (p, q), n in one.link_bytes.items()}
    assert dict(other.link_bytes) == moved
    assert [other.memory_bytes[to[m]] for m in range(4)] == list(one.memory_bytes)
