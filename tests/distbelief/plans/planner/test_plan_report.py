"""The table, JSON, remarks, and explanations of layers."""

import dataclasses
import json
import math

import msgspec
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from distbelief.graph.graph import GraphError
from distbelief.plans.cluster import uniform
from distbelief.plans.planner.plan_report import (
    explain,
    limit,
    plain,
    remarks,
    seconds,
    show_alternatives,
    size,
    table,
)
from distbelief.plans.planner.planner import Planned, plan as make_plans
from distbelief.plans.planner.search import Node
from tests.distbelief.plans.planner.plans import MACHINE, equal, fully_connected, shuffled
from tests.distbelief.plans.planner.requests import make_request, planned


COUNTS = (1, 2, 4)
NET = (40, 600, 400, 50)
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
BYTES = {unit: 1024.0**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}


@given(st.floats(1e-6, 1e5))
def test_times_are_written_with_three_digits_or_whole_microseconds(x: float) -> None:
    number, unit = seconds(x).split()
    assert float(number) * SECONDS[unit] == pytest.approx(x, rel=0.006, abs=0.501e-6)


@given(st.floats(0, 1e15))
def test_sizes_are_written_with_one_decimal(n_bytes: float) -> None:
    number, unit = size(n_bytes).split()
    assert float(number) * BYTES[unit] == pytest.approx(n_bytes, abs=0.51 * BYTES[unit])
    assert float(number) <= 1024 or unit == "TiB"
    assert size(math.inf) == "unlimited"


def written(shown: object) -> str:
    console = Console(width=140)
    with console.capture() as text:
        console.print(shown)
    return text.get()


def test_the_table_and_the_json_have_a_row_for_each() -> None:
    rows = planned(*COUNTS)
    shown = table(rows, title="a net")
    assert shown.row_count == len(rows)
    text = written(shown)
    for done in rows:
        assert f"{done.speed_up:.2f}x" in text
        assert seconds(done.median) in text
        row = json.loads(json.dumps(plain(done)))
        assert row["machines"] == done.n_machines
        assert row["step_seconds"]["p50"] == done.median
        parts = [row[key] for key in ("compute", "communication", "sync", "wait")]
        assert sum(parts) == pytest.approx(1.0)
        assert row["bytes"] == sum(done.best.cost.link_bytes.values())


@pytest.mark.parametrize("width", [80, 100, 120, 130])
def test_columns_are_left_out_and_no_number_is_cut(width: int) -> None:
    shown = table(planned(*COUNTS), title="a net", width=width)
    console = Console(width=width)
    with console.capture() as text:
        console.print(shown)
    lines = text.get().splitlines()
    assert all(len(line) <= width and "…" not in line for line in lines)
    assert {"machines", "step p50", "speed-up", "memory"} <= {str(c.header) for c in shown.columns}
    assert len(table(planned(*COUNTS), title="", width=130).columns) == 11


# --- remarks ---


def said(*rows: Planned, memory: float | None = None) -> list[str]:
    return remarks(rows, make_request(fully_connected(*NET), equal(4, memory=memory)))


def test_the_costs_are_the_last_remark_and_whole_layers_are_named() -> None:
    assert (
        said(*planned(*COUNTS))[-1]
        == "Costs: assumed figures of cluster 'equal', no measured layer."
    )
    (text, _) = remarks([], make_request(shuffled(), equal(2)))[-2:]
    assert "is computed whole on one machine: pixel_shuffle has no split" in text


def test_idle_machines_are_reported() -> None:
    slow = msgspec.structs.replace(MACHINE, bandwidth=1e3)
    found = said(
        *make_plans(make_request(fully_connected(*NET), uniform("slow", slow, 4)), [1, 2, 4])
    )
    assert [text.split(",")[0] for text in found if "idle" in text] == [
        "2 machines: 1 left idle",
        "4 machines: 3 left idle",
    ]


def test_what_limits_the_speed_up_is_named_for_each_row() -> None:
    rows = planned(*COUNTS)
    assert limit(rows[0]) is None
    (text,) = [text for text in said(*rows) if text.startswith("4 machines: ")]
    n_bytes = size(sum(rows[2].best.cost.link_bytes.values()))
    assert text.endswith(f"% of the machines' time goes into sending {n_bytes}")
    free = uniform("free", msgspec.structs.replace(MACHINE, bandwidth=1e15), 4)
    asked = dataclasses.replace(make_request(fully_connected(*NET), free), pins={"2": "whole"})
    (done,) = make_plans(asked, [4])
    assert "goes into waiting for whole layers, above all 2" in (limit(done) or "")


def test_what_does_not_fit_is_marked_and_its_worst_machine_named() -> None:
    (bad,) = planned(4, memory=1e4)
    worst = max(bad.best.cost.memory_bytes)
    index = bad.best.cost.memory_bytes.index(worst)
    (text, _) = said(bad, memory=1e4)[-2:]
    assert f"machine {index} needs {size(worst)} and has 9.8 KiB; 4 machines lack memory" in text
    assert table([bad], title="").rows[0].style == "red"
    assert plain(bad)["offenders"] == [0, 1, 2, 3]


# --- explanations ---

ROOTS = ["0", "2", "4"]


def of_four() -> Planned:
    return planned(4)[-1]


def nodes() -> tuple[Node, ...]:
    return of_four().solved.decoder.nodes


def test_all_roots_are_looked_at() -> None:
    assert [node.group.root.name for node in nodes()] == ROOTS


@pytest.mark.parametrize("name", ROOTS)
def test_every_candidate_is_there_once_cheapest_first(name: str) -> None:
    done = of_four()
    root, rows = explain(done, name)
    assert root == name
    node = nodes()[ROOTS.index(name)]
    assert sorted(row.label for row in rows) == sorted(c.label for c in node.candidates)
    costs = [row.own + row.transfers for row in rows]
    assert costs == sorted(costs) == [row.together for row in rows]
    (chosen,) = (row for row in rows if row.reason == "chosen")
    index = done.solved.solution.choice[ROOTS.index(name)]
    assert chosen.label == node.candidates[index].label
    assert done.solved.solution.exact
    assert all(
        row is chosen or row.reason.endswith(" more") or row.reason == "as good" for row in rows
    )


def test_a_follower_is_explained_by_its_leader() -> None:
    for node in nodes():
        for layer in node.group.members[1:]:
            assert explain(of_four(), layer.name) == explain(of_four(), node.group.root.name)
            title = str(show_alternatives(of_four(), layer.name).title)
            assert f"it follows {node.group.root.name}" in title


def test_a_plan_that_lacks_memory_says_so() -> None:
    need = max(planned(1)[0].best.cost.memory_bytes)
    done = planned(4, memory=0.6 * need)[-1]
    verdicts = [row.reason for name in ROOTS for row in explain(done, name)[1]]
    assert any("does not fit the memory of machine" in reason for reason in verdicts)


def test_the_explanation_has_a_row_for_each() -> None:
    shown = show_alternatives(of_four(), ROOTS[0])
    assert shown.row_count == len(nodes()[0].candidates)
    assert "chosen" in written(shown)


def test_an_unknown_layer_is_rejected_and_known_ones_are_named() -> None:
    with pytest.raises(GraphError, match=rf"no layer 'conv9'.*{ROOTS[0]}"):
        explain(of_four(), "conv9")
