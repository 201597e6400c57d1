"""The simulated disk with its checkpoints, and the shared memory of simulated hosts.

A released memory region is filled with NaN at once: a role that still reads it computes NaN,
and fails the checks that each role makes on its numbers. As with files, the regions of a
killed role stay until its next incarnation starts. Then their names are removed, and each
region becomes NaN when no other role has it attached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distbelief.core.errors import MemoryGoneError, StorageError
from distbelief.core.memory import PrivateMemory, Region
from distbelief.core.vectors import Vector
from distbelief.parameter_server.shard_config import shard_of
from distbelief.protocol.role import FIRST_LABEL, NEWEST, Address, Snapshot
from distbelief.simulation.trace import crc


N_KEPT = 8  # checkpoints of one role; the oldest is deleted first

NO_SPACE = "no space left on device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
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
    return sum(values.nbytes for values in snapshot.arrays.values())


def checksums(snapshot: Snapshot) -> Mapping[str, int]:
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
    owner: "LentMemory | None"  # None: it has ended, and the name of the region is removed
    readers: "set[LentMemory]" = field(default_factory=set)  # attached


class HostMemory:
    def __init__(self, host: str, *, n_bytes_max: int) -> None:
        self.host = host
        self.regions = PrivateMemory(host=host, poison=True)
        self.n_bytes_max = n_bytes_max
        self.leases: dict[str, _Lease] = {}

    @property
    def n_bytes(self) -> int:
        return sum(lease.n_bytes for lease in self.leases.values())

    def lend(self) -> "LentMemory":
        """Return this memory as seen by one simulated process."""
        return LentMemory(self)


class LentMemory:
    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    @property
    def host(self) -> str:
        return self._memory.host

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new region, or raise `StorageError` if the host is full."""
        memory = self._memory
        if memory.n_bytes + n_bytes > memory.n_bytes_max:
            raise StorageError(
                f"no room on host {self.host!r} for region {name!r} of {n_bytes} bytes: "
                f"{memory.n_bytes} of {memory.n_bytes_max} are taken; run fewer roles on the host"
            )
        region = memory.regions.create(name, n_bytes=n_bytes)
        memory.leases[name] = _Lease(n_bytes, owner=self)
        return region

    def attach(self, name: str) -> Region:
        lease = self._memory.leases.get(name)
        if lease is not None:
            if lease.owner is None and self not in lease.readers:
                raise MemoryGoneError(
                    f"no region {name!r} on host {self.host!r}: its owner has died"
                )
            lease.readers.add(self)
        return self._memory.regions.attach(name)

    def release(self, name: str) -> None:
        """Remove an owned region, filled with NaN, or detach from another role's region."""
        lease = self._memory.leases.get(name)
        if lease is not None and lease.owner is self:
            self._remove(name)
        elif lease is not None:
            self._detach(name, lease)

    def disown(self, name: str) -> None:
        lease = self._memory.leases.get(name)
        if lease is not None and lease.owner is self:
            lease.owner = None
            if not lease.readers:
                self._remove(name)

    def release_all(self) -> None:
        """Release everything; regions that other roles have attached stay for them."""
        for name, lease in list(self._memory.leases.items()):
            self._detach(name, lease)
            self.disown(name)

    def retire(self, values: Vector) -> None:
        self._memory.regions.retire(values)

    def _detach(self, name: str, lease: _Lease) -> None:
        if self in lease.readers:
            lease.readers.remove(self)
            if lease.owner is None and not lease.readers:
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._memory.regions.release(name)
        del self._memory.leases[name]
