"""The supervisor of a job that machines may join: it says where each role runs.

    Supervisor                    Hosted                     host
      Launch(replica-1) ------->  a room for it
                                  Entrust, Duties -------->  starts its process
      <----- PeerLost(replica-1)  <------------- HostReport  it has ended
      Terminate(replica-1) ---->  Duties (without it) ---->  ends its process

It wraps the supervisor, which knows nothing of machines. Rules:

* A machine that is silent gets nothing more; after `dead_seconds` it is given up: what
  ran there is lost to the supervisor, which starts it elsewhere. When it is heard of
  again, it is told to begin anew.
* Replicas that find no room wait, and so do those of a machine that is gone; who comes
  late is given them. The first replica has a room always, for the others wait for it.
* A machine that wants to leave is left by its replicas one push later.
* A machine on which roles die too soon, or cannot begin, gets no more (`judge`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from distbelief.cluster.agent import BRIEF
from distbelief.cluster.bootstrap import N_PIECES_MAX, PROBE, chunk_of, probe_chunk
from distbelief.cluster.host_table import HERE, ClusterConfig, HostRecord, SlotTable
from distbelief.core import formatting
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Failed, FileRequest, Finished, HostReport, Offer, Stop
from distbelief.roles.role import (
    HOST,
    SUPERVISOR,
    Action,
    Address,
    AssignName,
    Connect,
    Event,
    Exit,
    Launch,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Terminate,
    TimerFired,
    message_types,
)
from distbelief.supervisor.membership import Presence, RoleRecord
from distbelief.supervisor.state import JobState, ShutdownStage
from distbelief.supervisor.supervisor import Supervisor, SupervisorMessage
from distbelief.supervisor.view import JobView


# Housing: a room for each role that is to run, or a place in the queue for one.

FIRST: Final = "replica-0"


@final
class PlacementQueue:
    """Of one job.

    Args:
        books: Of its supervisor.
        hosts: Machines that have joined; others change them.
        slots_here: Processes of replicas that the supervisor's own machine may run.
    """

    def __init__(
        self, books: JobState, hosts: dict[Address, HostRecord], *, slots_here: int
    ) -> None:
        self.places = SlotTable(slots_here=slots_here)
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
            return [AssignName(name=name, to=SUPERVISOR), launch]
        host = self._hosts[room]
        host.duties[name] = incarnation
        host.changed = True
        return [AssignName(name=name, to=room)]

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


# The judge of machines on which roles die, or cannot begin.
#
# Where they die too soon, no more are begun, if there are other machines: else such a
# machine takes them all, one after another, for its cores are always free.
#
# Model and data were tried out on the supervisor's own machine. So a role that fails on
# another before its first step, and would end the job, fails for what that machine has
# (no data, or an older model), unless another one trains there. The machine is sent away,
# and the job goes on without it. What is wrong with the first replica, wherever it is, is
# wrong with the job: the others wait for it.

DEATHS_MAX: Final = 3
"""Of roles on one machine, in a row and too soon, after which it gets no more."""


@final
class HostBlocklist:
    """Of one job.

    Args:
        books: Of its supervisor.
        hosts: Machines that have joined; others change them.
        places: Where roles run: shut for machines that get no more.
    """

    def __init__(
        self, books: JobState, hosts: Mapping[Address, HostRecord], places: SlotTable
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
        return host, f"{record.label} there: {formatting.harmless(failed.error)}"


# Roles of other machines that cannot reach a shard, or it not them: told once each.
#
# A firewall that lets machines speak to the supervisor, and not to each other, says
# nothing: roles join, and wait for a minute until they give up.

WAITING_SECONDS: Final = 10.0
"""For a shard that is there, before a role has done anything."""

_WAITING: Final = "waiting for "


@final
class ConnectivityCheck:
    """Of one job.

    Args:
        books: Of its supervisor.
    """

    def __init__(self, books: JobState) -> None:
        self._books = books
        self._since: dict[tuple[Address, int], Seconds | None] = {}  # None: told

    def look(self, hosts: Iterable[HostRecord], now: Seconds) -> list[Action]:
        """Return what is to be told now; called now and then."""
        since, self._since = self._since, {}
        actions: list[Action] = []
        for host in hosts:
            for life in host.duties.items():
                record = self._books.members.get(life[0])
                shard = None if record is None else self._awaited(record)
                if record is None or shard is None:
                    continue
                begun = self._since[life] = since.get(life, now)
                if begun is None or now - begun < WAITING_SECONDS:
                    continue
                self._since[life] = None
                text = (
                    f"{record.label} on {host.offer.label} and "
                    f"{shard.label} do not reach each other: a firewall has to let all "
                    "machines of a job call each other, at any port"
                )
                actions.append(self._books.figures.tell(text, now, "warning"))
        return actions

    def _awaited(self, record: RoleRecord) -> RoleRecord | None:
        """Return the shard for which a role waits that has not done anything yet."""
        works = record.progressed or record.counters.get("samples", 0.0)
        if works or not (record.has_joined and record.state.startswith(_WAITING)):
            return None
        shard = self._books.members.get(Address(record.state.removeprefix(_WAITING)))
        is_there = shard is not None and shard.kind == "shard" and shard.has_joined
        return shard if is_there else None


TICK_SECONDS: Final = 0.25
N_HOSTS_MAX: Final = 1024
LIFE_SECONDS_MIN: Final = 1.0
"""Of a machine: who begins anew in every message fills logs, and the screen."""

_TICK: Final = "hosts:tick"


ClusterMessage = SupervisorMessage | Offer | FileRequest | HostReport


@final
class ClusterSupervisor:
    """Wraps a supervisor.

    Args:
        supervisor: Of the job.
        config: How the job spans machines.
    """

    accepts: Final = message_types(ClusterMessage)

    def __init__(self, supervisor: Supervisor, config: ClusterConfig) -> None:
        self._supervisor = supervisor
        self._config = config
        self._books = supervisor.books
        self._hosts: dict[Address, HostRecord] = {}
        self._housing = PlacementQueue(self._books, self._hosts, slots_here=config.slots_here)
        self._judge = HostBlocklist(self._books, self._hosts, self._housing.places)
        self._unreached = ConnectivityCheck(self._books)
        self._moving: dict[Address, Seconds] = {}  # roles that leave: until when
        self._left: set[tuple[Address, int]] = set()  # lives of roles that have
        self._started: Started | None = None  # kept until the job begins
        self._begin_at: Seconds = 0.0
        self._beat_at: Seconds = 0.0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                actions = self._start(event, now)
            case TimerFired(name=name) if name == _TICK:
                actions = self._tick(now)
            case Received(sender=sender) if sender.startswith(HOST):
                actions = self._hear(event, now)
            case Received(message=Finished()) if event.sender in self._moving:
                actions = self._moved(event.sender, "has left", now)
            case Received(message=Finished()) if self._has_left(event):
                actions = []  # its machine was quicker to say so
            case Received(message=Failed()) if verdict := self._judge.verdict(event):
                actions = self._refused(*verdict, now)
            case _:
                if isinstance(event, PeerLost):
                    self._housing.ended_here(event.peer, event.incarnation)
                actions = self._inside(event, now)
        return [*actions, *self._house(now)]

    def status(self) -> tuple[str, dict[str, float]]:
        """Return that of the supervisor."""
        state, counters = self._supervisor.status()
        return state, dict(counters)

    def view(self, now: Seconds) -> JobView:
        """Return the supervisor's view, and where everything runs."""
        view = self._supervisor.view(now)
        hosts = tuple(host.view() for host in self._hosts.values())
        roles = tuple(replace(role, at=self._label_of(Address(role.name))) for role in view.roles)
        if self._started is not None:  # no role was started yet
            waits = Presence.WAITING.value
            roles = tuple(replace(role, state=waits) for role in roles)
            view = replace(view, phase="waiting for machines")
        return replace(view, roles=roles, hosts=hosts)

    def _label_of(self, role: Address) -> str:
        host = self._housing.host_of(role)
        return "" if host is None else host.offer.label

    # --------------------------------------------------------------------- the start

    def _start(self, event: Started, now: Seconds) -> list[Action]:
        self._books.figures.started_at = now
        self._started = event
        self._begin_at = now + self._config.hosts_seconds_max
        self._beat_at = now + TICK_SECONDS
        actions: list[Action] = [SetTimer(name=_TICK, at=self._beat_at)]
        if self._config.n_hosts:
            text = f"waiting for {_machines(self._config.n_hosts)}"
            actions.append(self._say(text, now))
        return [*actions, *self._begin_if_due(now)]

    def _begin_if_due(self, now: Seconds) -> list[Action]:
        started, wanted = self._started, self._config.n_hosts
        n_ready = sum(host.ready for host in self._hosts.values())
        if started is None or (n_ready < wanted and now < self._begin_at):
            return []
        self._started = None
        actions: list[Action] = []
        if n_ready < wanted:
            waited = f"{self._config.hosts_seconds_max:.0f} s"
            text = f"{n_ready} of {_machines(wanted)} came within {waited}: beginning"
            actions.append(self._say(text, now, warn=True))
        return [*actions, *self._inside(started, now)]

    # -------------------------------------------------------------------- the inside

    def _inside(self, event: Event, now: Seconds) -> list[Action]:
        """Let the supervisor handle an event, and see to where its roles run."""
        actions: list[Action] = []
        for action in self._supervisor.handle(event, now):
            match action:
                case Launch():
                    self._housing.want(action)
                case Terminate():
                    self._moving.pop(action.name, None)
                    actions += self._housing.end(action)
                case Exit():
                    actions += [*self._farewells(), action]
                case _:
                    actions.append(action)
        return actions

    def _farewells(self) -> list[Action]:
        reason = self._books.ending.error or self._books.ending.reason or "it is over"
        return [
            host.dismiss(f"the job ended: {reason}", again=False)
            for host in self._hosts.values()
            if host.present
        ]

    def _house(self, now: Seconds) -> list[Action]:
        """Find rooms for who has none, and tell machines whose duties have changed."""
        if self._started is not None:
            return []
        actions = self._housing.fill(now)
        changed = [h for h in self._hosts.values() if h.changed and h.present]
        return [*actions, *(host.assign(self._config.run) for host in changed)]

    # ------------------------------------------------------------------------- hosts

    def _hear(self, event: Received, now: Seconds) -> list[Action]:
        message, host = event.message, self._hosts.get(event.sender)
        match message:
            case Offer():
                return self._offered(event, message, now)
            case _ if host is None or host.refused:
                return []
            case FileRequest():
                host.heard_at = now
                return self._answer(host, message)
            case HostReport() if message.life == host.life:
                return self._reported(host, message, now)
            case HostReport():
                return []
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent the supervisor {type(message).__name__}"
                )

    def _offered(self, event: Received, offer: Offer, now: Seconds) -> list[Action]:
        host = self._hosts.get(event.sender)
        if host is not None and (host.refused or offer.life < host.life):
            return []
        if host is not None and offer.life == host.life:
            return self._again(host, now)
        if host is not None and now - host.since < LIFE_SECONDS_MIN:
            return []  # it says so again, for as long as it likes
        if host is None:
            self._make_room()
        actions: list[Action] = []
        if host is not None and host.present:
            actions += self._give_up(host, "begins anew", now)
        connect = Connect(
            peer=event.sender, incarnation=event.incarnation, endpoint=offer.endpoint, host=""
        )
        host = self._hosts[event.sender] = HostRecord.of(event.sender, offer, now)
        said = self._say(host.introduction(), now)
        return [*actions, connect, said, host.assign(self._config.run)]

    def _make_room(self) -> None:
        """Forget a machine that is gone, if there are very many."""
        if len(self._hosts) < N_HOSTS_MAX:
            return
        gone = [name for name, host in self._hosts.items() if not host.present]
        if not gone:
            raise RemoteProtocolError(f"more than {N_HOSTS_MAX} machines at once")
        del self._hosts[gone[0]]

    def _again(self, host: HostRecord, now: Seconds) -> list[Action]:
        """An offer that has been answered already."""
        host.heard_at = now
        if host.present:
            return [host.assign(self._config.run)]
        return [host.dismiss("it was silent for too long", again=True)]

    def _answer(self, host: HostRecord, ask: FileRequest) -> list[Action]:
        if ask.document == PROBE:
            host.n_probes += 1
            if host.n_probes > N_PIECES_MAX:
                return []
            piece = probe_chunk(ask.offset)
        elif ask.document == BRIEF:
            piece = chunk_of(BRIEF, self._config.brief, ask.offset)
        else:
            raise RemoteProtocolError(f"{host.name} asked for {ask.document!r:.80}")
        # Lent: who asks much, and reads nothing, makes the supervisor hold no copies.
        return [Send(receiver=host.name, message=piece, lent=True)]

    def _reported(self, host: HostRecord, report: HostReport, now: Seconds) -> list[Action]:
        host.heard_at = now
        if not host.present:
            return [host.dismiss("it was silent for too long", again=True)]
        if report.refusal is not None:
            return self._refused(host, report.refusal, now)
        actions: list[Action] = []
        if report.ready and not host.ready:
            host.ready, host.bandwidth = True, report.bandwidth
            self._housing.places.open(
                host.name,
                slots=self._config.slots_of(host.offer),
                grade=self._config.grade_of(host.offer, host.bandwidth),
            )
            text = f"{host.label} is ready: {host.speeds()}"
            actions += [self._say(text, now), *self._begin_if_due(now)]
        for ended in report.ended:
            name = Address(ended.name)
            if host.duties.get(name) == ended.incarnation:
                if name in self._moving:
                    actions += self._moved(name, "has left", now)
                    continue
                del host.duties[name]
                reason = f"{ended.reason} on {host.offer.label}"
                actions += self._judge.died(name, host, now)
                actions += self._lose(name, ended.incarnation, reason, now, own=True)
        if report.leaving:
            actions += self._let_leave(host, now)
        return [*actions, host.assign(self._config.run)]

    def _lose(
        self, name: Address, incarnation: int, reason: str, now: Seconds, *, own: bool = False
    ) -> list[Action]:
        """A role of another machine has ended: by its own fault, or the machine's."""
        self._housing.places.leave(name)
        self._moving.pop(name, None)
        record = self._books.members.get(name)
        if record is not None and not own:
            record.in_a_row = 0  # that is no reason to leave it out
        lost = PeerLost(peer=name, incarnation=incarnation, reason=reason)
        return self._inside(lost, now)

    def _refused(self, host: HostRecord, why: str, now: Seconds) -> list[Action]:
        host.refused = True
        gone = self._give_up(host, f"cannot take part: {why}", now)
        return [*gone, host.dismiss(why, again=False, refused=True)]

    def _give_up(self, host: HostRecord, why: str, now: Seconds) -> list[Action]:
        """A machine is gone, and with it all that ran there."""
        host.present = host.ready = False
        lost, host.duties = host.duties, {}
        self._housing.places.remove(host.name)
        labels = ", ".join(name.replace("-", " ") for name in lost)
        text = f"{host.label} {why}" + (f": {labels} lost with it" if lost else "")
        actions: list[Action] = [self._say(text, now, warn=True)]
        for name, incarnation in lost.items():
            reason = f"was lost with {host.offer.label}"
            actions += self._lose(name, incarnation, reason, now)
        return actions

    # ------------------------------------------------------------------------ leaving

    def _let_leave(self, host: HostRecord, now: Seconds) -> list[Action]:
        """Its user wants the machine back: end what runs there, in good order."""
        actions: list[Action] = []
        if not host.leaving:
            host.leaving = True
            self._housing.places.shut(host.name)
            actions.append(self._say(f"{host.label} is leaving", now))
        for name, incarnation in list(host.duties.items()):
            record = self._books.members.get(name)
            if name in self._moving or record is None:
                continue
            if self._is_alone(record) and self._books.ending.stage is ShutdownStage.RUN:
                self._moving[name] = now + self._config.leave_seconds_max
                stop = Stop(reason=f"{host.offer.label} is leaving")
                actions.append(Send(receiver=name, message=stop))
            else:
                del host.duties[name]
                reason = f"has left with {host.offer.label}"
                actions += self._lose(name, incarnation, reason, now)
        if not host.duties:
            host.present = False
            self._housing.places.remove(host.name)
            text = f"{host.label} has left"
            actions += [self._say(text, now), host.dismiss(text, again=False)]
        return actions

    def _is_alone(self, record: RoleRecord) -> bool:
        """Whether this role is a whole replica, which can end its step and push."""
        has_others = bool(self._books.members.machines_with(record))
        return record.kind == "replica" and record.has_joined and not has_others

    def _moved(self, name: Address, how: str, now: Seconds) -> list[Action]:
        """A replica has ended, for its machine is leaving."""
        del self._moving[name]
        host = self._housing.host_of(name)
        incarnation = None if host is None else host.duties.pop(name, None)
        if host is None or incarnation is None:
            return []
        host.changed = True
        self._left.add((name, incarnation))
        return self._lose(name, incarnation, f"{how} with {host.offer.label}", now)

    def _has_left(self, event: Received) -> bool:
        """Whether this life of a role has ended for its machine's sake, not its own.

        Its last words come by another way than its machine's, so maybe after these; the
        supervisor would take them for the end of the role's work.
        """
        return (event.sender, event.incarnation) in self._left

    # --------------------------------------------------------------------------- time

    def _tick(self, now: Seconds) -> list[Action]:
        late = max(0.0, now - self._beat_at)
        self._beat_at = now + TICK_SECONDS
        actions: list[Action] = [SetTimer(name=_TICK, at=self._beat_at)]
        for host in list(self._hosts.values()):
            host.heard_at += late if late > TICK_SECONDS else 0.0
            silence = now - host.heard_at
            if not host.present:
                continue
            if silence > self._config.dead_seconds:
                why = f"is lost (silent for {silence:.1f} s)"
                actions += self._give_up(host, why, now)
            elif not (host.leaving or host.is_avoided):
                is_open = silence <= self._config.silent_seconds
                self._housing.places.shut(host.name, is_open=is_open)
        for name in [n for n, until in self._moving.items() if now > until]:
            actions += self._moved(name, "did not end in time, and has left", now)
        actions += self._unreached.look(self._hosts.values(), now)
        return [*actions, *self._begin_if_due(now)]

    def _say(self, text: str, now: Seconds, *, warn: bool = False) -> Action:
        return self._books.figures.tell(text, now, "warning" if warn else "info")


def _machines(n: int) -> str:
    return "1 machine" if n == 1 else f"{n} machines"
