"""The examples: short, and complete."""

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.processes.commands import ended


FOLDER = ROOT / "experiments" / "examples"
LINES_MAX = 40
SAYS = {
    "cross_val_score": r"accuracy 9\d\.\d% \+- ",
    "fit": r"<Run .*held-out accuracy 0\.9.*\nbest 9\d\.\d",
}
EXAMPLES = [FOLDER / f"{name}.py" for name in SAYS]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= LINES_MAX


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(example: Path, tmp_path: Path) -> None:
    done = ended(tmp_path, sys.executable, example)
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[example.stem], done.stdout), done.stdout
