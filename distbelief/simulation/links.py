"""Links: how long messages travel from one role to another.

As over TCP, one message leaves after the other and none overtakes another of its link:

    sent     departs = when all of its bytes are out     arrives
     |------------- serialisation ---------------|--- latency ---|
                    (after those before it)
"""

from dataclasses import dataclass

from distbelief.roles import Address, Seconds
from distbelief.simulation.fabric import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two roles."""

    latency_seconds: Seconds = 100e-6
    bytes_per_second: float = 1.25e8  # 1 Gbit/s
    jitter: float = 0.5  # a latency is drawn from [1, 1 + jitter] times this one

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or self.jitter < 0 or not self.bytes_per_second > 0:
            raise ValueError(
                f"{self}: latency and jitter may not be below 0, and bytes_per_second "
                "must be above it"
            )


WITHIN_HOST = Link(latency_seconds=40e-6, bytes_per_second=5e9)
"""Half a round trip of 64 bytes over ZeroMQ on loopback, and its throughput."""


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
        "tally",
    )

    def __init__(self, link: Link, *, sender: Address, receiver: Address, incarnation: int) -> None:
        self.link = link
        self.route: Route | None = None  # over a fabric; else the link is its own
        self.frame_scale = 1.0  # of the arrays in its messages
        self.tally: list[float] = [0, 0]  # messages, bytes sent, of the two roles
        self._latency_seconds = link.latency_seconds
        self._jitter = link.jitter
        self.sender = sender
        self.receiver = receiver
        self.incarnation = incarnation  # of the receiver
        self.broken_at: Seconds = float("inf")  # when the sender was killed
        self._free_at: Seconds = 0.0
        self._arrives_last: Seconds = 0.0

    def lead_over(self, route: Route) -> None:
        """Go over a fabric from now on."""
        self.route = route
        self._latency_seconds, self._jitter = route.latency_seconds, route.jitter

    def take_longer(self, seconds: Seconds) -> None:
        """Let every message arrive so much later."""
        self._latency_seconds += seconds

    def depart(self, n_bytes: float, now: Seconds) -> Seconds:
        """Return when a message sent now has left the sender."""
        begins = max(now, self._free_at)
        self._free_at = begins + n_bytes / self.link.bytes_per_second
        return self._free_at

    def arrive(
        self, departs: Seconds, chance: float, *, delay: Seconds = 0.0, overtaken: bool = False
    ) -> Seconds:
        """Return when it arrives, if it has left at `departs`: after all before it.

        `chance` is a number in [0, 1) for its latency.

        Those behind it arrive after it as well, unless it may be overtaken.
        """
        latency = self._latency_seconds * (1 + self._jitter * chance)
        arrives = departs + latency + delay
        if arrives < self._arrives_last:
            return self._arrives_last
        if not overtaken:
            self._arrives_last = arrives
        return arrives
