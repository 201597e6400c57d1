"""What benchmarks measure in parts is put together by medians."""

from pathlib import Path

import pytest

from distbelief.partition.profiling.profile import (
    Figures,
    Profile,
    Slices,
    load,
    this_host,
)
from experiments.benchmarks.plans.machines import merged


def profile(forward: float, *, flops: float) -> Profile:
    slices = Slices(
        extents=(1,), operations=(1.0,), forward=(forward,), backward=(2 * forward,)
    )
    figures = Figures(
        flops=flops,
        memory_rate=1.0,
        message_rate=1.0,
        memory=1.0,
        overhead=0.0,
        jitter=0.0,
        date="2012-12-03",
    )
    layers = {"layer": {"whole": slices}}
    return Profile(host=this_host(), date="", layers=layers, figures=figures)


def test_of_what_each_part_has_measured_the_median_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [tmp_path / f"part-{index}" for index in range(3)]
    for part, forward in zip(parts, (1.0, 9.0, 2.0), strict=True):
        monkeypatch.setenv("XDG_CACHE_HOME", str(part))
        profile(forward, flops=10.0 / forward).save()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    merged(parts)
    found = load(this_host())
    assert found is not None
    assert found.figures is not None
    assert found.figures.flops == 5.0
    assert found.layers["layer"]["whole"].forward == (2.0,)
    assert found.layers["layer"]["whole"].backward == (4.0,)
