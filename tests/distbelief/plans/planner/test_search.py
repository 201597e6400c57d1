import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from distbelief.plans.planner.search import Decoder, PlanSimulator, build, improve, search
from distbelief.plans.planner.solvers.problem import Choice, Problem
from distbelief.plans.planner.solvers.solve import independent
from tests.distbelief.plans.planner.plans import equal, zoo
from tests.distbelief.plans.planner.requests import make_request, permuted, planned, simulated
from tests.distbelief.plans.planner.solvers.problems import chain, choices, problems


PROBLEMS = problems(caps=False)


@given(PROBLEMS, st.integers(0, 30))
def test_the_end_is_no_slower_than_the_start_and_tries_are_counted(
    problem: Problem, tries: int
) -> None:
    asked: list[Choice] = []

    def seconds_of(choice: Choice) -> float:
        asked.append(choice)
        return 1.0 + problem.cost(choice)

    start = independent(problem)
    end, seconds = improve(problem, start, seconds_of, tries=tries)
    assert seconds == 1.0 + problem.cost(end) <= 1.0 + problem.cost(start)
    assert asked[0] == start
    assert len(asked) == len(set(asked)) <= tries + 1
    assert seconds == min(1.0 + problem.cost(choice) for choice in asked)


@given(PROBLEMS)
def test_with_tries_enough_no_change_of_one_node_helps(problem: Problem) -> None:
    end, _ = improve(problem, independent(problem), problem.cost, tries=10_000)
    for other in choices(problem):
        if sum(a != b for a, b in zip(end, other, strict=True)) == 1:
            assert problem.cost(other) >= problem.cost(end) - 1e-6


def test_it_finds_what_the_model_does_not_see() -> None:
    problem = chain(6, 4, seed=1)
    end, seconds = improve(problem, (0,) * 6, lambda choice: -float(sum(choice)))
    assert (end, seconds) == ((3,) * 6, -18.0)


def test_what_does_not_fit_is_never_chosen() -> None:
    problem = chain(4, 3, seed=2)
    start = (1, 1, 1, 1)
    found = improve(problem, start, lambda x: 5.0 if x == start else math.inf)
    assert found == (start, 5.0)


def test_equal_problems_end_equal() -> None:
    one, other = (
        improve(p, (0,) * 8, p.cost, tries=20) for p in (chain(8, 5, seed=3), chain(8, 5, seed=3))
    )
    assert one == other


pytestmark = pytest.mark.untraced


CLUSTER = equal(4, latency=1e-4)


@cache
def of_alexnet() -> Decoder:
    return build(zoo("alexnet"), CLUSTER, batch=32)[1]


def test_the_gap_is_what_the_model_has_above_its_bound() -> None:
    first = planned(1, 2, 4)[0]
    best = replace(first.best, model_seconds=3.0)
    for bound, gap in ((2.0, 0.5), (3.5, 0.0), (0.0, None)):  # 3.5: rounding
        assert replace(first, best=best, model_bound=bound).gap == gap
    assert replace(first, best=replace(best, model_seconds=None)).gap is None


@settings(max_examples=15)
@given(data=st.data(), to=st.permutations(range(4)))
def test_equal_machines_may_be_numbered_otherwise(data: st.DataObject, to: list[int]) -> None:
    decoder = of_alexnet()
    choice = [data.draw(st.integers(0, len(node.candidates) - 1)) for node in decoder.nodes]
    placements = decoder(choice)
    asked = make_request(zoo("alexnet"), CLUSTER)
    one = simulated(asked, placements, n_machines=4)
    other = simulated(asked, permuted(placements, dict(enumerate(to))), n_machines=4)
    assert other.step_seconds == pytest.approx(one.step_seconds, rel=1e-12)
    moved = {(to[p], to[q]): n for (p, q), n in one.link_bytes.items()}
    assert dict(other.link_bytes) == moved
    assert [other.memory_bytes[to[m]] for m in range(4)] == list(one.memory_bytes)


def test_a_search_returns_the_fastest_plan_that_it_tried() -> None:
    done = planned(1, 2, 4)[-1]
    asked = make_request(done.best.cost.compiled.graph, done.cluster)
    slow = (0,) * len(done.solved.problem.sizes)
    simulator = PlanSimulator(asked)
    start = simulator.way("first", done.solved.decoder(slow), n_machines=4)
    solved = replace(done.solved, ways={slow: start})
    found = search(solved, done.cluster, simulator=simulator, notify=lambda _: None)
    assert found is not None
    assert found.method == "first + search"
    assert found.rank < start.rank
    choice = solved.decoder.choice(found.placements)
    assert choice is not None
    assert found.model_seconds == solved.problem.cost(choice)
