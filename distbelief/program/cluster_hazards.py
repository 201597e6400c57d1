"""What a cluster file says of switches and outages, for simulations only."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from distbelief.graph.layer import GraphError
from distbelief.program.cluster import Switch
from distbelief.program.cluster_values import (
    ENDS,
    Table,
    count_of,
    excerpt,
    quantity,
    table_of,
    text_of,
)
from distbelief.program.outages import Outages, OutageTrace, read_trace


N_TRACE_BYTES_MAX: Final = 1 << 26


def switches_of(groups: object) -> tuple[Switch, ...]:
    """Return what [[switches]] says.

    Raises:
        GraphError: naming the key and the mend.
    """
    if not isinstance(groups, list):
        raise GraphError("switches: begin each of them with [[switches]]")
    switches = []
    for index, entry in enumerate(groups, start=1):
        where = f"[[switches]] {index}"
        group = table_of(entry, ("machines", "bandwidth"), where)
        ends = ENDS.fullmatch(text_of(group, "machines", default=""))
        if ends is None:
            raise GraphError(
                f"{where} machines = {excerpt(group.get('machines'))}: write the "
                'first and the last of a group, like "0-15"'
            )
        bandwidth = quantity(group, "bandwidth", "rate", where)
        first, last = int(ends[1]), int(ends[2])
        switches.append(Switch(first=first, last=last, bandwidth=bandwidth))
    return tuple(switches)


def outages_of(table: Table, key: str) -> Outages | None:
    """Return what [failures] or [preemptions] says; None if nothing.

    Raises:
        GraphError: naming the key and the mend.
    """
    if key not in table:
        return None
    where = f"[{key}]"
    group = table_of(table[key], ("mean_time", "away", "group"), where)
    try:
        return Outages(
            mean_time=quantity(group, "mean_time", "time", where),
            away=quantity(group, "away", "time", where),
            group=count_of(group, "group", where),
        )
    except GraphError as error:
        text = str(error)
        raise GraphError(text if where in text else f"{where}: {text}") from None


def trace_of(table: object, directory: Path | None, *, n_machines: int) -> OutageTrace | None:
    """Return the trace that [trace] names; None if it is missing.

    Raises:
        GraphError: naming the key and the mend.
    """
    if table is None:
        return None
    file = text_of(table_of(table, ("file",), "[trace]"), "file", default="")
    if not file or directory is None:
        raise GraphError(
            f"[trace] file = {excerpt(file)}: write the name of a CSV file that lies "
            "beside this one"
        )
    path = directory / file
    try:
        with path.open("rb") as opened:
            content = opened.read(N_TRACE_BYTES_MAX + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise GraphError(f"[trace] {file} cannot be read: {why}") from error
    except ValueError as error:  # a zero byte, say
        raise GraphError(f"[trace] file = {file!r} is no path: {error}") from None
    if len(content) > N_TRACE_BYTES_MAX:
        raise GraphError(f"[trace] {file} is larger than {N_TRACE_BYTES_MAX} bytes")
    try:
        return read_trace(content.decode("utf-8-sig"), n_machines=n_machines)
    except UnicodeDecodeError as error:
        raise GraphError(f"[trace] {file} is no UTF-8 text: {error.reason}") from None
    except GraphError as error:
        raise GraphError(f"[trace] {file}: {error}") from None


def origins_of(table: object, *, figures: Iterable[str]) -> dict[str, str]:
    """Return what [origins] says of the figures of machines, and of others.

    Raises:
        GraphError: naming the key and the mend.
    """
    known = ("latency", "message_overhead", "jitter", "cores", "switches", "failures")
    keys = (*known, "preemptions", "trace", "links", *figures)
    group = table_of(table, keys, "[origins]")
    return {key: text_of(group, key, default="") for key in group}
