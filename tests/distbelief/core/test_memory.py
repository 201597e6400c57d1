import numpy as np
import pytest

from distbelief.core.memory import Memory, PrivateMemory
from distbelief.errors import LocalProtocolError, MemoryGoneError


@pytest.mark.parametrize("n_bytes", [0, 1, 100, 1 << 20])
def test_a_new_region_is_zeroed_and_aligned(n_bytes: int) -> None:
    region = PrivateMemory().create("a", n_bytes=n_bytes)
    assert region.shape == (n_bytes,)
    assert region.dtype == np.uint8
    assert not region.any()
    assert region.ctypes.data % 64 == 0 or n_bytes == 0


def test_whoever_attaches_sees_the_same_bytes() -> None:
    memory: Memory = PrivateMemory(host="h")
    memory.create("a", n_bytes=8)[3] = 7
    assert memory.attach("a")[3] == 7
    assert memory.host == "h"


def test_a_name_is_used_once_and_one_that_is_unknown_is_named_with_its_host() -> None:
    memory = PrivateMemory(host="h")
    memory.create("a", n_bytes=8)
    with pytest.raises(LocalProtocolError, match="'a' exists already"):
        memory.create("a", n_bytes=8)
    with pytest.raises(MemoryGoneError, match="no region 'b' on host 'h'"):
        memory.attach("b")


def test_a_released_region_is_gone_and_reads_as_nan_if_poisoned() -> None:
    for poison in (True, False):
        memory = PrivateMemory(poison=poison)
        values = memory.create("a", n_bytes=64).view(np.float32)
        memory.release("a")
        memory.release("a")  # as often as one likes
        assert np.isnan(values).all() == poison
        assert poison or not values.any()
        with pytest.raises(MemoryGoneError):
            memory.attach("a")


def test_a_disowned_region_is_gone_and_keeps_its_bytes() -> None:
    memory = PrivateMemory(poison=True)
    region = memory.create("a", n_bytes=64)
    region[:] = 7
    memory.disown("a")
    memory.disown("a")
    assert (region == 7).all()
    with pytest.raises(MemoryGoneError):
        memory.attach("a")


@pytest.mark.parametrize("poison", [True, False])
def test_values_retired_are_nan_if_poisoned(poison: bool) -> None:  # noqa: FBT001
    values = np.zeros(4, np.float32)
    PrivateMemory(poison=poison).retire(values)
    assert np.isnan(values).all() == poison
