"""The seqlock: a torn copy is never accepted."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import MemoryGoneError, RemoteProtocolError
from distbelief.core.memory import HEADER_BYTES, PrivateMemory
from distbelief.parameter_server.tensor_copies import SeqlockVector


FLOAT64 = np.dtype(np.float64)


def both_ends(n_elements: int = 4) -> tuple[SeqlockVector, SeqlockVector]:
    """Return the writer's and a reader's view of one vector."""
    memory = PrivateMemory()
    writer = SeqlockVector.create(memory, "values", n_elements=n_elements, dtype=FLOAT64)
    reader = SeqlockVector.attach(memory, "values", n_elements=n_elements, dtype=FLOAT64)
    return writer, reader


@given(
    st.lists(st.sampled_from(["begin", "half", "end"]), max_size=20),
    st.lists(st.integers(0, 20), min_size=2, max_size=2),
)
def test_whatever_is_written_within_a_read_it_is_one_version_or_torn(
    steps: list[str], cuts: list[int]
) -> None:
    """The reader copies the first half of the vector, then the backup."""
    writer, reader = both_ends(2)
    writer.end(clock=0)
    written = 0

    def run(steps: list[str]) -> None:
        nonlocal written
        for step in steps:
            writing = writer.version % 2 == 1
            if step == "begin" and not writing:
                writer.begin()
                written += 1
                writer.values[0] = written
            elif step == "end" and writing:
                writer.values[1] = written
                writer.end(clock=written)

    first, second = sorted(cuts)
    copy = np.zeros(2)

    def copying() -> None:
        copy[0] = reader.values[0]
        run(steps[first:second])
        copy[1] = reader.values[1]

    run(steps[:first])
    clock = reader.read(copying)
    if clock is not None:
        assert copy[0] == copy[1] == clock


def test_nobody_attaches_to_private_values() -> None:
    private = SeqlockVector.create(None, "", n_elements=3, dtype=FLOAT64)
    assert private.name == ""
    assert private.values.shape == (3,)
    with pytest.raises(MemoryGoneError):
        SeqlockVector.attach(PrivateMemory(), "", n_elements=3, dtype=FLOAT64)


def test_a_region_of_another_size_is_refused_with_both_sizes() -> None:
    memory = PrivateMemory()
    memory.create("values", n_bytes=HEADER_BYTES + 8)
    with pytest.raises(RemoteProtocolError, match="has 72 bytes, not 80"):
        SeqlockVector.attach(memory, "values", n_elements=2, dtype=FLOAT64)


def test_poisoned_memory_reads_as_torn() -> None:
    memory = PrivateMemory(poison=True)
    writer = SeqlockVector.create(memory, "values", n_elements=2, dtype=FLOAT64)
    writer.end(clock=0)
    memory.release("values")
    assert writer.read(pytest.fail) is None


@pytest.mark.parametrize("begun", [True, False])
def test_beginning_and_ending_alternate(*, begun: bool) -> None:
    writer, _ = both_ends()
    if not begun:
        writer.end(clock=0)
    with pytest.raises(AssertionError, match="being written"):
        writer.begin() if begun else writer.end(clock=1)
