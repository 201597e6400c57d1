"""Shared memory of simulated hosts: every buffer that nobody may read is NaN.

As files do, the regions of a role that was killed outlive it, until its next life
begins (or they are released); then they are poisoned and gone. Whoever still reads them
computes NaN, and is caught by the checks every role makes on its numbers.
"""

from distbelief.errors import StorageError
from distbelief.memory import PrivateMemory, Region
from distbelief.vectors import Vector


class HostMemory:
    """All regions of one host."""

    def __init__(self, host: str, *, n_bytes_max: int) -> None:
        self._regions = PrivateMemory(host=host, poison=True)
        self._n_bytes_max = n_bytes_max
        self._n_bytes = 0

    @property
    def n_bytes(self) -> int:
        """How much is taken at present."""
        return self._n_bytes

    def lend(self) -> "LentMemory":
        """Return this memory as one life of one role sees it."""
        return LentMemory(self)

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new region, or raise `StorageError` if the host has no room."""
        if self._n_bytes + n_bytes > self._n_bytes_max:
            raise StorageError(
                f"no room on host {self._regions.host!r} for region {name!r} of "
                f"{n_bytes} bytes: {self._n_bytes} of {self._n_bytes_max} are taken; "
                "give the host more memory or run fewer roles on it"
            )
        region = self._regions.create(name, n_bytes=n_bytes)
        self._n_bytes += n_bytes
        return region

    def remove(self, name: str, *, n_bytes: int) -> None:
        """Poison a region and forget it."""
        self._regions.release(name)
        self._n_bytes -= n_bytes

    @property
    def regions(self) -> PrivateMemory:
        """The regions by name, whoever owns them."""
        return self._regions


class LentMemory:
    """A `Memory` for one life of one role; knows what that life created."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._owned: dict[str, int] = {}  # name -> bytes

    @property
    def host(self) -> str:
        """The host's name; roles of equal host share memory."""
        return self._memory.regions.host

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new zeroed region that this life owns."""
        region = self._memory.create(name, n_bytes=n_bytes)
        self._owned[name] = n_bytes
        return region

    def attach(self, name: str) -> Region:
        """Return a region of this host, or raise `MemoryGoneError`."""
        return self._memory.regions.attach(name)

    def release(self, name: str) -> None:
        """Poison and remove a region this life owns; an attached one stays."""
        n_bytes = self._owned.pop(name, None)
        if n_bytes is not None:
            self._memory.remove(name, n_bytes=n_bytes)

    def release_all(self) -> None:
        """Poison and remove whatever this life still owns."""
        for name in tuple(self._owned):
            self.release(name)

    def retire(self, values: Vector) -> None:
        """Fill `values` with NaN: nobody may read them any more."""
        self._memory.regions.retire(values)
