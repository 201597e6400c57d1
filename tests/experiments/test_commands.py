"""Every command that the documents name starts, and knows its options."""

import re
import runpy
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "docs/benchmarks.md",
    "docs/security.md",
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
    return sorted(found - {"experiments.benchmarks.NAME"})


def test_there_are_commands_of_every_kind() -> None:
    wanted = {"experiments.baseline", "experiments.figures"}
    assert {*wanted, "experiments.benchmarks.hostile"} <= set(commands())


@pytest.mark.parametrize("module", [*commands(), "experiments.fuzz"])
def test_a_command_that_is_named_starts(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))  # some change it
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
