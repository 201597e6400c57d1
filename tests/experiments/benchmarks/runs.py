"""Benchmarks as `make bench` runs them: as programs, of which the last line counts."""

import json
import math
import subprocess
import sys
from pathlib import Path


FOLDER = Path(__file__).parents[3] / "experiments" / "benchmarks"
SECONDS_MAX = 900  # a test's own limit is nearer


def figures_of(name: str, *arguments: str) -> dict[str, float]:
    """Run a benchmark, and return the figures of its last line."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    run = subprocess.run(command, capture_output=True, check=False, text=True, timeout=SECONDS_MAX)
    assert run.returncode == 0, run.stdout + run.stderr
    return figures_in(run.stdout, name)


def figures_in(text: str, name: str) -> dict[str, float]:
    """Return the figures of the last line that a benchmark has printed."""
    told = json.loads(text.splitlines()[-1])
    assert told["benchmark"] == name
    figures = told["figures"]
    assert isinstance(figures, dict)
    assert all(math.isfinite(value) for value in figures.values()), figures
    return figures
