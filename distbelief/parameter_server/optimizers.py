"""Update rules: what a shard does with a gradient that was pushed to it.

Every rule works element by element, in place, on the parameter part of a shard's
vector, with as many vectors of state as its method needs. So a rule applied on S
shards gives the very bits it gives on one (DB-13): `layout` cuts at multiples of 64
elements, where torch's vectorised kernels leave no remainder that would be rounded
otherwise. For the same reason the rules are torch's own kernels where they exist: one
pass over the memory, and the result of `torch.optim` with `fused=True`, to the bit.

Symbols: w parameters, g gradient (the *sum* of raw gradients pushed: DB-7), r learning
rate times `schedules` factor, d weight decay. The gradient is clipped to
[-clip_value, clip_value], then d w is added to it (but see `Adam`), then:

    "sgd"       w -= r g                                       Robbins & Monro 1951
    "momentum"  b = m b + (1 - dampening) g; w -= r b          Polyak 1964
    "adagrad"   s += g^2; w -= r g / (sqrt(s) + epsilon)       Duchi et al. 2011
    "rmsprop"   s = a s + (1 - a) g^2; w -= r g / (sqrt(s) + epsilon)   Hinton 2012
    "adam"      Algorithm 1 of Kingma & Ba 2015, bias corrected

A zero gradient that meets zero state would be 0/0 at epsilon = 0: the quotient's
denominator is never taken below `_denominator_min`, so w stays as it is there. Padding
(w = g = 0) stays zero under every rule, weight decay included.

In a job file: `rule = { name = "adagrad", learning_rate = 0.02 }`.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from distbelief.core.vectors import ALIGNMENT, Vector
from distbelief.errors import RemoteProtocolError
from distbelief.parameter_server import slices
from distbelief.parameter_server.slices import IndexRanges, Indices, ShardSlice


# Schedules: by what factor the learning rate is multiplied as a shard's clock rises.
#
# A factor depends on nothing but the clock: the number of pushes that this shard applied
# before the one at hand. Shards therefore agree without a word, and a shard restored from
# a snapshot goes on where the snapshot was taken. With N replicas pushing after every
# step, a clock rises N times as fast as each replica's step.
#
#     name            factor(c), c = clock - n_warm_up
#     "constant"      1
#     "step"          decay ** floor(c / n_pushes)
#     "exponential"   decay ** (c / n_pushes)
#     "inverse_time"  1 / (1 + c / n_pushes)             Robbins & Monro 1951
#     "cosine"        floor + (1 - floor) (1 + cos(pi c / n_pushes)) / 2, then floor
#                                             Loshchilov & Hutter 2017, no restarts
#
# Before any of them may come a linear warm-up (Goyal et al. 2017, section 2.2): pushes
# 0, 1, ... n_warm_up - 1 have the factors 1/n_warm_up, 2/n_warm_up, ... 1.
#
# In a job file: `schedule = { name = "step", n_pushes = 10000, decay = 0.5 }`.


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


# How many pushes each element of a shard has met: the clock of its own update rule.
#
# A shard's clock counts the pushes of all its clients. As long as every push is of the
# whole vector, that is what each element has met. If clients hold parts, it is not: of
# four machines of a replica each pushes its part, and the shard's clock rises by four
# while every element meets one. Adam's correction of its bias, and a schedule of the
# learning rate, then have to go by the element: so a replica trains alike, to the bit,
# whether one machine pushes everything or several push a part each.
#
#     pushes of everything          3
#     pushes of [0, 64)             2      an element of [0, 64) has met 5
#     pushes of [64, 128)           1
#
# Elements are not counted one by one, but what was pushed, by what its client held: an
# element has met the sum over all that hold it.
#
# On the wire and in snapshots: per holding the count, its number of stripes, the stripes;
# what is whole comes first, with none.

N_STRIPES_MAX = 1 << 14
"""Of all holdings together: with their counts they fit into one array frame."""

_N_PUSHES_MAX = 1 << 53

_WORDS = 4  # of a stripe


@final
class _Part:
    """Pushes of one holding."""

    def __init__(self, stripes: Indices, ranges: IndexRanges, n_pushes: int) -> None:
        self.stripes = stripes
        self.ranges = ranges
        self.n_pushes = n_pushes


@final
class StepCounts:
    """What the elements of one shard have met.

    Attributes:
        n_whole: Pushes of everything.
    """

    def __init__(self, n_whole: int = 0) -> None:
        self.n_whole = n_whole
        self._parts: dict[bytes, _Part] = {}

    @classmethod
    def read(cls, words: Vector, *, size: int) -> "StepCounts":
        """Return what another life, or copy, of the shard wrote.

        Raises:
            RemoteProtocolError: it cannot be of a shard of `size` elements.
        """
        if words.dtype != np.int64 or len(words) < 2 or words[1] != 0:
            raise RemoteProtocolError(
                f"{len(words)} numbers of {words.dtype} are no counts of pushes"
            )
        steps = cls(_count(int(words[0])))
        at = 2
        while at < len(words):
            n_pushes = _count(int(words[at]))
            n_words = int(words[at + 1]) * _WORDS if at + 1 < len(words) else 0
            stripes = words[at + 2 : at + 2 + max(n_words, 0)]
            if n_words <= 0 or len(stripes) < n_words:
                raise RemoteProtocolError("counts of pushes end within a holding")
            held = IndexRanges.read(stripes, size=size)
            steps._parts[held.key] = _Part(held.stripes(), held, n_pushes)
            at += 2 + n_words
        return steps

    def words(self) -> Indices:
        """Return it as on the wire."""
        words = [np.array([self.n_whole, 0], np.int64)]
        for part in self._parts.values():
            if part.n_pushes:
                head = [part.n_pushes, len(part.stripes) // _WORDS]
                words += [np.array(head, np.int64), part.stripes]
        return np.concatenate(words)

    @property
    def parts(self) -> tuple[tuple[IndexRanges, int], ...]:
        """What was pushed in parts: the ranges, and how often."""
        return tuple((part.ranges, part.n_pushes) for part in self._parts.values() if part.n_pushes)

    @property
    def n_pushes(self) -> int:
        """Pushes that are whole: what each element has met that was ever pushed.

        Of a replica of several machines that is one, though each pushes its part.
        """
        parts = self.parts
        if not parts:
            return self.n_whole
        ends = [end for held, _ in parts for end in (held.starts, held.stops)]
        bounds = np.unique(np.concatenate(ends))
        counts = np.zeros(len(bounds) - 1, np.int64)
        for held, n_pushes in parts:
            counts += n_pushes * held.marks(bounds)
        return self.n_whole + int(counts[counts > 0].min())

    def know(self, holding: ShardSlice) -> str | None:
        """A client with this holding may push from now on; return why not, if so."""
        if not holding.n_elements or holding.ranges is None:
            return None
        part = self._part(holding)
        n = sum(len(part.stripes) // _WORDS for part in self._parts.values())
        if n <= N_STRIPES_MAX and len(part.stripes) // _WORDS <= slices.N_STRIPES_MAX:
            return None
        if not part.n_pushes:
            del self._parts[holding.key]
        return (
            f"what its clients hold or held takes {n} stripes to write down; the most "
            f"is {N_STRIPES_MAX}, and {slices.N_STRIPES_MAX} of one client: cut the "
            "model alike for all replicas, or use more shards"
        )

    def add(self, holding: ShardSlice, *, n_pushes: int = 1) -> None:
        """Something was pushed by a client with this holding."""
        if holding.ranges is None:
            self.n_whole += n_pushes
        elif holding.n_elements:
            self._part(holding).n_pushes += n_pushes

    def at(self, inner: IndexRanges, *, holding: ShardSlice) -> list[tuple[int, IndexRanges]]:
        """Return these elements by how many pushes they have met, fewest first.

        Args:
            inner: Some of what the client holds.
            holding: All of that.
        """
        n_pushes = self.n_whole
        others: list[_Part] = []
        for key, part in self._parts.items():
            if key == holding.key:
                n_pushes += part.n_pushes
            elif part.n_pushes and inner.meets(part.ranges):
                others.append(part)
        if not others:
            return [(n_pushes, inner)] if inner.n_elements else []
        all_ranges = [inner, *(part.ranges for part in others)]
        ends = [end for one in all_ranges for end in (one.starts, one.stops)]
        bounds = np.unique(np.concatenate(ends))
        counts = np.full(len(bounds) - 1, n_pushes)
        for part in others:
            counts += part.n_pushes * part.ranges.marks(bounds)
        inside = inner.marks(bounds)
        return [
            (int(count), _where(inside & (counts == count), bounds))
            for count in np.unique(counts[inside])
        ]

    def _part(self, holding: ShardSlice) -> _Part:
        part = self._parts.get(holding.key)
        if part is None:
            assert holding.ranges is not None
            part = _Part(holding.ranges.stripes(), holding.ranges, 0)
            self._parts[holding.key] = part
        return part


def _where(chosen: NDArray[np.bool_], bounds: Indices) -> IndexRanges:
    return IndexRanges.of(bounds[:-1][chosen], bounds[1:][chosen])


def _count(n_pushes: int) -> int:
    if not 0 <= n_pushes <= _N_PUSHES_MAX:
        raise RemoteProtocolError(f"{n_pushes} pushes; a count is 0 to {_N_PUSHES_MAX}")
    return n_pushes


State = dict[str, Vector]  # by name; each (n,), n as the parameters
Tensors = Mapping[str, Tensor]  # a state, or a piece of it

_PIECE = 1 << 18
"""Elements handled at a time where a rule takes more than one pass: few enough to stay
in the processor's cache between passes, enough to make the cost of a call small. A
multiple of `ALIGNMENT`."""


class _Rule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"
):
    """What every rule has."""

    adaptive: ClassVar[bool] = False  # does each element have a rate of its own?
    several_passes: ClassVar[bool] = False  # over the memory, for want of a kernel
    counts_pushes: ClassVar[bool] = False  # whatever the schedule?

    learning_rate: float
    schedule: Schedule = Constant()
    weight_decay: float = 0.0
    clip_value: float | None = None  # per element of the gradient as pushed

    @property
    def name(self) -> str:
        """As in the job file."""
        return str(self.__struct_config__.tag)

    @property
    def needs_clock(self) -> bool:
        """Does an update depend on how many there were before?"""
        return self.counts_pushes or not isinstance(self.schedule, Constant)

    def rate(self, clock: int) -> float:
        """Return the learning rate of the push that finds the shard at `clock`."""
        return self.learning_rate * self.schedule.factor(clock)

    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        """Return the state of n parameters before the first push."""
        raise NotImplementedError

    def apply(
        self, parameters: Vector, gradient: Vector, state: Mapping[str, Vector], *, clock: int
    ) -> None:
        """Update parameters and state in place by one push.

        Args:
            parameters: (n,), n a multiple of 64; float32 or float64.
            gradient: (n,), of the same dtype; left as it is.
            state: As `state` returned it, or as the last `apply` left it.
            clock: Pushes applied to these parameters before this one. If clients push
                parts, that is not the shard's (`steps`).

        Raises:
            ValueError: sizes or dtypes differ.
        """
        _check_vectors(self, parameters, gradient, state)
        n = len(parameters)
        in_pieces = self.several_passes or self.clip_value is not None
        step = _PIECE if in_pieces else max(n, 1)
        for start in range(0, n, step):
            piece = slice(start, start + step)
            g = torch.from_numpy(gradient[piece])
            if self.clip_value is not None:
                g = g.clamp(-self.clip_value, self.clip_value)
            self._update(
                torch.from_numpy(parameters[piece]),
                g,
                {name: torch.from_numpy(v[piece]) for name, v in state.items()},
                clock=clock,
            )

    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        """Update one piece in place; g is clipped already, and is left as it is."""
        raise NotImplementedError


@final
class SGD(_Rule, frozen=True, tag="sgd"):
    """Stochastic gradient descent, as `torch.optim.SGD`: no state."""

    def __post_init__(self) -> None:
        _check_common(self)

    @override
    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        """Return the state of n parameters before the first push: none."""
        del n, dtype
        return {}

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        torch._fused_sgd_(
            [w],
            [g],
            [],
            weight_decay=self.weight_decay,
            momentum=0.0,
            lr=self.rate(clock),
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


@final
class Momentum(_Rule, frozen=True, tag="momentum"):
    """Heavy-ball momentum (Polyak 1964), or Nesterov's, as `torch.optim.SGD` has it.

    torch's definition: the velocity begins as the first gradient, undampened; the rate
    multiplies the velocity when it is used, not the gradient when it is added
    (Sutskever et al. 2013 do the latter).
    """

    counts_pushes: ClassVar[bool] = True  # the first one is special

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_common(self)
        _check_fraction(self, "momentum", self.momentum)
        if not 0.0 <= self.dampening <= 1.0:
            raise ValueError(
                f"rule 'momentum': dampening is {self.dampening}; use a number from 0 to 1"
            )
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError(
                f"rule 'momentum': nesterov is true with momentum {self.momentum} and "
                f"dampening {self.dampening}; it needs momentum above 0 and dampening 0"
            )

    @override
    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        """Return the state of n parameters before the first push."""
        return {"velocity": np.zeros(n, dtype)}

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        torch._fused_sgd_(
            [w],
            [g],
            [state["velocity"]],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.rate(clock),
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=clock == 0,
        )


@final
class Adagrad(_Rule, frozen=True, tag="adagrad"):
    """A rate per parameter that falls with the gradients seen (Duchi et al. 2011).

    Dean et al. 2012, section 4.1: "eta_i,K = gamma / sqrt(sum_j=1..K dw_i,j^2)", one
    accumulator per parameter, where the parameter lies; gamma is `learning_rate`,
    "generally larger (perhaps by an order of magnitude)" than the best fixed rate. The
    paper has no epsilon; 0 gives its formula, and the default is torch's.
    """

    adaptive: ClassVar[bool] = True

    epsilon: float = 1e-10
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        _check_common(self)
        _check_positive_or_zero(self, "epsilon", self.epsilon)
        _check_positive_or_zero(self, "initial_accumulator", self.initial_accumulator)

    @override
    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        """Return the state of n parameters before the first push."""
        return {"sum_of_squares": np.full(n, self.initial_accumulator, dtype)}

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        step = torch.tensor(clock + 1, dtype=torch.float32)
        torch._fused_adagrad_(
            [w],
            [g],
            [state["sum_of_squares"]],
            [step],
            lr=self.rate(clock),
            lr_decay=0.0,
            weight_decay=self.weight_decay,
            eps=max(self.epsilon, _denominator_min(w.dtype)),
            maximize=False,
        )


@final
class RMSprop(_Rule, frozen=True, tag="rmsprop"):
    """Adagrad with a fading memory (Tieleman & Hinton 2012), as `torch.optim.RMSprop`.

    torch has no fused kernel for it: five passes, over pieces that stay in the cache.
    """

    adaptive: ClassVar[bool] = True
    several_passes: ClassVar[bool] = True

    smoothing: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_common(self)
        _check_fraction(self, "smoothing", self.smoothing)
        _check_positive_or_zero(self, "epsilon", self.epsilon)
        _check_fraction(self, "momentum", self.momentum)

    @override
    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        """Return the state of n parameters before the first push."""
        state: State = {"mean_square": np.zeros(n, dtype)}
        if self.momentum:
            state["velocity"] = np.zeros(n, dtype)
        return state

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        if self.weight_decay:
            g = g.add(w, alpha=self.weight_decay)
        mean_square = state["mean_square"].mul_(self.smoothing)
        mean_square.addcmul_(g, g, value=1.0 - self.smoothing)
        root = mean_square.sqrt().add_(max(self.epsilon, _denominator_min(w.dtype)))
        if self.momentum:
            velocity = state["velocity"].mul_(self.momentum).addcdiv_(g, root)
            w.add_(velocity, alpha=-self.rate(clock))
        else:
            w.addcdiv_(g, root, value=-self.rate(clock))


@final
class Adam(_Rule, frozen=True, tag="adam"):
    """Adaptive moments (Kingma & Ba 2015, Algorithm 1), as `torch.optim.Adam`.

    The clock is the step t of the bias correction. With
    `decoupled_weight_decay` the parameters shrink by r d w instead of d w joining the
    gradient: AdamW (Loshchilov & Hutter 2019).
    """

    adaptive: ClassVar[bool] = True
    counts_pushes: ClassVar[bool] = True  # the bias has to be corrected

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        _check_common(self)
        _check_fraction(self, "beta1", self.beta1)
        _check_fraction(self, "beta2", self.beta2)
        _check_positive_or_zero(self, "epsilon", self.epsilon)

    @override
    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        """Return the state of n parameters before the first push."""
        return {"mean": np.zeros(n, dtype), "mean_square": np.zeros(n, dtype)}

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        kernel = torch._fused_adamw_ if self.decoupled_weight_decay else torch._fused_adam_
        step = torch.tensor(clock + 1, dtype=torch.float32)
        kernel(
            [w],
            [g],
            [state["mean"]],
            [state["mean_square"]],
            [],
            [step],
            lr=self.rate(clock),
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=max(self.epsilon, _denominator_min(w.dtype)),
            amsgrad=False,
            maximize=False,
        )


UpdateRule = SGD | Momentum | Adagrad | RMSprop | Adam


def _denominator_min(dtype: torch.dtype) -> float:
    """Return the root of the smallest normal number: about 1e-19, or 1e-154.

    Added to the root of a sum of squares, it changes no bit of it unless all gradients
    were below some 1e-12 (float32). Gradients whose squares vanish altogether move
    their parameter by far less than the learning rate, instead of by infinity.
    """
    return math.sqrt(torch.finfo(dtype).tiny)


def _check_vectors(
    rule: _Rule, parameters: Vector, gradient: Vector, state: Mapping[str, Vector]
) -> None:
    n = len(parameters)
    for name, vector in {"gradient": gradient, **state}.items():
        if vector.shape != (n,) or vector.dtype != parameters.dtype:
            raise ValueError(
                f"rule {rule.name!r}: {name} has shape {vector.shape} and dtype "
                f"{vector.dtype}, the parameters ({n},) and {parameters.dtype}; "
                "they must agree"
            )
    if n % ALIGNMENT:
        raise ValueError(
            f"rule {rule.name!r}: {n} parameters; a shard's vector has a multiple of "
            f"{ALIGNMENT}, so that results do not depend on the number of shards"
        )


def _check_common(rule: _Rule) -> None:
    if not isinstance(rule.schedule, Schedule):
        raise ValueError(  # noqa: TRY004 - one kind of error for a wrong setting
            f"rule {rule.name!r}: schedule is {rule.schedule!r}; "
            "use one of distbelief.parameter_server.optimizers, "
            "as in Cosine(n_pushes=1)"
        )
    _check_positive_or_zero(rule, "learning_rate", rule.learning_rate)
    _check_positive_or_zero(rule, "weight_decay", rule.weight_decay)
    if rule.clip_value is not None and not 0.0 < rule.clip_value < math.inf:
        raise ValueError(
            f"rule {rule.name!r}: clip_value is {rule.clip_value}; "
            "use a number above 0, or leave it out"
        )


def _check_positive_or_zero(rule: _Rule, field: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"rule {rule.name!r}: {field} is {value}; use a finite number, 0 or more")


def _check_fraction(rule: _Rule, field: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(
            f"rule {rule.name!r}: {field} is {value}; use a number from 0 up to, not including, 1"
        )
