"""Update rules: how a shard applies a pushed gradient, and learning rate schedules.

    "sgd"       w -= r g                                       Robbins & Monro 1951
    "momentum"  b = m b + (1 - dampening) g; w -= r b          Polyak 1964
    "delayed_nesterov"  w -= r g / N; every N pushes b = m b + mean(g); w -= r m b
                                                               Liu et al. 2024
    "adagrad"   s += g^2; w -= r g / (sqrt(s) + epsilon)       Duchi et al. 2011
    "rmsprop"   s = a s + (1 - a) g^2; w -= r g / (sqrt(s) + epsilon)   Hinton 2012
    "adam"      Algorithm 1 of Kingma & Ba 2015, bias corrected

w parameters, g *sum* of raw gradients (DB-7), r learning rate times schedule factor. First g is
clipped to [-clip_value, clip_value], then weight decay is added (but see `Adam`). Rules work
element by element with torch's fused kernels, so S shards give the bits of one (DB-13).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, cast, final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from distbelief.core.arguments import check_call
from distbelief.core.formatting import nearest
from distbelief.core.vectors import ALIGNMENT, Vector, padded
from distbelief.errors import RemoteProtocolError, SettingError
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.ranges import (
    N_STRIPES_MAX as N_STRIPES_OF_ONE,
    IndexRanges,
    Indices,
)
from distbelief.parameter_server.slices import ShardSlice


# --- schedules ---
#
#     name            factor(c), c = clock - n_warm_up
#     "constant"      1
#     "step"          decay ** floor(c / n_pushes)
#     "exponential"   decay ** (c / n_pushes)
#     "inverse_time"  1 / (1 + c / n_pushes)             Robbins & Monro 1951
#     "cosine"        floor + (1 - floor) (1 + cos(pi c / n_pushes)) / 2, then floor
#                                             Loshchilov & Hutter 2017, no restarts
#
# Before any of them comes an optional linear warm-up (Goyal et al. 2017, section 2.2): pushes
# 0, 1, ... n_warm_up - 1 have the factors 1/n_warm_up, 2/n_warm_up, ... 1.
#
# A factor depends on the shard's clock only, so shards agree without messages, and a restored
# shard continues where its snapshot was taken. With N replicas the clock rises N times as fast
# as each replica's steps.


def _check(
    struct: msgspec.Struct, user: str, fields: str, fits: Callable[[float], bool], use: str
) -> None:
    """Raise SettingError if one of these fields, of those that the struct has, does not fit."""
    for field in fields.split():
        value = getattr(struct, field, None)
        is_number = isinstance(value, int | float)
        if value is not None and not (is_number and fits(value)):
            raise SettingError(f"{user}: {field} is {value!r}; use {use}")


_DECAY = "Give schedule, as in Cosine(n_pushes=1000)."
_MOMENTUM = "Use Momentum, whose options are momentum, dampening and nesterov."
# What options of torch's optimizers are here
_ELSEWHERE = {
    "alpha": "It is smoothing.",
    "amsgrad": "Leave it out: no rule has it.",
    "betas": "Give beta1 and beta2.",
    "dampening": _MOMENTUM,
    "lr_decay": _DECAY,
    "momentum": _MOMENTUM,
    "nesterov": _MOMENTUM,
    "rho": "It is smoothing of RMSprop.",
}


class _Settings(msgspec.StructMeta):
    """Makes rules and schedules, whose wrong arguments are a JobError and no TypeError."""

    @override
    def __call__(self, *arguments: object, **options: object) -> object:
        check_call(self.__name__, inspect.signature(self), arguments, options, _ELSEWHERE)
        return super().__call__(*arguments, **options)


class _Schedule(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    metaclass=_Settings,
):
    n_warm_up: int = 0  # pushes over which the rate first rises

    def __post_init__(self) -> None:
        user = f"schedule {self.__struct_config__.tag!r}"
        _check(self, user, "n_warm_up", lambda n: n >= 0, "a whole number of pushes, 0 or more")
        _check(self, user, "n_pushes", lambda n: n >= 1, "a whole number of pushes, 1 or more")
        _check(self, user, "decay", lambda x: 0.0 < x <= 1.0, "a number above 0, and at most 1")
        _check(self, user, "floor", lambda x: 0.0 <= x <= 1.0, "a number from 0 to 1")

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


# --- push counts per element ---
#
#     pushes of everything          3
#     pushes of [0, 64)             2      an element of [0, 64) has received 5
#     pushes of [64, 128)           1
#
# On the wire and in snapshots: per part its count, its number of stripes and the stripes; the
# whole vector comes first, with no stripes.

N_STRIPES_MAX = 1 << 14
"""Limit of all parts together: with their counts they fit into one array frame."""

_N_PUSHES_MAX = 1 << 53

_WORDS = 4  # of a stripe


@final
@dataclass(slots=True, eq=False)
class _SliceCount:
    stripes: Indices
    ranges: IndexRanges
    n_pushes: int = 0


@final
class StepCounts:
    """How many pushes each element of a shard has received.

    This is the clock of the update rule. The shard's clock counts all pushes, but the ranks of a
    partitioned replica push parts: the shard's clock rises with each while every element receives
    one. Adam's bias correction and schedules therefore count per element, so that a replica
    trains bit-identically on one machine or several.
    """

    def __init__(self, n_whole: int = 0) -> None:
        self.n_whole = n_whole  # pushes of the whole vector
        self._parts: dict[bytes, _SliceCount] = {}

    @classmethod
    def read(cls, words: Vector, *, size: int) -> "StepCounts":
        """Return counts that another incarnation or copy wrote, or raise RemoteProtocolError."""
        if words.dtype != np.int64 or len(words) < 2 or words[1] != 0:
            raise RemoteProtocolError(f"{len(words)} numbers of {words.dtype} are not push counts")
        steps, at = cls(_count(int(words[0]))), 2
        while at < len(words):
            n_pushes = _count(int(words[at]))
            n_words = int(words[at + 1]) * _WORDS if at + 1 < len(words) else 0
            stripes = words[at + 2 : at + 2 + max(n_words, 0)]
            if n_words <= 0 or len(stripes) < n_words:
                raise RemoteProtocolError("push counts end in the middle of a part")
            held = IndexRanges.from_wire(stripes, size=size)
            steps._parts[held.key] = _SliceCount(held.stripes(), held, n_pushes)
            at += 2 + n_words
        return steps

    def to_wire(self) -> Indices:
        words = [np.array([self.n_whole, 0], np.int64)]
        for part in self._parts.values():
            if part.n_pushes:
                head = [part.n_pushes, len(part.stripes) // _WORDS]
                words += [np.array(head, np.int64), part.stripes]
        return np.concatenate(words)

    @property
    def parts(self) -> tuple[tuple[IndexRanges, int], ...]:
        return tuple((part.ranges, part.n_pushes) for part in self._parts.values() if part.n_pushes)

    @property
    def n_pushes(self) -> int:
        # A push by all ranks of a partitioned replica counts once: the minimum over the elements
        # that were ever pushed.
        parts = self.parts
        if not parts:
            return self.n_whole
        bounds = IndexRanges.ends(held for held, _ in parts)
        counts = np.zeros(len(bounds) - 1, np.int64)
        for held, n_pushes in parts:
            counts += n_pushes * held.mask(bounds)
        return self.n_whole + int(counts[counts > 0].min())

    def register(self, shard_slice: ShardSlice) -> str | None:
        """Admit pushes of a client with this slice; return the reason if that is impossible."""
        if not shard_slice.n_elements or shard_slice.ranges is None:
            return None
        part = self._part(shard_slice)
        n = sum(len(part.stripes) // _WORDS for part in self._parts.values())
        if n <= N_STRIPES_MAX and len(part.stripes) // _WORDS <= N_STRIPES_OF_ONE:
            return None
        if not part.n_pushes:
            del self._parts[shard_slice.key]
        return (
            f"its clients need {n} stripes, of {N_STRIPES_MAX} at most, and "
            f"{N_STRIPES_OF_ONE} for one: partition replicas alike, or use more shards"
        )

    def add(self, shard_slice: ShardSlice, *, n_pushes: int = 1) -> None:
        if shard_slice.ranges is None:
            self.n_whole += n_pushes
        elif shard_slice.n_elements:
            self._part(shard_slice).n_pushes += n_pushes

    def at(self, inner: IndexRanges, *, shard_slice: ShardSlice) -> list[tuple[int, IndexRanges]]:
        """Return some of a client's elements by how many pushes they have received, fewest first.

        `inner` are these elements, `shard_slice` all of the client's.
        """
        n_pushes = self.n_whole
        others: list[_SliceCount] = []
        for key, part in self._parts.items():
            if key == shard_slice.key:
                n_pushes += part.n_pushes
            elif part.n_pushes and inner.overlaps(part.ranges):
                others.append(part)
        if not others:
            return [(n_pushes, inner)] if inner.n_elements else []
        bounds = IndexRanges.ends([inner, *(part.ranges for part in others)])
        counts = np.full(len(bounds) - 1, n_pushes)
        for part in others:
            counts += part.n_pushes * part.ranges.mask(bounds)
        inside = inner.mask(bounds)
        groups = [(int(count), inside & (counts == count)) for count in np.unique(counts[inside])]
        return [
            (count, IndexRanges.of(bounds[:-1][chosen], bounds[1:][chosen]))
            for count, chosen in groups
        ]

    def _part(self, shard_slice: ShardSlice) -> _SliceCount:
        part = self._parts.get(shard_slice.key)
        if part is None:
            assert shard_slice.ranges is not None
            part = _SliceCount(shard_slice.ranges.stripes(), shard_slice.ranges)
            self._parts[shard_slice.key] = part
        return part


def _count(n_pushes: int) -> int:
    if not 0 <= n_pushes <= _N_PUSHES_MAX:
        raise RemoteProtocolError(f"{n_pushes} pushes; a count is 0 to {_N_PUSHES_MAX}")
    return n_pushes


# --- rules ---

State = dict[str, Vector]  # by name; each (n,), n as the parameters
Tensors = Mapping[str, Tensor]  # a state, or a piece of it

_PIECE = 1 << 18
"""Elements per step of a rule with several passes: few enough to stay in the cache, enough to
make the cost of a call small. A multiple of `ALIGNMENT`."""


class _Rule(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    metaclass=_Settings,
):
    adaptive: ClassVar[bool] = False  # each element has its own rate
    several_passes: ClassVar[bool] = False  # over the memory: there is no fused kernel
    counts_pushes: ClassVar[bool] = False  # the rule itself needs the clock
    state_names: ClassVar[tuple[str, ...]] = ()  # of vectors that begin as zeros

    learning_rate: float
    schedule: Schedule = Constant()
    weight_decay: float = 0.0
    clip_value: float | None = None  # per element of the gradient as pushed
    # Rules of other tensors, by a pattern of their names, such as "*.bias": the first that matches.
    groups: "Mapping[str, UpdateRule]" = {}

    def __post_init__(self) -> None:
        for pattern, rule in self.groups.items():
            if not isinstance(cast("object", rule), _Rule) or rule.groups:
                raise SettingError(
                    f"rule {self.name!r}: groups has for {pattern!r} no update rule, or one with "
                    "groups of its own: use one without"
                )
        if not isinstance(self.schedule, Schedule):
            raise SettingError(
                f"rule {self.name!r}: schedule is {self.schedule!r}; use one of "
                "distbelief.parameter_server.optimizers, as in Cosine(n_pushes=1)"
            )
        user = f"rule {self.name!r}"
        finite = "learning_rate weight_decay epsilon initial_accumulator"
        _check(self, user, finite, lambda x: 0.0 <= x < math.inf, "a finite number, 0 or more")
        below_1 = "a number from 0 up to, not including, 1"
        _check(self, user, "momentum smoothing beta1 beta2", lambda x: 0.0 <= x < 1.0, below_1)
        _check(self, user, "dampening", lambda x: 0.0 <= x <= 1.0, "a number from 0 to 1")
        n_workers = "1 or more, such as the number of workers"
        above_0 = "a number above 0, or leave it out"
        _check(self, user, "n_pushes", lambda n: n >= 1, n_workers)
        _check(self, user, "clip_value", lambda x: 0.0 < x < math.inf, above_0)

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def rules(self) -> "tuple[_Rule, ...]":
        return self, *self.groups.values()

    @property
    def label(self) -> str:
        """The names of all its rules; a shard's state fits rules with the same label only."""
        return "; ".join([self.name, *(f"{key}={one.name}" for key, one in self.groups.items())])

    @property
    def needs_clock(self) -> bool:
        return any(
            one.counts_pushes or not isinstance(one.schedule, Constant) for one in self.rules
        )

    def rate(self, clock: int) -> float:
        return self.learning_rate * self.schedule.factor(clock)

    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        return {name: np.zeros(n, dtype) for name in self.state_names}

    def apply(
        self, parameters: Vector, gradient: Vector, state: Mapping[str, Vector], *, clock: int
    ) -> None:
        """Update parameters, (n,), and state in place; `clock` counts their earlier pushes."""
        n = len(parameters)
        others = gradient, *state.values()
        assert all((len(v), v.dtype) == (n, parameters.dtype) for v in others), (n, others)
        assert n % ALIGNMENT == 0, n  # or results would depend on the number of shards
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
        raise NotImplementedError


@final
class SGD(_Rule, frozen=True, kw_only=True, tag="sgd"):
    """Stochastic gradient descent as in `torch.optim.SGD`, without state."""

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        _fused_sgd(self, w, g, [], clock=clock)


@final
class Momentum(_Rule, frozen=True, kw_only=True, tag="momentum"):
    """Heavy-ball momentum (Polyak 1964) or Nesterov's, as in `torch.optim.SGD`.

    The velocity starts as the first gradient, undampened. The rate multiplies the velocity when
    it is used, not the gradient when it is added (Sutskever et al. 2013 do the latter).
    """

    counts_pushes: ClassVar[bool] = True  # the first push sets the velocity
    state_names: ClassVar[tuple[str, ...]] = ("velocity",)

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise SettingError(
                f"rule 'momentum': nesterov is true with momentum {self.momentum} and "
                f"dampening {self.dampening}; it needs momentum above 0 and dampening 0"
            )

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        _fused_sgd(self, w, g, [state["velocity"]], clock=clock)


@final
class DelayedNesterov(_Rule, frozen=True, kw_only=True, tag="delayed_nesterov"):
    """Nesterov's momentum of the mean of `n_pushes` pushes (Liu et al. 2024, section 5, c = 0).

    Each push moves the parameters by its share at once; the velocity follows after the last one.
    So deltas of several workers may be applied one by one: it meets the mean of N anchors, as in
    a round of N workers, and not each delta N times.
    """

    several_passes: ClassVar[bool] = True
    counts_pushes: ClassVar[bool] = True  # every n-th push moves the velocity
    state_names: ClassVar[tuple[str, ...]] = ("velocity", "sum")

    n_pushes: int  # about the number of workers
    momentum: float = 0.9

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int) -> None:
        if self.weight_decay:
            g = g.add(w, alpha=self.weight_decay)
        rate, so_far = self.rate(clock), state["sum"].add_(g)
        w.add_(g, alpha=-rate / self.n_pushes)
        if (clock + 1) % self.n_pushes == 0:
            velocity = state["velocity"].mul_(self.momentum).add_(so_far, alpha=1 / self.n_pushes)
            w.add_(velocity, alpha=-rate * self.momentum)
            so_far.zero_()


@final
class Adagrad(_Rule, frozen=True, kw_only=True, tag="adagrad"):
    """A rate per parameter that falls with the gradients seen (Duchi et al. 2011).

    Dean et al. 2012, section 4.1: "eta_i,K = gamma / sqrt(sum_j=1..K dw_i,j^2)"; gamma is
    `learning_rate`, "generally larger (perhaps by an order of magnitude)" than the best fixed
    rate. The paper has no epsilon: 0 gives its formula, the default is torch's.
    """

    adaptive: ClassVar[bool] = True

    epsilon: float = 1e-10
    initial_accumulator: float = 0.0

    @override
    def state(self, n: int, dtype: npt.DTypeLike) -> State:
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
class RMSprop(_Rule, frozen=True, kw_only=True, tag="rmsprop"):
    """Adagrad with a decaying average (Tieleman & Hinton 2012), as in `torch.optim.RMSprop`.

    Torch has no fused kernel for it: five passes, over pieces that stay in the cache.
    """

    adaptive: ClassVar[bool] = True
    several_passes: ClassVar[bool] = True

    smoothing: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0

    @override
    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        names = ("mean_square", "velocity") if self.momentum else ("mean_square",)
        return {name: np.zeros(n, dtype) for name in names}

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
class Adam(_Rule, frozen=True, kw_only=True, tag="adam"):
    """Adaptive moments (Kingma & Ba 2015, Algorithm 1), as in `torch.optim.Adam`.

    The clock is the step t of the bias correction. With `decoupled_weight_decay` the parameters
    shrink by r d w, and d w is not added to the gradient: AdamW (Loshchilov & Hutter 2019).
    """

    adaptive: ClassVar[bool] = True
    counts_pushes: ClassVar[bool] = True  # for the bias correction
    state_names: ClassVar[tuple[str, ...]] = ("mean", "mean_square")

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled_weight_decay: bool = False

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


UpdateRule = SGD | Momentum | DelayedNesterov | Adagrad | RMSprop | Adam


# --- groups ---


def rule_of(rule: UpdateRule, name: str) -> UpdateRule:
    matching = (one for pattern, one in rule.groups.items() if fnmatchcase(name, pattern))
    return next(matching, rule)


def check_groups(rule: UpdateRule, names: Iterable[str]) -> None:
    """Raise SettingError if a group of the rule is that of none of these parameters."""
    names = list(names)
    for pattern in rule.groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SettingError(
                f"rule.groups has {pattern!r}, and no parameter's name is like that: use a name, "
                f"or a pattern such as '*.bias'. {nearest(pattern, names)}"
            )


def rules_on(rule: UpdateRule, layout: Layout, k: int) -> list[tuple[UpdateRule, IndexRanges]]:
    """Return the rules of shard k's parameters, and the elements of each, with their padding."""
    n_gradient = layout.n_gradient(k)
    if not rule.groups:
        return [(rule, IndexRanges.whole(0, n_gradient))]
    names = [tensor.name for tensor in layout.tensors]
    of_rule: dict[int, list[IndexRanges]] = {}
    rules = [rule, *rule.groups.values()]
    for one in layout.segments(k):
        if one.offset < n_gradient:
            place = rules.index(rule_of(rule, names[one.tensor_index]))
            here = IndexRanges.whole(one.offset, one.offset + padded(one.n_elements))
            of_rule.setdefault(place, []).append(here)
    return [(rules[place], IndexRanges.union(parts)) for place, parts in sorted(of_rule.items())]


def initial_state(rule: UpdateRule, layout: Layout, k: int) -> State:
    """Return the vectors of all rules before the first push; each uses its own elements of them."""
    n = layout.n_gradient(k)
    if not rule.groups:
        return rule.state(n, layout.dtype)
    state = {name: np.zeros(n, layout.dtype) for one in rule.rules for name in one.state(0, "f")}
    for one, ranges in rules_on(rule, layout, k):
        for name, vector in one.state(n, layout.dtype).items():
            for start, stop in zip(ranges.starts, ranges.stops, strict=True):
                state[name][start:stop] = vector[start:stop]
    return state


def _fused_sgd(
    rule: SGD | Momentum, w: Tensor, g: Tensor, velocity: list[Tensor], *, clock: int
) -> None:
    torch._fused_sgd_(
        [w],
        [g],
        velocity,
        weight_decay=rule.weight_decay,
        momentum=rule.momentum if isinstance(rule, Momentum) else 0.0,
        lr=rule.rate(clock),
        dampening=rule.dampening if isinstance(rule, Momentum) else 0.0,
        nesterov=isinstance(rule, Momentum) and rule.nesterov,
        maximize=False,
        is_first_step=bool(velocity) and clock == 0,
    )


def _denominator_min(dtype: torch.dtype) -> float:
    # Zero state and gradient would give 0/0 at epsilon = 0. The root of the smallest normal
    # number (about 1e-19 or 1e-154) changes no bit of a root of squares unless all gradients were
    # below 1e-12 (float32), and then keeps the step far below the learning rate.
    return math.sqrt(torch.finfo(dtype).tiny)
