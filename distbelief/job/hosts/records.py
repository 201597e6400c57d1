"""What a supervisor knows of the machines that have joined: a record of each."""

import re
from dataclasses import dataclass, field
from typing import Final, Self, final

import msgspec

from distbelief.job.display import words
from distbelief.job.display.view import HostView
from distbelief.job.hosts.pace import Step
from distbelief.messages import Dismiss, Duties, Duty, Offer
from distbelief.roles import Address, Seconds, Send


_UNPRINTABLE: Final = re.compile(r"[^\w.:@-]")


@dataclass(frozen=True, kw_only=True)
class HostedConfig:
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
    step: Step = field(default_factory=Step)
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
        message = Dismiss(life=self.life, again=again, reason=reason[:2048], refused=refused)
        return Send(receiver=self.name, message=message)

    def assign(self, run: str) -> Send:
        """Return what tells it what to run."""
        self.changed = False
        told = tuple(Duty(name=name, incarnation=n) for name, n in self.duties.items())
        message = Duties(life=self.life, run=run, duties=told)
        return Send(receiver=self.name, message=message)

    def introduction(self) -> str:
        """Return who it is and what it has: "node7 (host-...): 2 cores, 3.1 GB"."""
        offer = self.offer
        cores = "1 core" if offer.cores == 1 else f"{offer.cores} cores"
        gpus = f", {len(offer.devices)} GPUs" if offer.devices else ""
        return f"{self.label} has joined: {cores}{gpus}, {words.size(offer.memory_bytes)}"

    def speeds(self) -> str:
        """Return what was measured: "41 GFLOP/s a core, 117 MB/s from here"."""
        parts = []
        if self.offer.flops:
            parts.append(f"{words.speed(self.offer.flops)} a core")
        if self.bandwidth:
            parts.append(f"{words.size(self.bandwidth)}/s from here")
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
