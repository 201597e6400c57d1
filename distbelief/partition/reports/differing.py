"""Where two plans differ, layer by layer."""

from rich.table import Table
from rich.text import Text

from distbelief.program.plan import Plan


def differences(one: Plan, other: Plan) -> list[tuple[str, str, str]]:
    """Return what is not the same: what, in the first plan, in the second."""
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


def show(one: Plan, other: Plan, *, names: tuple[str, str]) -> Table:
    """Return the differences as a table."""
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
    return "not there" if placement is None else str(placement)
