import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from distbelief.partition.report import plain, remarks, seconds, size, table
from tests.distbelief.partition.requests import planned


ESTIMATES = [done.estimate for done in planned(1, 2, 4)]
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
BYTES = {unit: 1024.0**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB"))}


@given(st.floats(1e-6, 1e5))
def test_times_are_written_with_three_digits_or_whole_microseconds(x: float) -> None:
    number, unit = seconds(x).split()
    read = float(number) * SECONDS[unit]
    assert read == pytest.approx(x, rel=0.006, abs=0.501e-6)


@given(st.floats(0, 1e15))
def test_sizes_are_written_with_one_decimal(n_bytes: float) -> None:
    number, unit = size(n_bytes).split()
    scale = (BYTES | {"TiB": 1024.0**4})[unit]
    assert float(number) * scale == pytest.approx(n_bytes, abs=0.51 * scale)
    assert float(number) <= 1024 or unit == "TiB"


def test_an_unlimited_size_is_formatted() -> None:
    assert size(math.inf) == "unlimited"


def test_the_table_has_a_row_for_each_and_nothing_is_cut_off() -> None:
    shown = table(ESTIMATES, title="a net")
    assert shown.row_count == len(ESTIMATES)
    console = Console(width=140)
    with console.capture() as written:
        console.print(shown)
    for estimate in ESTIMATES:
        assert f"{estimate.speed_up:.2f}x" in written.get()
        assert seconds(estimate.median) in written.get()


def test_all_of_a_row_is_json() -> None:
    for estimate in ESTIMATES:
        row = json.loads(json.dumps(plain(estimate)))
        assert row["machines"] == estimate.n_machines
        assert row["step_seconds"]["p50"] == estimate.median
        parts = [row[key] for key in ("compute", "communication", "sync", "wait")]
        assert sum(parts) == pytest.approx(1.0)
        assert row["bytes"] == sum(estimate.link_bytes.values())


def said(*, caps: list[float], whole: list[tuple[str, str]] | None = None) -> list[str]:
    return remarks(ESTIMATES, caps=caps, whole=whole or [], origin="from a file.")


def test_the_origin_is_always_the_last_remark() -> None:
    assert said(caps=[math.inf] * 4)[-1] == "from a file."
    whole = said(caps=[math.inf] * 4, whole=[("lstm", "it has no split rule")])
    assert "lstm is computed whole on one machine: it has no split rule" in whole


def test_idle_machines_are_reported() -> None:
    idle = [replace(estimate, used=(0,)) for estimate in ESTIMATES]
    found = remarks(idle, caps=[math.inf] * 4, whole=[], origin="")
    assert [text.split(",")[0] for text in found if "idle" in text] == [
        "2 machines: 1 left idle",
        "4 machines: 3 left idle",
    ]


def test_what_does_not_fit_is_marked_and_its_worst_machine_named() -> None:
    bad = replace(ESTIMATES[-1], offenders=(1, 2), memory=(0.0, 2048.0, 4096.0, 0.0))
    (text, _) = remarks([bad], caps=[1024.0] * 4, whole=[], origin="")[-2:]
    assert "machine 2 needs 4.0 KiB and has 1.0 KiB; 2 machines lack memory" in text
    assert table([bad], title="").rows[0].style == "red"
