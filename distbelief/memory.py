"""Memory that a role owns and may lend to the other roles of its host.

A role asks its driver for named regions. The ZeroMQ driver backs them by mapped
files, the simulated driver by arrays; both hand out the same bytes to whoever attaches.
The role that created a region owns it and releases it; a name is never used twice in a
run (it carries the owner's name and incarnation). Whoever reads what another writes
checks a version before and after (`parameter_server.published`).
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distbelief.errors import LocalProtocolError, MemoryGoneError
from distbelief.vectors import Vector


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
