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
    cores = 8                       # among which flops are divided
    handling = "60 us"              # what a message takes of a core at each end

    [links]                         # only those slower than their ends
    "0-7" = "100 Mbit/s"

    [[switches]]                    # what enters or leaves the group shares this
    machines = "0-3"
    bandwidth = "2 Gbit/s"

    [failures]                      # and [preemptions]: of each machine
    mean_time = "30 d"
    away = "10 min"
    group = 4                       # machines that go together; 1 if left out

    [trace]                         # or exactly when; see `outages`
    file = "outages.csv"            # beside this one

    [origins]                       # of single figures, where `origin` does not fit
    flops = "measured: a product of 1024 x 1024 matrices"

Machines are counted from 0 in the order of the file. Keys are those of `Cluster` and
`Machine`, and no others: a mistake names the file, the key and what to write instead.
"""

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Final, get_args

from distbelief.graph.layer import GraphError
from distbelief.program.cluster import UNLIMITED, Cluster, Machine, Origin
from distbelief.program.cluster_hazards import origins_of, outages_of, switches_of, trace_of
from distbelief.program.cluster_values import (
    ENDS,
    Table,
    check_keys,
    count_of,
    excerpt,
    quantity,
    text_of,
)
from distbelief.spelling import nearest
from distbelief.units import Dimension


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
    "switches",
    "failures",
    "preemptions",
    "trace",
    "origins",
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

    Args:
        name_or_path: A name of `names()`, or where a TOML file lies.

    Raises:
        GraphError: there is none, or something is wrong with the file.
    """
    if isinstance(name_or_path, str) and name_or_path in names():
        file = resources.files("distbelief.program") / "clusters"
        content = (file / f"{name_or_path}{_SUFFIX}").read_bytes()
        return read_cluster(content, name=name_or_path)
    path = Path(name_or_path)
    if not str(name_or_path):  # as a path it would be the present directory
        raise _unknown(name_or_path)
    try:
        with path.open("rb") as opened:
            content = opened.read(N_BYTES_MAX + 1)
    except FileNotFoundError:
        raise _unknown(name_or_path) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise GraphError(f"{path}: the cluster cannot be read: {why}") from error
    except ValueError as error:  # a zero byte, say
        raise GraphError(f"{name_or_path!r} is no path: {error}") from None
    try:
        return read_cluster(content, name=path.stem, directory=path.parent)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None


def _unknown(name: str | Path) -> GraphError:
    return GraphError(
        f"there is no cluster '{name}': no such file, and none of that name comes "
        f"along. {nearest(str(name), names())}"
    )


def names() -> list[str]:
    """Return the clusters that come with this package."""
    directory = resources.files("distbelief.program") / "clusters"
    return sorted(
        entry.name.removesuffix(_SUFFIX)
        for entry in directory.iterdir()
        if entry.name.endswith(_SUFFIX)
    )


def read_cluster(content: bytes, *, name: str, directory: Path | None = None) -> Cluster:
    """Return the cluster that a TOML document describes.

    Args:
        content: The document.
        name: What it is called unless it says so itself.
        directory: Where files lie that it names; None: it may name none.

    Raises:
        GraphError: naming the key and the mend.
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
                "[[machines]] flops: a group is faster than the one before it; write "
                "the fastest first, for plans for fewer machines take the first ones"
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
        raise GraphError(f"{where} = {excerpt(group)}: wants a table of keys")
    check_keys(group, ("count", "jitter", "cores", *_QUANTITIES), where)
    count, cores = count_of(group, "count", where), count_of(group, "cores", where)
    jitter = group.get("jitter", 0.0)
    is_number = isinstance(jitter, int | float) and not isinstance(jitter, bool)
    if not is_number or not 0 <= jitter <= _JITTER_MAX:
        raise GraphError(
            f"{where} jitter = {excerpt(jitter)}: wants a number from 0 to {_JITTER_MAX}"
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
        raise GraphError(f"links = {excerpt(links)}: wants a table; begin it with [links]")
    rates = {}
    for ends in links:
        match = ENDS.fullmatch(ends)
        if match is None or not int(match[1]) < int(match[2]) < n_machines:
            raise GraphError(
                f"[links] has no key {excerpt(ends)}: write two machines, the lower "
                f'one first, like "0-1"; there are {n_machines}, counted from 0'
            )
        rates[ends] = quantity(links, ends, "rate", "[links]")
    return rates


def _origin(table: Table) -> Origin:
    known: tuple[Origin, ...] = get_args(Origin)
    value = table.get("origin", "assumed")
    for origin in known:
        if value == origin:
            return origin
    raise GraphError(f"origin = {excerpt(value)}: unknown. It knows {', '.join(known)}.")
