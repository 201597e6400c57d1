"""Faults of a simulation, as data: kills, pauses, lost messages and the like.

A schedule is a tuple of faults; `random_faults` draws one. All its faults end before the
horizon, so that a test can demand progress afterwards. Message faults have a random stream
of their own (`RandomStreams.faults`): adding one changes no other random number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distbelief.roles.role import Address, Seconds


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


def random_faults(
    seed: int,
    roles: Sequence[Address],
    *,
    horizon: Seconds,
    intensity: float = 1.0,
    restarts: bool = True,
) -> tuple[Fault, ...]:
    """Draw a schedule of faults, ordered by time.

    Args:
        seed: The same seed and roles give the same faults.
        roles: Roles that faults may affect.
        horizon: Seconds. By then all faults have ended, and killed roles have restarted.
        intensity: Average number of faults per role.
        restarts: Whether killed roles restart by themselves; False leaves it to a supervisor.
    """
    stream = np.random.default_rng([seed, 0xFA17])
    if not roles or horizon <= 0:
        raise ValueError(f"random_faults needs roles and a horizon, got {len(roles)}, {horizon} s")
    drawn: list[Fault] = [
        _draw_one(stream, roles, horizon=horizon, restarts=restarts)
        for _ in range(int(stream.poisson(intensity * len(roles))))
    ]
    drawn += _draw_for_messages(stream, horizon=horizon, intensity=intensity)
    return tuple(sorted(drawn, key=lambda fault: fault.at))


def _draw_one(
    stream: np.random.Generator, roles: Sequence[Address], *, horizon: Seconds, restarts: bool
) -> Fault:
    role = roles[int(stream.integers(len(roles)))]
    at, seconds = _window(stream, horizon)
    coin = bool(stream.random() < 0.5)
    match int(stream.integers(8)):
        case 0 | 1:
            return Kill(
                at=at,
                role=role,
                restart_after=seconds / 2 if restarts else None,
                after_actions=int(stream.integers(4)) if coin else None,
                tears=bool(stream.random() < 0.5),
            )
        case 2 | 3:
            return Pause(at=at, role=role, seconds=seconds)
        case 4:
            return Slow(at=at, role=role, factor=8.0, seconds=seconds)
        case 5:
            other = roles[int(stream.integers(len(roles)))]
            return CutOff(
                at=at,
                a=role,
                b=None if other == role else other,
                seconds=seconds,
                loses=coin,
                one_way=bool(stream.random() < 0.5),
            )
        case 6:
            return DiskFull(at=at, seconds=seconds)
        case _:
            return TornSnapshot(at=at, role=role)


def _draw_for_messages(
    stream: np.random.Generator, *, horizon: Seconds, intensity: float
) -> list[Fault]:
    late = 0.05 * horizon
    faults: list[Fault] = []
    for index in range(3):
        at, seconds = _window(stream, horizon)
        probability = float(min(0.5, 0.1 * intensity * stream.random()))
        coin = bool(stream.random() < 0.5)
        match index:
            case 0:
                fault: Fault = Drop(probability=probability, at=at, seconds=seconds)
            case 1:
                fault = Duplicate(probability=probability, seconds_max=late, at=at, seconds=seconds)
            case _:
                fault = Delay(
                    probability=probability,
                    seconds_max=late,
                    overtaken=coin,
                    at=at,
                    seconds=seconds,
                )
        if stream.random() < 0.5:
            faults.append(fault)
    return faults


def _window(stream: np.random.Generator, horizon: Seconds) -> tuple[Seconds, Seconds]:
    at = float(stream.uniform(0.0, 0.9 * horizon))
    seconds = float(stream.exponential(0.1 * horizon))
    return at, min(seconds, 0.95 * horizon - at)
