from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from distbelief.partition.problem import build
from tests.distbelief.partition.plans import equal, zoo
from tests.distbelief.partition.requests import make_request, permuted, planned, simulated


pytestmark = pytest.mark.untraced


PLANNED = planned(1, 2, 4)
GRAPH = zoo("alexnet")
CLUSTER = equal(4, latency=1e-4)
_, DECODER = build(GRAPH, CLUSTER, batch=32)


def test_a_plan_has_the_figures_of_the_step() -> None:
    for done in PLANNED:
        cost = done.best.cost
        assert done.best.seconds == tuple(sorted(done.best.seconds))
        assert done.speed_up * done.median == pytest.approx(done.one_machine_seconds)
        assert done.lower_bound <= done.median
        assert len(cost.memory_bytes) == done.n_machines
        assert {p for pair in cost.link_bytes for p in pair} <= set(done.used)
        assert not done.lacking


def test_the_gap_is_what_the_model_has_above_its_bound() -> None:
    best = replace(PLANNED[0].best, model_seconds=3.0)
    for bound, gap in ((2.0, 0.5), (3.5, 0.0), (0.0, None)):  # 3.5: rounding
        assert replace(PLANNED[0], best=best, model_bound=bound).gap == gap
    assert replace(PLANNED[0], best=replace(best, model_seconds=None)).gap is None


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
