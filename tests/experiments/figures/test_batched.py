from pathlib import Path

import pytest

from experiments.figures import batched
from experiments.figures.batched import Pace, pace, stale
from experiments.figures.code import code_of
from experiments.figures.entries import FIGURE_4
from experiments.figures.results import keep


SANDBLASTER = next(entry for entry in FIGURE_4 if entry.kind == "l-bfgs")


def kept_pace(code: str, *, folder: Path) -> None:
    path = folder / f"pace-{SANDBLASTER.replicas}.json"
    keep(path, Pace(seconds=31.0, code=code), of=batched._of(SANDBLASTER))


def test_a_pace_of_another_code_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing had changed; Figures 4 and 5 were drawn with paces of before."""
    monkeypatch.setattr(batched, "RESULTS", tmp_path)
    assert stale([SANDBLASTER]) == []
    kept_pace("of another time", folder=tmp_path)
    assert stale([SANDBLASTER]) == [SANDBLASTER]
    kept_pace(code_of(*batched._FOLDERS), folder=tmp_path)
    assert stale([SANDBLASTER]) == []
    known = pace(SANDBLASTER)
    assert known is not None
    assert known.seconds == 31.0
