"""The judge of machines on which roles die: those get no more, if there are others.

Else such a machine takes them all, one after another, for its cores are always free.
"""

from collections.abc import Mapping
from typing import Final, final

from distbelief.job.hosts.placing import Places
from distbelief.job.hosts.records import HostRecord
from distbelief.job.supervision.books import Books
from distbelief.roles import Action, Address, Seconds


DEATHS_MAX: Final = 3
"""Of roles on one machine, in a row and too soon, after which it gets no more."""


@final
class Judge:
    """Of one job.

    Args:
        books: Of its supervisor.
        hosts: Machines that have joined; others change them.
        places: Where roles run: shut for machines that get no more.
    """

    def __init__(
        self, books: Books, hosts: Mapping[Address, HostRecord], places: Places
    ) -> None:
        self._books = books
        self._hosts = hosts
        self._places = places

    def died(self, name: Address, host: HostRecord, now: Seconds) -> list[Action]:
        """A role has died on a machine, perhaps through its fault."""
        members, settled = self._books.members, self._books.config.settled_seconds
        record = members.get(name)
        if record is None or record.has_settled(settled):
            host.deaths.clear()
            return []
        host.deaths.append(name)
        if len(host.deaths) < DEATHS_MAX or len(set(host.deaths)) == 1:
            return []  # of one role alone, the fault may well be its own
        useful = [h for h in self._hosts.values() if h.ready and not h.is_avoided]
        if host not in useful or useful == [host]:
            return []
        host.is_avoided = True
        self._places.shut(host.name)
        for each in map(members.get, host.deaths):
            if each is not None:
                each.in_a_row = 0
        text = f"{host.label} gets no more roles: {DEATHS_MAX} died there too soon"
        return [self._books.figures.tell(text, now, "warning")]
