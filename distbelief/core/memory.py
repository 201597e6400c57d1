"""Memory regions that roles on one host share, and the settings of the allocator.

A role asks its driver for named regions. The ZeroMQ driver maps files, the simulated driver
uses arrays; every role that attaches to a region sees the same bytes. The role that creates
a region owns it and releases it. A name is used once per run: it contains the owner's name
and incarnation. Concurrent readers check a version (`parameter_server.tensor_copies`).
"""

import ctypes
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from distbelief.core.errors import LocalProtocolError, MemoryGoneError, RemoteProtocolError
from distbelief.core.vectors import Vector


# Every step allocates and frees gradients of the size of the model. By default, glibc maps
# blocks beyond 32 MiB from the system, unmaps them on free, and trims the heap, so the kernel
# zeroes and faults in every page again in each step. For 42 million parameters that is 34,000
# page faults and a quarter of the processor time of a step of 64 samples. Keeping the memory
# does not raise the peak; it only stops the process from shrinking in between.

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8

_INT_MAX: Final = 2**31 - 1
_TOP_PAD_BYTES: Final = 1 << 26

# For processes that only send and receive: blocks of messages are kept, vectors are not.
# glibc's own threshold also rises to this value, once a block of that size is freed.
KEPT_BYTES_MAX: Final = 1 << 25


def keep_memory(*, block_bytes_max: int | None = None) -> bool:
    """Make the C library (glibc only) keep freed memory; return whether it worked.

    Blocks beyond `block_bytes_max`, if given, are returned at once. Call it before threads start:
    they then share one arena, so that one thread can reuse memory that another has freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: _INT_MAX}
    if block_bytes_max is None:
        settings |= {_M_MMAP_MAX: 0, _M_TOP_PAD: _TOP_PAD_BYTES}
    else:
        settings[_M_MMAP_THRESHOLD] = block_bytes_max
    taken = [bool(mallopt(what, value)) for what, value in settings.items()]
    return all(taken)


Region = NDArray[np.uint8]  # (n_bytes,), zeroed when created, 64-byte aligned

HEADER_BYTES: Final = 64  # before the values of a region whose owner tells something about them


class Memory(Protocol):
    """The memory that a driver provides to its roles."""

    @property
    def host(self) -> str:
        """Roles with the same `host` can attach to each other's regions; "" shares nothing."""
        ...

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new zeroed region; raise `StorageError` if there is no space."""
        ...

    def attach(self, name: str) -> Region:
        """Return a region that another role created, or raise `MemoryGoneError`."""
        ...

    def release(self, name: str) -> None:
        """Release a region created or attached here; unknown names are ignored."""
        ...

    def disown(self, name: str) -> None:
        """Forget a region created here; roles that have attached it keep it.

        For a region that a role may still use although it is considered lost.
        """
        ...

    def retire(self, values: Vector) -> None:
        """Mark `values` as no longer valid; the simulated driver fills them with NaN."""
        ...


def attach_all(memory: Memory, name: str, *, n_bytes: int) -> Region:
    """Attach a region of this size, or raise MemoryGoneError, or RemoteProtocolError."""
    region = memory.attach(name)
    if region.nbytes != n_bytes:
        raise RemoteProtocolError(
            f"region {name!r} has {region.nbytes} bytes, not {n_bytes}: use one layout"
        )
    return region


class PrivateMemory:
    """Regions of one process, in a dictionary.

    With `poison`, retired and released values become NaN, so that a late reader fails.
    """

    def __init__(self, *, host: str = "here", poison: bool = False) -> None:
        self.host = host
        self._poison = poison
        self._regions: dict[str, Region] = {}

    def create(self, name: str, *, n_bytes: int) -> Region:
        if name in self._regions:
            raise LocalProtocolError(f"region {name!r} exists already")
        # numpy aligns to 16 bytes only. How a kernel splits a sum, and so its last bits,
        # depends on the alignment; 64 bytes give the same result in every run.
        storage = np.zeros(n_bytes + 64, np.uint8)
        begin = -storage.ctypes.data % 64
        region = storage[begin : begin + n_bytes]
        self._regions[name] = region
        return region

    def attach(self, name: str) -> Region:
        try:
            return self._regions[name]
        except KeyError:
            raise MemoryGoneError(f"no region {name!r} on host {self.host!r}") from None

    def release(self, name: str) -> None:
        region = self._regions.pop(name, None)
        if region is not None and self._poison:
            region.fill(0xFF)  # as float32 or float64: NaN

    def disown(self, name: str) -> None:
        self._regions.pop(name, None)

    def retire(self, values: Vector) -> None:
        if self._poison:
            values.fill(np.nan)
