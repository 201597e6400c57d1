"""What a simulated cluster consists of, as data."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from distbelief.core import vectors
from distbelief.core.vectors import n_blocks
from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.replication import shard_of
from distbelief.roles.role import Address, Cost, Executor, Seconds
from distbelief.simulation.cpu import Demand, EventCost, Processor
from distbelief.simulation.faults import Fault
from distbelief.simulation.topology import WITHIN_HOST, Fabric, Link


# Machines: how fast a role's work goes, and whose memory it shares.


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one role runs on.

    Roles of one host share memory. They share its speed if the host has a processor
    (`ClusterOptions.processors`), and its way out if it has a card (`fabric`).
    """

    host: str = "host-0"  # "" shares nothing with anybody
    shares_memory: bool = True
    flops_per_second: float = 1e10
    bytes_per_second: float = 1e10  # to and from memory
    disk_bytes_per_second: float = 1e9
    overhead_seconds: Seconds = 20e-6  # of handing work to a lane and back
    jitter: float = 0.1  # a duration is drawn from [1, 1 + jitter] times the modelled one
    spread: float = 0.0  # and besides: standard deviation of a duration's logarithm
    threads: int = 1  # that its compute lane keeps busy
    # What each message takes of the process that receives it, one after the other.
    handling_seconds: Seconds = 0.0
    handling_bytes_per_second: float = math.inf
    # What each event, of whatever kind, takes of a core of a host that has a processor;
    # then the two above are of no account.
    handling: EventCost | None = None

    def __post_init__(self) -> None:
        for name in (
            "flops_per_second",
            "bytes_per_second",
            "disk_bytes_per_second",
            "handling_bytes_per_second",
            "threads",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"Machine.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("overhead_seconds", "jitter", "spread", "handling_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"Machine.{name} is {getattr(self, name)}; it may not be below 0, "
                    "nor without end"
                )

    @property
    def handles_slowly(self) -> bool:
        """Whether messages take any time of its process."""
        return self.handling is None and (
            self.handling_seconds > 0 or self.handling_bytes_per_second < math.inf
        )

    def demand(self, cost: Cost, seconds: Seconds, threads: float) -> Demand:
        """Return what work of this cost, alone so many seconds, asks of the host."""
        in_memory = cost.n_bytes / self.bytes_per_second
        computing = cost.flops / self.flops_per_second + self.overhead_seconds
        share = in_memory / (in_memory + computing) if in_memory else 0.0
        if cost.waiting:  # spread over the time that it takes
            threads *= 1.0 - cost.waiting / (in_memory + computing + cost.waiting)
        return Demand(
            seconds=seconds,
            threads=threads,
            memory_share=share,
            bytes_per_second=self.bytes_per_second,
        )

    def seconds_of(self, cost: Cost, stream: np.random.Generator) -> Seconds:
        """Return how long work of this cost takes here, this time."""
        modelled = cost.flops / self.flops_per_second + cost.n_bytes / self.bytes_per_second
        return (modelled + self.overhead_seconds) * self._factor(stream) + cost.waiting

    def seconds_to_save(self, n_bytes: float, stream: np.random.Generator) -> Seconds:
        """Return how long writing so much to disk takes here, this time."""
        modelled = n_bytes / self.disk_bytes_per_second
        return (modelled + self.overhead_seconds) * self._factor(stream)

    def _factor(self, stream: np.random.Generator) -> float:
        factor = 1 + self.jitter * stream.random()
        if self.spread:
            factor *= math.exp(self.spread * stream.standard_normal())
        return factor


# Scales: a small task in place of a large one, at the large one's price.
#
# A role really works, on a net that is small. What it costs, and what it sends, is
# multiplied, so that virtual time and bytes are those of the large net:
#
#     small task                      large task
#     vector of shard k, m_k numbers  n_k numbers     frames, bytes: n_k / m_k
#     a step of f operations          F operations    flops: F / f
#     a batch of b bytes              B bytes         data: B / b
#
# So a role of 42 million parameters takes a few kilobytes, and its losses, line searches
# and staleness are still those of something that learns.


@dataclass(frozen=True, slots=True, kw_only=True)
class CostScale:
    """By what the figures of one role are multiplied.

    Attributes:
        flops: Operations of its compute lane.
        n_bytes: Bytes of that, and of what it persists.
        data_bytes: Work of its data lane, which is all about the bytes of samples.
        frame_bytes: Bytes of the arrays in messages from it; of those between a shard
            and another role the shard's counts, either way.
    """

    flops: float = 1.0
    n_bytes: float = 1.0
    data_bytes: float = 1.0
    frame_bytes: float = 1.0

    def __post_init__(self) -> None:
        for name in ("flops", "n_bytes", "data_bytes", "frame_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"a scale's {name} is {getattr(self, name)}; use 0 or more")

    def of(self, cost: Cost, lane: Executor) -> Cost:
        """Return the cost of the large task's work."""
        if lane is Executor.DATA:  # whatever that is counted in
            flops = n_bytes = waiting = self.data_bytes
        else:
            flops, n_bytes, waiting = self.flops, self.n_bytes, 1.0
        return Cost(
            flops=cost.flops * flops, n_bytes=cost.n_bytes * n_bytes, waiting=cost.waiting * waiting
        )


ONE: Final = CostScale()


def frame_scale(scales: Mapping[Address, CostScale], sender: Address, receiver: Address) -> float:
    """Return by what the array bytes of a message between these two are multiplied."""
    if not scales:
        return 1.0
    shard = receiver if receiver.startswith("shard") else sender
    return scale_of(scales, shard).frame_bytes


def scales_for(
    small: Layout, large: Layout, names: Mapping[Address, float], *, data_bytes: float = 1.0
) -> dict[Address, CostScale]:
    """Return the scales of a job whose roles work on a small net.

    Args:
        small: How the small net lies on the shards.
        large: How the large one would, on as many.
        names: All roles but shards, and by what their operations are multiplied: those
            of a step of the large net over those of the small one, by whatever each
            takes for its cost.
        data_bytes: Bytes of a sample of the large task over those of the small one.

    Raises:
        LocalProtocolError: the layouts have another number of shards.
    """
    if small.n_shards != large.n_shards:
        raise LocalProtocolError(
            f"a net on {small.n_shards} shards cannot stand for one on "
            f"{large.n_shards}: cut both alike"
        )
    sizes = [(_bytes(small, k), _bytes(large, k)) for k in range(small.n_shards)]
    whole = sum(n for _, n in sizes) / max(1, sum(m for m, _ in sizes))
    scales = {
        name: CostScale(flops=flops, n_bytes=whole, data_bytes=data_bytes, frame_bytes=whole)
        for name, flops in names.items()
    }
    for k, (m, n) in enumerate(sizes):
        ratio = n / max(1, m)
        shard = CostScale(flops=ratio, n_bytes=ratio, frame_bytes=ratio)
        scales[Address(f"shard-{k}")] = shard
    return scales


def block_bytes_for(small: Layout, large: Layout) -> int:
    """Return the size of blocks, so that there are about as many as of large vectors.

    Blocks as they are would carry far more of a large vector than 1 MiB each: clients
    would take those for lost, and ask again.
    """
    counts = [
        (_bytes(small, k), n_blocks(large.shard_size(k), itemsize=large.dtype.itemsize))
        for k in range(small.n_shards)
    ]
    itemsize = small.dtype.itemsize
    return max(-(-m // (n * itemsize)) * itemsize for m, n in counts) or itemsize


@contextmanager
def blocks_of(n_bytes: int | None) -> Iterator[None]:
    """Let vectors be cut into blocks of another size, in all of this process."""
    before = vectors.BLOCK_BYTES
    vectors.BLOCK_BYTES = before if n_bytes is None else n_bytes
    try:
        yield
    finally:
        vectors.BLOCK_BYTES = before


def scale_of(scales: Mapping[Address, CostScale], name: Address) -> CostScale:
    """Return the scale of a role; both copies of a shard have one."""
    return scales.get(name) or scales.get(shard_of(name)) or ONE


def _bytes(layout: Layout, k: int) -> int:
    return layout.shard_size(k) * layout.dtype.itemsize


TraceKind = Literal["content", "order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Machines, links, faults, and how much of a run is remembered."""

    machine: Machine = field(default_factory=Machine)  # of roles not named in:
    machines: Mapping[Address, Machine] = field(default_factory=dict)
    link: Link = field(default_factory=Link)  # between hosts, save those named in:
    links: Mapping[tuple[Address, Address], Link] = field(default_factory=dict)
    link_within_host: Link = WITHIN_HOST
    # What hosts share: without, each pair of roles has a link, and each role a speed,
    # of its own. Links within a host are no part of the fabric.
    fabric: Fabric | None = None
    processors: Mapping[str, Processor] = field(default_factory=dict)  # by host
    scales: Mapping[Address, CostScale] = field(default_factory=dict)
    block_bytes: int | None = None  # if not as usual: see `scales.block_bytes_for`
    faults: tuple[Fault, ...] = ()
    # Who begins at time 0: None is everybody; the rest wait to be launched.
    start: tuple[Address, ...] | None = None
    # True: every role is connected to every other from the start, and `PeerJoined`
    # tells it of each (new life of a) peer: for tests without a supervisor. False:
    # every role is connected to the supervisor, and otherwise as it asks (`Connect`).
    introduce: bool = False
    # Who has to do with whom, if everybody is introduced; None: all. Of thousands of
    # replicas each would otherwise be told of every other.
    acquainted: Callable[[Address, Address], bool] | None = None
    # How likely a message for a life that is over reaches the next one: ZeroMQ holds it
    # and connects again, and the next process may have been given the same port.
    port_reuse: float = 0.0
    launch_seconds: Seconds = 0.5  # from `Launch` to `Started`
    notice_seconds: Seconds = 0.01  # from the end of a process to `PeerLost`
    host_bytes_max: int = 1 << 34  # shared memory of one host
    n_lines_kept: int = 12  # per role, for the report of a failure
    full_trace: bool = False  # keep every line (`trace.lines`)
    # What of an event enters the digest: all of it; or when, to whom and of what kind.
    trace: TraceKind = "content"
    # False: messages are passed on as they are, arrays copied, and only their size is
    # computed. Nobody then sees whether they could be encoded.
    codec: bool = True

    def __post_init__(self) -> None:
        for name in ("launch_seconds", "notice_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, below 0")
        if self.block_bytes is not None and self.block_bytes < 1:
            raise ValueError(f"block_bytes is {self.block_bytes}, below 1")
        if not 0 <= self.port_reuse <= 1:
            raise ValueError(f"port_reuse is {self.port_reuse}; it is a probability")
        if self.full_trace and self.trace == "order":
            raise ValueError('a full trace has the content: use trace = "content"')
        for name in ("host_bytes_max", "n_lines_kept"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, below 1")

    def machine_of(self, name: Address) -> Machine:
        """Return what `name` runs on."""
        return self.machines.get(name, self.machine)

    def link_of(self, sender: Address, receiver: Address) -> Link:
        """Return the link from `sender` to `receiver`."""
        named = self.links.get((sender, receiver))
        if named is not None:
            return named
        host = self.machine_of(sender).host
        together = host != "" and host == self.machine_of(receiver).host
        return self.link_within_host if together else self.link
