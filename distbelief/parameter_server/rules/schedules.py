"""Schedules: by what factor the learning rate is multiplied as a shard's clock rises.

A factor depends on nothing but the clock: the number of pushes that this shard applied
before the one at hand. Shards therefore agree without a word, and a shard restored from
a snapshot goes on where the snapshot was taken. With N replicas pushing after every
step, a clock rises N times as fast as each replica's step.

    name            factor(c), c = clock - n_warm_up
    "constant"      1
    "step"          decay ** floor(c / n_pushes)
    "exponential"   decay ** (c / n_pushes)
    "inverse_time"  1 / (1 + c / n_pushes)             Robbins & Monro 1951
    "cosine"        floor + (1 - floor) (1 + cos(pi c / n_pushes)) / 2, then floor
                                            Loshchilov & Hutter 2017, no restarts

Before any of them may come a linear warm-up (Goyal et al. 2017, section 2.2): pushes
0, 1, ... n_warm_up - 1 have the factors 1/n_warm_up, 2/n_warm_up, ... 1.

In a job file: `schedule = { name = "step", n_pushes = 10000, decay = 0.5 }`.
"""

import math
from typing import final

import msgspec


class _Schedule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"
):
    """What every schedule has."""

    n_warm_up: int = 0  # pushes over which the rate first rises


@final
class Constant(_Schedule, frozen=True, tag="constant"):
    """The learning rate as it is, after the warm-up."""

    def __post_init__(self) -> None:
        _check_count(self, "n_warm_up", self.n_warm_up, least=0)

    def factor(self, clock: int) -> float:
        """Return the factor for the push that finds the shard at `clock`."""
        return _warm_up(clock, self.n_warm_up)


@final
class Step(_Schedule, frozen=True, tag="step"):
    """Multiplied by `decay` after every `n_pushes`."""

    n_pushes: int
    decay: float

    def __post_init__(self) -> None:
        _check_count(self, "n_warm_up", self.n_warm_up, least=0)
        _check_count(self, "n_pushes", self.n_pushes, least=1)
        _check_decay(self, self.decay)

    def factor(self, clock: int) -> float:
        """Return the factor for the push that finds the shard at `clock`."""
        if clock < self.n_warm_up:
            return _warm_up(clock, self.n_warm_up)
        return float(self.decay ** ((clock - self.n_warm_up) // self.n_pushes))


@final
class Exponential(_Schedule, frozen=True, tag="exponential"):
    """Multiplied by `decay` over every `n_pushes`, smoothly."""

    n_pushes: int
    decay: float

    def __post_init__(self) -> None:
        _check_count(self, "n_warm_up", self.n_warm_up, least=0)
        _check_count(self, "n_pushes", self.n_pushes, least=1)
        _check_decay(self, self.decay)

    def factor(self, clock: int) -> float:
        """Return the factor for the push that finds the shard at `clock`."""
        if clock < self.n_warm_up:
            return _warm_up(clock, self.n_warm_up)
        return float(self.decay ** ((clock - self.n_warm_up) / self.n_pushes))


@final
class InverseTime(_Schedule, frozen=True, tag="inverse_time"):
    """Halved after `n_pushes`, a third after twice as many, and so on."""

    n_pushes: int

    def __post_init__(self) -> None:
        _check_count(self, "n_warm_up", self.n_warm_up, least=0)
        _check_count(self, "n_pushes", self.n_pushes, least=1)

    def factor(self, clock: int) -> float:
        """Return the factor for the push that finds the shard at `clock`."""
        if clock < self.n_warm_up:
            return _warm_up(clock, self.n_warm_up)
        return 1.0 / (1.0 + (clock - self.n_warm_up) / self.n_pushes)


@final
class Cosine(_Schedule, frozen=True, tag="cosine"):
    """Half a cosine wave down to `floor` over `n_pushes`, then `floor` for ever."""

    n_pushes: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_count(self, "n_warm_up", self.n_warm_up, least=0)
        _check_count(self, "n_pushes", self.n_pushes, least=1)
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"schedule 'cosine': floor is {self.floor}; use a number from 0 to 1")

    def factor(self, clock: int) -> float:
        """Return the factor for the push that finds the shard at `clock`."""
        if clock < self.n_warm_up:
            return _warm_up(clock, self.n_warm_up)
        done = min((clock - self.n_warm_up) / self.n_pushes, 1.0)
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * done)) / 2.0


Schedule = Constant | Step | Exponential | InverseTime | Cosine


def _warm_up(clock: int, n_warm_up: int) -> float:
    """Return 1/n, 2/n, ... 1, 1, 1 ...: the first push has a rate above zero."""
    return min((clock + 1) / n_warm_up, 1.0) if n_warm_up else 1.0


def _check_count(schedule: _Schedule, field: str, value: int, *, least: int) -> None:
    if value < least:
        raise ValueError(
            f"schedule {schedule.__struct_config__.tag!r}: {field} is {value}; "
            f"use a whole number of pushes, {least} or more"
        )


def _check_decay(schedule: _Schedule, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(
            f"schedule {schedule.__struct_config__.tag!r}: decay is {value}; "
            "use a number above 0, and at most 1"
        )
