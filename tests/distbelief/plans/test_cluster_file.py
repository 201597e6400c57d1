"""Cluster files, and errors in them."""

import math
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from distbelief.graph.graph import GraphError
from distbelief.plans import cluster_file, cluster_file as cluster_file_module
from distbelief.plans.cluster import Machine, Outages, Switch
from distbelief.plans.cluster_file import load_cluster, names, read_cluster


MACHINE = """
[[machines]]
flops = "100 GFLOP/s"
memory_rate = "30 GB/s"
bandwidth = "1 Gbit/s"
"""
TWO_GROUPS = """
name = "lab"
latency = "100 us"
origin = "measured"
note = "the old machines"

[[machines]]
count = 2
flops = "1 TFLOP/s"
memory_rate = "30 GB/s"
bandwidth = "10 Gbit/s"
memory = "16 GiB"
overhead = "50 us"
jitter = 0.1
[[machines]]
flops = "100 GFLOP/s"
memory_rate = "10 GB/s"
bandwidth = "1 Gbit/s"

[links]
"0-2" = "100 Mbit/s"
"""


def test_every_figure_is_read_in_its_unit() -> None:
    cluster = read_cluster(TWO_GROUPS.encode(), name="file")
    fast = Machine(
        flops=1e12,
        memory_rate=30e9,
        bandwidth=1.25e9,
        memory=16 * 2.0**30,
        overhead=50e-6,
        jitter=0.1,
    )
    slow = Machine(flops=1e11, memory_rate=10e9, bandwidth=125e6)
    assert cluster.machines == (fast, fast, slow)
    assert cluster.latency == 100e-6
    assert cluster.rate(2, 0) == 12.5e6
    assert cluster.rate(2, 1) == 125e6
    assert (cluster.name, cluster.origin) == ("lab", "measured")
    assert cluster.note == "the old machines"


def test_a_cluster_without_a_name_has_that_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "attic.toml"
    path.write_text(MACHINE)
    cluster = load_cluster(path)
    assert (cluster.name, len(cluster), cluster.latency) == ("attic", 1, 0.0)
    assert cluster.origin == "assumed"
    assert load_cluster(str(path)) == cluster


@pytest.mark.parametrize(
    ("name", "n_machines", "bandwidth"),
    [("commodity-2012", 144, 125e6), ("rack-1g", 32, 125e6), ("rack-10g", 32, 1.25e9)],
)
def test_clusters_of_this_package(name: str, n_machines: int, bandwidth: float) -> None:
    assert name in names()
    cluster = load_cluster(name)
    assert (cluster.name, len(cluster)) == (name, n_machines)
    assert cluster.is_uniform
    assert cluster.machines[0].bandwidth == bandwidth
    assert cluster.origin == "assumed"
    assert cluster.note


@pytest.mark.parametrize("name", names())
def test_each_figure_of_package_clusters_has_an_origin(name: str) -> None:
    directory = Path(cluster_file.__file__).parent / "clusters"
    lines = (directory / f"{name}.toml").read_text().splitlines()
    known = ("latency", "count", "flops", "memory", "bandwidth", "overhead", "jitter")
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith(known):
            assert "#" in line or before.startswith("#"), line


def test_an_unknown_name_suggests_the_nearest() -> None:
    text = "no cluster 'rack_1g'.* Did you mean 'rack-1g'?"
    with pytest.raises(GraphError, match=text):
        load_cluster("rack_1g")
    with pytest.raises(GraphError, match="It knows commodity-2012, rack-10g, rack-1g"):
        load_cluster("moon/base.toml")


def test_an_unreadable_path_is_explained(tmp_path: Path) -> None:
    """Once this ended with the exit code of a failed job."""
    with pytest.raises(GraphError, match=f"{tmp_path}: the cluster cannot be read: Is"):
        load_cluster(tmp_path)
    with pytest.raises(GraphError, match="cannot be read: embedded null byte"):
        load_cluster("a\0b")


def test_a_cluster_without_a_name_is_unknown() -> None:
    """Once "" was the current directory: "cannot read the cluster from ."."""
    with pytest.raises(GraphError, match=r"there is no cluster '': .* It knows"):
        load_cluster("")


def test_a_mistake_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('speed = "1 Gbit/s"' + MACHINE)
    with pytest.raises(GraphError, match=re.escape(f"{path}: the cluster has no key")):
        load_cluster(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flops =", "flop =", "[[machines]] 1 has no key 'flop'. Did you mean 'flops'?"),
        ("latency", "latencyy", "has no key 'latencyy'. Did you mean 'latency'?"),
        ("latency", "zzz", "It knows name, latency, message_overhead, origin, note, machines, l"),
        ('"1 TFLOP/s"', '"1 TFLOPS"', "1 flops = \"1 TFLOPS\" has the unknown unit 'TFLOPS'. Did"),
        ('"100 us"', "100", 'latency = 100 has no unit: write "100 s"'),
        ('"1 Gbit/s"', '"1 GB"', "[[machines]] 2 bandwidth = \"1 GB\" has the unknown unit 'GB'"),
        ('bandwidth = "1 Gbit/s"', "", "[[machines]] 2 lacks the key 'bandwidth'"),
        ('"100 GFLOP/s"', '"0 GFLOP/s"', '2 flops = "0 GFLOP/s": wants a quantity, above 0'),
        ('flops = "100 GFLOP/s"', 'flops = "9 TFLOP/s"', "write the fastest first"),
        ("count = 2", "count = 0", "[[machines]] 1 count = 0: wants a whole number, at least 1"),
        ("count = 2", "count = true", "count = true: wants a whole number"),
        ("count = 2", "count = 20000", "count: 20001 in all; use at most 20000"),
        ("count = 2", f"count = {10**30}", "in all; use at most 20000"),
        ("jitter = 0.1", "jitter = nan", "jitter = nan: wants a number, at least 0"),
        ("jitter = 0.1", f"jitter = {10**400}", "jitter] Number out of range"),
        ('"0-2"', '"2-0"', '[links] has no key "2-0": write two machines from 0 to 2'),
        ('"0-2"', '"0-3"', '[links] has no key "0-3"'),
        ('"0-2"', '"0-0"', '[links] has no key "0-0"'),
        ('"0-2"', '"00-2"', '[links] has no key "00-2"'),
        ('"0-2"', "a", '[links] has no key "a"'),
        ('"100 Mbit/s"', '"0 Mbit/s"', '[links] 0-2 = "0 Mbit/s": use a number above 0'),
        ('"100 Mbit/s"', "{}", "[links] 0-2 = {} is no quantity"),
        ("[links]", "[[links]]", 'links = [{ 0-2 = "100 Mbit/s" }]: wants a table'),
        ('"lab"', "7", 'name = 7: wants text in quotes: "..."'),
        ('"measured"', '"guessed"', 'origin = "guessed" is unknown: use measured or'),
        ("[[machines]]", "[[machine]]", "has no key 'machine'. Did you mean 'machines'?"),
        ('"lab"', '"lab', "is not TOML"),
    ],
)
def test_a_mistake_names_the_key_and_the_fix(old: str, new: str, message: str) -> None:
    assert old in TWO_GROUPS
    with pytest.raises(GraphError, match=re.escape(message)):
        read_cluster(TWO_GROUPS.replace(old, new).encode(), name="file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no machine: write [[machines]] for each group of equal ones"),
        (b"machines = [1]", "machines.1 = 1: wants a table"),
        (b"machines = 3", "machines = 3: begin each one with [[machines]]"),
        (b"[machines]\ncount = 3", "begin each one with [[machines]]"),
        (b"links = 3" + MACHINE.encode(), "links = 3: wants a table"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"a = " + b"[" * 100_000, "is nested too deeply"),
        (b"a = 1" + b"0" * 10_000, "is not TOML"),
        (b"#" * (1 << 20) + b"#", "larger than"),
    ],
)
def test_documents_that_are_no_cluster_are_rejected(content: bytes, message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        read_cluster(content, name="file")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_cluster_or_refused(content: bytes) -> None:
    with pytest.raises(GraphError):
        read_cluster(content, name="file")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(["name", "latency", "origin", "note", "machines", "links", "count", "flops"]),
    _VALUES,
)
def test_any_value_of_a_key_is_accepted_or_rejected_with_a_message(key: str, value: object) -> None:
    text = f"{key} = {_toml(value)}\n" + (MACHINE if key != "machines" else "")
    if key in ("count", "flops"):
        text = MACHINE.replace('flops = "100 GFLOP/s"', f"{key} = {_toml(value)}")
    with suppress(GraphError):
        assert len(read_cluster(text.encode(), name="file")) >= 1


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            pairs = (f"{_toml(k)} = {_toml(v)}" for k, v in value.items())
            return f"{{ {', '.join(pairs)} }}"
        case str():
            return "'" + "".join(c for c in value if c.isprintable() and c != "'") + "'"
        case None:
            return "''"
        case _:
            return str(value)


SIMULATED = """
[[machines]]
count = 8
flops = "100 GFLOP/s"
memory_rate = "30 GB/s"
bandwidth = "1 Gbit/s"
cores = 4
handling = "50 us"

[[switches]]
machines = "0-3"
bandwidth = "2 Gbit/s"
[[switches]]
machines = "0-7"
bandwidth = "3 Gbit/s"

[failures]
mean_time = "30 d"
away = "10 min"

[preemptions]
mean_time = "6 h"
away = "5 min"
group = 4
"""


REGIONS = """
[[machines]]
count = 2
region = "eu"
upload = "100 Mbit/s"
price = 0.3
leave = "2 h"
preemptions = { mean_time = "30 min", away = "1 min", group = 2 }
flops = "1 TFLOP/s"
memory_rate = "30 GB/s"
bandwidth = "1 Gbit/s"

[[machines]]
region = "us"
join = "10 s"
flops = "1 TFLOP/s"
memory_rate = "30 GB/s"
bandwidth = "1 Gbit/s"

[latencies]
"eu-us" = "45 ms"
"us-us" = "2 ms"
"0-1" = "1 ms"
"""


def test_regions_prices_and_machines_that_come_and_go_are_read() -> None:
    cluster = read_cluster(REGIONS.encode(), name="wan")
    eu, _, us = cluster.machines
    assert (eu.region, eu.upload, eu.price, eu.leave) == ("eu", 12.5e6, 0.3, 7200.0)
    assert eu.preemptions == Outages(mean_time=1800.0, away=60.0, group=2)
    assert (us.region, us.join, us.leave, us.preemptions) == ("us", 10.0, math.inf, None)
    assert cluster.latencies == {"eu-us": 0.045, "us-us": 0.002, "0-1": 0.001}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('region = "us"', 'region = "u-s"', '[[machines]] 2 region = "u-s": begin with a letter'),
        (
            '"eu-us"',
            '"eu-asia"',
            '[latencies] has no key "eu-asia": write two machines from 0 to 2',
        ),
        ('"0-1"', '"0-3"', 'two regions of [[machines]], like "eu-us" (eu, us)'),
        ('"us-us"', '"us-eu"', "[latencies] us-eu and eu-us differ: give one of them"),
        ('"45 ms"', '"45"', "[latencies] eu-us ="),
        ('join = "10 s"', 'join = "10 s"\nleave = "5 s"', "join after 10 s and leave after 5 s"),
        ("price = 0.3", "price = -1", "price = -1: wants a number, at least 0"),
        ('"1 min"', '"0 s"', 'away = "0 s": wants a quantity, above 0'),
    ],
)
def test_a_mistake_in_regions_names_the_key_and_the_fix(old: str, new: str, message: str) -> None:
    assert old in REGIONS
    with pytest.raises(GraphError, match=re.escape(message)):
        read_cluster(REGIONS.replace(old, new).encode(), name="file")


def test_switches_and_outages_are_read_and_no_plan_depends_on_them() -> None:
    """Except `handling`, on which plans depend too."""
    cluster = read_cluster(SIMULATED.encode(), name="lab")
    assert cluster.machines[0].cores == 4
    assert cluster.machines[0].handling == 50e-6
    assert cluster.switches == (
        Switch(first=0, last=3, bandwidth=250e6),
        Switch(first=0, last=7, bandwidth=375e6),
    )
    assert cluster.failures == Outages(mean_time=30 * 86400.0, away=600.0)
    assert cluster.preemptions == Outages(mean_time=21600.0, away=300.0, group=4)
    plain = read_cluster(b"[[machines]]\ncount = 8" + MACHINE[13:].encode(), name="lab")
    assert plain.fingerprint != cluster.fingerprint
    free = SIMULATED.replace('handling = "50 us"\n', "")
    assert plain.fingerprint == read_cluster(free.encode(), name="lab").fingerprint
    assert plain.trace is None
    assert plain.failures is None


def test_switches_are_cut_to_fewer_machines() -> None:
    cluster = read_cluster(SIMULATED.encode(), name="lab")
    assert cluster.first(6).switches[-1] == Switch(first=0, last=3, bandwidth=250e6)
    # Both are of machines 0 to 2 then: the narrower one counts.
    assert cluster.first(3).switches == (Switch(first=0, last=2, bandwidth=250e6),)


def test_a_name_of_a_trace_that_no_file_can_have_is_a_mistake(tmp_path: Path) -> None:
    """Once this was an unexpected "ValueError: embedded null byte"."""
    path = tmp_path / "lab.toml"
    path.write_text(f'{MACHINE}\n[trace]\nfile = "a\\u0000b"\n')
    with pytest.raises(GraphError, match="cannot be read: embedded null byte"):
        load_cluster(path)


def test_a_trace_lies_beside_its_cluster(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(f'{MACHINE}\n[trace]\nfile = "spot.csv"\n')
    said = re.escape(f"{path}: [trace] spot.csv cannot be read: No such file")
    with pytest.raises(GraphError, match=said):
        load_cluster(path)
    trace = tmp_path / "spot.csv"
    trace.write_text("1,0,5\nend,60\n")
    found = load_cluster(path).trace
    assert found is not None
    assert found.covers == 60
    trace.write_text("seconds,machine,away\n1,0,5\nend,7\n", encoding="utf-8-sig")
    found = load_cluster(path).trace  # as spreadsheets write it
    assert found is not None
    assert found.covers == 7
    trace.write_text("1,0,5\n")
    with pytest.raises(GraphError, match=r"lab.toml: \[trace\] spot.csv: .* ends wit"):
        load_cluster(path)
    trace.write_bytes(b"\xff")
    with pytest.raises(GraphError, match="is not UTF-8 text"):
        load_cluster(path)
    trace.write_bytes(b"0" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_file_module, "N_TRACE_BYTES_MAX", 99)
        with pytest.raises(GraphError, match="is larger than 99 bytes"):
            load_cluster(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"50 us"', '"-50 us"', "handling ="),
        ('"0-3"', '"3-0"', 'machines = "3-0": write the first and the last of a group'),
        ('"0-3"', '"3"', 'machines = "3": write the first and the last of a group'),
        ('"0-3"', '"0-8"', "a switch is for machines 0 to 8: use 0 to 7"),
        ('"0-3"', '"0-7"', "switches of machines 0 to 7 and 0 to 7 overlap"),
        ('"0-7"', '"2-7"', "switches of machines 0 to 3 and 2 to 7 overlap"),
        ('"2 Gbit/s"', '"0 Gbit/s"', '1 bandwidth = "0 Gbit/s": wants a quantity, above 0'),
        ("[[switches]]", "[switches]", "begin each one with [[switches]]"),
        ('"30 d"', '"0 d"', '[failures] mean_time = "0 d": wants a quantity, above 0'),
        ('away = "10 min"', "", "[failures] lacks the key 'away'"),
        ("group = 4", "group = 0", "[preemptions] group = 0: wants a whole number, at least 1"),
        ("group = 4", "grop = 4", "[preemptions] has no key 'grop'. Did you mean 'gr"),
        ("[failures]", "[[failures]]", "wants a table; begin it with [failures]"),
        ("[failures]", '[trace]\nfile = "a.csv"\n[failures]', "in the same directory"),
    ],
)
def test_a_mistake_in_switches_names_key_and_fix(old: str, new: str, message: str) -> None:
    text = SIMULATED.replace(old, new, 1)
    if old == "[[switches]]":  # both, or it is not TOML
        text = SIMULATED.split(old, maxsplit=1)[0] + '[switches]\nmachines = "0-1"\n'
    with pytest.raises(GraphError, match=re.escape(message)):
        read_cluster(text.encode(), name="lab")
