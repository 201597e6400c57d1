"""Where roles run: a table of rooms, each with so many slots for replicas.

A slot is what one process of a replica takes: as many cores as it has threads, or a
GPU. The supervisor's own machine is a room too; shards, coordinator and evaluator run
there, and take no slots.

* The fastest rooms are filled first, of those that are as fast as each other the
  emptiest. The supervisor's own machine counts as fast, as does one that nobody has
  measured.
* A replica of several machines goes to one room if it fits one, for then its messages
  stay there; else it is spread over rooms, in that order.
* Where nothing fits, a role waits; `must` finds it a room all the same.
* A role that is started again goes to where it was, if there is room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from distbelief.roles import Address


HERE: Final = Address("here")
"""The supervisor's own machine."""


@final
@dataclass(slots=True, kw_only=True)
class Room:
    """One machine.

    Attributes:
        slots: For processes of replicas.
        used: Of them; more than there are, where a role had to be somewhere.
        is_open: Whether anything more may come.
        grade: Of its speed, lower ones are faster (`pace`); None: nobody knows.
    """

    slots: int
    grade: int | None = None
    used: int = 0
    is_open: bool = True

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return max(0, self.slots - self.used) if self.is_open else 0

    @property
    def load(self) -> float:
        """Processes to a slot, with one more."""
        return (self.used + 1) / self.slots if self.slots else float("inf")


@final
class Places:
    """Of one job.

    Args:
        slots_here: Of the supervisor's own machine.
    """

    def __init__(self, *, slots_here: int) -> None:
        self._rooms: dict[Address, Room] = {HERE: Room(slots=slots_here)}
        self._at: dict[Address, Address] = {}  # role -> room, as long as it runs
        self._was_at: dict[Address, Address] = {}
        self._takes: dict[Address, int] = {}  # slots

    def open(self, host: Address, *, slots: int, grade: int | None = None) -> None:
        """This machine may be used from now on."""
        self._rooms[host] = Room(slots=slots, grade=grade)

    def shut(self, host: Address, *, is_open: bool = False) -> None:
        """Nothing more is to come to this machine (or, again, it may)."""
        room = self._rooms.get(host)
        if room is not None:
            room.is_open = is_open

    def remove(self, host: Address) -> None:
        """This machine is gone, and so is all that ran there."""
        for name in [name for name, at in self._at.items() if at == host]:
            self.leave(name)
        self._rooms.pop(host, None)

    def at(self, name: Address) -> Address | None:
        """Return where this role runs."""
        return self._at.get(name)

    def roles_at(self, host: Address) -> list[Address]:
        """Return what runs there."""
        return [name for name, at in self._at.items() if at == host]

    def put(self, name: Address, host: Address, *, slots: int) -> None:
        """This role runs there from now on."""
        self.leave(name)
        self._at[name] = self._was_at[name] = host
        self._takes[name] = slots
        self._rooms[host].used += slots

    def leave(self, name: Address) -> None:
        """This role runs no more."""
        host = self._at.pop(name, None)
        if host is not None:
            self._rooms[host].used -= self._takes.pop(name)

    def fits(self, host: Address, n: int) -> bool:
        """Return whether a machine has so many free slots."""
        return host in self._rooms and self._rooms[host].free >= n

    def find(self, names: Sequence[Address], *, must: bool = False) -> list[Address] | None:
        """Return a room for each of these roles, of one model; None if there is none.

        Args:
            names: Of the roles.
            must: Take rooms that are full already, if need be.
        """
        n = len(names)
        rooms = {h: room for h, room in self._rooms.items() if room.is_open}
        before = self._was_at.get(names[0])
        if before in rooms and rooms[before].free >= n:
            return [before] * n
        best = min((r.grade for r in rooms.values() if r.grade is not None), default=0)

        def order(host: Address) -> tuple[int, int]:
            grade = rooms[host].grade
            return best if grade is None else grade, -rooms[host].free

        by_room = sorted(rooms, key=order)  # stable
        for host in by_room:
            if rooms[host].free >= n:
                return [host] * n
        free = [host for host in by_room for _ in range(rooms[host].free)]
        if len(free) >= n:
            return free[:n]
        with_slots = [host for host, room in rooms.items() if room.slots]
        if not (must and with_slots):
            return None
        least = min(with_slots, key=lambda host: rooms[host].load)
        return [*free, *[least] * n][:n]
