"""The tests of this library on other processors, as far as one processor can play them.

Many claims are to the bit: any number of shards, any cut, a resumed run. They must hold
where torch or numpy has other kernels and where two threads share a sum, not only where
they were written.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest


ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("distbelief", "sandblaster", "simulation")  # all others start processes
# What shows that a file compares results to the bit. Other tests do no arithmetic, allow for
# rounding, or add whole numbers.
COMPARES: Final = re.compile(
    r"torch\.equal|array_equal|tobytes\(\)|\bsame\(|\.bits\b|golden|rtol=0"
)


@pytest.mark.soak
@pytest.mark.untraced
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "environment",
    [
        {"ATEN_CPU_CAPABILITY": "default"},
        {"ATEN_CPU_CAPABILITY": "avx2"},
        {"OPENBLAS_CORETYPE": "Haswell"},
        {"OPENBLAS_CORETYPE": "Zen"},
        {"OPENBLAS_CORETYPE": "Prescott"},
        {"MKL_CBWR": "COMPATIBLE"},
        {"TORCH_THREADS": "2"},
    ],
    ids=lambda environment: "-".join(environment.values()),
)
def test_every_claim_holds_with_the_kernels_of_another_processor(
    environment: dict[str, str],
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not soak and not processes"]
    found = (path for name in FOLDERS for path in (ROOT / "tests" / name).rglob("test_*.py"))
    files = sorted(str(path) for path in found if COMPARES.search(path.read_text()))
    assert len(files) > 50
    run = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
