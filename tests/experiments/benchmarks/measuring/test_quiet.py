import time
from pathlib import Path

import pytest

from experiments.benchmarks.measuring.quiet import Quiet


BEGUN = "cpu  {user} 0 100 5000 10 0 0 0 900 0\ncpu0 1 1\n"


def test_what_others_compute_is_told_in_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A "quiet" machine on which others took half a core: its figures meant nothing."""
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stat = tmp_path / "stat"
    stat.write_text(BEGUN.format(user=1000))
    with Quiet(stat=stat) as quiet:
        now[0] += 1000.0
        stat.write_text(BEGUN.format(user=51_000))
    # 500 s at 100 ticks a second, less the moment that this test has taken.
    assert quiet.others == pytest.approx(0.5, abs=0.01)


def test_what_is_ours_is_not_others(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(BEGUN.format(user=1000))
    with Quiet(stat=stat) as quiet:
        sum(range(100_000))
    assert quiet.others == 0.0
    with Quiet(stat=tmp_path / "none") as quiet:
        sum(range(100_000))
    assert quiet.others == 0.0
