"""A shard's values where every role of its host can read them.

    | version, clock, incarnation, 0 ... (64 bytes) | values (n elements) |

A sequence lock: one writer, any number of readers, nobody waits. The writer makes the
version odd before it touches the values and even after; a reader copies between two
reads of the version and knows, if they differ or are odd, that its copy is torn: a
mixture of two versions. It must not use it, and reads again later.

The version is odd until the values were written for the first time, and odd for ever
if the writer dies while it writes. Order of memory: on x86 stores are seen in the order
made, which is all a sequence lock needs; elsewhere it rests on the locks that a driver
takes between `handle` and the work that it runs.
"""

from collections.abc import Callable
from typing import final

import numpy as np

from distbelief.core.memory import Memory, Region
from distbelief.core.vectors import Element, Vector
from distbelief.errors import RemoteProtocolError


HEADER_BYTES = 64

_VERSION, _CLOCK, _INCARNATION = range(3)


@final
class SeqlockVector:
    """One vector under a sequence lock.

    Attributes:
        name: Of its region; "" if the vector lies in memory of this process alone.
        values: (n,) the vector itself. Read it by `read` unless you are the writer.
    """

    def __init__(self, name: str, region: Region, *, dtype: np.dtype[Element]) -> None:
        self.name = name
        self._header = region[:HEADER_BYTES].view(np.int64)
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
        """Return a vector of zeros that others may attach, not yet to be read.

        Raises:
            StorageError: `memory` has no room for it.
        """
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        published = cls(name, memory.create(name, n_bytes=n_bytes), dtype=dtype)
        published._header[_INCARNATION] = incarnation
        published.begin()
        return published

    @classmethod
    def private(cls, *, n_elements: int, dtype: np.dtype[Element]) -> "SeqlockVector":
        """Return the same for a shard whose memory nobody shares."""
        n_bytes = HEADER_BYTES + n_elements * dtype.itemsize
        published = cls("", np.zeros(n_bytes, np.uint8), dtype=dtype)
        published.begin()
        return published

    @classmethod
    def attach(
        cls, memory: Memory, name: str, *, n_elements: int, dtype: np.dtype[Element]
    ) -> "SeqlockVector":
        """Return the vector that another role created.

        Raises:
            MemoryGoneError: there is none of that name.
            RemoteProtocolError: it is of another size.
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
        """Odd while the values are being written."""
        return int(self._header[_VERSION])

    @property
    def clock(self) -> int:
        """Pushes applied to the values when they were last whole."""
        return int(self._header[_CLOCK])

    @property
    def incarnation(self) -> int:
        """Of the shard that owns the values."""
        return int(self._header[_INCARNATION])

    def begin(self) -> None:
        """From now on the values are being written."""
        assert self.version % 2 == 0, f"{self.name!r} is being written already"
        self._header[_VERSION] += 1

    def end(self, *, clock: int) -> None:
        """The values are whole again, with `clock` pushes applied."""
        assert self.version % 2 == 1, f"{self.name!r} is not being written"
        self._header[_CLOCK] = clock
        self._header[_VERSION] += 1

    def read(self, copy: Callable[[], object]) -> int | None:
        """Call `copy` and return the clock of what it copied; None if that is torn.

        `copy` is not called at all if the values are being written already.
        """
        version = self.version
        if version % 2:
            return None
        copy()
        clock = self.clock
        return clock if self.version == version else None
