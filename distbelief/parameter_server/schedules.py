"""Learning rate schedules: the factor of a rule's rate, as the number of pushes grows.

    name            factor(c), c = clock - n_warm_up
    "constant"      1
    "step"          decay ** floor(c / n_pushes)
    "exponential"   decay ** (c / n_pushes)
    "inverse_time"  1 / (1 + c / n_pushes)             Robbins & Monro 1951
    "cosine"        floor + (1 - floor) (1 + cos(pi c / n_pushes)) / 2, then floor
                                            Loshchilov & Hutter 2017, no restarts

Before any of them comes an optional linear warm-up (Goyal et al. 2017, section 2.2): pushes
0, 1, ... n_warm_up - 1 have the factors 1/n_warm_up, 2/n_warm_up, ... 1.

A factor depends on the shard's clock only, so shards agree without messages, and a restored
shard continues where its snapshot was taken. With N replicas the clock rises N times as fast as
each replica's steps.
"""

import math
from typing import final

from typing_extensions import override

from distbelief.core.arguments import NamedTable, require


class _Schedule(NamedTable, frozen=True, kw_only=True):
    n_warm_up: int = 0  # pushes over which the rate first rises

    def __post_init__(self) -> None:
        user = f"schedule {self.__struct_config__.tag!r}"
        require(self, user, "n_warm_up", lambda n: n >= 0, "a whole number of pushes, 0 or more")
        require(self, user, "n_pushes", lambda n: n >= 1, "a whole number of pushes, 1 or more")
        require(self, user, "decay", lambda x: 0.0 < x <= 1.0, "a number above 0, and at most 1")
        require(self, user, "floor", lambda x: 0.0 <= x <= 1.0, "a number from 0 to 1")

    def factor(self, clock: int) -> float:
        if clock < self.n_warm_up:
            return min((clock + 1) / self.n_warm_up, 1.0)
        return self._after_warm_up(clock - self.n_warm_up)

    def _after_warm_up(self, c: int) -> float:
        raise NotImplementedError


@final
class Constant(_Schedule, frozen=True, kw_only=True, tag="constant"):
    """The learning rate as it is, after the warm-up."""

    @override
    def _after_warm_up(self, c: int) -> float:
        return 1.0


@final
class Step(_Schedule, frozen=True, kw_only=True, tag="step"):
    """The rate falls by `decay` after every `n_pushes`."""

    n_pushes: int
    decay: float

    @override
    def _after_warm_up(self, c: int) -> float:
        return float(self.decay ** (c // self.n_pushes))


@final
class Exponential(_Schedule, frozen=True, kw_only=True, tag="exponential"):
    """The rate falls smoothly by `decay` over every `n_pushes`."""

    n_pushes: int
    decay: float

    @override
    def _after_warm_up(self, c: int) -> float:
        return float(self.decay ** (c / self.n_pushes))


@final
class InverseTime(_Schedule, frozen=True, kw_only=True, tag="inverse_time"):
    """Half the rate after `n_pushes`, a third after twice as many, and so on."""

    n_pushes: int

    @override
    def _after_warm_up(self, c: int) -> float:
        return 1.0 / (1.0 + c / self.n_pushes)


@final
class Cosine(_Schedule, frozen=True, kw_only=True, tag="cosine"):
    """Half a cosine wave down to `floor` over `n_pushes`, then `floor`."""

    n_pushes: int
    floor: float = 0.0

    @override
    def _after_warm_up(self, c: int) -> float:
        done = min(c / self.n_pushes, 1.0)
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * done)) / 2.0


Schedule = Constant | Step | Exponential | InverseTime | Cosine
