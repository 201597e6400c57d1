"""A job on simulated hosts that join, run its shards, die and leave; and what must hold.

CopiesApart   two copies of a shard are on one host only if no other host is free
OnThoseThere  no role is on a host that is lost
Acknowledged  what was acknowledged is in the last checkpoints, once
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from typing_extensions import override

from distbelief.config.job import ShardPlacement, StopTable
from distbelief.core.memory import Memory
from distbelief.job.hosts.agent import HostAgent, HostAgentConfig
from distbelief.job.launch.local import PREPARE
from distbelief.parameter_server.shard_config import other_copy, shard_of
from distbelief.protocol import Push, PushApplied, Stop, role as rl
from distbelief.protocol.role import HOST, SUPERVISOR, USER, Address
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.machines import SimulatedMachine
from distbelief.supervisor.hosts import HERE, ClusterConfig
from tests.distbelief.supervisor.hosts import Site, offer_of
from tests.simulation.jobs import JobCluster
from tests.simulation.scene import Check, sends


N_HOSTS_MAX = 8
GRACE_SECONDS = 1.0  # for the supervisor to notice that another host is free


def host_name(index: int) -> Address:
    return Address(f"{HOST}{index}")


class Agent:
    """The agent of a host, which needs no preflight and starts no incarnation that is over."""

    accepts = HostAgent.accepts

    def __init__(self, name: Address, job: "HostedJob", *, cores: int, domain: str = "") -> None:
        offer = offer_of(name.removeprefix(HOST), cores=cores, domain=domain)
        self._agent = HostAgent(HostAgentConfig(offer=offer), storage=Site(patience=600.0))
        self._job = job

    def handle(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        actions: list[rl.Action] = []
        for action in self._agent.handle(event, now):
            if isinstance(action, rl.Launch) and not self._job.may_start(action):
                lost = rl.PeerLost(peer=action.name, incarnation=action.incarnation, reason="over")
                actions += self.handle(lost, now)
            else:
                actions.append(action)
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self._agent.status()


class Places(Mapping[Address, SimulatedMachine]):
    """The machine of each role: the one of its host, which changes."""

    def __init__(self, job: "HostedJob") -> None:
        self._job = job

    @override
    def __getitem__(self, name: Address) -> SimulatedMachine:
        job = self._job
        if "cluster" not in vars(job):  # it is being built
            raise KeyError(name)
        return SimulatedMachine(host=job.host_of(name) or name, flops_per_second=job.flops)

    @override
    def __iter__(self) -> Iterator[Address]:
        return iter(())

    @override
    def __len__(self) -> int:
        return 0


@dataclass(eq=False)
class HostedJob(JobCluster):
    _: KW_ONLY
    placement: ShardPlacement
    n_awaited: int  # hosts
    slots_here: int = 1
    domains: Sequence[str] = ()
    stop: StopTable = field(default_factory=partial(StopTable, seconds=1e6))
    n_replicas: int = 3
    shard_copies: int = 2
    snapshot_every: float = 1e3

    def __post_init__(self) -> None:
        self.machines = Places(self)
        self.hosting = ClusterConfig(
            run="r",
            job_spec=b"j",
            n_hosts=self.n_awaited,
            slots_here=self.slots_here,
            placement=self.placement,
        )
        self.n_hosts = 0
        self.asked: set[Address] = set()  # hosts that were asked to leave
        self.acknowledged = Acknowledged()
        self.cluster.run(until=0.1)
        for _ in range(self.n_awaited):
            self.come()

    @override
    def roles(self) -> Mapping[Address, Builder]:
        return {
            **super().roles(),
            **{host_name(k): partial(self._agent, k) for k in range(N_HOSTS_MAX)},
        }

    def _agent(self, index: int, _: Memory) -> Agent:
        domain = self.domains[index] if index < len(self.domains) else ""
        return Agent(host_name(index), self, cores=2, domain=domain)

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return self.acknowledged, CopiesApart(self)

    def come(self) -> Address:
        """Let another host join."""
        name = host_name(self.n_hosts)
        self.n_hosts += 1
        self.cluster.restart(name)
        return name

    def kill_host(self, host: Address) -> None:
        for name in (host, *self.roles_on(host)):
            self.cluster.kill(name)

    def leave(self, host: Address) -> None:
        self.asked.add(host)
        stop = Stop(reason="Ctrl+C")
        self.cluster.post(host, rl.Received(sender=USER, incarnation=0, message=stop))

    def has_left(self, host: Address) -> bool:
        return host not in self.cluster.alive

    @property
    def hosts(self) -> list[Address]:
        """The hosts that are alive."""
        return [name for name in self.cluster.alive if name.startswith(HOST)]

    def host_of(self, role: Address) -> Address | None:
        """Return where a role is, in the eyes of the supervisor."""
        if role == SUPERVISOR or not self.cluster.is_alive(SUPERVISOR):
            return HERE
        host = self.supervisor.scheduler.hosts.at(role)
        return None if host is None else host.name

    def roles_on(self, host: Address) -> list[Address]:
        """Return the roles whose processes run there."""
        processes = self.cluster._driver.newest.values()
        return [p.name for p in processes if p.alive and p.launcher and p.launcher.name == host]

    def is_whole(self) -> bool:
        """Whether a backup of every shard could really take over now."""
        alive = self.cluster.alive
        return self.is_paired() and all(
            name in alive and self.cluster.incarnation(name) == record.incarnation
            for name in self.copies
            if (record := self.supervisor.members.get(name)) is not None
        )

    def may_start(self, launch: rl.Launch) -> bool:
        newest = self.cluster._driver._incarnations.get(launch.name, 0)
        return launch.name != PREPARE and launch.incarnation > newest


@dataclass
class CopiesApart:
    """Looks at the places of all roles whenever the supervisor has handled an event."""

    job: HostedJob
    together_since: dict[Address, float] = field(default_factory=dict)

    def __call__(self, happening: HandledEvent) -> None:
        if happening.name != SUPERVISOR:
            return
        supervisor, now = self.job.supervisor, self.job.now
        hosts = supervisor.scheduler.hosts
        for record in supervisor.members:
            host = hosts.at(record.name)
            assert host is None or host.present, f"{record.name} is on {host.name}, which is lost"
        for shard in self.job.shards if supervisor._runs else ():
            one, other = hosts.at(shard), hosts.at(other_copy(shard))
            primary = supervisor.failover.primary(shard)
            settled = primary is not None and primary.has_joined
            others = [host for host in hosts.usable if host is not one]
            if one is None or one is not other or not others or not settled:
                self.together_since.pop(shard, None)
                continue
            seconds = now - self.together_since.setdefault(shard, now)
            free = ", ".join(host.name for host in others)
            assert seconds <= GRACE_SECONDS, f"both copies of {shard} on {one.name}; free: {free}"


@dataclass
class Acknowledged:
    """The pushes of each replica to each shard, by sequence: what was sent and acknowledged."""

    sent: dict[tuple[Address, Address], set[int]] = field(default_factory=dict)
    known: dict[tuple[Address, Address], set[int]] = field(default_factory=dict)

    def __call__(self, happening: HandledEvent) -> None:
        for shard, push in sends(happening, Push):
            self.sent.setdefault((shard_of(shard), happening.name), set()).add(push.sequence)
        for replica, applied in sends(happening, PushApplied):
            key = shard_of(happening.name), replica
            if key in self.sent:  # not to the primary
                self.known.setdefault(key, set()).add(applied.sequence)

    def check(self, job: HostedJob) -> None:
        """Compare them with the last checkpoint of each shard."""
        for shard in job.shards:
            snapshot = job.newest(shard)
            clients = json.loads(snapshot.facts["clients"])
            clock, n_sent, n_known = int(snapshot.facts["clock"]), 0, 0
            for (of, replica), sequences in self.sent.items():
                if of != shard:
                    continue
                known = self.known.get((of, replica), set())
                missing = max(known, default=0) - clients[replica]["watermark"]
                assert missing <= 0, f"{shard} lacks {missing} acknowledged pushes of {replica}"
                n_sent, n_known = n_sent + len(sequences), n_known + len(known)
            # A replica, or the primary that applied a push, may have died before the answer.
            assert n_known <= clock <= n_sent, (
                f"{shard} has applied {clock} pushes of {n_sent}, {n_known} of them acknowledged"
            )
