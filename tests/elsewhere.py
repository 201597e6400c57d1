"""The same question, put to a fresh process whose sets have another order."""

import os
import subprocess
import sys
from pathlib import Path


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
        env={
            **unmeasured,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS_MAX,
        check=True,
    ).stdout.split()
