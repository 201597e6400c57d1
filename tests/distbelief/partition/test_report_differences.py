import msgspec
import pytest

from distbelief.partition.report import differences, show_differences
from distbelief.program.plan import Plan, plan_for
from tests.distbelief.partition.plans import equal, fully_connected
from tests.distbelief.partition.requests import planned


GRAPH = fully_connected(40, 600, 400, 50)


def plan(n: int) -> Plan:
    (done,) = planned(n)
    placements = done.estimate.placements
    return plan_for(GRAPH, placements, batch=32, loss="cross_entropy", cluster=equal(n))


ONE, OTHER = plan(1), plan(4)


def test_equal_plans_do_not_differ() -> None:
    assert differences(ONE, ONE) == []
    table = show_differences(ONE, ONE, names=("a", "b"))
    assert (table.title, table.row_count) == ("the plans are equal", 0)


def test_differences_are_the_same_both_ways() -> None:
    found = differences(ONE, OTHER)
    back = differences(OTHER, ONE)
    assert [(what, there, here) for what, here, there in found] == back
    assert show_differences(ONE, OTHER, names=("a", "b")).row_count == len(found)
    assert ("machines", "1", "4") in found


def test_only_differing_layers_are_reported() -> None:
    told = {what for what, _, _ in differences(ONE, OTHER)}
    layers = {n for n in ONE.placements if ONE.placements[n] != OTHER.placements[n]}
    assert told & set(ONE.placements) == layers != set()


@pytest.mark.parametrize(("change", "what"), [({"batch": 64}, "batch"), ({"loss": "mse"}, "loss")])
def test_one_change_is_one_difference(change: dict[str, object], what: str) -> None:
    changed = msgspec.structs.replace(ONE, **change)
    assert [row[0] for row in differences(ONE, changed)] == [what]


def test_a_layer_of_one_plan_only_is_absent_in_the_other() -> None:
    name, *rest = ONE.placements
    less = msgspec.structs.replace(ONE, placements={other: ONE.placements[other] for other in rest})
    assert differences(ONE, less) == [(name, "whole on machine 0", "absent")]
