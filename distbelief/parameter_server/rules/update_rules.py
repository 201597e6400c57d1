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
from torch import Tensor
from typing_extensions import override

from distbelief.parameter_server.rules.schedules import Constant, Schedule
from distbelief.vectors import ALIGNMENT, Vector


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
            "use one of distbelief.parameter_server.rules.schedules, "
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
