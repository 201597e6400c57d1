"""Objectives of more than one test."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import ThreadpoolController  # of scikit-learn

from sandblaster.optimizers.base import IterationDone
from sandblaster.optimizers.line_search import Found, Sample, Search
from tests.sandblaster.local import Function


Doubles = NDArray[np.float64]
ScipyMethod = Literal["L-BFGS-B", "CG", "BFGS"]


@dataclass(frozen=True, slots=True)
class Minimum:
    """What scipy found."""

    x: Doubles
    fun: float
    nfev: int


@dataclass(frozen=True, slots=True)
class Logistic:
    """Mean logistic loss of labels in {-1, 1}, plus l2 / 2 |w|^2."""

    inputs: Doubles  # (n, d)
    labels: Doubles  # (n,)
    l2: float = 0.0

    @classmethod
    def made(
        cls, n: int, d: int, *, condition: float = 1.0, l2: float = 0.0, seed: int = 0
    ) -> "Logistic":
        """Of normal inputs whose columns differ in size by `condition`."""
        rng = np.random.default_rng(seed)
        scales = np.geomspace(1.0, condition, d)
        inputs = rng.normal(size=(n, d)) * scales
        truth = rng.normal(size=d) / scales
        labels = np.where(inputs @ truth + rng.normal(size=n) > 0.0, 1.0, -1.0)
        return cls(inputs, labels, l2)

    def __call__(self, w: Doubles) -> tuple[float, Doubles]:
        inputs, labels = self.inputs, self.labels
        margins = labels * (inputs @ w)
        loss = np.logaddexp(0.0, -margins).mean() + 0.5 * self.l2 * w @ w
        weights = -labels / (1.0 + np.exp(np.minimum(margins, 500.0)))
        gradient = inputs.T @ weights / len(labels) + self.l2 * w
        return float(loss), gradient


class Seen(list[IterationDone]):
    """A callback that keeps every accepted point."""

    def __call__(self, done: IterationDone) -> bool:
        self.append(done)
        return False


def bowl(x: Doubles) -> tuple[float, Doubles]:
    """A quadratic with curvatures 1, 2, 3, ..."""
    curvatures = np.arange(1.0, len(x) + 1)
    return float(0.5 * curvatures @ x**2), curvatures * x


def search_to_end(search: Search, curve: Callable[[float], Sample]) -> tuple[Found, list[float]]:
    """Return what was found, and the steps tried."""
    tried = [next(search)]
    while True:
        try:
            tried.append(search.send(curve(tried[-1])))
        except StopIteration as end:
            found: Found = end.value
            return found, tried


def minimize_by_scipy(
    function: Function, x0: Doubles, name: ScipyMethod, *, exact: bool = False
) -> Minimum:
    """Minimise as scipy does by default, or (L-BFGS-B) as far as it can."""

    def plain(x: Doubles) -> tuple[float, Doubles]:
        return function(x)

    ftol, gtol = (0.0, 1e-10) if exact else (2.2e-9, 1e-5)
    # Its BLAS would wake threads for matrices of 20 x 20, at ten times the time.
    with np.errstate(all="ignore"), _blas().limit(limits=1):
        if name == "L-BFGS-B":
            found = minimize(
                plain,
                np.asarray(x0),
                jac=True,
                method=name,
                options={"maxiter": 15000, "ftol": ftol, "gtol": gtol},
            )
        else:
            found = minimize(
                plain,
                np.asarray(x0),
                jac=True,
                method=name,
                options={"maxiter": 15000, "gtol": gtol},
            )
    return Minimum(np.asarray(found.x), float(found.fun), int(found.nfev))


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()
