"""Faults as data: what breaks, when, for how long.

A schedule of faults is a tuple of these; `random_faults` draws one. Everything it draws
has healed by its horizon, so that a test can ask for progress afterwards. Faults of
messages throw dice of their own (`RandomStreams.faults`): adding one moves no other
random number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distbelief.roles.role import Address, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The process dies: state, timers and unsent bytes are gone; files stay."""

    at: Seconds
    role: Address
    restart_after: Seconds | None = None  # None: left to the supervisor
    # None: between two events. k: in the midst of the next event that asks for
    # actions, after the first k of them ("crash at any effect boundary"); with
    # `restart_after`, not at all if there is no such event for so long.
    after_actions: int | None = None
    tears: bool = False  # a snapshot just being written stays, torn


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A machine is gone: its roles die, and no life of them begins for so long."""

    at: Seconds
    roles: tuple[Address, ...]
    seconds: Seconds
    restarts: bool = False  # they come back by themselves; else their supervisor asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The process stands still (SIGSTOP), then goes on as if nothing had been."""

    at: Seconds
    role: Address
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Supersede:
    """The process is taken for dead: its next life begins while this one goes on."""

    at: Seconds
    role: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Work that begins meanwhile takes `factor` times as long."""

    at: Seconds
    role: Address
    factor: float
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """No message passes between `a` and `b` (or anyone): it waits, or is lost."""

    at: Seconds
    a: Address
    b: Address | None = None
    seconds: Seconds
    loses: bool = False  # False: TCP sends again once the link is back
    one_way: bool = False  # only what `a` sends is held


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Each message is lost with this probability."""

    probability: float
    between: tuple[Address, Address] | None = None  # either way; None: everywhere
    at: Seconds = 0.0
    seconds: Seconds = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Each message arrives again, perhaps late and out of order."""

    probability: float
    seconds_max: Seconds = 1.0  # how late
    between: tuple[Address, Address] | None = None
    at: Seconds = 0.0
    seconds: Seconds = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Each message is late with this probability, and those behind it with it."""

    probability: float
    seconds_max: Seconds = 1.0
    overtaken: bool = False  # True: those behind it pass it
    between: tuple[Address, Address] | None = None
    at: Seconds = 0.0
    seconds: Seconds = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """Nothing can be persisted."""

    at: Seconds
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TornSnapshot:
    """The newest snapshot of `role` turns out to be damaged; starts skip it."""

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
    """Draw a schedule of faults, in order of time.

    Args:
        seed: Same seed and roles, same faults.
        roles: Who may be hit.
        horizon: Seconds; by then everything has healed (a killed role has restarted).
        intensity: How often each role is hit on average.
        restarts: Whether killed roles come back by themselves; False leaves that to a
            supervisor.
    """
    stream = np.random.default_rng([seed, 0xFA17])
    if not roles or horizon <= 0:
        raise ValueError(f"faults for {len(roles)} roles within {horizon} s: none fit")
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
    """Draw a beginning and a length that end within the horizon; mostly short."""
    at = float(stream.uniform(0.0, 0.9 * horizon))
    seconds = float(stream.exponential(0.1 * horizon))
    return at, min(seconds, 0.95 * horizon - at)
