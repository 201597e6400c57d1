import pytest
from rich.console import Console

from distbelief.graph.graph import GraphError
from distbelief.partition.report import explain, show_alternatives
from tests.distbelief.partition.requests import planned


DONE = planned(4)[-1]
ROOTS = [node.group.root.name for node in DONE.decoder.nodes]


@pytest.mark.parametrize("name", ROOTS)
def test_every_candidate_is_there_once_cheapest_first(name: str) -> None:
    root, rows = explain(DONE, name)
    assert root == name
    node = DONE.decoder.nodes[ROOTS.index(name)]
    assert sorted(row.label for row in rows) == sorted(c.label for c in node.candidates)
    costs = [row.own + row.transfers for row in rows]
    assert costs == sorted(costs)
    chosen = [row for row in rows if row.chosen]
    assert [row.reason for row in chosen] == ["chosen"]
    assert chosen[0].label == DONE.decoder.labels(DONE.solution.choice)[name]


@pytest.mark.parametrize("name", ROOTS)
def test_alternatives_cost_more_if_the_solver_is_exact(name: str) -> None:
    assert DONE.solution.exact
    for row in explain(DONE, name)[1]:
        assert row.chosen or row.reason.endswith(" more") or row.reason == "as good"


def test_a_follower_is_explained_by_its_leader() -> None:
    for node in DONE.decoder.nodes:
        for layer in node.group.members[1:]:
            assert explain(DONE, layer.name) == explain(DONE, node.group.root.name)
            assert f"it follows {node.group.root.name}" in str(
                show_alternatives(DONE, layer.name).title
            )


def test_a_plan_that_lacks_memory_says_so() -> None:
    need = max(planned(1)[0].estimate.memory)
    done = planned(4, memory=0.6 * need)[-1]
    verdicts = [row.reason for name in ROOTS for row in explain(done, name)[1]]
    assert any("does not fit the memory of machine" in reason for reason in verdicts)


def test_the_table_has_a_row_for_each() -> None:
    table = show_alternatives(DONE, ROOTS[0])
    assert table.row_count == len(DONE.decoder.nodes[0].candidates)
    console = Console(width=120)
    with console.capture() as written:
        console.print(table)
    assert "chosen" in written.get()


def test_an_unknown_layer_is_rejected_and_known_ones_are_named() -> None:
    with pytest.raises(GraphError, match=rf"no layer 'conv9'.*{ROOTS[0]}"):
        explain(DONE, "conv9")
