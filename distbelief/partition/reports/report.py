"""The table of a planning, and the same as JSON."""

import math
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from distbelief.partition.forecast import Forecast


Plain = dict[str, object]


def table(forecasts: Sequence[Forecast], *, title: str) -> Table:
    """Return one row per machine count; rows that do not fit are red.

    Columns that are not of the table itself: `bound` is what no plan beats, `gap` how
    far the solver's model lets the plan be from the best of its candidates.
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
    for forecast in forecasts:
        shares = forecast.shares
        parts = (shares.compute, shares.communication, shares.sync, shares.wait)
        p10, p50, p90 = forecast.seconds
        shown.add_row(
            str(forecast.n_machines),
            str(len(forecast.used)),
            seconds(p50),
            _range(p10, p90),
            f"{forecast.speed_up:.2f}x",
            f"{forecast.efficiency:.0%}",
            " ".join(f"{abs(100 * share):.0f}" for share in parts) + " %",
            size(max(forecast.memory)) + ("" if forecast.fits else "!"),
            seconds(forecast.lower_bound),
            "-" if forecast.gap is None else f"{forecast.gap:.1%}",
            forecast.method.replace("elimination", "exact").replace(" + ", "+"),
            style="" if forecast.fits else "red",
        )
    return shown


def plain(forecast: Forecast) -> Plain:
    """Return a row as JSON has it; times in seconds, memory in bytes."""
    p10, p50, p90 = forecast.seconds
    shares = forecast.shares
    return {
        "machines": forecast.n_machines,
        "used": list(forecast.used),
        "step_seconds": {"p10": p10, "p50": p50, "p90": p90},
        "speed_up": forecast.speed_up,
        "efficiency": forecast.efficiency,
        "compute": shares.compute,
        "communication": shares.communication,
        "sync": shares.sync,
        "wait": shares.wait,
        "memory_bytes": list(forecast.memory),
        "fits": forecast.fits,
        "offenders": list(forecast.offenders),
        "lower_bound_seconds": forecast.lower_bound,
        "in_model_gap": forecast.gap,
        "method": forecast.method,
        "bytes": sum(forecast.link_bytes.values()),
    }


def remarks(
    forecasts: Sequence[Forecast],
    *,
    caps: Sequence[float],
    whole: Sequence[tuple[str, str]],
    origin: str,
) -> list[str]:
    """Return what a reader should know beside the table, a sentence each.

    Args:
        forecasts: The rows.
        caps: Bytes that each machine has.
        whole: Layers that are computed whole on one machine, and why.
        origin: Where the costs are from.
    """
    said = []
    for forecast in forecasts:
        idle = forecast.n_machines - len(forecast.used)
        if idle:
            said.append(
                f"{forecast.n_machines} machines: {idle} left idle, for nothing was "
                "found that uses them and is faster"
            )
        if not forecast.fits:
            worst = max(forecast.offenders, key=lambda m: forecast.memory[m] - caps[m])
            said.append(
                f"{forecast.n_machines} machines: {size(forecast.memory[worst])} do "
                f"not fit machine {worst} ({size(caps[worst])}); "
                f"{len(forecast.offenders)} machines lack memory: this row is a what-if"
            )
    said += [f"{name} is computed whole on one machine: {why}" for name, why in whole]
    return [*said, origin]


def seconds(value: float) -> str:
    """Write a time for people."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            digits = max(0, 2 - math.floor(math.log10(value / scale)))
            return f"{value / scale:.{digits}f} {unit}"
    return f"{value * 1e6:.0f} us"


def _range(low: float, high: float) -> str:
    """Write two times, the unit once if it is the same."""
    first, last = seconds(low), seconds(high)
    number, unit = first.split()
    return f"{number}-{last}" if last.endswith(f" {unit}") else f"{first}-{last}"


def size(n_bytes: float) -> str:
    """Write a number of bytes for people."""
    if math.isinf(n_bytes):
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"
