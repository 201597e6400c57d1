"""What a simulated cluster consists of, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from distbelief.roles import Address, Seconds
from distbelief.simulation.fabric import Fabric
from distbelief.simulation.faults import Fault
from distbelief.simulation.links import WITHIN_HOST, Link
from distbelief.simulation.machines import Machine
from distbelief.simulation.scales import Scale
from distbelief.simulation.sharing import Processor


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
    scales: Mapping[Address, Scale] = field(default_factory=dict)
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
