"""The tests of this library on other processors, as far as one processor can play them.

Many claims are to the bit: any number of shards, any cut, a resumed run. They must hold
where torch or numpy has other kernels and where two threads share a sum, not only where
they were written.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
FOLDERS = ("distbelief", "sandblaster", "simulation")  # what else there is starts processes


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
    run = subprocess.run(
        [*command, *(f"tests/{folder}" for folder in FOLDERS)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
