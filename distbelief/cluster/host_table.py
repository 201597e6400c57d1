"""What a supervisor knows of the machines that have joined: a record of each."""

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


# How long a step takes on a machine, roughly: enough to choose where replicas go.
#
# For each parameter of a dense net, a step takes 6 floating point operations a sample (2
# forward, 4 backward; Dean et al. 2012 train such nets), and 4 bytes on the link for each
# fetch and each push. So the number of parameters is of no matter: whether a slow link or
# a slow processor is worse, depends on the batch. In layers that use a parameter more
# than once (convolutions) the link counts for too much.

_OPERATIONS: Final = 6.0  # of each parameter, a sample
_BYTES: Final = 4.0  # of each parameter, in a fetch or a push
_ALIKE: Final = math.log(1.25)  # machines that differ less are as fast as each other


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What a replica's step takes, for each parameter.

    Attributes:
        operations: Floating point.
        n_bytes: On the link to the shards.
    """

    operations: float = 1.0
    n_bytes: float = 0.0

    @classmethod
    def of(cls, job: Job) -> "StepTime":
        """Return that of a job; of portions, each is reckoned with a fetch of its own.

        Args:
            job: By any algorithm.
        """
        table = job.algorithm
        n_fetch, n_push = (getattr(table, name, 1) for name in ("n_fetch", "n_push"))
        return cls(
            operations=_OPERATIONS * job.batch_size, n_bytes=_BYTES * (1.0 / n_fetch + 1.0 / n_push)
        )

    def grade(self, *, flops: float, bandwidth: float) -> int | None:
        """Return the grade of a machine, lower ones are faster; None: nobody knows.

        Args:
            flops: Of one process of a replica, operations a second.
            bandwidth: Bytes a second; 0.0: as if there were no end of it.
        """
        if not flops:
            return None
        # It is the machine's own word: less than one a second would be no number here.
        seconds = self.operations / max(flops, 1.0)
        seconds += self.n_bytes / max(bandwidth, 1.0) if bandwidth else 0.0
        return round(math.log(seconds) / _ALIKE)


# Where roles run: a table of rooms, each with so many slots for replicas.
#
# A slot is what one process of a replica takes: as many cores as it has threads, or a
# GPU. The supervisor's own machine is a room too; shards, coordinator and evaluator run
# there, and take no slots.
#
# * The fastest rooms are filled first, of those that are as fast as each other the
#   emptiest. The supervisor's own machine counts as fast, as does one that nobody has
#   measured.
# * A replica of several machines goes to one room if it fits one, for then its messages
#   stay there; else it is spread over rooms, in that order.
# * Where nothing fits, a role waits; `must` finds it a room all the same.
# * A role that is started again goes to where it was, if there is room.

HERE: Final = Address("here")
"""The supervisor's own machine."""


@final
@dataclass(slots=True, kw_only=True)
class HostSlots:
    """One machine.

    Attributes:
        slots: For processes of replicas.
        used: Of them; more than there are, where a role had to be somewhere.
        is_open: Whether anything more may come.
        grade: Of its speed, lower ones are faster (`pace`); None: nobody knows.
    """

    slots: int
    grade: int | None = None
    used: int = 0
    is_open: bool = True

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return max(0, self.slots - self.used) if self.is_open else 0

    @property
    def load(self) -> float:
        """Processes to a slot, with one more."""
        return (self.used + 1) / self.slots if self.slots else float("inf")


@final
class SlotTable:
    """Of one job.

    Args:
        slots_here: Of the supervisor's own machine.
    """

    def __init__(self, *, slots_here: int) -> None:
        self._rooms: dict[Address, HostSlots] = {HERE: HostSlots(slots=slots_here)}
        self._at: dict[Address, Address] = {}  # role -> room, as long as it runs
        self._was_at: dict[Address, Address] = {}
        self._takes: dict[Address, int] = {}  # slots

    def open(self, host: Address, *, slots: int, grade: int | None = None) -> None:
        """This machine may be used from now on."""
        self._rooms[host] = HostSlots(slots=slots, grade=grade)

    def shut(self, host: Address, *, is_open: bool = False) -> None:
        """Nothing more is to come to this machine (or, again, it may)."""
        room = self._rooms.get(host)
        if room is not None:
            room.is_open = is_open

    def remove(self, host: Address) -> None:
        """This machine is gone, and so is all that ran there."""
        for name in [name for name, at in self._at.items() if at == host]:
            self.leave(name)
        self._rooms.pop(host, None)

    def at(self, name: Address) -> Address | None:
        """Return where this role runs."""
        return self._at.get(name)

    def roles_at(self, host: Address) -> list[Address]:
        """Return what runs there."""
        return [name for name, at in self._at.items() if at == host]

    def put(self, name: Address, host: Address, *, slots: int) -> None:
        """This role runs there from now on."""
        self.leave(name)
        self._at[name] = self._was_at[name] = host
        self._takes[name] = slots
        self._rooms[host].used += slots

    def leave(self, name: Address) -> None:
        """This role runs no more."""
        host = self._at.pop(name, None)
        if host is not None:
            self._rooms[host].used -= self._takes.pop(name)

    def fits(self, host: Address, n: int) -> bool:
        """Return whether a machine has so many free slots."""
        return host in self._rooms and self._rooms[host].free >= n

    def find(self, names: Sequence[Address], *, must: bool = False) -> list[Address] | None:
        """Return a room for each of these roles, of one model; None if there is none.

        Args:
            names: Of the roles.
            must: Take rooms that are full already, if need be.
        """
        n = len(names)
        rooms = {h: room for h, room in self._rooms.items() if room.is_open}
        before = self._was_at.get(names[0])
        if before in rooms and rooms[before].free >= n:
            return [before] * n
        best = min((r.grade for r in rooms.values() if r.grade is not None), default=0)

        def order(host: Address) -> tuple[int, int]:
            grade = rooms[host].grade
            return best if grade is None else grade, -rooms[host].free

        by_room = sorted(rooms, key=order)  # stable
        for host in by_room:
            if rooms[host].free >= n:
                return [host] * n
        free = [host for host in by_room for _ in range(rooms[host].free)]
        if len(free) >= n:
            return free[:n]
        with_slots = [host for host, room in rooms.items() if room.slots]
        if not (must and with_slots):
            return None
        least = min(with_slots, key=lambda host: rooms[host].load)
        return [*free, *[least] * n][:n]


_UNPRINTABLE: Final = re.compile(r"[^\w.:@-]")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How a job spans machines.

    Attributes:
        run: What hosts call the run.
        brief: The document that hosts read first.
        n_hosts: Machines to wait for before the job begins.
        hosts_seconds_max: For them; then it begins with those that are there.
        slots_here: Processes of replicas that the supervisor's own machine may run.
        threads: Of each of them.
        device: On which they compute.
        step: Of a replica, to tell fast machines from slow ones.
        silent_seconds: After which a machine gets nothing more.
        dead_seconds: After which it is given up: before the supervisor itself gives up
            the roles there, one by one.
        leave_seconds_max: For a replica to end its step, where its machine leaves.
    """

    run: str
    brief: bytes
    n_hosts: int = 0
    hosts_seconds_max: Seconds = 600.0
    slots_here: int
    threads: int = 1
    device: str = "cpu"
    step: StepTime = field(default_factory=StepTime)
    silent_seconds: Seconds = 3.0
    dead_seconds: Seconds = 8.0
    leave_seconds_max: Seconds = 20.0

    def slots_of(self, offer: Offer) -> int:
        """Return how many processes of replicas a machine may run."""
        if self.device != "cpu":
            return offer.devices.count(self.device)
        return offer.cores // self.threads

    def grade_of(self, offer: Offer, bandwidth: float) -> int | None:
        """Return how fast a machine is for this job (`pace`); None: nobody knows."""
        if self.device != "cpu":  # what was measured is a core
            return None
        return self.step.grade(flops=offer.flops * self.threads, bandwidth=bandwidth)


@final
@dataclass(slots=True, kw_only=True, eq=False)
class HostRecord:
    """One machine that has joined, in its present life."""

    name: Address
    offer: Offer
    duties: dict[Address, int]
    bandwidth: float = 0.0  # bytes a second from here, as it says; 0.0: not measured
    since: Seconds  # of this life, here
    heard_at: Seconds
    n_probes: int = 0  # pieces that it has asked for to measure the link
    present: bool = True  # False: given up, until it begins a new life
    ready: bool = False
    refused: bool = False
    leaving: bool = False
    changed: bool = False  # its duties, since it was told of them
    deaths: list[Address] = field(default_factory=list)  # there, in a row and too soon
    is_avoided: bool = False  # for these

    @classmethod
    def of(cls, name: Address, offer: Offer, now: Seconds) -> Self:
        """Return the record of a machine that has just offered itself."""
        # A name for people: nothing that a terminal would obey.
        label = _UNPRINTABLE.sub("?", offer.label) or "nameless"
        offer = msgspec.structs.replace(offer, label=label)
        return cls(name=name, offer=offer, duties={}, since=now, heard_at=now)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.offer.label} ({self.name})"

    @property
    def life(self) -> int:
        """Its own number of it."""
        return self.offer.life

    def dismiss(self, reason: str, *, again: bool, refused: bool = False) -> Send:
        """Return what tells it that this life is over."""
        message = Release(life=self.life, again=again, reason=reason[:2048], refused=refused)
        return Send(receiver=self.name, message=message)

    def assign(self, run: str) -> Send:
        """Return what tells it what to run."""
        self.changed = False
        told = tuple(RoleAssignment(name=name, incarnation=n) for name, n in self.duties.items())
        message = Assignments(life=self.life, run=run, duties=told)
        return Send(receiver=self.name, message=message)

    def introduction(self) -> str:
        """Return who it is and what it has: "node7 (host-...): 2 cores, 3.1 GB"."""
        offer = self.offer
        cores = "1 core" if offer.cores == 1 else f"{offer.cores} cores"
        gpus = f", {len(offer.devices)} GPUs" if offer.devices else ""
        return f"{self.label} has joined: {cores}{gpus}, {formatting.size(offer.memory_bytes)}"

    def speeds(self) -> str:
        """Return what was measured: "41 GFLOP/s a core, 117 MB/s from here"."""
        parts = []
        if self.offer.flops:
            parts.append(f"{formatting.speed(self.offer.flops)} a core")
        if self.bandwidth:
            parts.append(f"{formatting.size(self.bandwidth)}/s from here")
        return ", ".join(parts) or "not measured"

    def view(self) -> HostView:
        """Return its row."""
        state = "ready" if self.ready else "preparing"
        if self.refused:
            state = "of no use"
        elif not self.present:
            state = "gone"
        elif self.leaving:
            state = "leaving"
        elif self.is_avoided:
            state = "avoided"
        return HostView(
            name=self.name,
            label=self.offer.label,
            cores=self.offer.cores,
            state=state,
            memory_bytes=self.offer.memory_bytes,
            flops=self.offer.flops or None,
            bandwidth=self.bandwidth or None,
        )
