"""Reads cluster files (TOML), and the clusters that come with this package.

    latency = "100 us"

    [[machines]]                    # the fastest first
    count = 8
    flops = "100 GFLOP/s"
    memory_rate = "30 GB/s"
    bandwidth = "1 Gbit/s"

Machines are counted from 0 in the order of the file. `_File` and `Machine` list the other keys.
"""

import errno
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Final, cast, final, get_args

import msgspec

from distbelief.config import tables
from distbelief.config.toml import Table, excerpt
from distbelief.core import units
from distbelief.core.errors import JobFileError
from distbelief.core.formatting import nearest
from distbelief.graph.graph import GraphError
from distbelief.plans import cluster as spec


N_BYTES_MAX: Final = 1 << 20
N_TRACE_BYTES_MAX: Final = 1 << 26
N_MACHINES_MAX: Final = 20_000

_SUFFIX: Final = ".toml"
# Two machines, or the first and the last of a group: "0-15".
_ENDS: Final = re.compile(r"(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,5})")
_REGION: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")


@final
class _File(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    latency: units.Time = 0.0
    message_overhead: units.Time = 0.0
    origin: str = "assumed"
    note: str = ""  # for the reader of a report
    machines: tuple[object, ...] = ()
    links: Mapping[str, object] = {}  # "0-7" = "100 Mbit/s"; only links slower than their ends
    # "0-7" or "eu-us" = "80 ms": machines, or regions of [[machines]], perhaps one with itself
    latencies: Mapping[str, object] = {}
    switches: tuple[object, ...] = ()
    failures: object = None  # mean_time = "30 d", away = "10 min", group = 4; of each machine
    preemptions: object = None  # the same keys
    trace: object = None  # file = "outages.csv", in the same directory


@final
class _Group(spec.Machine, frozen=True, kw_only=True):
    count: spec.AtLeastOne = 1  # equal machines


@final
class _Switch(msgspec.Struct, frozen=True, kw_only=True):
    machines: str  # "0-3"
    bandwidth: spec.PositiveRate


@final
class _Trace(msgspec.Struct, frozen=True):
    file: str


def load_cluster(name_or_path: str | Path) -> spec.Cluster:
    """Return a cluster of this package, or one from a file; GraphError if it has a mistake."""
    if isinstance(name_or_path, str) and name_or_path in names():
        file = resources.files("distbelief.plans") / "clusters"
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
    try:
        return read_cluster(content, name=path.stem, directory=path.parent)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None


def names() -> list[str]:
    directory = resources.files("distbelief.plans") / "clusters"
    return sorted(
        entry.name.removesuffix(_SUFFIX)
        for entry in directory.iterdir()
        if entry.name.endswith(_SUFFIX)
    )


def read_cluster(content: bytes, *, name: str, directory: Path | None = None) -> spec.Cluster:
    """Return the cluster in this TOML (a trace file lies in `directory`), or raise GraphError."""
    try:
        return _cluster(tables.decode(_parsed(content), _File, path=()), name, directory)
    except tables.TableError as error:  # its words for places are those of a job file
        text = re.sub(r"\[(machines|switches)\.(\d+)\]", r"[[\1]] \2", error.text)
        text = re.sub(r"^The job file (\w+ = )", r"\1", text)
        text = re.sub(r"^(\w+)( = .*: )wants a list: .*", r"\1\2begin each one with [[\1]]", text)
        raise GraphError(text.replace("The job file", "the cluster")) from None


def _cluster(file: _File, name: str, directory: Path | None) -> spec.Cluster:
    if not file.machines:
        raise GraphError(
            "there is no machine: write [[machines]] for each group of equal ones, "
            "and below it count, flops, memory_rate, bandwidth"
        )
    if file.origin not in get_args(spec.Origin):
        raise GraphError(f"origin = {excerpt(file.origin)} is unknown: use measured or assumed")
    groups = [_group(table, str(index)) for index, table in enumerate(file.machines, start=1)]
    for index, group in enumerate(groups, start=1):
        if group.region and _REGION.fullmatch(group.region) is None:
            raise GraphError(
                f"[[machines]] {index} region = {excerpt(group.region)}: begin with a letter, and "
                "use letters, digits, dots and underscores"
            )
    n_machines = sum(group.count for group in groups)
    if n_machines > N_MACHINES_MAX:
        raise GraphError(f"[[machines]] count: {n_machines} in all; use at most {N_MACHINES_MAX}")
    for before, after in pairwise(groups):
        if after.flops > before.flops:
            raise GraphError(
                "[[machines]] flops: a group is faster than the one before it: write "
                "the fastest first, because plans use the first machines"
            )
    machines = [msgspec.convert(group, spec.Machine, from_attributes=True) for group in groups]
    outages = {
        key: None if table is None else tables.decode(table, spec.Outages, path=(key,))
        for key, table in (("failures", file.failures), ("preemptions", file.preemptions))
    }
    counted = zip(machines, groups, strict=True)
    return spec.Cluster(
        name=file.name or name,
        machines=tuple(machine for machine, group in counted for _ in range(group.count)),
        latency=file.latency,
        message_overhead=file.message_overhead,
        links=_links(file.links, n_machines=n_machines),
        latencies=_latencies(file.latencies, groups, n_machines=n_machines),
        origin=cast("spec.Origin", file.origin),
        note=file.note,
        switches=tuple(_switch(entry, i) for i, entry in enumerate(file.switches, start=1)),
        failures=outages["failures"],
        preemptions=outages["preemptions"],
        trace=_trace(file.trace, directory, n_machines=n_machines),
    )


def _group(table: object, index: str) -> _Group:
    if not isinstance(table, Mapping) or "preemptions" not in table:
        return tables.decode(table, _Group, path=("machines", index))
    rest = {key: value for key, value in table.items() if key != "preemptions"}
    group = tables.decode(rest, _Group, path=("machines", index))
    path = ("machines", index, "preemptions")
    own = tables.decode(table["preemptions"], spec.Outages, path=path)
    return msgspec.structs.replace(group, preemptions=own)


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


def _links(links: Mapping[str, object], *, n_machines: int) -> dict[str, float]:
    rates = {}
    for ends, rate in links.items():
        match = _ENDS.fullmatch(ends)
        if match is None or not int(match[1]) < int(match[2]) < n_machines:
            raise GraphError(
                f"[links] has no key {excerpt(ends)}: write two machines from 0 to "
                f'{n_machines - 1}, the lower one first, like "0-1"'
            )
        try:
            rates[ends] = units.parse(rate, "rate")
        except JobFileError as error:
            raise GraphError(f"[links] {ends} = {error}") from None
        if not rates[ends]:
            raise GraphError(f"[links] {ends} = {excerpt(rate)}: use a number above 0")
    return rates


def _latencies(
    table: Mapping[str, object], groups: Sequence[_Group], *, n_machines: int
) -> dict[str, float]:
    regions, found = {group.region for group in groups} - {""}, dict[str, float]()
    for ends, value in table.items():
        match = _ENDS.fullmatch(ends)
        a, _, b = ends.partition("-")
        if not ({a, b} <= regions or (match and int(match[1]) < int(match[2]) < n_machines)):
            known = ", ".join(sorted(regions)) or "none has a region"
            raise GraphError(
                f"[latencies] has no key {excerpt(ends)}: write two machines from 0 to "
                f'{n_machines - 1}, the lower one first, like "0-1", or two regions of '
                f'[[machines]], like "eu-us" ({known})'
            )
        try:
            found[ends] = units.parse(value, "time")
        except JobFileError as error:
            raise GraphError(f"[latencies] {ends} = {error}") from None
        if a != b and found.get(f"{b}-{a}", found[ends]) != found[ends]:
            raise GraphError(f"[latencies] {ends} and {b}-{a} differ: give one of them")
    return found


def _switch(entry: object, index: int) -> spec.Switch:
    switch = tables.decode(entry, _Switch, path=("switches", str(index)))
    ends = _ENDS.fullmatch(switch.machines)
    if ends is None or int(ends[1]) > int(ends[2]):
        raise GraphError(
            f"[[switches]] {index} machines = {excerpt(switch.machines)}: write the "
            'first and the last of a group, like "0-15"'
        )
    return spec.Switch(first=int(ends[1]), last=int(ends[2]), bandwidth=switch.bandwidth)


def _trace(table: object, directory: Path | None, *, n_machines: int) -> spec.OutageTrace | None:
    if table is None:
        return None
    file = tables.decode(table, _Trace, path=("trace",)).file
    if not file or directory is None:
        raise GraphError(
            f"[trace] file = {excerpt(file)}: write the name of a CSV file in the same directory"
        )
    try:
        content = _content(directory / file, N_TRACE_BYTES_MAX)
    except OSError as error:
        raise GraphError(f"[trace] {file} cannot be read: {error.strerror}") from error
    if len(content) > N_TRACE_BYTES_MAX:
        raise GraphError(f"[trace] {file} is larger than {N_TRACE_BYTES_MAX} bytes")
    try:
        return spec.read_trace(content.decode("utf-8-sig"), n_machines=n_machines)
    except UnicodeDecodeError as error:
        raise GraphError(f"[trace] {file} is not UTF-8 text: {error.reason}") from None
    except GraphError as error:
        raise GraphError(f"[trace] {file}: {error}") from None


def _content(path: Path, n_bytes_max: int) -> bytes:
    # One byte more than allowed is requested: a file that grows cannot exhaust memory.
    try:
        with path.open("rb") as opened:
            return opened.read(n_bytes_max + 1)
    except ValueError as error:  # a zero byte in the path
        raise OSError(errno.EINVAL, str(error)) from None
