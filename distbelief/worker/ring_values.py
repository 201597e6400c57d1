"""The parameters and the rule's state of a whole model, as each member of a ring has them.

    vector   gradients of the parameters | buffers | given | ended | of which tensors there are any

What a member gives to a step: its gradients, its running averages after it, whether it has given
any, and whether it has ended. The sums say by what to divide, when all have ended, and which
parameters must not move. Buffers become the mean of all members' (a counter is rounded). Parameters
lie as in the only shard of a job, so that the rule gives the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from distbelief.core.vectors import Vector, padded
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import UpdateRule, initial_state, rule_of


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    tensor: torch.Tensor  # of the model, flat
    here: "slice[int, int, None]"  # in the vector
    padded: "slice[int, int, None]"  # the same, with its padding
    rule: UpdateRule | None  # None: a buffer
    is_counter: bool
    index: int


@final
class RingValues:
    """Values and state; its methods work in the compute executor.

    Attributes:
        step: Gradients of all members together that were applied.
        all: Values, then the state: what a member needs to go on.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],  # flat; of the model
        specs: Mapping[int, TensorSpec],  # by item; frozen parameters are left out
        rule: UpdateRule,
        *,
        is_mean: bool,  # of the gradients, not their sum
        layout: Layout,  # of the shards
    ) -> None:
        tensors = list(specs.values())
        self.layout = Layout.of(tensors, n_shards=1, dtype=layout.spec.dtype)
        self.step = 0
        self._is_mean = is_mean
        items = {spec.name: item for item, spec in specs.items()}
        self._places: dict[int, _Place] = {}
        for index, one in enumerate(self.layout.segments(0)):
            spec = self.layout.tensors[one.tensor_index]
            item = items[spec.name]
            self._places[item] = _Place(
                values[item],
                slice(one.offset, one.offset + one.n_elements),
                slice(one.offset, one.offset + padded(one.n_elements)),
                rule_of(rule, spec.name) if spec.kind == "parameter" else None,
                spec.kind == "counter",
                index,
            )
        self._n = self.layout.shard_size(0)
        self._first_state = initial_state(rule, self.layout, 0)
        # Values, the state, and how many gradients each tensor has had.
        sizes = [self._n, *map(len, self._first_state.values()), len(self._places)]
        self.all = np.zeros(sum(sizes), layout.dtype)
        self._values, *state, self._clocks = np.split(self.all, np.cumsum(sizes[:-1]))
        self._state = dict(zip(self._first_state, state, strict=True))
        self.has_state = bool(self._first_state)

    def new_vector(self) -> Vector:
        return np.zeros(self._n + 2 + len(self._places), self.all.dtype)

    # --- what a member gives

    def give(self, gradients: Mapping[int, torch.Tensor], vector: Vector) -> bool:
        """Write gradients into a vector; return whether they are finite, else there are none."""
        vector[:] = 0
        for item, place in self._places.items():
            given = place.tensor if place.rule is None else gradients.get(item)
            if given is not None:
                torch.from_numpy(vector[place.here]).copy_(given)
                vector[self._n + 2 + place.index] = 1
        with np.errstate(all="ignore"):  # a sum of finite numbers may overflow
            is_finite = bool(np.isfinite(vector.sum())) or bool(np.isfinite(vector).all())
        if not is_finite:
            vector[:] = 0
        vector[self._n] = is_finite
        return is_finite

    def give_nothing(self, vector: Vector, *, has_ended: bool) -> None:
        vector[:] = 0
        vector[self._n + 1] = has_ended

    # --- what comes of it

    def take(self, total: Vector) -> tuple[int, int]:
        """Apply the sum of a step; return how many have given, and how many have ended."""
        n_given, n_ended = int(total[self._n]), int(total[self._n + 1])
        for place in self._places.values():
            if place.rule is None and n_given:
                mean = total[place.here] / n_given
                self._values[place.here] = np.rint(mean) if place.is_counter else mean
            elif place.rule is not None and total[self._n + 2 + place.index]:
                self._apply(place, place.rule, total[place.padded], n_given)
        self._load()
        self.step += n_given > 0
        return n_given, n_ended

    def _apply(self, place: _Place, rule: UpdateRule, gradient: Vector, n_given: int) -> None:
        if self._is_mean and n_given > 1:
            gradient = gradient * gradient.dtype.type(1.0 / n_given)
        state = {name: self._state[name][place.padded] for name in rule.state(0, gradient.dtype)}
        clock = int(self._clocks[place.index])
        rule.apply(self._values[place.padded], gradient, state, clock=clock)
        self._clocks[place.index] += 1

    def _load(self) -> None:
        for place in self._places.values():
            place.tensor.copy_(torch.from_numpy(self._values[place.here]))

    # --- where it begins

    def begin(self, step: int) -> None:
        """Begin with the model's values after so many steps, and without what the rule knew."""
        self._clocks[:] = step
        for name, vector in self._first_state.items():
            self._state[name][:] = vector
        self._values[:] = 0
        for place in self._places.values():
            torch.from_numpy(self._values[place.here]).copy_(place.tensor)

    def restore(self, whole: Vector, step: int) -> None:
        """Go on with what `all` was after so many steps."""
        self.all[:] = whole
        self.step = step
        self._load()
