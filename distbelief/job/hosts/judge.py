"""The judge of machines on which roles die, or cannot begin.

Where they die too soon, no more are begun, if there are other machines: else such a
machine takes them all, one after another, for its cores are always free.

Model and data were tried out on the supervisor's own machine. So a role that fails on
another before its first step, and would end the job, fails for what that machine has
(no data, or an older model), unless another one trains there. The machine is sent away,
and the job goes on without it. What is wrong with the first replica, wherever it is, is
wrong with the job: the others wait for it.
"""

from collections.abc import Mapping
from typing import Final, final

from distbelief.job.display import words
from distbelief.job.hosts.housing import FIRST
from distbelief.job.hosts.placing import HERE, Places
from distbelief.job.hosts.records import HostRecord
from distbelief.job.supervision.books import Books
from distbelief.messages import Failed
from distbelief.roles import Action, Address, Received, Seconds


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

    def __init__(self, books: Books, hosts: Mapping[Address, HostRecord], places: Places) -> None:
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

    def verdict(self, event: Received) -> tuple[HostRecord, str] | None:
        """Return the machine that a role fails for, and why; None: it is the job."""
        name, failed = event.sender, event.message
        host = self._hosts.get(self._places.at(name) or HERE)
        record = self._books.members.get(name)
        if not isinstance(failed, Failed) or host is None or record is None:
            return None
        members = self._books.members
        beside = [r for r in map(members.get, host.duties) if r is not None]
        group = [record, *members.machines_with(record), *beside]
        works = any(r.progressed or r.counters.get("samples", 0.0) for r in group)
        is_first = name.partition(".")[0] == FIRST
        is_now = host.duties.get(name) == event.incarnation
        if works or is_first or not (is_now and failed.culprit_is_job):
            return None
        return host, f"{record.label} there: {words.harmless(failed.error)}"
