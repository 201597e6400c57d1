"""Shared memory of simulated hosts: every buffer that nobody may read is NaN.

As files do, the regions of a role that was killed outlive it, until its next life
begins. Then their names are gone, and each of them is poisoned as soon as nobody has it
attached; until then it keeps its bytes and takes its room, as a mapping does. What its
owner releases itself is poisoned at once: its lease is over, and whoever reads it all
the same computes NaN, and is caught by the checks every role makes on its numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distbelief.core.memory import PrivateMemory, Region
from distbelief.core.vectors import Vector
from distbelief.errors import MemoryGoneError, StorageError
from distbelief.parameter_server.replication import shard_of
from distbelief.roles.role import FIRST_LABEL, NEWEST, Address, Snapshot
from distbelief.simulation.trace import crc


# The simulated disk: per role its snapshots, which survive every kill.

N_KEPT = 8  # snapshots of one role; the oldest goes first

NO_SPACE = "no space left on device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One snapshot as it lies on the disk."""

    snapshot: Snapshot
    whole: bool  # False: torn by a kill, or found damaged


class Disk:
    """Snapshots of all roles. Copies in, copies out: no array is shared with a role.

    Both copies of a shard have one shelf, as in a job's run directory.
    """

    def __init__(self) -> None:
        self._n_fillers = 0
        self._stored: dict[Address, dict[str, Stored]] = {}

    @property
    def full(self) -> bool:
        """Whether nothing can be saved at present."""
        return self._n_fillers > 0

    def fill(self) -> None:
        """Let something else take all the room, until as many calls of `clear`."""
        self._n_fillers += 1

    def clear(self) -> None:
        """Give the room back."""
        self._n_fillers -= 1

    def save(self, role: Address, snapshot: Snapshot, *, whole: bool = True) -> None:
        """Keep a copy; one of the same label is replaced."""
        shelf = self._stored.setdefault(shard_of(role), {})
        label = snapshot.label
        if label == NEWEST:
            label = max(shelf, default=FIRST_LABEL)
        kept = replace(_copy(snapshot), label=label)
        shelf[label] = Stored(snapshot=kept, whole=whole)
        while len(shelf) > N_KEPT:
            del shelf[min(shelf)]

    def newest(self, role: Address) -> Snapshot | None:
        """Return a copy of the newest whole snapshot (labels sort by age), or None."""
        shelf = self._stored.get(shard_of(role), {})
        labels = [label for label, stored in shelf.items() if stored.whole]
        return _copy(shelf[max(labels)].snapshot) if labels else None

    def snapshots(self, role: Address) -> tuple[Stored, ...]:
        """Return all that lies there, torn ones too, oldest first."""
        shelf = self._stored.get(shard_of(role), {})
        return tuple(shelf[label] for label in sorted(shelf))

    def tear_newest(self, role: Address) -> None:
        """Damage the newest whole snapshot, so that the one before it is the newest."""
        newest = self.newest(role)
        if newest is not None:
            shelf = self._stored[shard_of(role)]
            shelf[newest.label] = Stored(snapshot=newest, whole=False)


def size_of(snapshot: Snapshot) -> int:
    """Return the size of a snapshot's arrays."""
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
    """One region, and who has it besides its owner."""

    n_bytes: int
    readers: "set[LentMemory]" = field(default_factory=set)
    orphaned: bool = False  # its owner's life is over, and its name is gone


class HostMemory:
    """All regions of one host."""

    def __init__(self, host: str, *, n_bytes_max: int) -> None:
        self._regions = PrivateMemory(host=host, poison=True)
        self._n_bytes_max = n_bytes_max
        self._leases: dict[str, _Lease] = {}

    @property
    def host(self) -> str:
        """The host's name."""
        return self._regions.host

    @property
    def n_bytes(self) -> int:
        """How much is taken at present."""
        return sum(lease.n_bytes for lease in self._leases.values())

    def lend(self) -> "LentMemory":
        """Return this memory as one life of one role sees it."""
        return LentMemory(self)

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new region, or raise `StorageError` if the host has no room."""
        taken = self.n_bytes
        if taken + n_bytes > self._n_bytes_max:
            raise StorageError(
                f"no room on host {self.host!r} for region {name!r} of "
                f"{n_bytes} bytes: {taken} of {self._n_bytes_max} are taken; "
                "give the host more memory or run fewer roles on it"
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
        """Forget that `reader` has attached it; the last one ends an orphan."""
        lease = self._leases.get(name)
        if lease is not None:
            lease.readers.discard(reader)
            if lease.orphaned and not lease.readers:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Poison a region and forget it."""
        self._regions.release(name)
        self._leases.pop(name, None)

    def orphan(self, name: str) -> None:
        """The owner is dead: nobody else finds the region, and it ends with its use."""
        lease = self._leases[name]
        lease.orphaned = True
        if not lease.readers:
            self.remove(name)

    def retire(self, values: Vector) -> None:
        """Poison `values`."""
        self._regions.retire(values)


class LentMemory:
    """A `Memory` for one life of one role; knows what that life created."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._owned: set[str] = set()
        self._attached: set[str] = set()

    @property
    def host(self) -> str:
        """The host's name; roles of equal host share memory."""
        return self._memory.host

    def create(self, name: str, *, n_bytes: int) -> Region:
        """Return a new zeroed region that this life owns."""
        region = self._memory.create(name, n_bytes=n_bytes)
        self._owned.add(name)
        return region

    def attach(self, name: str) -> Region:
        """Return a region of this host, or raise `MemoryGoneError`."""
        region = self._memory.attach(name, self)
        self._attached.add(name)
        return region

    def release(self, name: str) -> None:
        """Poison and remove a region this life owns; an attached one stays."""
        if name in self._owned:
            self._owned.remove(name)
            self._memory.remove(name)
        elif name in self._attached:
            self._attached.remove(name)
            self._memory.detach(name, self)

    def disown(self, name: str) -> None:
        """Let a region that this life owns end with its use."""
        if name in self._owned:
            self._owned.remove(name)
            self._memory.orphan(name)

    def release_all(self) -> None:
        """This life is over: its regions outlive it where somebody uses them."""
        for name in self._attached:
            self._memory.detach(name, self)
        for name in self._owned:
            self._memory.orphan(name)
        self._attached.clear()
        self._owned.clear()

    def retire(self, values: Vector) -> None:
        """Fill `values` with NaN: nobody may read them any more."""
        self._memory.retire(values)
