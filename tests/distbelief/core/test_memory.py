import subprocess
import sys

import numpy as np
import pytest

from distbelief.core.memory import PrivateMemory


def test_a_released_region_reads_as_nan_if_poisoned() -> None:
    for poison in (True, False):
        memory = PrivateMemory(poison=poison)
        values = memory.create("a", n_bytes=64).view(np.float32)
        memory.release("a")
        assert np.isnan(values).all() == poison
        assert poison or not values.any()


@pytest.mark.parametrize("poison", [True, False])
def test_values_retired_are_nan_if_poisoned(*, poison: bool) -> None:
    values = np.zeros(4, np.float32)
    PrivateMemory(poison=poison).retire(values)
    assert np.isnan(values).all() == poison


PROGRAM = """
import resource
from distbelief.core.memory import keep_memory
import numpy as np
kept = keep_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    np.ones(20_000_000, np.float32)
before = faults()
for _ in range(3):
    np.ones(20_000_000, np.float32)
print(int(kept), faults() - before)
"""


def test_a_large_block_that_was_freed_is_used_again_without_page_faults() -> None:
    command = [sys.executable, "-c", PROGRAM]
    kept, faults = subprocess.check_output(command, text=True, timeout=60).split()
    if kept == "0":
        pytest.skip("this C library cannot be told")
    assert int(faults) < 1000  # else 3 times 20,000
