"""Clusters: machines, the network between them, and how machines fail.

All figures are measured on this host, or written into a cluster file; `origin` says which.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Annotated, Final, Literal, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from distbelief.core import units
from distbelief.graph.graph import GraphError


AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_ABOVE_0: Final = msgspec.Meta(gt=0)
PositiveRate = Annotated[units.Rate, _ABOVE_0]


# --- outages ---

N_OUTAGES_MAX: Final = 1_000_000


@final
class Outages(msgspec.Struct, frozen=True, kw_only=True):
    """A random process of outages; the times between them are exponential."""

    mean_time: Annotated[
        units.Time, _ABOVE_0
    ]  # seconds between two outages of one machine, on average
    away: Annotated[units.Time, _ABOVE_0]  # seconds until a machine is back
    group: AtLeastOne = 1  # machines that fail together: the first so many, the next so many, ...


@final
class Lost(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    machine: int
    away: float


@final
class OutageTrace(msgspec.Struct, frozen=True, kw_only=True):
    """All recorded outages of some machines.

    seconds,machine,away          <- a header, or none
    120.5,3,300                   machine 3 is away from 120.5 s to 420.5 s
    end,86400                     end of the recording; the last line
    """

    outages: tuple[Lost, ...]  # in order of time
    covers: float  # length of the recording, seconds


_SECONDS: Final = r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*"
_OUTAGE: Final = re.compile(rf"{_SECONDS},\s*(\d+)\s*,{_SECONDS}")
_END: Final = re.compile(rf"end\s*,{_SECONDS}")


def read_trace(text: str, *, n_machines: int) -> OutageTrace:
    """Return the trace in a CSV text; GraphError names a wrong line, and what it should be."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    rows = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if rows and rows[0][1].replace(" ", "") == "seconds,machine,away":
        del rows[0]
    end = _END.fullmatch(rows.pop()[1]) if rows else None
    if end is None:
        raise GraphError(
            "a trace ends without the line 'end,SECONDS': write how long the machines were recorded"
        )
    if len(rows) >= N_OUTAGES_MAX:
        raise GraphError(f"a trace has {len(rows) + 1} lines; use {N_OUTAGES_MAX} at most")
    outages = []
    for number, line in rows:
        row = _OUTAGE.fullmatch(line)
        if row is None or int(row[2]) >= n_machines:
            raise GraphError(
                f"line {number} of a trace is {line!r:.60}: write seconds,machine,away with "
                f"machine 0 to {n_machines - 1}, and seconds of 0 or more without a unit"
            )
        outages.append(Lost(at=float(row[1]), machine=int(row[2]), away=float(row[3])))
    outages.sort(key=lambda lost: (lost.at, lost.machine))
    covers = float(end[1])
    if outages and outages[-1].at > covers:
        raise GraphError(
            f"a trace has an outage at {outages[-1].at} s, after its end at "
            f"{covers} s: correct the last line"
        )
    return OutageTrace(outages=tuple(outages), covers=covers)


Origin = Literal["measured", "assumed"]
FloatArray = NDArray[np.float64]

UNLIMITED: Final = math.inf

# The figures of a machine on which a plan depends.
_PRICED: Final = (
    "flops",
    "memory_rate",
    "message_rate",
    "memory",
    "overhead",
    "jitter",
    "bandwidth",
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    # Floating point operations per second in a large matrix product.
    flops: Annotated[units.Compute, _ABOVE_0]
    memory_rate: PositiveRate  # bytes per second to and from memory
    # Bytes per second of messages that keep its processors busy; tasks meanwhile take longer.
    message_rate: PositiveRate = UNLIMITED
    memory: Annotated[units.Bytes, _ABOVE_0] = (
        UNLIMITED  # bytes for parameters, gradients and activations
    )
    overhead: units.Time = 0.0  # seconds per layer, however small
    # Standard deviation of the logarithm of compute times: 0.1 is often 10 % faster or slower, 2
    # often 7 times.
    jitter: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    bandwidth: PositiveRate  # bytes per second that it can send, and also receive
    upload: PositiveRate = UNLIMITED  # bytes per second that it can send, if fewer
    cores: AtLeastOne = 1  # `flops` are divided evenly among them
    # Core seconds per message at each end; simulations charge it to the process that receives.
    handling: units.Time = 0.0
    region: str = ""  # for [latencies]; machines of a region fail together
    price: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # of an hour, in any currency
    join: units.Time = 0.0  # seconds after the start of the job when it comes
    leave: units.Time = UNLIMITED  # and when it goes, for good
    preemptions: Outages | None = None  # of a spot machine, beside those of the whole cluster

    def __post_init__(self) -> None:
        if not self.join < self.leave:
            raise GraphError(
                f"a machine would join after {self.join:g} s and leave after {self.leave:g} s: "
                "let it leave later"
            )


@final
class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A switch that a group of consecutive machines shares."""

    first: int
    last: int  # included
    bandwidth: float  # bytes per second in each direction, shared by all that enters or leaves


@final
class Cluster(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Machines, fastest first, and the network between them."""

    name: str
    machines: tuple[Machine, ...]
    latency: float = 0.0  # seconds from the end of sending a message to its arrival
    # Seconds per message during which neither end sends or receives another.
    message_overhead: float = 0.0
    # "0-5": bytes per second in both directions, if less than both ends can do
    links: Mapping[str, float] = msgspec.field(default_factory=dict)
    origin: Origin = "assumed"  # where the figures are from
    # Seconds between two machines ("0-5") or two regions ("eu-us"), in place of `latency`
    latencies: Mapping[str, float] = msgspec.field(default_factory=dict)
    note: str = ""  # for the reader of a report
    switches: tuple[Switch, ...] = ()  # of any two, one contains the other or they share no machine
    failures: Outages | None = None  # a machine breaks
    preemptions: Outages | None = None  # spot machines are taken back
    trace: OutageTrace | None = None  # recorded outages

    def __post_init__(self) -> None:
        spans = [(switch.first, switch.last) for switch in self.switches]
        for first, last in spans:
            if last >= len(self.machines):
                raise GraphError(
                    f"cluster {self.name!r}: a switch is for machines {first} to {last}: "
                    f"use 0 to {len(self.machines) - 1}"
                )
        for (a, b), (c, d) in combinations(sorted(spans), 2):
            if a < c <= b < d or (a, b) == (c, d):
                raise GraphError(
                    f"cluster {self.name!r}: the switches of machines {a} to {b} and {c} to {d} "
                    "overlap: one must contain the other, or they must share no machine"
                )

    def __len__(self) -> int:
        return len(self.machines)

    def first(self, n: int) -> "Cluster":
        """Return the cluster with its first n machines only; GraphError if it has fewer."""
        if not 1 <= n <= len(self.machines):
            raise GraphError(
                f"cluster {self.name!r} has {len(self.machines)} machines, but {n} are requested"
            )
        cut = [
            msgspec.structs.replace(switch, last=min(switch.last, n - 1))
            for switch in self.switches
            if switch.first < n
        ]
        cut.sort(key=lambda switch: -switch.bandwidth)  # of equal spans the slower switch stays
        spans = {(switch.first, switch.last): switch for switch in cut}
        return msgspec.structs.replace(
            self, machines=self.machines[:n], switches=tuple(spans.values())
        )

    def with_copy(self, index: int) -> "Cluster":
        """Return the cluster with one more machine like this one, behind it, with its links."""

        def moved(n: int) -> tuple[int, int]:
            return n + (n > index), n + (n >= index)  # and where its copy is, if it has one

        def renamed(ends: str) -> set[str]:
            if not ends[0].isdigit():
                return {ends}
            a, b = map(int, ends.split("-"))
            return {f"{a}-{b}" for a, b in zip(moved(a), moved(b), strict=True)}

        switches = tuple(
            msgspec.structs.replace(
                switch, first=moved(switch.first)[0], last=moved(switch.last)[1]
            )
            for switch in self.switches
        )
        trace = self.trace and msgspec.structs.replace(
            self.trace,
            outages=tuple(
                msgspec.structs.replace(lost, machine=n)
                for lost in self.trace.outages
                for n in dict.fromkeys(moved(lost.machine))
            ),
        )
        links, latencies = (
            {name: value for ends, value in table.items() for name in renamed(ends)}
            for table in (self.links, self.latencies)
        )
        return msgspec.structs.replace(
            self,
            machines=(*self.machines[: index + 1], *self.machines[index:]),
            links=links,
            latencies=latencies,
            switches=switches,
            trace=trace,
        )

    def rate(self, sender: int, receiver: int) -> float:
        """Return the bandwidth from one machine to another, bytes per second."""
        out = self.machines[sender]
        rate = min(out.bandwidth, out.upload, self.machines[receiver].bandwidth)
        if not self.links:
            return rate
        low, high = sorted((sender, receiver))
        return min(rate, self.links.get(f"{low}-{high}", math.inf))

    @cached_property
    def rates(self) -> FloatArray:
        # Bandwidth between any two machines, (n, n); () if all are equal.
        bandwidths = np.array([machine.bandwidth for machine in self.machines], dtype=np.float64)
        rates = np.minimum.outer(bandwidths, bandwidths)
        for ends, rate in self.links.items():
            low, high = map(int, ends.split("-"))
            if max(low, high) < len(self):
                rates[low, high] = rates[high, low] = min(rate, float(rates[low, high]))
        return np.asarray(rates[0, 0] if (rates == rates[0, 0]).all() else rates)

    def check_plannable(self) -> None:
        """GraphError if the network is more than plans know of."""
        if self.latencies or any(machine.upload < machine.bandwidth for machine in self.machines):
            raise GraphError(
                f"cluster {self.name!r} has [latencies] or upload: plans know one latency, and one "
                "bandwidth for each machine: leave these out, or simulate a job there"
            )

    @cached_property
    def is_uniform(self) -> bool:
        # All machines are equal, and all links.
        return not self.links and len(set(self.machines)) == 1

    @cached_property
    def fingerprint(self) -> str:
        # A hash of everything that plans depend on; the name is left out.
        delays = (self.latency, self.message_overhead)
        machines = [_priced(machine) for machine in self.machines]
        figures = (machines, delays, dict(self.links))
        encoded = msgspec.json.encode(figures, order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:16]


def _priced(machine: Machine) -> dict[str, float]:
    figures: dict[str, float] = {name: getattr(machine, name) for name in _PRICED}
    if machine.handling:  # left out if 0: fingerprints of older plans stay valid
        figures["handling"] = machine.handling / machine.cores
    return figures


def uniform(name: str, machine: Machine, n: int, *, latency: float = 0.0) -> Cluster:
    return Cluster(name=name, machines=(machine,) * n, latency=latency)


def weights(machines: Sequence[Machine]) -> list[float]:
    """Return the relative speed of each machine; the fastest has 1."""
    fastest = max(machine.flops for machine in machines)
    return [machine.flops / fastest for machine in machines]
