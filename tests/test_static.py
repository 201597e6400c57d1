"""The static checks, as tests, so that `pytest` is the one command to run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)  # mypy reads all of torch when its cache is cold
@pytest.mark.parametrize(
    "command", ["ruff format --check .", "ruff check .", "mypy", "lint-imports --no-cache"]
)
def test_static(command: str) -> None:
    program, *arguments = command.split()
    path = Path(sys.executable).with_name(program)
    # Measuring the coverage of the checkers themselves would only slow them.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }
    done = subprocess.run(
        [path, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
