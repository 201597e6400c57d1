"""Reports of the planner: the table, JSON, remarks, and explanations of layers.

Explanations show the costs of the solver's model: computing, and transfers from and to neighbours
as placed in its choice. A candidate that looks cheaper than the chosen one would make a neighbour
more expensive, or lost in the simulation.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from distbelief.core import formatting
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.plans.planner.candidates import near
from distbelief.plans.planner.cost_model import ProfiledCosts
from distbelief.plans.planner.planner import Planned
from distbelief.plans.planner.search import PlanningRequest


# --- table, JSON and remarks ---

WIDTH: Final = 130  # characters of a line without a terminal

Plain = dict[str, object]


# What the columns of the table mean, as far as their names do not say it.
MEANINGS: Final = {
    "used": "machines that have work",
    "eff.": "speed-up over used",
    "comp/comms/sync/wait": "% of the used machines' time",
    "bound": "no plan takes less",
    "gap": "how far it may be from the best of the candidates",
    "by": "solver",
}
# The first to be left out where lines are short.
_LEFT_OUT: Final = ("by", "p10-p90", "bound", "used", "gap", "comp/comms/sync/wait", "eff.")


def table(rows: Sequence[Planned], *, title: str, width: int = WIDTH) -> Table:
    """Return one row per number of machines, with the columns that fit in `width` characters.

    Rows that do not fit into the machines' memory are red.
    """
    cells = {
        "machines": [str(done.n_machines) for done in rows],
        "used": [str(len(done.used)) for done in rows],
        "step p50": [seconds(done.best.seconds[1]) for done in rows],
        "p10-p90": [_range(done.best.seconds[0], done.best.seconds[2]) for done in rows],
        "speed-up": [f"{done.speed_up:.2f}x" for done in rows],
        "eff.": [f"{done.speed_up / len(done.used):.0%}" for done in rows],
        "comp/comms/sync/wait": [
            " ".join(f"{abs(100 * share):.0f}" for share in done.shares) + " %" for done in rows
        ],
        "memory": [
            size(max(done.best.cost.memory_bytes)) + ("!" if done.lacking else "") for done in rows
        ],
        "bound": [seconds(done.lower_bound) for done in rows],
        "gap": ["-" if done.gap is None else f"{done.gap:.1%}" for done in rows],
        "by": [
            done.best.method.replace("elimination", "exact").replace(" + ", "+") for done in rows
        ],
    }
    columns = {name: [name, *column] for name, column in cells.items()}
    formatting.leave_out(columns, width=width, gap=3, order=_LEFT_OUT)
    shown = Table(title=Text(title), box=SIMPLE, pad_edge=False, title_justify="left")
    for name in columns:
        shown.add_column(name, justify="left" if name == "by" else "right", no_wrap=True)
    for index, done in enumerate(rows, start=1):
        shown.add_row(*(c[index] for c in columns.values()), style="red" if done.lacking else "")
    return shown


def limit(done: Planned) -> str | None:
    """Say what takes most of the used machines' time beyond what one machine would compute."""
    cost, n_used, shares = done.best.cost, len(done.used), done.shares
    step = max(cost.step_seconds, 1e-300)
    computing: dict[str, dict[int, float]] = {}  # seconds, by layer and machine
    seconds = cost.simulated.ends - cost.simulated.starts
    for task, taken in zip(cost.tasks, seconds.tolist(), strict=False):  # messages follow
        row = computing.setdefault(task.layer, {})
        row[task.machine] = row.get(task.machine, 0.0) + taken
    whole = {name: sum(row.values()) for name, row in computing.items() if len(row) == 1}
    longest = max(whole, key=lambda name: whole[name], default=None)
    # While a layer is computed whole, the other machines may wait.
    alone = min(shares.wait, sum(whole.values()) / step * (n_used - 1) / n_used)
    share, what = max(
        (shares.communication + shares.sync, f"sending {size(sum(cost.link_bytes.values()))}"),
        (alone, f"waiting for whole layers, above all {longest}"),
        (shares.wait - alone, "waiting for each other"),
        (
            shares.compute - done.one_machine_seconds / step / n_used,
            "computing more than one machine would",
        ),
    )
    return f"{share:.0%} of the machines' time goes into {what}" if share >= 0.005 else None


def plain(done: Planned) -> Plain:
    """Return a row for JSON; times in seconds, memory in bytes."""
    p10, p50, p90 = done.best.seconds
    cost = done.best.cost
    return {
        "machines": done.n_machines,
        "used": list(done.used),
        "step_seconds": {"p10": p10, "p50": p50, "p90": p90},
        "speed_up": done.speed_up,
        "efficiency": done.speed_up / len(done.used),
        **done.shares._asdict(),
        "memory_bytes": [float(n_bytes) for n_bytes in cost.memory_bytes],
        "fits": not done.lacking,
        "offenders": list(done.lacking),
        "lower_bound_seconds": done.lower_bound,
        "in_model_gap": done.gap,
        "limit": limit(done),
        "method": done.best.method,
        "bytes": sum(cost.link_bytes.values()),
    }


def remarks(rows: Sequence[Planned], request: PlanningRequest) -> list[str]:
    """Return notes for the reader of the table, a sentence each; the last one is of the costs."""
    notes = []
    for done in rows:
        n = done.n_machines
        if idle := n - len(done.used):
            notes.append(
                f"{n} machines: {idle} left idle, because no faster plan that uses them was found"
            )
        if limited := limit(done):
            notes.append(f"{n} machines: {limited}")
        if done.lacking:
            notes.append(
                f"{n} machines: {lack(done)}; {len(done.lacking)} machines lack memory: this plan "
                "does not fit"
            )
    notes += [
        f"{layer.name} is computed whole on one machine: {layer.whole}"
        for layer in request.graph.layers
        if layer.whole
    ]
    return [*notes, costs_of(request)]


def lack(done: Planned) -> str:
    """Say which machine lacks most memory."""
    worst = max(done.lacking, key=done.lacking.__getitem__)
    needs, has = done.best.cost.memory_bytes[worst], done.cluster.machines[worst].memory
    return f"machine {worst} needs {size(needs)} and has {size(has)}"


def costs_of(request: PlanningRequest) -> str:
    """Say where the costs are from, for the table and the plan."""
    cluster, costs = request.cluster, request.costs
    text = f"Costs: {cluster.origin} figures of cluster {cluster.name!r}, no measured layer."
    if isinstance(costs, ProfiledCosts):
        layers = request.graph.computed
        text = (
            f"Costs: {'layer times' if costs.is_absolute else 'layer efficiency'} measured on this "
            f"host on {costs.profile.date[:10]} ({sum(map(costs.knows, layers))} of {len(layers)} "
            f"layers), machines of cluster {cluster.name!r} ({cluster.origin})."
        )
        if costs.slower > 1.0:
            text += (
                f" This host is now {costs.slower:.1f} times as slow as then: to measure again, "
                f"delete {costs.profile.host.path}."
            )
    return f"{text} {cluster.note}".strip()


def seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            # Three significant digits.
            digits = max(0, 2 - math.floor(math.log10(value / scale)))
            return f"{value / scale:.{digits}f} {unit}"
    return f"{value * 1e6:.0f} us"


def _range(low: float, high: float) -> str:
    # The unit once if both have the same.
    first, last = seconds(low), seconds(high)
    number, unit = first.split()
    return f"{number}-{last}" if last.endswith(f" {unit}") else f"{first}-{last}"


def size(n_bytes: float) -> str:
    if math.isinf(n_bytes):
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


# --- explanation of one layer ---


class Alternative(NamedTuple):
    """One candidate of a layer; alternatives sort by cost."""

    together: float  # seconds of both
    candidate: int
    own: float  # seconds of computing and synchronising
    transfers: float  # seconds of transfers from and to its neighbours
    label: str  # "whole", "rows 4"
    reason: str  # why it is not chosen, for people; "chosen" if the solver chose it


def check_layer(graph: LayerGraph, name: str) -> None:
    """Raise GraphError if there is no such layer, or it is an input."""
    if name not in graph.by_name or graph[name].kind == INPUT:
        raise GraphError(f"there is no layer {name!r} to explain{near(graph, name)}")


def explain(planned: Planned, name: str) -> tuple[str, list[Alternative]]:
    """Return the layer that decides for `name`, and its candidates, cheapest first.

    GraphError if there is no such layer.
    """
    check_layer(planned.best.cost.compiled.graph, name)
    solved = planned.solved
    problem, choice = solved.problem, list(solved.solution.choice)
    node, group = next(
        (index, node.group)
        for index, node in enumerate(solved.decoder.nodes)
        if any(layer.name == name for layer in node.group.members)
    )
    own = problem.costs[node]
    transfers = sum(
        (table[:, choice[other]] for other, table in problem.neighbours[node]), 0.0 * own
    )
    chosen, together = choice[node], own + transfers
    rows = []
    for index, candidate in enumerate(solved.decoder.nodes[node].candidates):
        more = float(together[index] - together[chosen])
        choice[node] = index
        reason = f"{seconds(more)} more"
        if index == chosen:
            reason = "chosen"
        elif problem.overrun(choice) > max(1.0, solved.solution.overrun) * (1 + 1e-9):
            reason = f"does not fit the memory of machine {int(problem.used(choice).argmax())}"
        elif more <= 0:
            reason = f"{seconds(-more)} less, but more elsewhere" if more else "as good"
        costs = float(own[index]), float(transfers[index])
        rows.append(Alternative(sum(costs), index, *costs, candidate.label, reason))
    return group.root.name, sorted(rows)


def show_alternatives(planned: Planned, name: str) -> Table:
    root, alternatives = explain(planned, name)
    follows = "" if root == name else f" (it follows {root})"
    table = Table(title=Text(f"{name}{follows}, {planned.n_machines} machines"))
    for column in ("split", "computing", "transfers", "together", ""):
        table.add_column(column, justify="left" if column in {"split", ""} else "right")
    for row in alternatives:
        table.add_row(
            Text(row.label),
            *map(seconds, (row.own, row.transfers, row.together)),
            row.reason,
            style="bold" if row.reason == "chosen" else "",
        )
    return table
