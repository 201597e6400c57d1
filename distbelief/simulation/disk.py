"""The simulated disk: per role its snapshots, which survive every kill."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distbelief.parameter_server.copies.copies import shard_of
from distbelief.roles import FIRST_LABEL, NEWEST, Address, Snapshot
from distbelief.simulation.brief import crc


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
