"""Training over a ring, broken on purpose: each variant leaves out one rule."""

from typing import Final

from distbelief.core.vectors import Vector
from distbelief.worker.ring_values import RingValues
from tests.simulation.variants import Variants, Whole


VARIANTS: Final = Variants[int]()


@VARIANTS.replacing(RingValues, "restore", caught_by=0)
def survivors_keep_what_they_have(
    whole: Whole[None], self: RingValues, vector: Vector, step: int
) -> None:
    if not self.step:
        whole(self, vector, step)
    self.step = step


@VARIANTS.replacing(RingValues, "restore", caught_by=0)
def one_that_comes_gets_values_without_state(
    whole: Whole[None], self: RingValues, vector: Vector, step: int
) -> None:
    is_new = not self.step
    whole(self, vector, step)
    for state in self._state.values() if is_new and step else ():
        state[:] = 0
