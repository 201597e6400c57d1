"""The hosts of a job: their slots, their speed, and the roles on each."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Final, Self, final

import msgspec

from distbelief.config.algorithms import cores_of, facts_of
from distbelief.config.job import Job, ShardPlacement
from distbelief.core import formatting
from distbelief.core.reliable import Silence
from distbelief.parameter_server.layout import Layout
from distbelief.plans.step_cost import PlanCost
from distbelief.protocol import Offer
from distbelief.protocol.role import Address, Seconds
from distbelief.supervisor.view import HostView


_OPERATIONS: Final = 6.0  # of each parameter, a sample
_BYTES: Final = 4.0  # of each parameter, in a fetch or a push
ALIKE: Final = math.log(1.25)  # hosts that differ less have the same grade


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Rough cost of one replica's step per parameter: enough to rank hosts.

    A dense net needs 6 floating point operations per parameter and sample (2 forward, 4 backward;
    Dean et al. 2012 train such nets), and 4 bytes on the link for each fetch and each push. So only
    the batch decides whether a slow link or a slow processor is worse. In convolutions, which use a
    parameter more than once, the link counts for too much.
    """

    operations: float = 1.0  # floating point operations
    n_bytes: float = 0.0  # bytes on the link to the shards

    @classmethod
    def of(cls, job: Job) -> "StepTime":
        facts = facts_of(job)
        return cls(operations=_OPERATIONS * facts.batch_size, n_bytes=_BYTES * facts.exchanges)

    def grade(self, *, flops: float, bandwidth: float) -> int | None:
        """Return the grade of a host, lower is faster; None if unknown. Bandwidth 0.0: no limit."""
        if not flops:
            return None
        # The host reports this number: below 1 it makes no sense.
        seconds = self.operations / max(flops, 1.0)
        seconds += self.n_bytes / max(bandwidth, 1.0) if bandwidth else 0.0
        return round(math.log(seconds) / ALIKE)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How a job uses hosts that join."""

    run: str = ""  # id of the run
    job_spec: bytes = b""  # the job spec, encoded
    n_hosts: int = 0  # hosts to wait for before the job begins
    hosts_seconds_max: Seconds = 600.0  # for them; then it begins with those that are there
    slots_here: int  # processes of replicas that the supervisor's own host may run
    threads: int = 1  # of each process: the cores that it keeps busy
    device: str = "cpu"  # on which they compute
    step: StepTime = field(default_factory=StepTime)  # cost of a replica's step, to rank hosts
    placement: ShardPlacement = "here"  # of shards
    shard_bytes: Mapping[Address, int] = field(default_factory=dict)
    # That all replicas wait for pieces of the data which no host has; None: as for any job
    pieces_seconds_max: Seconds | None = None
    # Of the plan for each number of ranks, if replicas are formed by the hosts that have joined
    costs: Mapping[int, PlanCost] = field(default_factory=dict)
    forms: bool = False  # whether that is still to be done
    memory_here: int = 0  # bytes of the supervisor's own host
    # After which a host gets nothing more: less than until the backup of a silent primary takes
    # over, so that the new incarnation does not go to a host that is lost
    silent_seconds: Seconds = 0.75
    # After which it counts as lost; below the supervisor's own limit, so that the roles there are
    # not given up one by one
    dead_seconds: Seconds = 8.0
    leave_seconds_max: Seconds = 20.0  # for roles to end in order when their host leaves

    @classmethod
    def of(cls, job: Job, layout: Layout, *, slots_here: int) -> Self:
        itemsize = layout.dtype.itemsize
        sizes = {f"shard-{k}": layout.shard_size(k) * itemsize for k in range(layout.n_shards)}
        return cls(
            slots_here=slots_here,
            threads=cores_of(job),
            device=job.cluster.device,
            step=StepTime.of(job),
            placement=job.cluster.placement,
            shard_bytes={Address(name): n_bytes for name, n_bytes in sizes.items()},
        )

    def slots_of(self, offer: Offer) -> int:
        if self.device != "cpu":
            return offer.devices.count(self.device)
        return offer.cores // self.threads

    def grade_of(self, offer: Offer, bandwidth: float) -> int | None:
        """Return the grade of a host for this job (`StepTime.grade`); None if unknown."""
        if self.device != "cpu":  # only CPU cores were measured
            return None
        return self.step.grade(flops=offer.flops * self.threads, bandwidth=bandwidth)

    def holds(self, host: "Host", n_ranks: int) -> bool:
        """Return whether a host has memory for one of so many ranks."""
        return host.offer.memory_bytes >= self.costs[n_ranks].memory_bytes

    def rank_seconds(self, host: "Host", n_ranks: int) -> float:
        """Return the time of a step of so many ranks on hosts like this, with fetch and push."""
        cost = self.costs[n_ranks]
        flops = host.offer.flops * self.threads if self.device == "cpu" else 0.0
        n_bytes = sum(self.shard_bytes.values()) * self.step.n_bytes / _BYTES / n_ranks
        moved = n_bytes / host.bandwidth if host.bandwidth else 0.0
        return max(cost.seconds * cost.flops / (flops or cost.flops) + moved, 1e-9)

    def admit(self, host: "Host", bandwidth: float) -> None:
        """Note that a host is ready, and what it has to offer this job."""
        host.ready, host.bandwidth = True, bandwidth
        host.slots = self.slots_of(host.offer)
        host.grade = self.grade_of(host.offer, bandwidth)


HERE: Final = Address("here")  # the supervisor's own host

_UNPRINTABLE: Final = re.compile(r"[^\w.:@-]")
_NO_OFFER: Final = Offer(incarnation=0, label="", endpoint="", cores=1, memory_bytes=0, devices=())


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Host:
    """One host, in its present incarnation: one that has joined, or the supervisor's own.

    A slot is what one process of a replica takes: its threads, or a GPU.
    """

    name: Address
    offer: Offer = _NO_OFFER
    label: str = ""  # for display; "" for the supervisor's own host
    since: Seconds = 0.0  # first offer of this incarnation, by our clock
    silence: Silence = field(default_factory=Silence)
    bandwidth: float = 0.0  # bytes a second from here, as it reports; 0.0: not measured
    present: bool = True  # False: lost, until it offers a new incarnation
    ready: bool = False
    refused: str = ""  # why, if it was sent away
    leaving: bool = False
    is_silent: bool = False
    is_blocked: bool = False  # because of `deaths`
    is_adopted: bool = False  # from another supervisor, and not heard yet
    deaths: list[Address] = field(default_factory=list)  # early deaths there, in a row
    slots: int = 0  # for processes of replicas
    used: int = 0  # slots in use; more than there are, where a role had to run somewhere
    grade: int | None = None  # of its speed (`StepTime.grade`), lower is faster; None if unknown
    roles: dict[Address, int] = field(default_factory=dict)  # incarnation of each that runs there

    @classmethod
    def of(cls, name: Address, offer: Offer, now: Seconds) -> Self:
        # The label goes to terminals: no control characters.
        label = _UNPRINTABLE.sub("?", offer.label) or "nameless"
        host = cls(name=name, offer=offer, label=label, since=now)
        host.silence.start(now)
        return host

    @property
    def full_label(self) -> str:
        return f"{self.label} ({self.name})"

    @property
    def takes_roles(self) -> bool:
        return self.ready and not (self.leaving or self.is_silent or self.is_blocked)

    def is_missed(self, incarnation: int) -> bool:
        """Return whether this incarnation is silent; the answer to a probe may come too late."""
        return self.present and self.is_silent and self.offer.incarnation == incarnation

    @property
    def free(self) -> int:
        return max(0, self.slots - self.used) if self.takes_roles else 0

    @property
    def room(self) -> int:
        """Slots without a role, whether the roles there take slots or not."""
        return max(0, self.slots - len(self.roles)) if self.takes_roles else 0

    @property
    def domain(self) -> str:
        """What fails together with it."""
        return self.offer.domain or self.name

    def resources(self) -> str:
        """Return what it offers beside its cores: "2 GPUs, 3.1 GB"."""
        gpus = f"{len(self.offer.devices)} GPUs, " if self.offer.devices else ""
        return gpus + formatting.size(self.offer.memory_bytes)

    def speeds(self) -> str:
        """Return the measurements: "41 GFLOP/s a core, 117 MB/s from here"."""
        parts = []
        if self.offer.flops:
            parts.append(f"{formatting.speed(self.offer.flops)} a core")
        if self.bandwidth:
            parts.append(f"{formatting.size(self.bandwidth)}/s from here")
        return ", ".join(parts) or "not measured"

    def view(self) -> HostView:
        states = {
            "rejected": bool(self.refused),
            "gone": not self.present,
            "leaving": self.leaving,
            "blocked": self.is_blocked,
            "ready": self.ready,
            "preparing": True,
        }
        return HostView(
            name=self.name,
            label=self.label,
            cores=self.offer.cores,
            state=next(state for state, holds in states.items() if holds),
            memory_bytes=self.offer.memory_bytes,
            flops=self.offer.flops or None,
            bandwidth=self.bandwidth or None,
        )


@final
class HostTable:
    """All hosts of a job, and which role runs on which."""

    def __init__(self, *, slots_here: int, memory_here: int = 0) -> None:
        offer = msgspec.structs.replace(_NO_OFFER, memory_bytes=memory_here)
        self.here = Host(name=HERE, offer=offer, slots=slots_here, ready=True)
        self.joined: dict[Address, Host] = {}  # those that are gone included
        self._at: dict[Address, tuple[Host, int]] = {}  # host of each role that runs, its slots
        self.changed: dict[Host, None] = {}  # since their assignments were last sent
        self._was_at: dict[Address, Host] = {}  # a restarted role goes back if there is a slot
        # While roles are placed: the order of the hosts, fastest first, then emptiest; None until
        # a role is placed that does not go back.
        self._is_placing = False
        self._heap: list[tuple[int, int, int, Host]] | None = None

    def at(self, role: Address) -> Host | None:
        place = self._at.get(role)
        return None if place is None else place[0]

    def was_at(self, role: Address) -> Host | None:
        return self._was_at.get(role)

    @property
    def usable(self) -> list[Host]:
        """The supervisor's own host and those joined ones that may get roles now."""
        return [host for host in (self.here, *self.joined.values()) if host.takes_roles]

    @property
    def refusal(self) -> str | None:
        """Why every host that has joined was sent away; None unless all were."""
        if any(host.present and not host.refused for host in self.joined.values()):
            return None  # as the first of thousands tells
        whys = [host.refused for host in self.joined.values() if host.refused]
        return "; ".join(dict.fromkeys(whys)) or None

    def reserve(self, role: Address, host: Host) -> None:
        """Let a role start as if it had been on this host before."""
        self._was_at[role] = host

    def put(self, role: Address, incarnation: int, host: Host, *, slots: int) -> None:
        self.leave(role)
        self._at[role] = host, slots
        self._was_at[role] = host
        host.roles[role] = incarnation
        host.used += slots
        self.changed[host] = None

    def leave(self, role: Address) -> Host | None:
        """Note that a role does not run any more; return its host, if it had one."""
        host, slots = self._at.pop(role, (None, 0))
        if host is not None:
            del host.roles[role]
            host.used -= slots
            self.changed[host] = None
        return host

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Meanwhile hosts change by `put` only, which makes `find` fast among thousands."""
        self._is_placing = True
        try:
            yield
        finally:
            self._is_placing, self._heap = False, None

    def _first(self) -> Host | None:
        """Return the first of `find`'s order that has a free slot, if the order is known."""
        if self._is_placing and self._heap is None:
            hosts = self.usable
            best = min((host.grade for host in hosts if host.grade is not None), default=0)
            grades = [best if host.grade is None else host.grade for host in hosts]
            ranked = enumerate(zip(grades, hosts, strict=True))
            self._heap = [(grade, -host.free, n, host) for n, (grade, host) in ranked]
            heapify(self._heap)
        while self._heap:
            grade, free, n, host = self._heap[0]
            if not host.free:  # for good: meanwhile no role leaves
                heappop(self._heap)
            elif -free == host.free:
                return host
            else:
                heapreplace(self._heap, (grade, -host.free, n, host))
        return None

    def find(self, names: Sequence[Address], *, must: bool = False) -> list[Host] | None:
        """Return a host for each rank of one replica; None if there are not enough slots.

        Hosts are filled in order of speed, then of free slots; the supervisor's host and unmeasured
        ones count as fast. A group goes to one host if it fits, because its messages then stay
        there; else it is spread.

        With `must`, full hosts are used if need be.
        """
        n = len(names)
        before = self._was_at.get(names[0])
        if before is not None and before.free >= n:
            return [before] * n
        first = self._first()
        if first is not None and first.free >= n:
            return [first] * n
        if first is None and self._is_placing and not must:
            return None
        hosts = self.usable
        best = min((host.grade for host in hosts if host.grade is not None), default=0)
        # Stable: fastest first, then emptiest.
        hosts.sort(key=lambda host: (best if host.grade is None else host.grade, -host.free))
        for host in hosts:
            if host.free >= n:
                return [host] * n
        free = [host for host in hosts for _ in range(host.free)]
        with_slots = [host for host in hosts if host.slots]
        if len(free) < n and not (must and with_slots):
            return None
        if len(free) < n:
            least = min(with_slots, key=lambda host: (host.used + 1) / host.slots)
            free += [least] * (n - len(free))
        return free[:n]
