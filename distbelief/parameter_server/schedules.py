"""Learning rate schedules: the factor of a rule's rate, as the number of pushes grows.

    name            factor(c), c = clock - n_warm_up
    "constant"      1
    "step"          decay ** floor(c / n_pushes)
    "exponential"   decay ** (c / n_pushes)
    "inverse_time"  1 / (1 + c / n_pushes)             Robbins & Monro 1951
    "linear"        1 - (1 - floor) c / n_pushes, then floor
    "cosine"        floor + (1 - floor) (1 + cos(pi c / n_pushes)) / 2, then floor
                                            Loshchilov & Hutter 2017, no restarts

Before any of them comes an optional linear warm-up (Goyal et al. 2017, section 2.2): pushes
0, 1, ... n_warm_up - 1 have the factors 1/n_warm_up, 2/n_warm_up, ... 1.

A factor depends on the shard's clock only, so shards agree without messages, and a restored
shard continues where its snapshot was taken. With N replicas the clock rises N times as fast as
each replica's steps. In a job both numbers may be "3 epochs", "50000 samples" or "2000 steps", of
all replicas together: `in_pushes` makes them numbers of pushes once the data are known.
"""

import math
from collections.abc import Callable
from typing import Final, Self, final

import msgspec
from typing_extensions import override

from distbelief.core.arguments import NamedTable, documented, require
from distbelief.core.errors import SettingError
from distbelief.core.units import parse_count


Pushes = int | str

_COUNTS: Final = ("n_pushes", "n_warm_up")


class _Schedule(NamedTable, frozen=True, kw_only=True):
    n_warm_up: Pushes = 0  # pushes over which the rate first rises

    def __post_init__(self) -> None:
        user = f"schedule {self.__struct_config__.tag!r}"
        numbers = "a whole number of pushes, {} or more, or text such as '3 epochs'"
        for name, least in zip(_COUNTS, (1, 0), strict=True):
            value = getattr(self, name, least)
            is_number = isinstance(value, int) and value >= least
            if not is_number and (parse_count(value) or (0.0, ""))[0] <= 0.0:
                raise SettingError(f"{user}: {name} is {value!r}; use {numbers.format(least)}")
        require(self, user, "decay", lambda x: 0.0 < x <= 1.0, "a number above 0, and at most 1")
        require(self, user, "floor", lambda x: 0.0 <= x <= 1.0, "a number from 0 to 1")

    @property
    def counted(self) -> dict[str, str]:
        """What is no number of pushes yet."""
        values = {name: getattr(self, name, 0) for name in _COUNTS}
        return {name: value for name, value in values.items() if isinstance(value, str)}

    def in_pushes(self, n_pushes: Callable[[float, str], int]) -> Self:
        """Return the schedule in pushes, of which `n_pushes(3.0, "epoch")` make three epochs."""
        found = {name: parse_count(text) for name, text in self.counted.items()}
        counts = {name: n_pushes(*count) for name, count in found.items() if count is not None}
        return msgspec.structs.replace(self, **counts) if counts else self

    def factor(self, clock: int) -> float:
        n_warm_up = _pushes(self.n_warm_up)
        if clock < n_warm_up:
            return min((clock + 1) / n_warm_up, 1.0)
        return self._after_warm_up(clock - n_warm_up)

    def _after_warm_up(self, c: int) -> float:
        raise NotImplementedError


_documented = documented(
    {
        "n_warm_up": "Over which the rate first rises: pushes, or text such as '3 epochs'.",
        "n_pushes": "Of all workers; or text such as '3 epochs', '1000 steps', '50000 samples'.",
        "decay": "Factor of the rate, above 0 and at most 1.",
        "floor": "Share of the rate that stays, from 0 to 1.",
    }
)


@final
@_documented
class Constant(_Schedule, frozen=True, kw_only=True, tag="constant"):
    """The learning rate as it is, after the warm-up."""

    @override
    def _after_warm_up(self, c: int) -> float:
        return 1.0


@final
@_documented
class Step(_Schedule, frozen=True, kw_only=True, tag="step"):
    """The rate falls by `decay` after every `n_pushes`."""

    n_pushes: Pushes
    decay: float

    @override
    def _after_warm_up(self, c: int) -> float:
        return float(self.decay ** (c // _pushes(self.n_pushes)))


@final
@_documented
class Exponential(_Schedule, frozen=True, kw_only=True, tag="exponential"):
    """The rate falls smoothly by `decay` over every `n_pushes`."""

    n_pushes: Pushes
    decay: float

    @override
    def _after_warm_up(self, c: int) -> float:
        return float(self.decay ** (c / _pushes(self.n_pushes)))


@final
@_documented
class InverseTime(_Schedule, frozen=True, kw_only=True, tag="inverse_time"):
    """Half the rate after `n_pushes`, a third after twice as many, and so on."""

    n_pushes: Pushes

    @override
    def _after_warm_up(self, c: int) -> float:
        return 1.0 / (1.0 + c / _pushes(self.n_pushes))


@final
@_documented
class Cosine(_Schedule, frozen=True, kw_only=True, tag="cosine"):
    """Half a cosine wave down to `floor` over `n_pushes`, then `floor`."""

    n_pushes: Pushes
    floor: float = 0.0

    @override
    def _after_warm_up(self, c: int) -> float:
        done = min(c / _pushes(self.n_pushes), 1.0)
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * done)) / 2.0


@final
@_documented
class Linear(_Schedule, frozen=True, kw_only=True, tag="linear"):
    """A straight line down to `floor` over `n_pushes`, then `floor`."""

    n_pushes: Pushes
    floor: float = 0.0

    @override
    def _after_warm_up(self, c: int) -> float:
        done = min(c / _pushes(self.n_pushes), 1.0)
        return 1.0 - (1.0 - self.floor) * done


Schedule = Constant | Step | Exponential | InverseTime | Cosine | Linear


def _pushes(count: Pushes) -> int:
    if isinstance(count, str):
        raise SettingError(
            f"schedule: {count!r} is counted in a job, which knows its data: give the number of "
            "pushes of all workers"
        )
    return count
