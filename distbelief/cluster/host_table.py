"""The hosts of a job: their slots, their speed, and a record of each."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self, final

import msgspec

from distbelief.config.job import Job
from distbelief.core import formatting
from distbelief.protocol import Assignments, Offer, Release, RoleAssignment
from distbelief.roles.role import Address, Seconds, Send
from distbelief.supervisor.view import HostView


_OPERATIONS: Final = 6.0  # of each parameter, a sample
_BYTES: Final = 4.0  # of each parameter, in a fetch or a push
_ALIKE: Final = math.log(1.25)  # hosts that differ less have the same grade


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
        """Return the cost for a job; each mini-batch of a batch algorithm counts as one fetch."""
        table = job.algorithm
        n_fetch, n_push = (getattr(table, name, 1) for name in ("n_fetch", "n_push"))
        return cls(
            operations=_OPERATIONS * job.batch_size, n_bytes=_BYTES * (1.0 / n_fetch + 1.0 / n_push)
        )

    def grade(self, *, flops: float, bandwidth: float) -> int | None:
        """Return the grade of a host, lower is faster; None if unknown.

        Args:
            flops: Of one process of a replica, operations a second.
            bandwidth: Bytes a second; 0.0 counts as infinite.
        """
        if not flops:
            return None
        # The host reports this number: below 1 it makes no sense.
        seconds = self.operations / max(flops, 1.0)
        seconds += self.n_bytes / max(bandwidth, 1.0) if bandwidth else 0.0
        return round(math.log(seconds) / _ALIKE)


HERE: Final = Address("here")  # the supervisor's own host


@final
@dataclass(slots=True, kw_only=True)
class HostSlots:
    """Slots of one host. A slot is what one process of a replica takes: its threads, or a GPU."""

    slots: int  # for processes of replicas
    grade: int | None = None  # of its speed (`StepTime.grade`), lower is faster; None if unknown
    used: int = 0  # slots in use; more than there are, where a role had to run somewhere
    is_open: bool = True  # whether more roles may be placed here

    @property
    def free(self) -> int:
        return max(0, self.slots - self.used) if self.is_open else 0

    @property
    def load(self) -> float:
        return (self.used + 1) / self.slots if self.slots else float("inf")


@final
class SlotTable:
    """Which role runs on which host, and the free slots of all hosts.

    Shards, coordinator and evaluator run on the supervisor's host and take no slots. Hosts are
    filled in order of speed, then of free slots; the supervisor's host and unmeasured ones count as
    fast.

    Args:
        slots_here: Slots of the supervisor's own host.
    """

    def __init__(self, *, slots_here: int) -> None:
        self._hosts: dict[Address, HostSlots] = {HERE: HostSlots(slots=slots_here)}
        self._at: dict[Address, Address] = {}  # role -> host, while it runs
        self._was_at: dict[Address, Address] = {}  # a restarted role goes back if there is a slot
        self._takes: dict[Address, int] = {}  # slots

    def open(self, host: Address, *, slots: int, grade: int | None = None) -> None:
        self._hosts[host] = HostSlots(slots=slots, grade=grade)

    def shut(self, host: Address, *, is_open: bool = False) -> None:
        """Place nothing more on this host (or, with `is_open`, allow it again)."""
        host_slots = self._hosts.get(host)
        if host_slots is not None:
            host_slots.is_open = is_open

    def remove(self, host: Address) -> None:
        """Remove a host that is gone, with its roles."""
        for name in [name for name, at in self._at.items() if at == host]:
            self.leave(name)
        self._hosts.pop(host, None)

    def at(self, name: Address) -> Address | None:
        return self._at.get(name)

    def roles_at(self, host: Address) -> list[Address]:
        return [name for name, at in self._at.items() if at == host]

    def put(self, name: Address, host: Address, *, slots: int) -> None:
        self.leave(name)
        self._at[name] = self._was_at[name] = host
        self._takes[name] = slots
        self._hosts[host].used += slots

    def leave(self, name: Address) -> None:
        host = self._at.pop(name, None)
        if host is not None:
            self._hosts[host].used -= self._takes.pop(name)

    def fits(self, host: Address, n: int) -> bool:
        return host in self._hosts and self._hosts[host].free >= n

    def find(self, names: Sequence[Address], *, must: bool = False) -> list[Address] | None:
        """Return a host for each rank of one replica; None if there are not enough slots.

        A group goes to one host if it fits, because its messages then stay there; else it is
        spread.

        Args:
            names: The roles of one group.
            must: Use full hosts if need be.
        """
        n = len(names)
        open_hosts = {h: host_slots for h, host_slots in self._hosts.items() if host_slots.is_open}
        before = self._was_at.get(names[0])
        if before in open_hosts and open_hosts[before].free >= n:
            return [before] * n
        best = min((r.grade for r in open_hosts.values() if r.grade is not None), default=0)

        # Fastest first, then emptiest.
        def order(host: Address) -> tuple[int, int]:
            grade = open_hosts[host].grade
            return best if grade is None else grade, -open_hosts[host].free

        by_speed = sorted(open_hosts, key=order)  # stable
        for host in by_speed:
            if open_hosts[host].free >= n:
                return [host] * n
        free = [host for host in by_speed for _ in range(open_hosts[host].free)]
        if len(free) >= n:
            return free[:n]
        with_slots = [host for host, host_slots in open_hosts.items() if host_slots.slots]
        if not (must and with_slots):
            return None
        least = min(with_slots, key=lambda host: open_hosts[host].load)
        return [*free, *[least] * n][:n]


_UNPRINTABLE: Final = re.compile(r"[^\w.:@-]")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How a job uses hosts."""

    run: str  # id of the run
    job_spec: bytes  # the job spec, encoded
    n_hosts: int = 0  # hosts to wait for before the job begins
    hosts_seconds_max: Seconds = 600.0  # for them; then it begins with those that are there
    slots_here: int  # processes of replicas that the supervisor's own host may run
    threads: int = 1  # of each process
    device: str = "cpu"  # on which they compute
    step: StepTime = field(default_factory=StepTime)  # cost of a replica's step, to rank hosts
    silent_seconds: Seconds = 3.0  # after which a host gets nothing more
    # After which it counts as lost; below the supervisor's own limit, so that the roles there are
    # not given up one by one
    dead_seconds: Seconds = 8.0
    leave_seconds_max: Seconds = 20.0  # for a replica to end its step when its host leaves

    def slots_of(self, offer: Offer) -> int:
        """Return how many processes of replicas a host may run."""
        if self.device != "cpu":
            return offer.devices.count(self.device)
        return offer.cores // self.threads

    def grade_of(self, offer: Offer, bandwidth: float) -> int | None:
        """Return the grade of a host for this job (`StepTime.grade`); None if unknown."""
        if self.device != "cpu":  # only CPU cores were measured
            return None
        return self.step.grade(flops=offer.flops * self.threads, bandwidth=bandwidth)


@final
@dataclass(slots=True, kw_only=True, eq=False)
class HostRecord:
    """One host that has joined, in its present incarnation."""

    name: Address
    offer: Offer
    roles: dict[Address, int]
    bandwidth: float = 0.0  # bytes a second from here, as it reports; 0.0: not measured
    since: Seconds  # first offer of this incarnation, by our clock
    heard_at: Seconds
    n_probes: int = 0  # chunks that it has requested to measure the link
    present: bool = True  # False: lost, until it offers a new incarnation
    ready: bool = False
    refused: bool = False
    leaving: bool = False
    changed: bool = False  # assignments changed since they were last sent
    deaths: list[Address] = field(default_factory=list)  # early deaths there, in a row
    is_blocked: bool = False  # blocked because of these

    @classmethod
    def of(cls, name: Address, offer: Offer, now: Seconds) -> Self:
        """Return the record of a host that has just offered itself."""
        # The label goes to terminals: no control characters.
        label = _UNPRINTABLE.sub("?", offer.label) or "nameless"
        offer = msgspec.structs.replace(offer, label=label)
        return cls(name=name, offer=offer, roles={}, since=now, heard_at=now)

    @property
    def label(self) -> str:
        return f"{self.offer.label} ({self.name})"

    @property
    def incarnation(self) -> int:
        return self.offer.incarnation

    def release(self, reason: str, *, again: bool, refused: bool = False) -> Send:
        """Return the `Release` that ends this incarnation."""
        message = Release(
            incarnation=self.incarnation, again=again, reason=reason[:2048], refused=refused
        )
        return Send(receiver=self.name, message=message)

    def assign(self, run: str) -> Send:
        """Return the complete list of what it runs."""
        self.changed = False
        assigned = tuple(RoleAssignment(name=name, incarnation=n) for name, n in self.roles.items())
        message = Assignments(incarnation=self.incarnation, run=run, assignments=assigned)
        return Send(receiver=self.name, message=message)

    def introduction(self) -> str:
        """Return "node7 (host-...): 2 cores, 3.1 GB"."""
        offer = self.offer
        cores = "1 core" if offer.cores == 1 else f"{offer.cores} cores"
        gpus = f", {len(offer.devices)} GPUs" if offer.devices else ""
        return f"{self.label} has joined: {cores}{gpus}, {formatting.size(offer.memory_bytes)}"

    def speeds(self) -> str:
        """Return the measurements: "41 GFLOP/s a core, 117 MB/s from here"."""
        parts = []
        if self.offer.flops:
            parts.append(f"{formatting.speed(self.offer.flops)} a core")
        if self.bandwidth:
            parts.append(f"{formatting.size(self.bandwidth)}/s from here")
        return ", ".join(parts) or "not measured"

    def view(self) -> HostView:
        state = "ready" if self.ready else "preparing"
        if self.refused:
            state = "rejected"
        elif not self.present:
            state = "gone"
        elif self.leaving:
            state = "leaving"
        elif self.is_blocked:
            state = "blocked"
        return HostView(
            name=self.name,
            label=self.offer.label,
            cores=self.offer.cores,
            state=state,
            memory_bytes=self.offer.memory_bytes,
            flops=self.offer.flops or None,
            bandwidth=self.bandwidth or None,
        )
