"""Every command that the documents name starts, and knows its options."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.experiments.benchmarks.test_benchmarks import SCRIPTS


ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "docs/benchmarks.md",
    "docs/security.md",
    "docs/zoo.md",
    "experiments/LOG.md",
    "experiments/figures/README.md",
]
COMMAND = re.compile(r"python (?:-m (experiments[.\w]+)|(experiments/[/\w]+)\.py)")


def commands() -> list[str]:
    """Return what is run, as modules."""
    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    found = {
        module or path.replace("/", ".") for text in texts for module, path in COMMAND.findall(text)
    }
    benchmarks = {f"experiments.benchmarks.{name}" for name in SCRIPTS}
    others = {"experiments.fuzz", "experiments.release"}
    return sorted({*found, *benchmarks, *others} - {"experiments.benchmarks.NAME"})


@pytest.mark.parametrize("module", commands())
def test_a_command_that_is_named_starts(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    # As Python has it; some change it.
    monkeypatch.setattr(sys, "path", [str(file.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "usage: " in said
    assert "--small" in said or path.stem not in SCRIPTS
