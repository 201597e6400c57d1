"""Housing: a room for each role that is to run, or a place in the queue for one."""

from typing import Final, final

from distbelief.job.hosts.placing import HERE, Places
from distbelief.job.hosts.records import HostRecord
from distbelief.job.supervision.books import Books
from distbelief.job.supervision.membership import Presence, RoleRecord
from distbelief.roles import SUPERVISOR, Action, Address, Entrust, Launch, Seconds, Terminate


FIRST: Final = "replica-0"


@final
class Housing:
    """Of one job.

    Args:
        books: Of its supervisor.
        hosts: Machines that have joined; others change them.
        slots_here: Processes of replicas that the supervisor's own machine may run.
    """

    def __init__(self, books: Books, hosts: dict[Address, HostRecord], *, slots_here: int) -> None:
        self.places = Places(slots_here=slots_here)
        self._books = books
        self._hosts = hosts
        self._waiting: dict[Address, int] = {}  # roles without a room

    def host_of(self, role: Address) -> HostRecord | None:
        """Return the machine that this role runs on, if that is another one."""
        return self._hosts.get(self.places.at(role) or HERE)

    def want(self, launch: Launch) -> None:
        """This role is to run: as soon as there is a room (`fill`)."""
        self._waiting[launch.name] = launch.incarnation

    def end(self, action: Terminate) -> list[Action]:
        """This role is not to run any more."""
        self._waiting.pop(action.name, None)
        host = self.host_of(action.name)
        self.places.leave(action.name)
        if host is None:
            return [action]
        host.duties.pop(action.name, None)
        host.changed = True
        return []

    def ended_here(self, role: Address, incarnation: int) -> None:
        """The process of a role of this machine has ended: its room is free."""
        record = self._books.members.get(role)
        is_here = self.places.at(role) == HERE
        if is_here and record is not None and record.incarnation == incarnation:
            self.places.leave(role)

    def fill(self, now: Seconds) -> list[Action]:
        """Find rooms for roles that have none, as far as there are any."""
        actions: list[Action] = []
        came: dict[Address, list[str]] = {}
        for group in self._groups():
            if self._is_incomplete(group[0]):
                continue
            rooms = self._rooms_for(group)
            if rooms is None:
                actions += self._let_wait(group, now)
                continue
            for record, room in zip(group, rooms, strict=True):
                actions += self._place(record, room, now)
                if room != HERE:
                    came.setdefault(room, []).append(record.label)
        for room, labels in came.items():
            text = f"{', '.join(labels)}: on {self._hosts[room].label}"
            actions.append(self._books.figures.tell(text, now))
        return actions

    def _groups(self) -> list[list[RoleRecord]]:
        """Return roles without a room, those of one model together."""
        groups: dict[str, list[RoleRecord]] = {}
        for record in self._books.members:
            if record.name in self._waiting:
                groups.setdefault(record.group, []).append(record)
        return list(groups.values())

    def _is_incomplete(self, record: RoleRecord) -> bool:
        """Whether others of its model are about to be started, too."""
        return any(
            other.is_alive
            and self.places.at(other.name) is None
            and other.name not in self._waiting
            for other in self._books.members.machines_with(record)
        )

    def _rooms_for(self, group: list[RoleRecord]) -> list[Address] | None:
        first = group[0]
        if not first.trains or first.kind == "coordinator":
            return [HERE] * len(group)
        if first.group == FIRST and self.places.fits(HERE, len(group)):
            return [HERE] * len(group)  # its link is the shortest
        others = self._books.members.machines_with(first)
        is_begun = any(self.places.at(other.name) for other in others)
        # The others wait for the first; what is begun computes nothing without it.
        must = first.group == FIRST or is_begun
        return self.places.find([record.name for record in group], must=must)

    def _place(self, record: RoleRecord, room: Address, now: Seconds) -> list[Action]:
        name, incarnation = record.name, self._waiting.pop(record.name)
        if record.presence is Presence.WAITING:
            record.begin_life(incarnation, now)
        takes_slot = record.trains and record.kind != "coordinator"
        self.places.put(name, room, slots=1 if takes_slot else 0)
        if room == HERE:
            launch = Launch(name=name, incarnation=incarnation)
            return [Entrust(name=name, to=SUPERVISOR), launch]
        host = self._hosts[room]
        host.duties[name] = incarnation
        host.changed = True
        return [Entrust(name=name, to=room)]

    def _let_wait(self, group: list[RoleRecord], now: Seconds) -> list[Action]:
        news = [r for r in group if r.presence is not Presence.WAITING]
        for record in news:
            record.presence = Presence.WAITING
        if not news:
            return []
        labels = ", ".join(record.label for record in news)
        verb = "wait" if len(news) > 1 else "waits"
        text = f"{labels} {verb} for a machine with free cores (distbelief join)"
        return [self._books.figures.tell(text, now)]
