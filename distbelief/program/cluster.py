"""Machines and the network between them, as far as prices depend on them.

Every figure says where it is from: measured on this host, or written into a file by
somebody who may never have seen the machines.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Final, Literal, final

import msgspec

from distbelief.graph.graph import GraphError


# Machines that go away: how often, for how long, or exactly when.
#
# Two processes may run side by side, *failures* (a machine breaks) and *preemptions* (a
# spot machine is taken back, perhaps several at once). A *trace* lists what happened to
# real machines, and how long they were watched: beyond that it says nothing.
#
#     seconds,machine,away          <- a header, or none
#     120.5,3,300                   machine 3 is gone from 120.5 s to 420.5 s
#     end,86400                     watched for a day; the last line

N_OUTAGES_MAX: Final = 1_000_000


@final
class Outages(msgspec.Struct, frozen=True, kw_only=True):
    """A process of outages; times between them are exponential.

    Attributes:
        mean_time: Seconds between two outages of one machine, on average.
        away: Seconds until a machine is back.
        group: Machines that go together: the first so many, the next so many, ...
    """

    mean_time: float
    away: float
    group: int = 1

    def __post_init__(self) -> None:
        for name in ("mean_time", "away"):
            if not 0 < getattr(self, name) < math.inf:
                raise GraphError(f"{name} of outages is {getattr(self, name)}; use a time above 0")
        if self.group < 1:
            raise GraphError(f"group of outages is {self.group}; use 1 or more")


@final
class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """One machine was gone."""

    at: float
    machine: int
    away: float


@final
class OutageTrace(msgspec.Struct, frozen=True, kw_only=True):
    """All outages of some machines within a time.

    Attributes:
        outages: In order of time.
        covers: Seconds that were watched.
    """

    outages: tuple[Lost, ...]
    covers: float


def read_trace(text: str, *, n_machines: int) -> OutageTrace:
    """Return the trace that a CSV text holds.

    Raises:
        GraphError: naming the line and what it should be.
    """
    lines = [
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if lines and lines[0][1] == ["seconds", "machine", "away"]:
        lines = lines[1:]
    if not lines or lines[-1][1][0] != "end":
        raise GraphError(
            "a trace ends without the line 'end,SECONDS': write how long the machines "
            "were watched, or nobody knows whether more happened"
        )
    if len(lines) > N_OUTAGES_MAX:
        raise GraphError(f"a trace has {len(lines)} lines; use {N_OUTAGES_MAX} at most")
    *rows, (number, last) = lines
    covers = _seconds(last[1] if len(last) == 2 else "", number)
    outages = [_row(cells, number, n_machines) for number, cells in rows]
    outages.sort(key=lambda lost: (lost.at, lost.machine))
    if outages and outages[-1].at > covers:
        raise GraphError(
            f"a trace ends early: an outage at {outages[-1].at} s, but 'end' says that "
            f"the machines were watched for {covers} s only: mend the last line"
        )
    return OutageTrace(outages=tuple(outages), covers=covers)


def _row(cells: list[str], number: int, n_machines: int) -> Lost:
    if len(cells) != 3:
        raise GraphError(
            f"line {number} of a trace has {len(cells)} cells: write seconds,machine,away"
        )
    at, away = _seconds(cells[0], number), _seconds(cells[2], number)
    if not cells[1].isdecimal() or not int(cells[1]) < n_machines:
        raise GraphError(
            f"line {number} of a trace names machine {cells[1]!r:.40}; there are "
            f"{n_machines}, counted from 0"
        )
    return Lost(at=at, machine=int(cells[1]), away=away)


def _seconds(cell: str, number: int) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise GraphError(
            f"line {number} of a trace has {cell!r:.40} where seconds should be: write "
            "a number of 0 or more, without a unit"
        )
    return seconds


Origin = Literal["measured", "assumed"]

UNLIMITED: Final = math.inf

_PRICED: Final = (
    "flops",
    "memory_rate",
    "message_rate",
    "memory",
    "overhead",
    "jitter",
    "bandwidth",
)
"""Of a machine, what a plan depends on."""


@final
class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine.

    Attributes:
        flops: Floating point operations per second in a large matrix product.
        memory_rate: Bytes per second to and from memory.
        message_rate: Bytes per second of messages, sent or received, that would keep
            its processors busy; what it computes meanwhile takes longer.
        memory: Bytes that parameters, gradients and activations may take.
        overhead: Seconds that each layer costs, however small.
        jitter: Standard deviation of the logarithm of its compute times: 0.1 is a
            machine whose steps are often 10 % faster or slower.
        bandwidth: Bytes per second that it can send, and likewise receive.
        cores: Among which `flops` are divided evenly.
        handling: Seconds that a message, however small, takes of a core at each end,
            beside its bytes; what is computed there meanwhile takes longer. Simulations
            charge it to the process that receives.
    """

    flops: float
    memory_rate: float
    message_rate: float = UNLIMITED
    memory: float = UNLIMITED
    overhead: float = 0.0
    jitter: float = 0.0
    bandwidth: float
    cores: int = 1
    handling: float = 0.0

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise GraphError(f"a machine's cores is {self.cores}; use 1 or more")
        for name in ("flops", "memory_rate", "message_rate", "memory", "bandwidth"):
            if not getattr(self, name) > 0:
                raise GraphError(
                    f"a machine's {name} is {getattr(self, name)}; use a number above 0"
                )
        for name in ("overhead", "jitter", "handling"):
            if not 0 <= getattr(self, name) < math.inf:
                raise GraphError(f"a machine's {name} is {getattr(self, name)}; use 0 or more")


@final
class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """What passes into, or out of, a group of machines shares this.

    Attributes:
        first: Of the machines.
        last: Of them, included.
        bandwidth: Bytes per second in each direction.
    """

    first: int
    last: int
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise GraphError(
                f"a switch for machines {self.first} to {self.last}: name the lower one first"
            )
        if not self.bandwidth > 0:
            raise GraphError(
                f"the switch of machines {self.first} to {self.last} has bandwidth "
                f"{self.bandwidth}; use a number above 0"
            )


@final
class Cluster(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Machines, fastest first, and what lies between them.

    Attributes:
        name: What it is called.
        machines: All there are.
        latency: Seconds from the end of sending a message to its arrival.
        message_overhead: Seconds that a message, however small, keeps both its ends
            from sending and receiving others: what software costs.
        links: Bytes per second between two machines, by "0-5", where it is less than
            both of them can do; in both directions.
        origin: Where the figures are from.
        note: What a reader should know of them.
        switches: Groups of machines behind a switch that may be the bottleneck; of any
            two, one contains the other or they have no machine in common.
        failures: How machines break; None: never.
        preemptions: How they are taken back; None: never.
        trace: Exactly when they were gone; None: nobody watched.
        origins: Of single figures, by name: where they are from, in words.
    """

    name: str
    machines: tuple[Machine, ...]
    latency: float = 0.0
    message_overhead: float = 0.0
    links: Mapping[str, float] = msgspec.field(default_factory=dict)
    origin: Origin = "assumed"
    note: str = ""
    switches: tuple[Switch, ...] = ()
    failures: Outages | None = None
    preemptions: Outages | None = None
    trace: OutageTrace | None = None
    origins: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.machines:
            raise GraphError(f"cluster {self.name!r} has no machine")
        for name in ("latency", "message_overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise GraphError(
                    f"cluster {self.name!r}: {name} is {getattr(self, name)}; use 0 or more"
                )
        for ends, rate in self.links.items():
            if not rate > 0:
                raise GraphError(
                    f"cluster {self.name!r}: link {ends} has bandwidth {rate}; use a "
                    "number above 0, or leave machines out that nobody can reach"
                )
        self._check_switches()

    def _check_switches(self) -> None:
        spans = [(switch.first, switch.last) for switch in self.switches]
        for first, last in spans:
            if last >= len(self.machines):
                raise GraphError(
                    f"cluster {self.name!r}: a switch for machines {first} to {last}; "
                    f"there are {len(self.machines)}, counted from 0"
                )
        for (a, b), (c, d) in combinations(sorted(spans), 2):
            if a < c <= b < d or (a, b) == (c, d):
                raise GraphError(
                    f"cluster {self.name!r}: switches for machines {a} to {b} and {c} "
                    f"to {d}: let one contain the other, or neither touch the other"
                )

    def __len__(self) -> int:
        """How many machines."""
        return len(self.machines)

    def first(self, n: int) -> "Cluster":
        """Return the cluster with its first n machines only.

        Raises:
            GraphError: it has fewer.
        """
        if not 1 <= n <= len(self.machines):
            raise GraphError(
                f"cluster {self.name!r} has {len(self.machines)} machines; {n} are asked for"
            )
        cut = [
            msgspec.structs.replace(switch, last=min(switch.last, n - 1))
            for switch in self.switches
            if switch.first < n
        ]
        cut.sort(key=lambda switch: -switch.bandwidth)  # of two alike the narrower
        spans = {(switch.first, switch.last): switch for switch in cut}
        return msgspec.structs.replace(
            self, machines=self.machines[:n], switches=tuple(spans.values())
        )

    def rate(self, sender: int, receiver: int) -> float:
        """Return the most bytes per second from one machine to another."""
        rate = min(self.machines[sender].bandwidth, self.machines[receiver].bandwidth)
        if not self.links:
            return rate
        low, high = sorted((sender, receiver))
        return min(rate, self.links.get(f"{low}-{high}", math.inf))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all machines, and all links, are alike."""
        return not self.links and len(set(self.machines)) == 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that plans depend on, whatever its name is."""
        delays = (self.latency, self.message_overhead)
        machines = [_priced(machine) for machine in self.machines]
        figures = (machines, delays, dict(self.links))
        encoded = msgspec.json.encode(figures, order="sorted")
        return hashlib.sha256(encoded).hexdigest()[:16]


def _priced(machine: Machine) -> dict[str, float]:
    figures: dict[str, float] = {name: getattr(machine, name) for name in _PRICED}
    if machine.handling:  # else it is that of clusters that knew nothing of it
        figures["handling"] = machine.handling / machine.cores
    return figures


def uniform(name: str, machine: Machine, n: int, *, latency: float = 0.0) -> Cluster:
    """Return a cluster of n equal machines."""
    return Cluster(name=name, machines=(machine,) * n, latency=latency)


def weights(machines: Sequence[Machine]) -> list[float]:
    """Return the speed of each machine, the fastest being 1."""
    fastest = max(machine.flops for machine in machines)
    return [machine.flops / fastest for machine in machines]
