"""What other processes do: they say whether sets have another order there, end, or wait."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


ROOT = str(Path(__file__).parents[1])
SECONDS_MAX = 140


def answers(module: str, question: str) -> list[str]:
    """Return the words that `print(question)` gives elsewhere.

    Compared with what this process says they show that nothing depends on the order of
    a set or on what else the process has done: its PYTHONHASHSEED is not ours, which
    is one of 2 ** 32 at random if nobody has chosen it.

    Args:
        module: Imported there as `t`.
        question: Expression of it, a list of words.
    """
    program = f"import torch; torch.set_num_threads(1); import {module} as t; print(*{question})"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    unmeasured = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**unmeasured, "PYTHONHASHSEED": seed, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS_MAX,
        check=True,
    ).stdout.split()


def ended(program: str, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":  # noqa: ANN401
    """Run a program of this checkout to its end; `options` are those of `subprocess.run`."""
    environment = os.environ | {"PYTHONPATH": ROOT}
    environment.pop("PYTHONUNBUFFERED", None)  # with it, a full disk is noticed earlier
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, env=environment, text=True, check=False, **options)


@contextmanager
def waiting(
    program: str, *words: str | Path, pass_fds: tuple[int, ...] = ()
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start a program that prints a line and waits for the end of its input; yield both."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
