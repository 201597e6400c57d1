"""Random schedules of faults for simulated clusters.

All faults of a schedule end before the horizon, so that a test can demand progress afterwards.
"""

from collections.abc import Sequence

import numpy as np

from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.faults import (
    CutOff,
    Delay,
    DiskFull,
    Drop,
    Duplicate,
    Fault,
    Kill,
    Pause,
    Slow,
    TornSnapshot,
)


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
    drawn += message_faults(stream, horizon=horizon, intensity=intensity)
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


def message_faults(
    stream: np.random.Generator, *, horizon: Seconds, intensity: float
) -> list[Fault]:
    """Draw when messages are lost, late or come twice."""
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
