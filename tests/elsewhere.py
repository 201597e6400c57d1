"""What other processes do: they say whether sets have another order there, end, or wait."""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast


ROOT = str(Path(__file__).parents[1])


# The other process imports torch and ours once and forks for each question, so that no question
# sees what an earlier one has done.
_ANSWERING = """
import importlib, json, os, sys
import hypothesis, pytest, torch
import distbelief.simulation.cluster, distbelief.worker.downpour

torch.set_num_threads(1)
for line in sys.stdin:
    folder, module, question = json.loads(line)
    process = os.fork()
    if not process:
        os.chdir(folder)
        words = eval(question, {"t": importlib.import_module(module)})
        print(json.dumps(words), flush=True)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        print("null", flush=True)  # its traceback is among the errors
"""


@cache
def _answering() -> "subprocess.Popen[str]":
    """Start the process that answers; it ends with this one."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    unmeasured = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _ANSWERING],
        env={**unmeasured, "PYTHONHASHSEED": seed, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def answers(module: str, question: str) -> list[str]:
    """Return the words that `question` is elsewhere.

    Compared with what this process says they show that nothing depends on the order of
    a set or on what else the process has done: its PYTHONHASHSEED is not ours, which
    is one of 2 ** 32 at random if nobody has chosen it.

    Args:
        module: Imported there as `t`.
        question: Expression of it, a list of words.
    """
    process = _answering()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(Path.cwd()), module, question]) + "\n")
    process.stdin.flush()
    words = json.loads(process.stdout.readline())
    assert words is not None, f"{question} of {module} fails in another process"
    return cast("list[str]", words)


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
