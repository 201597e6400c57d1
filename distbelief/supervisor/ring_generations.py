"""The members of a ring of replicas that sum their gradients: a generation for each list.

A new list begins a generation, in which all return to their last commit. The first one waits for
every replica, so that none trains alone. Later a death ends the generation at once, and a replica
that was restarted begins another. One that has taken its last step stays on the list: the others
need no more of it, and nothing begins anew. Generations rise, also over a supervisor that takes
over: members tell the one that they know.
"""

from typing import Final, final

from distbelief.protocol.ring import RingMember, RingMembers
from distbelief.protocol.role import Address
from distbelief.supervisor.membership import Membership, Presence, RoleRecord
from distbelief.supervisor.output import Output


GENERATION: Final = "ring_generation"  # counter of a replica


@final
class RingGenerations:
    def __init__(self, members: Membership, out: Output) -> None:
        self._members = members
        self._out = out
        self.generation = 0
        self._listed: dict[Address, int] = {}  # incarnations, in order
        self._first: dict[Address, int] = {}  # incarnations that were there when this one began

    def tick(self) -> None:
        """Begin a generation if the list has changed; repeat it to those that may not know it."""
        replicas = self._members.of("replica")
        self._first = self._first or {one.name: one.incarnation for one in replicas}
        listed = {one.name: one.incarnation for one in replicas if self._is_in(one)}
        awaited = [one for one in replicas if self._is_awaited(one)]
        if not listed or (awaited and not self._listed):
            return
        known = max(_count(one) for one in replicas)
        if listed != self._listed or known > self.generation:
            self._listed = listed
            self.generation = max(self.generation, known) + 1
        members = [RingMember(name=name, incarnation=n) for name, n in self._listed.items()]
        message = RingMembers(generation=self.generation, members=tuple(members))
        for one in replicas:
            if one.has_joined and one.name in listed and _count(one) != self.generation:
                self._out.send(one.name, message)

    def _is_in(self, record: RoleRecord) -> bool:
        was_in = self._listed.get(record.name) == record.incarnation
        if record.presence is Presence.FINISHED:
            return was_in and not self._has_lost
        return record.has_joined and (record.begun or was_in)

    @property
    def _has_lost(self) -> bool:
        """Whether one of those on the list has died."""
        records = {one.name: one for one in self._members.of("replica")}
        return any(
            records[name].incarnation != n or records[name].presence is Presence.LEFT_OUT
            for name, n in self._listed.items()
        )

    def _is_awaited(self, record: RoleRecord) -> bool:
        is_first = self._first.get(record.name) == record.incarnation
        return record.is_alive and is_first and not self._is_in(record)


def _count(record: RoleRecord) -> int:
    value = record.counters.get(GENERATION, 0.0)
    return int(value) if 0.0 <= value < 2.0**53 else 0
