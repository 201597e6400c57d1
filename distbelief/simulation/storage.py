"""The simulated disk with its checkpoints, and the shared memory of simulated hosts.

A released memory region is filled with NaN at once: a role that still reads it computes NaN,
and fails the checks that each role makes on its numbers. As with files, the regions of a
killed role stay until its next incarnation starts. Then their names are removed, and each
region becomes NaN when no other role has it attached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distbelief.core.memory import PrivateMemory, Region
from distbelief.core.vectors import Vector
from distbelief.errors import MemoryGoneError, StorageError
from distbelief.parameter_server.replication import shard_of
from distbelief.roles.role import FIRST_LABEL, NEWEST, Address, Snapshot
from distbelief.simulation.trace import crc


N_KEPT = 8  # checkpoints of one role; the oldest is deleted first

NO_SPACE = "no space left on device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint on the disk."""

    snapshot: Snapshot
    whole: bool  # False: damaged by a kill or a fault


class Disk:
    """The checkpoints of all roles; they survive every kill.

    Arrays are copied on writing and reading. Primary and backup of a shard share one
    directory, as in a job's run directory.
    """

    def __init__(self) -> None:
        self._n_fillers = 0
        self._stored: dict[Address, dict[str, Stored]] = {}

    @property
    def full(self) -> bool:
        """Whether writes fail now."""
        return self._n_fillers > 0

    def fill(self) -> None:
        """Make writes fail, until `clear` has been called as many times as `fill`."""
        self._n_fillers += 1

    def clear(self) -> None:
        self._n_fillers -= 1

    def save(self, role: Address, snapshot: Snapshot, *, whole: bool = True) -> None:
        """Write a checkpoint; it replaces one with the same label."""
        shelf = self._stored.setdefault(shard_of(role), {})
        label = snapshot.label
        if label == NEWEST:
            label = max(shelf, default=FIRST_LABEL)
        kept = replace(_copy(snapshot), label=label)
        shelf[label] = Stored(snapshot=kept, whole=whole)
        while len(shelf) > N_KEPT:
            del shelf[min(shelf)]

    def newest(self, role: Address) -> Snapshot | None:
        """Return a copy of the newest undamaged checkpoint, or None."""
        shelf = self._stored.get(shard_of(role), {})
        # Labels sort by age.
        labels = [label for label, stored in shelf.items() if stored.whole]
        return _copy(shelf[max(labels)].snapshot) if labels else None

    def snapshots(self, role: Address) -> tuple[Stored, ...]:
        """Return all checkpoints of a role, damaged ones too, oldest first."""
        shelf = self._stored.get(shard_of(role), {})
        return tuple(shelf[label] for label in sorted(shelf))

    def tear_newest(self, role: Address) -> None:
        """Damage the newest undamaged checkpoint."""
        newest = self.newest(role)
        if newest is not None:
            shelf = self._stored[shard_of(role)]
            shelf[newest.label] = Stored(snapshot=newest, whole=False)


def size_of(snapshot: Snapshot) -> int:
    """Return the bytes of a checkpoint's arrays."""
    return sum(values.nbytes for values in snapshot.arrays.values())


def checksums(snapshot: Snapshot) -> Mapping[str, int]:
    """Return the CRC-32 of every array, by name."""
    return {name: crc(values) for name, values in snapshot.arrays.items()}


def _copy(snapshot: Snapshot) -> Snapshot:
    return Snapshot(
        label=snapshot.label,
        arrays={name: values.copy() for name, values in snapshot.arrays.items()},
        facts=dict(snapshot.facts),
    )


@dataclass(slots=True, eq=False)
class _Lease:
    n_bytes: int
    readers: "set[LentMemory]" = field(default_factory=set)  # attached, besides the owner
    orphaned: bool = False  # its owner has ended, and its name is removed


class HostMemory:
    """The shared memory regions of one host."""

    def __init__(self, host: str, *, n_bytes_max: int) -> None:
        self._regions = PrivateMemory(host=host, poison=True)
        self._n_bytes_max = n_bytes_max
        self._leases: dict[str, _Lease] = {}

    @property
    def host(self) -> str:
        return self._regions.host

    @property
    def n_bytes(self) -> int:
        """Bytes in use."""
        return sum(lease.n_bytes for lease in self._leases.values())

    def lend(self) -> "LentMemory":
        """Return this memory as seen by one simulated process."""
        return LentMemory(self)

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new region, or raise `StorageError` if the host is full."""
        taken = self.n_bytes
        if taken + n_bytes > self._n_bytes_max:
            raise StorageError(
                f"no room on host {self.host!r} for region {name!r} of {n_bytes} bytes: "
                f"{taken} of {self._n_bytes_max} are taken; run fewer roles on the host"
            )
        region = self._regions.create(name, n_bytes=n_bytes)
        self._leases[name] = _Lease(n_bytes)
        return region

    def attach(self, name: str, reader: "LentMemory") -> Region:
        """Return a region to `reader`, or raise `MemoryGoneError`."""
        lease = self._leases.get(name)
        if lease is not None:
            if lease.orphaned and reader not in lease.readers:
                raise MemoryGoneError(
                    f"no region {name!r} on host {self.host!r}: its owner has died"
                )
            lease.readers.add(reader)
        return self._regions.attach(name)

    def detach(self, name: str, reader: "LentMemory") -> None:
        """Detach `reader`; an orphaned region ends with its last reader."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.readers.discard(reader)
            if lease.orphaned and not lease.readers:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Fill a region with NaN and remove it."""
        self._regions.release(name)
        self._leases.pop(name, None)

    def orphan(self, name: str) -> None:
        """Remove the name of a region whose owner has ended; readers keep it."""
        lease = self._leases[name]
        lease.orphaned = True
        if not lease.readers:
            self.remove(name)

    def retire(self, values: Vector) -> None:
        self._regions.retire(values)


class LentMemory:
    """The `Memory` of one simulated process; knows the regions that it created."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._owned: set[str] = set()
        self._attached: set[str] = set()

    @property
    def host(self) -> str:
        return self._memory.host

    def create(self, name: str, *, n_bytes: int) -> Region:
        region = self._memory.create(name, n_bytes=n_bytes)
        self._owned.add(name)
        return region

    def attach(self, name: str) -> Region:
        region = self._memory.attach(name, self)
        self._attached.add(name)
        return region

    def release(self, name: str) -> None:
        """Remove an owned region, filled with NaN, or detach from another role's region."""
        if name in self._owned:
            self._owned.remove(name)
            self._memory.remove(name)
        elif name in self._attached:
            self._attached.remove(name)
            self._memory.detach(name, self)

    def disown(self, name: str) -> None:
        if name in self._owned:
            self._owned.remove(name)
            self._memory.orphan(name)

    def release_all(self) -> None:
        """Release everything; regions that other roles have attached stay for them."""
        for name in self._attached:
            self._memory.detach(name, self)
        for name in self._owned:
            self._memory.orphan(name)
        self._attached.clear()
        self._owned.clear()

    def retire(self, values: Vector) -> None:
        self._memory.retire(values)
