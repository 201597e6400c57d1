"""Faults of a simulation, as data: kills, pauses, lost messages and the like.

A schedule is a tuple of faults. Message faults have a random stream of their own
(`RandomStreams.faults`): adding one changes no other random number.
"""

import math
from dataclasses import dataclass

from distbelief.protocol.role import Address, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The process dies. Its state, timers and unsent bytes are lost; files stay."""

    at: Seconds
    role: Address
    restart_after: Seconds | None = None  # None: left to the supervisor
    # None: between two events. k: after the first k actions of the next event that has
    # actions. With `restart_after`, the kill is dropped if there is no such event in time.
    after_actions: int | None = None
    tears: bool = False  # a checkpoint that is being written stays, damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A machine fails: its roles die, and none of them can start for `seconds`."""

    at: Seconds
    roles: tuple[Address, ...]
    seconds: Seconds
    restarts: bool = False  # True: the roles restart by themselves; False: the supervisor does


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The process is stopped (SIGSTOP) and continues after `seconds`."""

    at: Seconds
    role: Address
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Supersede:
    """The process is wrongly declared dead: its next incarnation starts while it still runs."""

    at: Seconds
    role: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Work that begins during the fault takes `factor` times as long."""

    at: Seconds
    role: Address
    factor: float
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """The link between `a` and `b` (None: and all others) is cut: messages wait or are lost."""

    at: Seconds
    a: Address
    b: Address | None = None
    seconds: Seconds
    loses: bool = False  # False: TCP retransmits when the link is back
    one_way: bool = False  # True: only messages from `a` are affected


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Each message is lost with this probability."""

    probability: float
    between: tuple[Address, Address] | None = None  # either way; None: everywhere
    at: Seconds = 0.0
    seconds: Seconds = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Each message is delivered twice with this probability, the second time perhaps late."""

    probability: float
    seconds_max: Seconds = 1.0  # how late
    between: tuple[Address, Address] | None = None
    at: Seconds = 0.0
    seconds: Seconds = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Each message is late with this probability, and so are those behind it."""

    probability: float
    seconds_max: Seconds = 1.0
    overtaken: bool = False  # True: messages behind it overtake it
    between: tuple[Address, Address] | None = None
    at: Seconds = 0.0
    seconds: Seconds = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """No checkpoint can be written."""

    at: Seconds
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TornSnapshot:
    """The newest checkpoint of `role` is damaged; a restart skips it."""

    at: Seconds
    role: Address


MessageFault = Drop | Duplicate | Delay
NetworkFault = MessageFault | CutOff
Fault = Kill | Outage | Pause | Supersede | Slow | DiskFull | TornSnapshot | NetworkFault
