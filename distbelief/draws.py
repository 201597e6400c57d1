"""Random numbers that the user's code draws from the generators of the process.

torch, numpy and Python's `random` have one generator each, for all threads, and samples are read in
one thread while another takes a step. So code that draws runs alone, and from a seed of its own
that says what it computes: no thread disturbs another, and any process draws the same.

Code that does not draw waits for nobody. Whether some code draws is looked at when it runs for the
first time, the second, the fourth, the eighth, ...
"""

import random  # noqa: TID251 -- it is given seeds, and draws nothing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Final, final

import numpy as np
import torch


ALONE: Final = RLock()
"""Held by code that draws, or may draw."""


@final
class Draws:
    """Whether some code draws, as far as was seen, and how it runs."""

    def __init__(self) -> None:
        self.are_seen = False
        self._n_runs = 0

    @contextmanager
    def alone(self, seed: Callable[[], int]) -> Iterator[None]:
        """Let a block draw from this seed, alone; one that draws nothing runs as it is."""
        self._n_runs += 1
        if not (self.are_seen or self._n_runs & (self._n_runs - 1) == 0):
            yield
            return
        with ALONE:
            reseed(seed())
            before = None if self.are_seen else _states()
            yield
            self.are_seen = before is None or _states() != before


def reseed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 -- the generator of users' code, none of ours
    random.seed(seed)


def _states() -> object:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002 -- as above
    numbers = torch.default_generator.get_state().tolist()
    return numbers, np.asarray(keys).tobytes(), rest, random.getstate()
