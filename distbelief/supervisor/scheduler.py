"""Places every role of a job on a host: the supervisor's own, or one that has joined.

    Supervisor                    Scheduler                     host
      launch(replica-1) ------->  finds a host, or queues it
                                  AssignName, Assignments --->  starts its process
      <-------- on_end(replica-1) <--------------- HostReport   it has ended
      terminate(replica-1) ---->  Assignments (without it) -->  ends its process

On the supervisor's own host its launcher starts and ends the process. A silent host gets nothing
more; after `dead_seconds` its roles count as lost and start elsewhere.
"""

from collections.abc import Sequence
from typing import Final, Protocol, final

from distbelief.core import formatting
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Failed, FileChunk, FileRequest, HostReport, Offer, Stop
from distbelief.protocol.hosts import JOB_SPEC, PROBE, PROBE_BYTES
from distbelief.roles.log_events import LogEvent
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    AssignName,
    Connect,
    Launch,
    Received,
    Seconds,
    Send,
    Terminate,
)
from distbelief.supervisor.hosts import HERE, ClusterConfig, Host, HostTable
from distbelief.supervisor.membership import Membership, Presence, RoleRecord
from distbelief.supervisor.metrics import JobMetrics
from distbelief.supervisor.shutdown import Shutdown, ShutdownStage


HostToSupervisor = Offer | FileRequest | HostReport

FIRST: Final = "replica-0"  # all other replicas wait for it
DEATHS_MAX: Final = 3  # early deaths in a row on one host, after which it gets no more roles
N_HOSTS_MAX: Final = 1024
OFFER_SECONDS_MIN: Final = 1.0  # between two offers of a host that keeps restarting

_UNLIMITED: Final = 1 << 30  # slots of a job that runs on one host
_PROBE_CONTENT: Final = bytes(PROBE_BYTES)


class PlacementPolicy(Protocol):
    """Decides which host runs a role."""

    def place(
        self, role: Sequence[RoleRecord], hosts: HostTable, *, begun: bool
    ) -> Sequence[Host] | None:
        """Return the host of each rank of a role; None: it waits for a host with free slots.

        Args:
            role: The ranks to place; one, unless the role is a model-parallel group.
            hosts: All hosts.
            begun: Whether other ranks of its group run.
        """
        ...


@final
class ReplicasAnywhere:
    """The default: replicas on any host with free slots, everything else beside the supervisor."""

    def place(
        self, role: Sequence[RoleRecord], hosts: HostTable, *, begun: bool
    ) -> Sequence[Host] | None:
        first = role[0]
        is_first = first.group == FIRST
        # Replica 0 stays here if it fits: no network in between.
        if not takes_slots(first) or (is_first and hosts.here.free >= len(role)):
            return [hosts.here] * len(role)
        # All replicas wait for the first one, and a started group cannot compute without a rank.
        return hosts.find([record.name for record in role], must=is_first or begun)


def takes_slots(record: RoleRecord) -> bool:
    """Return whether a role takes a slot of its host, as ranks of replicas do."""
    return record.trains and record.kind != "coordinator"


class Ended(Protocol):
    """What the supervisor does when a role has ended on another host."""

    def __call__(
        self, name: Address, incarnation: int, reason: str, now: Seconds, *, at_once: bool
    ) -> list[Action]: ...


@final
class Scheduler:
    """Places the roles of one job, and keeps the hosts that have joined.

    Args:
        members: All roles of the job.
        metrics: Takes the log events.
        shutdown: Of the job.
        stable_seconds: An incarnation that lasts this long did not die early.
        on_end: Called when a role has ended on another host; `at_once`: it will say nothing more.
        cluster: How the job uses hosts that join; None: it runs on one host.
        policy: Decides which host runs a role.
    """

    def __init__(
        self,
        members: Membership,
        metrics: JobMetrics,
        shutdown: Shutdown,
        *,
        stable_seconds: Seconds,
        on_end: Ended,
        cluster: ClusterConfig | None,
        policy: PlacementPolicy,
    ) -> None:
        self._members = members
        self._metrics = metrics
        self._shutdown = shutdown
        self._stable_seconds = stable_seconds
        self._on_end = on_end
        self._cluster = cluster
        self._policy = policy
        self.hosts = HostTable(slots_here=_UNLIMITED if cluster is None else cluster.slots_here)
        self._waiting: dict[Address, int] = {}  # roles without a host, their incarnations
        self._moving: dict[Address, Seconds] = {}  # roles that leave their host: deadline
        self._begins_at: Seconds | None = None

    # --- start

    def start(self, now: Seconds) -> list[Action]:
        """Begin to wait for as many hosts as the job wants."""
        if self._cluster is None:
            return []
        self._begins_at = now + self._cluster.hosts_seconds_max
        n = self._cluster.n_hosts
        return [self._log(now, LogEvent("hosts_awaited", n=n))] if n else []

    def may_begin(self, now: Seconds) -> tuple[bool, list[Action]]:
        """Return whether there are enough hosts, or it has waited long enough."""
        wanted = 0 if self._cluster is None else self._cluster.n_hosts
        n_ready = sum(host.ready for host in self.hosts.joined.values())
        if self._cluster is None or n_ready >= wanted:
            return True, []
        if self._begins_at is None or now < self._begins_at:
            return False, []
        limit = self._cluster.hosts_seconds_max
        event = LogEvent("hosts_missing", n=n_ready, total=wanted, limit=limit)
        return True, [self._log(now, event)]

    # --- roles

    def launch(self, record: RoleRecord) -> None:
        """Start the present incarnation of a role, as soon as there is a host for it."""
        self._waiting[record.name] = record.incarnation

    def terminate(self, name: Address) -> list[Action]:
        """End the process of a role."""
        self._waiting.pop(name, None)
        self._moving.pop(name, None)
        host = self.hosts.leave(name)
        return [Terminate(name=name)] if host in {None, self.hosts.here} else []

    def ended_here(self, name: Address, incarnation: int) -> None:
        """Free the slot of a role whose process has ended on the supervisor's host."""
        if self.hosts.here.roles.get(name) == incarnation:
            self.hosts.leave(name)

    def place(self, now: Seconds) -> list[Action]:
        """Start waiting roles, as far as there are hosts for them; tell the hosts what is new."""
        actions = self._place_waiting(now) if self._waiting else []
        if self._cluster is not None:
            changed = [h for h in self.hosts.joined.values() if h.changed and h.present]
            actions += [host.assign(self._cluster.run) for host in changed]
        return actions

    def _place_waiting(self, now: Seconds) -> list[Action]:
        groups: dict[str, list[RoleRecord]] = {}
        for record in self._members:
            groups.setdefault(record.group, []).append(record)
        actions: list[Action] = []
        given: dict[Address, list[str]] = {}
        for group in groups.values():
            waiting = [record for record in group if record.name in self._waiting]
            others = [record for record in group if record.name not in self._waiting]
            running = [record for record in others if self.hosts.at(record.name)]
            # A group is placed as a whole: the other ranks are about to be launched.
            if not waiting or any(r.is_alive and r not in running for r in others):
                continue
            found = self._policy.place(waiting, self.hosts, begun=bool(running))
            if found is None:
                actions += self._wait(waiting, now)
                continue
            for record, host in zip(waiting, found, strict=True):
                actions += self._put(record, host, now)
                if host.name != HERE:
                    given.setdefault(host.name, []).append(record.name)
        for name, roles in given.items():
            label = self.hosts.joined[name].full_label
            event = LogEvent("host_given", host=label, roles=tuple(roles))
            actions.append(self._log(now, event))
        return actions

    def _put(self, record: RoleRecord, host: Host, now: Seconds) -> list[Action]:
        name, incarnation = record.name, self._waiting.pop(record.name)
        if record.presence is Presence.WAITING:
            record.begin_incarnation(incarnation, now)
        self.hosts.put(name, incarnation, host, slots=int(takes_slots(record)))
        if host.name != HERE:
            return [AssignName(name=name, to=host.name)]
        launch = Launch(name=name, incarnation=incarnation)
        if self._cluster is None:
            return [launch]
        return [AssignName(name=name, to=SUPERVISOR), launch]

    def _wait(self, group: Sequence[RoleRecord], now: Seconds) -> list[Action]:
        news = [record for record in group if record.presence is not Presence.WAITING]
        for record in news:
            record.presence = Presence.WAITING
        return [self._log(now, LogEvent("role_waits", role=record.name)) for record in news]

    # --- hosts

    def receive(self, event: Received, now: Seconds) -> list[Action]:
        """Handle a message of a host."""
        message, host = event.message, self.hosts.joined.get(event.sender)
        if self._cluster is None or not isinstance(message, HostToSupervisor):
            raise RemoteProtocolError(
                f"{event.sender} sent the supervisor {type(message).__name__}"
            )
        if isinstance(message, Offer):
            return self._offered(self._cluster, event, message, now)
        if host is None or host.refused:
            return []
        if isinstance(message, FileRequest):
            host.silence.heard(now)
            return [self._chunk(self._cluster, host, message)]
        if message.incarnation != host.offer.incarnation:
            return []
        return self._reported(self._cluster, host, message, now)

    def _offered(
        self, cluster: ClusterConfig, event: Received, offer: Offer, now: Seconds
    ) -> list[Action]:
        host = self.hosts.joined.get(event.sender)
        actions: list[Action] = []
        if host is None:
            self._drop_gone_host()
        elif host.refused or offer.incarnation < host.offer.incarnation:
            return []
        elif offer.incarnation == host.offer.incarnation:
            host.silence.heard(now)
            return [self._confirm(cluster, host)]
        elif now - host.since < OFFER_SECONDS_MIN:
            return []  # it repeats the offer
        elif host.present:
            actions += self._lose_host(host, "begins anew", now)
        connect = Connect(
            peer=event.sender, incarnation=event.incarnation, endpoint=offer.endpoint, host=""
        )
        host = self.hosts.joined[event.sender] = Host.of(event.sender, offer, now)
        joined = LogEvent(
            "host_joined", host=host.full_label, n=offer.cores, detail=host.resources()
        )
        return [*actions, connect, self._log(now, joined), host.assign(cluster.run)]

    def _drop_gone_host(self) -> None:
        joined = self.hosts.joined
        if len(joined) >= N_HOSTS_MAX:
            gone = next((name for name, host in joined.items() if not host.present), None)
            if gone is None:
                raise RemoteProtocolError(f"more than {N_HOSTS_MAX} hosts at once")
            del joined[gone]

    def _confirm(self, cluster: ClusterConfig, host: Host) -> Action:
        if host.present:
            return host.assign(cluster.run)
        return host.release("it was silent for too long", again=True)

    def _chunk(self, cluster: ClusterConfig, host: Host, ask: FileRequest) -> Action:
        contents = {JOB_SPEC: cluster.job_spec, PROBE: _PROBE_CONTENT}
        if ask.document not in contents:
            raise RemoteProtocolError(f"{host.name} asked for {ask.document!r:.80}")
        chunk = FileChunk.of(ask.document, contents[ask.document], ask.offset)
        # Lent: a host that requests much and reads nothing must not make us hold copies.
        return Send(receiver=host.name, message=chunk, lent=True)

    def _reported(
        self, cluster: ClusterConfig, host: Host, report: HostReport, now: Seconds
    ) -> list[Action]:
        host.silence.heard(now)
        if not host.present:
            return [self._confirm(cluster, host)]
        if report.refusal is not None:
            return self.reject(host, report.refusal, now)
        actions: list[Action] = []
        if report.ready and not host.ready:
            host.ready, host.bandwidth = True, report.bandwidth
            host.slots = cluster.slots_of(host.offer)
            host.grade = cluster.grade_of(host.offer, host.bandwidth)
            event = LogEvent("host_ready", host=host.full_label, detail=host.speeds())
            actions.append(self._log(now, event))
        for ended in report.ended:
            name = Address(ended.name)
            if host.roles.get(name) != ended.incarnation:
                continue
            if name in self._moving:
                actions += self._moved(name, "has left", now)
                continue
            actions += self._count_death(name, host, now)
            self.hosts.leave(name)
            reason = f"{ended.reason} on {host.label}"
            actions += self._on_end(name, ended.incarnation, reason, now, at_once=False)
        if report.leaving:
            actions += self._leave_host(host, now)
        return [*actions, host.assign(cluster.run)]

    def _count_death(self, name: Address, host: Host, now: Seconds) -> list[Action]:
        # Without blocking, a bad host would get every role, one after another, because its cores
        # are always free.
        record = self._members.get(name)
        if record is None or record.was_stable(self._stable_seconds):
            host.deaths.clear()
            return []
        host.deaths.append(name)
        if len(host.deaths) < DEATHS_MAX or len(set(host.deaths)) == 1:
            return []  # one role dies again and again: it may be its own fault
        useful = [h for h in self.hosts.joined.values() if h.ready and not h.is_blocked]
        if host not in useful or useful == [host]:
            return []  # the last usable host is never blocked
        host.is_blocked = True
        for each in map(self._members.get, host.deaths):
            if each is not None:
                each.restarts_in_a_row = 0
        return [self._log(now, LogEvent("host_blocked", host=host.full_label, n=DEATHS_MAX))]

    def to_blame(self, record: RoleRecord, failed: Failed) -> Host | None:
        """Return the host whose fault the failure of a role is; None: it is the job's.

        Preflight has tried model and data on the supervisor's host. So a role that fails elsewhere
        before its first step fails because of that host (no data, an older model), unless another
        role trains there. A failure of the first replica always counts against the job, because all
        others wait for it.
        """
        host = self.hosts.at(record.name)
        if host is None or host.name == HERE or not failed.culprit_is_job:
            return None
        beside = [r for r in map(self._members.get, host.roles) if r is not None]
        group = [record, *self._members.ranks_with(record), *beside]
        works = any(r.has_trained for r in group)
        is_now = host.roles.get(record.name) == record.incarnation
        return None if works or record.group == FIRST or not is_now else host

    def reject(self, host: Host, why: str, now: Seconds) -> list[Action]:
        """Send a host away that cannot run roles of this job."""
        host.refused = True
        why = formatting.without_control_characters(why)
        gone = self._lose_host(host, f"cannot take part: {why}", now)
        return [*gone, host.release(why, again=False, refused=True)]

    def _lose_host(self, host: Host, why: str, now: Seconds) -> list[Action]:
        host.present = host.ready = False
        lost = dict(host.roles)
        event = LogEvent("host_lost", host=host.full_label, reason=why)
        if lost:
            event = LogEvent("host_lost_with", host=host.full_label, reason=why, roles=tuple(lost))
        actions: list[Action] = [self._log(now, event)]
        for name in lost:
            actions += self._lose_role(name, f"was lost with {host.label}", now)
        return actions

    def _lose_role(self, name: Address, reason: str, now: Seconds) -> list[Action]:
        """Handle the end of a role by the fault of its host."""
        self._moving.pop(name, None)
        host, record = self.hosts.at(name), self._members.get(name)
        self.hosts.leave(name)
        if host is None or record is None:
            return []
        record.restarts_in_a_row = 0
        return self._on_end(name, record.incarnation, reason, now, at_once=True)

    # --- hosts that leave

    def _leave_host(self, host: Host, now: Seconds) -> list[Action]:
        assert self._cluster is not None
        actions: list[Action] = []
        if not host.leaving:
            host.leaving = True
            actions.append(self._log(now, LogEvent("host_leaving", host=host.full_label)))
        for name in list(host.roles):
            record = self._members.get(name)
            if name in self._moving or record is None:
                continue
            whole = record.kind == "replica" and not self._members.ranks_with(record)
            if whole and record.has_joined and self._shutdown.stage is ShutdownStage.RUN:
                self._moving[name] = now + self._cluster.leave_seconds_max
                stop = Stop(reason=f"{host.label} is leaving")
                actions.append(Send(receiver=name, message=stop))
            else:
                actions += self._lose_role(name, f"has left with {host.label}", now)
        if not host.roles:
            host.present = False
            event = LogEvent("host_left", host=host.full_label)
            actions += [self._log(now, event), host.release(event.text, again=False)]
        return actions

    def finished(self, record: RoleRecord, now: Seconds) -> list[Action] | None:
        """Handle the `Finished` of a role; None if it does not move to another host."""
        if record.name not in self._moving:
            return None
        return self._moved(record.name, "has left", now)

    def _moved(self, name: Address, how: str, now: Seconds) -> list[Action]:
        host = self.hosts.at(name)
        return self._lose_role(name, f"{how} with {host.label if host else name}", now)

    # --- time

    def tick(self, now: Seconds, *, late: Seconds) -> list[Action]:
        """Look for silent hosts, and for roles that do not leave in time; called every tick.

        Args:
            now: The present.
            late: How long the supervisor itself was suspended, which is no silence of a host.
        """
        if self._cluster is None:
            return []
        actions: list[Action] = []
        for host in list(self.hosts.joined.values()):
            host.silence.heard_at += late
            silent = host.silence.silent(now)
            if not host.present:
                continue
            host.is_silent = silent > self._cluster.silent_seconds
            if silent > self._cluster.dead_seconds:
                why = f"is lost (silent for {silent:.1f} s)"
                actions += self._lose_host(host, why, now)
        for name in [name for name, until in self._moving.items() if now > until]:
            actions += self._moved(name, "did not end in time, and has left", now)
        return actions

    def releases(self) -> list[Action]:
        """Return what tells all hosts that the job is over."""
        reason = self._shutdown.error or self._shutdown.reason or "it is over"
        return [
            host.release(f"the job ended: {reason}", again=False)
            for host in self.hosts.joined.values()
            if host.present
        ]

    def _log(self, now: Seconds, event: LogEvent) -> Action:
        return self._metrics.log(event, now)
