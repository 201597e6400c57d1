"""Starts, moves and ends roles on hosts; waits for hosts, refuses them, and lets them leave.

    Supervisor                    Scheduler                     host
      launch(replica-1) ------->  finds a host, or queues it
                                  AssignName, Assignments --->  starts its process
      <-------- on_end(replica-1) <--------------- HostReport   it has ended
      terminate(replica-1) ---->  Assignments (without it) -->  ends its process

On the supervisor's own host its launcher starts and ends the process. A silent host gets nothing
more; after `dead_seconds`, or once it answers that nothing listens there, its roles count as lost
and start elsewhere.
"""

import math
from typing import Final, Protocol, final

from distbelief import protocol as wire
from distbelief.core import formatting
from distbelief.core.errors import RemoteProtocolError
from distbelief.parameter_server.shard_config import other_copy
from distbelief.protocol import role as rl
from distbelief.protocol.hosts import JOB_SPEC, PROBE, PROBE_BYTES
from distbelief.protocol.log_events import LogEvent
from distbelief.supervisor.failover import ShardFailover
from distbelief.supervisor.hosts import HERE, ClusterConfig, Host, HostTable
from distbelief.supervisor.membership import Membership, Presence, RoleRecord
from distbelief.supervisor.output import Output
from distbelief.supervisor.role_placement import (
    FIRST,
    PlacementPolicy,
    form_replicas,
    place_roles,
    takes_slots,
)
from distbelief.supervisor.shutdown import Shutdown, ShutdownStage


HostToSupervisor = wire.Offer | wire.FileRequest | wire.HostReport

DEATHS_MAX: Final = 3  # early deaths in a row on one host, after which it gets no more roles
N_HOSTS_MAX: Final = 1024
# Silence of all hosts, after which this one seems cut off; and for how long it then waits for them
CUT_OFF_SECONDS: Final = 2.0
CUT_OFF_SECONDS_MAX: Final = 60.0
REFUSED_SECONDS_MAX: Final = 60.0  # for another host, where all that have joined were refused
OFFER_SECONDS_MIN: Final = 1.0  # between two offers of a host that keeps restarting

_DONE: Final = ("samples", "evaluations", "pushes_applied")  # counters of work that a role has done
_UNLIMITED: Final = 1 << 30  # slots of a job that runs on one host
_PROBE_CONTENT: Final = bytes(PROBE_BYTES)


class Ended(Protocol):
    """Receives the end of a role; `at_once`: it will say nothing more."""

    def __call__(
        self, name: rl.Address, incarnation: int, reason: str, *, at_once: bool = False
    ) -> None: ...


@final
class Scheduler:
    """Places the roles of one job, and keeps the hosts that have joined."""

    def __init__(
        self,
        members: Membership,
        out: Output,
        shutdown: Shutdown,
        *,
        stable_seconds: rl.Seconds,
        on_end: Ended,  # of a role on another host
        failover: ShardFailover,
        cluster: ClusterConfig | None,
        policy: PlacementPolicy,
    ) -> None:
        self._members = members
        self._out = out
        self._shutdown = shutdown
        self._stable_seconds = stable_seconds
        self._on_end = on_end
        self._failover = failover
        self._cluster = cluster
        self._policy = policy
        place = (_UNLIMITED, 0) if cluster is None else (cluster.slots_here, cluster.memory_here)
        self.hosts = HostTable(slots_here=place[0], memory_here=place[1])
        self._waiting: dict[rl.Address, int] = {}  # roles without a host, their incarnations
        self._has_news = False  # of roles or hosts: those that wait may get a host now
        self._moving: dict[rl.Address, rl.Seconds] = {}  # roles that leave their host: deadline
        self._begins_at: rl.Seconds = math.inf
        self._cut_off_at: rl.Seconds | None = None
        self._refused_at: rl.Seconds | None = None  # since when all hosts are
        self._told_together = False  # that both copies of a shard are on one host

    # --- start

    def start(self) -> None:
        if self._cluster is not None:
            self._begins_at = self._out.now + self._cluster.hosts_seconds_max
            if self._cluster.n_hosts:
                self._out.log(LogEvent("hosts_awaited", n=self._cluster.n_hosts))

    def may_begin(self) -> bool:
        """Return whether there are enough hosts, or it has waited long enough."""
        cluster, n_ready = self._cluster, sum(host.ready for host in self.hosts.joined.values())
        if cluster is None or n_ready >= cluster.n_hosts:
            return True
        if self._out.now < self._begins_at and not self._is_refused():
            return False
        limit = cluster.hosts_seconds_max
        self._out.log(LogEvent("hosts_missing", n=n_ready, total=cluster.n_hosts, limit=limit))
        return True

    def _is_refused(self) -> bool:
        """Return whether all hosts that have joined were refused, and no other comes."""
        if self.hosts.refusal is None:
            self._refused_at = None
            return False
        if self._refused_at is None:
            self._refused_at = self._out.now
        return self._out.now - self._refused_at > REFUSED_SECONDS_MAX

    def why_without_hosts(self) -> str | None:
        """Return why there is no host for replicas, if all that could be one were refused."""
        if self.hosts.here.slots or not self._is_refused():
            return None
        return f"every host that joined was rejected: {self.hosts.refusal}"

    def form_replicas(self) -> None:
        """Choose the ranks of replicas by the hosts that are there, if the job asks for that."""
        if self._cluster is None or not self._cluster.forms:
            return
        groups = form_replicas(self._members, self.hosts, self._cluster)
        for index, record in enumerate(self._members.of("replica")):
            group = groups[index] if index < len(groups) else ()
            labels = ", ".join(host.full_label if host.label else HERE for host in group)
            detail = f"is formed of {labels}" if group else f"waits for {record.ranks} hosts"
            self._out.log(LogEvent("replica_formed", record.group, detail=detail))

    # --- roles

    def launch(self, record: RoleRecord) -> None:
        """Start the present incarnation of a role, as soon as there is a host for it."""
        self._waiting[record.name] = record.incarnation
        self._has_news = True

    def adopt(self, record: RoleRecord, host_name: rl.Address) -> None:
        """Note that a role runs already, started by another supervisor."""
        host = self.hosts.joined.get(host_name, self.hosts.here)
        slots = int(takes_slots(record))
        self.hosts.put(record.name, record.incarnation, host, slots=slots)
        self._assign_name(record.name, host)

    def adopt_host(self, name: rl.Address, offer: wire.Offer, bandwidth: float) -> None:
        """Note that a host has joined, and is ready."""
        assert self._cluster is not None
        host = self.hosts.joined[name] = Host.of(name, offer, self._out.now)
        self._cluster.admit(host, bandwidth)
        host.is_adopted = True
        self._out.add(rl.Connect(peer=name, incarnation=1, endpoint=offer.endpoint, host=""))

    def _assign_name(self, name: rl.Address, host: Host) -> None:
        if self._cluster is not None:
            to = rl.SUPERVISOR if host.name == HERE else host.name
            self._out.add(rl.AssignName(name=name, to=to))

    def terminate(self, name: rl.Address) -> None:
        self._has_news = True
        self._waiting.pop(name, None)
        self._moving.pop(name, None)
        if self.hosts.leave(name) in {None, self.hosts.here}:
            self._out.add(rl.Terminate(name=name))

    def ended(self, event: rl.PeerLost) -> None:
        """Free the slot of a role whose process has ended here; give up a host's that has."""
        self._has_news = True
        host = self.hosts.joined.get(event.peer)
        if self.hosts.here.roles.get(event.peer) == event.incarnation:
            self.hosts.leave(event.peer)
        elif host is not None and host.is_missed(event.incarnation):
            self._lose_host(host, f"is lost ({event.reason})")

    def place(self) -> None:
        """Start waiting roles, as far as there are hosts for them; tell the hosts what is new."""
        if self._waiting and self._has_news:
            self._place_waiting()
        self._has_news = False
        for host in [*self.hosts.changed]:
            if host.present and host is not self.hosts.here:
                self._assign(host)
        self.hosts.changed.clear()

    def _place_waiting(self) -> None:
        found = place_roles(self._members, self._waiting, self.hosts, self._policy)
        given: dict[str, list[str]] = {}
        # In roster order, whatever the order in which they got their hosts.
        for record in self._members.in_order(found):
            host = found[record.name]
            if host is None:
                self._wait(record)
                continue
            self._start_role(record, host)
            if host.name != HERE:
                given.setdefault(host.full_label, []).append(record.name)
        for label, roles in given.items():
            self._out.log(LogEvent("host_given", host=label, roles=tuple(roles)))

    def _start_role(self, record: RoleRecord, host: Host) -> None:
        name, incarnation = record.name, self._waiting.pop(record.name)
        if record.presence is Presence.WAITING:
            record.begin_incarnation(incarnation, self._out.now)
        self._assign_name(name, host)
        if self._cluster is not None and self._cluster.placement != "here":
            self._tell_together(record, host)
        record.begins = host.name != HERE
        if host.name == HERE:
            self._out.add(rl.Launch(name=name, incarnation=incarnation, ranks=record.ranks))

    def _tell_together(self, record: RoleRecord, host: Host) -> None:
        together = record.kind == "shard" and self.hosts.at(other_copy(record.name)) is host
        if together and not self._told_together:
            self._told_together = True
            self._out.log(LogEvent("copies_together", record.name, other=other_copy(record.name)))

    def _wait(self, record: RoleRecord) -> None:
        if record.presence is not Presence.WAITING:
            record.presence = Presence.WAITING
            self._out.log(LogEvent("role_waits", role=record.name))

    def copies_together(self) -> list[RoleRecord]:
        """Return the copies of shards that are beside the other one, and could be elsewhere."""
        found = []
        for record in self._members.of("shard") if self._cluster is not None else ():
            host, other = self.hosts.at(record.name), self.hosts.at(other_copy(record.name))
            if host is None or other is None or host.domain != other.domain:
                continue
            (better,) = self._policy.place([record], self.hosts, begun=False) or [host]
            if better.domain != other.domain or (better is not other and host is other):
                found.append(record)
        return found

    def move(self, record: RoleRecord) -> None:
        """Start a role anew on another host."""
        self._lose_role(record.name, "moves to another host")

    # --- hosts

    def receive(self, event: rl.Received) -> None:
        message, host = event.message, self.hosts.joined.get(event.sender)
        if self._cluster is None or not isinstance(message, HostToSupervisor):
            raise RemoteProtocolError(
                f"{event.sender} sent the supervisor {type(message).__name__}"
            )
        if isinstance(message, wire.Offer):
            self._has_news = True
            self._offered(event, message)
        elif host is None or host.refused:
            pass
        elif isinstance(message, wire.FileRequest):
            host.silence.heard(self._out.now)
            self._send_chunk(self._cluster, host, message)
        elif message.incarnation == host.offer.incarnation:
            self._reported(self._cluster, host, message)

    def _offered(self, event: rl.Received, offer: wire.Offer) -> None:
        now, host = self._out.now, self.hosts.joined.get(event.sender)
        if host is None:
            self._drop_gone_host()
        elif host.refused or offer.incarnation < host.offer.incarnation:
            return
        elif offer.incarnation == host.offer.incarnation:
            host.silence.heard(now)
            self._confirm(host)
            return
        elif now - host.since < OFFER_SECONDS_MIN:
            return  # it repeats the offer
        elif host.present:
            self._lose_host(host, "begins anew")
        peer, incarnation = event.sender, event.incarnation
        self._out.add(
            rl.Connect(peer=peer, incarnation=incarnation, endpoint=offer.endpoint, host="")
        )
        host = self.hosts.joined[event.sender] = Host.of(event.sender, offer, now)
        detail = host.resources()
        self._out.log(LogEvent("host_joined", host=host.full_label, n=offer.cores, detail=detail))
        self._assign(host)

    def _drop_gone_host(self) -> None:
        joined = self.hosts.joined
        if len(joined) >= N_HOSTS_MAX:
            gone = next((name for name, host in joined.items() if not host.present), None)
            if gone is None:
                raise RemoteProtocolError(f"more than {N_HOSTS_MAX} hosts at once")
            del joined[gone]

    def _assign(self, host: Host) -> None:
        assert self._cluster is not None
        self.hosts.changed.pop(host, None)
        assigned = tuple(
            wire.RoleAssignment(name=name, incarnation=n, ranks=record.ranks)
            for name, n in host.roles.items()
            if (record := self._members.get(name)) is not None
        )
        incarnation, run = host.offer.incarnation, self._cluster.run
        message = wire.Assignments(incarnation=incarnation, run=run, assignments=assigned)
        self._out.send(host.name, message)

    def _release(
        self, host: Host, reason: str, *, again: bool = False, refused: bool = False
    ) -> None:
        incarnation, reason = host.offer.incarnation, reason[:2048]
        message = wire.Release(incarnation=incarnation, again=again, reason=reason, refused=refused)
        self._out.send(host.name, message)

    def _confirm(self, host: Host) -> None:
        if host.present:
            self._assign(host)
        else:
            self._release(host, "it was silent for too long", again=True)

    def _send_chunk(self, cluster: ClusterConfig, host: Host, ask: wire.FileRequest) -> None:
        contents = {JOB_SPEC: cluster.job_spec, PROBE: _PROBE_CONTENT}
        if ask.document not in contents:
            raise RemoteProtocolError(f"{host.name} asked for {ask.document!r:.80}")
        chunk = wire.FileChunk.of(ask.document, contents[ask.document], ask.offset)
        # Lent: a host that requests much and reads nothing must not make us hold copies.
        self._out.add(rl.Send(receiver=host.name, message=chunk, lent=True))

    def _reported(self, cluster: ClusterConfig, host: Host, report: wire.HostReport) -> None:
        host.silence.heard(self._out.now)
        if not host.present:
            self._confirm(host)
            return
        if report.refusal is not None:
            self.reject(host, report.refusal)
            return
        self._has_news |= report.leaving or bool(report.ended)
        if report.ready and not host.ready:
            self._has_news = True
            cluster.admit(host, report.bandwidth)
            self._out.log(LogEvent("host_ready", host=host.full_label, detail=host.speeds()))
        if host.is_adopted:  # only now its key is known
            host.is_adopted = False
            for name in host.roles:
                self._assign_name(name, host)
        for ended in report.ended:
            name = rl.Address(ended.name)
            if host.roles.get(name) != ended.incarnation:
                continue
            if name in self._moving:
                self._moved(name, "has left")
                continue
            self._count_death(name, host)
            self.hosts.leave(name)
            self._on_end(name, ended.incarnation, f"{ended.reason} on {host.label}")
        if report.leaving:
            self._leave_host(cluster, host)
        self._assign(host)

    def _count_death(self, name: rl.Address, host: Host) -> None:
        # Without blocking, a bad host would get every role, one after another, because its cores
        # are always free.
        record = self._members.get(name)
        if record is None or record.was_stable(self._stable_seconds):
            host.deaths.clear()
            return
        host.deaths.append(name)
        if len(host.deaths) < DEATHS_MAX or len(set(host.deaths)) == 1:
            return  # one role dies again and again: it may be its own fault
        useful = [h for h in self.hosts.joined.values() if h.ready and not h.is_blocked]
        if host not in useful or useful == [host]:
            return  # the last usable host is never blocked
        host.is_blocked = True
        for each in map(self._members.get, host.deaths):
            if each is not None:
                each.restarts_in_a_row = 0
        self._out.log(LogEvent("host_blocked", host=host.full_label, n=DEATHS_MAX))

    def to_blame(self, record: RoleRecord, failed: wire.Failed) -> Host | None:
        """Return the host whose fault the failure of a role is; None: it is the job's.

        Preflight has tried model and data on the supervisor's host. So a role that fails elsewhere
        before its first step fails because of that host (no data, an older model), unless another
        role does the same work there. A failure of the first replica always counts against the job,
        because all others wait for it.
        """
        host = self.hosts.at(record.name)
        if host is None or host.name == HERE or not failed.culprit_is_job:
            return None
        beside = [r for r in map(self._members.get, host.roles) if r is not None]
        alike = [r for r in beside if (r.trains and record.trains) or r.kind == record.kind]
        group = [record, *self._members.ranks_with(record), *alike]
        done = (r.counters.get(name, 0.0) for r in group for name in _DONE)
        works = any(r.progressed for r in group) or any(n > 0 for n in done)
        is_now = host.roles.get(record.name) == record.incarnation
        return None if works or record.group == FIRST or not is_now else host

    def reject(self, host: Host, why: str) -> None:
        """Send a host away that cannot run roles of this job."""
        host.refused = why = formatting.plain(why) or "no reason given"
        self._lose_host(host, f"cannot take part: {why}")
        self._release(host, why, refused=True)

    def _lose_host(self, host: Host, why: str) -> None:
        host.present = host.ready = False
        lost = tuple(host.roles)
        what = "host_lost_with" if lost else "host_lost"
        self._out.log(LogEvent(what, host=host.full_label, reason=why, roles=lost))
        for name in lost:
            self._lose_role(name, f"was lost with {host.label}")

    def _lose_role(self, name: rl.Address, reason: str) -> None:
        self._has_news = True
        self._moving.pop(name, None)
        host, record = self.hosts.leave(name), self._members.get(name)
        if host is not None and record is not None:
            record.restarts_in_a_row = 0
            self._on_end(name, record.incarnation, reason, at_once=True)

    # --- hosts that leave

    def _leave_host(self, cluster: ClusterConfig, host: Host) -> None:
        if not host.leaving:
            host.leaving = True
            self._out.log(LogEvent("host_leaving", host=host.full_label))
        for name in list(host.roles):
            record = self._members.get(name)
            if record is None or (name in self._moving and record.kind != "shard"):
                continue
            if not self._ends_in_order(record, cluster):
                self._lose_role(name, f"has left with {host.label}")
                continue
            if record.kind == "shard" and len(self._copies(record)) == 1:
                # Repeated: it may be lost. What it acknowledges later is not in this checkpoint,
                # so it acknowledges nothing more.
                self._out.send(name, wire.SaveCheckpoint(label=rl.NEWEST, last=True))
            elif record.kind == "replica":
                self._out.send(name, wire.Stop(reason=f"{host.label} is leaving"))
            self._moving.setdefault(name, self._out.now + cluster.leave_seconds_max)
        if not host.roles:
            host.present = False
            event = LogEvent("host_left", host=host.full_label)
            self._out.log(event)
            self._release(host, event.text)

    def _ends_in_order(self, record: RoleRecord, cluster: ClusterConfig) -> bool:
        # Whether a role has something left to do before it leaves its host.
        if not record.has_joined:
            return False
        if record.kind == "shard" and self._shutdown.stage < ShutdownStage.CLOSE:
            return self._holds_more(record, cluster)
        whole = record.kind == "replica" and not self._members.ranks_with(record)
        return whole and self._shutdown.stage is ShutdownStage.RUN

    def _holds_more(self, record: RoleRecord, cluster: ClusterConfig) -> bool:
        # Whether a shard holds what is neither in a checkpoint nor in its other copy.
        copies = self._copies(record)
        if len(copies) == 1:  # only the coordinator knows when its shards can be saved
            return self._members.coordinator is None
        if self._failover.copy_role(record) not in {"primary", "backup"}:
            return False  # it holds no more than the primary
        # The other copy must have been heard since then: it could have died a moment ago.
        since = self._moving.get(record.name, math.inf) - cluster.leave_seconds_max
        is_new = any(copy.heard_at <= since for copy in copies)
        return is_new or self._failover.is_irreplaceable(record)

    def _copies(self, record: RoleRecord) -> list[RoleRecord]:
        return [copy for copy in self._failover.copies(record.shard) if copy.is_alive]

    def saved(self, record: RoleRecord, message: wire.CheckpointSaved) -> None:
        """Handle the last checkpoint of a shard whose host leaves."""
        if record.name in self._moving and message.label == rl.NEWEST and message.error is None:
            self._moved(record.name, "has left")

    def finished(self, record: RoleRecord) -> bool:
        """Handle the `Finished` of a role; return whether it moves to another host."""
        moves = record.name in self._moving
        if moves:
            self._moved(record.name, "has left")
        return moves

    def _moved(self, name: rl.Address, how: str) -> None:
        host = self.hosts.at(name)
        self._lose_role(name, f"{how} with {host.label if host else name}")

    # --- time

    def seems_cut_off(self) -> bool:
        """Return whether all hosts are silent at once, and some have shards: wait for them.

        It may be our own link. If all were given up, acknowledged pushes would be lost.
        """
        hosts = [host for host in self.hosts.joined.values() if host.present]
        now, has_shards = self._out.now, any(r.startswith("shard-") for h in hosts for r in h.roles)
        silent = all(host.silence.silent(now) > CUT_OFF_SECONDS for host in hosts)
        if len(hosts) < 2 or not (silent and has_shards):
            self._cut_off_at = None
            return False
        if self._cut_off_at is None:
            self._cut_off_at = now
            self._out.log(LogEvent("cut_off", n=len(hosts), limit=CUT_OFF_SECONDS_MAX))
        return now - self._cut_off_at < CUT_OFF_SECONDS_MAX

    def tick(self, *, late: rl.Seconds) -> None:
        """Look for silent hosts, and for roles that do not leave in time; called every tick."""
        self._has_news = True
        if self._cluster is None:
            return
        now = self._out.now
        for host in list(self.hosts.joined.values()):
            host.silence.heard_at += late  # the supervisor itself was suspended
            silent = host.silence.silent(now)
            if not host.present:
                continue
            was_silent, host.is_silent = host.is_silent, silent > self._cluster.silent_seconds
            if host.is_silent and not was_silent:
                peer, offer = host.name, host.offer
                self._out.add(
                    rl.Probe(peer=peer, incarnation=offer.incarnation, endpoint=offer.endpoint)
                )
            if silent > self._cluster.dead_seconds:
                self._lose_host(host, f"is lost (silent for {silent:.1f} s)")
        for name in [name for name, until in self._moving.items() if now > until]:
            self._moved(name, "did not end in time, and has left")

    def release_all(self) -> None:
        reason = self._shutdown.error or self._shutdown.reason or "it is over"
        for host in self.hosts.joined.values():
            if host.present:
                self._release(host, f"the job ended: {reason}")
