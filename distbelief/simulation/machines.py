"""Simulated machines and their speeds, cost scales, and the options of a simulated cluster."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from msgspec import structs

from distbelief.parameter_server.shard_config import shard_of
from distbelief.protocol.role import Address, Cost, Seconds
from distbelief.simulation.cpu import Demand, Processor
from distbelief.simulation.faults import Fault
from distbelief.simulation.network import WITHIN_HOST, Link, SwitchedNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """The speed of the machine that one role runs on.

    Roles on the same host share memory. They share its cores if the host has a processor
    (`ClusterOptions.processors`), and its network card if it has one (`fabric`).
    """

    host: str = "host-0"  # "" shares nothing
    shares_memory: bool = True
    flops_per_second: float = 1e10
    bytes_per_second: float = 1e10  # to and from memory
    disk_bytes_per_second: float = 1e9
    overhead_seconds: Seconds = 20e-6  # of handing work to an executor and back
    jitter: float = 0.1  # a duration is drawn from [1, 1 + jitter] times the modelled one
    spread: float = 0.0  # in addition: standard deviation of a duration's logarithm
    threads: int = 1  # cores that its compute executor keeps busy
    # Cost of each message for the process that receives it; messages are handled in sequence.
    handling_seconds: Seconds = 0.0
    handling_bytes_per_second: float = math.inf
    # Core time of each event of any kind, on a host with a processor. If set, it replaces the
    # two values above.
    event_seconds: Seconds = 0.0
    wake_seconds: Seconds = 0.0  # until a sleeping thread continues; only with event_seconds

    @property
    def handles_slowly(self) -> bool:
        return not self.event_seconds and (
            self.handling_seconds > 0 or self.handling_bytes_per_second < math.inf
        )

    def demand(self, cost: Cost, seconds: Seconds, threads: float) -> Demand:
        """Return the demand of work on its host; `seconds` is its duration if it runs alone."""
        in_memory = cost.n_bytes / self.bytes_per_second
        computing = self._computing(cost) + self.overhead_seconds
        share = in_memory / (in_memory + computing) if in_memory else 0.0
        if cost.waiting:  # waiting needs no core; spread it over the duration
            threads *= 1.0 - cost.waiting / (in_memory + computing + cost.waiting)
        return Demand(
            seconds=seconds,
            threads=threads,
            memory_share=share,
            bytes_per_second=self.bytes_per_second,
        )

    def seconds_of(self, cost: Cost, stream: np.random.Generator) -> Seconds:
        """Draw how long work of this cost takes."""
        modelled = self._computing(cost) + cost.n_bytes / self.bytes_per_second
        return (modelled + self.overhead_seconds) * self._factor(stream) + cost.waiting

    def _computing(self, cost: Cost) -> Seconds:
        return cost.flops / (self.flops_per_second * cost.threads)

    def seconds_to_save(self, n_bytes: float, stream: np.random.Generator) -> Seconds:
        """Draw how long writing `n_bytes` to disk takes."""
        modelled = n_bytes / self.disk_bytes_per_second
        return (modelled + self.overhead_seconds) * self._factor(stream)

    def _factor(self, stream: np.random.Generator) -> float:
        factor = 1 + self.jitter * stream.random()
        if self.spread:
            factor *= math.exp(self.spread * stream.standard_normal())
        return factor


# A simulation can run a small model at the cost of a large one. Roles compute on the small
# model; their costs and message sizes are multiplied, so that virtual time and bytes are those
# of the large one. A model of 42 million parameters then takes a few kilobytes, and losses,
# line searches and staleness are still those of a model that learns.
#
#     small task                      large task
#     vector of shard k, m_k numbers  n_k numbers     frames, bytes: n_k / m_k
#     a step of f operations          F operations    flops: F / f


@dataclass(frozen=True, slots=True, kw_only=True)
class CostScale:
    """Factors by which the costs of one role are multiplied."""

    flops: float = 1.0  # operations of the compute executor
    n_bytes: float = 1.0  # bytes of the compute executor, and of checkpoints
    # Bytes of the arrays in messages. Between a shard and another role, the factor of the
    # shard holds in both directions.
    frame_bytes: float = 1.0

    def of(self, cost: Cost) -> Cost:
        """Return the cost of the same computation in the large task."""
        return structs.replace(
            cost, flops=cost.flops * self.flops, n_bytes=cost.n_bytes * self.n_bytes
        )


ONE: Final = CostScale()


def frame_scale(scales: Mapping[Address, CostScale], sender: Address, receiver: Address) -> float:
    """Return the factor for the array bytes of a message between two roles."""
    if not scales:
        return 1.0
    shard = receiver if receiver.startswith("shard") else sender
    return scale_of(scales, shard).frame_bytes


def scale_of(scales: Mapping[Address, CostScale], name: Address) -> CostScale:
    # Primary and backup of a shard have the same scale.
    return scales.get(name) or scales.get(shard_of(name)) or ONE


TraceKind = Literal["content", "order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of a simulated cluster: machines, links, faults, and how much trace is kept."""

    machine: SimulatedMachine = field(
        default_factory=SimulatedMachine
    )  # of roles that are not in `machines`
    machines: Mapping[Address, SimulatedMachine] = field(default_factory=dict)
    link: Link = field(default_factory=Link)  # between hosts that are not in `links`
    links: Mapping[tuple[Address, Address], Link] = field(default_factory=dict)
    link_within_host: Link = WITHIN_HOST
    # Network cards and switches that hosts share. Without it, each pair of roles has a link of
    # its own. Links within a host are not part of the fabric.
    fabric: SwitchedNetwork | None = None
    # By host. Without a processor, each role on the host has a speed of its own.
    processors: Mapping[str, Processor] = field(default_factory=dict)
    scales: Mapping[Address, CostScale] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    # Roles that start at time 0, None for all; the others wait to be launched.
    start: tuple[Address, ...] | None = None
    # True: all roles are connected from the start, and get a `PeerJoined` for each incarnation
    # of a peer: for tests without a supervisor. False: every role is connected to the
    # supervisor, and to other roles when it asks for it (`Connect`).
    introduce: bool = False
    # With `introduce`: which pairs are connected, None for all. Thousands of replicas would
    # otherwise each get an event for every other.
    acquainted: Callable[[Address, Address], bool] | None = None
    # With `introduce`: whether roles learn on which host the others are, as a supervisor tells
    # them. Then ranks of one host share memory.
    tells_hosts: bool = False
    # Probability that a message for a dead process reaches its next incarnation: ZeroMQ keeps
    # the message and reconnects, and the new process may have got the same port.
    port_reuse: float = 0.0
    launch_seconds: Seconds = 0.5  # from `Launch` to `Started`
    notice_seconds: Seconds = 0.01  # from the end of a process to `PeerLost`
    host_bytes_max: int = 1 << 34  # shared memory of one host
    n_lines_kept: int = 12  # of the trace, per role, for the report of a failure
    # What of an event enters the digest: its content, or only time, receiver and kind.
    trace: TraceKind = "content"
    # False: messages are passed as objects with their arrays copied, and only their size is
    # computed. Then a message that cannot be encoded goes unnoticed.
    codec: bool = True

    def machine_of(self, name: Address) -> SimulatedMachine:
        return self.machines.get(name, self.machine)

    def link_of(self, sender: Address, receiver: Address) -> Link:
        named = self.links.get((sender, receiver))
        if named is not None:
            return named
        host = self.machine_of(sender).host
        together = host != "" and host == self.machine_of(receiver).host
        return self.link_within_host if together else self.link
