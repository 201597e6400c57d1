"""Clusters as TOML files, and those that come with this package.

    latency = "100 us"
    note = "the lab's old machines"

    [[machines]]                    # the fastest first
    count = 8
    flops = "100 GFLOP/s"
    memory_rate = "30 GB/s"
    bandwidth = "1 Gbit/s"
    memory = "16 GiB"               # from here on may be left out
    message_rate = "4 GB/s"
    overhead = "50 us"
    jitter = 0.1

    [links]                         # only those slower than their ends
    "0-7" = "100 Mbit/s"

Machines are counted from 0 in the order of the file. Keys are those of `Cluster` and
`Machine`, and no others: a mistake names the file, the key and what to write instead.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Final, get_args

from distbelief.errors import JobFileError
from distbelief.files import explained
from distbelief.graph.layer import GraphError
from distbelief.program.cluster import UNLIMITED, Cluster, Machine, Origin
from distbelief.units import Dimension, parse


Table = Mapping[str, object]

N_BYTES_MAX: Final = 1 << 20
N_MACHINES_MAX: Final = 10_000
_JITTER_MAX: Final = 2  # times that are often 7 times as long, or as short
_SUFFIX: Final = ".toml"
_KEYS: Final = (
    "name",
    "latency",
    "message_overhead",
    "origin",
    "note",
    "machines",
    "links",
)
_QUANTITIES: Final[Mapping[str, Dimension]] = {
    "flops": "compute",
    "memory_rate": "rate",
    "bandwidth": "rate",
    "memory": "bytes",
    "message_rate": "rate",
    "overhead": "time",
}
_DEFAULTS: Final = {
    "memory": UNLIMITED,
    "message_rate": UNLIMITED,
    "overhead": 0.0,
}
_ENDS: Final = re.compile(r"(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})")


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return a cluster that comes with this package, or one from a file.

    Args:
        name_or_path: A name of `names()`, or where a TOML file lies.

    Raises:
        GraphError: there is none, or something is wrong with the file.
        StorageError: the file cannot be read.
    """
    if isinstance(name_or_path, str) and name_or_path in names():
        file = resources.files("distbelief.program") / "clusters"
        content = (file / f"{name_or_path}{_SUFFIX}").read_bytes()
        return read_cluster(content, name=name_or_path)
    path = Path(name_or_path)
    try:
        with path.open("rb") as opened:
            content = opened.read(N_BYTES_MAX + 1)
    except FileNotFoundError:
        raise GraphError(
            f"there is no cluster '{name_or_path}': no such file, and none of that "
            f"name comes along. {_nearest(str(name_or_path), names())}"
        ) from None
    except OSError as error:
        raise explained(error, path, doing="read the cluster from") from error
    except ValueError as error:  # a zero byte, say
        raise GraphError(f"{name_or_path!r} is no path: {error}") from None
    try:
        return read_cluster(content, name=path.stem)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None


def names() -> list[str]:
    """Return the clusters that come with this package."""
    directory = resources.files("distbelief.program") / "clusters"
    return sorted(
        entry.name.removesuffix(_SUFFIX)
        for entry in directory.iterdir()
        if entry.name.endswith(_SUFFIX)
    )


def read_cluster(content: bytes, *, name: str) -> Cluster:
    """Return the cluster that a TOML document describes.

    Args:
        content: The document.
        name: What it is called unless it says so itself.

    Raises:
        GraphError: naming the key and the mend.
    """
    table = _parsed(content)
    _check_keys(table, _KEYS, "the cluster")
    groups = [
        _group(group, f"[[machines]] {index}")
        for index, group in enumerate(_groups(table), start=1)
    ]
    n_machines = sum(count for count, _ in groups)
    if n_machines > N_MACHINES_MAX:
        raise GraphError(
            f"[[machines]] count: {n_machines} in all; use at most {N_MACHINES_MAX}"
        )
    for (_, before), (_, after) in pairwise(groups):
        if after.flops > before.flops:
            raise GraphError(
                "[[machines]] flops: a group is faster than the one before it; write "
                "the fastest first, for plans for fewer machines take the first ones"
            )
    return Cluster(
        name=_text(table, "name", default=name),
        machines=tuple(machine for count, machine in groups for _ in range(count)),
        latency=_quantity(table, "latency", "time", "", default=0.0),
        message_overhead=_quantity(table, "message_overhead", "time", "", default=0.0),
        links=_links(table.get("links", {}), n_machines=n_machines),
        origin=_origin(table),
        note=_text(table, "note", default=""),
    )


def _parsed(content: bytes) -> Table:
    if len(content) > N_BYTES_MAX:
        raise GraphError(f"is larger than {N_BYTES_MAX} bytes: no file of a cluster")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise GraphError(f"is no UTF-8 text: {error.reason}") from None
    except RecursionError:
        raise GraphError("is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, and what int() says
        raise GraphError(f"is no TOML: {error}") from None


def _groups(table: Table) -> Iterable[object]:
    groups = table.get("machines")
    if groups is None or groups == []:
        raise GraphError(
            "there is no machine: write for each group of equal ones [[machines]], "
            "and below it count, flops, memory_rate, bandwidth"
        )
    if not isinstance(groups, list):
        raise GraphError("machines: begin a group of them with [[machines]]")
    return groups


def _group(group: object, where: str) -> tuple[int, Machine]:
    """Return how many machines, and what each is."""
    if not isinstance(group, dict):
        raise GraphError(f"{where} = {_excerpt(group)}: wants a table of keys")
    _check_keys(group, ("count", "jitter", *_QUANTITIES), where)
    count = group.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise GraphError(
            f"{where} count = {_excerpt(count)}: wants a whole number, at least 1"
        )
    jitter = group.get("jitter", 0.0)
    if not isinstance(jitter, int | float) or not 0 <= jitter <= _JITTER_MAX:
        raise GraphError(
            f"{where} jitter = {_excerpt(jitter)}: wants a number from 0 to "
            f"{_JITTER_MAX}"
        )
    figures = {
        key: _quantity(group, key, dimension, where, default=_DEFAULTS.get(key))
        for key, dimension in _QUANTITIES.items()
    }
    try:
        return count, Machine(jitter=jitter, **figures)
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from None


def _links(links: object, *, n_machines: int) -> dict[str, float]:
    if not isinstance(links, dict):
        raise GraphError(
            f"links = {_excerpt(links)}: wants a table; begin it with [links]"
        )
    rates = {}
    for ends in links:
        match = _ENDS.fullmatch(ends)
        if match is None or not int(match[1]) < int(match[2]) < n_machines:
            raise GraphError(
                f"[links] has no key {_excerpt(ends)}: write two machines, the lower "
                f'one first, like "0-1"; there are {n_machines}, counted from 0'
            )
        rates[ends] = _quantity(links, ends, "rate", "[links]")
    return rates


def _quantity(
    table: Table,
    key: str,
    dimension: Dimension,
    where: str,
    *,
    default: float | None = None,
) -> float:
    if key not in table:
        if default is not None:
            return default
        raise GraphError(f"{where} lacks the key '{key}'")
    try:
        return parse(table[key], dimension)
    except JobFileError as error:
        raise GraphError(f"{where} {key} = {error}".lstrip()) from None


def _text(table: Table, key: str, *, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise GraphError(f'{key} = {_excerpt(value)}: wants text in quotes: "..."')
    return value


def _origin(table: Table) -> Origin:
    known: tuple[Origin, ...] = get_args(Origin)
    value = table.get("origin", "assumed")
    for origin in known:
        if value == origin:
            return origin
    raise GraphError(
        f"origin = {_excerpt(value)}: unknown. It knows {', '.join(known)}."
    )


def _check_keys(table: Table, known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise GraphError(f"{where} has no key '{key}'. {_nearest(key, known)}")


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean '{near[0]}'?" if near else f"It knows {', '.join(known)}."


def _excerpt(value: object, *, n_max: int = 60) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= n_max else text[: n_max - 3] + "..."
