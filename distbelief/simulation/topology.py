"""The network topology: links between roles, and a fabric of network cards and switches.

sent     departs = all bytes have left     arrives
 |---------- serialization ----------|--- latency ---|      a link: as over TCP, messages
         (after earlier messages)                           leave and arrive in order

sender's card --> [switches] --> receiver's card -- latency --> arrived      a fabric
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.roles.role import Address, Seconds


# Each port of the fabric (one direction of a card or switch) has a bandwidth. A message passes
# at the speed of the slowest port; it is not stored on the way. At the sender's card the flows
# take turns, one message each: with blocks of about 1 MiB that is fair. Switches and receiving
# cards serve messages in order of arrival. A small message does not wait behind large ones of
# other flows, except on a slow port.

SMALL_BYTES: Final = 4096  # largest message that slips in between the packets of larger ones

# Bytes per second (1 Mbit/s). On a slower port, where 4096 bytes take more than 33 ms, only
# smaller messages slip in.
NARROW: Final = 125_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The network card of one host; the values hold for each direction."""

    bytes_per_second: float
    overhead_seconds: Seconds = 0.0  # additional time for each message

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.overhead_seconds < math.inf:
            raise ValueError(
                f"{self}: bytes_per_second must be above 0, overhead_seconds 0 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """The link of a switch that all traffic into, or out of, a group of hosts shares."""

    hosts: frozenset[str]
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedNetwork:
    """The network cards and switches that all flows share."""

    cards: Mapping[str, Card]  # by host
    uplinks: tuple[Uplink, ...] = ()  # of groups of hosts, inner groups first
    # Bytes per second between two hosts, where that is less than their cards have.
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    latency_seconds: Seconds = 0.0  # from the end of sending to the arrival
    jitter: float = 0.0  # a latency is drawn from [1, 1 + jitter] times the value above

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"SwitchedNetwork.{name} is {getattr(self, name)}; use 0 or more")


@final
class Port:
    """One direction of one card, switch or link."""

    __slots__ = (
        "bytes_per_second",
        "free_at",
        "overhead_seconds",
        "queues",
        "small_bytes",
        "turns",
        "woken",
    )

    def __init__(self, bytes_per_second: float, overhead_seconds: Seconds) -> None:
        self.bytes_per_second = bytes_per_second
        self.overhead_seconds = overhead_seconds
        self.small_bytes = SMALL_BYTES * min(1.0, bytes_per_second / NARROW)
        self.free_at: Seconds = 0.0
        # Waiting packets by flow, and the order of the flows; only at a sender's card.
        self.queues: dict[object, deque[object]] = {}
        self.turns: deque[object] = deque()
        self.woken = False  # a call for the time when it is free is scheduled

    def wait(self, flow: object, packet: object) -> None:
        """Add a packet to the queue of its flow."""
        queue = self.queues.get(flow)
        if queue is None:
            queue = self.queues[flow] = deque()
            self.turns.append(flow)
        queue.append(packet)

    def next(self) -> object:
        """Remove and return the next packet; the flows take turns."""
        flow = self.turns.popleft()
        queue = self.queues[flow]
        packet = queue.popleft()
        if queue:
            self.turns.append(flow)
        else:
            del self.queues[flow]
        return packet


@final
class Route:
    """The ports between two hosts."""

    __slots__ = ("_ports", "card", "jitter", "latency_seconds")

    def __init__(
        self, card: Port, others: tuple[Port, ...], *, latency: Seconds, jitter: float
    ) -> None:
        self.card = card
        self.latency_seconds = latency
        self.jitter = jitter
        self._ports = (card, *others)

    def pass_through(self, n_bytes: float, now: Seconds) -> tuple[Seconds, Seconds]:
        """Send `n_bytes`; return when they have left the card, and when they have passed."""
        # A small message does not wait, but uses bandwidth. On a slow port, where it is not
        # small, it waits for that port only: it has not blocked the later ports until then.
        begins, departs, ends = now, 0.0, 0.0
        for port in self._ports:  # without max(): this loop is hot
            takes = port.overhead_seconds + n_bytes / port.bytes_per_second
            free_at = port.free_at
            ended = begins + takes
            if free_at <= begins:
                port.free_at = ended
            else:
                port.free_at = free_at + takes
                if n_bytes > SMALL_BYTES:
                    begins, ended = free_at, port.free_at
                elif n_bytes > port.small_bytes:
                    ended = port.free_at
            if ended > ends:  # noqa: PLR1730 -- as above
                ends = ended
            if not departs:
                departs = ends
        return departs, ends


@final
class Ports:
    """The ports of a fabric and the routes through them."""

    def __init__(self, fabric: SwitchedNetwork) -> None:
        self._fabric = fabric
        self._known: dict[tuple[object, ...], Port] = {}
        self._routes: dict[tuple[str, str], Route | None] = {}

    def route(self, sender: str, receiver: str) -> Route | None:
        """Return the route between two hosts; None if it does not use the fabric."""
        ends = sender, receiver
        if ends not in self._routes:
            self._routes[ends] = self._found(sender, receiver)
        return self._routes[ends]

    def _found(self, sender: str, receiver: str) -> Route | None:
        fabric = self._fabric
        cards = fabric.cards
        if sender == receiver or sender not in cards or receiver not in cards:
            return None
        others = []
        rate = fabric.links.get((sender, receiver))
        if rate is not None:
            others.append(self._port(("link", sender, receiver), rate))
        for index, up in enumerate(fabric.uplinks):
            if (sender in up.hosts) is not (receiver in up.hosts):
                way = "out" if sender in up.hosts else "in"
                others.append(self._port((way, index), up.bytes_per_second))
        return Route(
            self._card("out", sender),
            (*others, self._card("in", receiver)),
            latency=fabric.latency_seconds,
            jitter=fabric.jitter,
        )

    def _card(self, way: str, host: str) -> Port:
        card = self._fabric.cards[host]
        key = ("card", way, host)
        return self._port(key, card.bytes_per_second, card.overhead_seconds)

    def _port(self, key: tuple[object, ...], rate: float, overhead: Seconds = 0.0) -> Port:
        if key not in self._known:
            self._known[key] = Port(rate, overhead)
        return self._known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection between two roles."""

    latency_seconds: Seconds = 100e-6
    bytes_per_second: float = 1.25e8  # 1 Gbit/s
    jitter: float = 0.5  # a latency is drawn from [1, 1 + jitter] times this one

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or self.jitter < 0 or not self.bytes_per_second > 0:
            raise ValueError(
                f"{self}: latency and jitter must be at least 0, bytes_per_second above 0"
            )


# Half a round trip of 64 bytes over ZeroMQ on loopback, and its throughput.
WITHIN_HOST = Link(latency_seconds=40e-6, bytes_per_second=5e9)


class Path:
    """A connection over one link, to one incarnation of its receiver."""

    __slots__ = (
        "_arrives_last",
        "_free_at",
        "_jitter",
        "_latency_seconds",
        "broken_at",
        "frame_scale",
        "incarnation",
        "link",
        "receiver",
        "route",
        "sender",
        "traffic",
    )

    def __init__(self, link: Link, *, sender: Address, receiver: Address, incarnation: int) -> None:
        self.link = link
        self.route: Route | None = None  # through a fabric; None: it uses `link`
        self.frame_scale = 1.0  # factor for the arrays in its messages
        self.traffic: list[float] = [0, 0]  # messages and bytes sent between the two roles
        self._latency_seconds = link.latency_seconds
        self._jitter = link.jitter
        self.sender = sender
        self.receiver = receiver
        self.incarnation = incarnation  # of the receiver
        self.broken_at: Seconds = float("inf")  # when the sender was killed
        self._free_at: Seconds = 0.0
        self._arrives_last: Seconds = 0.0

    def use_route(self, route: Route) -> None:
        self.route = route
        self._latency_seconds, self._jitter = route.latency_seconds, route.jitter

    def add_latency(self, seconds: Seconds) -> None:
        """Add to the latency of each message."""
        self._latency_seconds += seconds

    def depart(self, n_bytes: float, now: Seconds) -> Seconds:
        """Return when a message that is sent now has left the sender."""
        begins = max(now, self._free_at)
        self._free_at = begins + n_bytes / self.link.bytes_per_second
        return self._free_at

    def arrive(
        self, departs: Seconds, chance: float, *, delay: Seconds = 0.0, overtaken: bool = False
    ) -> Seconds:
        """Return when a message that left at `departs` arrives: after all earlier ones.

        `chance`, in [0, 1), determines its latency. Later messages arrive after it, unless
        it may be `overtaken`.
        """
        latency = self._latency_seconds * (1 + self._jitter * chance)
        arrives = departs + latency + delay
        if arrives < self._arrives_last:
            return self._arrives_last
        if not overtaken:
            self._arrives_last = arrives
        return arrives
