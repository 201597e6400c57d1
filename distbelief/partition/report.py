"""Reports of the planner: the table, JSON, remarks, explanations, and differences of plans.

Explanations show the costs of the solver's model: computing, and transfers from and to neighbours
as placed in its choice. A candidate that looks cheaper than the chosen one would make a neighbour
more expensive, or lost in the simulation.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.partition.cost_model import ProfiledCosts
from distbelief.partition.planner import Planned
from distbelief.partition.profiling.layer_timer import is_too_large
from distbelief.partition.search import PlanEstimate, PlanningRequest
from distbelief.program.cluster import Cluster
from distbelief.program.plan import Plan


# --- differences of two plans ---


def differences(one: Plan, other: Plan) -> list[tuple[str, str, str]]:
    """Return the differences: what, in the first plan, in the second."""
    found = [
        (word, str(first), str(second))
        for word, first, second in (
            ("model", one.graph, other.graph),
            ("batch", one.batch, other.batch),
            ("loss", one.loss, other.loss),
            ("cluster", one.cluster.name, other.cluster.name),
            ("machines", one.cluster.n_machines, other.cluster.n_machines),
            ("step", _step(one), _step(other)),
        )
        if first != second
    ]
    for name in dict.fromkeys([*one.placements, *other.placements]):
        first, second = one.placements.get(name), other.placements.get(name)
        if first != second:
            found.append((name, _placed(first), _placed(second)))
    return found


def show_differences(one: Plan, other: Plan, *, names: tuple[str, str]) -> Table:
    table = Table(title="what differs" if one != other else "the plans are equal")
    for column in ("", *names):
        table.add_column(Text(column))
    for row in differences(one, other):
        table.add_row(*map(Text, row))
    return table


def _step(plan: Plan) -> str:
    if plan.predicted is None:
        return "unknown"
    return f"{1000 * plan.predicted.step_seconds:.3g} ms"


def _placed(placement: object) -> str:
    return "absent" if placement is None else str(placement)


# --- origin of the costs ---

LOAD_MAX: Final = 1.5  # programs per processor; above it measurements are unreliable


def origin(request: PlanningRequest) -> str:
    """Return where the costs are from, in a sentence for the table and the plan."""
    cluster, costs = request.cluster, request.costs
    if isinstance(costs, ProfiledCosts):
        text = f"{_profiled(costs, cluster)}{_left(request, costs)}."
        if costs.profile.replaced:
            text += (
                " It replaced a profile from when this host was "
                f"{costs.profile.replaced:.1f} times as slow."
            )
        if costs.slower > 1.0:
            text += (
                f" This host is now {costs.slower:.1f} times as slow as then, "
                "perhaps because of other programs: to measure again, delete "
                f"{costs.profile.host.path}."
            )
        if costs.profile.load > LOAD_MAX:
            text += (
                f" Other programs used this host during measurement ({costs.profile.load:.1f} "
                "programs per processor), so times may be too long: to measure again, delete "
                f"{costs.profile.host.path}."
            )
    else:
        text = f"Costs: {cluster.origin} figures of cluster {cluster.name!r}, no measured layer."
    return f"{text} {cluster.note}".strip()


def _profiled(costs: ProfiledCosts, cluster: Cluster) -> str:
    profile = costs.profile
    host = profile.host
    threads = "thread" if host.n_threads == 1 else "threads"
    what = "layer times" if costs.is_absolute else "layer efficiency"
    machines = (
        "machines like it" if costs.is_absolute else f"machines from cluster {cluster.name!r}"
    )
    return (
        f"Costs: {what} from profile of {profile.date[:10]} on this host "
        f"({host.processor}, {host.n_threads} {threads}; measured), {machines} "
        f"({cluster.origin})"
    )


def _left(request: PlanningRequest, costs: ProfiledCosts) -> str:
    # How many layers have costs by arithmetic, and why.
    layers = [layer for layer in request.graph.layers if layer.kind != INPUT]
    unknown = [layer for layer in layers if not costs.knows(layer)]
    if not unknown:
        return ""
    n_large = sum(is_too_large(layer, batch=request.batch) for layer in unknown)
    reasons = [
        f"{count} {why}"
        for count, why in (
            (n_large, "too large to be measured here"),
            (len(unknown) - n_large, "not measured"),
        )
        if count
    ]
    return f"; {len(unknown)} of {len(layers)} layers by arithmetic: " + ", ".join(reasons)


# --- table and JSON ---

Plain = dict[str, object]


def table(estimates: Sequence[PlanEstimate], *, title: str) -> Table:
    """Return one row per number of machines; rows that do not fit are red.

    `bound` is a lower bound for every plan; `gap` is how far the plan may be from the best of the
    candidates, in the solver's model.
    """
    shown = Table(title=Text(title), box=SIMPLE, pad_edge=False, title_justify="left")
    for column in (
        "machines",
        "used",
        "step p50",
        "p10-p90",
        "speed-up",
        "eff.",
        "comp/comms/sync/wait",
        "memory",
        "bound",
        "gap",
        "by",
    ):
        left = column == "by"
        shown.add_column(column, justify="left" if left else "right", no_wrap=True)
    for estimate in estimates:
        shares = estimate.shares
        parts = (shares.compute, shares.communication, shares.sync, shares.wait)
        p10, p50, p90 = estimate.seconds
        shown.add_row(
            str(estimate.n_machines),
            str(len(estimate.used)),
            seconds(p50),
            _range(p10, p90),
            f"{estimate.speed_up:.2f}x",
            f"{estimate.efficiency:.0%}",
            " ".join(f"{abs(100 * share):.0f}" for share in parts) + " %",
            size(max(estimate.memory)) + ("" if estimate.fits else "!"),
            seconds(estimate.lower_bound),
            "-" if estimate.gap is None else f"{estimate.gap:.1%}",
            estimate.method.replace("elimination", "exact").replace(" + ", "+"),
            style="" if estimate.fits else "red",
        )
    return shown


def plain(estimate: PlanEstimate) -> Plain:
    """Return a row for JSON; times in seconds, memory in bytes."""
    p10, p50, p90 = estimate.seconds
    shares = estimate.shares
    return {
        "machines": estimate.n_machines,
        "used": list(estimate.used),
        "step_seconds": {"p10": p10, "p50": p50, "p90": p90},
        "speed_up": estimate.speed_up,
        "efficiency": estimate.efficiency,
        "compute": shares.compute,
        "communication": shares.communication,
        "sync": shares.sync,
        "wait": shares.wait,
        "memory_bytes": list(estimate.memory),
        "fits": estimate.fits,
        "offenders": list(estimate.offenders),
        "lower_bound_seconds": estimate.lower_bound,
        "in_model_gap": estimate.gap,
        "method": estimate.method,
        "bytes": sum(estimate.link_bytes.values()),
    }


def remarks(
    estimates: Sequence[PlanEstimate],
    *,
    caps: Sequence[float],
    whole: Sequence[tuple[str, str]],
    origin: str,
) -> list[str]:
    """Return notes for the reader of the table, a sentence each.

    Args:
        estimates: The rows.
        caps: Bytes that each machine has.
        whole: Layers computed whole on one machine, and why.
        origin: Where the costs are from.
    """
    notes = []
    for estimate in estimates:
        idle = estimate.n_machines - len(estimate.used)
        if idle:
            notes.append(
                f"{estimate.n_machines} machines: {idle} left idle, because no faster plan "
                "that uses them was found"
            )
        if not estimate.fits:
            worst = max(estimate.offenders, key=lambda m: estimate.memory[m] - caps[m])
            notes.append(
                f"{estimate.n_machines} machines: machine {worst} needs "
                f"{size(estimate.memory[worst])} and has {size(caps[worst])}; "
                f"{len(estimate.offenders)} machines lack memory: this plan does not fit"
            )
    notes += [f"{name} is computed whole on one machine: {why}" for name, why in whole]
    return [*notes, origin]


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

_N_NAMED: Final = 20  # layers in a message


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One candidate of a layer."""

    label: str  # "whole", "rows 4"
    own: float  # seconds of computing and synchronising
    transfers: float  # seconds of transfers from and to its neighbours
    chosen: bool  # by the solver
    reason: str  # why not, for people


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
            reason=_reason(planned, node, index, cost - total),
        )
        for cost, index, own, transfers, label in sorted(rows)
    ]
    return planned.decoder.nodes[node].group.root.name, alternatives


def show_alternatives(planned: Planned, name: str) -> Table:
    root, alternatives = explain(planned, name)
    follows = "" if root == name else f" (it follows {root})"
    n_machines = planned.estimate.n_machines
    table = Table(title=Text(f"{name}{follows}, {n_machines} machines"))
    for column in ("split", "computing", "transfers", "together", ""):
        table.add_column(column, justify="left" if column in {"split", ""} else "right")
    for row in alternatives:
        table.add_row(
            Text(row.label),
            seconds(row.own),
            seconds(row.transfers),
            seconds(row.own + row.transfers),
            row.reason,
            style="bold" if row.chosen else "",
        )
    return table


def check(graph: LayerGraph, name: str) -> None:
    """Raise GraphError if there is no such layer, or it is an input."""
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
        f"there is no layer {name!r} to explain: use {', '.join(known)}, or a layer that "
        "follows one of them"
    )


def _reason(planned: Planned, node: int, index: int, more: float) -> str:
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
    return f"{seconds(-more)} less, but more elsewhere"
