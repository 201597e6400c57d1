"""Update rules: how a shard applies a pushed gradient.

    "sgd"       w -= r g                                       Robbins & Monro 1951
    "momentum"  b = m b + (1 - dampening) g; w -= r b          Polyak 1964
    "delayed_nesterov"  w -= r g / N; every N pushes b = m b + mean(g); w -= r m b
                                                               Liu et al. 2024
    "adagrad"   s += g^2; w -= r g / (sqrt(s) + epsilon)       Duchi et al. 2011
    "rmsprop"   s = a s + (1 - a) g^2; w -= r g / (sqrt(s) + epsilon)   Hinton 2012
    "adam"      Algorithm 1 of Kingma & Ba 2015, bias corrected
    "AdamW", "NAdam", ...  a class of torch.optim that treats each element by itself

w parameters, g *sum* of raw gradients (DB-7), r learning rate times schedule factor. First g is
clipped to [-clip_value, clip_value], then weight decay is added (but see `Adam`). Rules work
element by element with torch's kernels, so S shards give the bits of one (DB-13).

With `ema` the state has a running average of the values, too: v = w after an element's first push,
then v += (1 - ema) (w - v) after each (Polyak & Juditsky 1992, with decay).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, Self, Union, cast, final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from distbelief.core import torch_optimizers
from distbelief.core.arguments import CheckedArguments, NamedTable, documented, require
from distbelief.core.errors import SettingError
from distbelief.core.vectors import ALIGNMENT, Vector, padded
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.schedules import Constant, Schedule
from distbelief.parameter_server.torch_steps import TorchSteps


State = dict[str, Vector]  # by name; each (n,), n as the parameters
Tensors = Mapping[str, Tensor]  # a state, or a piece of it

_PIECE = 1 << 18
"""Elements per step of a rule with several passes: few enough to stay in the cache, enough to
make the cost of a call small. A multiple of `ALIGNMENT`."""


EMA: Final = "ema"  # name of its vector

_CONSTANT: Final = Constant()
_DECAY: Final = "Give schedule, as in Cosine(n_pushes=1000)."
_MOMENTUM: Final = "Use Momentum, whose options are momentum, dampening and nesterov."


class _Rule(NamedTable, frozen=True, kw_only=True):
    # What options of torch's optimizers are here.
    elsewhere: ClassVar[Mapping[str, str]] = {
        "alpha": "It is smoothing.",
        "amsgrad": "Leave it out: no rule has it.",
        "betas": "Give beta1 and beta2.",
        "dampening": _MOMENTUM,
        "lr_decay": _DECAY,
        "momentum": _MOMENTUM,
        "nesterov": _MOMENTUM,
        "rho": "It is smoothing of RMSprop.",
    }
    adaptive: ClassVar[bool] = False  # each element has its own rate
    several_passes: ClassVar[bool] = False  # over the memory: there is no fused kernel
    counts_pushes: ClassVar[bool] = False  # the rule itself needs the clock
    has_velocity: ClassVar[bool] = False  # it moves on in the direction of earlier pushes
    state_names: ClassVar[tuple[str, ...]] = ()  # of vectors that begin as zeros

    learning_rate: float
    schedule: Schedule = _CONSTANT
    clip_value: float | None = None  # per element of the gradient as pushed
    ema: float | None = None  # decay of a running average of the values, at each push; or none
    # Rules of other tensors, by a pattern of their names, such as "*.bias": the first that matches.
    groups: "Mapping[str, UpdateRule]" = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.groups), Mapping):
            raise SettingError(
                f"rule {self.name!r}: groups is {self.groups!r}; use a rule for each pattern of "
                "names, as {'*.bias': SGD(learning_rate=0.1)}"
            )
        for pattern, rule in self.groups.items():
            if not isinstance(cast("object", rule), _Rule) or rule.groups:
                raise SettingError(
                    f"rule {self.name!r}: groups has for {pattern!r} no update rule, or one with "
                    "groups of its own: use one without"
                )
        if any(one.ema != self.ema for one in self.groups.values()):
            raise SettingError(
                f"rule {self.name!r}: ema is {self.ema}, and a group has another one: give all the "
                "same, or none"
            )
        if not isinstance(self.schedule, Schedule):
            raise SettingError(
                f"rule {self.name!r}: schedule is {self.schedule!r}; use one of "
                "distbelief.parameter_server.schedules, as in Cosine(n_pushes=1)"
            )
        user = f"rule {self.name!r}"
        finite = "learning_rate weight_decay epsilon initial_accumulator"
        require(self, user, finite, lambda x: 0.0 <= x < math.inf, "a finite number, 0 or more")
        below_1 = "a number from 0 up to, not including, 1"
        require(self, user, "momentum smoothing beta1 beta2", lambda x: 0.0 <= x < 1.0, below_1)
        require(self, user, "dampening", lambda x: 0.0 <= x <= 1.0, "a number from 0 to 1")
        n_workers = "1 or more, such as the number of workers"
        require(self, user, "ema", lambda x: 0.0 < x < 1.0, "a number between 0 and 1, as 0.999")
        above_0 = "a number above 0, or leave it out"
        require(self, user, "n_pushes", lambda n: n >= 1, n_workers)
        require(self, user, "clip_value", lambda x: 0.0 < x < math.inf, above_0)

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def rules(self) -> "tuple[_Rule, ...]":
        return self, *self.groups.values()

    @property
    def label(self) -> str:
        """The names of all its rules; a shard's state fits rules with the same label only."""
        groups = (f"{key}={one.name}" for key, one in self.groups.items())
        return "; ".join([self.name, *groups, *([] if self.ema is None else [EMA])])

    def in_pushes(self, n_pushes: Callable[[float, str], int]) -> Self:
        """Return the rule with schedules in pushes; see `schedules`."""
        return msgspec.structs.replace(
            self,
            schedule=self.schedule.in_pushes(n_pushes),
            groups={pattern: one.in_pushes(n_pushes) for pattern, one in self.groups.items()},
        )

    @property
    def needs_clock(self) -> bool:
        return any(
            one.counts_pushes or one.ema is not None or not isinstance(one.schedule, Constant)
            for one in self.rules
        )

    def rate(self, clock: int) -> float:
        if self.schedule == _CONSTANT:
            return self.learning_rate
        return self.learning_rate * self.schedule.factor(clock)

    def state(self, n: int, dtype: npt.DTypeLike) -> State:
        """Return its vectors before the first push; `EMA`, if any, begins as the values."""
        average = {} if self.ema is None else {EMA: np.zeros(n, dtype)}
        return self._own_state(n, dtype) | average

    def _own_state(self, n: int, dtype: npt.DTypeLike) -> State:
        return {name: np.zeros(n, dtype) for name in self.state_names}

    @property
    def takes_rates(self) -> bool:
        """Whether pushes may have rates of their own."""
        return True

    def apply(
        self,
        parameters: Vector,
        gradient: Vector,
        state: Mapping[str, Vector],
        *,
        clock: int,
        learning_rate: float | None = None,
    ) -> None:
        """Update parameters, (n,), and state in place; `clock` counts their earlier pushes.

        `learning_rate` is of this push, in place of the rule's; the schedule counts as ever.
        """
        n = len(parameters)
        others = gradient, *state.values()
        assert all((len(v), v.dtype) == (n, parameters.dtype) for v in others), (n, others)
        assert n % ALIGNMENT == 0, n  # or results would depend on the number of shards
        own = {name: vector for name, vector in state.items() if name != EMA}
        in_pieces = self.several_passes or self.clip_value is not None or self.ema is not None
        step = _PIECE if in_pieces else max(n, 1)
        rate = self.rate(clock)
        if learning_rate is not None:
            rate = learning_rate * self.schedule.factor(clock)
        for start in range(0, n, step):
            piece = slice(start, start + step)
            g = torch.from_numpy(gradient[piece])
            if self.clip_value is not None:
                g = g.clamp(-self.clip_value, self.clip_value)
            w = torch.from_numpy(parameters[piece])
            pieces = {name: torch.from_numpy(v[piece]) for name, v in own.items()}
            self._update(w, g, pieces, clock=clock, rate=rate)
            if self.ema is not None:
                average = torch.from_numpy(state[EMA][piece])
                average.lerp_(w, 1.0 - self.ema if clock else 1.0)

    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        raise NotImplementedError


class _OwnRule(_Rule, frozen=True, kw_only=True):
    # Those with a fused kernel of torch call it: for the 2^16 elements of a piece of a partial
    # push it takes 16 to 37 us, and an optimizer around it 50 to 90 us more.

    weight_decay: float = 0.0


_documented = documented(
    {
        "learning_rate": "Rate of a push; a worker's own `lr` goes before it.",
        "schedule": "How the rate changes with pushes, such as `Cosine(n_pushes=1000)`.",
        "clip_value": "Bound of each element of a gradient as pushed; None: no bound.",
        "ema": "Decay of a running average of the values, which jobs save; None: no average.",
        "groups": "Rules of other tensors, by a pattern of their names, as '*.bias'; first match.",
        "weight_decay": "This times the parameter is added to the gradient.",
        "n_pushes": "Pushes whose mean is one step of momentum.",
        "momentum": "Share of the velocity that stays, from 0 to below 1.",
        "dampening": "Share of the gradient that the velocity leaves out.",
        "nesterov": "Whether momentum is Nesterov's.",
        "epsilon": "Added to the root that the gradient is divided by.",
        "initial_accumulator": "Sum of squared gradients at the start.",
        "smoothing": "Share of the mean square that stays at each push.",
        "beta1": "Share of the mean gradient that stays at each push.",
        "beta2": "Share of the mean square that stays at each push.",
        "decoupled_weight_decay": "Whether decay shrinks parameters by themselves: AdamW.",
    }
)


@final
@_documented
class SGD(_OwnRule, frozen=True, kw_only=True, tag="sgd"):
    """Stochastic gradient descent as in `torch.optim.SGD`, without state."""

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        _fused_sgd(self, w, g, [], clock=clock, rate=rate)


@final
@_documented
class Momentum(_OwnRule, frozen=True, kw_only=True, tag="momentum"):
    """Heavy-ball momentum (Polyak 1964) or Nesterov's, as in `torch.optim.SGD`.

    The velocity starts as the first gradient, undampened. The rate multiplies the velocity when
    it is used, not the gradient when it is added (Sutskever et al. 2013 do the latter).
    """

    counts_pushes: ClassVar[bool] = True  # the first push sets the velocity
    has_velocity: ClassVar[bool] = True
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
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        _fused_sgd(self, w, g, [state["velocity"]], clock=clock, rate=rate)


@final
@_documented
class DelayedNesterov(_OwnRule, frozen=True, kw_only=True, tag="delayed_nesterov"):
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
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        if self.weight_decay:
            g = g.add(w, alpha=self.weight_decay)
        so_far = state["sum"].add_(g)
        w.add_(g, alpha=-rate / self.n_pushes)
        if (clock + 1) % self.n_pushes == 0:
            velocity = state["velocity"].mul_(self.momentum).add_(so_far, alpha=1 / self.n_pushes)
            w.add_(velocity, alpha=-rate * self.momentum)
            so_far.zero_()


@final
@_documented
class Adagrad(_OwnRule, frozen=True, kw_only=True, tag="adagrad"):
    """A rate per parameter that falls with the gradients seen (Duchi et al. 2011).

    Dean et al. 2012, section 4.1: "eta_i,K = gamma / sqrt(sum_j=1..K dw_i,j^2)"; gamma is
    `learning_rate`, "generally larger (perhaps by an order of magnitude)" than the best fixed
    rate. The paper has no epsilon: 0 gives its formula, the default is torch's.
    """

    adaptive: ClassVar[bool] = True

    epsilon: float = 1e-10
    initial_accumulator: float = 0.0

    @override
    def _own_state(self, n: int, dtype: npt.DTypeLike) -> State:
        return {"sum_of_squares": np.full(n, self.initial_accumulator, dtype)}

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        step = torch.tensor(clock + 1, dtype=torch.float32)
        torch._fused_adagrad_(
            [w],
            [g],
            [state["sum_of_squares"]],
            [step],
            lr=rate,
            lr_decay=0.0,
            weight_decay=self.weight_decay,
            eps=max(self.epsilon, _denominator_min(w.dtype)),
            maximize=False,
        )


@final
@_documented
class RMSprop(_OwnRule, frozen=True, kw_only=True, tag="rmsprop", dict=True):
    """Adagrad with a decaying average (Tieleman & Hinton 2012), by `torch.optim.RMSprop`.

    Torch has no fused kernel for it: five passes, over pieces that stay in the cache.
    """

    adaptive: ClassVar[bool] = True
    several_passes: ClassVar[bool] = True

    smoothing: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0

    @override
    def _own_state(self, n: int, dtype: npt.DTypeLike) -> State:
        names = ("mean_square", "velocity") if self.momentum else ("mean_square",)
        return {name: np.zeros(n, dtype) for name in names}

    @cached_property
    def _steps(self) -> TorchSteps:
        keywords = {
            "alpha": self.smoothing,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }
        return TorchSteps(
            lambda parameters: torch_optimizers.optimizer("RMSprop", parameters, keywords),
            rate=self.rate,
        )

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        names = {"square_avg": "mean_square", "momentum_buffer": "velocity"}
        own = {key: state[names[key]] for key in self._steps.begins}
        eps = max(self.epsilon, _denominator_min(w.dtype))
        self._steps.later(w, g, own, clock=clock, rate=rate, eps=eps)


@final
@_documented
class Adam(_OwnRule, frozen=True, kw_only=True, tag="adam"):
    """Adaptive moments (Kingma & Ba 2015, Algorithm 1), as in `torch.optim.Adam`.

    The clock is the step t of the bias correction. With `decoupled_weight_decay` the parameters
    shrink by r d w, and d w is not added to the gradient: AdamW (Loshchilov & Hutter 2019).
    """

    adaptive: ClassVar[bool] = True
    counts_pushes: ClassVar[bool] = True  # for the bias correction
    has_velocity: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("mean", "mean_square")

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled_weight_decay: bool = False

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        kernel = torch._fused_adamw_ if self.decoupled_weight_decay else torch._fused_adam_
        step = torch.tensor(clock + 1, dtype=torch.float32)
        kernel(
            [w],
            [g],
            [state["mean"]],
            [state["mean_square"]],
            [],
            [step],
            lr=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=max(self.epsilon, _denominator_min(w.dtype)),
            amsgrad=False,
            maximize=False,
        )


# --- rules by torch ---


class TorchRule(_Rule, frozen=True, kw_only=True, dict=True):
    """An elementwise optimizer of `torch.optim`, by the name of its class and with its keywords.

    The clock is the number of its steps. What it gives are the bits of that optimizer in one
    process; a class for which that does not hold, as its steps depend on whole tensors, is refused.
    """

    adaptive: ClassVar[bool] = True
    several_passes: ClassVar[bool] = True
    counts_pushes: ClassVar[bool] = True
    keywords: ClassVar[tuple[str, ...]]

    learning_rate: float = msgspec.field(name="lr")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        user = f"rule {self.name!r}"
        require(self, user, "eps", lambda x: 0.0 < x < math.inf, "a finite number above 0")
        if self._options.get("maximize"):  # a replica's own steps would descend
            raise SettingError(f"{user}: maximize is true: leave it out, and negate the loss")
        with torch_optimizers.explaining(self.name, self._options, where=user):
            is_elementwise = self._gives_bits_of_whole_tensors()
        if not is_elementwise:
            raise SettingError(
                f"{user}: its steps depend on whole tensors, of which a shard holds parts: use an "
                "optimizer that treats each element by itself, such as 'AdamW'"
            )

    @property
    @override
    def has_velocity(self) -> bool:  # type: ignore[override]
        return bool({"exp_avg", "momentum_buffer"} & self._steps.begins.keys())

    @property
    @override
    def takes_rates(self) -> bool:
        return self._steps.takes_rates

    def _made(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        return torch_optimizers.optimizer(self.name, parameters, self._options)

    @property
    def _options(self) -> dict[str, object]:
        return {"lr": self.learning_rate} | {name: getattr(self, name) for name in self.keywords}

    @cached_property
    def _steps(self) -> TorchSteps:
        return TorchSteps(self._made, rate=self._trial_rate)

    def _trial_rate(self, clock: int) -> float:
        # Before `in_pushes` the schedule is not known, and nothing but the check below takes steps.
        return self.learning_rate if self.schedule.counted else self.rate(clock)

    @override
    def _own_state(self, n: int, dtype: npt.DTypeLike) -> State:
        return {name: np.full(n, value, dtype) for name, value in self._steps.begins.items()}

    @override
    def _update(self, w: Tensor, g: Tensor, state: Tensors, *, clock: int, rate: float) -> None:
        if clock == 0:
            self._steps.first(w, g, state, rate=rate)
        else:
            self._steps.later(w, g, state, clock=clock, rate=rate)

    def _gives_bits_of_whole_tensors(self) -> bool:
        start = torch.linspace(-1.0, 1.0, 2 * ALIGNMENT, dtype=torch.float32)
        start = start.view(2, ALIGNMENT)
        whole = nn.Parameter(start.clone())
        optimizer = self._made([whole])
        parts = [row.clone() for row in start]
        states = [
            {name: torch.from_numpy(one) for name, one in self._own_state(ALIGNMENT, "f").items()}
            for _ in parts
        ]
        for clock in range(3):
            # The rows differ in size, so that a mean over both would show.
            gradient = (start * (7.0 + clock)).sin() * torch.tensor(
                [[1.0], [100.0]], dtype=torch.float32
            )
            whole.grad = gradient.clone()
            rate = self._trial_rate(clock)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            for part, row, state in zip(parts, gradient, states, strict=True):
                self._update(part, row.clone(), state, clock=clock, rate=rate)
        return torch.equal(whole.detach(), torch.stack(parts))


_UNFIT_KEYWORDS: Final = {"capturable", "differentiable"}  # of no use on a shard


def _torch_rule(name: str, kind: type[Optimizer]) -> type[TorchRule]:
    fields: dict[str, object] = {}
    types: dict[str, object] = {}
    for key, one in inspect.signature(kind).parameters.items():
        default = one.default
        if key == "lr":
            types["learning_rate"] = float
            fields["learning_rate"] = msgspec.field(default=default, name="lr")
        elif default is None or isinstance(default, bool):
            types[key], fields[key] = (bool if isinstance(default, bool) else bool | None), default
        elif isinstance(default, tuple):
            types[key] = tuple.__class_getitem__((float,) * len(default))
            fields[key] = default
        elif isinstance(default, int | float):
            types[key], fields[key] = float, float(default)
    for key in _UNFIT_KEYWORDS & types.keys():
        del types[key], fields[key]
    keywords = tuple(key for key in types if key != "learning_rate")
    body = {"__annotations__": types, "__module__": __name__, "__doc__": kind.__doc__, **fields}
    body |= {"keywords": keywords, "elsewhere": {}, "adaptive": kind is not _SGD}
    made = CheckedArguments(name, (TorchRule,), body, tag=name, frozen=True, kw_only=True)
    return cast("type[TorchRule]", made)


_SGD: Final = torch.optim.SGD  # the rate of all elements is the same

TORCH_RULES: Final = {
    name: _torch_rule(name, kind)
    for name, kind in torch_optimizers.kinds_of(torch.optim, Optimizer).items()
    if name not in torch_optimizers.OF_WHOLE_TENSORS
}

if TYPE_CHECKING:
    UpdateRule = SGD | Momentum | DelayedNesterov | Adagrad | RMSprop | Adam | TorchRule
else:
    UpdateRule = Union[
        (SGD, Momentum, DelayedNesterov, Adagrad, RMSprop, Adam, *TORCH_RULES.values())
    ]


# --- groups ---


def rule_of(rule: UpdateRule, name: str) -> UpdateRule:
    matching = (one for pattern, one in rule.groups.items() if fnmatchcase(name, pattern))
    return next(matching, rule)


def check_groups(rule: UpdateRule, names: Iterable[str]) -> None:
    """Raise SettingError if a group of the rule is that of none of these parameters."""
    torch_optimizers.check_names(rule.groups, names, where="rule.groups")


def rules_on(rule: UpdateRule, layout: Layout, k: int) -> list[tuple[UpdateRule, IndexRanges]]:
    """Return the rules of shard k's parameters, and the elements of each, with their padding."""
    return [(one, ranges) for one, _, ranges in classes_on(rule, layout, k, (0,))]


def classes_on(
    rule: UpdateRule, layout: Layout, k: int, classes: tuple[int, ...]
) -> list[tuple[UpdateRule, int, IndexRanges]]:
    """Return the same for each class of parameters: one of all, or one for each in order."""
    n_gradient = layout.n_gradient(k)
    if not rule.groups and len(classes) == 1:
        return [(rule, classes[0], IndexRanges.whole(0, n_gradient))]
    parameters = [i for i, tensor in enumerate(layout.tensors) if tensor.kind == "parameter"]
    class_of = dict(zip(parameters, classes * len(parameters), strict=False))
    rules = [rule, *rule.groups.values()]
    found: dict[tuple[int, int], list[IndexRanges]] = {}
    for one in layout.segments(k):
        if one.offset < n_gradient:
            index = one.tensor_index
            key = rules.index(rule_of(rule, layout.tensors[index].name)), class_of[index]
            here = IndexRanges.whole(one.offset, one.offset + padded(one.n_elements))
            found.setdefault(key, []).append(here)
    return [
        (rules[place], which, IndexRanges.union(parts))
        for (place, which), parts in sorted(found.items())
    ]


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
    rule: SGD | Momentum, w: Tensor, g: Tensor, velocity: list[Tensor], *, clock: int, rate: float
) -> None:
    torch._fused_sgd_(
        [w],
        [g],
        velocity,
        weight_decay=rule.weight_decay,
        momentum=rule.momentum if isinstance(rule, Momentum) else 0.0,
        lr=rate,
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
