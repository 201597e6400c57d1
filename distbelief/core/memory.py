"""Memory that a role owns and may lend to the other roles of its host.

A role asks its driver for named regions. The ZeroMQ driver backs them by mapped
files, the simulated driver by arrays; both hand out the same bytes to whoever attaches.
The role that created a region owns it and releases it; a name is never used twice in a
run (it carries the owner's name and incarnation). Whoever reads what another writes
checks a version before and after (`parameter_server.published`).
"""

import ctypes
import sys
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from distbelief.core.vectors import Vector
from distbelief.errors import LocalProtocolError, MemoryGoneError


# How this process asks the system for memory: large blocks are kept, not given back.
#
# A step allocates as many bytes of gradients as the model has, and frees them. The C
# library maps blocks beyond 32 MiB from the system and unmaps them each time, and trims
# what lies free at the end of the heap; then every page is zeroed by the kernel and
# faulted in anew, step after step. For 42 million parameters that is 34,000 page faults
# and a quarter of the processor time of a step of 64 samples. Kept, the memory is no more
# at its peak; only it does not shrink in between.

# malloc.h of glibc
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8

_INT_MAX: Final = 2**31 - 1
_TOP_PAD_BYTES: Final = 1 << 26

KEPT_BYTES_MAX: Final = 1 << 25
"""For who only sends and receives: blocks of messages are kept, vectors are not.
As much as glibc would come to by itself, once a block of that size has been freed."""


def keep_memory(*, block_bytes_max: int | None = None) -> bool:
    """Let the C library keep what is freed, for the rest of this process's life.

    Call before there are threads: one arena serves them all, so that what one of them
    frees another can have.

    Args:
        block_bytes_max: Larger blocks are given back at once; None keeps them all.

    Returns:
        Whether it does: only glibc can be told.
    """
    if sys.platform != "linux":
        return False
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

_ALIGNMENT_BYTES = 64


class Memory(Protocol):
    """What a driver lends its roles."""

    @property
    def host(self) -> str:
        """Roles whose `host` is equal can attach to each other's regions.

        The empty string means that nothing can be shared (block messages are used).
        """
        ...

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new zeroed region; raise `StorageError` if there is no room."""
        ...

    def attach(self, name: str) -> Region:
        """Return a region that another role created, or raise `MemoryGoneError`."""
        ...

    def release(self, name: str) -> None:
        """Give up a region created or attached here; unknown names are ignored."""
        ...

    def disown(self, name: str) -> None:
        """Forget a region created here; who has attached it keeps it until released.

        Nobody else finds it any more. For what a role that is taken for gone may still
        have in use.
        """
        ...

    def retire(self, values: Vector) -> None:
        """The lease on `values` has ended: nobody may rely on them any more.

        The simulated driver fills them with NaN, so that a late reader is caught.
        """
        ...


class PrivateMemory:
    """Regions of one process, in a dictionary; `retire` poisons if asked to."""

    def __init__(self, *, host: str = "here", poison: bool = False) -> None:
        self._host = host
        self._poison = poison
        self._regions: dict[str, Region] = {}

    @property
    def host(self) -> str:
        """Return the name given at construction."""
        return self._host

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new zeroed region."""
        if name in self._regions:
            raise LocalProtocolError(f"region {name!r} exists already")
        # numpy aligns to 16 bytes; how a sum is split, and its last bits, depend on it.
        storage = np.zeros(n_bytes + 64, np.uint8)
        begin = -storage.ctypes.data % 64
        region = storage[begin : begin + n_bytes]
        self._regions[name] = region
        return region

    def attach(self, name: str) -> Region:
        """Return a region created earlier."""
        try:
            return self._regions[name]
        except KeyError:
            raise MemoryGoneError(f"no region {name!r} on host {self._host!r}") from None

    def release(self, name: str) -> None:
        """Forget the region; whoever holds the array still may look at it."""
        region = self._regions.pop(name, None)
        if region is not None and self._poison:
            region.fill(0xFF)  # as float32 or float64: NaN

    def disown(self, name: str) -> None:
        """Forget the region; whoever holds the array goes on with it."""
        self._regions.pop(name, None)

    def retire(self, values: Vector) -> None:
        """Fill `values` with NaN if this memory poisons."""
        if self._poison:
            values.fill(np.nan)
