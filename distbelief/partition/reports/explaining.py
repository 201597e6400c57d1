"""Why a layer is split as it is: every candidate, what it costs, and why it lost.

Costs are those of the solver's model: computing, and transfers from and to neighbours
as these are placed in its choice. So a candidate that looks cheaper than the chosen one
would have made a neighbour dearer, or the search on simulated time found otherwise.
"""

import difflib
import math
from dataclasses import dataclass
from typing import Final, final

from rich.table import Table
from rich.text import Text

from distbelief.graph.layer import INPUT, GraphError, LayerGraph
from distbelief.partition.planning import Planned
from distbelief.partition.reports.report import seconds


_N_NAMED: Final = 20  # layers in a message


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to place a layer.

    Attributes:
        label: "whole", "rows 4".
        own: Seconds of computing and synchronising.
        transfers: Seconds of what passes from and to its neighbours.
        chosen: Whether the solver chose it.
        verdict: Why not, in words.
    """

    label: str
    own: float
    transfers: float
    chosen: bool
    verdict: str


def explain(planned: Planned, name: str) -> tuple[str, list[Alternative]]:
    """Return the layer that decides for `name`, and its candidates, cheapest first.

    Raises:
        GraphError: there is no such layer.
    """
    node = _node(planned, name)
    problem, choice = planned.problem, planned.solution.choice
    chosen = choice[node]
    rows = []
    candidates = planned.decoder.nodes[node].candidates
    for index, candidate in enumerate(candidates):
        transfers = sum(
            float(table[index, choice[other]]) for other, table in problem.neighbours[node]
        )
        own = float(problem.costs[node][index])
        rows.append((own + transfers, index, own, transfers, candidate.label))
    total = next(row[0] for row in rows if row[1] == chosen)
    alternatives = [
        Alternative(
            label=label,
            own=own,
            transfers=transfers,
            chosen=index == chosen,
            verdict=_verdict(planned, node, index, cost - total),
        )
        for cost, index, own, transfers, label in sorted(rows)
    ]
    return planned.decoder.nodes[node].group.root.name, alternatives


def show(planned: Planned, name: str) -> Table:
    """Return the candidates of a layer as a table."""
    root, alternatives = explain(planned, name)
    follows = "" if root == name else f" (it follows {root})"
    n_machines = planned.forecast.n_machines
    table = Table(title=Text(f"{name}{follows}, {n_machines} machines"))
    for column in ("split", "computing", "transfers", "together", ""):
        table.add_column(column, justify="left" if column in {"split", ""} else "right")
    for row in alternatives:
        table.add_row(
            Text(row.label),
            seconds(row.own),
            seconds(row.transfers),
            seconds(row.own + row.transfers),
            row.verdict,
            style="bold" if row.chosen else "",
        )
    return table


def check(graph: LayerGraph, name: str) -> None:
    """Check that a layer can be explained, before anything is planned.

    Raises:
        GraphError: there is no such layer, or it is an input.
    """
    known = [layer.name for layer in graph.layers if layer.kind != INPUT]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise GraphError(
            f"there is no layer {name!r} to explain"
            + (f": do you mean {' or '.join(near)}?" if near else "")
            + f" There are {', '.join(known[:_N_NAMED])}"
            + (", ..." if len(known) > _N_NAMED else "")
        )


def _node(planned: Planned, name: str) -> int:
    for index, node in enumerate(planned.decoder.nodes):
        if any(layer.name == name for layer in node.group.members):
            return index
    known = [node.group.root.name for node in planned.decoder.nodes]
    raise GraphError(
        f"there is no layer {name!r} to explain; there are {', '.join(known)}, and "
        "those that follow them"
    )


def _verdict(planned: Planned, node: int, index: int, more: float) -> str:
    problem, choice = planned.problem, list(planned.solution.choice)
    if index == choice[node]:
        return "chosen"
    choice[node] = index
    if problem.overrun(choice) > max(1.0, planned.solution.overrun) * (1 + 1e-9):
        machine = int(problem.used(choice).argmax())
        return f"does not fit the memory of machine {machine}"
    if math.isinf(more):
        return "forbidden"
    if more > 0:
        return f"{seconds(more)} more"
    if more == 0:
        return "as good"
    return f"{seconds(-more)} less here, but more elsewhere"
