"""What a shard shares with clients on its host: its values, and push buffers.

The values are a vector under a seqlock: one writer, many readers, nobody waits.

    | version, clock, incarnation, 0 ... (64 bytes) | values (n elements) |

The writer makes the version odd before it writes the values and even afterwards. A reader copies
between two reads of the version; if they differ or are odd, the copy is torn: it mixes two
versions, and the reader must try again later. The version is odd until the first write is
complete, and stays odd if the writer dies while it writes.
"""

from collections.abc import Callable
from typing import Final, final

import numpy as np

from distbelief.core.memory import Memory, Region
from distbelief.core.vectors import Element, Vector
from distbelief.errors import RemoteProtocolError


HEADER_BYTES = 64

_VERSION, _CLOCK, _INCARNATION = range(3)


@final
class SeqlockVector:
    """One vector under a seqlock."""

    def __init__(self, name: str, region: Region, *, dtype: np.dtype[Element]) -> None:
        self.name = name  # of its region; "" if the vector lies in memory of this process alone
        self._header = region[:HEADER_BYTES].view(np.int64)
        # (n,) the vector itself. Only the writer may use it without `read`.
        self.values: Vector = region[HEADER_BYTES:].view(dtype)

    @classmethod
    def create(
        cls,
        memory: Memory,
        name: str,
        *,
        n_elements: int,
        dtype: np.dtype[Element],
        incarnation: int,
    ) -> "SeqlockVector":
        """Return a vector that others may attach but not yet read, or raise StorageError."""
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        published = cls(name, memory.create(name, n_bytes=n_bytes), dtype=dtype)
        published._header[_INCARNATION] = incarnation
        published.begin()
        return published

    @classmethod
    def private(cls, *, n_elements: int, dtype: np.dtype[Element]) -> "SeqlockVector":
        """Return a vector in memory of this process alone."""
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        published = cls("", np.zeros(n_bytes, np.uint8), dtype=dtype)
        published.begin()
        return published

    @classmethod
    def attach(
        cls, memory: Memory, name: str, *, n_elements: int, dtype: np.dtype[Element]
    ) -> "SeqlockVector":
        """Attach the vector that another role created.

        Raises:
            MemoryGoneError: There is none of that name.
            RemoteProtocolError: It has another size.
        """
        region = memory.attach(name)
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        if region.nbytes != n_bytes:
            raise RemoteProtocolError(
                f"region {name!r} has {region.nbytes} bytes, not the {n_bytes} of "
                f"{n_elements} elements of {dtype}: both sides must use one layout"
            )
        return cls(name, region, dtype=dtype)

    @property
    def version(self) -> int:
        return int(self._header[_VERSION])

    @property
    def clock(self) -> int:
        return int(self._header[_CLOCK])

    @property
    def incarnation(self) -> int:
        return int(self._header[_INCARNATION])

    def begin(self) -> None:
        assert self.version % 2 == 0, f"{self.name!r} is being written already"
        self._header[_VERSION] += 1

    def end(self, *, clock: int) -> None:
        """Mark the values as complete, with `clock` applied pushes."""
        assert self.version % 2 == 1, f"{self.name!r} is not being written"
        # x86 keeps the order of stores, which is all that a seqlock needs. On other processors
        # the order comes from the locks that a driver takes between `handle` and work.
        self._header[_CLOCK] = clock
        self._header[_VERSION] += 1

    def read(self, copy: Callable[[], object]) -> int | None:
        """Call `copy` and return the clock of what it copied, or None if the copy is torn.

        `copy` is not called if a write is in progress.
        """
        version = self.version
        if version % 2:
            return None
        copy()
        clock = self.clock
        return clock if self.version == version else None


# --- push buffers ---

N_PUSH_BUFFERS: Final = 2


def push_buffer_bytes(n_elements: int, *, itemsize: int) -> int:
    """Return the size of a region of two push buffers; never 0, which no region can have."""
    return max(N_PUSH_BUFFERS * n_elements * itemsize, 64)


def push_buffer_views(
    region: Region, *, n_elements: int, dtype: np.dtype[Element]
) -> tuple[Vector, Vector]:
    """Return both push buffers of a region, each (n_elements,).

    Raises:
        RemoteProtocolError: The region has another size.
    """
    n_bytes = push_buffer_bytes(n_elements, itemsize=dtype.itemsize)
    if region.nbytes != n_bytes:
        raise RemoteProtocolError(
            f"a region of push buffers has {region.nbytes} bytes, not the {n_bytes} of "
            f"{N_PUSH_BUFFERS} times {n_elements} elements of {dtype}: use one layout"
        )
    whole = region[: N_PUSH_BUFFERS * n_elements * dtype.itemsize].view(dtype)
    return whole[:n_elements], whole[n_elements:]
