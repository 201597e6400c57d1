"""Assigns roles to the hosts of a job; roles without a free slot wait in a queue.

    Supervisor                    ClusterSupervisor             host
      Launch(replica-1) ------->  finds a slot
                                  AssignName, Assignments --->  starts its process
      <----- PeerLost(replica-1)  <--------------- HostReport   it has ended
      Terminate(replica-1) ---->  Assignments (without it) -->  ends its process

`ClusterSupervisor` wraps the supervisor, which knows nothing of hosts. A silent host gets nothing
more; after `dead_seconds` its roles count as lost and start elsewhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from distbelief.cluster.agent import JOB_SPEC
from distbelief.cluster.bootstrap import N_CHUNKS_MAX, PROBE, chunk_of, probe_chunk
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


FIRST: Final = "replica-0"


@final
class PlacementQueue:
    """Places the roles of one job; roles without a slot wait here.

    Args:
        job: State of the job.
        hosts: Hosts that have joined (shared with `ClusterSupervisor`).
        slots_here: Processes of replicas that the supervisor's own host may run.
    """

    def __init__(self, job: JobState, hosts: dict[Address, HostRecord], *, slots_here: int) -> None:
        self.slot_table = SlotTable(slots_here=slots_here)
        self._job = job
        self._hosts = hosts
        self._waiting: dict[Address, int] = {}  # roles without a slot, their incarnations

    def host_of(self, role: Address) -> HostRecord | None:
        return self._hosts.get(self.slot_table.at(role) or HERE)

    def want(self, launch: Launch) -> None:
        self._waiting[launch.name] = launch.incarnation

    def end(self, action: Terminate) -> list[Action]:
        """Free the slot of a role; return what ends its process, if it runs here."""
        self._waiting.pop(action.name, None)
        host = self.host_of(action.name)
        self.slot_table.leave(action.name)
        if host is None:
            return [action]
        host.roles.pop(action.name, None)
        host.changed = True
        return []

    def ended_here(self, role: Address, incarnation: int) -> None:
        """Free the slot of a role of this host whose process has ended."""
        record = self._job.members.get(role)
        is_here = self.slot_table.at(role) == HERE
        if is_here and record is not None and record.incarnation == incarnation:
            self.slot_table.leave(role)

    def fill(self, now: Seconds) -> list[Action]:
        """Place waiting roles, as far as there are free slots."""
        actions: list[Action] = []
        placed: dict[Address, list[str]] = {}
        for group in self._groups():
            if self._is_incomplete(group[0]):
                continue
            hosts = self._hosts_for(group)
            if hosts is None:
                actions += self._report_waiting(group, now)
                continue
            for record, host in zip(group, hosts, strict=True):
                actions += self._place(record, host, now)
                if host != HERE:
                    placed.setdefault(host, []).append(record.label)
        for host, labels in placed.items():
            text = f"{', '.join(labels)}: on {self._hosts[host].label}"
            actions.append(self._job.metrics.report(text, now))
        return actions

    def _groups(self) -> list[list[RoleRecord]]:
        groups: dict[str, list[RoleRecord]] = {}
        for record in self._job.members:
            if record.name in self._waiting:
                groups.setdefault(record.group, []).append(record)
        return list(groups.values())

    # Whether other ranks of its group are about to be started: a group is placed as a whole.
    def _is_incomplete(self, record: RoleRecord) -> bool:
        return any(
            other.is_alive
            and self.slot_table.at(other.name) is None
            and other.name not in self._waiting
            for other in self._job.members.ranks_with(record)
        )

    def _hosts_for(self, group: list[RoleRecord]) -> list[Address] | None:
        first = group[0]
        if not first.trains or first.kind == "coordinator":
            return [HERE] * len(group)
        if first.group == FIRST and self.slot_table.fits(HERE, len(group)):
            return [HERE] * len(group)  # no network in between
        others = self._job.members.ranks_with(first)
        is_begun = any(self.slot_table.at(other.name) for other in others)
        # All replicas wait for the first one, and a started group cannot compute without a rank.
        must = first.group == FIRST or is_begun
        return self.slot_table.find([record.name for record in group], must=must)

    def _place(self, record: RoleRecord, at: Address, now: Seconds) -> list[Action]:
        name, incarnation = record.name, self._waiting.pop(record.name)
        if record.presence is Presence.WAITING:
            record.begin_incarnation(incarnation, now)
        takes_slot = record.trains and record.kind != "coordinator"
        self.slot_table.put(name, at, slots=1 if takes_slot else 0)
        if at == HERE:
            launch = Launch(name=name, incarnation=incarnation)
            return [AssignName(name=name, to=SUPERVISOR), launch]
        host = self._hosts[at]
        host.roles[name] = incarnation
        host.changed = True
        return [AssignName(name=name, to=at)]

    def _report_waiting(self, group: list[RoleRecord], now: Seconds) -> list[Action]:
        news = [r for r in group if r.presence is not Presence.WAITING]
        for record in news:
            record.presence = Presence.WAITING
        if not news:
            return []
        labels = ", ".join(record.label for record in news)
        verb = "wait" if len(news) > 1 else "waits"
        text = f"{labels} {verb} for a host with free cores (distbelief join)"
        return [self._job.metrics.report(text, now)]


DEATHS_MAX: Final = 3  # early deaths in a row on one host, after which it gets no more roles


@final
class HostBlocklist:
    """Keeps roles away from hosts on which they die early or cannot start.

    Args:
        job: State of the job.
        hosts: Hosts that have joined.
        places: Where roles run; closed for blocked hosts.
    """

    def __init__(
        self, job: JobState, hosts: Mapping[Address, HostRecord], slot_table: SlotTable
    ) -> None:
        self._job = job
        self._hosts = hosts
        self._places = slot_table

    def died(self, name: Address, host: HostRecord, now: Seconds) -> list[Action]:
        """Count the death of a role on a host; block the host after too many early ones."""
        members, settled = self._job.members, self._job.config.stable_seconds
        record = members.get(name)
        if record is None or record.was_stable(settled):
            host.deaths.clear()
            return []
        host.deaths.append(name)
        if len(host.deaths) < DEATHS_MAX or len(set(host.deaths)) == 1:
            return []  # one role dies again and again: it may be its own fault
        # The last usable host is never blocked. Without blocking, a bad host would get every
        # role, one after another, because its cores are always free.
        useful = [h for h in self._hosts.values() if h.ready and not h.is_blocked]
        if host not in useful or useful == [host]:
            return []
        host.is_blocked = True
        self._places.shut(host.name)
        for each in map(members.get, host.deaths):
            if each is not None:
                each.restarts_in_a_row = 0
        text = f"{host.label} gets no more roles: {DEATHS_MAX} died there too soon"
        return [self._job.metrics.report(text, now, "warning")]

    def verdict(self, event: Received) -> tuple[HostRecord, str] | None:
        """Return the host to blame for a role's failure, and why; None if the job is to blame.

        Preflight has tried model and data on the supervisor's host. So a role that fails elsewhere
        before its first step fails because of that host (no data, an older model), unless another
        role trains there. A failure of the first replica always counts against the job, because all
        others wait for it.
        """
        name, failed = event.sender, event.message
        host = self._hosts.get(self._places.at(name) or HERE)
        record = self._job.members.get(name)
        if not isinstance(failed, Failed) or host is None or record is None:
            return None
        members = self._job.members
        beside = [r for r in map(members.get, host.roles) if r is not None]
        group = [record, *members.ranks_with(record), *beside]
        works = any(r.progressed or r.counters.get("samples", 0.0) for r in group)
        is_first = name.partition(".")[0] == FIRST
        is_now = host.roles.get(name) == event.incarnation
        if works or is_first or not (is_now and failed.culprit_is_job):
            return None
        return host, f"{record.label} there: {formatting.without_control_characters(failed.error)}"


WAITING_SECONDS: Final = 10.0  # for a shard that is present, before a role has done anything

_WAITING: Final = "waiting for "


@final
class ConnectivityCheck:
    """Warns once about each role that cannot reach a shard, or the shard it.

    A firewall that lets hosts reach the supervisor but not each other causes no error: roles join
    and wait for a minute until they give up.

    Args:
        job: State of the job.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._since: dict[tuple[Address, int], Seconds | None] = {}  # None: reported

    def look(self, hosts: Iterable[HostRecord], now: Seconds) -> list[Action]:
        """Return the warnings that are due; called periodically."""
        since, self._since = self._since, {}
        actions: list[Action] = []
        for host in hosts:
            for process in host.roles.items():
                record = self._job.members.get(process[0])
                shard = None if record is None else self._awaited(record)
                if record is None or shard is None:
                    continue
                begun = self._since[process] = since.get(process, now)
                if begun is None or now - begun < WAITING_SECONDS:
                    continue
                self._since[process] = None
                text = (
                    f"{record.label} on {host.offer.label} and {shard.label} cannot connect: "
                    "let the firewall open all ports between the hosts of a job"
                )
                actions.append(self._job.metrics.report(text, now, "warning"))
        return actions

    def _awaited(self, record: RoleRecord) -> RoleRecord | None:
        works = record.progressed or record.counters.get("samples", 0.0)
        if works or not (record.has_joined and record.state.startswith(_WAITING)):
            return None
        shard = self._job.members.get(Address(record.state.removeprefix(_WAITING)))
        is_there = shard is not None and shard.kind == "shard" and shard.has_joined
        return shard if is_there else None


TICK_SECONDS: Final = 0.25
N_HOSTS_MAX: Final = 1024
OFFER_SECONDS_MIN: Final = 1.0  # between two offers of a host that keeps restarting

_TICK: Final = "hosts:tick"


ClusterMessage = SupervisorMessage | Offer | FileRequest | HostReport


@final
class ClusterSupervisor:
    """Wraps a supervisor and places its roles on hosts.

    Args:
        supervisor: Of the job.
        config: How the job uses hosts.
    """

    accepts: Final = message_types(ClusterMessage)

    def __init__(self, supervisor: Supervisor, config: ClusterConfig) -> None:
        self._supervisor = supervisor
        self._config = config
        self._job = supervisor.job
        self._hosts: dict[Address, HostRecord] = {}
        self._queue = PlacementQueue(self._job, self._hosts, slots_here=config.slots_here)
        self._blocklist = HostBlocklist(self._job, self._hosts, self._queue.slot_table)
        self._connectivity = ConnectivityCheck(self._job)
        self._leaving_roles: dict[Address, Seconds] = {}  # roles that leave their host: deadline
        self._left: set[tuple[Address, int]] = set()  # incarnations that have left
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
            case Received(message=Finished()) if event.sender in self._leaving_roles:
                actions = self._role_left(event.sender, "has left", now)
            case Received(message=Finished()) if self._has_left(event):
                actions = []  # its host's report came first
            case Received(message=Failed()) if verdict := self._blocklist.verdict(event):
                actions = self._reject(*verdict, now)
            case _:
                if isinstance(event, PeerLost):
                    self._queue.ended_here(event.peer, event.incarnation)
                actions = self._supervise(event, now)
        return [*actions, *self._place_roles(now)]

    def status(self) -> tuple[str, dict[str, float]]:
        state, counters = self._supervisor.status()
        return state, dict(counters)

    def view(self, now: Seconds) -> JobView:
        """Return the supervisor's view, with the host of each role."""
        view = self._supervisor.view(now)
        hosts = tuple(host.view() for host in self._hosts.values())
        roles = tuple(replace(role, at=self._label_of(Address(role.name))) for role in view.roles)
        if self._started is not None:  # no role was started yet
            waits = Presence.WAITING.value
            roles = tuple(replace(role, state=waits) for role in roles)
            view = replace(view, phase="waiting for hosts")
        return replace(view, roles=roles, hosts=hosts)

    def _label_of(self, role: Address) -> str:
        host = self._queue.host_of(role)
        return "" if host is None else host.offer.label

    def _start(self, event: Started, now: Seconds) -> list[Action]:
        self._job.metrics.started_at = now
        self._started = event
        self._begin_at = now + self._config.hosts_seconds_max
        self._beat_at = now + TICK_SECONDS
        actions: list[Action] = [SetTimer(name=_TICK, at=self._beat_at)]
        if self._config.n_hosts:
            text = f"waiting for {_hosts_text(self._config.n_hosts)}"
            actions.append(self._report(text, now))
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
            text = f"{n_ready} of {_hosts_text(wanted)} came within {waited}: beginning"
            actions.append(self._report(text, now, warn=True))
        return [*actions, *self._supervise(started, now)]

    def _supervise(self, event: Event, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for action in self._supervisor.handle(event, now):
            match action:
                case Launch():
                    self._queue.want(action)
                case Terminate():
                    self._leaving_roles.pop(action.name, None)
                    actions += self._queue.end(action)
                case Exit():
                    actions += [*self._releases(), action]
                case _:
                    actions.append(action)
        return actions

    def _releases(self) -> list[Action]:
        reason = self._job.shutdown.error or self._job.shutdown.reason or "it is over"
        return [
            host.release(f"the job ended: {reason}", again=False)
            for host in self._hosts.values()
            if host.present
        ]

    def _place_roles(self, now: Seconds) -> list[Action]:
        if self._started is not None:
            return []
        actions = self._queue.fill(now)
        changed = [h for h in self._hosts.values() if h.changed and h.present]
        return [*actions, *(host.assign(self._config.run) for host in changed)]

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
            case HostReport() if message.incarnation == host.incarnation:
                return self._reported(host, message, now)
            case HostReport():
                return []
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent the supervisor {type(message).__name__}"
                )

    def _offered(self, event: Received, offer: Offer, now: Seconds) -> list[Action]:
        host = self._hosts.get(event.sender)
        if host is not None and (host.refused or offer.incarnation < host.incarnation):
            return []
        if host is not None and offer.incarnation == host.incarnation:
            return self._repeat_answer(host, now)
        if host is not None and now - host.since < OFFER_SECONDS_MIN:
            return []  # it repeats the offer
        if host is None:
            self._drop_gone_host()
        actions: list[Action] = []
        if host is not None and host.present:
            actions += self._lose_host(host, "begins anew", now)
        connect = Connect(
            peer=event.sender, incarnation=event.incarnation, endpoint=offer.endpoint, host=""
        )
        host = self._hosts[event.sender] = HostRecord.of(event.sender, offer, now)
        report = self._report(host.introduction(), now)
        return [*actions, connect, report, host.assign(self._config.run)]

    def _drop_gone_host(self) -> None:
        if len(self._hosts) < N_HOSTS_MAX:
            return
        gone = [name for name, host in self._hosts.items() if not host.present]
        if not gone:
            raise RemoteProtocolError(f"more than {N_HOSTS_MAX} hosts at once")
        del self._hosts[gone[0]]

    def _repeat_answer(self, host: HostRecord, now: Seconds) -> list[Action]:
        host.heard_at = now
        if host.present:
            return [host.assign(self._config.run)]
        return [host.release("it was silent for too long", again=True)]

    def _answer(self, host: HostRecord, ask: FileRequest) -> list[Action]:
        if ask.document == PROBE:
            host.n_probes += 1
            if host.n_probes > N_CHUNKS_MAX:
                return []
            piece = probe_chunk(ask.offset)
        elif ask.document == JOB_SPEC:
            piece = chunk_of(JOB_SPEC, self._config.job_spec, ask.offset)
        else:
            raise RemoteProtocolError(f"{host.name} asked for {ask.document!r:.80}")
        # Lent: a host that requests much and reads nothing must not make us hold copies.
        return [Send(receiver=host.name, message=piece, lent=True)]

    def _reported(self, host: HostRecord, report: HostReport, now: Seconds) -> list[Action]:
        host.heard_at = now
        if not host.present:
            return [host.release("it was silent for too long", again=True)]
        if report.refusal is not None:
            return self._reject(host, report.refusal, now)
        actions: list[Action] = []
        if report.ready and not host.ready:
            host.ready, host.bandwidth = True, report.bandwidth
            self._queue.slot_table.open(
                host.name,
                slots=self._config.slots_of(host.offer),
                grade=self._config.grade_of(host.offer, host.bandwidth),
            )
            text = f"{host.label} is ready: {host.speeds()}"
            actions += [self._report(text, now), *self._begin_if_due(now)]
        for ended in report.ended:
            name = Address(ended.name)
            if host.roles.get(name) == ended.incarnation:
                if name in self._leaving_roles:
                    actions += self._role_left(name, "has left", now)
                    continue
                del host.roles[name]
                reason = f"{ended.reason} on {host.offer.label}"
                actions += self._blocklist.died(name, host, now)
                actions += self._lose_role(name, ended.incarnation, reason, now, own=True)
        if report.leaving:
            actions += self._leave_host(host, now)
        return [*actions, host.assign(self._config.run)]

    def _lose_role(
        self, name: Address, incarnation: int, reason: str, now: Seconds, *, own: bool = False
    ) -> list[Action]:
        self._queue.slot_table.leave(name)
        self._leaving_roles.pop(name, None)
        record = self._job.members.get(name)
        if record is not None and not own:
            record.restarts_in_a_row = 0  # the host's fault, not the role's
        lost = PeerLost(peer=name, incarnation=incarnation, reason=reason)
        return self._supervise(lost, now)

    def _reject(self, host: HostRecord, why: str, now: Seconds) -> list[Action]:
        host.refused = True
        gone = self._lose_host(host, f"cannot take part: {why}", now)
        return [*gone, host.release(why, again=False, refused=True)]

    def _lose_host(self, host: HostRecord, why: str, now: Seconds) -> list[Action]:
        host.present = host.ready = False
        lost, host.roles = host.roles, {}
        self._queue.slot_table.remove(host.name)
        labels = ", ".join(name.replace("-", " ") for name in lost)
        text = f"{host.label} {why}" + (f": {labels} lost with it" if lost else "")
        actions: list[Action] = [self._report(text, now, warn=True)]
        for name, incarnation in lost.items():
            reason = f"was lost with {host.offer.label}"
            actions += self._lose_role(name, incarnation, reason, now)
        return actions

    def _leave_host(self, host: HostRecord, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        if not host.leaving:
            host.leaving = True
            self._queue.slot_table.shut(host.name)
            actions.append(self._report(f"{host.label} is leaving", now))
        for name, incarnation in list(host.roles.items()):
            record = self._job.members.get(name)
            if name in self._leaving_roles or record is None:
                continue
            if self._is_whole_replica(record) and self._job.shutdown.stage is ShutdownStage.RUN:
                self._leaving_roles[name] = now + self._config.leave_seconds_max
                stop = Stop(reason=f"{host.offer.label} is leaving")
                actions.append(Send(receiver=name, message=stop))
            else:
                del host.roles[name]
                reason = f"has left with {host.offer.label}"
                actions += self._lose_role(name, incarnation, reason, now)
        if not host.roles:
            host.present = False
            self._queue.slot_table.remove(host.name)
            text = f"{host.label} has left"
            actions += [self._report(text, now), host.release(text, again=False)]
        return actions

    def _is_whole_replica(self, record: RoleRecord) -> bool:
        has_others = bool(self._job.members.ranks_with(record))
        return record.kind == "replica" and record.has_joined and not has_others

    def _role_left(self, name: Address, how: str, now: Seconds) -> list[Action]:
        del self._leaving_roles[name]
        host = self._queue.host_of(name)
        incarnation = None if host is None else host.roles.pop(name, None)
        if host is None or incarnation is None:
            return []
        host.changed = True
        self._left.add((name, incarnation))
        return self._lose_role(name, incarnation, f"{how} with {host.offer.label}", now)

    def _has_left(self, event: Received) -> bool:
        """Whether this incarnation has ended because its host leaves.

        Its `Finished` takes another route than its host's report and may come later; the supervisor
        would take it for the end of the role's work.
        """
        return (event.sender, event.incarnation) in self._left

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
                actions += self._lose_host(host, why, now)
            elif not (host.leaving or host.is_blocked):
                is_open = silence <= self._config.silent_seconds
                self._queue.slot_table.shut(host.name, is_open=is_open)
        for name in [n for n, until in self._leaving_roles.items() if now > until]:
            actions += self._role_left(name, "did not end in time, and has left", now)
        actions += self._connectivity.look(self._hosts.values(), now)
        return [*actions, *self._begin_if_due(now)]

    def _report(self, text: str, now: Seconds, *, warn: bool = False) -> Action:
        return self._job.metrics.report(text, now, "warning" if warn else "info")


def _hosts_text(n: int) -> str:
    return "1 host" if n == 1 else f"{n} hosts"
