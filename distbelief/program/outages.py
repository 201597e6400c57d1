"""Machines that go away: how often, for how long, or exactly when.

Two processes may run side by side, *failures* (a machine breaks) and *preemptions* (a
spot machine is taken back, perhaps several at once). A *trace* lists what happened to
real machines, and how long they were watched: beyond that it says nothing.

    seconds,machine,away          <- a header, or none
    120.5,3,300                   machine 3 is gone from 120.5 s to 420.5 s
    end,86400                     watched for a day; the last line
"""

import math
from typing import Final, final

import msgspec

from distbelief.graph.layer import GraphError


N_OUTAGES_MAX: Final = 1_000_000


@final
class Outages(msgspec.Struct, frozen=True, kw_only=True):
    """A process of outages; times between them are exponential.

    Attributes:
        mean_time: Seconds between two outages of one machine, on average.
        away: Seconds until a machine is back.
        group: Machines that go together: the first so many, the next so many, ...
    """

    mean_time: float
    away: float
    group: int = 1

    def __post_init__(self) -> None:
        for name in ("mean_time", "away"):
            if not 0 < getattr(self, name) < math.inf:
                raise GraphError(f"{name} of outages is {getattr(self, name)}; use a time above 0")
        if self.group < 1:
            raise GraphError(f"group of outages is {self.group}; use 1 or more")


@final
class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """One machine was gone."""

    at: float
    machine: int
    away: float


@final
class OutageTrace(msgspec.Struct, frozen=True, kw_only=True):
    """All outages of some machines within a time.

    Attributes:
        outages: In order of time.
        covers: Seconds that were watched.
    """

    outages: tuple[Lost, ...]
    covers: float


def read_trace(text: str, *, n_machines: int) -> OutageTrace:
    """Return the trace that a CSV text holds.

    Raises:
        GraphError: naming the line and what it should be.
    """
    lines = [
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if lines and lines[0][1] == ["seconds", "machine", "away"]:
        lines = lines[1:]
    if not lines or lines[-1][1][0] != "end":
        raise GraphError(
            "a trace ends without the line 'end,SECONDS': write how long the machines "
            "were watched, or nobody knows whether more happened"
        )
    if len(lines) > N_OUTAGES_MAX:
        raise GraphError(f"a trace has {len(lines)} lines; use {N_OUTAGES_MAX} at most")
    *rows, (number, last) = lines
    covers = _seconds(last[1] if len(last) == 2 else "", number)
    outages = [_row(cells, number, n_machines) for number, cells in rows]
    outages.sort(key=lambda lost: (lost.at, lost.machine))
    if outages and outages[-1].at > covers:
        raise GraphError(
            f"a trace ends early: an outage at {outages[-1].at} s, but 'end' says that "
            f"the machines were watched for {covers} s only: mend the last line"
        )
    return OutageTrace(outages=tuple(outages), covers=covers)


def _row(cells: list[str], number: int, n_machines: int) -> Lost:
    if len(cells) != 3:
        raise GraphError(
            f"line {number} of a trace has {len(cells)} cells: write seconds,machine,away"
        )
    at, away = _seconds(cells[0], number), _seconds(cells[2], number)
    if not cells[1].isdecimal() or not int(cells[1]) < n_machines:
        raise GraphError(
            f"line {number} of a trace names machine {cells[1]!r:.40}; there are "
            f"{n_machines}, counted from 0"
        )
    return Lost(at=at, machine=int(cells[1]), away=away)


def _seconds(cell: str, number: int) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise GraphError(
            f"line {number} of a trace has {cell!r:.40} where seconds should be: write "
            "a number of 0 or more, without a unit"
        )
    return seconds
