"""Reads cluster files (TOML), and the clusters that come with this package.

    latency = "100 us"

    [[machines]]                    # the fastest first
    count = 8
    flops = "100 GFLOP/s"
    memory_rate = "30 GB/s"
    bandwidth = "1 Gbit/s"

Machines are counted from 0 in the order of the file. `_KEYS` lists the other keys.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Final

from distbelief.core.formatting import nearest
from distbelief.core.units import Dimension, parse
from distbelief.errors import JobFileError
from distbelief.graph.graph import GraphError
from distbelief.program.cluster import (
    UNLIMITED,
    Cluster,
    Machine,
    Origin,
    Outages,
    OutageTrace,
    Switch,
    read_trace,
)


# --- values ---

Table = Mapping[str, object]

# Two machines, or the first and the last of a group: "0-15".
ENDS: Final = re.compile(r"(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})")


def quantity(
    table: Table, key: str, dimension: Dimension, where: str, *, default: float | None = None
) -> float:
    """Return a quantity of this dimension, in SI units; the default if the key is missing.

    Raises:
        GraphError: the key is missing without a default, or its value is wrong.
    """
    if key not in table:
        if default is not None:
            return default
        raise GraphError(f"{where} lacks the key '{key}': add it")
    try:
        return parse(table[key], dimension)
    except JobFileError as error:
        raise GraphError(f"{where} {key} = {error}".lstrip()) from None


def text_of(table: Table, key: str, *, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise GraphError(f'{key} = {excerpt(value)}: write text in quotes, "..."')
    return value


def count_of(table: Table, key: str, where: str) -> int:
    value = table.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GraphError(f"{where} {key} = {excerpt(value)}: write a whole number, at least 1")
    return value


def table_of(value: object, keys: Iterable[str], where: str) -> Table:
    """Return `value` if it is a table with these keys only; raise GraphError if not."""
    if not isinstance(value, dict):
        raise GraphError(f"{where} = {excerpt(value)}: write a table of keys")
    check_keys(value, keys, where)
    return value


def check_keys(table: Table, known: Iterable[str], where: str) -> None:
    """Raise GraphError for a key that is not known, with the nearest known key."""
    for key in table:
        if key not in known:
            raise GraphError(f"{where} has no key '{key}'. {nearest(key, known)}")


def excerpt(value: object, *, n_max: int = 60) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= n_max else text[: n_max - 3] + "..."


# --- switches and outages, used by simulations only ---

N_TRACE_BYTES_MAX: Final = 1 << 26


def switches_of(groups: object) -> tuple[Switch, ...]:
    """Return the switches in [[switches]]; raise GraphError for a wrong value."""
    if not isinstance(groups, list):
        raise GraphError("switches: begin each switch with [[switches]]")
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
    """Return the outages in [failures] or [preemptions]; None if the table is missing."""
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
        text = str(error)  # `quantity` has named the table; `Outages` itself has not
        raise GraphError(text if where in text else f"{where}: {text}") from None


def trace_of(table: object, directory: Path | None, *, n_machines: int) -> OutageTrace | None:
    """Return the trace in the file that [trace] names; None if the table is missing."""
    if table is None:
        return None
    file = text_of(table_of(table, ("file",), "[trace]"), "file", default="")
    if not file or directory is None:
        raise GraphError(
            f"[trace] file = {excerpt(file)}: write the name of a CSV file in the same directory"
        )
    try:
        content = _content(directory / file, N_TRACE_BYTES_MAX)
    except OSError as error:
        raise GraphError(f"[trace] {file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte, for example
        raise GraphError(f"[trace] file = {file!r} is not a path: {error}") from None
    if len(content) > N_TRACE_BYTES_MAX:
        raise GraphError(f"[trace] {file} is larger than {N_TRACE_BYTES_MAX} bytes")
    try:
        return read_trace(content.decode("utf-8-sig"), n_machines=n_machines)
    except UnicodeDecodeError as error:
        raise GraphError(f"[trace] {file} is not UTF-8 text: {error.reason}") from None
    except GraphError as error:
        raise GraphError(f"[trace] {file}: {error}") from None


def _content(path: Path, n_bytes_max: int) -> bytes:
    # One byte more than allowed is requested: a file that grows cannot exhaust memory.
    with path.open("rb") as opened:
        return opened.read(n_bytes_max + 1)


def origins_of(table: object, *, figures: Iterable[str]) -> dict[str, str]:
    known = ("latency", "message_overhead", "jitter", "cores", "switches", "failures")
    keys = (*known, "preemptions", "trace", "links", *figures)
    group = table_of(table, keys, "[origins]")
    return {key: text_of(group, key, default="") for key in group}


N_BYTES_MAX: Final = 1 << 20
N_MACHINES_MAX: Final = 10_000
_JITTER_MAX: Final = 2  # compute times often 7 times as long, or as short
_SUFFIX: Final = ".toml"
# An unknown key is an error that names the nearest one.
_KEYS: Final = (
    "name",
    "latency",
    "message_overhead",
    "origin",  # "measured" or "assumed"
    "note",  # for the reader of a report
    "machines",  # also count, jitter, cores
    "links",  # "0-7" = "100 Mbit/s"; only links slower than their ends
    "switches",  # machines = "0-3", bandwidth = "2 Gbit/s"
    "failures",  # mean_time = "30 d", away = "10 min", group = 4; of each machine
    "preemptions",  # the same keys
    "trace",  # file = "outages.csv", in the same directory
    "origins",  # flops = "measured: a product of matrices"; where `origin` does not fit
)
_QUANTITIES: Final[Mapping[str, Dimension]] = {
    "flops": "compute",
    "memory_rate": "rate",
    "bandwidth": "rate",
    "memory": "bytes",
    "message_rate": "rate",
    "overhead": "time",
    "handling": "time",
}
_DEFAULTS: Final = {
    "memory": UNLIMITED,
    "message_rate": UNLIMITED,
    "overhead": 0.0,
    "handling": 0.0,
}


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return a cluster that comes with this package, or one from a file.

    Raises:
        GraphError: neither exists, or the file has a mistake.
    """
    if isinstance(name_or_path, str) and name_or_path in names():
        file = resources.files("distbelief.program") / "clusters"
        content = (file / f"{name_or_path}{_SUFFIX}").read_bytes()
        return read_cluster(content, name=name_or_path)
    path = Path(name_or_path)
    unknown = GraphError(
        f"there is no cluster '{name_or_path}': neither a file nor a cluster of this package. "
        f"{nearest(str(name_or_path), names())}"
    )
    if not str(name_or_path):  # as a path it would be the current directory
        raise unknown
    try:
        content = _content(path, N_BYTES_MAX)
    except FileNotFoundError:
        raise unknown from None
    except OSError as error:
        raise GraphError(f"{path}: the cluster cannot be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte, for example
        raise GraphError(f"{name_or_path!r} is not a path: {error}") from None
    try:
        return read_cluster(content, name=path.stem, directory=path.parent)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None


def names() -> list[str]:
    directory = resources.files("distbelief.program") / "clusters"
    return sorted(
        entry.name.removesuffix(_SUFFIX)
        for entry in directory.iterdir()
        if entry.name.endswith(_SUFFIX)
    )


def read_cluster(content: bytes, *, name: str, directory: Path | None = None) -> Cluster:
    """Return the cluster in a TOML document.

    A trace file lies in `directory`; without one, a trace is an error.

    Raises:
        GraphError: a mistake; names the key and the fix.
    """
    table = _parsed(content)
    check_keys(table, _KEYS, "the cluster")
    groups = [
        _group(group, f"[[machines]] {index}")
        for index, group in enumerate(_groups(table), start=1)
    ]
    n_machines = sum(count for count, _ in groups)
    if n_machines > N_MACHINES_MAX:
        raise GraphError(f"[[machines]] count: {n_machines} in all; use at most {N_MACHINES_MAX}")
    for (_, before), (_, after) in pairwise(groups):
        if after.flops > before.flops:
            raise GraphError(
                "[[machines]] flops: a group is faster than the one before it: write "
                "the fastest first, because plans use the first machines"
            )
    return Cluster(
        name=text_of(table, "name", default=name),
        machines=tuple(machine for count, machine in groups for _ in range(count)),
        latency=quantity(table, "latency", "time", "", default=0.0),
        message_overhead=quantity(table, "message_overhead", "time", "", default=0.0),
        links=_links(table.get("links", {}), n_machines=n_machines),
        origin=_origin(table),
        note=text_of(table, "note", default=""),
        switches=switches_of(table.get("switches", [])),
        failures=outages_of(table, "failures"),
        preemptions=outages_of(table, "preemptions"),
        trace=trace_of(table.get("trace"), directory, n_machines=n_machines),
        origins=origins_of(table.get("origins", {}), figures=_QUANTITIES),
    )


def _parsed(content: bytes) -> Table:
    if len(content) > N_BYTES_MAX:
        raise GraphError(f"is larger than {N_BYTES_MAX} bytes: name a cluster file")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise GraphError(f"is not UTF-8 text: {error.reason}") from None
    except RecursionError:
        raise GraphError("is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or int() of too many digits
        raise GraphError(f"is not TOML: {error}") from None


def _groups(table: Table) -> Iterable[object]:
    groups = table.get("machines")
    if groups is None or groups == []:
        raise GraphError(
            "there is no machine: write [[machines]] for each group of equal ones, "
            "and below it count, flops, memory_rate, bandwidth"
        )
    if not isinstance(groups, list):
        raise GraphError("machines: begin each group of machines with [[machines]]")
    return groups


def _group(group: object, where: str) -> tuple[int, Machine]:
    group = table_of(group, ("count", "jitter", "cores", *_QUANTITIES), where)
    count, cores = count_of(group, "count", where), count_of(group, "cores", where)
    jitter = group.get("jitter", 0.0)
    # `True` is an int too.
    if not isinstance(jitter, int | float) or jitter is True or not 0 <= jitter <= _JITTER_MAX:
        raise GraphError(
            f"{where} jitter = {excerpt(jitter)}: write a number from 0 to {_JITTER_MAX}"
        )
    figures = {
        key: quantity(group, key, dimension, where, default=_DEFAULTS.get(key))
        for key, dimension in _QUANTITIES.items()
    }
    try:
        return count, Machine(jitter=jitter, cores=cores, **figures)
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from None


def _links(links: object, *, n_machines: int) -> dict[str, float]:
    if not isinstance(links, dict):
        raise GraphError(f"links = {excerpt(links)}: write a table that begins with [links]")
    rates = {}
    for ends in links:
        match = ENDS.fullmatch(ends)
        if match is None or not int(match[1]) < int(match[2]) < n_machines:
            raise GraphError(
                f"[links] has no key {excerpt(ends)}: write two machines from 0 to "
                f'{n_machines - 1}, the lower one first, like "0-1"'
            )
        rates[ends] = quantity(links, ends, "rate", "[links]")
    return rates


def _origin(table: Table) -> Origin:
    value = table.get("origin", "assumed")
    if value == "assumed" or value == "measured":  # noqa: PLR1714 -- mypy narrows these
        return value
    raise GraphError(f"origin = {excerpt(value)} is unknown: use measured or assumed")
