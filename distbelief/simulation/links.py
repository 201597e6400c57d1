"""Links: how long messages travel from one role to another.

As over TCP, one message leaves after the other and none overtakes another of its link:

    sent     departs = when all of its bytes are out     arrives
     |------------- serialisation ---------------|--- latency ---|
                    (after those before it)
"""

from dataclasses import dataclass

import numpy as np

from distbelief.roles import Address, Seconds


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
        "broken_at",
        "incarnation",
        "link",
        "receiver",
        "sender",
    )

    def __init__(
        self, link: Link, *, sender: Address, receiver: Address, incarnation: int
    ) -> None:
        self.link = link
        self.sender = sender
        self.receiver = receiver
        self.incarnation = incarnation  # of the receiver
        self.broken_at: Seconds = float("inf")  # when the sender was killed
        self._free_at: Seconds = 0.0
        self._arrives_last: Seconds = 0.0

    def depart(self, n_bytes: int, now: Seconds) -> Seconds:
        """Return when a message sent now has left the sender."""
        begins = max(now, self._free_at)
        self._free_at = begins + n_bytes / self.link.bytes_per_second
        return self._free_at

    def arrive(
        self,
        departs: Seconds,
        stream: np.random.Generator,
        *,
        delay: Seconds = 0.0,
        overtaken: bool = False,
    ) -> Seconds:
        """Return when it arrives: after all those before it.

        Those behind it arrive after it as well, unless it may be overtaken.
        """
        link = self.link
        latency = link.latency_seconds * (1 + link.jitter * stream.random())
        arrives = departs + latency + delay
        if arrives < self._arrives_last:
            return self._arrives_last
        if not overtaken:
            self._arrives_last = arrives
        return arrives
