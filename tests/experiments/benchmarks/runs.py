"""Benchmarks as `make bench` runs them: as programs, of which the last line counts."""

import json
import subprocess
import sys
from pathlib import Path


FOLDER = Path(__file__).parents[3] / "experiments" / "benchmarks"


def figures_of(name: str, *arguments: str) -> dict[str, float]:
    """Run a benchmark, and return the figures of its last line."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    run = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=150
    )
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["benchmark"] == name
    figures = told["figures"]
    assert isinstance(figures, dict)
    return figures
