"""The examples: short, and complete."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.processes.commands import said


FOLDER = ROOT / "experiments" / "examples"
LINES_MAX = 40
SAYS = {
    "cross_val_score": r"accuracy 9\d\.\d% \+- ",
    "fit": r"<Run .*held-out accuracy 0\.9.*\nbest 9\d\.\d",
    "accelerate_loop": r"accuracy 9\d\.\d%",
    "image_loop": r"held out [89]\d\.\d%",
    "lightning_module": r"accuracy 9\d\.\d%",
    "transformers_trainer": r"loss 0\.\d",
}
NEEDS = {
    "accelerate_loop": "accelerate",
    "lightning_module": "lightning",
    "transformers_trainer": "transformers",
}
SLOW = {"cross_val_score": [pytest.mark.soak]}  # docs/howto/fit.md runs it in three folds
EXAMPLES = [pytest.param(FOLDER / f"{name}.py", id=name, marks=SLOW.get(name, ())) for name in SAYS]


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= LINES_MAX


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("example", EXAMPLES)
def test_it_runs(example: Path, tmp_path: Path) -> None:
    needs = NEEDS.get(example.stem)
    if needs is not None:
        pytest.importorskip(needs, reason=f"{needs} is not installed")
    told = said(tmp_path, str(example))
    assert re.search(SAYS[example.stem], told), told


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits", r"held out [89]\d\.\d%\n"),
        ("papers_figures", r"speech on 8 machines: 2\.\d times as fast, in the paper 2\.2\n"),
    ],
)
def test_the_notebook_runs(name: str, said: str) -> None:
    why = "nbclient or a kernel is not installed"
    nbclient: Any = pytest.importorskip("nbclient", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    nbformat: Any = pytest.importorskip("nbformat", reason=why)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120).execute()
    (printed,) = notebook.cells[-1]["outputs"]
    assert re.fullmatch(said, printed["text"]), printed
    shown = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    assert any("<pre" in each.get("data", {}).get("text/html", "") for each in shown)
