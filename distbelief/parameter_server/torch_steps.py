"""Steps of an optimizer of torch, whose state lies in the vectors of a shard.

    vector   exp_avg, square_avg, ...    one number per element: a part of it is torch's own state
    number   step, mu_product, ...       the same for all elements; it follows from the clock

A step begins with neither before an element's first push; then torch makes both by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distbelief.core.vectors import ALIGNMENT


_N_KNOWN_MAX: Final = 8  # clocks whose numbers are kept: parts of a shard differ in their clocks

Make = Callable[[Sequence[nn.Parameter]], Optimizer]
Numbers = dict[str, Tensor]


@final
class TorchSteps:
    """Holds nothing of a shard: several may use it at once."""

    def __init__(self, make: Make, *, rate: Callable[[int], float]) -> None:
        self._make = make
        self._rate = rate  # at a clock
        zeros = _with_gradient(*torch.zeros(2, ALIGNMENT, dtype=torch.float32))
        self._template = make([zeros])
        first = make([zeros])
        first.param_groups[0]["lr"] = rate(0)
        first.step()
        state = {key: one for key, one in first.state[zeros].items() if isinstance(one, Tensor)}
        # A step without a gradient from zero leaves a vector as it begins.
        self.begins = {key: one[0].item() for key, one in state.items() if one.dim()}
        self._known = {1: {key: one for key, one in state.items() if not one.dim()}}

    @property
    def takes_rates(self) -> bool:
        """Whether what follows from the clock does so at any rate: not the eta of ASGD."""
        return self._known[1].keys() <= {"step", "mu_product"}

    def first(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], *, rate: float) -> None:
        """Update elements that were never pushed, and fill their state."""
        parameter = _with_gradient(w, g)
        self._step(self._make([parameter]), parameter, state, {"lr": rate})

    def later(
        self,
        w: Tensor,
        g: Tensor,
        state: Mapping[str, Tensor],
        *,
        clock: int,
        rate: float,
        **settings: float,
    ) -> None:
        """Update elements and their state in place; `settings` replace those of the optimizer."""
        parameter = _with_gradient(w, g)
        numbers = self._numbers(clock)
        optimizer = self._resumed(parameter, {**state, **numbers})
        self._step(optimizer, parameter, state, {"lr": rate, **settings})

    def _step(
        self,
        optimizer: Optimizer,
        parameter: nn.Parameter,
        state: Mapping[str, Tensor],
        settings: Mapping[str, float],
    ) -> None:
        optimizer.param_groups[0].update(settings)
        optimizer.step()
        for key, vector in state.items():
            updated = optimizer.state[parameter][key]
            if updated is not vector:
                vector.copy_(updated)

    def _resumed(self, parameter: nn.Parameter, state: Numbers) -> Optimizer:
        # A copy of the template: to make an optimizer takes longer than a step of 2^16 elements.
        optimizer = object.__new__(type(self._template))
        vars(optimizer).update(vars(self._template))
        optimizer.param_groups = [{**self._template.param_groups[0], "params": [parameter]}]
        optimizer.state = {parameter: state}  # type: ignore[assignment]
        return optimizer

    def _numbers(self, clock: int) -> Numbers:
        """Return what is the same for all elements after so many pushes."""
        names = self._known[1].keys()
        if clock == 0 or names <= {"step"}:
            return {key: torch.full_like(one, clock) for key, one in self._known[1].items()}
        at = max(one for one in self._known if one <= clock)
        numbers = {key: one.clone() for key, one in self._known[at].items()}
        zeros = _with_gradient(*torch.zeros(2, ALIGNMENT, dtype=torch.float32))
        vectors = {key: torch.full_like(zeros, one) for key, one in self.begins.items()}
        optimizer = self._resumed(zeros, {**vectors, **numbers})
        for one in range(at, clock):
            self._step(optimizer, zeros, {}, {"lr": self._rate(one)})
        if clock not in self._known:
            newest = sorted({*self._known, clock})[1 - _N_KNOWN_MAX :]
            after = {key: optimizer.state[zeros][key].clone() for key in names}
            self._known = {
                1: self._known[1],
                **{one: self._known.get(one, after) for one in newest},
            }
        return {key: optimizer.state[zeros][key] for key in names}


def _with_gradient(w: Tensor, g: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(w, requires_grad=False)
    parameter.grad = g
    return parameter
