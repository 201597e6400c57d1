"""The order of the data: fixed for a job, endless, circular.

Position p is sample `order[p mod n]`. A batch of all n examples is read the same way
whichever position it begins at, and a smaller one is a window that can be moved on, or
moved half-way, so that two batches overlap.
"""

from typing import final

import numpy as np

from distbelief.data.subset import Indices
from distbelief.errors import JobError


@final
class Samples:
    """The samples of a data set, by position.

    Args:
        n_samples: Of the data set.
        seed: Of the order; None: as they come.
    """

    def __init__(self, n_samples: int, *, seed: int | None = None) -> None:
        if n_samples < 1:
            raise JobError(f"the training data has {n_samples} samples: a batch needs at least one")
        self.n_samples = n_samples
        order = np.arange(n_samples, dtype=np.int64)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        self._order = order

    def at(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop), (stop - start,)."""
        return self._order[np.arange(start, stop) % self.n_samples]
